"""What a token cost: counters, per-token records, and the summary that is printed. No torch, no clock of its own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from runtime.units import GIB, format_nbytes


@dataclass(slots=True)
class ExpertCounters:
    """Running totals of one expert source.

    An expert that is asked for is a hit (in RAM), a VRAM hit, late (on its way: a right guess) or a miss. Copied bytes
    went from RAM to the GPU, read in place or copied; wasted bytes were read from the drive for wrong guesses.
    """

    hits: int = 0
    vram_hits: int = 0
    late: int = 0
    misses: int = 0
    sweep_hits: int = 0
    sweep_vram_hits: int = 0
    sweep_misses: int = 0
    guesses_issued: int = 0
    guesses_used: int = 0
    guesses_wasted: int = 0
    guesses_cancelled: int = 0
    early_issued: int = 0  # guesses copied to VRAM ahead of their layer
    early_used: int = 0
    warmed: int = 0  # read by a warm start, before anybody asked; not among the bytes read
    read_nbytes: int = 0
    wasted_nbytes: int = 0
    copied_nbytes: int = 0
    wait_ns: int = 0
    cpu_experts: int = 0  # hits that the CPU computed beside a GPU
    cpu_ns: int = 0  # that it took for them

    @property
    def lookups(self) -> int:
        """Experts that decoding asked for."""
        return self.hits + self.vram_hits + self.late + self.misses

    @property
    def sweep_lookups(self) -> int:
        """Experts that prompts asked for."""
        return self.sweep_hits + self.sweep_vram_hits + self.sweep_misses

    def copy(self) -> ExpertCounters:
        return ExpertCounters(**asdict(self))

    def plus(self, other: ExpertCounters) -> ExpertCounters:
        """Return what both have counted."""
        return ExpertCounters(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def since(self, earlier: ExpertCounters) -> ExpertCounters:
        """Return what was counted after `earlier`."""
        return ExpertCounters(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class TokenStats:
    """One decoded token, the tokens that one pass with drafts gave, or one prompt: milliseconds and bytes."""

    position: int
    num_tokens: int  # 1 for a token decoded without drafts, the prompt's new tokens for a prefill
    total_ms: float
    drive_wait_ms: float
    row_wait_ms: float  # waiting for rows of tables on the drive
    device_wait_ms: float  # the host, waiting for the GPU's routes; 0 on a CPU
    counters: ExpertCounters
    row_read_nbytes: int

    @property
    def host_ms(self) -> float:
        """What is left after the waits: on a GPU the host's own work, on a CPU the computing."""
        return self.total_ms - self.drive_wait_ms - self.row_wait_ms - self.device_wait_ms

    @property
    def read_nbytes(self) -> int:
        return self.counters.read_nbytes + self.row_read_nbytes


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine can do, measured in the same run (GiB/s); 0 where it was not measured."""

    drive_gib_s: float = 0.0
    memory_gib_s: float = 0.0  # where the residents are: RAM, or the GPU's memory
    pcie_gib_s: float = 0.0  # copies from pinned RAM to the GPU


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
    device_wait_ms_per_token: float
    host_ms_per_token: float
    read_nbytes_per_token: float
    copied_nbytes_per_token: float
    hit_rate: float  # found in RAM or VRAM
    tokens_per_pass: float  # 1 without drafts
    counters: ExpertCounters
    # per token, each on its own: drive (without wasted guesses), pcie, memory
    floors_ms: dict[str, float]
    floor_ms: float  # the largest of them
    efficiency: float  # floor_ms / achieved ms
    rates: Rates = field(default_factory=Rates)
    peak_rss_nbytes: int = 0
    peak_vram_nbytes: int = 0
    cpu_experts_per_token: float = 0.0  # computed beside a GPU
    cpu_ms_per_token: float = 0.0

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
    peak_vram_nbytes: int = 0,
) -> RunSummary:
    """Put one run's records together.

    dense_nbytes: bytes of resident weights (and on a CPU of cached experts) that one token reads from memory at least.
    """
    total = ExpertCounters()
    for token in tokens:
        total = total.plus(token.counters)
    num_tokens = sum(token.num_tokens for token in tokens)
    n = max(1, num_tokens)
    # the tokens of one pass share its time
    times = [t.total_ms / t.num_tokens for t in tokens for _ in range(t.num_tokens)]
    found = total.hits + total.vram_hits + total.sweep_hits + total.sweep_vram_hits
    asked = total.lookups + total.sweep_lookups
    read_nbytes = sum(token.read_nbytes for token in tokens) / n
    floors_ms = {
        name: nbytes / (rate * GIB) * 1e3
        for name, nbytes, rate in (
            ("drive", read_nbytes - total.wasted_nbytes / n, rates.drive_gib_s),
            ("pcie", total.copied_nbytes / n, rates.pcie_gib_s),
            ("memory", dense_nbytes, rates.memory_gib_s),
        )
        if rate
    }
    mean_ms = statistics.fmean(times) if times else 0.0
    floor_ms = max(floors_ms.values(), default=0.0)
    new_tokens = prefill.num_tokens if prefill else 0
    return RunSummary(
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_tokens - new_tokens,
        generated_tokens=num_tokens + (1 if prefill else 0),
        tokens_per_pass=num_tokens / max(1, len(tokens)),
        ttft_ms=prefill.total_ms if prefill else 0.0,
        prefill_tok_s=new_tokens / prefill.total_ms * 1e3 if prefill and prefill.total_ms else 0.0,
        decode_tok_s=1e3 / mean_ms if mean_ms else 0.0,
        inter_token_p50_ms=percentile(times, 0.5),
        inter_token_p95_ms=percentile(times, 0.95),
        drive_wait_ms_per_token=sum(token.drive_wait_ms for token in tokens) / n,
        row_wait_ms_per_token=sum(token.row_wait_ms for token in tokens) / n,
        device_wait_ms_per_token=sum(token.device_wait_ms for token in tokens) / n,
        host_ms_per_token=sum(token.host_ms for token in tokens) / n,
        read_nbytes_per_token=read_nbytes,
        copied_nbytes_per_token=total.copied_nbytes / n,
        hit_rate=found / asked if asked else 0.0,
        counters=total,
        floors_ms=floors_ms,
        floor_ms=floor_ms,
        efficiency=floor_ms / mean_ms if mean_ms else 0.0,
        rates=rates,
        peak_rss_nbytes=peak_rss_nbytes,
        peak_vram_nbytes=peak_vram_nbytes,
        cpu_experts_per_token=total.cpu_experts / n,
        cpu_ms_per_token=total.cpu_ns / 1e6 / n,
    )


def format_cpu(s: RunSummary) -> str:
    """Return the line about experts that the CPU computed beside a GPU."""
    return f"CPU: {s.cpu_experts_per_token:.1f} experts per token in {s.cpu_ms_per_token:.2f} ms beside the GPU"


def format_summary(s: RunSummary) -> str:
    """Return the lines that `chat` prints after an answer."""
    c = s.counters
    lookups = c.lookups + c.sweep_lookups  # of a pass over drafts, like a prompt's
    in_vram = c.vram_hits + c.sweep_vram_hits
    and_vram = f" and VRAM ({in_vram} of them)" if in_vram else ""
    copied = f", {format_nbytes(s.copied_nbytes_per_token)} over PCIe" if c.copied_nbytes else ""
    device = f", the GPU {s.device_wait_ms_per_token:.2f} ms" if s.device_wait_ms_per_token else ""
    lines = [
        f"{s.generated_tokens} tokens, {s.decode_tok_s:.1f} tok/s (p50 {s.inter_token_p50_ms:.1f} ms, "
        f"p95 {s.inter_token_p95_ms:.1f} ms), first token after {s.ttft_ms:.0f} ms; "
        f"prompt {s.prompt_tokens} tokens ({s.cached_tokens} cached) at {s.prefill_tok_s:.0f} tok/s",
        f"{format_nbytes(s.read_nbytes_per_token)} read per token{copied}; "
        f"experts in RAM{and_vram} {s.hit_rate:.1%} of {lookups} look-ups "
        f"({c.misses + c.sweep_misses} missed, {c.late} on their way); guesses {c.guesses_issued} issued, "
        f"{c.guesses_used} used, {c.guesses_wasted} wasted, {c.guesses_cancelled} cancelled",
        f"waiting per token: experts {s.drive_wait_ms_per_token:.2f} ms, "
        f"table rows {s.row_wait_ms_per_token:.2f} ms{device}",
    ]
    if s.tokens_per_pass > 1:
        lines.append(f"drafts: {s.tokens_per_pass:.2f} tokens per pass of the model")
    if c.early_issued:
        lines.append(f"early copies {c.early_issued}, used {c.early_used}")
    if s.cpu_experts_per_token:
        lines.append(format_cpu(s))
    if s.floor_ms:
        pcie = f", PCIe {s.rates.pcie_gib_s:.1f}" if s.rates.pcie_gib_s else ""
        vram = f", VRAM {format_nbytes(s.peak_vram_nbytes)}" if s.peak_vram_nbytes else ""
        lines.append(
            f"floor {s.floor_ms:.2f} ms per token (drive {s.rates.drive_gib_s:.2f} GiB/s, memory "
            f"{s.rates.memory_gib_s:.1f}{pcie}, measured now), efficiency {s.efficiency:.1%}; "
            f"peak memory {format_nbytes(s.peak_rss_nbytes)}{vram}"
        )
    return "\n".join(lines)
