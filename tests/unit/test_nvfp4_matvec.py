"""The Triton product with an NVFP4 matrix, and rows of int8, against weights decoded number by number; interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import fp8_matvec, nvfp4_matvec, reference
from kernels.formats import int8_rows_quantize, nearest_e2m1, nvfp4_quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte: int) -> float:
    """One non-negative E4M3 number by its definition: 4 bits of exponent, bias 7, 3 of mantissa."""
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def decoded(codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """The weights, each by itself: float64."""
    raw, steps = codes.numpy(), scales.view(torch.uint8).numpy()
    rows, columns = raw.shape[0], 2 * raw.shape[1]
    out = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            code = (raw[row, column // 2] >> (4 * (column % 2))) & 15
            value = -E2M1[code & 7] if code & 8 else E2M1[code & 7]
            out[row, column] = value * e4m3(int(steps[row, column // 16]))
    return torch.from_numpy(out) * float(global_scale)


@pytest.mark.parametrize(
    ("rows", "columns", "tokens"),
    [
        (8, 512, 1),  # whole blocks
        (1, 16, 1),  # one group
        (13, 176, 1),  # a part of a block both ways
        (3, 16 * 1040, 1),  # so long that a program takes fewer rows
        (21, 96, 5),  # a prompt
    ],
)
def test_products_are_those_of_the_decoded_weights(rows, columns, tokens):
    generator = torch.Generator().manual_seed(rows)
    codes, scales, whole = nvfp4_quantize(torch.randn(rows, columns, generator=generator))
    whole = whole.reshape(1)
    x = torch.randn(tokens, columns, generator=generator)
    wanted = x.double() @ decoded(codes, scales, whole).T
    product = nvfp4_matvec.nvfp4_matvec if tokens == 1 else nvfp4_matvec.linear
    found = product(*(t.to(DEVICE) for t in (x, codes, scales, whole))).cpu()
    for got in (found, reference.nvfp4_linear(x, codes, scales, whole)):
        assert float((got - wanted).norm() / wanted.norm()) < 2e-6  # fp32 sums in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (13, 176), (1, 16)])
def test_a_widened_matrix_is_exact(rows, columns, dtype):
    """Whole programs, a part of one, a single group: no number is rounded, none is left out."""
    codes, scales, _ = nvfp4_quantize(torch.randn(rows, columns))
    found = nvfp4_matvec.nvfp4_widen(codes.to(DEVICE), scales.to(DEVICE), dtype).cpu()
    assert torch.equal(found.double(), decoded(codes, scales, torch.ones(1)))


def test_parts_that_start_anywhere_are_read_right():
    """A record out of a file promises no alignment."""
    codes, scales, whole = nvfp4_quantize(torch.randn(4, 32))
    shifted = []
    for part in (codes, scales.view(torch.uint8)):
        flat = torch.zeros(part.numel() + 3, dtype=torch.uint8)
        flat[3:] = part.flatten()
        shifted.append(flat[3:].view(part.shape))
    x = torch.randn(1, 32)
    there = (x, shifted[0], shifted[1].view(torch.float8_e4m3fn), whole.reshape(1))
    found = nvfp4_matvec.nvfp4_matvec(*(t.to(DEVICE) for t in there)).cpu()
    wanted = nvfp4_matvec.nvfp4_matvec(
        *(t.to(DEVICE) for t in (x, codes, scales, whole.reshape(1)))
    )
    assert torch.equal(found, wanted.cpu())


@pytest.mark.parametrize(("rows", "columns"), [(8, 512), (1, 3), (13, 700), (9, 4500)])
def test_int8_rows_are_products_of_integers(rows, columns):
    generator = torch.Generator().manual_seed(rows)
    values, scale = int8_rows_quantize(torch.randn(rows, columns, generator=generator))
    x = torch.randn(1, columns, generator=generator)
    wanted = x.double() @ (values.double() * scale.double().unsqueeze(1)).T
    found = fp8_matvec.fp8_matvec(*(t.to(DEVICE) for t in (x, values, scale))).cpu()
    for got in (found, reference.linear(x, values, scale)):
        assert float((got - wanted).norm() / wanted.norm()) < 2e-6


def test_int8_rows_are_the_nearest_steps():
    weight = torch.randn(7, 300) * torch.logspace(-3, 3, 7).unsqueeze(1)
    weight[3] = 0
    values, scale = int8_rows_quantize(weight)
    error = (values.double() * scale.double().unsqueeze(1) - weight).abs()
    assert bool((error <= scale.double().unsqueeze(1) * 0.50001).all())
    assert values[:, :].abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]


def test_codes_are_the_nearest_and_ties_go_to_the_even_one():
    grid = torch.cat(
        [torch.arange(-900, 901) / 100, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])]
    )
    found = nearest_e2m1(grid)
    for value, code in zip(grid.tolist(), found.tolist(), strict=True):
        distances = [(abs(abs(value) - e), i % 2, i) for i, e in enumerate(E2M1)]
        assert code & 7 == min(distances)[2], value
    assert bool(((found & 8) != 0).eq(grid.signbit()).all())


def test_of_two_peaks_each_group_takes_the_nearer():
    weight = torch.randn(5, 160)
    either = [nvfp4_quantize(weight, peaks=(peak,)) for peak in (6.0, 4.0)]
    best = nvfp4_quantize(weight, peaks=(6.0, 4.0))

    def errors(parts):
        return (decoded(*parts) - weight).square().view(5, 10, 16).sum(-1)

    wanted = torch.minimum(errors(either[0]), errors(either[1]))
    assert torch.allclose(errors(best), wanted, rtol=1e-5)
    assert not torch.equal(errors(best), errors(either[0]))


def test_rows_of_a_matrix_round_as_the_whole_does():
    weight = torch.randn(9, 64)
    whole = nvfp4_quantize(weight)
    parts = [nvfp4_quantize(rows, weight.abs().amax()) for rows in weight.split(4)]
    assert torch.equal(torch.cat([p[0] for p in parts]), whole[0])
    scales = torch.cat([p[1].view(torch.uint8) for p in parts])
    assert torch.equal(scales, whole[1].view(torch.uint8))
    assert {float(p[2]) for p in parts} == {float(whole[2])}
