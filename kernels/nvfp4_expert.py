"""NVFP4 SwiGLU experts for one token, in Triton: all k experts of a layer from a table of addresses.

The table holds where each expert's record starts: a VRAM slot, a slot just copied, or pinned RAM that the GPU reads
in place over PCIe. Every byte is read once, in contiguous runs. Definition: `reference.nvfp4_swiglu_expert`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = tl.constexpr(16)
BLOCK_ROWS = 8
BLOCK_GROUPS = 64  # of 8 shapes tried on an H200 the best, from pinned RAM and from VRAM


@triton.jit
def _e2m1_pair(byte, has_cvt: tl.constexpr):
    """Two E2M1 values of a byte (in an int32), low nibble first: fp32, exact."""
    if has_cvt:  # sm_100a, sm_120a: one instruction a byte
        pair = tl.inline_asm_elementwise(
            "{ .reg .b8 b; cvt.u8.u32 b, $1; cvt.rn.f16x2.e2m1x2 $0, b; }",
            "=r,r",
            [byte],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = _e2m1(byte & 15)
        high = _e2m1(byte >> 4)
    return low, high


@triton.jit
def _e2m1(code):
    """One E2M1 value: its three low bits moved into fp16 are the value times 2^-14 (fp16 keeps subnormals)."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _e4m3(byte):
    """One non-negative E4M3 value: its bits moved into fp16 are the value times 2^-8."""
    return (byte.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _row_dots(
    base, codes_at, scales_at, row_start, x, columns: tl.constexpr, num_rows, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, block_groups: tl.constexpr, block_scales: tl.constexpr,
):  # fmt: skip
    """Dot products of some rows of one matrix of a record with x, without the global scale: [block_rows] fp32.

    A group's 16 codes are one 8-byte word, so that a row is read in wide contiguous runs (it may lie across PCIe). The
    scales of all rows are one run, read at once and handed out on the chip: in parts of a row they cost 15 % of the
    time for 11 % of the bytes.
    """
    groups: tl.constexpr = columns // GROUP
    words = (base + codes_at).to(tl.pointer_type(tl.int64))
    rows = row_start + tl.arange(0, block_rows)
    is_row = rows < num_rows
    first = row_start * groups
    run = tl.arange(0, block_scales)
    is_step = (run < block_rows * groups) & (first + run < num_rows * groups)
    steps = tl.multiple_of((base + scales_at).to(tl.pointer_type(tl.uint8)), 16) + first
    run_scales = tl.load(steps + run, mask=is_step, other=0)
    total = tl.zeros([block_rows], dtype=tl.float32)
    for start in range(0, groups, block_groups):
        group = start + tl.arange(0, block_groups)
        is_group = group < groups
        mask = is_row[:, None] & is_group[None, :]
        at = rows[:, None] * groups + group[None, :]
        word = tl.load(words + at, mask=mask, other=0)
        place = tl.where(mask, at - first, 0)
        place = tl.reshape(place, [block_rows * block_groups])
        scales = tl.reshape(tl.gather(run_scales, place, axis=0), [block_rows, block_groups])
        sums = tl.zeros([block_rows, block_groups], dtype=tl.float32)
        for j in tl.static_range(8):
            low, high = _e2m1_pair(((word >> (8 * j)) & 255).to(tl.int32), has_cvt)
            x_low = tl.load(x + group * 16 + 2 * j, mask=is_group, other=0.0).to(tl.float32)
            x_high = tl.load(x + group * 16 + 2 * j + 1, mask=is_group, other=0.0).to(tl.float32)
            sums += low * x_low[None, :] + high * x_high[None, :]
        total += tl.sum(sums * _e4m3(scales), axis=1)
    return total


@triton.jit
def _gate_up_kernel(
    table, x, global_scales, inner, hidden: tl.constexpr, intermediate: tl.constexpr, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, block_groups: tl.constexpr, block_scales: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    base = tl.multiple_of(tl.load(table + expert), 4096)  # records are page-aligned
    row_start = tl.program_id(1) * block_rows
    rows = row_start + tl.arange(0, block_rows)
    codes: tl.constexpr = hidden * intermediate // 2
    scales: tl.constexpr = hidden * intermediate // 16
    if base != 0:
        gate = _row_dots(
            base,
            0,
            3 * codes,
            row_start,
            x,
            hidden,
            intermediate,
            has_cvt,
            block_rows,
            block_groups,
            block_scales,
        )
        up = _row_dots(
            base,
            codes,
            3 * codes + scales,
            row_start,
            x,
            hidden,
            intermediate,
            has_cvt,
            block_rows,
            block_groups,
            block_scales,
        )
        gate *= tl.load(global_scales + expert * 3)
        up *= tl.load(global_scales + expert * 3 + 1)
        out = gate * (1.0 / (1.0 + tl.exp(-gate))) * up
        tl.store(inner + expert * intermediate + rows, out, mask=rows < intermediate)


@triton.jit
def _down_kernel(
    table, inner, global_scales, out, hidden: tl.constexpr, intermediate: tl.constexpr, has_cvt: tl.constexpr,
    block_rows: tl.constexpr, block_groups: tl.constexpr, block_scales: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    base = tl.multiple_of(tl.load(table + expert), 4096)  # records are page-aligned
    row_start = tl.program_id(1) * block_rows
    rows = row_start + tl.arange(0, block_rows)
    codes: tl.constexpr = hidden * intermediate // 2
    scales: tl.constexpr = hidden * intermediate // 16
    if base != 0:
        dots = _row_dots(
            base, 2 * codes, 3 * codes + 2 * scales, row_start, inner + expert * intermediate, intermediate, hidden,
            has_cvt, block_rows, block_groups, block_scales,
        )  # fmt: skip
        dots *= tl.load(global_scales + expert * 3 + 2)
        tl.store(out + expert * hidden + rows, dots, mask=rows < hidden)


@functools.cache
def _has_cvt(device: torch.device) -> bool:
    """Whether the device converts E2M1 in hardware (compute capability 10.0, 10.3, 12.0, 12.1)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (10, 12)


def nvfp4_experts(
    x: Tensor,
    table: Tensor,
    global_scales: Tensor,
    inner: Tensor,
    out: Tensor,
    has_cvt: bool | None = None,
) -> Tensor:
    """Apply k experts to one token, each into its own row of `out`.

    x: [H] or [1, H].  table: [k] int64, addresses of records (readable by the device); 0 leaves a row untouched.
    global_scales: [k, 3] fp32.  inner: [k, I] fp32 scratch.  out: [k, H] fp32.  Nothing is allocated.
    has_cvt: use the hardware conversion; None asks the device.
    """
    experts, intermediate = inner.shape
    hidden = out.shape[1]
    if has_cvt is None:
        has_cvt = _has_cvt(x.device)
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "has_cvt": has_cvt,
        "block_rows": BLOCK_ROWS,
    }
    grid = (experts, triton.cdiv(intermediate, BLOCK_ROWS))
    _gate_up_kernel[grid](table, x, global_scales, inner, **sizes, **_blocks(hidden))
    grid = (experts, triton.cdiv(hidden, BLOCK_ROWS))
    _down_kernel[grid](table, inner, global_scales, out, **sizes, **_blocks(intermediate))
    return out


def _blocks(columns: int) -> dict[str, int]:
    groups = columns // 16
    return {
        "block_groups": min(BLOCK_GROUPS, triton.next_power_of_2(groups)),
        "block_scales": triton.next_power_of_2(BLOCK_ROWS * groups),
    }
