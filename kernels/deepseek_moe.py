"""The route of one DeepSeek token and the sum of its experts, in Triton.

Definitions: `reference_deepseek.route`; the sum is that of `runtime/models/deepseek_moe.Moe`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_linear import narrowed
from kernels.moe_token import _best

COMBINE_BLOCK = 128


@triton.jit
def _scores(logits):
    """sqrt(softplus(x)): fp32."""
    e = tl.exp(-tl.abs(logits))
    # log(1 + e) without losing a small e: what 1 + e lost is put right by the quotient
    u = 1.0 + e
    lost = u - 1.0
    log1p = tl.where(lost == 0.0, e, tl.log(u) * (e / tl.where(lost == 0.0, 1.0, lost)))
    return tl.sqrt(tl.maximum(logits, 0.0) + log1p)


@triton.jit
def _route_kernel(
    logits, bias, guess_logits, guess_bias, route, weights, num_experts, scale, top_k: tl.constexpr,
    num_guesses: tl.constexpr, block: tl.constexpr, width: tl.constexpr, guess_width: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, block)
    is_expert = index < num_experts
    if tl.program_id(0) == 0:
        place = tl.arange(0, width)
        is_place = place < top_k
        scores = _scores(tl.load(logits + index, mask=is_expert, other=0.0))
        wanted = scores + tl.load(bias + index, mask=is_expert, other=0.0)
        ids, _ = _best(tl.where(is_expert, wanted, float("-inf")), top_k, width)
        chosen = tl.sum(tl.where(index[None, :] == ids[:, None], scores[None, :], 0.0), axis=1)
        total = tl.sum(tl.where(is_place, chosen, 0.0), axis=0)
        tl.store(route + place, ids.to(tl.int64), mask=is_place)
        # by ascending id: an expert's row is how many chosen ids are below its own
        below = (ids[None, :] < ids[:, None]) & is_place[None, :]
        row = tl.sum(below.to(tl.int32), axis=1)
        tl.store(
            weights + row,
            tl.div_rn(chosen, total + 1e-20 + tl.zeros_like(chosen)) * scale,
            mask=is_place,
        )
    elif num_guesses > 0:
        rank = tl.arange(0, guess_width)
        scores = _scores(tl.load(guess_logits + index, mask=is_expert, other=0.0))
        scores += tl.load(guess_bias + index, mask=is_expert, other=0.0)
        # a name that both branches give, even `_`, must be of one shape in both
        guessed, _guessed_scores = _best(
            tl.where(is_expert, scores, float("-inf")), num_guesses, guess_width
        )
        tl.store(route + top_k + rank, guessed.to(tl.int64), mask=rank < num_guesses)


@triton.jit
def _combine_kernel(rows, shared, out, hidden, top_k: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    mask = column < hidden
    total = tl.zeros([block], dtype=tl.float32)
    for row in tl.static_range(top_k):  # by ascending id, whatever arrived first
        total += tl.load(rows + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(shared + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + column, narrowed(total, out.dtype.element_ty), mask=mask)


def route_token(
    logits: Tensor, bias: Tensor, guess_logits: Tensor, guess_bias: Tensor, route: Tensor, weights: Tensor,
    scale: float, num_guesses: int,
) -> None:  # fmt: skip
    """Choose the experts of a token.

    logits, guess_logits: [E] fp32.  bias, guess_bias: [E] fp32, which only select.  Filled: route [k + num_guesses]
    int64 (pinned memory will do), the chosen experts best first, then the guesses for the next layer; weights [k]
    fp32 by ascending expert id, their sum is `scale`.
    """
    experts, top_k = logits.numel(), weights.numel()
    _route_kernel[(2 if num_guesses else 1,)](
        logits, bias, guess_logits, guess_bias, route, weights, experts, scale, top_k=top_k, num_guesses=num_guesses,
        block=triton.next_power_of_2(experts), width=triton.next_power_of_2(top_k),
        guess_width=triton.next_power_of_2(max(1, num_guesses)), num_warps=4,
    )  # fmt: skip


def combine_token(rows: Tensor, shared: Tensor, out: Tensor) -> None:
    """Fill out [H] bf16 with the sum of rows [k, H] bf16, top to bottom, and shared [H] bf16: fp32, rounded once."""
    top_k, hidden = rows.shape
    grid = (triton.cdiv(hidden, COMBINE_BLOCK),)
    _combine_kernel[grid](rows, shared, out, hidden, top_k=top_k, block=COMBINE_BLOCK)
