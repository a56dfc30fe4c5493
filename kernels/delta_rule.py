"""The gated delta rule of one token in two Triton launches: convolution, then one program a value head.

Definitions: `reference.conv_silu_token`, `reference.delta_token`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CONV_BLOCK = 256


@triton.jit
def _conv_kernel(x, history, taps, out, width, num_taps: tl.constexpr, block: tl.constexpr):
    column = tl.program_id(0) * block + tl.arange(0, block)
    mask = column < width
    new = tl.load(x + column, mask=mask, other=0.0)
    total = new.to(tl.float32) * tl.load(
        taps + (num_taps - 1) * width + column, mask=mask, other=0.0
    ).to(tl.float32)
    for j in tl.static_range(num_taps - 1):
        old = tl.load(history + j * width + column, mask=mask, other=0.0)
        total += old.to(tl.float32) * tl.load(taps + j * width + column, mask=mask, other=0.0).to(
            tl.float32
        )
        if j > 0:
            tl.store(history + (j - 1) * width + column, old, mask=mask)
    tl.store(history + (num_taps - 2) * width + column, new, mask=mask)
    tl.store(out + column, total / (1.0 + tl.exp(-total)), mask=mask)


@triton.jit
def _delta_kernel(
    qkv, z, beta_decay, rate, dt_bias, norm, state, out, eps, heads: tl.constexpr, repeat: tl.constexpr,
    key_width: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    i, j = tl.arange(0, key_dim), tl.arange(0, value_dim)
    key_at = head // repeat * key_dim + i
    q, k = tl.load(qkv + key_at), tl.load(qkv + key_width + key_at)
    q = q * tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (key_dim**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    v = tl.load(qkv + 2 * key_width + head * value_dim + j)
    beta = 1.0 / (1.0 + tl.exp(-tl.load(beta_decay + head).to(tl.float32)))
    a = tl.load(beta_decay + heads + head).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    at = state + head * key_dim * value_dim + i[:, None] * value_dim + j[None, :]
    memory = tl.load(at) * tl.exp(tl.load(rate + head) * softplus)
    read = tl.sum(k[:, None] * memory, axis=0)
    memory += k[:, None] * (beta * (v - read))[None, :]
    tl.store(at, memory)
    o = tl.sum(q[:, None] * memory, axis=0)
    dtype = out.dtype.element_ty
    o = o.to(dtype).to(tl.float32)
    o = (
        (o * tl.rsqrt(tl.sum(o * o, axis=0) / value_dim + eps) * tl.load(norm + j))
        .to(dtype)
        .to(tl.float32)
    )
    gate = 1.0 / (1.0 + tl.exp(-tl.load(z + head * value_dim + j).to(tl.float32)))
    tl.store(out + head * value_dim + j, (o * gate).to(dtype))


def conv_silu_token(x: Tensor, history: Tensor, taps: Tensor) -> Tensor:
    """x: [1, C].  history: [J - 1, C], moved on by one token in place.  taps: [J, C].  Returns [1, C] fp32."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    width = x.shape[1]
    grid = (triton.cdiv(width, CONV_BLOCK),)
    _conv_kernel[grid](x, history, taps, out, width, num_taps=taps.shape[0], block=CONV_BLOCK)
    return out


def delta_token(
    qkv: Tensor, z: Tensor, beta_decay: Tensor, rate: Tensor, dt_bias: Tensor, norm: Tensor, state: Tensor, eps: float
) -> Tensor:  # fmt: skip
    """One token through all value heads: normed, gated output [1, heads * V] in z's dtype.

    qkv: [1, 2 * key width + heads * V] fp32, convolved.  z: [1, heads * V].  beta_decay: [1, 2 * heads].
    rate, dt_bias: [heads] fp32.  norm: [V] fp32.  state: [heads, K, V] fp32, changed in place; K, V powers of two.
    """
    heads, key_dim, value_dim = state.shape
    key_width = (qkv.shape[1] - heads * value_dim) // 2
    out = torch.empty_like(z)
    _delta_kernel[(heads,)](
        qkv, z, beta_decay, rate, dt_bias, norm, state, out, eps, heads=heads, repeat=heads * key_dim // key_width,
        key_width=key_width, key_dim=key_dim, value_dim=value_dim, num_warps=8,
    )  # fmt: skip
    return out
