"""Products of one token with DeepSeek's weights, in Triton: FP8 blocks in their order, and steady sums.

Definitions in `reference_deepseek`: `act_rounded`, `quantized_linear`, `steady_linear`, `swiglu_expert`. A block's 32
products are summed first, then the blocks one after the other: the order is part of the model's arithmetic.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_numbers import act_rounded, bf16_rounded

BLOCK = tl.constexpr(32)  # columns that share a scale, and rows of an FP8 weight's block


@triton.jit
def e8m0(byte):
    """Powers of two from their exponents: fp32."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte, has_cvt: tl.constexpr):
    """E4M3 values: fp32, exact."""
    if has_cvt:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # its bits moved into fp16 are the value times 2^-8; fp16 keeps subnormals
        word = byte.to(tl.int16)
        bits = ((word & 0x7F) << 7) | ((word & 0x80) << 8)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return value


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """fp32 x in another dtype, rounded to nearest also where the interpreter would cut bf16 off."""
    if dtype == tl.bfloat16:
        x = bf16_rounded(x)
    return x.to(dtype)


@triton.jit
def in_order(total, sums, tile_blocks: tl.constexpr):
    """total [R] plus the columns of sums [R, tile_blocks], one after the other."""
    place = tl.arange(0, tile_blocks)
    for block in tl.static_range(tile_blocks):
        total += tl.sum(tl.where(place[None, :] == block, sums, 0.0), axis=1)
    return total


@triton.jit
def _block_dots(
    weight, scale, rows, num_rows, x, columns: tl.constexpr, has_cvt: tl.constexpr, block_rows: tl.constexpr,
    tile_blocks: tl.constexpr,
):  # fmt: skip
    """Products of some FP8 rows with x, summed by blocks in their order: [block_rows] fp32."""
    blocks: tl.constexpr = columns // BLOCK
    total = tl.zeros([block_rows], dtype=tl.float32)
    is_row = rows < num_rows
    inside = tl.arange(0, BLOCK)
    for start in range(0, blocks, tile_blocks):
        block = start + tl.arange(0, tile_blocks)
        is_block = block < blocks
        column = block[:, None] * BLOCK + inside[None, :]
        at = rows[:, None, None].to(tl.int64) * columns + column[None, :, :]
        byte = tl.load(weight + at, mask=is_row[:, None, None] & is_block[None, :, None], other=0)
        x32 = tl.load(x + column, mask=is_block[:, None], other=0.0).to(tl.float32)
        sums = tl.sum(e4m3(byte, has_cvt) * x32[None, :, :], axis=2)
        at_scale = (rows // BLOCK)[:, None] * blocks + block[None, :]
        step = tl.load(scale + at_scale, mask=is_row[:, None] & is_block[None, :], other=0)
        total = in_order(total, sums * e8m0(step), tile_blocks)
    return total


@triton.jit
def _fp8_kernel(
    x, weight, scale, out, num_rows, group_rows, columns: tl.constexpr, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, tile_blocks: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block_rows
    rows = first + tl.arange(0, block_rows)
    x += (first // group_rows) * columns
    total = _block_dots(weight, scale, rows, num_rows, x, columns, has_cvt, block_rows, tile_blocks)
    tl.store(out + rows, narrowed(total, out.dtype.element_ty), mask=rows < num_rows)


@triton.jit
def _fp8_swiglu_kernel(
    x, gate, gate_scale, up, up_scale, out, num_rows, limit, columns: tl.constexpr, has_cvt: tl.constexpr,
    tile_blocks: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = _block_dots(gate, gate_scale, rows, num_rows, x, columns, has_cvt, BLOCK, tile_blocks)
    u = _block_dots(up, up_scale, rows, num_rows, x, columns, has_cvt, BLOCK, tile_blocks)
    tl.store(
        out + rows, swiglu_rounded(g, u, 1.0, limit).to(out.dtype.element_ty), mask=rows < num_rows
    )


@triton.jit
def swiglu_rounded(g, u, weight, limit):
    """silu(g) * u * weight for a block of 32, clamped before, rounded to bf16 and quantised after: [32] fp32."""
    g = tl.minimum(bf16_rounded(g), limit)
    u = tl.minimum(tl.maximum(bf16_rounded(u), -limit), limit)
    e = tl.exp(-tl.abs(g))  # of the side that cannot overflow
    silu = tl.div_rn(tl.where(g >= 0, g, g * e), 1.0 + e)
    h = bf16_rounded(silu * u * weight)
    return tl.reshape(act_rounded(tl.reshape(h, [1, 32])), [32])


@triton.jit
def _act_round_kernel(x, out, num_blocks, tile_blocks: tl.constexpr):
    block = tl.program_id(0) * tile_blocks + tl.arange(0, tile_blocks)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (block < num_blocks)[:, None] & (at >= 0)
    x32 = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, act_rounded(x32).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _steady_kernel(
    x, ratio, weight, out, num_rows, columns: tl.constexpr, has_ratio: tl.constexpr, is_double: tl.constexpr,
    block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    kind: tl.constexpr = tl.float64 if is_double else tl.float32
    total = tl.zeros([block_rows], dtype=kind)
    for start in range(0, columns, block):
        column = start + tl.arange(0, block)
        mask = (rows < num_rows)[:, None] & (column < columns)[None, :]
        w = tl.load(
            weight + rows[:, None].to(tl.int64) * columns + column[None, :], mask=mask, other=0.0
        )
        value = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        if has_ratio:
            value *= tl.load(ratio + column, mask=column < columns, other=0.0)
        total += tl.sum(w.to(kind) * value.to(kind)[None, :], axis=1)
    tl.store(out + rows, narrowed(total.to(tl.float32), out.dtype.element_ty), mask=rows < num_rows)


@functools.cache
def has_cvt(device: torch.device) -> bool:
    """Whether the device converts E4M3 in hardware (compute capability 8.9 and up)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


ROWS, TILE_BLOCKS, WARPS = 16, 8, 4  # of an FP8 product
SWIGLU_WARPS = 8
STEADY_ROWS, STEADY_BLOCK = 2, 1024
ACT_TILE = 16


def tile(x: Tensor, on_gpu: int, limit: int) -> int:
    """Return how many rows a program takes: the interpreter pays for each program, whatever it does."""
    rows: int = min(on_gpu if x.is_cuda else 128, triton.next_power_of_2(limit))
    return rows


def tile_blocks(columns: int) -> int:
    """Return how many blocks of a row are in flight."""
    blocks: int = min(TILE_BLOCKS, triton.next_power_of_2(columns // 32))
    return blocks


def act_round(x: Tensor, out: Tensor) -> None:
    """Fill out with what `act_rounded` makes of x: both bf16, contiguous, rows of a multiple of 32."""
    num_blocks = x.numel() // 32
    blocks = tile(x, ACT_TILE, num_blocks)
    _act_round_kernel[(triton.cdiv(num_blocks, blocks),)](x, out, num_blocks, tile_blocks=blocks)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, groups: int = 1) -> None:
    """Fill out [N] with W x: x [groups * K] bf16 (already rounded where it is to be), weight [N, K] float8_e4m3fn.

    scale: [N / 32, K / 32] E8M0 as bytes or float8_e8m0fnu.  groups: the first N / groups rows see the first K of x,
    and so on.  out: bf16 or fp32.
    """
    num_rows, columns = weight.shape
    rows = (
        math.gcd(tile(x, ROWS, num_rows), num_rows // groups)
        if groups > 1
        else tile(x, ROWS, num_rows)
    )
    _fp8_kernel[(triton.cdiv(num_rows, rows),)](
        x, weight.view(torch.uint8), scale.view(torch.uint8), out, num_rows, num_rows // groups, columns=columns,
        has_cvt=has_cvt(x.device), block_rows=rows, tile_blocks=tile_blocks(columns), num_warps=WARPS,
    )  # fmt: skip


def fp8_swiglu(
    x: Tensor, gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], out: Tensor, limit: float
) -> None:
    """Fill out [I] bf16 with the quantised inner vector of a shared expert.

    x: [H] bf16, rounded.  gate, up: weight [I, H] float8_e4m3fn and scale [I / 32, H / 32].
    """
    num_rows, columns = gate[0].shape
    planes = [part.view(torch.uint8) for part in (*gate, *up)]
    _fp8_swiglu_kernel[(triton.cdiv(num_rows, 32),)](
        x, *planes, out, num_rows, limit, columns=columns, has_cvt=has_cvt(x.device), tile_blocks=tile_blocks(columns),
        num_warps=SWIGLU_WARPS,
    )  # fmt: skip


def steady_linear(
    x: Tensor, weight: Tensor, out: Tensor, ratio: Tensor | None = None, is_double: bool = True
) -> None:
    """Fill out [N] with W x, summed in fp64 (fp32 with is_double=False): x [K], weight [N, K] bf16 or fp32.

    ratio: [K] fp32, multiplies x before.  weight may lie in pinned memory.  out: fp32 or bf16.
    """
    num_rows, columns = weight.shape
    rows = tile(x, STEADY_ROWS, num_rows)
    _steady_kernel[(triton.cdiv(num_rows, rows),)](
        x, x if ratio is None else ratio, weight, out, num_rows, columns=columns, has_ratio=ratio is not None,
        is_double=is_double, block_rows=rows, block=min(STEADY_BLOCK, triton.next_power_of_2(columns)),
    )  # fmt: skip
