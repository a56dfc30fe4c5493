"""Attention of one decoded token in plain torch: the definitions of `attention_token`, and one of `dense_ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference import apply_rope, attention, rms_norm, top_blocks


def prepare_token(
    projected: Tensor, position: Tensor, cos: Tensor, sin: Tensor, gain_q: Tensor, gain_k: Tensor, gain_index_q: Tensor,
    gain_index_k: Tensor, keys: Tensor, values: Tensor, open_block: Tensor, pooled: Tensor, q: Tensor, index_q: Tensor,
    eps: float,
) -> None:  # fmt: skip
    """Norm and rotate a token's queries and keys and write what later tokens need into the caches.

    projected: [1, N], per head its query and its output gate, then keys, values, index queries, the raw index key.
    position: [1] int64.  cos, sin: [capacity, R/2] fp32.  gain_q, gain_k: [head_dim] fp32.  gain_index_q,
    gain_index_k: [index_dim] fp32.  Changed at the position's rows: keys, values [capacity, kv_heads, head_dim],
    open_block [block_tokens, index_dim] (raw keys), pooled [B, index_dim] (the position's block; right once the block
    is complete).  Filled: q [heads, head_dim], index_q [index_heads, index_dim].
    """
    heads, head_dim = q.shape
    kv_heads, size = keys.shape[1], open_block.shape[0]
    index_heads, index_dim = index_q.shape
    widths = [2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    both, k, v, index, raw = projected.split([*widths, index_heads * index_dim, index_dim], dim=1)

    def normed(rows: Tensor, gain: Tensor, at: Tensor) -> Tensor:
        """rows: [1, n, D].  at: [1], the position that they are rotated for."""
        tables = cos.index_select(0, at), sin.index_select(0, at)
        return apply_rope(rms_norm(rows, gain, eps), *tables)

    queries = both.view(1, heads, 2 * head_dim)[..., :head_dim]
    q.copy_(normed(queries, gain_q, position)[0])
    keys.index_copy_(0, position, normed(k.view(1, kv_heads, head_dim), gain_k, position))
    values.index_copy_(0, position, v.view(1, kv_heads, head_dim))
    index_q.copy_(normed(index.view(1, index_heads, index_dim), gain_index_q, position)[0])
    open_block.index_copy_(0, position % size, raw)
    number = position // size
    mean = open_block.float().mean(0).to(open_block.dtype).view(1, 1, index_dim)
    pooled.index_copy_(0, number, normed(mean, gain_index_k, number * size)[0])


def choose_blocks(
    index_q: Tensor, pooled: Tensor, position: Tensor, scores: Tensor, chosen: Tensor, budget: int, block_tokens: int
) -> None:  # fmt: skip
    """Mark the `budget` best of the complete blocks; of equal scores the earlier block wins.

    index_q: [index_heads, index_dim].  pooled: [B, index_dim].  position: [1] int64.  scores: [B] fp32, filled.
    chosen: [B] int8, filled.
    """
    dots = index_q.float() @ pooled.float().T
    scores.copy_(dots.relu().sum(0) * index_q.shape[1] ** -0.5)
    numbers = torch.arange(pooled.shape[0], device=pooled.device)
    complete = numbers < (position + 1) // block_tokens
    chosen.copy_(top_blocks(scores.unsqueeze(0), complete.unsqueeze(0), budget)[0])


def attend_token(
    q: Tensor, projected: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, position: Tensor, best: Tensor,  # noqa: ARG001
    total: Tensor, weighted: Tensor, out: Tensor, budget: int, block_tokens: int,  # noqa: ARG001
) -> None:  # fmt: skip
    """Attend to chosen blocks and the open one (to everything while all fit the budget), then gate.

    q: [heads, head_dim].  projected: as in `prepare_token`, for the gates.  keys, values: [capacity, kv_heads,
    head_dim], finite everywhere.  chosen: [B] int8.  position: [1] int64.  best, total, weighted: not used here.
    out: [1, heads * head_dim], filled.
    """
    heads, head_dim = q.shape
    places = torch.arange(keys.shape[0], device=keys.device)
    complete = (position + 1) // block_tokens
    is_chosen = (chosen != 0).repeat_interleave(block_tokens) | (complete <= budget)
    visible = (places <= position) & (is_chosen | (places >= complete * block_tokens))
    attended = attention(q.unsqueeze(0), keys, values, visible.unsqueeze(0))
    gates = projected[:, : 2 * heads * head_dim].view(1, heads, 2 * head_dim)[..., head_dim:]
    out.copy_((attended * torch.sigmoid(gates)).flatten(1))


def attend_span(
    q: Tensor, keys: Tensor, values: Tensor, places: Tensor, span: Tensor, length: int
) -> Tensor:
    """Define `dense_ops.attend_span`: which of three queries a key meets is a matter of how many chunks lie between."""
    first, end = span.tolist()
    rows, repeat = slice(first, end), q.shape[1] // keys.shape[1]
    if q.shape[0] == 1:
        return attention(q, keys[rows], values[rows], None)
    k, v = (part[rows].repeat_interleave(repeat, dim=1).float() for part in (keys, values))
    chunk = places[rows] // length
    case = (chunk[-1] - chunk).clamp(max=2)
    scores = torch.einsum("nhd,nhd->hn", q[case].float(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v).unsqueeze(0).to(q.dtype)
