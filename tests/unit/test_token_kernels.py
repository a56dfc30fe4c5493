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
    outs = []
    for kernels in (hyper_connection, reference):
        moved, x = torch.empty_like(residual), random(1, hidden, seed=7, dtype=dtype)
        share = random(1, streams, 1, seed=8, dtype=dtype)
        kernels.read_token(residual, amount, y, gain, down_inject, up, moved, x, share, 1e-6)
        outs.append((moved, x, share))
    for found, wanted in zip(*outs, strict=True):
        # a fused multiply-add rounds once where torch rounds twice
        assert error(found, wanted) < TOLERANCE[dtype]


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
@pytest.mark.parametrize("num_guesses", [0, 3, 7])
def test_route(experts: int, top_k: int, dtype: torch.dtype, num_guesses: int):
    generator = torch.Generator().manual_seed(experts)
    logits, guess_logits = (
        (torch.randperm(experts, generator=generator).float() * (3 / experts))
        .to(DEVICE, dtype)
        .unsqueeze(0)
        for _ in range(2)
    )
    expert_scales = random(experts, 3, seed=1)
    outs = []
    for kernels in (moe_token, reference):
        route = torch.zeros(top_k + num_guesses, dtype=torch.int64, device=DEVICE)
        weights, scales = torch.zeros(1, top_k, device=DEVICE), torch.zeros(top_k, 3, device=DEVICE)
        kernels.route_token(
            logits, guess_logits, expert_scales, route, weights, scales, num_guesses
        )
        outs.append((route, weights, scales))
    (route, weights, scales), (wanted_route, wanted_weights, wanted_scales) = outs
    if dtype is torch.float32:
        assert torch.equal(route, wanted_route)
        assert torch.equal(scales, wanted_scales)
    # in bf16 some logits are equal, and any of those may be chosen
    for part, values in ((slice(top_k), logits), (slice(top_k, None), guess_logits)):
        chosen, wanted = (values[0][r[part]].sort().values for r in (route, wanted_route))
        assert torch.equal(chosen, wanted)
    assert error(weights, wanted_weights) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("hidden", "intermediate", "experts"), [(256, 64, 48), (80, 20, 7)])
@pytest.mark.parametrize("has_guesses", [True, False])
def test_block_input_shared_expert_and_sum(
    hidden: int, intermediate: int, experts: int, dtype: torch.dtype, has_guesses: bool
):
    def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
        return random(rows, columns, seed=seed, dtype=dtype) * columns**-0.5 * 2

    x, ratio = random(1, hidden, seed=1, dtype=dtype), 1 + 0.1 * random(hidden, seed=9, dtype=dtype)
    router, next_router = matrix(experts, hidden, 10), matrix(experts, hidden, 11)
    gate, up, shared_gate = (
        matrix(n, hidden, s) for n, s in ((intermediate, 2), (intermediate, 3), (1, 5))
    )
    down = matrix(hidden, intermediate, 4)
    weights, rows = random(1, 6, seed=6).softmax(-1), random(6, hidden, seed=7)
    outs = []
    for kernels in (moe_token, reference):
        logits, guesses = (random(1, experts, seed=s, dtype=dtype) for s in (20, 21))
        inner, share = (
            random(1, intermediate, seed=22, dtype=dtype),
            random(1, 1, seed=23, dtype=dtype),
        )
        shared, out = torch.empty_like(x), torch.empty_like(x)
        kernels.mlp_in_token(
            x, router, ratio if has_guesses else None, next_router if has_guesses else None, gate, up, shared_gate,
            logits, guesses, inner, share,
        )  # fmt: skip
        kernels.shared_down_token(inner, share, down, shared)
        kernels.combine_token(weights, rows, shared, out)
        outs.append((logits, guesses, inner, share, shared, out))
    for found, wanted in zip(*outs, strict=True):
        assert error(found, wanted) < TOLERANCE[dtype]
