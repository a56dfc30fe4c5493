"""The indexer of one DeepSeek-V4.1 token in Triton: which compressed entries attention may see.

Queries are made (one launch), visible entries are scored (one), and the best are listed (one, and one more where the
candidate blocks are marked). Scores are bf16 and ties frequent: selection is exact, the lower place wins. While all
entries fit the list nothing is scored. Definitions: `reference_deepseek.index_scores`, `best_places`, `candidate_mask`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_numbers import bf16_rounded, fp4_rounded, rotated

SCORE_TILE, SCORE_WARPS = 64, 4
SELECT_KEYS = 16
LEAST_KEY = tl.constexpr(0x007F)  # of minus infinity
FORCED_KEY = tl.constexpr(0xFF80)  # of infinity


@triton.jit
def _query_kernel(
    q, weights, position, cos, sin, q_out, weights_out, scale, dim: tl.constexpr, half: tl.constexpr,
    block_dim: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    column = tl.arange(0, block_dim)
    at = head * dim + column
    x = tl.load(q + at, mask=column < dim, other=0.0).to(tl.float32)
    x = tl.reshape(x, [1, block_dim])
    x = rotated(x, 0, cos, sin, tl.load(position).to(tl.int64), dim, half, False)
    x = tl.reshape(fp4_rounded(x, False), [block_dim])
    tl.store(q_out + at, x.to(tl.bfloat16), mask=column < dim)
    weight = bf16_rounded(tl.load(weights + head).to(tl.float32) * scale)
    tl.store(weights_out + head, weight.to(tl.bfloat16))


@triton.jit
def _score_kernel(
    q, keys, weights, position, scores, heads: tl.constexpr, dim: tl.constexpr, ratio: tl.constexpr,
    topk: tl.constexpr, is_wide: tl.constexpr, block_heads: tl.constexpr, block_dim: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    visible = ((tl.load(position) + 1) // ratio).to(tl.int32)
    first = tl.program_id(0) * tile
    if (visible > topk) & (first < visible):
        head, column, row = (
            tl.arange(0, block_heads),
            tl.arange(0, block_dim),
            first + tl.arange(0, tile),
        )
        is_head, is_column, is_row = head < heads, column < dim, row < visible
        query = tl.load(
            q + head[:, None] * dim + column[None, :],
            mask=is_head[:, None] & is_column[None, :],
            other=0.0,
        )
        k = tl.load(
            keys + row[:, None].to(tl.int64) * dim + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        if is_wide:
            dots = tl.dot(query.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
        else:
            dots = tl.dot(query, tl.trans(k))
        weight = tl.load(weights + head, mask=is_head, other=0.0).to(tl.float32)
        weighted = bf16_rounded(tl.maximum(bf16_rounded(dots), 0.0) * weight[:, None])
        total = bf16_rounded(tl.sum(weighted, axis=0))
        tl.store(scores + row, total.to(tl.bfloat16), mask=is_row)


@triton.jit
def _ordered(bits):
    """Map the bits of bf16 numbers, as int16, to integers in 0..65535 of the same order; both zeros are one."""
    bits = bits.to(tl.int32) & 0xFFFF
    bits = tl.where(bits == 0x8000, 0, bits)
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)


@triton.jit
def _entry_keys(
    scores, candidates, at, visible, capacity: tl.constexpr, num_blocks: tl.constexpr, size: tl.constexpr,
    is_masked: tl.constexpr,
):  # fmt: skip
    """Return the ordered scores of entries, the least outside the candidates, -1 where there is no entry."""
    # a load that is cut at a constant is wide; what lies behind the visible entries is dropped afterwards
    bits = tl.load(scores + at, mask=at < capacity, other=0.0).to(tl.int16, bitcast=True)
    key = _ordered(bits)
    if is_masked:
        # else all blocks are candidates, and none is marked
        is_cut = tl.cdiv(visible, size) > num_blocks
        mark = tl.load(candidates + at // size, mask=(at < visible) & is_cut, other=1)
        key = tl.where(mark == 0, LEAST_KEY, key)
    return tl.where(at < visible, key, -1)


@triton.jit
def _block_keys(
    scores, number, visible, capacity: tl.constexpr, size: tl.constexpr, block_size: tl.constexpr
):  # fmt: skip
    """Return the ordered best scores of blocks of entries, the newest before all, -1 where there is no block."""
    lane = tl.arange(0, block_size)
    at = number[:, None] * size + lane[None, :]
    is_real = (lane < size)[None, :]
    bits = tl.load(scores + at, mask=is_real & (at < capacity), other=0.0)
    key = _ordered(bits.to(tl.int16, bitcast=True))
    key = tl.max(tl.where(is_real & (at < visible), key, -1), axis=1)
    return tl.where(number == (visible - 1) // size, FORCED_KEY, key)


@triton.jit
def _is_chosen(key, budget: tl.constexpr):
    """Return which are the `budget` largest keys, of equals the first: at least so many are not negative."""
    # the least key that is chosen, found bit by bit: `budget` keys reach it
    limit = tl.max(key, axis=0) * 0
    for step in tl.static_range(16):
        higher = limit + (1 << (15 - step))
        is_enough = tl.sum((key >= higher).to(tl.int32), axis=0) >= budget
        limit = tl.where(is_enough, higher, limit)
    room = budget - tl.sum((key > limit).to(tl.int32), axis=0)
    is_tie = (key == limit).to(tl.int32)
    return (key > limit) | ((is_tie != 0) & (tl.cumsum(is_tie, axis=0) <= room))


@triton.jit
def _list_kernel(
    scores, candidates, position, chosen, ratio: tl.constexpr, capacity: tl.constexpr, topk: tl.constexpr,
    num_blocks: tl.constexpr, size: tl.constexpr, is_masked: tl.constexpr, block_topk: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    visible = ((tl.load(position) + 1) // ratio).to(tl.int32)
    if visible > topk:
        at = tl.arange(0, block)
        key = _entry_keys(scores, candidates, at, visible, capacity, num_blocks, size, is_masked)
        is_chosen = _is_chosen(key, topk)
        place = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
        tl.store(chosen + place, at, mask=is_chosen)
    else:
        slot = tl.arange(0, block_topk)
        tl.store(chosen + slot, tl.where(slot < visible, slot, -1), mask=slot < topk)


@triton.jit
def _mark_kernel(
    scores, position, candidates, ratio: tl.constexpr, capacity: tl.constexpr, num_blocks: tl.constexpr,
    size: tl.constexpr, block_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    visible = ((tl.load(position) + 1) // ratio).to(tl.int32)
    count = tl.cdiv(visible, size)
    if count > num_blocks:
        number = tl.arange(0, block)
        key = _block_keys(scores, number, visible, capacity, size, block_size)
        is_chosen = _is_chosen(key, num_blocks) & (key > LEAST_KEY)
        tl.store(candidates + number, is_chosen.to(tl.int8), mask=number < count)


def prepare_query(
    q: Tensor, weights: Tensor, position: Tensor, cos: Tensor, sin: Tensor, q_out: Tensor, weights_out: Tensor
) -> None:  # fmt: skip
    """Rotate a token's index queries, round them to FP4, and scale the weights of its heads.

    q: [heads, D], weights: [heads] bf16, as projected.  position: [1] int, on the device.  cos, sin:
    [positions, R / 2] fp32.  Filled, bf16: q_out [heads, D], weights_out [heads].  D must be a multiple of 32.
    """
    heads, dim = q.shape
    _query_kernel[(heads,)](
        q, weights, position, cos, sin, q_out, weights_out, dim**-0.5 * heads**-0.5, dim=dim, half=cos.shape[1],
        block_dim=triton.next_power_of_2(dim), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def score_entries(
    q: Tensor, keys: Tensor, weights: Tensor, position: Tensor, scores: Tensor, ratio: int, topk: int
) -> None:  # fmt: skip
    """Score the visible entries for one token: sum_h w_h relu(q_h k), each step rounded to bf16.

    q: [heads, D], weights: [heads] bf16, of `prepare_query`.  keys: [capacity, D] bf16, the token's own in it.
    position: [1] int, on the device.  ratio: tokens of an entry.  scores: [capacity] bf16, filled up to the visible
    ones, (position + 1) // ratio; left as it is while these are at most `topk`.
    """
    heads, dim = q.shape
    capacity = keys.shape[0]
    _score_kernel[(triton.cdiv(capacity, SCORE_TILE),)](
        q, keys, weights, position, scores, heads=heads, dim=dim, ratio=ratio, topk=topk, is_wide=not q.is_cuda,
        block_heads=max(16, triton.next_power_of_2(heads)), block_dim=max(16, triton.next_power_of_2(dim)),
        tile=SCORE_TILE, num_warps=SCORE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def mark_candidates(
    scores: Tensor, position: Tensor, candidates: Tensor, ratio: int, num_blocks: int, size: int
) -> None:  # fmt: skip
    """Mark the blocks of entries that later indexers may choose from; the newest always.

    scores: [capacity] bf16, of `score_entries`; marks of scores that were left out mean nothing, and `list_best` reads
    none then.  position: [1] int, on the device.  candidates: [capacity / size, rounded up] int8, 0 or 1 for the
    visible blocks; left as it is while these are at most `num_blocks`.  size: entries of a block.
    """
    capacity = scores.shape[0]
    blocks = triton.cdiv(capacity, size)
    if blocks > num_blocks:
        _mark_kernel[(1,)](
            scores, position, candidates, ratio=ratio, capacity=capacity, num_blocks=num_blocks, size=size,
            block_size=triton.next_power_of_2(size), block=triton.next_power_of_2(blocks),
            num_warps=_select_warps(capacity),
        )  # fmt: skip


def list_best(
    scores: Tensor, position: Tensor, chosen: Tensor, ratio: int, candidates: Tensor | None = None,
    num_blocks: int = 0, size: int = 1,
) -> None:  # fmt: skip
    """List the best visible entries, by place; of equals the lower place wins.

    scores: [capacity] bf16, of `score_entries`.  position: [1] int, on the device.  chosen: [k] int32, filled with
    ascending places, -1 behind them where fewer are visible.  candidates: of `mark_candidates` for this token, with
    its num_blocks and size; entries outside come after all others.
    """
    capacity, topk = scores.shape[0], chosen.shape[0]
    _list_kernel[(1,)](
        scores, candidates, position, chosen, ratio=ratio, capacity=capacity, topk=topk, num_blocks=num_blocks,
        size=size, is_masked=candidates is not None, block_topk=triton.next_power_of_2(topk),
        block=triton.next_power_of_2(capacity), num_warps=_select_warps(capacity),
    )  # fmt: skip


def _select_warps(capacity: int) -> int:
    """All keys stay in registers: SELECT_KEYS of a thread while a program may have so many threads."""
    keys: int = triton.next_power_of_2(capacity)
    return max(4, min(32, keys // (32 * SELECT_KEYS)))
