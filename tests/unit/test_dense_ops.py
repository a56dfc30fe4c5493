"""The Triton launches around a dense layer's products against plain torch; interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import dense_ops, reference, reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("columns", [64, 80])  # a whole block and a part of one
def test_norm_rotation_and_product_are_the_reference(columns):
    x, other, gain = randn(3, columns), randn(3, columns, seed=1), randn(columns, seed=2)
    there = [t.to(DEVICE) for t in (x, other, gain)]
    found = dense_ops.launch_rms_norm(there[0], there[2], 1e-6).cpu()
    torch.testing.assert_close(found, reference.rms_norm(x, gain, 1e-6))
    found = dense_ops.launch_silu_product(*there[:2]).cpu()
    torch.testing.assert_close(found, reference.silu_product(x, other))
    heads = x.view(3, 2, columns // 2)
    tables = randn(2, 3, columns // 4, seed=3)
    found = dense_ops.launch_rotate(heads.to(DEVICE), *tables.to(DEVICE)).cpu()
    torch.testing.assert_close(found, reference.rotate(heads, *tables))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "first", "end"),
    [
        (4, 2, 16, 5, 6),  # one key
        (
            7,
            1,
            24,
            3,
            40,
        ),  # fewer runs than programs; a dimension and a group that are no powers of two
        (34, 2, 16, 0, 32),  # a group of more rows than a product needs; from the first row
        (4, 2, 16, 1, 1100),  # two runs a program, and programs without one
    ],
)
@pytest.mark.parametrize("cases", [1, 3])
def test_attention_reads_its_span_alone(heads, kv_heads, dim, cases, first, end):
    """What lies outside the span is not a number, and shows nowhere."""
    rows, length = 1200, 200
    keys, values = randn(2, rows, kv_heads, dim, seed=first + end).unbind(0)
    for part in (keys, values):
        part[:first], part[end:] = float("nan"), float("nan")
    q, places = randn(cases, heads, dim, seed=7), torch.arange(rows)
    span = torch.tensor([first, end], dtype=torch.int32)
    wanted = reference_attention.attend_span(q, keys, values, places, span, length)
    there = (t.to(DEVICE) for t in (q, keys, values, places, span))
    found = dense_ops.launch_attend_span(*there, length).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)


def test_attention_in_a_narrow_dtype_is_the_wide_one_rounded():
    keys, values = randn(2, 300, 2, 16, dtype=torch.float16).unbind(0)
    q, span = randn(1, 4, 16, seed=1, dtype=torch.float16), torch.tensor([2, 290]).int()
    places = torch.arange(300)
    there = (t.to(DEVICE) for t in (q, keys, values, places, span))
    found = dense_ops.launch_attend_span(*there).cpu().float()
    wanted = reference_attention.attend_span(
        q.float(), keys.float(), values.float(), places, span, 1
    )
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3
