"""How the rows of a head are shared between CPU and GPU, by what both took. No torch, no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEP_ROWS = 64  # shares are multiples of it: what the GPU reads and writes stays aligned
ROUNDS = 4  # of measuring both at once
LEAST_MS = 1e-3  # a clock's step
WORTH = 0.95  # more threads, or the CPU at all, must take less than this share of the time


@dataclass(frozen=True, slots=True)
class Timing:
    """What it took to compute the head once, with so many rows on the CPU. Milliseconds; 0 without rows."""

    rows: int
    cpu_ms: float
    gpu_ms: float

    @property
    def ms(self) -> float:
        return max(self.cpu_ms, self.gpu_ms)


@dataclass(frozen=True, slots=True)
class HeadReport:
    """How a head is split, and what it takes. Milliseconds a token, since the start or as measured at the start."""

    rows: int
    cpu_rows: int
    threads: int
    is_compiled: bool  # the CPU's rows, by numba
    measured: Timing | None  # before the first token; None: the split was given
    tokens: int
    cpu_ms: float
    gpu_ms: float


def balanced_rows(timing: Timing, total: int) -> int:
    """Return how many rows the CPU should take so that both would end together at the rates of a timing with both."""
    cpu = timing.rows / max(timing.cpu_ms, LEAST_MS)
    gpu = (total - timing.rows) / max(timing.gpu_ms, LEAST_MS)
    return rounded_rows(total * cpu / (cpu + gpu), total)


def rounded_rows(rows: float, total: int) -> int:
    """Return a multiple of STEP_ROWS, at least one and not all of them where there are two."""
    steps = round(rows / STEP_ROWS) * STEP_ROWS
    return min(max(steps, STEP_ROWS), max(0, total - 1) // STEP_ROWS * STEP_ROWS)


def find_split(time_split: Callable[[int], Timing], total: int) -> Timing:
    """Return the fastest timing that was met.  time_split: computes the head with so many rows on the CPU.

    The GPU alone stays where the CPU saves less than 5 %.
    """
    alone, best = time_split(0), time_split(total)
    if best.ms > WORTH * alone.ms:
        best = alone
    rows = rounded_rows(total / 3, total)
    for _ in range(ROUNDS):
        if not 0 < rows < total:
            break
        timing = time_split(rows)
        if timing.ms < min(best.ms, WORTH * alone.ms):
            best = timing
        rows = balanced_rows(timing, total)
    return best


def find_threads(time_threads: Callable[[int], float], most: int) -> int:
    """Return the fewest threads beyond which twice as many gain less than 5 %.  time_threads: seconds with so many."""
    best, best_s = 1, time_threads(1)
    count = 1
    while count < most:
        count = min(2 * count, most)
        found_s = time_threads(count)
        if found_s > WORTH * best_s:
            break
        best, best_s = count, found_s
    return best


def format_head(report: HeadReport) -> str:
    """Return how the head is split, and what that takes, on one line."""
    share = report.cpu_rows / report.rows
    parts = [
        f"head: {report.cpu_rows} of {report.rows} rows ({share:.0%}) by {report.threads} CPU threads, "
        f"{'compiled' if report.is_compiled else 'torch'}; the others read by the GPU over the link"
    ]
    if report.measured is not None:
        measured = report.measured
        parts.append(
            f"before the first token CPU {measured.cpu_ms:.1f} ms, GPU {measured.gpu_ms:.1f} ms"
        )
    if report.tokens:
        parts.append(f"a token CPU {report.cpu_ms:.1f} ms, GPU {report.gpu_ms:.1f} ms")
    return "; ".join(parts)
