"""Roundings, quantisers and rotations of DeepSeek-V4.1 on tensors in registers: what its token kernels share.

Definitions: `reference_deepseek`. All is fp32 that holds narrower numbers and is rounded explicitly, so that a GPU and
the interpreter (whose own conversion to bf16 cuts off) do the same. Launch with `enable_fp_fusion=False`: definitions
round products before they add them. Tensors are [rows, columns], columns a power of two, zero beyond the true width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bf16_rounded(x):
    """Return the bf16 numbers nearest to x, ties to even, as fp32; a NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def reciprocal_root(x):
    """Return 1 / sqrt(x), both steps rounded to nearest."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def normed(x, weight, squares, dim: tl.constexpr, eps):
    """Return x normed and weighted, rounded to bf16.  x, weight: fp32.  squares: the sum of x^2 over `dim` columns."""
    return bf16_rounded(weight * (x * reciprocal_root(tl.div_rn(squares, dim * 1.0) + eps)))


@triton.jit
def power_of_two_above(x):
    """Return the least power of two that is at least x, and its reciprocal: x positive and normal."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    power = (exponent << 23).to(tl.float32, bitcast=True)
    return power, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def nearest_float(x, mantissa: tl.constexpr, least: tl.constexpr):
    """Round x to `mantissa` explicit bits, ties to even.  least: the smallest normal number of the format."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(bits.to(tl.float32, bitcast=True), least)
    # a number so large that the last bit of the sum is the last bit wanted
    large = power * (1.5 * 2 ** (23 - mantissa))
    rounded = (magnitude + large) - large
    sign = (x.to(tl.int32, bitcast=True) >> 31) << 31  # of a zero, too
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_rounded(x):
    """Return what E4M3 holds of x, |x| at most 448."""
    return nearest_float(x, 3, 0.015625)


@triton.jit
def e2m1_rounded(x):
    """Return what E2M1 holds of x, |x| at most 6."""
    return nearest_float(x, 1, 1.0)


@triton.jit
def act_rounded(x):
    """Quantise to E4M3 in blocks of 32 with power-of-two scales: the numbers that come out, each a bf16 number."""
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [rows * columns // 32, 32])
    amax = tl.maximum(tl.max(tl.abs(blocks), axis=1), 1e-4)
    scale, inverse = power_of_two_above(amax * (1.0 / 448.0))
    # no clamp: bf16 numbers are too far apart for one to pass 448 times its scale
    scaled = e4m3_rounded(blocks * inverse[:, None])
    return tl.reshape(scaled * scale[:, None], [rows, columns])


@triton.jit
def fp4_rounded(x, is_kv: tl.constexpr):
    """Quantise to E2M1: the numbers that come out, each a bf16 number.

    Blocks of 32 with power-of-two scales; is_kv: blocks of 16 with E4M3 scales.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    block: tl.constexpr = 16 if is_kv else 32
    blocks = tl.reshape(x, [rows * columns // block, block])
    amax = tl.max(tl.abs(blocks), axis=1)
    if is_kv:
        amax = tl.maximum(amax, 0.01171875)  # 6 * 2^-9
        scale = e4m3_rounded(tl.minimum(tl.div_rn(amax, 6.0), 448.0))
        scaled = tl.div_rn(blocks, scale[:, None])
    else:
        amax = tl.maximum(amax, 7.052966104933725e-38)  # 6 * 2^-126
        scale, inverse = power_of_two_above(amax * (1.0 / 6.0))
        scaled = blocks * inverse[:, None]
    scaled = tl.minimum(tl.maximum(scaled, -6.0), 6.0)
    return tl.reshape(e2m1_rounded(scaled) * scale[:, None], [rows, columns])


@triton.jit
def rotated(x, first, cos, sin, place, dim: tl.constexpr, half: tl.constexpr, inverse: tl.constexpr):  # fmt: skip
    """Rotate the last 2 * half of `dim` columns in adjacent pairs, rounded to bf16; the others pass unchanged.

    x: [rows, columns] fp32, from column `first` of the row on (even).  cos, sin: tables [positions, half] fp32.
    place: the position.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.reshape(x, [rows, columns // 2, 2]))
    pair = first // 2 + tl.arange(0, columns // 2) - (dim // 2 - half)
    is_turned = (pair >= 0) & (pair < half)
    at = place * half + pair
    c = tl.load(cos + at, mask=is_turned, other=1.0)[None, :]
    s = tl.load(sin + at, mask=is_turned, other=0.0)[None, :]
    if inverse:
        left, right = a * c + b * s, b * c - a * s
    else:
        left, right = a * c - b * s, a * s + b * c
    left = tl.where(is_turned[None, :], bf16_rounded(left), a)
    right = tl.where(is_turned[None, :], bf16_rounded(right), b)
    return tl.reshape(tl.join(left, right), [rows, columns])
