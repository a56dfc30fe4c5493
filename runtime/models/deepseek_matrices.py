"""The stored matrices of DeepSeek-V4.1-Flash in the form that its layers multiply by: FP8 weights, MXFP4 experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kernels import reference_deepseek as ops
from kernels.formats import fp8_blocks_dequantize, mxfp4_dequantize

Matrices = tuple[ops.Packed | Tensor, ops.Packed | Tensor, ops.Packed | Tensor]


def fp8_matrix(weights: Mapping[str, Tensor], name: str) -> Any:
    """Return a weight [N, K] kept as FP8 blocks: dequantised to fp32 on a CPU, as it is on a GPU."""
    values, scale = weights[f"{name}.weight"], weights[f"{name}.scale"]
    if values.is_cuda:
        from kernels.deepseek_prompt import Fp8Weight

        return Fp8Weight(values, scale)
    return fp8_blocks_dequantize(values, scale)


def expert_matrices(codes: Sequence[Tensor], scales: Sequence[Tensor]) -> Matrices:
    """Return an expert's gate, up and down, dequantised to fp32.

    codes: w1, w2, w3 as the file has them, [N, K/2] uint8.  scales: the same, [N, K/32].
    """
    gate, down, up = (mxfp4_dequantize(c, s) for c, s in zip(codes, scales, strict=True))
    return gate, up, down
