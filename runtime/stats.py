"""What a token cost: counters, per-token records, and the summary that is printed. No torch, no clock of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from runtime.units import GIB, format_nbytes


@dataclass(slots=True)
class ExpertCounters:
    """Running totals of one expert source. `late`: on its way (a right guess) when it was asked for."""

    hits: int = 0
    late: int = 0
    misses: int = 0
    sweep_hits: int = 0
    sweep_misses: int = 0
    guesses_issued: int = 0
    guesses_used: int = 0
    guesses_wasted: int = 0
    guesses_cancelled: int = 0
    read_nbytes: int = 0
    wait_ns: int = 0

    def copy(self) -> ExpertCounters:
        return ExpertCounters(**asdict(self))

    def since(self, earlier: ExpertCounters) -> ExpertCounters:
        """Return what was counted after `earlier`."""
        return ExpertCounters(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class TokenStats:
    """One decoded token (or one prompt): milliseconds and bytes."""

    position: int
    num_tokens: int  # 1 for a decoded token, the prompt's new tokens for a prefill
    total_ms: float
    drive_wait_ms: float
    row_wait_ms: float  # waiting for rows of tables on the drive
    counters: ExpertCounters
    row_read_nbytes: int

    @property
    def read_nbytes(self) -> int:
        return self.counters.read_nbytes + self.row_read_nbytes


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine can do, measured in the same run (GiB/s); 0 where it was not measured."""

    drive_gib_s: float = 0.0
    memory_gib_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run: the figures of a table, a JSON file and the line after an answer."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_ms: float
    prefill_tok_s: float
    decode_tok_s: float
    inter_token_p50_ms: float
    inter_token_p95_ms: float
    drive_wait_ms_per_token: float
    row_wait_ms_per_token: float
    read_nbytes_per_token: float
    hit_rate: float
    counters: ExpertCounters
    floor_ms: float  # per token: the larger of its bytes over the drive's rate and the dense bytes over memory's
    efficiency: float  # floor_ms / achieved ms
    rates: Rates = field(default_factory=Rates)
    peak_rss_nbytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at `share` (0..1) of the sorted values, nearest rank; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def summarize(
    prefill: TokenStats | None,
    tokens: Sequence[TokenStats],
    prompt_tokens: int,
    dense_nbytes: int,
    rates: Rates,
    peak_rss_nbytes: int = 0,
) -> RunSummary:
    """Put one run's records together.

    dense_nbytes: bytes of resident weights and cached experts that one token reads from memory at least.
    """
    total = ExpertCounters()
    for token in tokens:
        for f in fields(total):
            setattr(total, f.name, getattr(total, f.name) + getattr(token.counters, f.name))
    n = max(1, len(tokens))
    times = [token.total_ms for token in tokens]
    lookups = total.hits + total.late + total.misses
    read_nbytes = sum(token.read_nbytes for token in tokens) / n
    floors_s = [0.0]
    if rates.drive_gib_s:
        floors_s.append(read_nbytes / (rates.drive_gib_s * GIB))
    if rates.memory_gib_s:
        floors_s.append(dense_nbytes / (rates.memory_gib_s * GIB))
    mean_ms = statistics.fmean(times) if times else 0.0
    floor_ms = max(floors_s) * 1e3
    new_tokens = prefill.num_tokens if prefill else 0
    return RunSummary(
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_tokens - new_tokens,
        generated_tokens=len(tokens) + (1 if prefill else 0),
        ttft_ms=prefill.total_ms if prefill else 0.0,
        prefill_tok_s=new_tokens / prefill.total_ms * 1e3 if prefill and prefill.total_ms else 0.0,
        decode_tok_s=1e3 / mean_ms if mean_ms else 0.0,
        inter_token_p50_ms=percentile(times, 0.5),
        inter_token_p95_ms=percentile(times, 0.95),
        drive_wait_ms_per_token=sum(token.drive_wait_ms for token in tokens) / n,
        row_wait_ms_per_token=sum(token.row_wait_ms for token in tokens) / n,
        read_nbytes_per_token=read_nbytes,
        hit_rate=total.hits / lookups if lookups else 0.0,
        counters=total,
        floor_ms=floor_ms,
        efficiency=floor_ms / mean_ms if mean_ms else 0.0,
        rates=rates,
        peak_rss_nbytes=peak_rss_nbytes,
    )


def format_summary(s: RunSummary) -> str:
    """Return the lines that `chat` prints after an answer."""
    c = s.counters
    lookups = c.hits + c.late + c.misses
    lines = [
        f"{s.generated_tokens} tokens, {s.decode_tok_s:.1f} tok/s (p50 {s.inter_token_p50_ms:.1f} ms, "
        f"p95 {s.inter_token_p95_ms:.1f} ms), first token after {s.ttft_ms:.0f} ms; "
        f"prompt {s.prompt_tokens} tokens ({s.cached_tokens} cached) at {s.prefill_tok_s:.0f} tok/s",
        f"{format_nbytes(s.read_nbytes_per_token)} read per token; "
        f"experts in RAM {s.hit_rate:.1%} of {lookups} look-ups "
        f"({c.misses} missed, {c.late} on their way); guesses {c.guesses_issued} issued, {c.guesses_used} used, "
        f"{c.guesses_wasted} wasted, {c.guesses_cancelled} cancelled",
        f"waiting per token: experts {s.drive_wait_ms_per_token:.2f} ms, table rows {s.row_wait_ms_per_token:.2f} ms",
    ]
    if s.floor_ms:
        lines.append(
            f"floor {s.floor_ms:.2f} ms per token (drive {s.rates.drive_gib_s:.2f} GiB/s, memory "
            f"{s.rates.memory_gib_s:.1f} GiB/s, measured now), efficiency {s.efficiency:.1%}; "
            f"peak memory {format_nbytes(s.peak_rss_nbytes)}"
        )
    return "\n".join(lines)
