"""What surrounds the routed experts of one token, in Triton: route, shared expert, and the weighted sum.

Definitions: `reference.route_token`, `reference.shared_token`, `reference.combine_token`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARED_ROWS, SHARED_COLUMNS = 4, 1024
COMBINE_BLOCK = 256


@triton.jit
def _best(scores, top_k: tl.constexpr, width: tl.constexpr):
    """Indices and values of the top_k largest scores, best first, the earlier of equals first: [width] each."""
    place = tl.arange(0, width)
    ids = tl.zeros([width], dtype=tl.int32)
    values = tl.zeros([width], dtype=tl.float32)
    index = tl.arange(0, scores.shape[0])
    for rank in tl.static_range(top_k):
        best = tl.argmax(scores, axis=0)
        ids = tl.where(place == rank, best, ids)
        values = tl.where(place == rank, tl.max(scores, axis=0), values)
        scores = tl.where(index == best, float("-inf"), scores)
    return ids, values


@triton.jit
def _route_kernel(
    logits, guess_logits, expert_scales, route, weights, scales, num_experts, has_guesses: tl.constexpr,
    top_k: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    index, place = tl.arange(0, block), tl.arange(0, width)
    is_place = place < top_k
    raw = tl.load(logits + index, mask=index < num_experts, other=float("-inf"))
    scores = raw.to(tl.float32)
    exp = tl.exp(scores - tl.max(scores, axis=0))
    ids, values = _best(exp / tl.sum(exp, axis=0), top_k, width)
    share = (values / tl.sum(tl.where(is_place, values, 0.0), axis=0)).to(raw.dtype).to(tl.float32)
    tl.store(route + place, ids.to(tl.int64), mask=is_place)
    # by ascending id: an expert's row is how many chosen ids are below its own
    below = (ids[None, :] < ids[:, None]) & is_place[None, :]
    row = tl.sum(below.to(tl.int32), axis=1)
    tl.store(weights + row, share, mask=is_place)
    for part in tl.static_range(3):
        scale = tl.load(expert_scales + ids * 3 + part, mask=is_place, other=0.0)
        tl.store(scales + row * 3 + part, scale, mask=is_place)
    if has_guesses:
        scores = tl.load(guess_logits + index, mask=index < num_experts, other=float("-inf")).to(
            tl.float32
        )
        ids, values = _best(scores, top_k, width)
    tl.store(route + top_k + place, ids.to(tl.int64), mask=is_place)


@triton.jit
def _dots(
    weight,
    rows,
    num_rows,
    x,
    columns: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    total = tl.zeros([block_rows], dtype=tl.float32)
    for start in range(0, columns, block_columns):
        column = start + tl.arange(0, block_columns)
        mask = (rows < num_rows)[:, None] & (column < columns)[None, :]
        w = tl.load(weight + rows[:, None] * columns + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
        total += tl.sum(
            w * tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)[None, :],
            axis=1,
        )
    return total


@triton.jit
def _shared_up_kernel(
    x, gate, up, inner, hidden: tl.constexpr, intermediate, block_rows: tl.constexpr, block_columns: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    dtype = inner.dtype.element_ty
    g = (
        _dots(gate, rows, intermediate, x, hidden, block_rows, block_columns)
        .to(dtype)
        .to(tl.float32)
    )
    u = _dots(up, rows, intermediate, x, hidden, block_rows, block_columns).to(dtype).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    tl.store(inner + rows, (silu * u).to(dtype), mask=rows < intermediate)


@triton.jit
def _shared_down_kernel(
    x, inner, down, shared_gate, out, hidden: tl.constexpr, intermediate: tl.constexpr, block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    one = tl.zeros([1], dtype=tl.int32)
    logit = _dots(shared_gate, one, 1, x, hidden, 1, block_columns).to(dtype).to(tl.float32)
    weight = (1.0 / (1.0 + tl.exp(-logit))).to(dtype).to(tl.float32)
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    value = (
        _dots(down, rows, hidden, inner, intermediate, block_rows, block_columns)
        .to(dtype)
        .to(tl.float32)
    )
    tl.store(out + rows, (weight * value).to(dtype), mask=rows < hidden)


@triton.jit
def _combine_kernel(weights, rows, shared, out, hidden, top_k: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    mask = column < hidden
    total = tl.zeros([block], dtype=tl.float32)
    for row in tl.static_range(top_k):  # one fixed order, whatever arrived first
        total += tl.load(weights + row) * tl.load(
            rows + row * hidden + column, mask=mask, other=0.0
        )
    total += tl.load(shared + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=mask)


def route_token(
    logits: Tensor, guess_logits: Tensor | None, expert_scales: Tensor, route: Tensor, weights: Tensor, scales: Tensor
) -> None:  # fmt: skip
    """Choose the experts of a token and what the weighted sum needs.

    logits, guess_logits: [1, E].  expert_scales: [E, 3] fp32.  Filled: route [2k] int64 (pinned memory will do), the
    chosen experts best first, then the guesses for the next layer (the chosen again without guess_logits);
    weights [1, k] fp32, which sum to one, and scales [k, 3], both by ascending expert id.
    """
    experts, top_k = logits.shape[1], weights.shape[1]
    _route_kernel[(1,)](
        logits, guess_logits, expert_scales, route, weights, scales, experts, has_guesses=guess_logits is not None,
        top_k=top_k, block=triton.next_power_of_2(experts), width=triton.next_power_of_2(top_k), num_warps=4,
    )  # fmt: skip


def shared_token(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, shared_gate: Tensor, out: Tensor
) -> None:
    """Fill out [1, H] with the gated shared expert of x [1, H].

    gate, up: [I, H].  down: [H, I].  shared_gate: [1, H].
    """
    intermediate, hidden = gate.shape
    inner = torch.empty(1, intermediate, dtype=x.dtype, device=x.device)
    blocks = {"block_rows": SHARED_ROWS, "block_columns": SHARED_COLUMNS}
    grid = (triton.cdiv(intermediate, SHARED_ROWS),)
    _shared_up_kernel[grid](x, gate, up, inner, hidden=hidden, intermediate=intermediate, **blocks)
    grid = (triton.cdiv(hidden, SHARED_ROWS),)
    _shared_down_kernel[grid](
        x, inner, down, shared_gate, out, hidden=hidden, intermediate=intermediate, **blocks
    )


def combine_token(weights: Tensor, rows: Tensor, shared: Tensor) -> Tensor:
    """weights: [1, k] fp32.  rows: [k, H] fp32.  shared: [1, H].  Returns the expert block's output [1, H]."""
    top_k, hidden = rows.shape
    out = torch.empty_like(shared)
    grid = (triton.cdiv(hidden, COMBINE_BLOCK),)
    _combine_kernel[grid](weights, rows, shared, out, hidden, top_k=top_k, block=COMBINE_BLOCK)
    return out
