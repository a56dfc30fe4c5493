"""Rotary positions from integers: angles in float64, so that a distance is the same anywhere on the timeline."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import dense_ops


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """Return the rotary frequencies [dim / 2] fp32, as the models round them."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (theta**exponent)


def rope_tables(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the half-split rotation: [T, dim / 2] fp32 each.

    positions: [T] int64, may be negative (a rotation back).  The angle is an exact product in float64; in fp32, as
    models compute it, it is wrong by 0.02 rad at position 700,000, and two tokens at a fixed distance drift apart.
    """
    angle = positions.double().unsqueeze(1) * inverse_frequencies(dim, theta).double()
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) in fp32 and round once.  x: [..., T, heads, D].  cos, sin: [T, D/2] fp32."""
    return dense_ops.rotate(x, cos, sin)
