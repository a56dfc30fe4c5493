"""Who computes a DeepSeek model: this project or the published code, and with whose kernels."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from conf.schema import Arithmetic, Head, Kernels, Replay, RunConfig
from runtime.errors import UserError

LEAST_TILELANG = (0, 1, 9)
# what TileLang's attention of 64 heads asks of a block's shared memory; consumer cards give about 99 KB
ATTENTION_SHARED_NBYTES = 141_312
SHORT_HEADS = 16  # at once where it is short: 86 KB
ATTENTION_ROWS = 256  # of a prompt at once
MIXING_ROWS = 128  # hyper-connections make 320 KiB of temporaries a row


def tilelang_version() -> str | None:
    """Return the installed TileLang's version, None without one."""
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        return None


def tilelang_fault(version: str | None, capability: tuple[int, int] | None) -> str | None:
    """Say why TileLang cannot be used; None when it can.

    version: None where it is not installed.  capability: of the GPU, None without one.
    """
    if capability is None:
        return "TileLang's kernels need a CUDA device"
    if version is None:
        return "TileLang is not installed"
    numbers = tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])
    if numbers >= LEAST_TILELANG:
        return None
    reasons = {
        12: "on sm_120 the FP4 product of 0.1.8 is noise (cosine 0.0006) and its FP8 product NaN, without an error",
        10: "on sm_100 NaN rows and other bits at each call were seen with 0.1.8",
    }
    reason = reasons.get(capability[0], "only 0.1.9 has been seen to give right numbers")
    return f"TileLang {version} is refused, 0.1.9 or later is needed: {reason}"


def capability() -> tuple[int, int] | None:
    """Return the GPU's compute capability, None without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def resolve_arithmetic(config: RunConfig, has_code: bool) -> Arithmetic:
    """Return native or reference.

    has_code: the published code is at hand, or a stage can make it so.  `auto` is the reference where a GPU and a
    TileLang that is not refused are present, and nothing is asked for that only the native arithmetic has.
    """
    wanted = config.deepseek.arithmetic
    if wanted is not Arithmetic.auto:
        return wanted
    is_native = (
        not has_code
        or config.deepseek.kernels is Kernels.ours
        or config.drafts.enabled
        or config.deepseek.replay is not Replay.exact
        or config.deepseek.head is not Head.gpu
        or config.hw.device == "cpu"
        or config.hw.cpu_experts != "off"
        or tilelang_fault(tilelang_version(), capability()) is not None
    )
    return Arithmetic.native if is_native else Arithmetic.reference


def resolve_kernels(config: RunConfig, device: torch.device) -> Kernels:
    """Return tilelang or ours. Raises UserError where TileLang is asked for and cannot be used."""
    wanted = config.deepseek.kernels
    if wanted is Kernels.ours:
        return wanted
    fault = tilelang_fault(tilelang_version(), capability() if device.type == "cuda" else None)
    if fault is None:
        return Kernels.tilelang
    if wanted is Kernels.tilelang:
        raise UserError(
            f"deepseek.kernels=tilelang cannot be used: {fault}",
            "pip install '.[tilelang]' (and its z3 library on LD_LIBRARY_PATH), or set deepseek.kernels=ours",
        )
    return Kernels.ours


def kernel_module(kernels: Kernels) -> ModuleType | None:
    """Return what stands in for the published kernel.py: our kernels, or None for the file itself."""
    if kernels is Kernels.tilelang:
        return None
    from kernels import deepseek_published

    return deepseek_published


def attention_heads(kernels: Kernels, device: torch.device) -> int | None:
    """Return how many heads may attend at once, None for all."""
    if kernels is not Kernels.tilelang or device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    room: int = properties.shared_memory_per_block_optin
    return SHORT_HEADS if room < ATTENTION_SHARED_NBYTES else None


def attention_in_parts(
    sparse_attn: Callable[..., Tensor], heads: int | None, rows: int = ATTENTION_ROWS
) -> Callable[..., Tensor]:
    """Return `sparse_attn` for some heads and rows at a time: each stands for itself, so no number changes.

    heads: at once, None for all.
    """

    def in_parts(
        q: Tensor, kv: Tensor, attn_sink: Tensor, topk_idxs: Tensor, softmax_scale: float
    ) -> Tensor:
        step = heads or q.shape[2]
        if q.shape[1] <= rows and q.shape[2] <= step:
            return sparse_attn(q, kv, attn_sink, topk_idxs, softmax_scale)
        out = torch.empty_like(q)
        for start in range(0, q.shape[1], rows):
            row = slice(start, start + rows)
            listed = _compact(topk_idxs[:, row])
            for first in range(0, q.shape[2], step):
                head = slice(first, first + step)
                part, sink = _compact(q[:, row, head]), _compact(attn_sink[head])
                out[:, row, head] = sparse_attn(part, kv, sink, listed, softmax_scale)
        return out

    return in_parts


def _compact(x: Tensor) -> Tensor:
    """Return a copy with the strides of its shape: `contiguous` keeps those of a dimension of one."""
    return x.clone(memory_format=torch.contiguous_format)


def mixing_in_parts(
    hc_post: Callable[..., Tensor], rows: int = MIXING_ROWS
) -> Callable[..., Tensor]:
    """Return a block's `hc_post` for some positions at a time: each stands for itself."""

    def in_parts(block: Any, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        if x.shape[1] <= rows:
            return hc_post(block, x, residual, post, comb)
        out = torch.empty_like(residual)
        for start in range(0, x.shape[1], rows):
            row = slice(start, start + rows)
            out[:, row] = hc_post(block, x[:, row], residual[:, row], post[:, row], comb[:, row])
        return out

    return in_parts
