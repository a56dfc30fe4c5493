"""Rows that the host computed, on their way to the device, in Triton: one launch, whichever rows they are."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _take_rows_kernel(table, out, hidden, block: tl.constexpr):
    row = tl.program_id(0)
    source = tl.load(table + row)
    if source != 0:
        column = tl.program_id(1) * block + tl.arange(0, block)
        mask = column < hidden
        values = tl.load(source.to(tl.pointer_type(tl.float32)) + column, mask=mask, other=0.0)
        tl.store(out + row * hidden + column, values.to(out.dtype.element_ty), mask=mask)


def take_rows(table: Tensor, out: Tensor) -> None:
    """Fill some rows of out [k, H] from fp32 rows elsewhere, which out's dtype must hold exactly.

    table: [k] int64, addresses of rows (pinned RAM will do); 0 leaves a row untouched.
    """
    rows, hidden = out.shape
    _take_rows_kernel[(rows, triton.cdiv(hidden, BLOCK))](table, out, hidden, block=BLOCK)
