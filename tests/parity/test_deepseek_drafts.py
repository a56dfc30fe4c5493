"""The draft heads against the reference's records, and greedy decoding with them against greedy decoding without."""

from __future__ import annotations

import functools
import random
import statistics

import pytest
import torch

from runtime.drafts.heads import HeadedModel, Proposal
from runtime.drafts.passes import Drafting
from runtime.models.deepseek_drafts import Drafts, TappedModel
from runtime.models.deepseek_model import Choice
from tests.parity.deepseek_golden import (
    GOLDEN,
    LAYER_BOUND,
    MAX_POSITIONS,
    MEDIAN_BOUND,
    PROMPTS,
    MemoryExperts,
    golden,
    make_model,
    open_record,
    relative_error,
    row_errors,
    weights_of,
)

SMALL_MARGIN = 0.01  # of a choice, logits or router scores: below it another order of sums may choose otherwise
STEPS = 24  # recorded passes of the drafts
ANSWER = 12


@pytest.fixture(scope="module")
def plain():
    return make_model()


@pytest.fixture(scope="module")
def tapped(plain):
    weights = weights_of(GOLDEN / "checkpoint")
    return TappedModel(
        plain.spec,
        weights,
        MemoryExperts(weights),
        plain.open_expert,
        plain.engram_rows,
        plain.row_ids,
        MAX_POSITIONS,
    )


@pytest.fixture(scope="module")
def drafts(tapped):
    weights = weights_of(GOLDEN / "checkpoint")
    experts = {
        name.replace("mtp.", "layers."): tensor
        for name, tensor in weights.items()
        if "mtp." in name
    }
    return Drafts(
        tapped, weights, MemoryExperts(experts), functools.partial(open_record, tapped.spec)
    )


@pytest.fixture
def routes(drafts, monkeypatch):
    """Experts and weights that each stage chose in its last run."""
    found = {}

    def record(stage, route, u):
        found[stage] = route(u)
        return found[stage]

    for block in drafts.stages.blocks:
        monkeypatch.setattr(
            block.moe, "route", functools.partial(record, block.layer, block.moe.route)
        )
    return found


@pytest.fixture(scope="module")
def answers(plain):
    """Plain greedy continuations, one token at a time."""
    found = {}
    for name in PROMPTS:
        state = plain.new_state()
        logits = plain.prefill(prompt_of(name), state)
        tokens = [int(logits[0].argmax())]
        while len(tokens) < ANSWER + 3:
            tokens.append(int(plain.decode(tokens[-1], state)[0].argmax()))
        found[name] = tokens
    return found


def prompt_of(name):
    return golden(f"model_{name}")["input_ids"].tolist()


def recorded_taps(name):
    records = golden(f"model_{name}")
    return torch.cat([records["prefill.main_hidden"], records["decode.main_hidden"]])


def different(a, b):
    """Name what is not bit-equal in two states."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


# ---- taps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROMPTS)
def test_taps_are_recorded_and_change_no_logits(plain, tapped, name):
    tokens, state, other = prompt_of(name), tapped.new_state(), plain.new_state()
    found = tapped.prefill(tokens, state, all_logits=True)
    assert torch.equal(found, plain.prefill(tokens, other, all_logits=True))
    taps = [tapped.taps()]
    for token in golden(f"model_{name}")["decode.tokens"][:4].tolist():
        assert torch.equal(tapped.decode(token, state), plain.decode(token, other))
        taps.append(tapped.taps())
    wanted = recorded_taps(name)[: len(tokens) + 4]
    errors = [relative_error(*rows) for rows in zip(torch.cat(taps), wanted, strict=True)]
    assert statistics.median(errors) < LAYER_BOUND
    assert statistics.mean(error < LAYER_BOUND for error in errors) > 0.97


# ---- the stages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_from_recorded_inputs(drafts, step, stage):
    records, state = golden("layers_p40"), drafts.new_state()
    drafts.seed((), recorded_taps("p40")[: 41 + step], state)
    part, start = f"dspark{step}.mtp{stage}", 41 + step
    block = drafts.stages.blocks[stage]
    ring = records[f"{part}.sparse_attn.kv"][: drafts.spec.window]
    assert relative_error(state.window(stage, start), ring) < LAYER_BOUND
    with torch.inference_mode():
        streams, pre = drafts.stages.run_block(
            block, records[f"{part}.h_in"], records[f"{part}.pre_mix_in"], start, Choice(), state
        )
        cos, sin = drafts.stages.tables[0]
        y = block.attention(records[f"{part}.attn_in"], start, Choice(), state, cos, sin)
        z = block.moe(records[f"{part}.ffn_in"], drafts.stages.experts, drafts.stages.open_expert)
    for found, what in ((streams, "h_out"), (pre, "pre_mix_out"), (y, "attn_out"), (z, "ffn_out")):
        assert relative_error(found, records[f"{part}.{what}"]) < LAYER_BOUND, what


@pytest.mark.parametrize("name", PROMPTS)
def test_proposals_from_recorded_taps(drafts, routes, name):
    """Tokens and experts are demanded where no choice of the record or of the run was close."""
    records, state = golden(f"model_{name}"), drafts.new_state()
    taps, length = recorded_taps(name), len(prompt_of(name))
    drafts.seed((), taps[:length], state)
    logit_errors, confidence_errors, compared = [], [], 0
    for step in range(STEPS):
        drafts.seed((), taps[length + step : length + step + 1], state)
        first, *wanted = records["dspark.output_ids"][step].tolist()
        found = drafts.propose(first, state, drafts.block)
        best = found.logits.topk(2).values
        margins = (best[:, 0] - best[:, 1]).tolist()
        is_clear = True
        for stage, (ids, weights) in routes.items():
            recorded = f"dspark.router.{drafts.spec.num_drafts + 4 + stage}"
            is_clear &= bool((records[f"{recorded}.margin"][step] > SMALL_MARGIN).all())
            if is_clear:
                assert torch.equal(
                    ids.sort(1).values, records[f"{recorded}.indices"][step].sort(1).values
                )
                assert torch.allclose(
                    weights.sort(1).values,
                    records[f"{recorded}.weights"][step].sort(1).values,
                    atol=0.01,
                )
        is_clear &= all(margin > SMALL_MARGIN for margin in margins)
        if not is_clear and found.tokens != wanted:
            continue
        assert found.tokens == wanted
        compared += 1
        confidence_errors += (found.confidence - records["dspark.confidence"][step]).abs().tolist()
        if step < len(records["dspark.logits"]):
            logit_errors += row_errors(found.logits, records["dspark.logits"][step]).tolist()
    assert compared >= STEPS - 2
    assert statistics.median(logit_errors) < MEDIAN_BOUND
    assert statistics.median(confidence_errors) < 1e-4
    assert max(confidence_errors) < 0.05


def test_a_smaller_depth_gives_the_first_of_the_block(drafts):
    state = drafts.new_state()
    drafts.seed((), recorded_taps("p40")[:33], state)
    whole = drafts.propose(7, state, drafts.block)
    for depth in range(1, drafts.block):
        part = drafts.propose(7, state, depth)
        assert part.tokens == whole.tokens[:depth]
        assert torch.allclose(part.logits, whole.logits[:depth], atol=1e-4)


@pytest.mark.parametrize("sizes", [(1,), (3, 40, 2, 1), (124,)])
def test_seeding_in_pieces(drafts, sizes):
    taps, whole, state, at = recorded_taps("p100"), drafts.new_state(), drafts.new_state(), 0
    drafts.seed((), taps, whole)
    while at < len(taps):
        size = sizes[at % len(sizes)]
        drafts.seed((), taps[at : at + size], state)
        at += size
    assert not different(state.tensors(), whole.tensors())


@pytest.mark.parametrize("kept", [5, 15, 16, 17, 60])
def test_rejected_seeds_leave_no_trace(drafts, kept):
    taps, clean, state = recorded_taps("p100"), drafts.new_state(), drafts.new_state()
    drafts.seed((), taps[:kept], clean)
    drafts.seed((), taps[:kept], state)
    for rejected in (1, drafts.block + 1):
        drafts.seed((), taps[-rejected:], state)
        state.take_back(kept)
        assert not different(state.tensors(), clean.tensors())
        assert torch.equal(drafts.propose(7, state, 3).logits, drafts.propose(7, clean, 3).logits)


def test_what_the_rings_lost_is_not_taken_back(drafts):
    taps, state = recorded_taps("p100"), drafts.new_state()
    drafts.seed((), taps[:60], state)
    with pytest.raises(ValueError, match="cannot go back to 55"):
        state.take_back(55)
    state.take_back(56)
    drafts.seed((), taps[56:58], state)
    with pytest.raises(ValueError, match="cannot go back to 55"):
        state.take_back(55)
    copy = drafts.new_state()
    copy.restore(state.tensors())
    assert torch.equal(drafts.propose(7, state, 3).logits, drafts.propose(7, copy, 3).logits)
    with pytest.raises(ValueError, match="cannot go back to 57"):
        copy.take_back(57)


# ---- the main model's way back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [1, 14, 40, 41])
@pytest.mark.parametrize("rows", [1, 4])
def test_rejected_rows_leave_no_trace(tapped, before, rows):
    tokens, clean = prompt_of("p100"), tapped.new_state()
    tapped.prefill(tokens[:before], clean)
    base = clean.tensors()
    accepted = tokens[before : before + rows]
    for kept in range(rows + 1):
        states = []
        for rejected in (accepted[kept:], [400 + i for i in range(rows - kept)]):
            state = tapped.new_state()
            state.restore(base)
            step = tapped.attempt(accepted[:kept] + rejected, state)
            step.keep(kept)
            states.append(state)
        clean.restore(base)
        for token in accepted[:kept]:
            tapped.decode(token, clean)
        for state in states:
            assert not different(state.tensors(), clean.tensors())
        token = tokens[before + rows]
        assert torch.equal(tapped.decode(token, states[0]), tapped.decode(token, clean))


def test_more_rows_than_the_window_are_refused(tapped):
    with pytest.raises(ValueError, match="17 rows"):
        tapped.attempt([1] * (tapped.spec.window + 1), tapped.new_state())


# ---- greedy decoding -----------------------------------------------------------------------------------------------


class Oracle:
    """Drafts that know the answer and spoil some of it."""

    def __init__(self, drafts, prompt, answer, seed):
        self.inner, self.block, self.new_state, self.seed = (
            drafts,
            drafts.block,
            drafts.new_state,
            drafts.seed,
        )
        self.prompt, self.answer, self.random = prompt, answer, random.Random(seed)

    def propose(self, token, state, depth):
        at = state.position - len(self.prompt)
        assert self.answer[at] == token
        guesses = self.answer[at + 1 : at + 1 + depth]
        wrong = self.random.randrange(depth + 1)
        if wrong < depth:
            guesses[wrong] ^= 1
        return Proposal(guesses, torch.empty(0), torch.empty(0))


class GreedyDrafting:
    """One conversation, decoded with drafts. All tokens told so far have been fed, except the last."""

    def __init__(self, model, drafts, depth):
        self.model = HeadedModel(model, drafts)
        self.drafting = Drafting(self.model, self.model, "heads", depth, lambda: 0)
        self.conversation = self.model.new_state()
        self.state, self.draft_state = self.conversation.main, self.conversation.heads

    def read(self, tokens):
        return greedy(self.model.prefill(tokens, self.conversation))

    def step(self, token, wanted, stops=()):
        return self.drafting.run((), token, self.conversation, wanted, greedy, stops)

    def generate(self, prompt, max_tokens, stops=()):
        out, told = [self.read(prompt)], 0
        while True:
            yield from out
            told += len(out)
            if told >= max_tokens or out[-1] in stops:
                return
            found = self.step(out[-1], max_tokens - told, stops)
            out = found.drawn
            assert found.tokens[1:] == out[:-1]


def greedy(logits):
    return int(logits[-1].argmax())


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_with_drafts_is_greedy_without(tapped, drafts, answers, name, depth):
    drafting = GreedyDrafting(tapped, drafts, depth)
    assert list(drafting.generate(prompt_of(name), ANSWER)) == answers[name][:ANSWER]
    counts = drafting.drafting
    assert counts.passes + counts.accepted == ANSWER - 1
    assert counts.accepted <= counts.proposed <= depth * counts.passes
    assert (
        drafting.state.position
        == drafting.draft_state.position
        == len(prompt_of(name)) + ANSWER - 1
    )


@pytest.mark.parametrize("name", ["p7", "p40"])
@pytest.mark.parametrize("seed", [1, 2])
def test_accepted_runs_of_every_length(tapped, plain, drafts, answers, name, seed):
    prompt, answer = prompt_of(name), answers[name]
    drafting = GreedyDrafting(tapped, Oracle(drafts, prompt, answer, seed), depth=3)
    assert list(drafting.generate(prompt, ANSWER)) == answer[:ANSWER]
    assert drafting.drafting.accepted >= 4
    clean, rings = plain.new_state(), drafts.new_state()
    plain.prefill(prompt, clean)
    for token in answer[: ANSWER - 1]:
        plain.decode(token, clean)
    assert not different(drafting.state.tensors(), clean.tensors())
    tapped.prefill(prompt + answer[: ANSWER - 1], tapped.new_state())
    drafts.seed((), tapped.taps(), rings)
    assert not different(drafting.draft_state.tensors(), rings.tensors())


def test_nothing_is_fed_behind_a_stop(tapped, drafts, answers):
    prompt, answer = prompt_of("p40"), answers["p40"]
    stop = answer[5]
    count = answer.index(stop) + 1
    for seed in range(2):
        drafting = GreedyDrafting(tapped, Oracle(drafts, prompt, answer, seed), depth=3)
        assert list(drafting.generate(prompt, ANSWER, {stop})) == answer[:count]
        assert drafting.state.position == len(prompt) + count - 1
        again = drafting.read([stop])  # a next turn goes on from here
        assert again == answer[count]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_pass_is_taken_back_in_part(tapped, plain, drafts, answers, seed):
    """An answer may end in the middle of a pass: the conversation is as if only what was told had been fed."""
    prompt, answer = prompt_of("p40"), answers["p40"]
    drafting, clean = (
        GreedyDrafting(tapped, Oracle(drafts, prompt, answer, seed), 3),
        plain.new_state(),
    )
    plain.prefill(prompt, clean)
    state, at = drafting.conversation, 0
    drafting.read(prompt)
    while at < ANSWER - 4:
        found = drafting.step(answer[at], ANSWER)
        kept = (len(found.tokens) + 1) // 2
        found.keep(kept)
        for token in answer[at : at + kept]:
            plain.decode(token, clean)
        at += kept
        assert not different(state.main.tensors(), clean.tensors())
        assert state.heads.position == state.position == len(prompt) + at
    copy = drafting.model.new_state()
    copy.restore(state.tensors())
    assert not different(copy.tensors(), state.tensors())


def test_the_end_of_the_window_is_reached(tapped, plain, drafts):
    tokens, state = (prompt_of("p100") * 2)[: MAX_POSITIONS - 3], plain.new_state()
    wanted = [int(plain.prefill(tokens, state)[0].argmax())]
    for _ in range(3):
        wanted.append(int(plain.decode(wanted[-1], state)[0].argmax()))
    drafting = GreedyDrafting(tapped, drafts, drafts.block)
    assert list(drafting.generate(tokens, 4)) == wanted
    assert drafting.state.position == MAX_POSITIONS
