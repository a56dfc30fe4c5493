"""Products of many tokens with DeepSeek's FP8 and FP4 weights, in Triton: as for one token, blocks in their order.

A block of 32 columns is one product of the tensor cores, whose sums are added outside of them: what they keep between
two calls is less than fp32. Definition: `reference_deepseek.block_product` of the dequantised weight, rounded to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_linear import act_round, e4m3, e8m0, has_cvt, narrowed, swiglu_rounded
from kernels.nvfp4_expert import _e2m1
from kernels.reference_deepseek import Packed

BLOCK = tl.constexpr(32)
TILE_ROWS = 64
WARPS = 4


@triton.jit
def _dot(a, b, is_wide: tl.constexpr):
    """a b of bf16 numbers: fp32.  is_wide: in fp32, for the interpreter, which has no bf16."""
    if is_wide:
        return tl.dot(a.to(tl.float32), b, input_precision="ieee")
    return tl.dot(a, b.to(tl.bfloat16))


@triton.jit
def _fp8_kernel(
    x, weight, scale, out, tokens, num_rows, group_rows, columns: tl.constexpr, x_columns: tl.constexpr,
    has_cvt: tl.constexpr, is_wide: tl.constexpr, tile_tokens: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * tile_rows
    rows = first + tl.arange(0, tile_rows)
    token = tl.program_id(1) * tile_tokens + tl.arange(0, tile_tokens)
    is_row, is_token = rows < num_rows, token < tokens
    inside = tl.arange(0, BLOCK)
    blocks: tl.constexpr = columns // BLOCK
    x += first // group_rows * columns
    total = tl.zeros([tile_tokens, tile_rows], dtype=tl.float32)
    for block in range(blocks):
        column = block * BLOCK + inside
        at = token[:, None].to(tl.int64) * x_columns + column[None, :]
        part = tl.load(x + at, mask=is_token[:, None] & (column >= 0)[None, :], other=0.0)
        at = rows[None, :].to(tl.int64) * columns + column[:, None]
        byte = tl.load(weight + at, mask=is_row[None, :] & (column >= 0)[:, None], other=0)
        sums = _dot(part, e4m3(byte, has_cvt), is_wide)
        step = tl.load(scale + (rows // BLOCK) * blocks + block, mask=is_row, other=0)
        total += sums * e8m0(step)[None, :]
    at = token[:, None].to(tl.int64) * num_rows + rows[None, :]
    tl.store(out + at, narrowed(total, tl.bfloat16), mask=is_token[:, None] & is_row[None, :])


@triton.jit
def _fp4_kernel(
    x, codes, scale, out, tokens, num_rows, columns: tl.constexpr, is_wide: tl.constexpr,
    tile_tokens: tl.constexpr, tile_rows: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    token = tl.program_id(1) * tile_tokens + tl.arange(0, tile_tokens)
    is_row, is_token = rows < num_rows, token < tokens
    inside = tl.arange(0, BLOCK)
    blocks: tl.constexpr = columns // BLOCK
    total = tl.zeros([tile_tokens, tile_rows], dtype=tl.float32)
    for block in range(blocks):
        column = block * BLOCK + inside
        at = token[:, None].to(tl.int64) * columns + column[None, :]
        part = tl.load(x + at, mask=is_token[:, None] & (column >= 0)[None, :], other=0.0)
        # a byte holds two columns, the first in its low half: each is read twice, from one line
        at = rows[None, :].to(tl.int64) * (columns // 2) + column[:, None] // 2
        byte = tl.load(codes + at, mask=is_row[None, :] & (column >= 0)[:, None], other=0).to(
            tl.int32
        )
        code = (byte >> ((column & 1) * 4)[:, None]) & 15
        sums = _dot(part, _e2m1(code), is_wide)
        step = tl.load(scale + rows * blocks + block, mask=is_row, other=0)
        total += sums * e8m0(step)[None, :]
    at = token[:, None].to(tl.int64) * num_rows + rows[None, :]
    tl.store(out + at, narrowed(total, tl.bfloat16), mask=is_token[:, None] & is_row[None, :])


@triton.jit
def _swiglu_kernel(gate, up, weights, out, limit, has_weights: tl.constexpr, blocks: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = token * (blocks * BLOCK) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, u = tl.load(gate + at).to(tl.float32), tl.load(up + at).to(tl.float32)
    weight = tl.load(weights + token) if has_weights else 1.0
    tl.store(out + at, swiglu_rounded(g, u, weight, limit).to(tl.bfloat16))


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight in FP8 blocks: values [N, K] float8_e4m3fn, scale [N / 32, K / 32] E8M0."""

    values: Tensor
    scale: Tensor

    def product(self, x: Tensor, groups: int = 1) -> Tensor:
        """x: [T, groups * K], bf16 numbers in any dtype.  Returns `fp8_product`."""
        return fp8_product(x.to(torch.bfloat16), self.values, self.scale, groups)


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """A weight in FP4: codes [N, K / 2] uint8, scale [N, K / 32] E8M0 bytes."""

    codes: Tensor
    scale: Tensor

    def product(self, x: Tensor) -> Tensor:
        """x: [T, K], bf16 numbers in any dtype.  Returns `fp4_product`."""
        return fp4_product(x.to(torch.bfloat16), self.codes, self.scale)


def rounded(x: Tensor) -> Tensor:
    """Return what `act_rounded` makes of x [T, K] bf16, as bf16."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    act_round(x.contiguous(), out)
    return out


def swiglu_expert(
    x: Tensor, gate: Packed, up: Packed, down: Packed, limit: float, weights: Tensor | None = None
) -> Tensor:
    """Return one expert's output for some tokens: bf16 [T, H].

    x: [T, H] bf16, already quantised (`rounded`).  weights: [T] fp32, of the route.
    """
    g, u = gate.product(x), up.product(x)
    inner = torch.empty_like(g)
    tokens, width = g.shape
    _swiglu_kernel[(tokens, width // 32)](
        g, u, g if weights is None else weights, inner, limit, has_weights=weights is not None, blocks=width // 32,
        num_warps=1,
    )  # fmt: skip
    return down.product(inner)


def fp8_product(x: Tensor, weight: Tensor, scale: Tensor, groups: int = 1) -> Tensor:
    """Return W x for each token: [T, N] bf16.

    x: [T, groups * K] bf16, rounded by `act_round` where it is to be.  weight: [N, K] float8_e4m3fn.  scale: [N / 32,
    K / 32] E8M0.  groups: the first N / groups rows see the first K of x, and so on; N / groups is a multiple of 32.
    """
    tokens, (num_rows, columns) = len(x), weight.shape
    out = torch.empty(tokens, num_rows, dtype=torch.bfloat16, device=x.device)
    tile_rows = TILE_ROWS if num_rows // groups % TILE_ROWS == 0 else 32
    tile_tokens = _tile_tokens(tokens)
    _fp8_kernel[(triton.cdiv(num_rows, tile_rows), triton.cdiv(tokens, tile_tokens))](
        x.contiguous(), weight.view(torch.uint8), scale.view(torch.uint8), out, tokens, num_rows, num_rows // groups,
        columns=columns, x_columns=x.shape[1], has_cvt=has_cvt(x.device), is_wide=not x.is_cuda,
        tile_tokens=tile_tokens, tile_rows=tile_rows, num_warps=WARPS,
    )  # fmt: skip
    return out


def fp4_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return W x for each token: [T, N] bf16.

    x: [T, K] bf16, rounded by `act_round`.  codes: [N, K / 2] uint8, the low half of a byte first.  scale: [N, K / 32]
    E8M0 as bytes.  Both may start at any byte.
    """
    tokens, num_rows = len(x), len(codes)
    out = torch.empty(tokens, num_rows, dtype=torch.bfloat16, device=x.device)
    tile_tokens = _tile_tokens(tokens)
    _fp4_kernel[(triton.cdiv(num_rows, TILE_ROWS), triton.cdiv(tokens, tile_tokens))](
        x.contiguous(), codes, scale, out, tokens, num_rows, columns=x.shape[1], is_wide=not x.is_cuda,
        tile_tokens=tile_tokens, tile_rows=TILE_ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out


def _tile_tokens(tokens: int) -> int:
    return 16 if tokens <= 16 else 64
