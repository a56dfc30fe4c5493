"""Damage on purpose: each control breaks one thing that could be silently wrong, and must spoil the text.

Fluent output is not evidence: several real mistakes leave most greedy choices unchanged. A measure that does not
see these would not see the real ones either.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from runtime.experts.layout import Nvfp4Shape
from runtime.models.damage import damaged_experts, replaced
from runtime.models.qwen_model import QwenModel


def nibbles_swapped(model: QwenModel) -> AbstractContextManager[None]:
    """Take the high nibble of each byte for the first column."""
    nbytes = 3 * Nvfp4Shape(model.spec.hidden, model.spec.intermediate).codes_nbytes

    def swap(record: Tensor) -> Tensor:
        codes = record[:nbytes]
        return torch.cat([(codes >> 4) | (codes << 4), record[nbytes:]])

    return damaged_experts(model, swap)


def experts_removed(model: QwenModel) -> AbstractContextManager[None]:
    """Take every routed expert for zero."""
    return damaged_experts(model, torch.zeros_like)


def experts_shifted(model: QwenModel) -> AbstractContextManager[None]:
    """Take expert e + 1 where e was asked for."""
    return damaged_experts(model, change_id=lambda e: (e + 1) % model.spec.num_experts)


def global_scale_dropped(model: QwenModel) -> AbstractContextManager[None]:
    """Take every global scale for one."""
    return replaced(*((moe, "scales", torch.ones_like(moe.scales)) for moe in model.moes))


def ngram_hash_wrong(model: QwenModel) -> AbstractContextManager[None]:
    """Take the hash multipliers in reverse order."""
    return replaced((model.ple, "multipliers", model.ple.multipliers.flip(0)))


CONTROLS: dict[str, Callable[[QwenModel], AbstractContextManager[None]]] = {
    "nibbles swapped": nibbles_swapped,
    "routed experts removed": experts_removed,
    "experts shifted by one": experts_shifted,
    "global scale dropped": global_scale_dropped,
    "n-gram hash wrong": ngram_hash_wrong,
}
