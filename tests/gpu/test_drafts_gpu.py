"""Drafts on a GPU: rows of a pass are single steps of the graphs, answers are those without drafts, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.sampling import SamplingParams
from tests.parity.qwen_mtp import make_mtp_snapshot
from tests.parity.row_checks import answer, check_half_right, check_rows

pytestmark = pytest.mark.gpu

MODELS = ("tiny", "tiny_deepseek")
DRAFTS = {"drafts.enabled": True, "drafts.gate": False}
CACHES = [
    {"cache.ram_gib": 0.0, "cache.vram_gib": 0.0, "prefetch.experts": 2},
    {"cache.ram_gib": 0.003, "prefetch.copy": 3},
    {"cache.ram_gib": 1.0},
]


def engines(make_config, model, files):
    """Yield a function: settings -> an open engine, on the GPU with drafts unless told otherwise; one at a time."""
    opened = []

    def open_engine(**settings) -> Engine:
        while opened:
            opened.pop().close()
        config = make_config(model, **{"hw.device": "cuda", **DRAFTS, **settings})
        opened.append(Engine.open(config, files))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


@pytest.fixture(params=MODELS)
def open_model(request, make_config, tiny_files, tiny_qwen):
    files = {
        "tiny": tiny_files,
        "tiny_deepseek": EngineFiles(tiny_qwen.parent / "tiny-deepseek"),
    }
    yield from engines(make_config, request.param, files[request.param])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_rows_are_single_steps_and_rejected_ones_leave_no_trace(
    open_model, heldout_tokens, graphs, cache
):
    """Six attempts of five rows each: launched, captured, replayed."""
    engine = open_model(**cache, **{"hw.graphs": graphs})
    for start in (21, 130):  # DeepSeek's windows are full behind the second
        check_rows(engine.model, heldout_tokens[:160], start, 5)
    assert engine.model.is_settled(5)


def check_answers(open_engine, cache, tokens, temperature):
    """Answers with drafts, also half-right ones, against one without; return what the first made of its guesses."""
    asked = tokens[:40], SamplingParams(temperature=temperature, seed=3, max_tokens=200)
    wanted = answer(open_engine(**cache, **{"drafts.enabled": False}), *asked)
    engine = open_engine(**cache)
    assert answer(engine, *asked) == wanted
    report = engine.drafting.report()
    check_half_right(engine, wanted, *asked)
    return report


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_answers_are_those_without_drafts(open_model, heldout_tokens, temperature, cache):
    report = check_answers(open_model, cache, heldout_tokens, temperature)
    assert report["source"] == "lookup"


def test_each_expert_is_asked_for_once_a_pass(open_model, heldout_tokens):
    engine = open_model(**CACHES[0])
    state = engine.new_state()
    engine.model.prefill(heldout_tokens[:21], state)
    before = engine.counters().experts
    engine.model.attempt(heldout_tokens[21:26], state)
    asked = engine.counters().experts.since(before).lookups
    one_token = engine.model.spec.num_layers * engine.model.spec.top_k
    assert one_token < asked < 5 * one_token


@pytest.mark.parametrize("open_model", ["tiny_deepseek"], indirect=True)
def test_heads_of_deepseek_are_refused(open_model):
    with pytest.raises(UserError, match="of this family are computed on the CPU only"):
        open_model(**{"drafts.source": "heads"})


# ---- a draft head (Qwen's), of random weights ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mtp_files(tiny_files, tiny_qwen, tmp_path_factory):
    return replace(
        tiny_files, snapshot=make_mtp_snapshot(tiny_qwen, tmp_path_factory.mktemp("mtp"))
    )


@pytest.fixture
def open_mtp(make_config, mtp_files):
    yield from engines(make_config, "tiny", mtp_files)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_head_and_rows_go_back_together(open_mtp, heldout_tokens, graphs, cache):
    engine = open_mtp(**cache, **{"hw.graphs": graphs})
    assert engine.drafting.report()["source"] == "heads"
    for start in (21, 130):  # within the indexer's budget, and beyond it
        check_rows(engine.model, heldout_tokens[:160], start, 5)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_head_reads_of_a_row_what_it_reads_of_a_single_step(open_mtp, heldout_tokens, graphs):
    main = open_mtp(**CACHES[1], **{"hw.graphs": graphs}).model.model
    rows = heldout_tokens[21:26]
    for _ in range(4):  # launched, captured, replayed
        plain, state = main.new_state(), main.new_state()
        single = []
        main.prefill(heldout_tokens[:21], plain)
        for token in rows:
            main.decode(token, plain)
            single.append(main.taps())
        main.prefill(heldout_tokens[:21], state)
        assert torch.equal(main.attempt(rows, state).taps, torch.cat(single))
    assert len(torch.cat(single).unique(dim=0)) == len(rows)


@pytest.mark.parametrize("known", [1, 9, 150])
def test_guesses_are_those_of_a_cpu(open_mtp, heldout_tokens, known):
    """The same streams, in fp32: what the CPU's head is compared with is written out in its own tests."""
    taps, found = None, []
    for device in ("cpu", "cuda"):
        model = open_mtp(**{"hw.device": device, "hw.dtype": "float32", "cache.ram_gib": 1.0}).model
        if taps is None:
            model.model.prefill(heldout_tokens[:known], model.model.new_state())
            taps = model.model.taps()
        heads = model.heads
        state, copy = heads.new_state(), heads.new_state()
        heads.seed(heldout_tokens[:known], taps.to(heads.device), state)
        copy.restore(state.tensors())
        proposals = [heads.propose(5, each, 4) for each in (state, copy, state)]
        assert all(torch.equal(p.logits, proposals[0].logits) for p in proposals)
        found.append(proposals[0])
    logits = found[0].logits
    assert (found[1].logits.cpu() - logits).abs().max() < 1e-3 * logits.std()
    assert found[1].tokens == found[0].tokens


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_answers_with_a_head_are_those_without(open_mtp, heldout_tokens, temperature, cache):
    report = check_answers(open_mtp, cache, heldout_tokens, temperature)
    assert report["source"] == "heads"
    assert report["proposed"] > 0
