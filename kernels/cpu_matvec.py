"""A bf16 matrix times a vector on the CPU, read from RAM once and summed in fp32.

Compiled by numba where it is installed (the extra `cpu`); else plain torch widens a few rows at a time, which stay in
the core's cache. torch's own bf16 product rounds its result to bf16, which is why it is not used. Both leave Python's
lock alone while they compute: several threads take rows of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import util
from typing import Any

import numpy as np
import torch
from torch import Tensor

# (weight [N, K] as uint16, x [K] fp32, out [N] fp32, first row, row behind the last)
Product = Callable[[Any, Any, Any, int, int], None]

TORCH_ROWS = 128  # widened at once: 2.6 MB of 5,120 columns


def has_numba() -> bool:
    """Return whether rows are multiplied by compiled code; without it torch takes three times as long."""
    return util.find_spec("numba") is not None


def bf16_rows(
    weight: Tensor, x: Tensor, out: Tensor, first: int, last: int, is_compiled: bool | None = None
) -> None:
    """Fill out[first:last] with those rows of W x, by the calling thread alone.

    weight: [N, K] bf16, x: [K] fp32 of bf16 values, out: [N] fp32; contiguous, in RAM. Products are exact, sums are in
    fp32 in an order of the processor's choice, the same for a row whatever rows are asked for: off the exact sum by at
    most K * 2^-24 of the sum of |w x|.

    is_compiled: by numba; None: where it is installed.
    """
    if has_numba() if is_compiled is None else is_compiled:
        bits = weight.view(torch.uint16).numpy()
        _compiled()(bits, x.numpy(), out.numpy(), first, last)
        return
    wide = torch.empty(min(TORCH_ROWS, last - first), weight.shape[1])
    for start in range(first, last, TORCH_ROWS):
        rows = slice(start, min(start + TORCH_ROWS, last))
        part = wide[: rows.stop - start].copy_(weight[rows])
        torch.mv(part, x, out=out[rows])


@functools.cache
def _compiled() -> Product:
    """Compile once, in a third of a second."""
    from kernels.compiler import numba

    signature = "void(uint16[:, ::1], float32[::1], float32[::1], int64, int64)"

    # sums may be taken in any order, so that they fill vector registers; NaN and infinity stay what they are
    @numba.njit(signature, nogil=True, fastmath={"reassoc", "contract", "nsz"})  # type: ignore[untyped-decorator]
    def rows(weight: Any, x: Any, out: Any, first: int, last: int) -> None:
        for row in range(first, last):
            total = np.float32(0.0)
            for column in range(weight.shape[1]):
                bits = np.uint32(np.uint32(weight[row, column]) << np.uint32(16))
                total += bits.view(np.float32) * x[column]
            out[row] = total

    product: Product = rows
    return product
