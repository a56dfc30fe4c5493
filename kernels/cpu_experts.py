"""FP4 SwiGLU experts of one token on CPU cores, compiled by Numba: what a GPU does from a table of addresses.

Numba is an extra (`pip install '.[cpu]'`): import this module only where it may be missing. A row's codes are decoded
in words of eight, which compilers turn into vectors of any width, into a buffer that stays in the first cache; sums are
fp32. Rows are shared out to Numba's threads, the calling one among them. Definitions: `reference.nvfp4_swiglu_expert`,
`reference_deepseek.swiglu_expert`.

Letters: H hidden, I expert intermediate. Even columns are in a byte's low nibble, odd ones in the high: x is split so.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels.compiler import (
    carray,
    cgutils,
    float32,
    int64,
    intrinsic,
    njit,
    numba,
    prange,
    types,
    uint32,
)
from kernels.formats import NVFP4_GROUP, e8m0_values, every_byte

GATE_ROWS = 32  # a task's rows of gate and up; for MXFP4 also the columns that share a scale
DOWN_ROWS = 64
FREE_ORDER = {"reassoc", "contract", "nsz"}  # of a sum whose order is free

# codes are decoded to twice their value, a whole number: half a scale makes it right, exactly
HALF_E4M3 = (every_byte().view(torch.float8_e4m3fn).float() / 2).numpy()
HALF_E8M0 = (e8m0_values(every_byte()) / 2).numpy()


def set_threads(count: int) -> int:
    """Let `count` threads compute, the calling one among them, or as many as Numba has; return how many.

    torch gets one thread from now on. Numba and torch may share OpenMP's threads: Numba sets their number for both, and
    each launch of another size would end some and start others, on whatever core the calling thread is held to.
    """
    count = max(1, min(count, int(numba.config.NUMBA_NUM_THREADS)))
    numba.set_num_threads(count)
    torch.set_num_threads(1)
    return count


@intrinsic
def _pointer(_context, _address):
    """Make a pointer of an address: void*(int64)."""

    def generate(_context, builder, _signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit(inline="always")
def _doubled(nibbles):
    """Decode four E2M1 codes, one in each byte: four int8, each twice its code's value.

    0 1 2 3 4 5 6 7 -> 0 1 2 3 4 6 8 12: from 4 on the code less 4 is added, and 2 for 7. A minus sign turns a byte over
    and adds one, but for zero, so that nothing is carried into the next byte.
    """
    ones = uint32(0x01010101)
    first, second, third = (
        nibbles & ones,
        (nibbles >> uint32(1)) & ones,
        (nibbles >> uint32(2)) & ones,
    )
    code = nibbles & uint32(0x07070707)
    value = code + (code & (third * uint32(3))) + ((first & second & third) << uint32(1))
    minus = (nibbles >> uint32(3)) & (first | second | third)
    return (value ^ (minus * uint32(255))) + minus


@njit
def _decode(words, low, high):
    """Decode a row: words [K/8] uint32; low, high [K/8] uint32, filled with four int8 each."""
    mask = uint32(0x0F0F0F0F)
    for i in range(words.shape[0]):
        low[i] = _doubled(words[i] & mask)
        high[i] = _doubled((words[i] >> uint32(4)) & mask)


# ---- NVFP4 -----------------------------------------------------------------------------------------------------------


@njit
def _spread(scales, steps):
    """Fill steps [K/2] with the scale of each pair of columns."""
    half = NVFP4_GROUP // 2
    for group in range(scales.shape[0]):
        step = HALF_E4M3[scales[group]]
        for j in range(half):
            steps[half * group + j] = step


@njit(fastmath=FREE_ORDER)
def _dot(low, high, steps, even, odd):
    total = float32(0)
    for i in range(low.shape[0]):
        total += (low[i] * even[i] + high[i] * odd[i]) * steps[i]
    return total


@njit
def _nvfp4_rows(codes, scales, first, even, odd, out):
    """Fill out with products of rows from `first` on with x, without the global scale.  codes, scales: addresses."""
    half = even.shape[0]
    words, groups = half // 4, half // (NVFP4_GROUP // 2)
    low, high = np.empty(words, np.uint32), np.empty(words, np.uint32)
    steps = np.empty(half, np.float32)
    low_values, high_values = low.view(np.int8), high.view(np.int8)
    for i in range(out.shape[0]):
        row = first + i
        _decode(carray(_pointer(codes + row * half), (words,), np.uint32), low, high)
        _spread(carray(_pointer(scales + row * groups), (groups,), np.uint8), steps)
        out[i] = _dot(low_values, high_values, steps, even, odd)


@njit(nogil=True, parallel=True)
def nvfp4_experts(x, table, global_scales, inner, out):
    """Apply k NVFP4 experts to one token, each into its own row of `out`.

    x: [H] fp32.  table: [k] int64, addresses of records.  global_scales: [k, 3] fp32.  inner: [k, I] fp32 scratch.
    out: [k, H] fp32.  H and I are multiples of 16.
    """
    hidden, intermediate = x.shape[0], inner.shape[1]
    codes, scales = int64(hidden * intermediate // 2), int64(hidden * intermediate // NVFP4_GROUP)
    even, odd = x[0::2].copy(), x[1::2].copy()
    tasks = (intermediate + GATE_ROWS - 1) // GATE_ROWS
    for task in prange(len(table) * tasks):
        expert, first = task // tasks, task % tasks * GATE_ROWS
        rows = min(GATE_ROWS, intermediate - first)
        gate, up = np.empty(rows, np.float32), np.empty(rows, np.float32)
        base = table[expert]
        _nvfp4_rows(base, base + 3 * codes, first, even, odd, gate)
        _nvfp4_rows(base + codes, base + 3 * codes + scales, first, even, odd, up)
        for i in range(rows):
            g = gate[i] * global_scales[expert, 0]
            u = up[i] * global_scales[expert, 1]
            inner[expert, first + i] = g / (float32(1) + np.exp(-g)) * u
    evens, odds = inner[:, 0::2].copy(), inner[:, 1::2].copy()
    tasks = (hidden + DOWN_ROWS - 1) // DOWN_ROWS
    for task in prange(len(table) * tasks):
        expert, first = task // tasks, task % tasks * DOWN_ROWS
        part = out[expert, first : min(first + DOWN_ROWS, hidden)]
        base = table[expert]
        _nvfp4_rows(
            base + 2 * codes,
            base + 3 * codes + 2 * scales,
            first,
            evens[expert],
            odds[expert],
            part,
        )
        for i in range(part.shape[0]):
            part[i] *= global_scales[expert, 2]


# ---- MXFP4 with FP8 activations --------------------------------------------------------------------------------------


@njit(fastmath=FREE_ORDER)
def _block_sums(low, high, even, odd, products, sums):
    """Sum the products of each block of 32 columns: small whole numbers times one power of two, in any order.

    products: [K/2] scratch: in one loop with the sums compilers make vectors of neither. Four sums at once are half as
    fast again as one.
    """
    for i in range(low.shape[0]):
        products[i] = low[i] * even[i] + high[i] * odd[i]
    by_block = products.reshape(sums.shape[0], 16)
    for block in range(sums.shape[0]):
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        for i in range(0, 16, 4):
            a += by_block[block, i]
            b += by_block[block, i + 1]
            c += by_block[block, i + 2]
            d += by_block[block, i + 3]
        sums[block] = (a + b) + (c + d)


@njit
def _mxfp4_rows(codes, scales, first, even, odd, out):
    """Fill out with products of rows from `first` on with x, summed by blocks in their order."""
    half = even.shape[0]
    words, blocks = half // 4, half // 16
    low, high = np.empty(words, np.uint32), np.empty(words, np.uint32)
    products, sums = np.empty(half, np.float32), np.empty(blocks, np.float32)
    low_values, high_values = low.view(np.int8), high.view(np.int8)
    for i in range(out.shape[0]):
        row = first + i
        _decode(carray(_pointer(codes + row * half), (words,), np.uint32), low, high)
        steps = carray(_pointer(scales + row * blocks), (blocks,), np.uint8)
        _block_sums(low_values, high_values, even, odd, products, sums)
        total = float32(0)
        for block in range(blocks):
            total += sums[block] * HALF_E8M0[steps[block]]
        out[i] = total


@njit
def _round_to_bf16(values):
    """Round fp32 numbers to the nearest bf16 number, ties to even, in place."""
    bits = values.view(np.uint32)
    for i in range(values.shape[0]):
        if not np.isnan(values[i]):
            last = (bits[i] >> uint32(16)) & uint32(1)
            bits[i] = (bits[i] + uint32(0x7FFF) + last) & uint32(0xFFFF0000)


@njit
def _round_activations(values):
    """Round one block of 32 bf16 numbers to E4M3 times a power of two, in place (`reference_deepseek.act_rounded`)."""
    amax = float32(1e-4)
    for i in range(values.shape[0]):
        amax = max(amax, abs(values[i]))
    power = np.empty(2, np.float32)  # the scale, and its reciprocal
    bits = power.view(np.uint32)
    power[0] = amax * float32(1.0 / 448.0)
    exponent = bits[0] >> uint32(23)
    if bits[0] & uint32(0x7FFFFF):
        exponent += uint32(1)
    bits[0], bits[1] = exponent << uint32(23), (uint32(254) - exponent) << uint32(23)
    unit = np.empty(1, np.float32)
    unit_bits = unit.view(np.uint32)
    for i in range(values.shape[0]):
        scaled = values[i] * power[1]
        unit[0] = scaled
        unit_bits[0] &= uint32(0x7F800000)
        # a number so large that the last bit of the sum is the last bit of E4M3
        large = max(unit[0], float32(0.015625)) * float32(1.5 * 2**20)
        rounded = (abs(scaled) + large) - large
        values[i] = np.copysign(rounded, scaled) * power[0]


@njit(nogil=True, parallel=True)
def mxfp4_experts(x, table, weights, inner, out, limit):
    """Apply k MXFP4 experts to one token, each into its own row of `out`, rounded where the release rounds.

    x: [H] fp32, rounded as activations are.  table: [k, 2] int64, addresses of an expert's codes (w1, w2, w3) and
    scales.  weights: [k] fp32, of the route.  inner: [k, I] fp32 scratch.  out: [k, H] fp32, filled with bf16 numbers.
    limit: of gate and up.  H and I are multiples of 32.
    """
    bound = float32(limit)
    hidden, intermediate = x.shape[0], inner.shape[1]
    matrix, plane = int64(hidden * intermediate // 2), int64(hidden * intermediate // 32)
    even, odd = x[0::2].copy(), x[1::2].copy()
    tasks = intermediate // GATE_ROWS
    for task in prange(len(table) * tasks):
        expert, first = task // tasks, task % tasks * GATE_ROWS
        gate, up = np.empty(GATE_ROWS, np.float32), np.empty(GATE_ROWS, np.float32)
        codes, scales = table[expert, 0], table[expert, 1]
        _mxfp4_rows(codes, scales, first, even, odd, gate)
        # the file's order is w1, w2, w3: gate, down, up
        _mxfp4_rows(codes + 2 * matrix, scales + 2 * plane, first, even, odd, up)
        _round_to_bf16(gate)
        _round_to_bf16(up)
        part = inner[expert, first : first + GATE_ROWS]
        for i in range(GATE_ROWS):
            g, u = min(gate[i], bound), max(-bound, min(up[i], bound))
            part[i] = g / (float32(1) + np.exp(-g)) * u * weights[expert]
        _round_to_bf16(part)
        _round_activations(part)
    evens, odds = inner[:, 0::2].copy(), inner[:, 1::2].copy()
    tasks = (hidden + DOWN_ROWS - 1) // DOWN_ROWS
    for task in prange(len(table) * tasks):
        expert, first = task // tasks, task % tasks * DOWN_ROWS
        part = out[expert, first : min(first + DOWN_ROWS, hidden)]
        codes, scales = table[expert, 0], table[expert, 1]
        _mxfp4_rows(codes + matrix, scales + plane, first, evens[expert], odds[expert], part)
        _round_to_bf16(part)
