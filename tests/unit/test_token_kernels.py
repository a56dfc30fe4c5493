"""The fused Triton pieces of one decoded token against their definitions (interpreted without a GPU)."""

from __future__ import annotations

import pytest
import torch

from kernels import delta_rule, hyper_connection, moe_token, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# fp32: another order of sums.  bf16: one rounding more or less at a few places, of 2^-9 each; only on a GPU, since the
# interpreter cuts bf16 off instead of rounding it
TOLERANCE = {torch.float32: 2e-6}
SIZES = [(256, 4, 32), (80, 4, 20)]
if DEVICE == "cuda":
    TOLERANCE[torch.bfloat16] = 1e-2
    SIZES.append((2560, 4, 320))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("hidden", "streams", "rank"), SIZES)
@pytest.mark.parametrize("has_add", [True, False])
def test_hyper_connection_read(
    hidden: int, streams: int, rank: int, dtype: torch.dtype, has_add: bool
):
    width = streams * hidden
    residual = random(1, streams, hidden, seed=1, dtype=dtype)
    amount = random(1, streams, 1, seed=2, dtype=dtype) if has_add else None
    y = random(1, hidden, seed=3, dtype=dtype) if has_add else None
    gain = 1 + 0.1 * random(streams, hidden, seed=4)
    down_inject = random(rank + streams, width, seed=5, dtype=dtype) * width**-0.5 * 4
    up = random(width, rank, seed=6, dtype=dtype) * rank**-0.5
    other = residual.clone()
    found = hyper_connection.add_norm(residual, amount, y, gain, 1e-6)
    wanted = reference.add_norm(other, amount, y, gain, 1e-6)
    assert (
        error(residual, other) < TOLERANCE[dtype]
    )  # a fused multiply-add rounds once where torch rounds twice
    assert error(found, wanted) < TOLERANCE[dtype]
    for a, b in zip(
        hyper_connection.mix_streams(wanted, down_inject, up),
        reference.mix_streams(wanted, down_inject, up),
        strict=True,
    ):
        assert a.shape == b.shape
        assert error(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("key_heads", "heads", "dim"), [(2, 4, 64), (2, 6, 16)])
def test_delta_token(key_heads: int, heads: int, dim: int, dtype: torch.dtype):
    """Three tokens in a row, so that history and state of one decide the next."""
    width = 2 * key_heads * dim + heads * dim
    taps = random(4, width, seed=1, dtype=dtype) * 0.5
    rate, dt_bias = -random(heads, seed=2).abs(), random(heads, seed=3)
    dt_bias[0] = 30.0  # softplus beyond its bend
    norm = 1 + 0.1 * random(dim, seed=4)
    histories = [random(3, width, seed=5, dtype=dtype) for _ in range(2)]
    states = [random(heads, dim, dim, seed=6) * 0.1 for _ in range(2)]
    for token in range(3):
        x = random(1, width, seed=10 + token, dtype=dtype)
        z = random(1, heads * dim, seed=20 + token, dtype=dtype)
        beta_decay = random(1, 2 * heads, seed=30 + token, dtype=dtype)
        outs = []
        for kernels, history, state in zip((delta_rule, reference), histories, states, strict=True):
            qkv = kernels.conv_silu_token(x, history, taps)
            outs.append(kernels.delta_token(qkv, z, beta_decay, rate, dt_bias, norm, state, 1e-6))
        assert error(*outs) < TOLERANCE[dtype]
    assert torch.equal(*histories)
    assert error(*states) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("experts", "top_k"), [(64, 6), (512, 10), (48, 4), (7, 7)])
@pytest.mark.parametrize("has_guesses", [True, False])
def test_route(experts: int, top_k: int, dtype: torch.dtype, has_guesses: bool):
    generator = torch.Generator().manual_seed(experts)
    logits, guesses = (
        (torch.randperm(experts, generator=generator).float() * (3 / experts))
        .to(DEVICE, dtype)
        .unsqueeze(0)
        for _ in range(2)
    )
    expert_scales = random(experts, 3, seed=1)
    outs = []
    for kernels in (moe_token, reference):
        route = torch.zeros(2 * top_k, dtype=torch.int64, device=DEVICE)
        weights, scales = torch.zeros(1, top_k, device=DEVICE), torch.zeros(top_k, 3, device=DEVICE)
        kernels.route_token(
            logits, guesses if has_guesses else None, expert_scales, route, weights, scales
        )
        outs.append((route, weights, scales))
    (route, weights, scales), (wanted_route, wanted_weights, wanted_scales) = outs
    if dtype is torch.float32:
        assert torch.equal(route, wanted_route)
        assert torch.equal(scales, wanted_scales)
    # in bf16 some logits are equal, and any of those may be chosen
    chosen, wanted = (logits[0][r[:top_k]].sort().values for r in (route, wanted_route))
    assert torch.equal(chosen, wanted)
    assert error(weights, wanted_weights) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("hidden", "intermediate"), [(256, 64), (80, 20)])
def test_shared_expert_and_sum(hidden: int, intermediate: int, dtype: torch.dtype):
    x = random(1, hidden, seed=1, dtype=dtype)
    gate, up = (
        random(intermediate, hidden, seed=s, dtype=dtype) * hidden**-0.5 * 2 for s in (2, 3)
    )
    down = random(hidden, intermediate, seed=4, dtype=dtype)
    shared_gate = random(1, hidden, seed=5, dtype=dtype) * hidden**-0.5
    found, wanted = torch.empty_like(x), torch.empty_like(x)
    moe_token.shared_token(x, gate, up, down, shared_gate, found)
    reference.shared_token(x, gate, up, down, shared_gate, wanted)
    assert error(found, wanted) < TOLERANCE[dtype]
    weights, rows = random(1, 6, seed=6).softmax(-1), random(6, hidden, seed=7)
    sums = [kernels.combine_token(weights, rows, wanted) for kernels in (moe_token, reference)]
    assert error(*sums) < TOLERANCE[dtype]
