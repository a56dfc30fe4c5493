"""The attention layer of one decoded token between its two products, in five Triton launches.

`prepare_token` norms and rotates and fills the caches (one launch), `choose_blocks` scores the complete blocks and
marks the best (two), `attend_token` attends to what is visible, split over the keys, and gates (two). The position is
read on the device and nothing is allocated, so a captured graph holds for every position.

Definitions: `reference_attention.prepare_token`, `reference_attention.choose_blocks`,
`reference_attention.attend_token`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
SCORE_ROWS = 16
SELECT_BLOCK, SELECT_BITS = 1024, 4
SPLITS, TILE = 32, 64
COMBINE_COLUMNS = 64


@triton.jit
def _partner(column, half: tl.constexpr):
    """The other column of each pair (i, i + half); a column that is not rotated is its own."""
    return tl.where(
        column < half, column + half, tl.where(column < 2 * half, column - half, column)
    )


@triton.jit
def _norm_rotate(
    x, other, gain, cos, sin, place, out, eps, dim: tl.constexpr, half: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Store one row, normed and rotated. x and other: fp32 [block], the row and the row at the partner columns.

    Rounded where the definition rounds: after the norm, after each product, after their sum.
    """
    dtype = out.dtype.element_ty
    column = tl.arange(0, block)
    is_column, is_rotated = column < dim, column < 2 * half
    rate = tl.rsqrt(tl.sum(tl.where(is_column, x * x, 0.0), axis=0) / dim + eps)
    gain_x = tl.load(gain + column, mask=is_column, other=0.0)
    gain_other = tl.load(gain + _partner(column, half), mask=is_column, other=0.0)
    x = (x * rate * gain_x).to(dtype).to(tl.float32)
    other = (other * rate * gain_other).to(dtype).to(tl.float32)
    at = place * half + column % half
    c = tl.load(cos + at, mask=is_rotated, other=1.0).to(dtype).to(tl.float32)
    s = tl.load(sin + at, mask=is_rotated, other=0.0).to(dtype).to(tl.float32)
    along, across = (x * c).to(dtype).to(tl.float32), (other * s).to(dtype).to(tl.float32)
    rotated = tl.where(column < half, along - across, along + across)
    tl.store(out + column, tl.where(is_rotated, rotated, x).to(dtype), mask=is_column)


@triton.jit
def _norm_rotate_row(
    source, gain, cos, sin, place, out, eps, dim: tl.constexpr, half: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    column = tl.arange(0, block)
    x = tl.load(source + column, mask=column < dim, other=0.0).to(tl.float32)
    other = tl.load(source + _partner(column, half), mask=column < dim, other=0.0).to(tl.float32)
    _norm_rotate(x, other, gain, cos, sin, place, out, eps, dim, half, block)


@triton.jit
def _block_mean(
    open_block, raw, slot, column, mask, dim: tl.constexpr, block_tokens: tl.constexpr
):  # fmt: skip
    """Mean over the rows of the open block, the new key standing for row `slot`: rounded, as fp32."""
    new = tl.load(raw + column, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros(column.shape, dtype=tl.float32)
    for j in tl.static_range(block_tokens):
        old = tl.load(open_block + j * dim + column, mask=mask & (slot != j), other=0.0)
        total += tl.where(slot == j, new, old.to(tl.float32))
    return (total / block_tokens).to(open_block.dtype.element_ty).to(tl.float32)


@triton.jit
def _prepare_kernel(
    projected, position, cos, sin, gain_q, gain_k, gain_index_q, gain_index_k, keys, values, open_block, pooled, q,
    index_q, eps, heads: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, index_heads: tl.constexpr,
    index_dim: tl.constexpr, half: tl.constexpr, block_tokens: tl.constexpr, block_head: tl.constexpr,
    block_index: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.load(position)
    k_at: tl.constexpr = 2 * heads * head_dim
    v_at: tl.constexpr = k_at + kv_heads * head_dim
    index_at: tl.constexpr = v_at + kv_heads * head_dim
    raw_at: tl.constexpr = index_at + index_heads * index_dim
    if row < heads:
        _norm_rotate_row(
            projected + row * 2 * head_dim, gain_q, cos, sin, place, q + row * head_dim, eps, head_dim, half, block_head
        )  # fmt: skip
    elif row < heads + kv_heads:
        head = row - heads
        to = (place * kv_heads + head) * head_dim
        _norm_rotate_row(
            projected + k_at + head * head_dim, gain_k, cos, sin, place, keys + to, eps, head_dim, half, block_head
        )  # fmt: skip
        column = tl.arange(0, block_head)
        v = tl.load(projected + v_at + head * head_dim + column, mask=column < head_dim)
        tl.store(values + to + column, v, mask=column < head_dim)
    elif row < heads + kv_heads + index_heads:
        head = row - heads - kv_heads
        _norm_rotate_row(
            projected + index_at + head * index_dim, gain_index_q, cos, sin, place, index_q + head * index_dim, eps,
            index_dim, half, block_index,
        )  # fmt: skip
    else:
        raw = projected + raw_at
        number, slot = place // block_tokens, place % block_tokens
        column = tl.arange(0, block_index)
        mask = column < index_dim
        partner = _partner(column, half)
        mean = _block_mean(open_block, raw, slot, column, mask, index_dim, block_tokens)
        other = _block_mean(open_block, raw, slot, partner, mask, index_dim, block_tokens)
        _norm_rotate(
            mean, other, gain_index_k, cos, sin, number * block_tokens, pooled + number * index_dim, eps, index_dim,
            half, block_index,
        )  # fmt: skip
        key = tl.load(raw + column, mask=mask)
        tl.store(open_block + slot * index_dim + column, key, mask=mask)


@triton.jit
def _score_kernel(
    index_q, pooled, position, scores, budget: tl.constexpr, index_heads: tl.constexpr, index_dim: tl.constexpr,
    block_tokens: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    complete = (tl.load(position) + 1) // block_tokens
    first = tl.program_id(0) * block_rows
    if (complete > budget) & (first < complete):
        row, column = first + tl.arange(0, block_rows), tl.arange(0, block_columns)
        is_row, is_column = row < complete, column < index_dim
        at = row[:, None] * index_dim + column[None, :]
        keys = tl.load(pooled + at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        keys = keys.to(tl.float32)
        total = tl.zeros([block_rows], dtype=tl.float32)
        for head in tl.static_range(index_heads):
            query = tl.load(index_q + head * index_dim + column, mask=is_column, other=0.0)
            dots = tl.sum(keys * query.to(tl.float32)[None, :], axis=1)
            total += tl.maximum(dots, 0.0)
        tl.store(scores + row, total * index_dim**-0.5, mask=is_row)


@triton.jit
def _select_kernel(
    scores, position, chosen, budget: tl.constexpr, block_tokens: tl.constexpr, digit_bits: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Find the budget-th largest score, a few bits at a time: bits of non-negative floats are ordered as they are."""
    complete = ((tl.load(position) + 1) // block_tokens).to(tl.int32)
    if complete > budget:
        lane = tl.arange(0, block)
        digits = tl.arange(0, 1 << digit_bits).to(tl.uint32)
        limit = tl.zeros([1], dtype=tl.uint32)  # at least `budget` scores reach it
        for step in tl.static_range(32 // digit_bits):
            limits = limit + (digits << (32 - digit_bits * (step + 1)))
            reached = tl.zeros([block, 1 << digit_bits], dtype=tl.int32)
            for start in range(0, complete, block):
                at = start + lane
                # a zero for a missing score reaches no limit but zero, which is reached anyway
                bits = tl.load(scores + at, mask=at < complete, other=0.0).to(
                    tl.uint32, bitcast=True
                )
                reached += (bits[:, None] >= limits[None, :]).to(tl.int32)
            enough = tl.sum(reached, axis=0) >= budget
            limit = tl.max(tl.where(enough, limits, limit), axis=0) + tl.zeros([1], tl.uint32)
        above = tl.zeros([block], dtype=tl.int32)
        for start in range(0, complete, block):
            at = start + lane
            bits = tl.load(scores + at, mask=at < complete, other=0.0).to(tl.uint32, bitcast=True)
            above += (bits > limit).to(tl.int32)
        room = budget - tl.sum(above, axis=0)
        ties_before = 0
        for start in range(0, complete, block):
            at = start + lane
            mask = at < complete
            bits = tl.load(scores + at, mask=mask, other=0.0).to(tl.uint32, bitcast=True)
            is_tie = (bits == limit) & mask
            rank = ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
            tl.store(
                chosen + at, ((bits > limit) | (is_tie & (rank <= room))).to(tl.int8), mask=mask
            )
            ties_before += tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _attend_kernel(
    q, keys, values, chosen, position, best, total, weighted, budget: tl.constexpr, heads: tl.constexpr,
    kv_heads: tl.constexpr, head_dim: tl.constexpr, block_tokens: tl.constexpr, splits: tl.constexpr,
    tile: tl.constexpr, block_group: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    group: tl.constexpr = heads // kv_heads
    kv_head, split = tl.program_id(0), tl.program_id(1)
    length = (tl.load(position) + 1).to(tl.int32)
    complete = length // block_tokens
    share = tl.cdiv(tl.cdiv(length, splits), tile) * tile
    start = split * share
    end = tl.minimum(start + share, length)
    row, column, lane = tl.arange(0, block_group), tl.arange(0, block_dim), tl.arange(0, tile)
    is_head, is_column = row < group, column < head_dim
    head = kv_head * group + row
    at_head = head[:, None] * head_dim + column[None, :]
    query = tl.load(q + at_head, mask=is_head[:, None] & is_column[None, :], other=0.0)
    top = tl.full([block_group], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([block_group], dtype=tl.float32)
    out = tl.zeros([block_group, block_dim], dtype=tl.float32)
    for first in range(start, end, tile):
        at = first + lane
        visible = at < end
        if complete > budget:
            number = at // block_tokens
            is_open = number >= complete
            mark = tl.load(chosen + number, mask=visible & (number < complete), other=0)
            visible = visible & (is_open | (mark != 0))
        if tl.max(visible.to(tl.int32), axis=0) > 0:
            at_row = (at.to(tl.int64) * kv_heads + kv_head) * head_dim
            place = at_row[:, None] + column[None, :]
            mask = visible[:, None] & is_column[None, :]
            k = tl.load(keys + place, mask=mask, other=0.0)
            v = tl.load(values + place, mask=mask, other=0.0)
            dots = tl.dot(query, tl.trans(k), input_precision="ieee") * (head_dim**-0.5 * LOG2E)
            dots = tl.where(visible[None, :], dots, float("-inf"))
            new_top = tl.maximum(top, tl.max(dots, axis=1))
            keep = tl.exp2(top - new_top)
            parts = tl.exp2(dots - new_top[:, None])
            mass = mass * keep + tl.sum(parts, axis=1)
            out = tl.dot(parts.to(v.dtype), v, out * keep[:, None], input_precision="ieee")
            top = new_top
    # a program that saw nothing leaves -inf and 0; its sums are never read
    tl.store(best + split * heads + head, top, mask=is_head)
    tl.store(total + split * heads + head, mass, mask=is_head)
    mask = (is_head & (mass > 0.0))[:, None] & is_column[None, :]
    tl.store(weighted + split * heads * head_dim + at_head, out, mask=mask)


@triton.jit
def _combine_kernel(
    projected, best, total, weighted, out, heads: tl.constexpr, head_dim: tl.constexpr, splits: tl.constexpr,
    block_splits: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    is_column = column < head_dim
    split = tl.arange(0, block_splits)
    row = split * heads + head
    mass = tl.load(total + row, mask=split < splits, other=0.0)
    top = tl.load(best + row, mask=split < splits, other=float("-inf"))
    factor = tl.exp2(top - tl.max(top, axis=0))
    parts = tl.load(
        weighted + row[:, None] * head_dim + column[None, :],
        mask=(mass > 0.0)[:, None] & is_column[None, :],
        other=0.0,
    )
    mean = tl.sum(parts * factor[:, None], axis=0) / tl.sum(mass * factor, axis=0)
    gate = tl.load(projected + (2 * head + 1) * head_dim + column, mask=is_column, other=0.0)
    gate = 1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(out + head * head_dim + column, (mean * gate).to(out.dtype.element_ty), mask=is_column)


def prepare_token(
    projected: Tensor, position: Tensor, cos: Tensor, sin: Tensor, gain_q: Tensor, gain_k: Tensor, gain_index_q: Tensor,
    gain_index_k: Tensor, keys: Tensor, values: Tensor, open_block: Tensor, pooled: Tensor, q: Tensor, index_q: Tensor,
    eps: float,
) -> None:  # fmt: skip
    """Norm and rotate a token's queries and keys and write what later tokens need into the caches.

    projected: [1, N], per head its query and its output gate, then keys, values, index queries, the raw index key.
    position: [1] int64 on the device.  cos, sin: [capacity, R/2] fp32.  gain_q, gain_k: [head_dim] fp32.
    gain_index_q, gain_index_k: [index_dim] fp32.  Changed at the position's rows: keys, values
    [capacity, kv_heads, head_dim], open_block [block_tokens, index_dim] (raw keys), pooled [B, index_dim] (the
    position's block; right once the block is complete).  Filled: q [heads, head_dim], index_q [index_heads, index_dim].
    """
    heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    index_heads, index_dim = index_q.shape
    sizes = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "index_heads": index_heads,
        "index_dim": index_dim,
        "half": cos.shape[1],
        "block_tokens": open_block.shape[0],
        "block_head": triton.next_power_of_2(head_dim),
        "block_index": triton.next_power_of_2(index_dim),
    }
    _prepare_kernel[(heads + kv_heads + index_heads + 1,)](
        projected, position, cos, sin, gain_q, gain_k, gain_index_q, gain_index_k, keys, values, open_block, pooled, q,
        index_q, eps, **sizes, num_warps=2,
    )  # fmt: skip


def choose_blocks(
    index_q: Tensor, pooled: Tensor, position: Tensor, scores: Tensor, chosen: Tensor, budget: int, block_tokens: int
) -> None:  # fmt: skip
    """Mark the `budget` best of the complete blocks; of equal scores the earlier block wins.

    index_q: [index_heads, index_dim].  pooled: [B, index_dim].  position: [1] int64 on the device.  scores: [B] fp32
    scratch.  chosen: [B] int8, filled with 0 and 1 for the complete blocks; the rest is left as it is, and all of it
    while the complete blocks are at most `budget`, when `attend_token` does not read it.
    """
    num_blocks, index_dim = pooled.shape
    shape = {"budget": budget, "block_tokens": block_tokens}
    _score_kernel[(triton.cdiv(num_blocks, SCORE_ROWS),)](
        index_q, pooled, position, scores, **shape, index_heads=index_q.shape[0], index_dim=index_dim,
        block_rows=SCORE_ROWS, block_columns=triton.next_power_of_2(index_dim),
    )  # fmt: skip
    block = min(SELECT_BLOCK, triton.next_power_of_2(num_blocks))
    _select_kernel[(1,)](
        scores, position, chosen, **shape, digit_bits=SELECT_BITS, block=block, num_warps=16
    )


def attend_token(
    q: Tensor, projected: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, position: Tensor, best: Tensor,
    total: Tensor, weighted: Tensor, out: Tensor, budget: int, block_tokens: int,
) -> None:  # fmt: skip
    """Attend to chosen blocks and the open one (to everything while all fit the budget), then gate.

    q: [heads, head_dim].  projected: as in `prepare_token`, for the gates.  keys, values: [capacity, kv_heads,
    head_dim].  chosen: [B] int8.  position: [1] int64 on the device.  best, total, weighted: fp32 scratch, see
    `scratch_shapes`.  out: [1, heads * head_dim].  Softmax and sums in fp32; the shares are rounded to the dtype
    before the product with the values, the result once at the end. The order of sums depends on position, the number
    of splits and dtype alone.
    """
    heads, head_dim = q.shape
    kv_heads, splits = keys.shape[1], best.shape[0]
    shape = {"heads": heads, "head_dim": head_dim, "splits": splits}
    # a product wants 16 rows at least; fp32 tiles of the full size would not fit shared memory
    _attend_kernel[(kv_heads, splits)](
        q, keys, values, chosen, position, best, total, weighted, budget=budget, kv_heads=kv_heads, **shape,
        block_tokens=block_tokens, tile=TILE if q.element_size() == 2 else 16,
        block_group=max(16, triton.next_power_of_2(heads // kv_heads)),
        block_dim=max(16, triton.next_power_of_2(head_dim)), num_warps=8,
    )  # fmt: skip
    columns = min(COMBINE_COLUMNS, triton.next_power_of_2(head_dim))
    _combine_kernel[(heads, triton.cdiv(head_dim, columns))](
        projected, best, total, weighted, out, **shape, block_splits=triton.next_power_of_2(splits),
        block_columns=columns,
    )  # fmt: skip


def scratch_shapes(heads: int, head_dim: int, capacity: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the fp32 buffers that `attend_token` needs: largest scores, masses and weighted sums of each split."""
    splits = max(1, min(SPLITS, capacity // TILE))
    return {
        "best": (splits, heads),
        "total": (splits, heads),
        "weighted": (splits, heads, head_dim),
    }
