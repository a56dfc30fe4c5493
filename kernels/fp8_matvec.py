"""Products with weights kept as FP8 or int8 rows: one token on a GPU in Triton, everything else by the definition.

Definitions: `reference.linear`, `reference.linear_pair`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference

BLOCK_ROWS = 2
# columns of one tile and warps, for rows up to 4096 and for longer ones: the fastest of 21 and 12 shapes on an H200
SHORT, LONG = (1024, 1), (2048, 2)


@triton.jit
def _row_dots(
    weight, rows, num_rows, x, columns: tl.constexpr, is_int8: tl.constexpr, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Products of some E4M3 or int8 rows with x, without their scales: [block_rows] fp32."""
    total = tl.zeros([block_rows], dtype=tl.float32)
    for start in tl.static_range(0, columns, block):
        column = start + tl.arange(0, block)
        at = rows[:, None].to(tl.int64) * columns + column[None, :]
        mask = (rows < num_rows)[:, None] & (column < columns)[None, :]
        byte = tl.load(weight + at, mask=mask, other=0)
        if is_int8:
            value = byte.to(tl.int8, bitcast=True).to(tl.float32)
        elif has_cvt:
            value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:  # E4M3 bits moved into fp16 are the value times 2^-8; fp16 keeps subnormals
            word = byte.to(tl.int16)
            bits = ((word & 0x7F) << 7) | ((word & 0x80) << 8)
            value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x32 = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        total += tl.sum(value * x32[None, :], axis=1)
    return total


@triton.jit
def _fp8_matvec_kernel(
    weight, row_scale, x, out, num_rows, other, other_out, num_others, programs, columns: tl.constexpr,
    is_int8: tl.constexpr, has_cvt: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < programs:
        rows = program * block_rows + tl.arange(0, block_rows)
        total = _row_dots(weight, rows, num_rows, x, columns, is_int8, has_cvt, block_rows, block)
        scale = tl.load(row_scale + rows, mask=rows < num_rows, other=0.0)
        tl.store(out + rows, total * scale, mask=rows < num_rows)
    else:
        rows = (program - programs) * block_rows + tl.arange(0, block_rows)
        total = tl.zeros([block_rows], dtype=tl.float32)
        for start in tl.static_range(0, columns, block):
            column = start + tl.arange(0, block)
            mask = (rows < num_others)[:, None] & (column < columns)[None, :]
            w = tl.load(other + rows[:, None] * columns + column[None, :], mask=mask, other=0.0)
            x32 = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
            total += tl.sum(w.to(tl.float32) * x32[None, :], axis=1)
        tl.store(other_out + rows, total, mask=rows < num_others)


def linear(x: Tensor, weight: Tensor, row_scale: Tensor | None = None) -> Tensor:
    """Return x W^T for a plain weight, or (x Q^T) * row_scale for 8-bit rows: sums in fp32, scaled once.

    x: [T, K].  weight: [N, K] in x's dtype, or float8_e4m3fn or int8.  row_scale: [N] fp32, only with these.
    """
    if row_scale is None or not x.is_cuda:
        return reference.linear(x, weight, row_scale)
    if x.shape[0] == 1:
        return fp8_matvec(x, weight, row_scale)
    if x.dtype is torch.float32:
        return reference.linear(x, weight, row_scale)
    # every E4M3 or int8 value is a bf16 value: the product in the narrow dtype loses nothing, its sums are fp32
    product = torch.mm(x, weight.to(x.dtype).t(), out_dtype=torch.float32)
    return product.mul_(row_scale).to(x.dtype)


def linear_pair(
    x: Tensor, weight: Tensor, row_scale: Tensor | None, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `linear(x, weight, row_scale)` and x other^T, for one token on a GPU in one launch.

    x: [T, K].  weight: [N, K].  other: [M, K] in x's dtype.
    """
    if row_scale is None or not x.is_cuda or x.shape[0] != 1:
        return linear(x, weight, row_scale), reference.linear(x, other)
    out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
    other_out = torch.empty(1, other.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, row_scale, out, other, other_out)
    return out, other_out


def fp8_matvec(x: Tensor, weight: Tensor, row_scale: Tensor) -> Tensor:
    """x: [1, K].  weight: [N, K] float8_e4m3fn or int8.  row_scale: [N] fp32.  Returns [1, N] in x's dtype."""
    out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
    _launch(x, weight, row_scale, out, x[:0], out)
    return out


@functools.cache
def _has_cvt(device: torch.device) -> bool:
    """Whether the device converts E4M3 in hardware (compute capability 8.9 and up)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _launch(
    x: Tensor, weight: Tensor, row_scale: Tensor, out: Tensor, other: Tensor, other_out: Tensor
) -> None:
    rows, columns = weight.shape
    programs = triton.cdiv(rows, BLOCK_ROWS)
    grid = (programs + triton.cdiv(other.shape[0], BLOCK_ROWS),)
    block, num_warps = SHORT if columns <= 4096 else LONG
    _fp8_matvec_kernel[grid](
        weight.view(torch.uint8), row_scale, x, out, rows, other, other_out, other.shape[0], programs,
        columns=columns, is_int8=weight.dtype is torch.int8, has_cvt=_has_cvt(x.device), block_rows=BLOCK_ROWS,
        block=min(block, triton.next_power_of_2(columns)), num_warps=num_warps,
    )  # fmt: skip
