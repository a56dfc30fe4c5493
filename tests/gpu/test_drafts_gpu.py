"""Drafts on a GPU: rows of a pass are single steps of the graphs, answers are those without drafts, bit for bit."""

from __future__ import annotations

import pytest

from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.sampling import SamplingParams
from runtime.session import Session
from tests.parity.row_checks import HalfRight, check_rows

pytestmark = pytest.mark.gpu

MODELS = ("tiny", "tiny_deepseek")
DRAFTS = {"drafts.enabled": True, "drafts.gate": False}
CACHES = [
    {"cache.ram_gib": 0.0, "cache.vram_gib": 0.0, "prefetch.experts": 2},
    {"cache.ram_gib": 0.003, "prefetch.copy": 3},
    {"cache.ram_gib": 1.0},
]


@pytest.fixture(params=MODELS)
def open_model(request, make_config, tiny_files, tiny_qwen):
    """Return a function: settings -> an open engine on the GPU; one at a time is open."""
    opened = []
    files = {
        "tiny": tiny_files,
        "tiny_deepseek": EngineFiles(tiny_qwen.parent / "tiny-deepseek"),
    }

    def open_engine(**settings) -> Engine:
        while opened:
            opened.pop().close()
        config = make_config(request.param, **{"hw.device": "cuda", **settings})
        opened.append(Engine.open(config, files[request.param]))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_rows_are_single_steps_and_rejected_ones_leave_no_trace(
    open_model, heldout_tokens, graphs, cache
):
    """Six attempts of five rows each: launched, captured, replayed."""
    engine = open_model(**DRAFTS, **cache, **{"hw.graphs": graphs})
    for start in (21, 130):  # DeepSeek's windows are full behind the second
        check_rows(engine.model, heldout_tokens[:160], start, 5)
    assert engine.model.is_settled(5)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_answers_are_those_without_drafts(open_model, heldout_tokens, temperature, cache):
    prompt = heldout_tokens[:40]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=200)

    def answer(engine):
        return [piece.token for piece in Session(engine).generate(prompt, params)]

    wanted = answer(open_model(**cache))
    engine = open_model(**DRAFTS, **cache)
    looked_up = answer(engine)
    assert looked_up == wanted
    engine.drafting._source = HalfRight(wanted, len(prompt))
    before = engine.drafting.report()
    assert answer(engine) == wanted
    report = engine.drafting.report()
    accepted, proposed = (report[key] - before[key] for key in ("accepted", "proposed"))
    assert 0 < accepted < proposed


def test_each_expert_is_asked_for_once_a_pass(open_model, heldout_tokens):
    engine = open_model(**DRAFTS, **CACHES[0])
    state = engine.new_state()
    engine.model.prefill(heldout_tokens[:21], state)
    before = engine.counters().experts
    engine.model.attempt(heldout_tokens[21:26], state)
    asked = engine.counters().experts.since(before).lookups
    one_token = engine.model.spec.num_layers * engine.model.spec.top_k
    assert one_token < asked < 5 * one_token


def test_heads_are_refused(open_model):
    with pytest.raises(UserError, match="draft heads are computed on the CPU only"):
        open_model(**DRAFTS, **{"drafts.source": "heads"})
