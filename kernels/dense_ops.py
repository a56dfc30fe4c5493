"""What surrounds the products of a dense layer on a GPU, one launch each: norm, rotation, SwiGLU's product, attention.

Definitions: `reference.rms_norm`, `reference.rotate`, `reference.silu_product`, `reference_attention.attend_span`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference, reference_attention

SPLITS = 32  # programs that share a head's keys
BLOCK_KEYS = 32
MIN_GROUP = 16  # rows of a product on the tensor cores
PRODUCT_BLOCK = 1024


@triton.jit
def _norm_kernel(x, gain, out, eps, columns: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, block)
    mask = column < columns
    value = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
    normed = value * scale * tl.load(gain + column, mask=mask, other=0.0)
    tl.store(out + row + column, normed.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_kernel(x, cos, sin, out, heads, half: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    mask = column < half
    at = row * 2 * half + column
    a = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at + half, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + row // heads * half + column, mask=mask, other=0.0)
    s = tl.load(sin + row // heads * half + column, mask=mask, other=0.0)
    tl.store(out + at, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + half, (b * c + a * s).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_kernel(gate, up, out, count, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < count
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    # rounded like the two operations of the definition
    silu = (g / (1.0 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    value = silu * tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend_kernel(
    q, keys, values, places, span, best, total, weighted, scale, length, kv_heads: tl.constexpr,
    group: tl.constexpr, dim: tl.constexpr, cases: tl.constexpr, splits: tl.constexpr,
    block_group: tl.constexpr, block_dim: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(span), tl.load(span + 1)
    share = tl.cdiv(tl.cdiv(end - first, splits), block) * block
    low = first + split * share
    high = tl.minimum(low + share, end)
    member, d = tl.arange(0, block_group), tl.arange(0, block_dim)
    head = kv_head * group + member
    is_q = (member < group)[:, None] & (d < dim)[None, :]
    q_at = head[:, None] * dim + d[None, :]
    own = tl.load(q + q_at, mask=is_q, other=0.0)
    if cases == 3:
        size: tl.constexpr = kv_heads * group * dim
        behind = tl.load(q + size + q_at, mask=is_q, other=0.0)
        far = tl.load(q + 2 * size + q_at, mask=is_q, other=0.0)
        here = tl.load(places + end - 1) // length
    top = tl.full([block_group], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([block_group], dtype=tl.float32)
    out = tl.zeros([block_group, block_dim], dtype=tl.float32)
    for start in range(low, high, block):
        row = start + tl.arange(0, block)
        is_row = row < high
        at = (row.to(tl.int64) * kv_heads + kv_head) * dim
        k = tl.load(
            keys + at[None, :] + d[:, None], mask=is_row[None, :] & (d < dim)[:, None], other=0.0
        )
        scores = tl.dot(own, k, input_precision="ieee")
        if cases == 3:
            apart = here - tl.load(places + row, mask=is_row, other=0) // length
            others = tl.where(
                (apart == 1)[None, :],
                tl.dot(behind, k, input_precision="ieee"),
                tl.dot(far, k, input_precision="ieee"),
            )
            scores = tl.where((apart == 0)[None, :], scores, others)
        scores = tl.where(is_row[None, :], scores * scale, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        shares = tl.exp(scores - new[:, None])
        kept = tl.exp(top - new)
        mass = mass * kept + tl.sum(shares, axis=1)
        v = tl.load(
            values + at[:, None] + d[None, :], mask=is_row[:, None] & (d < dim)[None, :], other=0.0
        )
        out = out * kept[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        top = new
    part = split * kv_heads * group + head
    tl.store(best + part, top, mask=member < group)
    tl.store(total + part, mass, mask=member < group)
    tl.store(weighted + part[:, None] * dim + d[None, :], out, mask=is_q)


@triton.jit
def _combine_kernel(
    best, total, weighted, out, heads: tl.constexpr, dim: tl.constexpr, splits: tl.constexpr,
    block_dim: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    part, d = tl.arange(0, splits) * heads + head, tl.arange(0, block_dim)
    tops = tl.load(best + part)
    shares = tl.exp(tops - tl.max(tops, axis=0))
    mass = tl.sum(shares * tl.load(total + part), axis=0)
    rows = tl.load(weighted + part[:, None] * dim + d[None, :], mask=(d < dim)[None, :], other=0.0)
    value = tl.sum(shares[:, None] * rows, axis=0) / mass
    tl.store(out + head * dim + d, value.to(out.dtype.element_ty), mask=d < dim)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return `reference.rms_norm` of x [..., N] with a gain [N] fp32."""
    if not x.is_cuda:
        return reference.rms_norm(x, gain, eps)
    return launch_rms_norm(x, gain, eps)


def launch_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """As `rms_norm`, in Triton."""
    x, columns = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    _norm_kernel[(x.numel() // columns,)](
        x, gain, out, eps, columns=columns, block=triton.next_power_of_2(columns)
    )
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `reference.rotate` of x [T, heads, D] by cos, sin [T, D/2] fp32."""
    if not x.is_cuda or x.ndim != 3:
        return reference.rotate(x, cos, sin)
    return launch_rotate(x, cos, sin)


def launch_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rotate`, in Triton."""
    x = x.contiguous()
    tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    if x.numel():
        _rotate_kernel[(tokens * heads,)](
            x, cos.contiguous(), sin.contiguous(), out, heads, half=dim // 2,
            block=triton.next_power_of_2(dim // 2),
        )  # fmt: skip
    return out


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, rounded twice, of contiguous tensors."""
    if not gate.is_cuda:
        return reference.silu_product(gate, up)
    return launch_silu_product(gate, up)


def launch_silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """As `silu_product`, in Triton."""
    out = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), PRODUCT_BLOCK),)
    _silu_kernel[grid](gate, up, out, gate.numel(), block=PRODUCT_BLOCK)
    return out


def attend_span(
    q: Tensor, keys: Tensor, values: Tensor, places: Tensor, span: Tensor, length: int = 1
) -> Tensor:
    """Attend one token to a run of rows that the device knows: the same launch whatever its length is.

    q: [1, heads, D]; or [3, heads, D], as rotated for keys of its own chunk, of the one before, and of earlier ones.
    keys, values: [rows, kv_heads, D] contiguous.  places: [rows] int64, positions, of the token itself last.  span: [2]
    int32, the first row and one behind the last, not empty.  length: of a chunk.  Returns [1, heads, D].
    """
    if not q.is_cuda:
        return reference_attention.attend_span(q, keys, values, places, span, length)
    return launch_attend_span(q, keys, values, places, span, length)


def launch_attend_span(
    q: Tensor, keys: Tensor, values: Tensor, places: Tensor, span: Tensor, length: int = 1
) -> Tensor:
    """As `attend_span`, in Triton."""
    q = q.contiguous()
    cases, heads, dim = q.shape
    kv_heads, block_dim = keys.shape[1], max(16, triton.next_power_of_2(dim))
    best, total = torch.empty(2, SPLITS, heads, dtype=torch.float32, device=q.device)
    weighted = torch.empty(SPLITS, heads, dim, dtype=torch.float32, device=q.device)
    out = torch.empty(1, heads, dim, dtype=q.dtype, device=q.device)
    group = heads // kv_heads
    _attend_kernel[(kv_heads, SPLITS)](
        q, keys, values, places, span, best, total, weighted, dim**-0.5, length, kv_heads=kv_heads, group=group,
        dim=dim, cases=cases, splits=SPLITS, block_group=max(MIN_GROUP, triton.next_power_of_2(group)),
        block_dim=block_dim, block=BLOCK_KEYS,
    )  # fmt: skip
    _combine_kernel[(heads,)](
        best, total, weighted, out, heads=heads, dim=dim, splits=SPLITS, block_dim=block_dim
    )
    return out
