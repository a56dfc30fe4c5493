"""An engine with draft heads: greedy answers, and the conversation after them, are those of an engine without."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.drafts.heads import Proposal
from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.sampling import SamplingParams
from runtime.session import Session
from stages.bench import measure
from tests.parity.deepseek_golden import GOLDEN, golden

RECORD_GIB = 16_384 / 2**30
LONG = 20


@pytest.fixture
def open_golden(make_config):
    engines = []

    def open_engine(is_drafting=True, **overrides):
        fields = {"cache.ram_gib": 1.0, "model.context_tokens": 160, **overrides}
        fields = {"drafts.enabled": is_drafting, "drafts.gate": False, **fields}
        config = make_config("tiny_deepseek", **fields)
        engines.append(Engine.open(config, EngineFiles(GOLDEN / "checkpoint")))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def prompt_of(name):
    return golden(f"model_{name}")["input_ids"].tolist()


def answer(session, prompt, **params):
    pieces = list(session.generate(prompt, SamplingParams(temperature=0.0, **params)))
    return [p.token for p in pieces], "".join(p.text for p in pieces), pieces[-1].finish


@pytest.fixture
def guesses(monkeypatch):
    """Return a function that lets an engine's drafts know an answer and spoil some of it."""

    def install(engine, prompt, tokens, seed):
        drawn = random.Random(seed)

        def propose(token, state, depth):
            at = state.position - len(prompt)
            right = tokens[at + 1 : at + 1 + depth]
            right += [0] * (depth - len(right))
            wrong = drawn.randrange(depth + 1)
            if wrong < depth:
                right[wrong] ^= 1
            return Proposal(right, torch.empty(0), torch.empty(0))

        monkeypatch.setattr(engine.model.heads, "propose", propose)

    return install


@pytest.fixture
def wanted(open_golden):
    """Return a function: what an engine without drafts answers, and the tensors of its conversation afterwards."""
    engine = open_golden(is_drafting=False)

    def plain(prompt, **params):
        session = Session(engine)
        return (*answer(session, prompt, **params), session.tokens, session._state.tensors())

    return plain


def same_state(session, tensors):
    found = session._state.main.tensors()
    return found.keys() == tensors.keys() and all(torch.equal(found[n], tensors[n]) for n in found)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"drafts.depth": 1, "cache.ram_gib": 0.0, "prefetch.experts": 0},
        {"drafts.ram_gib": 1.0, "cache.ram_gib": 6 * RECORD_GIB, "cache.sweep_experts": 2},
        {"drafts.depth": 2, "hw.drive.simulate_latency_us": 100.0, "model.prefill_tokens": 16},
    ],
)
def test_greedy_answers_are_the_same(open_golden, wanted, settings):
    engine = open_golden(**settings)
    assert engine.drafting is not None
    for name in ("p7", "p40"):
        tokens, text, finish, timeline, tensors = wanted(prompt_of(name), max_tokens=LONG)
        session = Session(engine)
        assert answer(session, prompt_of(name), max_tokens=LONG) == (tokens, text, finish)
        assert session.tokens == timeline
        assert "model.prefill_tokens" in settings or same_state(session, tensors)
    assert engine.drafting.passes + engine.drafting.accepted == 2 * (LONG - 1)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, LONG])
def test_limits_in_the_middle_of_a_pass(open_golden, wanted, guesses, seed, limit):
    engine, prompt = open_golden(), prompt_of("p40")
    guesses(engine, prompt, wanted(prompt, max_tokens=LONG + 4)[0], seed)
    session = Session(engine)
    found = (*answer(session, prompt, max_tokens=limit), session.tokens)
    *plain, tensors = wanted(prompt, max_tokens=limit)
    assert found == tuple(plain)
    assert same_state(session, tensors)
    if limit == LONG:
        assert engine.drafting.accepted > 4


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stops_in_the_middle_of_a_pass(open_golden, wanted, guesses, monkeypatch, seed):
    """A stop token, a stop string, and a reader who leaves; then the conversation goes on as without drafts."""
    engine, prompt = open_golden(), prompt_of("p40")
    tokens = wanted(prompt, max_tokens=LONG + 4)[0]
    guesses(engine, prompt, tokens, seed)
    stop = engine.codec.decode([tokens[4]])
    assert stop
    for at in (3, 6):
        *plain, tensors = wanted(prompt, max_tokens=at)
        stream = Session(engine)
        pieces = stream.generate(prompt, SamplingParams(temperature=0.0))
        assert [next(pieces).token for _ in range(at)] == plain[0]
        pieces.close()
        assert (stream.tokens, same_state(stream, tensors)) == (plain[3], True)
        logits = stream.sync(prompt + tokens[: at + 2])
        assert int(logits[0].argmax()) == tokens[at + 2]
    *plain, tensors = wanted(prompt, stop=(stop,))
    session = Session(engine)
    assert (*answer(session, prompt, stop=(stop,)), session.tokens) == tuple(plain)
    assert same_state(session, tensors)
    monkeypatch.setattr(engine.codec, "stop_ids", frozenset({tokens[7]}))
    count = tokens.index(tokens[7]) + 1
    session = Session(engine)
    assert answer(session, prompt)[0] == tokens[:count]
    assert session.tokens == prompt + tokens[: count - 1]


def test_sampled_answers_are_the_same_and_keep_the_drafts_informed(open_golden, wanted):
    engine, prompt = open_golden(), prompt_of("p40")
    plain = open_golden(is_drafting=False)
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=6)
    session, other = Session(engine), Session(plain)
    tokens = [piece.token for piece in session.generate(prompt, sampled)]
    assert tokens == [piece.token for piece in other.generate(prompt, sampled)]
    assert engine.drafting.passes + engine.drafting.accepted == 5
    longer = prompt + tokens
    assert answer(session, longer, max_tokens=8) == answer(other, longer, max_tokens=8)
    assert session.cached_tokens == len(longer) - 1
    fresh = Session(engine)
    fresh.sync(session.tokens)
    rings = session._state.heads.tensors()
    assert rings["position"] == fresh._state.heads.tensors()["position"] == len(session.tokens)


def test_bench_tells_tokens_per_pass(open_golden, guesses, make_config):
    config = make_config(**{"bench.tokens": 12, "bench.warmup_tokens": 3, "bench.repeats": 2}).bench
    config.prompt_length = 9
    plain = measure(open_golden(is_drafting=False), config)
    bench = measure(open_golden(), config)
    assert bench.repeats[0].token_ids == plain.repeats[0].token_ids
    assert bench.is_repeatable
    for repeat in bench.repeats:
        assert sum(t.num_tokens for t in repeat.warmup) == 3
        assert sum(t.num_tokens for t in repeat.tokens) == 12
        assert repeat.tokens[-1].position == 9 + 15
        passes = len(repeat.tokens)
        assert repeat.summary.tokens_per_pass == 12 / passes
    assert bench.drafted is not None
    assert bench.drafted.report["proposed"] > 0
    assert [r.token_ids for r in bench.drafted.plain] == [plain.repeats[0].token_ids] * 2
    assert bench.drafted.total.tokens_per_pass == 1
    assert bench.total.hit_rate > 0
    assert plain.drafted is None


def test_drafts_that_are_not_there_are_refused(open_golden, make_config, tiny_qwen, open_tiny):
    bundled = EngineFiles(tiny_qwen.parent / "tiny-deepseek")
    asked = {"drafts.enabled": True, "drafts.source": "heads"}
    with pytest.raises(UserError, match="has no draft heads"):
        Engine.open(make_config("tiny_deepseek", **asked), bundled)
    with pytest.raises(
        UserError, match=r"drafts\.depth is 4, this checkpoint's draft heads give up to 3"
    ):
        open_golden(**{"drafts.depth": 4})
    with pytest.raises(UserError, match="this checkpoint has no draft heads"):
        open_tiny(**asked)
