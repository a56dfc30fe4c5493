"""Products with weights kept as FP8 rows: one token on a GPU in Triton, everything else by the definition.

Definition: `reference.linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference

BLOCK_ROWS = 8
BLOCK_COLUMNS = 512


@triton.jit
def _fp8_matvec_kernel(
    weight, row_scale, x, out, num_rows, columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    is_row = rows < num_rows
    total = tl.zeros([block_rows], dtype=tl.float32)
    for start in range(0, columns, block_columns):
        column = start + tl.arange(0, block_columns)
        is_column = column < columns
        at = rows[:, None].to(tl.int64) * columns + column[None, :]
        byte = tl.load(weight + at, mask=is_row[:, None] & is_column[None, :], other=0).to(tl.int16)
        # E4M3 bits moved into fp16 are the value times 2^-8; fp16 keeps subnormals
        value = (
            (((byte & 0x7F) << 7) | ((byte & 0x80) << 8))
            .to(tl.float16, bitcast=True)
            .to(tl.float32)
        )
        total += tl.sum(
            value * tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)[None, :], axis=1
        )
    scale = tl.load(row_scale + rows, mask=is_row, other=0.0) * 256.0
    tl.store(out + rows, total * scale, mask=is_row)


def linear(x: Tensor, weight: Tensor, row_scale: Tensor | None = None) -> Tensor:
    """Return x W^T for a plain weight, or (x Q^T) * row_scale for FP8 rows: sums in fp32, scaled once.

    x: [T, K].  weight: [N, K] in x's dtype or float8_e4m3fn.  row_scale: [N] fp32, only with float8.
    """
    if row_scale is None or not x.is_cuda or x.shape[0] != 1:
        return reference.linear(x, weight, row_scale)
    return fp8_matvec(x, weight, row_scale)


def fp8_matvec(x: Tensor, weight: Tensor, row_scale: Tensor) -> Tensor:
    """x: [1, K].  weight: [N, K] float8_e4m3fn.  row_scale: [N] fp32.  Returns [1, N] in x's dtype."""
    rows, columns = weight.shape
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    sizes = {"columns": columns, "block_rows": BLOCK_ROWS, "block_columns": BLOCK_COLUMNS}
    grid = (triton.cdiv(rows, BLOCK_ROWS),)
    _fp8_matvec_kernel[grid](weight.view(torch.uint8), row_scale, x, out, rows, **sizes)
    return out
