"""Products with one NVFP4 matrix: one token on a GPU in Triton, everything else by the definition.

Definition: `reference.nvfp4_linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.formats import NVFP4_GROUP, nvfp4_values
from kernels.nvfp4_expert import BLOCK_GROUPS, BLOCK_ROWS, _has_cvt, _row_dots

MAX_RUN = 4096  # scales that a program holds at once: fewer rows of a long matrix
WIDENED_ROWS = 2048  # of a matrix that are widened at once for several tokens


@triton.jit
def _nvfp4_matvec_kernel(
    codes_at, scales_from_codes, x, global_scale, out, num_rows, columns: tl.constexpr, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, block_groups: tl.constexpr, block_scales: tl.constexpr,
):  # fmt: skip
    row_start = tl.program_id(0) * block_rows
    rows = row_start + tl.arange(0, block_rows)
    dots = _row_dots(
        codes_at, 0, scales_from_codes, row_start, x, columns, num_rows, has_cvt, block_rows, block_groups, block_scales
    )  # fmt: skip
    tl.store(out + rows, dots * tl.load(global_scale), mask=rows < num_rows)


def linear(x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Return x W^T for an NVFP4 matrix: sums in fp32, the global scale applied once.

    x: [T, K].  codes: [N, K/2] uint8.  scales: [N, K/16] float8_e4m3fn.  global_scale: [1] fp32.  [T, N] in x's dtype.
    """
    if not x.is_cuda or x.dtype is torch.float32:
        return reference.nvfp4_linear(x, codes, scales, global_scale)
    if x.shape[0] == 1:
        return nvfp4_matvec(x, codes, scales, global_scale)
    out = torch.empty(x.shape[0], codes.shape[0], dtype=x.dtype, device=x.device)
    for at in range(0, codes.shape[0], WIDENED_ROWS):
        rows = slice(at, at + WIDENED_ROWS)
        # a code times its scale has 5 significant bits: the narrow dtype loses nothing, sums are fp32
        values = nvfp4_values(codes[rows], scales[rows]).to(x.dtype)
        out[:, rows] = torch.mm(x, values.t(), out_dtype=torch.float32).mul_(global_scale)
    return out


def nvfp4_matvec(
    x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, has_cvt: bool | None = None
) -> Tensor:
    """x: [1, K]; the rest as for `linear`.  Returns [1, N] in x's dtype.

    has_cvt: use the hardware conversion; None asks the device.
    """
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    groups = columns // NVFP4_GROUP
    block_rows = BLOCK_ROWS
    while block_rows > 1 and block_rows * groups > MAX_RUN:
        block_rows //= 2
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    codes, scales = _aligned(codes), _aligned(scales.view(torch.uint8))
    _nvfp4_matvec_kernel[(triton.cdiv(rows, block_rows),)](
        codes.data_ptr(), scales.data_ptr() - codes.data_ptr(), x, global_scale, out, rows, columns=columns,
        has_cvt=_has_cvt(x.device) if has_cvt is None else has_cvt, block_rows=block_rows,
        block_groups=min(BLOCK_GROUPS, triton.next_power_of_2(groups)),
        block_scales=triton.next_power_of_2(block_rows * groups),
    )  # fmt: skip
    return out


def _aligned(part: Tensor) -> Tensor:
    """Return a tensor that starts where a wide read may: the file that it comes from promises no alignment."""
    return part.clone() if part.data_ptr() % 16 else part
