"""The hyper-connection read of one token in three Triton launches: add and norm, down and inject, up and mix.

Definitions: `reference.add_norm`, `reference.mix_streams`. One token's streams are [S, H]; D = S * H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DOWN_ROWS, DOWN_COLUMNS = 4, 2048
UP_ROWS = 8


@triton.jit
def _add_norm_kernel(
    residual, amount, y, gain, normed, hidden: tl.constexpr, eps, has_add: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    stream = tl.program_id(0)
    column = tl.arange(0, block)
    mask = column < hidden
    at = stream * hidden + column
    x = tl.load(residual + at, mask=mask, other=0.0)
    dtype = x.dtype
    if has_add:  # rounded where the definition rounds: after the product, after the sum
        share = tl.load(amount + stream).to(tl.float32) * tl.load(
            y + column, mask=mask, other=0.0
        ).to(tl.float32)
        x = (x.to(tl.float32) + share.to(dtype).to(tl.float32)).to(dtype)
        tl.store(residual + at, x, mask=mask)
    x32 = x.to(tl.float32)
    mean = tl.sum(x32 * x32, axis=0) / hidden
    out = x32 * tl.rsqrt(mean + eps) * tl.load(gain + at, mask=mask, other=0.0)
    tl.store(normed + at, out.to(dtype), mask=mask)


@triton.jit
def _down_kernel(
    normed, weight, lowrank, amount, width: tl.constexpr, rank: tl.constexpr, streams: tl.constexpr,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    total = tl.zeros([block_rows], dtype=tl.float32)
    for start in range(0, width, block_columns):
        column = start + tl.arange(0, block_columns)
        is_column = column < width
        mask = (rows < rank + streams)[:, None] & is_column[None, :]
        w = tl.load(weight + rows[:, None] * width + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        total += tl.sum(
            w * tl.load(normed + column, mask=is_column, other=0.0).to(tl.float32)[None, :], axis=1
        )
    dtype = lowrank.dtype.element_ty
    scaled = total.to(dtype).to(tl.float32) / streams
    gate = 1.0 / (1.0 + tl.exp(-scaled))
    tl.store(lowrank + rows, (scaled * gate).to(dtype), mask=rows < rank)
    tl.store(
        amount + rows - rank, (2.0 * gate).to(dtype), mask=(rows >= rank) & (rows < rank + streams)
    )


@triton.jit
def _up_kernel(
    normed, weight, lowrank, x, hidden: tl.constexpr, rank: tl.constexpr, streams: tl.constexpr,
    block_rows: tl.constexpr, block_rank: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    is_row = rows < hidden
    column = tl.arange(0, block_rank)
    low = tl.load(lowrank + column, mask=column < rank, other=0.0).to(tl.float32)
    mask = is_row[:, None] & (column < rank)[None, :]
    dtype = x.dtype.element_ty
    total = tl.zeros([block_rows], dtype=tl.float32)
    for stream in tl.static_range(streams):
        at = stream * hidden + rows
        w = tl.load(weight + at[:, None] * rank + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        dots = tl.sum(w * low[None, :], axis=1).to(dtype).to(tl.float32)
        gate = (1.0 / (1.0 + tl.exp(-dots))).to(dtype).to(tl.float32)
        total += (
            (gate * tl.load(normed + at, mask=is_row, other=0.0).to(tl.float32))
            .to(dtype)
            .to(tl.float32)
        )
    tl.store(x + rows, (total / streams).to(dtype), mask=is_row)


def add_norm(
    residual: Tensor, amount: Tensor | None, y: Tensor | None, gain: Tensor, eps: float
) -> Tensor:
    """Add a block's output to every stream, in place, and return the normed streams.

    residual: [1, S, H], changed.  amount: [1, S, 1], y: [1, H], or None for nothing to add.  gain: [S, H] fp32.
    Returns [1, S, H].
    """
    _, streams, hidden = residual.shape
    normed = torch.empty_like(residual)
    sizes = {
        "hidden": hidden,
        "eps": eps,
        "has_add": y is not None,
        "block": triton.next_power_of_2(hidden),
    }
    _add_norm_kernel[(streams,)](residual, amount, y, gain, normed, **sizes, num_warps=8)
    return normed


def mix_streams(normed: Tensor, down_inject: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block's input [1, H] and how much of its output each stream takes [1, S, 1].

    normed: [1, S, H].  down_inject: [rank + S, D].  up: [D, rank].
    """
    _, streams, hidden = normed.shape
    rank, width = up.shape[1], streams * hidden
    lowrank = torch.empty(rank, dtype=normed.dtype, device=normed.device)
    amount = torch.empty(1, streams, 1, dtype=normed.dtype, device=normed.device)
    x = torch.empty(1, hidden, dtype=normed.dtype, device=normed.device)
    shape = {"rank": rank, "streams": streams}
    _down_kernel[(triton.cdiv(rank + streams, DOWN_ROWS),)](
        normed, down_inject, lowrank, amount, width=width, **shape, block_rows=DOWN_ROWS, block_columns=DOWN_COLUMNS
    )  # fmt: skip
    _up_kernel[(triton.cdiv(hidden, UP_ROWS),)](
        normed, up, lowrank, x, hidden=hidden, **shape, block_rows=UP_ROWS, block_rank=triton.next_power_of_2(rank)
    )  # fmt: skip
    return x, amount
