"""The Triton product with FP8 rows against its definition, interpreted."""

from __future__ import annotations

import pytest
import torch

from kernels import fp8_matvec, reference
from kernels.formats import fp8_rows_quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (8, 512),  # exactly one block
        (1, 16),  # one row, most columns masked
        (13, 700),  # a part of a block both ways
        (9, 4500),  # rows of more than one tile
    ],
)
def test_kernel_is_the_reference(rows: int, columns: int):
    generator = torch.Generator().manual_seed(rows)
    weight, scale = fp8_rows_quantize(torch.randn(rows, columns, generator=generator))
    x = torch.randn(1, columns, generator=generator)
    found = fp8_matvec.fp8_matvec(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE)).cpu()
    wanted = reference.linear(x, weight, scale)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-6  # fp32 sums in another order


@pytest.mark.parametrize("others", [1, 19])
def test_two_matrices_in_one_launch(others: int):
    generator = torch.Generator().manual_seed(1)
    weight, scale = fp8_rows_quantize(torch.randn(21, 160, generator=generator))
    other, x = (
        torch.randn(others, 160, generator=generator),
        torch.randn(1, 160, generator=generator),
    )
    out, other_out = (
        torch.full((1, 21), torch.nan).to(DEVICE),
        torch.full((1, others), torch.nan).to(DEVICE),
    )
    fp8_matvec._launch(
        x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), out, other.to(DEVICE), other_out
    )
    for found, wanted in zip(
        (out, other_out), reference.linear_pair(x, weight, scale, other), strict=True
    ):
        assert float((found.cpu() - wanted).norm() / wanted.norm()) < 2e-6


def test_every_finite_byte_is_decoded_as_torch_does():
    """One row per byte: the product with one is the value itself, signs and subnormals included."""
    weight = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    weight = weight.view(-1, 1)
    ones = torch.ones(len(weight))
    found = fp8_matvec.fp8_matvec(
        torch.ones(1, 1).to(DEVICE), weight.to(DEVICE), ones.to(DEVICE)
    ).cpu()
    assert torch.equal(found[0], weight.float()[:, 0])
