"""The operations of DeepSeek-V4.1 in plain torch, rounded where the released code rounds: the definitions.

Letters: T tokens, d hidden, S streams, K input width, N output width. bf16 in and out unless said; a product of
quantised values is exact in fp32, so only the order of fp32 sums is free.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.formats import E2M1_MAX, E2M1_VALUES, E4M3_MAX, nearest_e2m1

BLOCK = 32  # columns that share a scale, and rows of an FP8 weight's block
KV_BLOCK = 16  # columns that share a scale in the compressed KV
SLOTS_BLOCK = 64  # attention entries taken together: the running maximum moves in these steps
AMAX_FLOOR = 1e-4


def power_of_two_above(x: Tensor) -> Tensor:
    """Return the least power of two that is at least x, by its bits: x fp32, positive and normal."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).view(torch.float32)


def act_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise activations to E4M3 in blocks of 32 with power-of-two scales.

    x: [..., K] bf16.  Returns (values [..., K] float8_e4m3fn, scales [..., K / 32] fp32).
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1).clamp(min=AMAX_FLOOR)
    scale = power_of_two_above(amax * (1.0 / E4M3_MAX))
    values = (blocks / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.flatten(-2), scale


def act_rounded(x: Tensor) -> Tensor:
    """Return what `act_quant` makes of x, as numbers: [..., K] fp32 (each is a bf16 number, too)."""
    values, scale = act_quant(x)
    rounded: Tensor = values.float().unflatten(-1, (-1, BLOCK)) * scale.unsqueeze(-1)
    return rounded.flatten(-2)


def fp4_quant(x: Tensor, is_kv: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise to E2M1: (codes [..., K] uint8 in 0..15, scales fp32).

    x: [..., K] bf16.  Index queries and keys: blocks of 32 with power-of-two scales.  is_kv, compressed entries: blocks
    of 16 with E4M3 scales.
    """
    blocks = x.float().unflatten(-1, (-1, KV_BLOCK if is_kv else BLOCK))
    amax = blocks.abs().amax(-1)
    if is_kv:
        scale = (amax.clamp(min=E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp(max=E4M3_MAX)
        scale = scale.to(torch.float8_e4m3fn).float()
    else:
        scale = power_of_two_above(amax.clamp(min=E2M1_MAX * 2.0**-126) * (1.0 / E2M1_MAX))
    values = (blocks / scale.unsqueeze(-1)).clamp(-E2M1_MAX, E2M1_MAX)
    return nearest_e2m1(values).flatten(-2), scale


def fp4_rounded(x: Tensor, is_kv: bool = False) -> Tensor:
    """Return what `fp4_quant` makes of x, as numbers in x's dtype (bf16 holds them)."""
    codes, scale = fp4_quant(x, is_kv)
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=x.device)
    values = table[codes.long()].unflatten(-1, (-1, KV_BLOCK if is_kv else BLOCK))
    rounded: Tensor = values * scale.unsqueeze(-1)
    return rounded.flatten(-2).to(x.dtype)


class Packed(Protocol):
    """A weight that is kept as it is stored."""

    def product(self, x: Tensor) -> Tensor:
        """Return `block_product` of quantised activations x [T, K] with the dequantised weight: bf16 [T, N]."""
        ...


def quantized_linear(x: Tensor, weight: Tensor | Packed) -> Tensor:
    """Return x W^T with quantised activations: x [T, K] bf16, weight [N, K] fp32 as dequantised.  bf16 [T, N]."""
    return product(act_rounded(x), weight)


def product(x: Tensor, weight: Tensor | Packed) -> Tensor:
    """Return `block_product`, rounded: x [T, K] as quantised, weight [N, K] fp32 as dequantised.  bf16 [T, N]."""
    if isinstance(weight, Tensor):
        return block_product(x, weight).to(torch.bfloat16)
    return weight.product(x)


def block_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, summed by blocks of 32 columns in their order: x [T, K], weight [N, K] fp32.  fp32 [T, N].

    Products of a block are small integers times a power of two, so that their sum is exact; the order of blocks is not
    free. One sum over all columns differs in one bf16 result of 60,000, and that one changes routes further on.
    """
    total = torch.zeros(len(x), len(weight), device=x.device)
    for part, rows in zip(x.split(BLOCK, dim=1), weight.split(BLOCK, dim=1), strict=True):
        total += part @ rows.t()
    return total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return w * (x / sqrt(mean(x^2) + eps)): x [..., N] bf16, weight [N].  One rounding, to bf16."""
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * normed).to(torch.bfloat16)


def rotation_rates(
    dim: int, base: float, yarn: tuple[float, float, float, int] | None = None
) -> Tensor:
    """Return the angle per position of each pair: [dim / 2] fp32.

    yarn: (factor, beta_fast, beta_slow, original length), or None for plain RoPE.
    """
    rates = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return rates
    factor, fast, slow, original = yarn

    def corrected(turns: float) -> float:
        length = torch.tensor(original / (turns * 2 * torch.pi), dtype=torch.float64)
        return float(dim * length.log() / (2 * torch.tensor(base, dtype=torch.float64).log()))

    low = max(int(torch.tensor(corrected(fast)).floor()), 0)
    high = min(int(torch.tensor(corrected(slow)).ceil()), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)
    smooth = 1 - ramp.clamp(0, 1)
    return rates / factor * (1 - smooth) + rates * smooth


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last R dimensions in adjacent pairs; the rest pass unchanged.

    x: [T, ..., D] bf16.  cos, sin: [T, R / 2] fp32.  Computed in fp32, one rounding.
    """
    width = 2 * cos.shape[-1]
    kept, tail = x[..., :-width], x[..., -width:].float().unflatten(-1, (-1, 2))
    shape = (cos.shape[0], *([1] * (x.dim() - 2)), cos.shape[-1])
    c, s = cos.view(shape), sin.view(shape)
    if inverse:
        s = -s
    a, b = tail[..., 0], tail[..., 1]
    turned = torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
    return torch.cat([kept, turned.to(x.dtype)], dim=-1)


def steady_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T, summed in fp64: x [T, K], weight [N, K].  fp32 [T, N].

    An fp32 product sums in another order for one row than for many, and one flipped bf16 result further on moves an FP4
    entry that every later token sees.
    """
    return F.linear(x.double(), weight.double()).float()


def hyper_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return how a sublayer reads and writes the streams: (pre [T, S], post [T, S], comb [T, S, S]) fp32.

    streams: [T, S, d] bf16.  fn: [2 S + S^2, S d], scale: [3], base: [2 S + S^2], fp32.
    """
    flat = streams.float().flatten(1)
    mean = flat.double().square().mean(-1, keepdim=True).float()
    mixes = steady_linear(flat, fn) * torch.rsqrt(mean + norm_eps)
    return split_mixes(mixes, scale, base, streams.shape[1], iterations, eps)


def split_mixes(
    mixes: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mixes: [T, 2 S + S^2] fp32.  Returns (pre, post, comb) as `hyper_mixes`; comb nearly doubly stochastic."""
    pre = torch.sigmoid(mixes[:, :streams] * scale[0] + base[:streams]) + eps
    middle = slice(streams, 2 * streams)
    post = 2 * torch.sigmoid(mixes[:, middle] * scale[1] + base[middle])
    comb = mixes[:, 2 * streams :] * scale[2] + base[2 * streams :]
    comb = comb.unflatten(-1, (streams, streams))
    shares = (comb - comb.amax(-1, keepdim=True)).exp()
    comb = shares / _sum(shares, -1) + eps
    comb = comb / (_sum(comb, -2) + eps)
    for _ in range(iterations - 1):
        comb = comb / (_sum(comb, -1) + eps)
        comb = comb / (_sum(comb, -2) + eps)
    return pre, post, comb


def _sum(x: Tensor, dim: int) -> Tensor:
    """Return the sum over a short dimension, kept: term by term, the same for one row and for many."""
    parts = x.split(1, dim)
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def hyper_read(streams: Tensor, pre: Tensor) -> Tensor:
    """Return sum_j pre_j X_j: streams [T, S, d] bf16, pre [T, S] fp32.  bf16 [T, d]."""
    return (pre.unsqueeze(-1) * streams.float()).sum(1).to(torch.bfloat16)


def hyper_write(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Return X'_k = post_k y + sum_j comb_jk X_j (comb is used transposed): bf16 [T, S, d]."""
    mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)  # [T, j, k, d] over j
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(torch.bfloat16)


def sparse_attention(q: Tensor, kv: Tensor, sink: Tensor, slots: Tensor, scale: float) -> Tensor:
    """Attend from each query to its own list of entries; every entry is key and value.

    q: [T, heads, D].  kv: [S, D].  sink: [heads] fp32, counts in the denominator only.  slots: [T, n] int, -1 for none.
    Returns [T, heads, D] bf16; zeros for a query without entries.
    """
    tokens, heads, dim = q.shape
    best = torch.full((tokens, heads), -1e30, device=q.device)
    total = torch.zeros(tokens, heads, device=q.device)
    out = torch.zeros(tokens, heads, dim, device=q.device)
    for part in slots.split(SLOTS_BLOCK, dim=1):
        entries = kv[part.clamp(min=0).long()].float()  # [T, n, D]
        scores = torch.einsum("thd,tnd->thn", q.float(), entries) * scale
        scores = scores.masked_fill((part < 0).unsqueeze(1), float("-inf"))
        higher = torch.maximum(best, scores.amax(-1))
        shrink = (best - higher).exp()
        shares = (scores - higher.unsqueeze(-1)).exp()
        total = total * shrink + shares.sum(-1)
        shares = shares.to(torch.bfloat16).float()  # rounded for the product alone
        out = out * shrink.unsqueeze(-1) + torch.einsum("thn,tnd->thd", shares, entries)
        best = higher
    total = total + (sink - best).exp()
    return (out / total.unsqueeze(-1)).to(torch.bfloat16)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return sum_h w_h relu(q_h k): q [T, heads, D], keys [S, D], weights [T, heads], all bf16.  bf16 [T, S].

    Every step is rounded to bf16, as released: ties are frequent.
    """
    dots = torch.einsum("thd,sd->ths", q.float(), keys.float()).to(torch.bfloat16)
    weighted = dots.relu() * weights.unsqueeze(-1)
    return weighted.float().sum(1).to(torch.bfloat16)


def best_places(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest of each row, best first; of equals the lower place wins: [T, count]."""
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]


def candidate_mask(scores: Tensor, visible: Tensor, num_blocks: int, block: int) -> Tensor:
    """Return which entries lie in the best blocks: scores [T, S], visible [T] entries.  bool [T, S].

    A block counts by its best entry; the one with the newest visible entry always counts.
    """
    tokens, entries = scores.shape
    padded = F.pad(scores.float(), (0, -entries % block), value=float("-inf"))
    best = padded.unflatten(-1, (-1, block)).amax(-1)  # [T, blocks]
    newest = ((visible - 1) // block).clamp(min=0)
    has_any = visible > 0
    rows = torch.arange(tokens, device=scores.device)
    best[rows[has_any], newest[has_any]] = float("inf")
    chosen = best_places(best, min(num_blocks, best.shape[1]))
    mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
    mask &= best > float("-inf")
    return mask.repeat_interleave(block, dim=1)[:, :entries]


def route(logits: Tensor, bias: Tensor, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Choose experts: (ids [T, k], best first, weights [T, k] fp32).

    logits: [T, E] fp32.  bias: [E], which only selects.
    """
    scores = F.softplus(logits).sqrt()
    ids = best_places(scores + bias, top_k)
    chosen = scores.gather(1, ids)
    return ids, chosen / (_sum(chosen, -1) + 1e-20) * scale


def swiglu_expert(
    x: Tensor, gate: Tensor | Packed, up: Tensor | Packed, down: Tensor | Packed, limit: float,
    weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return one expert's output: x [T, d] bf16, matrices fp32 as dequantised, weight [T, 1] fp32.  bf16 [T, d].

    The routing weight multiplies before the last product; gates are clamped from above only.
    """
    rounded = act_rounded(x)
    g = product(rounded, gate).float().clamp(max=limit)
    u = product(rounded, up).float().clamp(-limit, limit)
    h = F.silu(g) * u
    if weight is not None:
        h = h * weight
    return quantized_linear(h.to(torch.bfloat16), down)
