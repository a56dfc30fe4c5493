"""The hyper-connection read of one token in two Triton launches: add, norm, down and inject; then up and mix.

Definition: `reference.read_token`. One token's streams are [S, H]; D = S * H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DOWN_ROWS, DOWN_WARPS = 4, 8
# of 17 shapes tried on an H200 the fastest; one warp needs no shared memory
UP_ROWS, UP_WARPS = (1, 1)


@triton.jit
def _down_kernel(
    residual, amount, y, gain, weight, moved, normed, lowrank, share, eps, has_add: tl.constexpr, hidden: tl.constexpr,
    rank: tl.constexpr, streams: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = program * block_rows + tl.arange(0, block_rows)
    is_row = rows < rank + streams
    column = tl.arange(0, block)
    mask = column < hidden
    total = tl.zeros([block_rows], dtype=tl.float32)
    if has_add:
        y32 = tl.load(y + column, mask=mask, other=0.0).to(tl.float32)
    # every program norms all streams for itself: cheaper than a launch more
    for stream in tl.static_range(streams):
        at = stream * hidden + column
        w = tl.load(
            weight + rows[:, None] * (streams * hidden) + at[None, :],
            mask=is_row[:, None] & mask[None, :],
            other=0.0,
        )
        x = tl.load(residual + at, mask=mask, other=0.0)
        dtype = x.dtype
        if has_add:  # rounded where the definition rounds: after the product, after the sum
            added = (tl.load(amount + stream).to(tl.float32) * y32).to(dtype)
            x = (x.to(tl.float32) + added.to(tl.float32)).to(dtype)
        x32 = x.to(tl.float32)
        mean = tl.sum(x32 * x32, axis=0) / hidden
        out = x32 * tl.rsqrt(mean + eps) * tl.load(gain + at, mask=mask, other=0.0)
        out = out.to(dtype)
        if program == stream:
            tl.store(moved + at, x, mask=mask)
            tl.store(normed + at, out, mask=mask)
        total += tl.sum(w.to(tl.float32) * out.to(tl.float32)[None, :], axis=1)
    dtype = lowrank.dtype.element_ty
    scaled = total.to(dtype).to(tl.float32) / streams
    gate = 1.0 / (1.0 + tl.exp(-scaled))
    tl.store(lowrank + rows, (scaled * gate).to(dtype), mask=rows < rank)
    tl.store(share + rows - rank, (2.0 * gate).to(dtype), mask=(rows >= rank) & is_row)


@triton.jit
def _up_kernel(
    normed, weight, lowrank, x, hidden: tl.constexpr, rank: tl.constexpr, streams: tl.constexpr,
    block_rows: tl.constexpr, block_rank: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    is_row = rows < hidden
    dtype = x.dtype.element_ty
    total = tl.zeros([block_rows], dtype=tl.float32)
    for stream in tl.static_range(streams):
        at = stream * hidden + rows
        dots = tl.zeros([block_rows], dtype=tl.float32)
        for start in tl.static_range(0, rank, block_rank):
            column = start + tl.arange(0, block_rank)
            low = tl.load(lowrank + column, mask=column < rank, other=0.0).to(tl.float32)
            w = tl.load(
                weight + at[:, None] * rank + column[None, :],
                mask=is_row[:, None] & (column < rank)[None, :],
                other=0.0,
            )
            dots += tl.sum(w.to(tl.float32) * low[None, :], axis=1)
        gate = 1.0 / (1.0 + tl.exp(-dots.to(dtype).to(tl.float32)))
        value = tl.load(normed + at, mask=is_row, other=0.0).to(tl.float32)
        total += (gate.to(dtype).to(tl.float32) * value).to(dtype).to(tl.float32)
    tl.store(x + rows, (total / streams).to(dtype), mask=is_row)


def read_token(
    residual: Tensor, amount: Tensor | None, y: Tensor | None, gain: Tensor, down_inject: Tensor, up: Tensor,
    moved: Tensor, x: Tensor, share: Tensor, eps: float,
) -> None:  # fmt: skip
    """Add the block before to every stream, and read a block's input from them.

    residual: [1, S, H].  amount: [1, S, 1], y: [1, H], or None for nothing to add.  gain: [S, H] fp32.
    down_inject: [rank + S, D].  up: [D, rank].  Filled: moved [1, S, H], the streams after the addition (not the
    memory of residual); x [1, H], the block's input; share [1, S, 1], how much of its output each stream takes
    (not the memory of amount).
    """
    _, streams, hidden = residual.shape
    rank = up.shape[1]
    lowrank = torch.empty(rank, dtype=residual.dtype, device=residual.device)
    normed = torch.empty_like(residual)
    shape = {"hidden": hidden, "rank": rank, "streams": streams}
    programs = max(streams, triton.cdiv(rank + streams, DOWN_ROWS))
    _down_kernel[(programs,)](
        residual, amount, y, gain, down_inject, moved, normed, lowrank, share, eps, has_add=y is not None, **shape,
        block_rows=DOWN_ROWS, block=triton.next_power_of_2(hidden), num_warps=DOWN_WARPS,
    )  # fmt: skip
    _up_kernel[(triton.cdiv(hidden, UP_ROWS),)](
        normed, up, lowrank, x, **shape, block_rows=UP_ROWS,
        block_rank=min(512, triton.next_power_of_2(rank)), num_warps=UP_WARPS,
    )  # fmt: skip
