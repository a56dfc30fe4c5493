"""Roundings and quantisers in registers: to the bit what torch's conversions and the released kernels give."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import deepseek_numbers
from kernels import reference_deepseek as ops
from tests.parity.deepseek_golden import golden
from tests.unit.deepseek_checks import DEVICE, nans, random

NAMES = [
    name
    for name in sorted(golden("kernels"))
    if name.startswith(("act_quant", "fp4_act_quant")) and name.endswith(".inplace")
]
# mode of the kernel below
BF16, E4M3, E2M1, ACT, FP4, FP4_KV = range(6)


@triton.jit
def _apply_kernel(x, out, mode: tl.constexpr, columns: tl.constexpr):
    """One program a row of fp32 numbers."""
    at = tl.program_id(0) * columns + tl.arange(0, columns)
    value = tl.load(x + at)
    if mode == 0:
        value = deepseek_numbers.bf16_rounded(value)
    elif mode == 1:
        value = deepseek_numbers.e4m3_rounded(value)
    elif mode == 2:
        value = deepseek_numbers.e2m1_rounded(value)
    else:
        value = tl.reshape(value, [1, columns])
        if mode == 3:
            value = deepseek_numbers.act_rounded(value)
        if mode > 3:
            value = deepseek_numbers.fp4_rounded(value, mode == 5)
        value = tl.reshape(value, [columns])
    tl.store(out + at, value)


def apply(x: Tensor, mode: int) -> Tensor:
    """x: [rows, columns] fp32, columns a power of two.  Returns as much."""
    out = nans(*x.shape, dtype=torch.float32)
    x = x.contiguous().to(DEVICE)
    _apply_kernel[(len(x),)](x, out, mode=mode, columns=x.shape[1], enable_fp_fusion=False)
    return out.cpu()


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """The sign of zero counts."""
    return torch.equal(found.view(torch.int32), wanted.contiguous().view(torch.int32))


def between(values: Tensor) -> Tensor:
    """Finite numbers of a format, what lies half-way between neighbours, and one fp32 step off that; both signs."""
    values = values[values.isfinite()].double().unique()
    middles = ((values[1:] + values[:-1]) / 2).float()
    off = [middles.nextafter(torch.tensor(edge)) for edge in (-torch.inf, torch.inf)]
    everything = torch.cat([values.float(), middles, *off])
    everything = torch.cat([everything, -everything])
    return torch.nn.functional.pad(everything, (0, -len(everything) % 256)).view(-1, 256)


def test_bf16():
    bits = torch.arange(0, 65536, 7, dtype=torch.int32).to(torch.int16)
    x = between(bits.view(torch.bfloat16).float())
    assert same_bits(apply(x, BF16), x.to(torch.bfloat16).float())
    x = random(64, 256, seed=1) * 10.0 ** random(64, 1, seed=2)
    assert same_bits(apply(x, BF16), x.to(torch.bfloat16).float())
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38]).repeat(1, 4)
    torch.testing.assert_close(
        apply(special, BF16), special.to(torch.bfloat16).float(), rtol=0, atol=0, equal_nan=True
    )
    quiet = torch.tensor([[0x7FFFFFFF, -1]], dtype=torch.int32).view(torch.float32)  # a GPU's NaN
    assert apply(quiet, BF16).isnan().all()


def test_e4m3():
    x = between(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())
    assert same_bits(apply(x, E4M3), x.to(torch.float8_e4m3fn).float())


def test_e2m1():
    x = between(torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]))
    table = torch.tensor([*ops.E2M1_VALUES, *(-v for v in ops.E2M1_VALUES)])
    assert same_bits(apply(x, E2M1), table[ops.nearest_e2m1(x).long()])


@pytest.mark.parametrize("name", NAMES)
def test_quantisers_are_the_released_ones(name: str):
    x, wanted = golden("kernels")[name.replace(".inplace", ".x")], golden("kernels")[name]
    mode = ACT if name.startswith("act") else FP4_KV if ".e4m3_b16." in name else FP4
    assert same_bits(apply(x.float(), mode), wanted.float())


@pytest.mark.parametrize("mode", [ACT, FP4, FP4_KV])
def test_quantisers_around_a_power_of_two(mode: int):
    """The largest of a block one bf16 step below, at and above where its scale doubles, at every size."""
    largest = 448.0 if mode == ACT else 6.0
    edges = torch.tensor([largest * 2.0**n for n in range(-30, 31)]).to(torch.bfloat16)
    steps = torch.stack([(edges.view(torch.int16) + i).view(torch.bfloat16) for i in (-1, 0, 1)])
    x = steps.flatten().unsqueeze(1) * random(183, 64, seed=3).clamp(-1, 1).to(torch.bfloat16)
    x[:, ::16] = steps.flatten().unsqueeze(1)
    x[1::5, :32] = 0  # a block of zeros keeps a scale
    wanted = ops.act_rounded(x) if mode == ACT else ops.fp4_rounded(x, mode == FP4_KV).float()
    assert same_bits(apply(x.float(), mode), wanted)
