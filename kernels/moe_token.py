"""What surrounds the routed experts of one token, in Triton: routers, route, shared expert, and the weighted sum.

Definitions: `reference.mlp_in_token`, `route_token`, `shared_down_token`, `combine_token`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

IN_ROWS, IN_WARPS = 1, 2  # of 12 shapes tried on an H200 the fastest: 4.8 us (4 rows, 4 warps: 7.6)
DOWN_ROWS = 8
COMBINE_BLOCK = 128


@triton.jit
def _dots(weight, rows, num_rows, x, columns: tl.constexpr, block: tl.constexpr):
    """Products of some rows of a matrix with x, which is in registers: fp32, one a row."""
    column = tl.arange(0, block)
    mask = (rows < num_rows)[:, None] & (column < columns)[None, :]
    w = tl.load(weight + rows[:, None] * columns + column[None, :], mask=mask, other=0.0)
    return tl.sum(w.to(tl.float32) * x[None, :], axis=1)


@triton.jit
def _mlp_in_kernel(
    x, router, ratio, next_router, gate, up, shared_gate, logits, guess_logits, inner, share, experts, intermediate,
    router_programs, guess_programs, shared_programs, hidden: tl.constexpr, block_rows: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    dtype = logits.dtype.element_ty
    column = tl.arange(0, block)
    mask = column < hidden
    x32 = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    row = tl.arange(0, block_rows)
    if program < router_programs:
        rows = program * block_rows + row
        out = _dots(router, rows, experts, x32, hidden, block)
        tl.store(logits + rows, out.to(dtype), mask=rows < experts)
    elif program < router_programs + guess_programs:
        rows = (program - router_programs) * block_rows + row
        scale = tl.load(ratio + column, mask=mask, other=0.0).to(tl.float32)
        scaled = (x32 * scale).to(dtype).to(tl.float32)
        out = _dots(next_router, rows, experts, scaled, hidden, block)
        tl.store(guess_logits + rows, out.to(dtype), mask=rows < experts)
    elif program < router_programs + guess_programs + shared_programs:
        rows = (program - router_programs - guess_programs) * block_rows + row
        g = _dots(gate, rows, intermediate, x32, hidden, block)
        u = _dots(up, rows, intermediate, x32, hidden, block)
        g, u = g.to(dtype).to(tl.float32), u.to(dtype).to(tl.float32)
        silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
        tl.store(inner + rows, (silu * u).to(dtype), mask=rows < intermediate)
    else:
        w = tl.load(shared_gate + column, mask=mask, other=0.0).to(tl.float32)
        logit = tl.sum(w * x32, axis=0).to(dtype).to(tl.float32)
        tl.store(share, (1.0 / (1.0 + tl.exp(-logit))).to(dtype))


@triton.jit
def _best(scores, count: tl.constexpr, width: tl.constexpr):
    """Indices and values of the largest scores, best first, the earlier of equals first: [width] each."""
    place = tl.arange(0, width)
    ids = tl.zeros([width], dtype=tl.int32)
    values = tl.zeros([width], dtype=tl.float32)
    index = tl.arange(0, scores.shape[0])
    for rank in tl.static_range(count):
        best = tl.argmax(scores, axis=0)
        ids = tl.where(place == rank, best, ids)
        values = tl.where(place == rank, tl.max(scores, axis=0), values)
        scores = tl.where(index == best, float("-inf"), scores)
    return ids, values


@triton.jit
def _route_kernel(
    logits, guess_logits, expert_scales, route, weights, scales, num_experts, top_k: tl.constexpr,
    num_guesses: tl.constexpr, block: tl.constexpr, width: tl.constexpr, guess_width: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, block)
    if tl.program_id(0) == 0:
        place = tl.arange(0, width)
        is_place = place < top_k
        raw = tl.load(logits + index, mask=index < num_experts, other=float("-inf"))
        scores = raw.to(tl.float32)
        exp = tl.exp(scores - tl.max(scores, axis=0))
        ids, values = _best(exp / tl.sum(exp, axis=0), top_k, width)
        share = values / tl.sum(tl.where(is_place, values, 0.0), axis=0)
        tl.store(route + place, ids.to(tl.int64), mask=is_place)
        # by ascending id: an expert's row is how many chosen ids are below its own
        below = (ids[None, :] < ids[:, None]) & is_place[None, :]
        row = tl.sum(below.to(tl.int32), axis=1)
        tl.store(weights + row, share.to(raw.dtype).to(tl.float32), mask=is_place)
        for part in tl.static_range(3):
            scale = tl.load(expert_scales + ids * 3 + part, mask=is_place, other=0.0)
            tl.store(scales + row * 3 + part, scale, mask=is_place)
    elif num_guesses > 0:
        rank = tl.arange(0, guess_width)
        guesses = tl.load(guess_logits + index, mask=index < num_experts, other=float("-inf"))
        guessed, _ = _best(guesses.to(tl.float32), num_guesses, guess_width)
        tl.store(route + top_k + rank, guessed.to(tl.int64), mask=rank < num_guesses)


@triton.jit
def _shared_down_kernel(
    inner, share, down, out, hidden, intermediate: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    dtype = out.dtype.element_ty
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block)
    x32 = tl.load(inner + column, mask=column < intermediate, other=0.0).to(tl.float32)
    value = _dots(down, rows, hidden, x32, intermediate, block)
    weight = tl.load(share).to(tl.float32)
    tl.store(out + rows, (weight * value.to(dtype).to(tl.float32)).to(dtype), mask=rows < hidden)


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


def mlp_in_token(
    x: Tensor, router: Tensor, ratio: Tensor | None, next_router: Tensor | None, gate: Tensor, up: Tensor,
    shared_gate: Tensor, logits: Tensor, guess_logits: Tensor, inner: Tensor, share: Tensor,
) -> None:  # fmt: skip
    """Everything that is computed from an expert block's input x [1, H], in one launch.

    router, next_router: [E, H].  ratio: [H].  gate, up: [I, H].  shared_gate: [1, H].  Filled, in x's dtype: logits
    [1, E]; guess_logits [1, E], of the next layer from x * ratio (left alone without next_router); inner [1, I] and
    share [1, 1] of the shared expert.
    """
    experts, hidden = router.shape
    intermediate = gate.shape[0]
    router_programs = triton.cdiv(experts, IN_ROWS)
    guess_programs = 0 if next_router is None else router_programs
    shared_programs = triton.cdiv(intermediate, IN_ROWS)
    grid = (router_programs + guess_programs + shared_programs + 1,)
    _mlp_in_kernel[grid](
        x, router, x if ratio is None else ratio, router if next_router is None else next_router, gate, up,
        shared_gate, logits, guess_logits, inner, share, experts, intermediate, router_programs, guess_programs,
        shared_programs, hidden=hidden, block_rows=IN_ROWS, block=triton.next_power_of_2(hidden), num_warps=IN_WARPS,
    )  # fmt: skip


def route_token(
    logits: Tensor, guess_logits: Tensor, expert_scales: Tensor, route: Tensor, weights: Tensor, scales: Tensor,
    num_guesses: int,
) -> None:  # fmt: skip
    """Choose the experts of a token and what the weighted sum needs.

    logits, guess_logits: [1, E].  expert_scales: [E, 3] fp32.  Filled: route [k + num_guesses] int64 (pinned memory
    will do), the chosen experts best first, then the guesses for the next layer; weights [1, k] fp32, which sum to
    one, and scales [k, 3], both by ascending expert id.
    """
    experts, top_k = logits.shape[1], weights.shape[1]
    _route_kernel[(2 if num_guesses else 1,)](
        logits, guess_logits, expert_scales, route, weights, scales, experts, top_k=top_k, num_guesses=num_guesses,
        block=triton.next_power_of_2(experts), width=triton.next_power_of_2(top_k),
        guess_width=triton.next_power_of_2(max(1, num_guesses)), num_warps=4,
    )  # fmt: skip


def shared_down_token(inner: Tensor, share: Tensor, down: Tensor, out: Tensor) -> None:
    """Fill out [1, H] with the rest of the gated shared expert: share * (down inner).

    inner: [1, I] and share: [1, 1], from `mlp_in_token`.  down: [H, I].
    """
    hidden, intermediate = down.shape
    grid = (triton.cdiv(hidden, DOWN_ROWS),)
    _shared_down_kernel[grid](
        inner, share, down, out, hidden, intermediate=intermediate, block_rows=DOWN_ROWS,
        block=triton.next_power_of_2(intermediate),
    )  # fmt: skip


def combine_token(weights: Tensor, rows: Tensor, shared: Tensor, out: Tensor) -> None:
    """Fill out [1, H]: the expert block's output, routed experts and shared one.

    weights: [1, k] fp32.  rows: [k, H] fp32.  shared: [1, H].
    """
    top_k, hidden = rows.shape
    grid = (triton.cdiv(hidden, COMBINE_BLOCK),)
    _combine_kernel[grid](weights, rows, shared, out, hidden, top_k=top_k, block=COMBINE_BLOCK)
