"""What a run that is corrected after each operation is blind to, and what it is not: rounding, and mistakes.

On the CPU; `tests/gpu/test_deepseek_sublayers_gpu.py` compares a GPU with the CPU in this way.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import pytest
import torch

from kernels import reference_deepseek as ops
from runtime.engine import Engine, EngineFiles
from runtime.experts.layout import ExpertKey
from tests.parity import deepseek_golden as golden
from tests.parity.deepseek_planted import DECODER_MISTAKES, late_positions
from tests.parity.deepseek_taught import (
    Tape,
    drift_faults,
    drift_of,
    faults_of,
    native_taught,
    others_of,
    record_token,
    teach_prompt,
)
from tests.parity.deepseek_taught_decoder import DECODER_BOUNDS, corrected
from tests.parity.test_deepseek_decoder import DEVICE, packed_model

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU the same is done on it")
PROMPT, CHUNK, LAYER, ROW = 150, 64, 3, 20


@pytest.fixture(scope="module")
def models(make_config, tiny_qwen):
    files = EngineFiles(tiny_qwen.parent / "tiny-deepseek")
    config = make_config("tiny_deepseek", **{"cache.ram_gib": 1.0, "prefetch.experts": 0})
    engines = [Engine.open(config, files) for _ in range(2)]
    engines[1].model.chunk_tokens = CHUNK
    yield [engine.model for engine in engines]
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def prompt(heldout_tokens):
    return heldout_tokens[:PROMPT]


# ---- one bf16 step ---------------------------------------------------------------------------------------------------


@contextmanager
def one_step_aside(write: int, row: int):
    """Move the largest number of a row's first stream by a bf16 step, behind the given one of all writes."""
    plain, calls = ops.hyper_write, itertools.count()

    def moved(*args):
        out = plain(*args)
        if next(calls) == write:
            first = out[row, 0]
            first.view(torch.int16)[first.abs().argmax()] += 1
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "hyper_write", moved)
        yield


@pytest.fixture
def whole(models, monkeypatch):
    """Both models, prompts in one piece."""
    monkeypatch.setattr(models[1], "chunk_tokens", None)
    return models


@pytest.mark.parametrize("layer", [0, 2])
def test_one_step_moves_the_whole_model(whole, prompt, layer):
    """One of 150 x 4 x 256 numbers, and all rows behind it part."""
    model = whole[0]
    wanted = model.prefill(prompt, model.new_state(), all_logits=True)
    with one_step_aside(2 * layer, ROW):
        found = model.prefill(prompt, model.new_state(), all_logits=True)
    drift = drift_of(found, wanted)
    behind = drift[ROW:]
    print(f"behind: median {behind.median():.1e}, largest {behind.max():.1e}")
    assert drift[:ROW].max() == 0
    assert behind.median() > 5e-3
    assert behind.max() > 0.1
    assert not drift_faults(found, wanted)


def test_one_step_is_one_result_to_a_corrected_run(whole, prompt):
    writes = 2 * whole[0].spec.num_layers
    with one_step_aside(writes + 2 * LAYER, ROW):  # in the second run
        tape, state, other = teach_prompt(*whole, prompt)
    assert sum(r.unequal for r in tape.compared) == 1
    assert not faults_of(tape.compared)
    assert not others_of(other.tensors(), state.tensors())


# ---- the same arithmetic, exact before each rounding -----------------------------------------------------------------


def exact_norm(x, weight, eps):
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (weight.double() * x).float().to(torch.bfloat16)


def exact_read(streams, pre):
    return (pre.double().unsqueeze(-1) * streams.double()).sum(1).float().to(torch.bfloat16)


def exact_write(y, streams, post, comb):
    mixed = (comb.double().unsqueeze(-1) * streams.double().unsqueeze(2)).sum(1)
    written = post.double().unsqueeze(-1) * y.double().unsqueeze(1) + mixed
    return written.float().to(torch.bfloat16)


EXACT = {"rms_norm": exact_norm, "hyper_read": exact_read, "hyper_write": exact_write}


def test_an_exact_arithmetic_drifts_as_far(models, prompt):
    """fp64 in place of fp32 before three roundings: hardly a result of a sublayer moves, the whole model does."""
    first, second = models
    tape, state = Tape(), first.new_state()
    first.chunk_tokens = CHUNK
    with native_taught(tape):
        wanted = first.prefill(prompt, state, all_logits=True)
    first.chunk_tokens = None
    tape.rewind()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in EXACT.items():
            patch.setattr(ops, name, function)
        found = second.prefill(prompt, second.new_state(), all_logits=True)
        with native_taught(tape):
            second.prefill(prompt, second.new_state(), all_logits=True)
    assert tape.is_at_end
    assert not faults_of(tape.compared)
    is_moved = [r for r in tape.compared if r.unequal]
    assert {r.kind for r in is_moved} <= EXACT.keys()
    moved = sum(r.unequal for r in is_moved)
    drift = drift_of(found, wanted)
    numel = sum(r.numel for r in tape.compared)
    print(
        f"{moved} of {numel} results moved; drift: median {drift.median():.1e}, largest {drift.max():.1e}"
    )
    assert 0 < moved < 100
    assert drift.median() > 5e-3
    assert not drift_faults(found, wanted)


# ---- mistakes --------------------------------------------------------------------------------------------------------


def wrong_scale(model, patch):
    """One expert's gate with a scale that is a power of two aside."""
    plain = model.open_expert

    def opened(key, record):
        gate, up, down = plain(key, record)
        return (2 * gate if key == ExpertKey(LAYER, 7) else gate), up, down

    patch.setattr(model, "open_expert", opened)


def swapped_experts(model, patch):
    """Of one layer, the best expert with the weight of the last and so on."""
    moe = model.blocks[LAYER].moe
    plain = moe._outputs
    patch.setattr(moe, "_outputs", lambda u, ids, w, *rest: plain(u, ids.flip(1), w, *rest))


def stale_row(model, patch):
    """In one layer, the last token of a piece does not enter the window."""
    plain = model.new_state

    def new_state():
        state = plain()
        remember = state.remember

        def forgetful(layer, start, kv):
            remember(layer, start, kv[:-1] if layer == LAYER else kv)

        state.remember = forgetful
        return state

    patch.setattr(model, "new_state", new_state)


def rough_block(model, patch):
    """In one product, a block of columns by 1.01."""
    attention = model.blocks[LAYER].attention
    weight = attention.wq_b.clone()
    weight[: len(weight) // 4, :32] *= 1.01
    patch.setattr(attention, "wq_b", weight)


def dropped_entry(model, patch):
    """In one layer, the oldest of the window is not seen."""
    attention = model.blocks[LAYER].attention
    plain = attention._visible

    def visible(*args):
        entries, slots = plain(*args)
        slots = slots.clone()
        slots[slots == slots[:, :1]] = -1
        return entries, slots

    patch.setattr(attention, "_visible", visible)


MISTAKES = {
    "wrong_scale": (wrong_scale, "Moe"),
    "late_positions": (late_positions, "rotate"),
    "swapped_experts": (swapped_experts, "Moe"),
    "stale_row": (stale_row, "sparse_attention"),
    "rough_block": (rough_block, "quantized_linear"),
    "dropped_entry": (dropped_entry, "slots"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows_where_it_is_made(models, prompt, monkeypatch, name):
    plant, kind = MISTAKES[name]
    plant(models[1], monkeypatch)
    tape, _, _ = teach_prompt(*models, prompt)
    faults = faults_of(tape.compared)
    print(*faults[:4], sep="\n")
    assert faults
    assert all(kind in fault for fault in faults)


def test_no_mistake_shows_nothing(models, prompt):
    tape, state, other = teach_prompt(*models, prompt)
    assert not faults_of(tape.compared)
    assert not others_of(other.tensors(), state.tensors())


# ---- the decoder of fixed shapes, interpreted ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoding():
    """The golden model on its layers' own path, and with a decoder."""
    plain = golden.make_model()
    with pytest.MonkeyPatch.context() as patch:
        packed = packed_model(patch)
    return plain, packed


def teach_decoder(decoding, start, steps):
    """Decode tokens of p40 on the decoder, corrected.  Returns (faults, state tensors that are not the recorded)."""
    plain, packed = decoding
    tokens, state, other = golden.fed_tokens("p40"), plain.new_state(), packed.new_state()
    if start:
        plain.prefill(tokens[:start], state)
    other.restore(state.tensors())
    with corrected(packed.decoder) as right:
        for token in tokens[start : start + steps]:
            right.step(token, other, record_token(plain, token, state), state)
    return faults_of(right.compared, DECODER_BOUNDS), others_of(other.tensors(), state.tensors())


@pytest.mark.slow  # an interpreted step takes seconds
@pytest.mark.parametrize(("start", "steps"), [(0, 2), (39, 2)])
def test_the_decoder_is_the_layers_own_path(decoding, start, steps):
    faults, others = teach_decoder(decoding, start, steps)
    assert not faults
    assert not others


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODER_MISTAKES)
def test_a_decoders_mistake_shows_where_it_is_made(decoding, monkeypatch, name):
    plant, kind = DECODER_MISTAKES[name]
    plant(decoding[1].decoder, monkeypatch)
    faults, _ = teach_decoder(decoding, 39, 1)
    print(*faults, sep="\n")
    assert any(kind in fault for fault in faults)
