"""Attention of one DeepSeek-V4.1 token over its window and the chosen compressed entries, in two Triton launches.

The first scores all places of the list side by side. The second takes them in the definition's steps of 64, since its
running maximum decides how shares are rounded, side by side over heads and columns. Queries are rotated on the way in,
results back on the way out. Definitions: `reference_deepseek.sparse_attention`, `rotate`.

Letters: D head size, W window, k entries chosen at most, n = W + k in whole steps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_numbers import bf16_rounded, rotated
from kernels.reference_deepseek import SLOTS_BLOCK

HEADS = 16  # of one program: the least that a product on tensor cores takes
SCORE_TILE, SCORE_WARPS = 32, 4
# a step's chain is list, rows, products: with seven stages the rows of three steps are on their way
MIX_COLUMNS, MIX_WARPS, MIX_STAGES, WINDOW_STAGES = 64, 4, 7, 3


@triton.jit
def _rows(place, i, ring, entries, chosen, window: tl.constexpr, topk: tl.constexpr, dim: tl.constexpr):  # fmt: skip
    """Return where the entries at places i of the list are, and whether there are any: the window's, oldest first,
    then the chosen ones.
    """
    filled = tl.minimum(place + 1, window)
    is_window = i < filled
    rows = ring + (place - filled + 1 + i) % window * dim
    is_seen = is_window
    if topk > 0:
        picked = tl.load(chosen + (i - filled), mask=(i >= filled) & (i < filled + topk), other=-1)
        picked = picked.to(tl.int64)
        rows = tl.where(is_window, rows, entries + picked * dim)
        is_seen = is_window | (picked >= 0)
    return rows, is_seen


@triton.jit
def _score_kernel(
    q, ring, entries, chosen, position, cos, sin, scores, scale, heads: tl.constexpr, dim: tl.constexpr,
    half: tl.constexpr, window: tl.constexpr, topk: tl.constexpr, places: tl.constexpr, is_wide: tl.constexpr,
    block_heads: tl.constexpr, block_dim: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    place = tl.load(position).to(tl.int64)
    i = tl.program_id(0) * tile + tl.arange(0, tile)
    rows, is_seen = _rows(place, i, ring, entries, chosen, window, topk, dim)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    is_head = head < heads
    column = tl.arange(0, block_dim)
    is_column = column < dim
    k = tl.load(
        rows[:, None] + column[None, :], mask=is_seen[:, None] & is_column[None, :], other=0.0
    )
    query = tl.load(
        q + head[:, None] * dim + column[None, :],
        mask=is_head[:, None] & is_column[None, :],
        other=0.0,
    )
    query = rotated(query.to(tl.float32), 0, cos, sin, place, dim, half, False)
    if is_wide:
        dots = tl.dot(query, tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        dots = tl.dot(query.to(tl.bfloat16), tl.trans(k))
    dots = tl.where(is_seen[None, :], dots * scale, float("-inf"))
    tl.store(
        scores + head[:, None] * places + i[None, :], dots, mask=is_head[:, None] & (i < places)[None, :]
    )  # fmt: skip


@triton.jit
def _mix_kernel(
    ring, entries, chosen, position, cos, sin, scores, sink, out, heads: tl.constexpr, dim: tl.constexpr,
    half: tl.constexpr, window: tl.constexpr, topk: tl.constexpr, places: tl.constexpr, is_wide: tl.constexpr,
    block_heads: tl.constexpr, block_columns: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    place = tl.load(position).to(tl.int64)
    head = tl.program_id(0) * block_heads + tl.arange(0, block_heads)
    is_head = head < heads
    first = tl.program_id(1) * block_columns
    column = first + tl.arange(0, block_columns)
    is_column = column < dim
    best = tl.full([block_heads], -1e30, dtype=tl.float32)
    total = tl.zeros([block_heads], dtype=tl.float32)
    acc = tl.zeros([block_heads, block_columns], dtype=tl.float32)
    for start in range(0, places, tile):
        i = start + tl.arange(0, tile)
        rows, is_seen = _rows(place, i, ring, entries, chosen, window, topk, dim)
        v = tl.load(
            rows[:, None] + column[None, :], mask=is_seen[:, None] & is_column[None, :], other=0.0
        )
        at = head[:, None] * places + i[None, :]
        s = tl.load(scores + at, mask=is_head[:, None], other=0.0)
        higher = tl.maximum(best, tl.max(s, axis=1))
        shrink = tl.exp(best - higher)
        shares = tl.exp(s - higher[:, None])
        total = total * shrink + tl.sum(shares, axis=1)
        shares = bf16_rounded(shares)  # for the product alone
        if is_wide:
            part = tl.dot(shares, v.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(shares.to(tl.bfloat16), v)
        acc = acc * shrink[:, None] + part
        best = higher
    total += tl.exp(tl.load(sink + head, mask=is_head, other=0.0) - best)
    o = bf16_rounded(tl.div_rn(acc, total[:, None]))
    o = rotated(o, first, cos, sin, place, dim, half, True)
    tl.store(
        out + head[:, None] * dim + column[None, :], o.to(tl.bfloat16), mask=is_head[:, None] & is_column[None, :]
    )  # fmt: skip


def scores_shape(heads: int, window: int, topk: int) -> tuple[int, int]:
    """Return the shape [heads, n] of the fp32 buffer that `attend_token` needs."""
    return heads, triton.cdiv(window + topk, SLOTS_BLOCK) * SLOTS_BLOCK


def attend_token(
    q: Tensor, ring: Tensor, entries: Tensor | None, chosen: Tensor | None, sink: Tensor, position: Tensor, cos: Tensor,
    sin: Tensor, scores: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Attend to a token's window and its chosen entries; every entry is key and value.

    q: [heads, D] bf16, as projected.  ring: [W, D] bf16, the token's own entry in it.  entries: [capacity, D] bf16 and
    chosen: [k] int32, rows of them in ascending order, -1 behind the last; None for a layer with a window alone.
    sink: [heads] fp32.  position: [1] int, on the device.  cos, sin: [positions, R / 2] fp32.  scores: scratch, see
    `scores_shape`.  out: [heads, D] bf16, filled, rotated back.
    """
    heads, dim = q.shape
    topk = 0 if chosen is None else chosen.shape[0]
    groups, places = triton.cdiv(heads, HEADS), scores.shape[1]
    # the interpreter knows no product of bf16; that of the same numbers in fp32 is the same
    shape = {
        "heads": heads, "dim": dim, "half": cos.shape[1], "window": ring.shape[0], "topk": topk, "places": places,
        "is_wide": not q.is_cuda, "block_heads": HEADS,
    }  # fmt: skip
    block_dim = max(16, triton.next_power_of_2(dim))
    _score_kernel[(triton.cdiv(places, SCORE_TILE), groups)](
        q, ring, entries, chosen, position, cos, sin, scores, dim**-0.5, **shape, block_dim=block_dim,
        tile=SCORE_TILE, num_warps=SCORE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    columns = min(MIX_COLUMNS, block_dim)
    _mix_kernel[(groups, triton.cdiv(dim, columns))](
        ring, entries, chosen, position, cos, sin, scores, sink, out, **shape, block_columns=columns, tile=SLOTS_BLOCK,
        num_warps=MIX_WARPS, num_stages=MIX_STAGES if topk else WINDOW_STAGES, enable_fp_fusion=False,
    )  # fmt: skip
