"""What `verify` must know of a model family; `runtime/models/<family>_checks.py` says it as CHECKS."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Generator

# (model, snapshot, layer, expert, of the input) -> relative error of the expert's output against float64
ExpertError = Callable[[Any, Path, int, int, Generator], float]


@dataclass(frozen=True, slots=True)
class FamilyChecks:
    """How a family's references were made, and what must break it."""

    answer_key: str  # of a recorded answer's tokens, in golden_answers.json
    document_tokens: int  # held-out documents are cut there, as for the recorded perplexities
    perplexity_tolerance: float  # relative
    expert_error: ExpertError
    expert_tolerance: float
    controls: Mapping[str, Callable[[Any], AbstractContextManager[None]]]  # name -> damage
    # controls that perplexity does not see: judged by divergence, the mean KL of a token from the undamaged model
    subtle_controls: Collection[str] = ()
    least_divergence: float = 0.0  # of a damaged model; what is not damaged stays below


def relative_error(found: Any, wanted: Any) -> float:
    """Return |found - wanted| / |wanted|, of two float64 tensors."""
    return float((found - wanted).norm() / wanted.norm())
