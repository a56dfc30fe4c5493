"""What `verify` must know of the qwen family: its references, and one expert in float64 by another way."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Generator, Tensor

from kernels import formats, reference
from runtime.models.checks import FamilyChecks, relative_error
from runtime.models.qwen_controls import CONTROLS
from runtime.models.qwen_model import QwenModel


def expert_error(
    model: QwenModel, _snapshot: Path, layer: int, expert: int, generator: Generator
) -> float:
    """Return the relative error of the expert operation on an expert's packed record."""
    spec = model.spec
    x = torch.randn(3, spec.hidden, generator=generator)
    scales = model.expert_scales(layer, expert).cpu()
    ((_, record),) = model.experts.fetch(layer, [expert])
    found = reference.nvfp4_swiglu_expert(x, record, scales, spec.intermediate).double()
    raw = bytes(record.numpy())
    return relative_error(
        found, expert_in_float64(x.double(), raw, scales.double(), spec.intermediate)
    )


def expert_in_float64(x: Tensor, record: bytes, scales: Tensor, intermediate: int) -> Tensor:
    """x: [T, H] float64.  Decodes value by value from the bytes, with no table of the kernels.  Returns [T, H]."""
    hidden = x.shape[1]
    codes_nbytes, scales_nbytes = hidden * intermediate // 2, hidden * intermediate // 16
    sizes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    matrices = []
    for i, (rows, columns) in enumerate(sizes):
        codes = torch.tensor(list(record[i * codes_nbytes : (i + 1) * codes_nbytes]))
        nibbles = torch.stack([codes % 16, codes // 16], dim=1).view(rows, columns)
        exponent, mantissa = (nibbles % 8) // 2, nibbles % 2
        value = torch.where(
            exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1.0)
        )
        value = torch.where(nibbles >= 8, -value, value).double()
        start = 3 * codes_nbytes + i * scales_nbytes
        raw = torch.tensor(list(record[start : start + scales_nbytes])).view(
            rows, columns // formats.NVFP4_GROUP
        )
        exponent, mantissa = raw // 8, raw % 8
        step = torch.where(
            exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0)
        )
        matrices.append(
            value * step.double().repeat_interleave(formats.NVFP4_GROUP, dim=1) * scales[i]
        )
    gate, up, down = matrices
    inner = x @ gate.T
    return (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T


CHECKS = FamilyChecks(
    answer_key="answer_ids",
    document_tokens=700,
    perplexity_tolerance=0.005,
    expert_error=expert_error,
    expert_tolerance=2e-5,  # fp32 sums of up to 2,560 products against float64
    controls=CONTROLS,
)
