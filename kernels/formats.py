"""Number formats <-> bytes, in plain torch: NVFP4 blocks, FP8 and int8 rows. Knows no file and no model.

A format's decode is its definition; its encode is for tests, resident rows, dense layers and synthetic weights.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

NVFP4_GROUP = 16  # columns that share one E4M3 scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
E2M1_MAX = 6.0


@functools.cache
def _byte_table(device: torch.device) -> Tensor:
    """[256] int64: a byte's two E2M1 values as a pair of fp32, low nibble first (one look-up, four times faster)."""
    codes = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    byte = torch.arange(256)
    return (
        torch.stack([codes[byte & 15], codes[byte >> 4]], dim=1)
        .view(torch.int64)
        .flatten()
        .to(device)
    )


def every_byte() -> Tensor:
    """Return the 256 bytes, for tables of what each stands for."""
    return torch.arange(256, dtype=torch.uint8)


@functools.cache
def _e4m3_table(device: torch.device) -> Tensor:
    """[256] fp32: the value of each E4M3 byte."""
    return every_byte().view(torch.float8_e4m3fn).float().to(device)


def nvfp4_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return E2M1(code) * E4M3(scale), exact in fp32 (and in fp16 and bf16); the global scale is left to the caller.

    codes: [N, K/2] uint8, column 2j in the low nibble.  scales: [N, K/16] uint8 (E4M3 bytes) or float8_e4m3fn.
    Returns [N, K] fp32.
    """
    rows, groups = scales.shape
    values = _byte_table(codes.device).index_select(0, codes.reshape(-1).int()).view(torch.float32)
    steps = _e4m3_table(codes.device).index_select(0, scales.view(torch.uint8).reshape(-1).int())
    return (values.view(-1, NVFP4_GROUP) * steps.unsqueeze(1)).view(rows, groups * NVFP4_GROUP)


def nvfp4_dequantize(codes: Tensor, scales: Tensor, global_scale: Tensor | float) -> Tensor:
    """Return the weights that the three parts stand for: [N, K] fp32."""
    return nvfp4_values(codes, scales) * global_scale


def divided(x: Tensor, number: float) -> Tensor:
    """Return x / number, correctly rounded: a GPU multiplies by the reciprocal of a plain number instead."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def nvfp4_quantize(
    weight: Tensor, amax: Tensor | None = None, peaks: tuple[float, ...] = (E2M1_MAX,)
) -> tuple[Tensor, Tensor, Tensor]:
    """Round [N, K] weights to NVFP4: (codes [N, K/2] uint8, scales [N, K/16] float8_e4m3fn, global scale fp32 scalar).

    The global scale is amax / (6 * 448); ties go to the code with the even last bit.  amax: scalar fp32, the largest
    magnitude of a matrix of which these are some rows; None: of these.  peaks: E2M1 values that a group's largest
    magnitude may become; of several the one with the smallest squared error, the first of equal ones.
    """
    weight = weight.float()
    rows, columns = weight.shape
    if columns % NVFP4_GROUP:
        raise ValueError(f"NVFP4 needs a multiple of {NVFP4_GROUP} columns, got {columns}")
    if amax is None:
        amax = weight.abs().amax()
    global_scale = torch.where(amax > 0, divided(amax, E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    blocks = weight.view(rows, columns // NVFP4_GROUP, NVFP4_GROUP)
    codes, scales = _nvfp4_blocks(blocks, global_scale, peaks[0])
    for peak in peaks[1:]:
        other, other_scales = _nvfp4_blocks(blocks, global_scale, peak)
        is_better = _nvfp4_error(blocks, other, other_scales, global_scale) < _nvfp4_error(
            blocks, codes, scales, global_scale
        )
        codes = torch.where(is_better.unsqueeze(-1), other, codes)
        chosen = torch.where(is_better, other_scales.view(torch.uint8), scales.view(torch.uint8))
        scales = chosen.view(torch.float8_e4m3fn)
    codes = codes.reshape(rows, columns)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, global_scale


def _nvfp4_blocks(blocks: Tensor, global_scale: Tensor, peak: float) -> tuple[Tensor, Tensor]:
    """blocks: [N, G, 16].  Returns codes [N, G, 16] uint8 and scales [N, G] that make each group's largest `peak`."""
    largest = divided(blocks.abs().amax(-1), peak)
    scales = (largest / global_scale).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = scales.float().unsqueeze(-1) * global_scale
    scaled = torch.where(
        step > 0, blocks / step.clamp(min=torch.finfo(torch.float32).tiny), torch.zeros_like(blocks)
    )
    return nearest_e2m1(scaled), scales


def _nvfp4_error(blocks: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Return the squared error of each group: [N, G]."""
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=blocks.device)
    values = table[codes.int()] * (scales.float() * global_scale).unsqueeze(-1)
    # one by one: `sum` adds in an order of each device's own
    return functools.reduce(torch.add, (values - blocks).square().unbind(-1))


def nearest_e2m1(values: Tensor) -> Tensor:
    """Return the 4-bit codes nearest to fp32 values, ties to even: uint8 in 0..15."""
    magnitude = values.abs()
    # codes count steps of 1/2 up to 2, of 1 up to 4, of 2 above: rounded to even, so are they
    code = torch.where(
        magnitude < 2,
        (2 * magnitude).round(),
        torch.where(magnitude < 4, 2 + magnitude.round(), 4 + (magnitude / 2).round()),
    )
    return code.clamp_(max=7).to(torch.uint8) | torch.where(values.signbit(), 8, 0).to(torch.uint8)


def fp8_rows_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to E4M3 with its own scale: (values [N, K] float8_e4m3fn, scales [N] fp32).

    scale = max|row| / 448, or 1 for a row of zeros; nearest even.
    """
    weight = weight.float()
    amax = weight.abs().amax(dim=1)
    scale = torch.where(amax > 0, divided(amax, E4M3_MAX), torch.ones_like(amax))
    return (weight / scale.unsqueeze(1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def fp8_rows_dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Return values * scales per row: [N, K] fp32."""
    return values.float() * scales.unsqueeze(1)


INT8_MAX = 127.0


def int8_rows_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8 with its own scale: (values [N, K] int8 in -127..127, scales [N] fp32).

    scale = max|row| / 127, or 1 for a row of zeros; nearest even.
    """
    weight = weight.float()
    amax = weight.abs().amax(dim=1)
    scale = torch.where(amax > 0, divided(amax, INT8_MAX), torch.ones_like(amax))
    return (weight / scale.unsqueeze(1)).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


MX_GROUP = 32  # columns that share one E8M0 scale


def e8m0_values(scales: Tensor) -> Tensor:
    """Return 2^(byte - 127) for each E8M0 byte (uint8 or float8_e8m0fnu), fp32; byte 0 is 2^-127, 255 is NaN."""
    exponent = scales.view(torch.uint8).int()
    normal = (exponent << 23).view(torch.float32)
    values = torch.where(exponent == 0, torch.tensor(2.0**-127, device=scales.device), normal)
    return torch.where(exponent == 255, torch.tensor(float("nan"), device=scales.device), values)


def mxfp4_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return E2M1 times E8M0: codes [N, K/2] uint8, low nibble first, scales [N, K/32].  [N, K] fp32, exact."""
    rows, groups = scales.shape
    raw = codes.view(torch.uint8).reshape(-1).int()
    values = _byte_table(codes.device).index_select(0, raw).view(torch.float32)
    steps = e8m0_values(scales).view(-1, 1)
    return (values.view(-1, MX_GROUP) * steps).view(rows, groups * MX_GROUP)


def fp8_tiles_dequantize(values: Tensor, scales: Tensor, tile: int) -> Tensor:
    """Return E4M3 times the scale of its tile x tile block: values [N, K], scales [ceil(N/tile), ceil(K/tile)] fp32.

    [N, K] fp32.
    """
    rows, columns = values.shape
    if rows % tile == columns % tile == 0:  # nothing but the product is written
        tiles = values.float().view(rows // tile, tile, columns // tile, tile)
        return tiles.mul_(scales[:, None, :, None]).view(rows, columns)
    steps = scales.repeat_interleave(tile, 0)[:rows].repeat_interleave(tile, 1)[:, :columns]
    return values.float() * steps


def fp8_blocks_dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Return E4M3 times the E8M0 scale of its 32 x 32 block: values [N, K], scales [ceil(N/32), K/32].  [N, K] fp32."""
    rows, columns = values.shape
    steps = e8m0_values(scales).repeat_interleave(MX_GROUP, 0)[:rows]
    return values.float() * steps.repeat_interleave(MX_GROUP, 1)[:, :columns]
