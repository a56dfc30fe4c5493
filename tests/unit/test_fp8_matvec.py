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
        (13, 700),  # a block and a part both ways
    ],
)
def test_kernel_is_the_reference(rows: int, columns: int):
    generator = torch.Generator().manual_seed(rows)
    weight, scale = fp8_rows_quantize(torch.randn(rows, columns, generator=generator))
    x = torch.randn(1, columns, generator=generator)
    found = fp8_matvec.fp8_matvec(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE)).cpu()
    wanted = reference.linear(x, weight, scale)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-6  # fp32 sums in another order


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
