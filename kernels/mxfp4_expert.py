"""MXFP4 SwiGLU experts for one token, in Triton: some experts of a layer from a table of addresses.

The table holds where each expert's codes and scales start, in VRAM or in pinned RAM that the GPU reads in place over
PCIe. A release puts them at multiples of 8 bytes, a small checkpoint at multiples of 4: `align` bytes are read at once.
Sums go by blocks of 32 columns in their order. Definition: `reference_deepseek.swiglu_expert`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_linear import e8m0, in_order, narrowed, swiglu_rounded, tile, tile_blocks
from kernels.nvfp4_expert import _e2m1_pair, _has_cvt

BLOCK = tl.constexpr(32)
DOWN_ROWS = 16
GATE_WARPS, DOWN_WARPS = 8, 4


@triton.jit
def _fp4_dots(
    codes, scales, rows, num_rows, x, columns: tl.constexpr, align: tl.constexpr, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, tile_blocks: tl.constexpr,
):  # fmt: skip
    """Products of some FP4 rows with x, summed by blocks in their order: [block_rows] fp32.

    codes, scales: addresses of the matrix.
    """
    blocks: tl.constexpr = columns // BLOCK
    parts: tl.constexpr = 16 // align  # words of a block
    word_type: tl.constexpr = tl.int64 if align == 8 else tl.int32
    words = codes.to(tl.pointer_type(word_type))
    steps = scales.to(tl.pointer_type(tl.uint8))
    total = tl.zeros([block_rows], dtype=tl.float32)
    is_row = rows < num_rows
    part = tl.arange(0, parts)
    for start in range(0, blocks, tile_blocks):
        block = start + tl.arange(0, tile_blocks)
        is_block = block < blocks
        group = block[:, None] * parts + part[None, :]  # of codes, one word
        at = rows[:, None, None] * (parts * blocks) + group[None, :, :]
        word = tl.load(words + at, mask=is_row[:, None, None] & is_block[None, :, None], other=0)
        at_step = rows[:, None] * blocks + block[None, :]
        step = tl.load(steps + at_step, mask=is_row[:, None] & is_block[None, :], other=0)
        sums = tl.zeros([block_rows, tile_blocks, parts], dtype=tl.float32)
        for j in tl.static_range(align):
            low, high = _e2m1_pair(((word >> (8 * j)) & 255).to(tl.int32), has_cvt)
            column = group * (2 * align) + 2 * j
            x_low = tl.load(x + column, mask=is_block[:, None], other=0.0).to(tl.float32)
            x_high = tl.load(x + column + 1, mask=is_block[:, None], other=0.0).to(tl.float32)
            sums += low * x_low[None, :, :] + high * x_high[None, :, :]
        total = in_order(total, tl.sum(sums, axis=2) * e8m0(step), tile_blocks)
    return total


@triton.jit
def _gate_up_kernel(
    table, x, weights, inner, limit, hidden: tl.constexpr, intermediate: tl.constexpr, align: tl.constexpr,
    has_cvt: tl.constexpr, tile_blocks: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    codes, scales = tl.load(table + 2 * expert), tl.load(table + 2 * expert + 1)
    matrix: tl.constexpr = hidden * intermediate // 2
    plane: tl.constexpr = hidden * intermediate // 32
    if codes != 0:
        rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        g = _fp4_dots(
            codes, scales, rows, intermediate, x, hidden, align, has_cvt, BLOCK, tile_blocks
        )
        # the file's order is w1, w2, w3: gate, down, up
        u = _fp4_dots(
            codes + 2 * matrix, scales + 2 * plane, rows, intermediate, x, hidden, align, has_cvt, BLOCK, tile_blocks
        )  # fmt: skip
        h = swiglu_rounded(g, u, tl.load(weights + expert), limit)
        tl.store(
            inner + expert * intermediate + rows,
            h.to(inner.dtype.element_ty),
            mask=rows < intermediate,
        )


@triton.jit
def _down_kernel(
    table, inner, out, hidden: tl.constexpr, intermediate: tl.constexpr, align: tl.constexpr, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, tile_blocks: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    codes, scales = tl.load(table + 2 * expert), tl.load(table + 2 * expert + 1)
    matrix: tl.constexpr = hidden * intermediate // 2
    plane: tl.constexpr = hidden * intermediate // 32
    if codes != 0:
        rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
        y = _fp4_dots(
            codes + matrix, scales + plane, rows, hidden, inner + expert * intermediate, intermediate, align, has_cvt,
            block_rows, tile_blocks,
        )  # fmt: skip
        tl.store(
            out + expert * hidden + rows, narrowed(y, out.dtype.element_ty), mask=rows < hidden
        )


def mxfp4_experts(
    x: Tensor,
    table: Tensor,
    weights: Tensor,
    inner: Tensor,
    out: Tensor,
    limit: float,
    align: int,
    has_cvt: bool | None = None,
) -> None:
    """Apply k experts to one token, each into its own row of `out`.

    x: [H] bf16, rounded by `act_round`.  table: [k, 2] int64, addresses of an expert's codes (w1, w2, w3) and scales,
    readable by the device; codes at multiples of `align`, 8 or 4; 0 leaves a row untouched.  weights: [k] fp32, of the
    route.  inner: [k, I] bf16 scratch.  out: [k, H] bf16.  limit: of gate and up.  Nothing is allocated.
    has_cvt: use the hardware conversion of E2M1; None asks the device.
    """
    experts, intermediate = inner.shape
    hidden = out.shape[1]
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "align": align,
        "has_cvt": _has_cvt(x.device) if has_cvt is None else has_cvt,
    }
    grid = (experts, triton.cdiv(intermediate, 32))
    _gate_up_kernel[grid](
        table,
        x,
        weights,
        inner,
        limit,
        **sizes,
        tile_blocks=tile_blocks(hidden),
        num_warps=GATE_WARPS,
    )
    rows = tile(x, DOWN_ROWS, hidden)
    _down_kernel[(experts, triton.cdiv(hidden, rows))](
        table,
        inner,
        out,
        **sizes,
        block_rows=rows,
        tile_blocks=tile_blocks(intermediate),
        num_warps=DOWN_WARPS,
    )
