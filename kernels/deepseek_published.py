"""Our kernels under the names and signatures that DeepSeek's published model code imports.

On a CUDA tensor the products are the Triton kernels of prompts; everything else, and everything on a CPU, is the plain
torch of `reference_deepseek`, the definition. So the published code runs on any device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels import reference_deepseek as ops
from kernels.formats import MX_GROUP, e8m0_values, fp8_blocks_dequantize, mxfp4_dequantize

P = ParamSpec("P")
R = TypeVar("R")


def _in_fp32(function: Callable[P, R]) -> Callable[P, R]:
    """Let the definitions make fp32 tensors although the published code has bf16 as torch's default."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return run


def _require(name: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise ValueError(f"{name} must be {wanted}, got {found}")


@_in_fp32
def act_quant(
    x: Tensor,
    block_size: int = 128,
    scale_fmt: str | None = None,
    scale_dtype: torch.dtype = torch.float32,
    inplace: bool = False,
) -> tuple[Tensor, Tensor] | Tensor:
    """Quantise activations in blocks of 32: x [..., K] bf16.

    Returns (values [..., K] float8_e4m3fn, scales [..., K / 32] of scale_dtype); with `inplace` x, overwritten with
    the rounded numbers.
    """
    _require("block_size", block_size, ops.BLOCK)
    _require("scale_fmt", scale_fmt, "ue8m0")
    if inplace:
        return x.copy_(ops.act_rounded(x))
    values, scale = ops.act_quant(x.contiguous())
    return values, scale.to(scale_dtype)


@_in_fp32
def fp4_act_quant(
    x: Tensor,
    block_size: int = 32,
    inplace: bool = False,
    scale_dtype: torch.dtype = torch.float8_e8m0fnu,
) -> Tensor:
    """Round x [..., K] bf16 to FP4 in place: blocks of 16 with E4M3 scales, or of 32 with powers of two."""
    is_kv = scale_dtype == torch.float8_e4m3fn
    _require("inplace", inplace, True)
    _require("block_size", block_size, ops.KV_BLOCK if is_kv else ops.BLOCK)
    return x.copy_(ops.fp4_rounded(x, is_kv))


def _activations(values: Tensor, scales: Tensor) -> Tensor:
    """Return quantised activations as numbers: values [..., K] E4M3, scales [..., K / 32] E8M0.  [M, K] fp32."""
    blocks = values.flatten(0, -2).float().unflatten(-1, (-1, MX_GROUP))
    numbers: Tensor = blocks * e8m0_values(scales.flatten(0, -2)).unsqueeze(-1)
    return numbers.flatten(1)


@_in_fp32
def fp8_gemm(
    a: Tensor,
    a_s: Tensor,
    b: Tensor,
    b_s: Tensor,
    scale_dtype: torch.dtype = torch.float32,
    block_size: int = 128,
) -> Tensor:
    """Return a b^T: a [..., K] E4M3, a_s [..., K / 32], b [N, K] E4M3, b_s [N / 32, K / 32], scales E8M0.

    bf16 [..., N], whatever torch's default dtype.
    """
    del scale_dtype
    _require("block_size", block_size, MX_GROUP)
    x = _activations(a, a_s)
    if a.is_cuda:
        from kernels.deepseek_prompt import Fp8Weight

        out = Fp8Weight(b, b_s).product(x)
    else:
        out = ops.product(x, fp8_blocks_dequantize(b, b_s))
    return out.view(*a.shape[:-1], len(b))


@_in_fp32
def fp4_gemm(
    a: Tensor,
    a_s: Tensor,
    b: Tensor,
    b_s: Tensor,
    scale_dtype: torch.dtype = torch.float32,
    act_block_size: int = 128,
) -> Tensor:
    """Return a b^T: a [..., K] E4M3, a_s [..., K / 32] E8M0, b [N, K / 2] E2M1 pairs, b_s [N, K / 32] E8M0.

    bf16 [..., N], whatever torch's default dtype.
    """
    del scale_dtype
    _require("act_block_size", act_block_size, MX_GROUP)
    x, codes, scales = _activations(a, a_s), b.view(torch.uint8), b_s.view(torch.uint8)
    if a.is_cuda:
        from kernels.deepseek_prompt import Fp4Weight

        out = Fp4Weight(codes, scales).product(x)
    else:
        out = ops.product(x, mxfp4_dequantize(codes, scales))
    return out.view(*a.shape[:-1], len(b))


@_in_fp32
def sparse_attn(
    q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, softmax_scale: float
) -> Tensor:
    """Attend to lists of entries: q [b, m, h, d], kv [b, n, d] bf16, attn_sink [h] fp32, topk_idxs [b, m, t] int32.

    -1 is no entry.  Returns [b, m, h, d] bf16.
    """
    rows = zip(q, kv, topk_idxs, strict=True)
    return torch.stack(
        [ops.sparse_attention(a, b, attn_sink, c, softmax_scale) for a, b, c in rows]
    )


@_in_fp32
def hc_split_sinkhorn(
    mixes: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """mixes: [b, s, 2 n + n^2] fp32.  Returns pre [b, s, n], post [b, s, n], comb [b, s, n, n], fp32."""
    shape = mixes.shape[:-1]
    parts = ops.split_mixes(mixes.flatten(0, -2), hc_scale, hc_base, hc_mult, sinkhorn_iters, eps)
    pre, post, comb = (part.unflatten(0, shape) for part in parts)
    return pre, post, comb


NAMES = ("act_quant", "fp4_act_quant", "fp8_gemm", "fp4_gemm", "sparse_attn", "hc_split_sinkhorn")
