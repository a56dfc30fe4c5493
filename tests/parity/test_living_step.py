"""One token at fixed addresses, as a graph replays it, against the same token through growing slices; on the CPU."""

from __future__ import annotations

import pytest
import torch

from conf.schema import PositionMode, Weights
from runtime.living_kv.hot import HotState
from runtime.living_kv.positions import Mode
from runtime.models.dense_step import DenseStep
from tests.random_dense import random_model

SHAPE = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
    "max_position_embeddings": 1010000, "tie_word_embeddings": False,
    "dual_chunk_attention_config": {"chunk_size": 70, "local_size": 6, "original_max_position_embeddings": 90},
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPE, Weights.int8_rows, CPU, torch.float32)


def asked(model, mode: PositionMode, at: int = 400) -> HotState:
    """A question's state: sinks and a tail at `at`, and cold tokens in between, in a mode."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, model.spec.depth, 1, model.spec.kv_heads, model.spec.head_dim)

    def some(count: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).expand(-1, -1, count, -1, -1) * torch.rand(
            count, 1, 1, generator=generator
        )

    state = HotState(model.spec, 4, 64, 128, 64, model.dtype, model.device)
    state.put_hot(*some(20), at - 20)
    state.put_sinks(*some(4))
    state.floor = state.hot_start
    state.retrieve(*some(30), torch.arange(at - 150, at - 120))
    if mode is PositionMode.near:
        state.bring_near()
    if mode is PositionMode.dca:
        state.bring_into_chunks()
    return state


@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [(PositionMode.absolute, 0), (PositionMode.near, 0), (PositionMode.dca, 1e-4)],
)
def test_a_step_is_the_forward_of_one_token(model, monkeypatch, mode, tolerance):
    plain, fixed = asked(model, mode), asked(model, mode)
    for state in (plain, fixed):
        model.run([5, 6, 7], state)
    step, runs = DenseStep(model), []
    monkeypatch.setattr(step, "run", lambda *a, run=step.run: runs.append(1) or run(*a))
    for token in (9, 200, 31):
        monkeypatch.setattr(model, "step", None)
        wanted = model.run([token], plain)
        monkeypatch.setattr(model, "step", step)
        found = model.run([token], fixed)
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
        assert fixed.position == plain.position
    assert len(runs) == 3
    assert fixed.mode is Mode(mode.value)
    assert (fixed.keys - plain.keys).abs().max() <= tolerance * plain.keys.abs().max()


def test_a_token_that_must_not_see_all_goes_the_plain_way(model, monkeypatch):
    """A timeline's buffers hold more than the window: the mask decides, not the span."""
    plain, fixed = (
        HotState(model.spec, 4, 0, 128, 64, model.dtype, model.device) for _ in range(2)
    )
    step, runs = DenseStep(model), []
    monkeypatch.setattr(step, "run", lambda *a, run=step.run: runs.append(1) or run(*a))
    for at in range(0, 180, 60):
        for state in (plain, fixed):
            model.run(list(range(at, at + 60)), state)
    wanted = model.run([3], plain)
    monkeypatch.setattr(model, "step", step)
    assert torch.equal(model.run([3], fixed), wanted)
    assert not runs
    fixed.clear()
    plain.clear()
    assert torch.equal(model.run([3], fixed), model.run([3], plain))
    assert len(runs) == 2


def test_no_layer_of_a_forward_makes_tables_or_masks(model, monkeypatch):
    """What depends on positions alone is made once, before the first layer."""
    made = []
    for name in ("runtime.models.dense", "runtime.living_kv.positions"):
        from importlib import import_module

        module = import_module(name)
        monkeypatch.setattr(
            module, "rope_tables", lambda *a, f=module.rope_tables: made.append(1) or f(*a)
        )
    for mode, count in ((PositionMode.absolute, 1), (PositionMode.dca, 2)):
        state = asked(model, mode)
        made.clear()
        model.run([5, 6, 7], state)
        assert len(made) == count
