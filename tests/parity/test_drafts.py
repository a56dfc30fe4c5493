"""Decoding with drafts against decoding without: the same logits, tokens and states, whatever is guessed."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.drafts.gate import DepthGate
from runtime.drafts.lookup import PromptLookup
from runtime.drafts.passes import Drafting
from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.models import qwen
from runtime.sampling import SamplingParams
from runtime.session import Session
from tests.dense_models import SIZES, open_dense
from tests.parity.qwen_mtp import make_mtp_snapshot
from tests.parity.row_checks import check_rows, same

MOST_ROWS = 5
ENGINES = ("tiny", "tiny_deepseek", "mtp")  # the last: the first with a random draft head
PROMPT = 21  # tokens; not a whole number of the indexer's blocks


class DenseTensors:
    """A dense model whose states can be compared as the others' are."""

    def __init__(self, model):
        self.prefill, self.decode, self.attempt = model.prefill, model.decode, model.attempt
        self.model = model

    def new_state(self):
        state = self.model.new_state()

        def tensors():
            parts = {"keys": state.keys, "values": state.values}
            return {
                f"{name}.{i}": part[: state.position].clone()
                for name, each in parts.items()
                for i, part in enumerate(each)
            }

        state.tensors = tensors
        return state


@pytest.fixture(scope="module")
def engines(tiny_files, make_config, tiny_qwen, tmp_path_factory):
    """Engines of the bundled models whose cache has no more room than one token's route needs."""
    snapshot = make_mtp_snapshot(tiny_qwen, tmp_path_factory.mktemp("mtp"))
    files = {
        "tiny": tiny_files,
        "tiny_deepseek": EngineFiles(tiny_qwen.parent / "tiny-deepseek"),
        "mtp": replace(tiny_files, snapshot=snapshot),
    }
    found = {}
    for name in ENGINES:
        fields = {"cache.ram_gib": 0.0, "prefetch.experts": 1, "drafts.enabled": name == "mtp"}
        config = make_config(name.replace("mtp", "tiny"), **fields)
        found[name] = Engine.open(config, files[name])
    yield found
    for engine in found.values():
        engine.close()


@pytest.fixture(scope="module")
def models(engines, tmp_path_factory):
    """Each family's model, and one more of the first whose experts are all at hand."""
    folder = tmp_path_factory.mktemp("dense")
    torch.manual_seed(4)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    dense = DenseTensors(open_dense(folder, cache_rows=1))
    return {name: engine.model for name, engine in engines.items()} | {"dense": dense}


def text(model_name, heldout_tokens, count):
    """Tokens with two ends of documents in a row, which the n-gram embedding looks at."""
    tokens = heldout_tokens[:count]
    if model_name == "dense":
        return [token % SIZES["vocab_size"] for token in tokens]
    tokens[PROMPT + 1 : PROMPT + 3] = [0, 0]
    return tokens


# ---- rows of a pass --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [PROMPT, 130])
@pytest.mark.parametrize("name", [*ENGINES, "dense"])
def test_rows_are_single_steps_and_rejected_ones_leave_no_trace(
    models, heldout_tokens, name, start
):
    check_rows(models[name], text(name, heldout_tokens, 160), start, MOST_ROWS)


def test_rows_at_once_would_not_be_single_steps(models, heldout_tokens):
    """Why every row goes alone: a prompt of the same tokens sums its products in another order."""
    model = models["tiny"]
    one, many = model.new_state(), model.new_state()
    for state in (one, many):
        model.prefill(heldout_tokens[:PROMPT], state)
    rows = heldout_tokens[PROMPT : PROMPT + MOST_ROWS]
    singles = torch.cat([model.decode(token, one) for token in rows])
    assert not torch.equal(model.prefill(rows, many, all_logits=True), singles)


def test_each_expert_is_fetched_once_a_pass(models, heldout_tokens, monkeypatch):
    model, asked = models["tiny"], []
    state = model.new_state()
    model.prefill(heldout_tokens[:PROMPT], state)
    fetch = model.experts.fetch

    def noted(layer, ids, guesses=()):
        asked.extend((layer, expert) for expert in ids)
        return fetch(layer, ids, guesses)

    monkeypatch.setattr(model.experts, "fetch", noted)
    model.attempt(heldout_tokens[PROMPT : PROMPT + MOST_ROWS], state)
    assert len(asked) == len(set(asked))
    assert model.spec.num_layers * model.spec.top_k < len(asked)
    assert len(asked) < MOST_ROWS * model.spec.num_layers * model.spec.top_k


def test_a_dense_layer_is_read_once_a_pass(models):
    dense = models["dense"].model
    state = dense.new_state()
    read = []
    for rows in ([2], [3], [4, 5, 6, 7, 8]):  # the first fills what is kept
        dense.attempt(rows, state)
        read.append(dense.experts.counters.read_nbytes)
    assert read[2] - read[1] == read[1] - read[0] > 0


# ---- answers ---------------------------------------------------------------------------------------------------------


class Adversary:
    """Knows the answer and guesses some of it, as told, then wrongly."""

    def __init__(self, prompt, answer, plan, vocabulary):
        self.start, self.answer, self.plan = len(prompt), answer, list(plan)
        self.random, self.vocabulary = random.Random(5), vocabulary

    def propose(self, tokens, token, state, depth):
        at = len(tokens) - self.start
        assert self.answer[at] == token
        right = self.plan.pop(0) if self.plan else 0
        following = self.answer[at + 1 : at + 1 + min(right, depth)]
        wrong = [self.random.randrange(self.vocabulary) for _ in range(depth - len(following))]
        return following + wrong


def drafting_of(model, source, depth, gate=None):
    clock = iter(range(10**9))
    return Drafting(model, source, "test", depth, lambda: 0, gate, lambda: next(clock))


def answer(engine, prompt, params, drafting=None):
    """Return (pieces' tokens, log-probabilities and events, timeline, state) of one answer."""
    engine.drafting = drafting
    session = Session(engine)
    pieces = list(session.generate(prompt, params))
    engine.drafting = None
    told = [(p.token, p.logprob, tuple(p.events), p.finish) for p in pieces]
    return told, session.tokens, session._state.tensors(), session._logits


def assert_same_answers(found, wanted):
    assert found[0] == wanted[0]
    assert found[1] == wanted[1]
    assert same(found[2], wanted[2])
    assert torch.equal(found[3], wanted[3])


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 40]),
    seed=st.integers(0, 2**40),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 2]),
    max_tokens=st.integers(1, 14),
)


@settings(max_examples=12)
@given(
    params=SAMPLINGS,
    plan=st.lists(st.integers(0, MOST_ROWS), max_size=14),
    depth=st.integers(1, MOST_ROWS - 1),
    name=st.sampled_from(ENGINES),
)
def test_answers_are_the_same_whatever_is_guessed(
    engines, heldout_tokens, params, plan, depth, name
):
    engine, prompt = engines[name], heldout_tokens[:PROMPT]
    wanted = answer(engine, prompt, params)
    known = [token for token, *_ in wanted[0]]
    adversary = Adversary(prompt, known, plan, engine.num_tokens)
    found = answer(engine, prompt, params, drafting_of(engine.model, adversary, depth))
    assert_same_answers(found, wanted)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**40),
    temperature=st.sampled_from([0.0, 1.5]),
    plan=st.lists(st.integers(0, MOST_ROWS), max_size=14),
)
def test_dense_answers_are_the_same_whatever_is_guessed(models, seed, temperature, plan):
    from runtime.sampling import Sampler

    model, prompt, count = models["dense"], list(range(PROMPT)), 14
    params = SamplingParams(temperature=temperature, seed=seed)
    state, sampler = model.new_state(), Sampler(params, SIZES["vocab_size"])
    wanted = [sampler(model.prefill(prompt, state))]
    while len(wanted) < count:
        wanted.append(sampler(model.decode(wanted[-1], state)))
    other, sampler = model.new_state(), Sampler(params, SIZES["vocab_size"])
    found = [sampler(model.prefill(prompt, other))]
    drafting = drafting_of(model, Adversary(prompt, wanted, plan, SIZES["vocab_size"]), 4)
    while len(found) < count:
        fed = prompt + found[:-1]
        found += drafting.run(fed, found[-1], other, count - len(found), sampler).drawn
    assert found == wanted
    assert same(other.tensors(), state.tensors())


@pytest.mark.parametrize("name", ENGINES[:2])
def test_look_up_finds_what_a_model_repeats_and_changes_nothing(engines, heldout_tokens, name):
    engine, params = engines[name], SamplingParams(temperature=0.0, max_tokens=30)
    prompt = heldout_tokens[:30] * 2
    wanted = answer(engine, prompt, params)
    drafting = drafting_of(engine.model, PromptLookup([3, 2, 1]), 3, DepthGate(3))
    assert_same_answers(answer(engine, prompt, params, drafting), wanted)
    assert drafting.proposed > drafting.accepted > 0
    assert drafting.passes + drafting.accepted == 29
    report = drafting.report()["gate"]
    assert sum(depth["passes"] for depth in report["depths"]) == drafting.passes


def test_an_answer_that_is_left_in_the_middle_of_a_pass(engines, heldout_tokens):
    """The conversation goes on as without drafts, also when some rows were accepted but not given out."""
    engine, prompt = engines["tiny"], heldout_tokens[:PROMPT]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    known = [token for token, *_ in answer(engine, prompt, params)[0]]
    for taken in (1, 2, 4, 7):
        states = []
        for drafting in (None, drafting_of(engine.model, Adversary(prompt, known, [4, 1, 5], 99), 4)):  # fmt: skip
            engine.drafting = drafting
            session = Session(engine)
            pieces = session.generate(prompt, params)
            assert [next(pieces).token for _ in range(taken)] == known[:taken]
            pieces.close()
            engine.drafting = None
            assert session.tokens == prompt + known[: taken - 1]
            states.append(session._state.tensors())
        assert same(*states)


def test_an_error_in_a_pass_resets_the_session(engines, heldout_tokens, monkeypatch):
    engine = engines["tiny"]
    broken = SimpleNamespace(propose=lambda *_: [1, 2])
    engine.drafting = drafting_of(engine.model, broken, 2)

    def fail(*_):
        raise OSError("the drive is gone")

    session = Session(engine)
    pieces = session.generate(heldout_tokens[:PROMPT], SamplingParams(max_tokens=5))
    next(pieces)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "attempt", fail)
        with pytest.raises(OSError, match="the drive is gone"):
            next(pieces)
    assert session.tokens == []
    engine.drafting = None
    assert_same_answers(
        answer(engine, heldout_tokens[:PROMPT], SamplingParams(temperature=0.0, max_tokens=3)),
        answer(engine, heldout_tokens[:PROMPT], SamplingParams(temperature=0.0, max_tokens=3)),
    )


# ---- opening ---------------------------------------------------------------------------------------------------------


def test_the_source_is_chosen_by_what_the_checkpoint_has(open_tiny):
    engine = open_tiny(**{"drafts.enabled": True, "drafts.depth": 2})
    report = engine.drafting.report()
    assert (report["source"], report["depth"]) == ("lookup", 2)
    assert len(report["gate"]["depths"]) == 3
    qwen.check_support(engine.model.spec, engine.config, torch.device("cuda"))
    plain = open_tiny().plan.state_nbytes
    assert engine.plan.state_nbytes - plain == 3 * 6 * (4 * 4 * 64 * 64 + 4 * 3 * 512), "of 3 rows"
    with pytest.raises(UserError, match="this checkpoint has no draft heads"):
        open_tiny(**{"drafts.enabled": True, "drafts.source": "heads"})


def test_more_rows_than_a_window_are_refused(make_config, tiny_qwen):
    files = EngineFiles(tiny_qwen.parent / "tiny-deepseek")
    window = Engine.open(make_config("tiny_deepseek"), files)
    size = window.model.spec.window
    window.close()
    with pytest.raises(UserError, match=f"windows of {size} positions only"):
        Engine.open(
            make_config("tiny_deepseek", **{"drafts.enabled": True, "drafts.depth": size}), files
        )
