"""Products with one NVFP4 matrix on a GPU: one token in Triton, several by a library once the matrix is widened.

Definition: `reference.nvfp4_linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.formats import NVFP4_GROUP
from kernels.nvfp4_expert import BLOCK_GROUPS, BLOCK_ROWS, _e2m1_pair, _e4m3, _has_cvt, _row_dots

MAX_RUN = 4096  # scales that a program holds at once: fewer rows of a long matrix
WIDENED_GROUPS = 128  # of one program of `nvfp4_widen`


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


@triton.jit
def _widen_kernel(
    codes, scales, out, num_groups, has_cvt: tl.constexpr, block_groups: tl.constexpr, group_size: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * block_groups + tl.arange(0, block_groups)
    is_group = group < num_groups
    byte = tl.arange(0, group_size // 2)
    at = group[:, None] * (group_size // 2) + byte[None, :]
    low, high = _e2m1_pair(
        tl.load(codes + at, mask=is_group[:, None], other=0).to(tl.int32), has_cvt
    )
    values = tl.reshape(tl.join(low, high), [block_groups, group_size])
    values *= _e4m3(tl.load(scales + group, mask=is_group, other=0))[:, None]
    column = tl.arange(0, group_size)
    tl.store(
        out + group[:, None] * group_size + column[None, :],
        values.to(out.dtype.element_ty),
        mask=is_group[:, None],
    )


def linear(x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Return x W^T for an NVFP4 matrix: sums in fp32, the global scale applied once.

    x: [T, K].  codes: [N, K/2] uint8.  scales: [N, K/16] float8_e4m3fn.  global_scale: [1] fp32.  [T, N] in x's dtype.
    """
    if not x.is_cuda or x.dtype is torch.float32:
        return reference.nvfp4_linear(x, codes, scales, global_scale)
    if x.shape[0] == 1:
        return nvfp4_matvec(x, codes, scales, global_scale)
    # a code times its scale has 5 significant bits: the narrow dtype loses nothing, sums are fp32
    values = nvfp4_widen(codes, scales, x.dtype)
    product = torch.mm(x, values.t(), out_dtype=torch.float32)
    return product.mul_(global_scale).to(x.dtype)


def nvfp4_widen(
    codes: Tensor, scales: Tensor, dtype: torch.dtype, has_cvt: bool | None = None
) -> Tensor:
    """Return `formats.nvfp4_values` in a 16-bit dtype, exact, in one launch: [N, K].

    codes: [N, K/2] uint8.  scales: [N, K/16] float8_e4m3fn, none negative.  has_cvt: as for `nvfp4_matvec`.
    """
    out = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    _widen_kernel[(triton.cdiv(scales.numel(), WIDENED_GROUPS),)](
        codes, scales.view(torch.uint8), out, scales.numel(),
        has_cvt=_has_cvt(codes.device) if has_cvt is None else has_cvt, block_groups=WIDENED_GROUPS,
        group_size=NVFP4_GROUP,
    )  # fmt: skip
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
