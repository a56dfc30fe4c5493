"""The expert kernels on this GPU against their definitions in plain torch, at a model's real shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import reference, reference_deepseek
from kernels.formats import mxfp4_dequantize
from runtime.experts.arena import HostArena
from runtime.experts.layout import Nvfp4Shape
from runtime.experts.shard_layout import Fp4Shape
from runtime.units import align_up

NVFP4_LIMIT = 5e-6  # of the relative error: fp32 sums in another order
MXFP4_LIMIT = 2e-3  # bf16 results, and an exp that differs in its last bit


def expert_error(family: str, spec: Any, device: str = "cuda") -> tuple[str, float, float] | None:
    """Return (kernel, relative error, limit) of one random expert: the larger error of reading it in RAM and in VRAM.

    None for a family whose experts plain torch computes.  device: `cpu` for kernels that run in Triton's interpreter.
    """
    if family == "qwen":
        return "nvfp4_experts", _nvfp4(spec.hidden, spec.intermediate, device), NVFP4_LIMIT
    if family == "deepseek":
        return "mxfp4_experts", _mxfp4(spec.hidden, spec.intermediate, device), MXFP4_LIMIT
    return None


def _nvfp4(hidden: int, intermediate: int, device: str) -> float:
    from kernels.nvfp4_expert import nvfp4_experts

    shape = Nvfp4Shape(hidden, intermediate)
    generator = torch.Generator().manual_seed(0)
    arena = HostArena(1, shape.record_nbytes)
    codes = 3 * shape.codes_nbytes
    arena.rows[0, :codes] = torch.randint(0, 256, (codes,), dtype=torch.uint8, generator=generator)
    rest = arena.row_nbytes - codes
    arena.rows[0, codes:] = torch.randint(0, 0x7F, (rest,), dtype=torch.uint8, generator=generator)
    scales = (0.5 + torch.rand(1, 3, generator=generator)) * 1e-4
    x = torch.randn(1, hidden, generator=generator).bfloat16()
    wanted = reference.nvfp4_swiglu_expert(x, arena.rows[0], scales[0], intermediate)[0]
    slot = arena.rows.to(device, copy=True)
    errors = []
    if device == "cuda":
        arena.pin()
    try:
        for record in (arena.rows[0], slot[0]):
            out = torch.full((1, hidden), float("nan"), device=device)
            inner = torch.full((1, intermediate), float("nan"), device=device)
            table = torch.tensor([record.data_ptr()], device=device)
            nvfp4_experts(x.to(device), table, scales.to(device), inner, out)
            errors.append(_error(out[0], wanted))
    finally:
        if device == "cuda":
            torch.cuda.synchronize()
        arena.close()
    return max(errors)


def _mxfp4(hidden: int, intermediate: int, device: str) -> float:
    from kernels.deepseek_linear import act_round
    from kernels.mxfp4_expert import mxfp4_experts

    shape = Fp4Shape(hidden, intermediate)
    generator = torch.Generator().manual_seed(0)
    codes_nbytes, scales_nbytes = 3 * shape.codes_nbytes, 3 * shape.scales_nbytes
    arena = HostArena(1, align_up(codes_nbytes + scales_nbytes))
    record = arena.rows[0]
    record[:codes_nbytes] = torch.randint(0, 256, (codes_nbytes,), dtype=torch.uint8, generator=generator)  # fmt: skip
    record[codes_nbytes : codes_nbytes + scales_nbytes] = torch.randint(
        118, 124, (scales_nbytes,), dtype=torch.uint8, generator=generator
    )
    matrices, codes_at, scales_at = [], 0, codes_nbytes
    for rows, columns in shape.matrices().values():
        codes = record[codes_at : codes_at + rows * columns // 2].view(rows, -1)
        scales = record[scales_at : scales_at + rows * columns // 32].view(rows, -1)
        matrices.append(mxfp4_dequantize(codes, scales))
        codes_at, scales_at = codes_at + rows * columns // 2, scales_at + rows * columns // 32
    gate, down, up = matrices
    x = torch.randn(1, hidden, generator=generator).bfloat16()
    weight = torch.tensor([0.7])
    wanted = reference_deepseek.swiglu_expert(x, gate, up, down, 10.0, weight.view(1, 1))[0]
    slot = arena.rows.to(device, copy=True)
    errors = []
    if device == "cuda":
        arena.pin()
    try:
        for found in (record, slot[0]):
            start = found.data_ptr()
            table = torch.tensor([[start, start + codes_nbytes]], device=device)
            rounded = torch.empty(hidden, dtype=torch.bfloat16, device=device)
            inner = torch.empty(1, intermediate, dtype=torch.bfloat16, device=device)
            out = torch.full((1, hidden), float("nan"), dtype=torch.bfloat16, device=device)
            act_round(x.to(device), rounded)
            mxfp4_experts(rounded, table, weight.to(device), inner, out, 10.0, 8)
            errors.append(_error(out[0], wanted))
    finally:
        if device == "cuda":
            torch.cuda.synchronize()
        arena.close()
    return max(errors)


def _error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.float().cpu(), wanted.float()
    error = float((found - wanted).norm() / wanted.norm())
    return error if error == error else float("inf")
