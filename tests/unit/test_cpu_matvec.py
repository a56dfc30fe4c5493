"""Rows of a bf16 matrix on the CPU against sums in fp64: only fp32's own rounding may show."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu_matvec import TORCH_ROWS, bf16_rows, has_numba

WAYS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not has_numba(), reason="numba is not installed")),
]
UNIT = 2.0**-24  # of fp32


@pytest.mark.parametrize("is_compiled", WAYS, ids=["torch", "numba"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 33), (TORCH_ROWS + 3, 640), (129, 5120)])
def test_sums_are_fp32(rows: int, columns: int, is_compiled: bool):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).bfloat16()
    x = torch.randn(columns, generator=generator).bfloat16()
    found = torch.full((rows,), float("nan"))
    bf16_rows(weight, x.float(), found, 0, rows, is_compiled)
    exact = weight.double() @ x.double()
    bound = columns * UNIT * (weight.double().abs() @ x.double().abs())
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("is_compiled", WAYS, ids=["torch", "numba"])
def test_a_row_does_not_depend_on_its_neighbours(is_compiled: bool):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 1000, generator=generator).bfloat16()
    x = torch.randn(1000, generator=generator).bfloat16().float()
    whole, parts = torch.empty(300), torch.full((300,), float("nan"))
    bf16_rows(weight, x, whole, 0, 300, is_compiled)
    for first, last in ((17, 18), (0, 17), (18, 300)):
        bf16_rows(weight, x, parts, first, last, is_compiled)
        assert parts[:first].isnan().any() == (first == 17)  # nothing else is written
    if is_compiled:
        assert torch.equal(parts, whole)
    else:  # a library's product of one row may have another order
        assert torch.allclose(parts, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("is_compiled", WAYS, ids=["torch", "numba"])
def test_infinity_and_nan_are_what_they_are(is_compiled: bool):
    weight = torch.ones(3, 64).bfloat16()
    weight[0, 5], weight[1, 6] = float("inf"), float("nan")
    found = torch.zeros(3)
    bf16_rows(weight, torch.ones(64), found, 0, 3, is_compiled)
    assert found[0] == float("inf")
    assert found[1].isnan()
    assert found[2] == 64


def test_torchs_own_product_would_not_do():
    """Why rows are widened: bf16 in, bf16 out."""
    weight, x = torch.ones(1, 4096).bfloat16(), torch.ones(4096).bfloat16()
    weight[0, 0] = 2.0
    found = torch.zeros(1)
    bf16_rows(weight, x.float(), found, 0, 1, is_compiled=False)
    assert float(found[0]) == 4097.0
    assert float(torch.mv(weight, x)[0]) != 4097.0
