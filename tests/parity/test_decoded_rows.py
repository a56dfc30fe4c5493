"""Passes with drafts by decoders of fixed shapes, as a GPU has them: each row is a single step, and can be taken back.

Here on a CPU, launches one by one; `tests/gpu/test_drafts_gpu.py` has the same with graphs.
"""

from __future__ import annotations

import errno
import os

import pytest
import torch

from runtime.drafts.opening import ROW_NBYTES
from runtime.experts.reader import DirectReader, ReadError
from runtime.experts.shared import SharedSlots, share
from runtime.models import deepseek, qwen
from runtime.models.decoded_rows import DecodedRows
from runtime.models.deepseek_decode import Decoder as DeepseekDecoder
from runtime.models.qwen_decode import Decoder
from runtime.sampling import SamplingParams
from tests.parity import deepseek_golden as golden
from tests.parity.row_checks import HalfRight, answer, check_half_right, check_rows, same
from tests.parity.test_cpu_share import in_front
from tests.parity.test_deepseek_decoder import Offsets, packed_model

DRAFTS = {"drafts.enabled": True, "drafts.source": "lookup"}
CONTEXT, ROWS, PROMPT = 300, 5, 21  # the prompt is not a whole number of the indexer's blocks
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has it compiled")


def with_rows(model, decoder, make, rows=ROWS):
    """Let a model decode by `decoder`, and attempts by as many as `rows` beside it."""
    model.decoder, model.experts = decoder, share(model.experts)
    beside = [make(beside=decoder) for _ in range(rows)]
    model.decoded_rows = DecodedRows(decoder, beside, model.experts)
    return model


@pytest.fixture
def open_model(open_tiny):
    """Return a function: settings -> the bundled Qwen with decoders, and its engine: 39 experts are kept."""

    def make(**settings):
        engine = open_tiny(**{"cache.ram_gib": 0.0009, "prefetch.experts": 2, **settings})
        model = engine.model

        def decoder(**more):
            return Decoder(model, CONTEXT, has_graphs=False, **more)

        return with_rows(model, decoder(), decoder), engine

    return make


@pytest.mark.parametrize("start", [PROMPT, 130])  # within the indexer's budget, and beyond it
def test_rows_are_single_steps_and_rejected_ones_leave_no_trace(open_model, heldout_tokens, start):
    tokens = heldout_tokens[:160]
    tokens[PROMPT + 1 : PROMPT + 3] = [
        0,
        0,
    ]  # ends of documents, which the n-gram embedding looks at
    model, _ = open_model()
    check_rows(model, tokens, start, ROWS)


@NO_CUDA
@pytest.mark.slow
def test_deepseek_gets_back_what_its_window_overwrote(monkeypatch):
    """And, behind an odd position, the half pairs of its compressors."""
    model = packed_model(monkeypatch)

    def decoder(**more):
        return DeepseekDecoder(model, Offsets(model.spec), has_graphs=False, **more)

    with_rows(model, decoder(), decoder, rows=2)
    start = model.spec.window + 1
    tokens = golden.fed_tokens("p40")
    assert start % 2
    assert start + 2 < len(tokens)
    check_rows(model, tokens, start, rows=2)


def test_each_expert_is_asked_for_once_a_pass(open_model, heldout_tokens, monkeypatch):
    model, engine = open_model()
    state, asked = model.new_state(), []
    model.prefill(heldout_tokens[:PROMPT], state)
    source, waves = model.experts.source, model.experts.source.waves

    def noted(layer, ids, guesses=()):
        asked.extend((layer, expert) for expert in ids)
        return waves(layer, ids, guesses)

    monkeypatch.setattr(source, "waves", noted)
    before = engine.counters().experts
    model.attempt(heldout_tokens[PROMPT : PROMPT + ROWS], state)
    one_token = model.spec.num_layers * model.spec.top_k
    assert one_token < len(asked) == len(set(asked)) < ROWS * one_token
    assert engine.counters().experts.since(before).lookups == len(asked)


@pytest.mark.parametrize(("kept", "ram_gib"), [(6, 0.0009), (0, 1.0)])
def test_what_several_rows_want_goes_through_slots(open_tiny, heldout_tokens, kept, ram_gib):
    """Slots for 16 on their way, and some that stay, before a small cache or all experts in RAM."""
    engine = open_tiny(**{"cache.ram_gib": ram_gib, "prefetch.experts": 2})
    model, spec = engine.model, engine.model.spec
    nbytes = model.experts.record_nbytes
    model.experts = in_front(model.experts, spec.num_layers, spec.top_k, nbytes, kept, early=2)

    def decoder(**more):
        return Decoder(model, CONTEXT, has_graphs=False, **more)

    with_rows(model, decoder(), decoder, rows=3)
    assert isinstance(model.experts, SharedSlots)
    check_rows(model, heldout_tokens[:40], 1, 3)  # longer prompts would run interpreted kernels
    state = model.new_state()
    for token in heldout_tokens[:PROMPT]:
        model.decode(token, state)
    before = engine.counters().experts
    model.attempt(heldout_tokens[PROMPT : PROMPT + 3], state)
    found = engine.counters().experts.since(before)
    assert found.copied_nbytes == (found.lookups - found.vram_hits + found.early_issued) * nbytes
    assert found.lookups < 3 * spec.num_layers * spec.top_k


def test_more_rows_than_decoders_are_refused_before_anything_is_fed(open_model, heldout_tokens):
    model, _ = open_model()
    state = model.new_state()
    model.prefill(heldout_tokens[:PROMPT], state)
    before = state.tensors()
    with pytest.raises(ValueError, match="6 tokens, but 5 decoders beside"):
        model.attempt(heldout_tokens[: ROWS + 1], state)
    assert same(state.tensors(), before)


def test_a_read_that_fails_ends_the_pass_and_the_next_conversation_goes_on(
    open_model, heldout_tokens, monkeypatch
):
    fails = []

    def preadv(fd, buffers, offset):
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    monkeypatch.setattr(DirectReader.__init__, "__defaults__", (preadv,))
    model, _ = open_model()
    state = model.new_state()
    model.prefill(heldout_tokens[:PROMPT], state)
    fails.append(True)
    with pytest.raises(ReadError):
        model.attempt(heldout_tokens[PROMPT : PROMPT + ROWS], state)
    fails.clear()
    check_rows(model, heldout_tokens, PROMPT, 3)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_those_without_drafts(open_model, heldout_tokens, temperature):
    asked = heldout_tokens[:40], SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    wanted = answer(open_model()[1], *asked)
    engine = open_model(**DRAFTS, **{"drafts.gate": False})[1]
    check_half_right(engine, wanted, *asked)


def test_the_gate_learns_from_no_pass_that_captures(open_model, heldout_tokens):
    """The first two steps of a decoder compile and capture: they say nothing of those that follow."""
    model, engine = open_model(**DRAFTS, **{"drafts.depth": 2})
    drafting, settled, recorded = engine.drafting, [], []
    drafting.source = HalfRight([5] * 200, 0)
    record = drafting._gate.record
    drafting._gate.record = lambda *seen: recorded.append(seen) or record(*seen)
    drafting._is_settled = lambda count: settled.append(model.is_settled(count)) or settled[-1]
    answer(engine, heldout_tokens[:40], SamplingParams(temperature=0.0, max_tokens=40))
    assert not settled[0]
    assert len(recorded) == sum(settled)
    assert drafting.passes == len(settled)
    steps = [row._steps for row in model.decoded_rows.rows]
    assert 4 <= len(settled) - sum(settled) <= 6, "two of the decoder's, two of each row at most"
    assert steps[0] > 2


def test_the_plan_has_room_for_the_decoders_of_rows(
    open_model, make_config, tiny_files, monkeypatch
):
    _, engine = open_model(**DRAFTS, **{"drafts.depth": 2})
    parts = (engine.model.spec, tiny_files, engine._layout, engine.config, torch.float32)
    states = [qwen.model_sizes(*parts).state_nbytes]
    monkeypatch.setattr(qwen, "resolve_device", lambda _: torch.device("cuda"))
    states.append(qwen.model_sizes(*parts).state_nbytes)
    assert states[1] - states[0] == 3 * ROW_NBYTES
    spec = deepseek.read_spec(golden.ROOT / "runtime" / "bundled" / "deepseek-v41-flash")
    states = [
        deepseek._sizes(spec, 2**24, make_config("tiny_deepseek", **more), True, 0).state_nbytes
        for more in ({}, {**DRAFTS, "drafts.depth": 2})
    ]
    assert states[1] - states[0] == 3 * ROW_NBYTES
