"""How stages measure and compare: `bench`, `verify`, `spot_check`, `doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class BenchConfig:
    """How `bench` measures."""

    tokens: int = 64  # decoded and counted, in each repeat
    warmup_tokens: int = 16  # decoded before, not counted
    repeats: int = 3
    prompt_length: int = 64  # tokens, read before decoding
    is_cold: bool = False  # empty the expert cache before each repeat, and count the warm-up in
    seed: int = 0  # of the prompt's tokens, or of generated routes
    # of guesses, 0 to 1: as if so many were right, whoever guesses (the answer's own tokens are); null: what they are
    acceptance: float | None = None
    plot: bool = True


@dataclass
class VerifyConfig:
    """How much `verify` computes."""

    documents: int = 40  # held-out documents per language; fewer, if a figure is recorded of fewer
    control_documents: int = 8  # of the English ones, for the runs with damage


@dataclass
class SpotCheckConfig:
    """How many experts are read as an engine reads them, and compared."""

    experts: str = "64"  # how many random experts, or `all`
    seed: int = 0


@dataclass
class DoctorConfig:
    """How long `doctor` measures the drive."""

    each_s: float = 0.8  # for each window and number of pieces
    sustained_s: float = 20.0  # with the best of them, to see a drive that throttles
    # of a file that is made and deleted, while the model has none of its own
    probe_gib: float = 1.0


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "bench.tokens": (1, 2**20),
    "bench.warmup_tokens": (0, 2**20),
    "bench.repeats": (1, 1000),
    "bench.prompt_length": (1, 2**20),
    "bench.acceptance": (0, 1),
    "verify.documents": (1, 1e6),
    "verify.control_documents": (1, 1e6),
    "doctor.each_s": (0.01, 3),
    "doctor.sustained_s": (0, 60),
    "doctor.probe_gib": (0.001, 64),
}


def faults(spot_check: SpotCheckConfig) -> Iterable[str]:
    """Yield what no range says."""
    if spot_check.experts != "all" and not spot_check.experts.isdecimal():
        yield f"spot_check.experts must be a number or all, got {spot_check.experts!r}"
