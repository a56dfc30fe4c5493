"""NVFP4 SwiGLU experts for the tokens of a prompt, in Triton: several experts from a table of addresses.

The (token, choice) pairs of a layer are sorted by expert; each expert multiplies its own run of pairs on the tensor
cores. E2M1 * E4M3 is exact in bf16, an fp32 operand is split into bf16 parts, and sums are fp32. Definition:
`reference_grouped`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.nvfp4_expert import GROUP, _e2m1_pair, _e4m3, _has_cvt

BLOCK_ROWS = 64  # rows of a matrix: wgmma wants 64
BLOCK_COLUMNS = 64  # the same for all tiles of pairs, since it decides the order of the sums
NUM_WARPS, NUM_STAGES = 4, 4
MIN_PAIRS, MAX_PAIRS = 16, 64  # pairs in a tile
ADD_BLOCK = 1024


@triton.jit
def _weights(
    base, codes_at, scales_at, rows, num_rows, start, columns: tl.constexpr, has_cvt: tl.constexpr,
    operand: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """A tile of one matrix of a record, without the global scale, zero outside: [block_rows, block_columns]."""
    is_row = (rows < num_rows)[:, None]
    # without the hints the compiler reads single bytes
    byte = tl.multiple_of(start // 2, block_columns // 2) + tl.arange(0, block_columns // 2)
    code_bytes = tl.multiple_of((base + codes_at).to(tl.pointer_type(tl.uint8)), GROUP)
    codes = tl.load(
        code_bytes + rows[:, None] * (columns // 2) + byte[None, :],
        mask=is_row & (byte < columns // 2)[None, :],
        other=0,
    )
    groups: tl.constexpr = block_columns // GROUP
    group = tl.multiple_of(start // GROUP, groups) + tl.arange(0, groups)
    scale_bytes = tl.multiple_of((base + scales_at).to(tl.pointer_type(tl.uint8)), GROUP)
    scales = tl.load(
        scale_bytes + rows[:, None] * (columns // GROUP) + group[None, :],
        mask=is_row & (group < columns // GROUP)[None, :],
        other=0,
    )
    low, high = _e2m1_pair(codes.to(tl.int32), has_cvt)
    values = tl.reshape(tl.join(low, high), [block_rows, block_columns // GROUP, GROUP])
    values *= _e4m3(scales)[:, :, None]
    return tl.reshape(values, [block_rows, block_columns]).to(operand)


@triton.jit
def _part(rest, operand: tl.constexpr):
    """Split fp32 numbers in two: the leading bf16 part, held as `operand`, and what is left of them (exact)."""
    part = rest.to(tl.bfloat16)
    return part.to(operand), rest - part.to(tl.float32)


@triton.jit
def _gate_up_kernel(
    table, x, pair_tokens, starts, global_scales, inner, hidden: tl.constexpr, intermediate: tl.constexpr,
    has_cvt: tl.constexpr, operand: tl.constexpr, parts: tl.constexpr, block_pairs: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    end = tl.load(starts + expert + 1)
    first = tl.load(starts + expert) + tl.program_id(0) * block_pairs
    if first >= end:
        return
    base = tl.multiple_of(tl.load(table + expert), 4096)  # records are page-aligned
    codes: tl.constexpr = hidden * intermediate // 2
    scales: tl.constexpr = hidden * intermediate // 16
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    pair = first + tl.arange(0, block_pairs)
    is_pair = (pair < end)[:, None]
    token = tl.load(pair_tokens + pair, mask=pair < end, other=0).to(tl.int64)
    gate = tl.zeros([block_rows, block_pairs], dtype=tl.float32)
    up = tl.zeros([block_rows, block_pairs], dtype=tl.float32)
    for start in range(0, hidden, block_columns):
        column = start + tl.arange(0, block_columns)
        tile = tl.load(
            x + token[:, None] * hidden + column[None, :],
            mask=is_pair & (column < hidden)[None, :],
            other=0.0,
        )
        w_gate = _weights(
            base, 0, 3 * codes, rows, intermediate, start, hidden, has_cvt, operand, block_rows, block_columns
        )  # fmt: skip
        w_up = _weights(
            base, codes, 3 * codes + scales, rows, intermediate, start, hidden, has_cvt, operand, block_rows,
            block_columns,
        )  # fmt: skip
        if parts == 1:
            part = tl.trans(tile.to(operand))
            gate = tl.dot(w_gate, part, gate, input_precision="ieee")
            up = tl.dot(w_up, part, up, input_precision="ieee")
        else:
            rest = tl.trans(tile)
            for _ in tl.static_range(parts):
                part, rest = _part(rest, operand)
                gate = tl.dot(w_gate, part, gate, input_precision="ieee")
                up = tl.dot(w_up, part, up, input_precision="ieee")
    gate *= tl.load(global_scales + expert * 3)
    up *= tl.load(global_scales + expert * 3 + 1)
    out = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
    tl.store(
        inner + pair.to(tl.int64)[:, None] * intermediate + rows[None, :],
        tl.trans(out),
        mask=is_pair & (rows < intermediate)[None, :],
    )


@triton.jit
def _down_kernel(
    table, inner, starts, global_scales, y, hidden: tl.constexpr, intermediate: tl.constexpr, has_cvt: tl.constexpr,
    operand: tl.constexpr, parts: tl.constexpr, block_pairs: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    end = tl.load(starts + expert + 1)
    first = tl.load(starts + expert) + tl.program_id(0) * block_pairs
    if first >= end:
        return
    base = tl.multiple_of(tl.load(table + expert), 4096)  # records are page-aligned
    codes: tl.constexpr = hidden * intermediate // 2
    scales: tl.constexpr = hidden * intermediate // 16
    rows = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    pair = first + tl.arange(0, block_pairs)
    is_pair = (pair < end)[:, None]
    at = pair.to(tl.int64)[:, None]
    total = tl.zeros([block_rows, block_pairs], dtype=tl.float32)
    for start in range(0, intermediate, block_columns):
        column = start + tl.arange(0, block_columns)
        tile = tl.load(
            inner + at * intermediate + column[None, :],
            mask=is_pair & (column < intermediate)[None, :],
            other=0.0,
        )
        w = _weights(
            base, 2 * codes, 3 * codes + 2 * scales, rows, hidden, start, intermediate, has_cvt, operand, block_rows,
            block_columns,
        )  # fmt: skip
        rest = tl.trans(tile)
        for _ in tl.static_range(parts):
            part, rest = _part(rest, operand)
            total = tl.dot(w, part, total, input_precision="ieee")
    total *= tl.load(global_scales + expert * 3 + 2)
    tl.store(
        y + at * hidden + rows[None, :],
        tl.trans(total),
        mask=is_pair & (rows < hidden)[None, :],
    )


@triton.jit(do_not_specialize=["first", "pairs"])
def _add_pairs_kernel(
    out, y, where, weights, first, pairs, hidden: tl.constexpr, top_k: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, width)
    places = tl.load(where + token * top_k + choice, mask=choice < top_k, other=-1) - first
    if tl.sum(((places >= 0) & (places < pairs)).to(tl.int32), axis=0) == 0:
        return
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < hidden
    total = tl.load(out + token * hidden + column, mask=mask)
    for j in tl.static_range(top_k):  # one fixed order, whatever the batches
        place = tl.load(where + token * top_k + j).to(tl.int64) - first
        if (place >= 0) & (place < pairs):
            row = tl.load(y + place * hidden + column, mask=mask)
            total += tl.load(weights + token * top_k + j) * row
    tl.store(out + token * hidden + column, total, mask=mask)


def grouped_experts(
    x: Tensor,
    pair_tokens: Tensor,
    starts: Tensor,
    table: Tensor,
    global_scales: Tensor,
    inner: Tensor,
    y: Tensor,
    max_pairs: int,
    has_cvt: bool | None = None,
    block_pairs: int | None = None,
) -> None:
    """Apply n experts to their pairs; y gets each pair's output, not weighted.

    x: [T, H] bf16 or fp32.  pair_tokens: [P] int32, the token of each pair, one expert's pairs together.
    starts: [n + 1] int32, expert i has the pairs starts[i] up to starts[i + 1].  table: [n] int64, addresses of
    records (readable by the device).  global_scales: [n, 3] fp32.  inner: [P, I] fp32 scratch.  y: [P, H] fp32.
    max_pairs: the largest count of an expert (or more).  has_cvt: use the hardware conversion; None asks the device.
    block_pairs: pairs in a tile; None chooses by the average count.  Nothing is allocated; all tensors contiguous.
    """
    experts, intermediate = len(table), inner.shape[1]
    hidden = x.shape[1]
    if max_pairs == 0 or experts == 0:
        return
    if has_cvt is None:
        has_cvt = _has_cvt(x.device)
    if block_pairs is None:
        block_pairs = _block_pairs(len(pair_tokens), experts)
    is_bf16 = x.dtype == torch.bfloat16
    # the interpreter cannot multiply bf16 matrices: it gets the same parts as fp32
    operand = tl.bfloat16 if x.device.type == "cuda" else tl.float32
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "has_cvt": has_cvt,
        "operand": operand,
        "block_pairs": block_pairs,
        "block_rows": BLOCK_ROWS,
    }
    tiles = triton.cdiv(max_pairs, block_pairs)
    # three bf16 parts are all of an fp32 number; two leave 2^-18 of it, less than bf16 tokens are uncertain by
    _gate_up_kernel[(tiles, triton.cdiv(intermediate, BLOCK_ROWS), experts)](
        table, x, pair_tokens, starts, global_scales, inner, parts=1 if is_bf16 else 3,
        block_columns=_block_columns(hidden), num_warps=NUM_WARPS, num_stages=NUM_STAGES, **sizes,
    )  # fmt: skip
    _down_kernel[(tiles, triton.cdiv(hidden, BLOCK_ROWS), experts)](
        table, inner, starts, global_scales, y, parts=2 if is_bf16 else 3,
        block_columns=_block_columns(intermediate), num_warps=NUM_WARPS, num_stages=NUM_STAGES, **sizes,
    )  # fmt: skip


def add_pairs(out: Tensor, y: Tensor, where: Tensor, weights: Tensor, first: int) -> None:
    """Add the weighted rows of one batch of pairs to their tokens, for a token in ascending order of place.

    out: [T, H] fp32, changed.  y: [P, H] fp32, the pairs at places first up to first + P of the layer's list.
    where: [T, k] int32, each token's places in that list, ascending.  weights: [T, k] fp32 in the same order.
    """
    (tokens, top_k), (pairs, hidden) = where.shape, y.shape
    if pairs == 0 or tokens == 0:
        return
    block = min(ADD_BLOCK, triton.next_power_of_2(hidden))
    _add_pairs_kernel[(tokens, triton.cdiv(hidden, block))](
        out, y, where, weights, first, pairs, hidden=hidden, top_k=top_k, width=triton.next_power_of_2(top_k),
        block=block,
    )  # fmt: skip


def _block_pairs(pairs: int, experts: int) -> int:
    average: int = triton.next_power_of_2(triton.cdiv(pairs, experts))
    return min(MAX_PAIRS, max(MIN_PAIRS, average))


def _block_columns(columns: int) -> int:
    columns = triton.next_power_of_2(columns)
    return min(BLOCK_COLUMNS, columns)
