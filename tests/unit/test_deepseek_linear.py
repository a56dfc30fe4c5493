"""DeepSeek's products, experts and routes of one token in Triton against their definitions; interpreted or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import deepseek_linear, deepseek_moe, mxfp4_expert
from kernels import reference_deepseek as ops
from kernels.formats import fp8_blocks_dequantize, mxfp4_dequantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16


def random_fp8(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """An FP8 weight and its block scales, of every size that a release has."""
    weight = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448)
    exponents = torch.randint(110, 130, (rows // 32, columns // 32), generator=generator)
    return weight.to(torch.float8_e4m3fn), exponents.to(torch.uint8)


def random_x(generator: torch.Generator, *shape: int) -> Tensor:
    """Activations of very different sizes, some blocks of zeros."""
    x = torch.randn(*shape, generator=generator)
    x *= torch.exp2(
        torch.randint(-12, 12, (*shape[:-1], shape[-1] // 32), generator=generator)
    ).repeat_interleave(32, -1)
    x[..., :32] = 0
    return x.to(BF16)


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def test_activations_are_rounded_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    x = random_x(generator, 1000, 96)
    # where the scale takes its next step
    edges = torch.tensor([448.0 * 2.0**n for n in range(-20, 12)])
    for row, edge in enumerate(edges):
        x[row] = torch.linspace(-1, 1, 96) * edge
    x[40, :4] = torch.tensor([464.0, 465.0, -464.0, 3.0])  # ties of the largest step
    out = empty(1000, 96)
    deepseek_linear.act_round(x.to(DEVICE), out)
    assert torch.equal(out.float().cpu(), ops.act_rounded(x))


@pytest.mark.parametrize(
    ("rows", "columns", "groups"), [(32, 32, 1), (96, 1312, 1), (64, 96, 2), (128, 288, 4)]
)
def test_fp8_product_is_summed_by_blocks_in_their_order(rows: int, columns: int, groups: int):
    generator = torch.Generator().manual_seed(rows)
    weight, scale = random_fp8(generator, rows, columns)
    x = ops.act_rounded(random_x(generator, 1, groups * columns)).to(BF16)
    out = empty(rows, dtype=torch.float32)
    deepseek_linear.fp8_linear(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), out, groups)
    full = fp8_blocks_dequantize(weight, scale.view(torch.float8_e8m0fnu))
    wanted = torch.cat(
        [
            ops.block_product(part, w)[0]
            for part, w in zip(x.float().chunk(groups, 1), full.chunk(groups), strict=True)
        ]
    )
    # sizes differ so much here that a block's sum is not quite exact, and a GPU sums it in an order of its own
    torch.testing.assert_close(out.cpu(), wanted, rtol=0 if DEVICE == "cpu" else 1e-6, atol=0)
    rounded = empty(rows)
    deepseek_linear.fp8_linear(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), rounded, groups)
    assert torch.equal(rounded.cpu(), out.cpu().to(BF16))


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 32), (320, 96)])
def test_shared_expert_is_the_definition(hidden: int, intermediate: int):
    generator = torch.Generator().manual_seed(hidden)
    x = random_x(generator, 1, hidden)
    gate, up, down = (
        random_fp8(generator, *shape)
        for shape in ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    )
    full = [fp8_blocks_dequantize(w, s.view(torch.float8_e8m0fnu)) for w, s in (gate, up, down)]
    wanted = ops.swiglu_expert(x, *full, 10.0)[0].float()
    rounded, inner, out = empty(hidden), empty(intermediate), empty(hidden)
    deepseek_linear.act_round(x.to(DEVICE), rounded)
    to = [(w.to(DEVICE), s.to(DEVICE)) for w, s in (gate, up, down)]
    deepseek_linear.fp8_swiglu(rounded, to[0], to[1], inner, 10.0)
    deepseek_linear.fp8_linear(inner, *to[2], out)
    # exp differs in its last bit
    assert float((out.float().cpu() - wanted).norm() / wanted.norm()) < 2e-3


@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("has_ratio", [False, True])
def test_steady_sums_do_not_depend_on_the_order(weight_dtype: torch.dtype, has_ratio: bool):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 700, generator=generator).to(BF16)
    weight = torch.randn(19, 700, generator=generator).to(weight_dtype)
    ratio = torch.rand(700, generator=generator) + 0.5 if has_ratio else None
    out = empty(19, dtype=torch.float32)
    deepseek_linear.steady_linear(
        x.to(DEVICE), weight.to(DEVICE), out, None if ratio is None else ratio.to(DEVICE)
    )
    scaled = x.float() if ratio is None else x.float() * ratio
    assert torch.equal(out.cpu(), ops.steady_linear(scaled, weight)[0])
    deepseek_linear.steady_linear(x.to(DEVICE), weight.to(DEVICE), out, is_double=False)
    wanted = ops.steady_linear(x, weight)[0]
    assert float((out.cpu() - wanted).norm() / wanted.norm()) < 1e-6


def expert_bytes(
    generator: torch.Generator, hidden: int, intermediate: int, skew: int
) -> tuple[Tensor, tuple[int, int]]:
    """One record as a release has it: codes of w1, w2, w3, then their scales, both off by `skew` bytes."""
    codes_nbytes, scales_nbytes = 3 * hidden * intermediate // 2, 3 * hidden * intermediate // 32
    record = torch.randint(
        0, 256, (codes_nbytes + scales_nbytes + 2 * skew,), dtype=torch.uint8, generator=generator
    )
    at = (skew, codes_nbytes + 2 * skew)
    record[at[1] :] = 115 + record[at[1] :] % 10
    return record, at


def matrices(record: Tensor, at: tuple[int, int], hidden: int, intermediate: int) -> list[Tensor]:
    """Gate, up, down."""
    found, (codes_at, scales_at) = [], at
    for rows, columns in ((intermediate, hidden), (hidden, intermediate), (intermediate, hidden)):
        codes = record[codes_at : codes_at + rows * columns // 2].view(rows, -1)
        scales = record[scales_at : scales_at + rows * columns // 32].view(rows, -1)
        found.append(mxfp4_dequantize(codes, scales))
        codes_at, scales_at = codes_at + rows * columns // 2, scales_at + rows * columns // 32
    return [found[0], found[2], found[1]]


@pytest.mark.parametrize(
    ("hidden", "intermediate", "skew"), [(64, 32, 8), (352, 96, 8), (256, 160, 4)]
)
def test_fp4_experts_are_the_definition(hidden: int, intermediate: int, skew: int):
    generator = torch.Generator().manual_seed(hidden)
    x = random_x(generator, 1, hidden)
    records = [expert_bytes(generator, hidden, intermediate, skew) for _ in range(3)]
    weights = torch.tensor([0.3, 0.9, 0.3])
    on_device = [record.to(DEVICE) for record, _ in records]
    table = torch.tensor(
        [
            [r.data_ptr() + at[0], r.data_ptr() + at[1]]
            for r, (_, at) in zip(on_device, records, strict=True)
        ]
    )
    table[1] = 0
    rounded, inner, out = empty(hidden), empty(3, intermediate), empty(3, hidden)
    deepseek_linear.act_round(x.to(DEVICE), rounded)
    align = 8 if skew % 8 == 0 else 4
    mxfp4_expert.mxfp4_experts(
        rounded, table.to(DEVICE), weights.to(DEVICE), inner, out, 10.0, align
    )
    assert out[1].isnan().all()  # an address of zero: somebody else's turn
    for row in (0, 2):
        wanted = ops.swiglu_expert(
            x, *matrices(*records[row], hidden, intermediate), 10.0, weights[row].view(1, 1)
        )[0].float()
        found = out[row].float().cpu()
        assert float((found - wanted).norm() / wanted.norm()) < 2e-3  # exp differs in its last bit


@pytest.mark.parametrize(("experts", "top_k", "num_guesses"), [(8, 2, 0), (24, 6, 5), (33, 6, 8)])
def test_route_is_the_definition(experts: int, top_k: int, num_guesses: int):
    generator = torch.Generator().manual_seed(experts)
    for _ in range(20):
        logits = torch.randn(2, experts, generator=generator) * torch.tensor([[10.0], [3.0]])
        logits[0, 3] = logits[0, 5] = 20.0  # a tie at the top
        bias = torch.randn(2, experts, generator=generator) / 10
        bias[0, 3] = bias[0, 5]
        route = torch.full((top_k + num_guesses,), -1, dtype=torch.int64, device=DEVICE)
        weights = empty(top_k, dtype=torch.float32)
        deepseek_moe.route_token(
            logits[0].to(DEVICE), bias[0].to(DEVICE), logits[1].to(DEVICE), bias[1].to(DEVICE), route, weights, 1.5,
            num_guesses,
        )  # fmt: skip
        ids, wanted = ops.route(logits[:1], bias[0], top_k, 1.5)
        assert route[:top_k].tolist() == ids[0].tolist()
        by_id = wanted[0][ids[0].argsort()]
        torch.testing.assert_close(weights.cpu(), by_id, rtol=2e-6, atol=0)
        if num_guesses:
            guesses, _ = ops.route(logits[1:], bias[1], num_guesses, 1.5)
            assert route[top_k:].tolist() == guesses[0].tolist()


def test_a_small_logit_keeps_its_digits():
    """softplus(-20) is 2e-9: 1 + e^-20 has lost all of it."""
    logits = torch.tensor([-20.0, -15.0, -5.0, -30.0])
    weights = empty(4, dtype=torch.float32)
    route = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    zeros = torch.zeros(4, device=DEVICE)
    deepseek_moe.route_token(logits.to(DEVICE), zeros, zeros, zeros, route, weights, 1.0, 0)
    wanted = torch.nn.functional.softplus(logits.double()).sqrt()
    torch.testing.assert_close(weights.cpu().double(), wanted / wanted.sum(), rtol=1e-6, atol=0)


def test_sum_goes_from_top_to_bottom():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 300, generator=generator).to(BF16)
    shared = torch.randn(300, generator=generator).to(BF16)
    out = empty(300)
    deepseek_moe.combine_token(rows.to(DEVICE), shared.to(DEVICE), out)
    wanted = torch.zeros(300)
    for row in (*rows, shared):
        wanted += row.float()
    assert torch.equal(out.cpu(), wanted.to(BF16))
