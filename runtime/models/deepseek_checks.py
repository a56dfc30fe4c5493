"""What `verify` must know of the deepseek family: its references, and one expert in float64 by another way."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Generator, Tensor

from kernels import reference_deepseek as ops
from runtime.checkpoint import Checkpoint
from runtime.experts.layout import ExpertKey
from runtime.models.checks import FamilyChecks, relative_error
from runtime.models.deepseek_controls import CONTROLS, SUBTLE
from runtime.models.deepseek_model import DeepseekModel
from runtime.models.deepseek_weights import expert_prefix

LOUDNESS = (1.0, 16.0, 64.0)  # of the rows: the limit of gate and up is met, too
ROUTE_WEIGHT = 0.375


def expert_error(
    model: DeepseekModel, snapshot: Path, layer: int, expert: int, generator: Generator
) -> float:
    """Return the relative error of the expert operation on an expert read as for a token.

    The reference finds its bytes by their names in the shards' headers.
    """
    spec, key = model.spec, ExpertKey(layer, expert)
    loudness = torch.tensor(LOUDNESS).unsqueeze(1)
    x = torch.randn(len(LOUDNESS), spec.hidden, generator=generator) * loudness
    x = x.to(torch.bfloat16)
    weight = torch.full((len(x), 1), ROUTE_WEIGHT)
    ((_, record),) = model.experts.fetch(layer, [expert])
    matrices = model.open_expert(key, record)
    found = ops.swiglu_expert(x, *matrices, spec.swiglu_limit, weight).double()
    gate, down, up = matrices_in_float64(Checkpoint.open(snapshot), key)
    wanted = expert_in_float64(x.double(), gate, up, down, spec.swiglu_limit, ROUTE_WEIGHT)
    return max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))


def matrices_in_float64(checkpoint: Checkpoint, key: ExpertKey) -> list[Tensor]:
    """Return w1, w2, w3 of an expert, decoded value by value with no table of the kernels: [N, K] float64 each."""
    matrices = []
    for name in ("w1", "w2", "w3"):
        codes, scales = (
            checkpoint.info(f"{expert_prefix(key)}{name}.{what}") for what in ("weight", "scale")
        )
        raw = torch.tensor(list(checkpoint.read(codes))).view(codes.shape)
        nibbles = torch.stack([raw % 16, raw // 16], dim=2).flatten(1)  # the low one first
        exponent, mantissa = (nibbles % 8) // 2, nibbles % 2
        value = torch.where(
            exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1.0)
        ).double()
        value = torch.where(nibbles >= 8, -value, value)
        exponents = torch.tensor(list(checkpoint.read(scales))).view(scales.shape) - 127.0
        steps = 2.0 ** exponents.double()
        matrices.append(value * steps.repeat_interleave(value.shape[1] // steps.shape[1], dim=1))
    return matrices


def expert_in_float64(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, limit: float, weight: float
) -> Tensor:
    """x: [T, d].  gate, up: [f, d].  down: [d, f].  All float64; rounded where the release rounds.  Returns [T, d]."""
    inputs = _through_e4m3(x)
    g, u = (_rounded(inputs @ matrix.T, 8) for matrix in (gate, up))
    g, u = torch.minimum(g, torch.tensor(limit)), torch.clip(u, -limit, limit)
    h = _rounded(g / (1 + torch.exp(-g)) * u * weight, 8)
    return _rounded(_through_e4m3(h) @ down.T, 8)


def _rounded(x: Tensor, bits: int, least_exponent: int = -126) -> Tensor:
    """Return x with so many significant bits, ties to even; below 2^least_exponent with that one's steps."""
    exponent = torch.frexp(x).exponent.clamp(min=least_exponent + 1)
    return torch.ldexp(torch.round(torch.ldexp(x, bits - exponent)), exponent - bits)


def _through_e4m3(x: Tensor) -> Tensor:
    """Return x [T, K] as E4M3 with power-of-two scales keeps it, in blocks of 32."""
    blocks = x.unflatten(1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(2, keepdim=True).clamp(min=1e-4) / 448)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # the power at or above
    values = _rounded(torch.ldexp(blocks, -exponent), 4, least_exponent=-6)
    return torch.ldexp(values, exponent).flatten(1)


CHECKS = FamilyChecks(
    answer_key="answer_own_keys_ids",
    document_tokens=500,
    perplexity_tolerance=0.01,
    expert_error=expert_error,
    expert_tolerance=1e-3,  # a sum on the other side of a bf16 step; without the roundings 1.6e-3 to 5e-2
    controls=CONTROLS,
    subtle_controls=SUBTLE,
    least_divergence=5e-4,  # pieces of a prompt 1.3e-4, the two subtle controls 1.3e-3 and 5.4e-3
)
