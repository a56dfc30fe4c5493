"""The compressed entry and the index key that one DeepSeek-V4.1 token completes, in one Triton launch.

Definitions: `reference_deepseek.rms_norm`, `rotate`, `fp4_rounded`, as `Compressor` in `runtime.models.deepseek_model`
joins them. Where an entry stands for two tokens, the first leaves its values and gates in fp32 and changes nothing
else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_numbers import bf16_rounded, fp4_rounded, normed, rotated

WARPS = 16


@triton.jit
def _pair_mixed(first, values, z0, z1):
    """Mix the values of two tokens by the softmax of their gates: fp32, rounded to bf16."""
    top = tl.maximum(z0, z1)
    e0, e1 = tl.exp(z0 - top), tl.exp(z1 - top)
    total = e0 + e1
    return bf16_rounded(tl.div_rn(e0, total) * first + tl.div_rn(e1, total) * values)


@triton.jit
def _store_key(
    latent, wk, k_norm, cos, sin, place, out, eps, dim: tl.constexpr, key_dim: tl.constexpr, half: tl.constexpr,
    block_dim: tl.constexpr, block_key: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, block_key), tl.arange(0, block_dim)
    is_row = row < key_dim
    # all of wk at once: one program has it to itself, and waits for memory once
    w = tl.load(
        wk + row[:, None] * dim + column[None, :],
        mask=is_row[:, None] & (column < dim)[None, :],
        other=0.0,
    )
    key = bf16_rounded(tl.sum(w.to(tl.float32) * latent[None, :], axis=1))
    gain = tl.load(k_norm + row, mask=is_row, other=0.0).to(tl.float32)
    key = normed(key, gain, tl.sum(key * key, axis=0), key_dim, eps)
    key = rotated(tl.reshape(key, [1, block_key]), 0, cos, sin, place, key_dim, half, False)
    key = tl.reshape(fp4_rounded(key, False), [block_key])
    tl.store(out + row, key.to(tl.bfloat16), mask=is_row)


@triton.jit
def _extend_kernel(
    values, gates, tail, norm, wk, k_norm, position, cos, sin, entries, keys, eps, dim: tl.constexpr,
    key_dim: tl.constexpr, half: tl.constexpr, ratio: tl.constexpr, block_dim: tl.constexpr, block_key: tl.constexpr,
):  # fmt: skip
    place = tl.load(position).to(tl.int64)
    number = place // ratio
    column = tl.arange(0, block_dim)
    is_column = column < dim
    x = tl.load(values + column, mask=is_column, other=0.0).to(tl.float32)
    if ratio == 2:
        is_kept = is_column & (place % 2 == 0) & (tl.program_id(0) == 0)
        z = tl.load(gates + column, mask=is_column, other=0.0)
        tl.store(tail + column, x, mask=is_kept)
        tl.store(tail + dim + column, z, mask=is_kept)
    if place % ratio == ratio - 1:
        if ratio == 2:
            first = tl.load(tail + column, mask=is_column, other=0.0)
            z0 = tl.load(tail + dim + column, mask=is_column, other=0.0)
            x = _pair_mixed(first, x, z0, z)
        gain = tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
        latent = normed(x, gain, tl.sum(x * x, axis=0), dim, eps)
        if tl.program_id(0) == 0:
            entry = rotated(
                tl.reshape(latent, [1, block_dim]), 0, cos, sin, number * ratio, dim, half, False
            )
            entry = tl.reshape(fp4_rounded(entry, True), [block_dim])
            tl.store(entries + number * dim + column, entry.to(tl.bfloat16), mask=is_column)
        else:
            _store_key(
                latent, wk, k_norm, cos, sin, number * ratio, keys + number * key_dim, eps, dim, key_dim, half,
                block_dim, block_key,
            )  # fmt: skip


def extend_entries(
    values: Tensor, gates: Tensor | None, tail: Tensor | None, norm: Tensor, wk: Tensor, k_norm: Tensor,
    position: Tensor, cos: Tensor, sin: Tensor, entries: Tensor, keys: Tensor, eps: float,
) -> None:  # fmt: skip
    """Append the entry that a token completes, if it completes one, and its index key.

    Entries of one token: values [D] bf16, as projected, gates and tail None.  Entries of two: values and gates [D]
    fp32; tail [2, D] fp32, where the even token leaves its values and gates and the odd one finds them.
    norm: [D], k_norm: [I].  wk: [I, D] bf16.  position: [1] int, on the device.  cos, sin: [positions, R / 2] fp32.
    Changed in the entry's row alone: entries [capacity, D], keys [capacity, I] bf16.  D and I: multiples of 32.
    """
    dim, key_dim = entries.shape[1], keys.shape[1]
    block_dim = triton.next_power_of_2(dim)
    _extend_kernel[(2,)](
        values, gates, tail, norm, wk, k_norm, position, cos, sin, entries, keys, eps, dim=dim, key_dim=key_dim,
        half=cos.shape[1], ratio=1 if gates is None else 2, block_dim=block_dim,
        block_key=triton.next_power_of_2(key_dim), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
