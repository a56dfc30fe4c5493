"""A draft answer taken apart, what can be wrong with it, and how numbers are compared. Judges nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.advisor.facts import Machine, Situation
from runtime.advisor.kb import KnowledgeBase
from runtime.advisor.verdicts import Verdict

CALC_TOLERANCE, FACT_TOLERANCE, PROSE_TOLERANCE = 0.01, 0.01, 0.02
EVIDENCE_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: a code, where, what, and how to mend it."""

    code: str
    path: str
    message: str
    fix: str
    expected: Any = None
    got: Any = None
    is_warning: bool = False


@dataclass
class Draft:
    """A draft taken apart."""

    text: str
    block: dict[str, Any]
    kb: KnowledgeBase
    situation: Situation
    last_message: str
    searched_web: bool
    known_before: Mapping[str, Any]
    documents: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # ref -> document
    variants: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    results: dict[str, tuple[float, str]] = field(default_factory=dict)  # calculation -> recomputed
    core: dict[str, Verdict] = field(default_factory=dict)
    machine: Machine | None = None


def near(a: float, b: float, tolerance: float) -> bool:
    """Tell whether two numbers differ by at most a share of the second."""
    return a == b or abs(a - b) <= tolerance * max(abs(b), 1e-300)


def shows(shown: float, value: float) -> bool:
    """Tell whether a number is the other one as displayed with three digits."""
    return f"{value:.3g}" == f"{shown:.3g}" and shown == float(f"{shown:.3g}")


def plain(value: Any) -> float:
    """Return a number as a float, NaN for anything else."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def ends(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the most that a run measured."""
    value = run["value"]
    low, high = value if isinstance(value, list) else (value, value)
    return float(low), float(high)


def find_run(d: Draft, name: Any) -> Mapping[str, Any] | None:
    """Return a run of the knowledge base by its id, None where there is none."""
    return d.kb.documents["run"].get(name) if isinstance(name, str) else None
