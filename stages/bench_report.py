"""What `bench` shows of its numbers: table, lines, JSON document and plot. No torch, no clock."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from conf.schema import RunConfig
from runtime.head_shares import HeadReport, format_head
from runtime.stats import Rates, RunSummary, TokenStats, format_cpu
from runtime.units import MIB, format_nbytes

log = logging.getLogger("stages")

LIBRARIES = ("torch", "triton", "numpy")
# of the config: what a speed depends on
GROUPS = ("model", "hw", "cache", "prefetch", "drafts", "deepseek", "serve", "bench")
HEADER = (
    *("repeat", "tok/s", "p50 ms", "p95 ms", "drive ms", "rows ms", "device ms", "host ms"),
    *("MiB read", "MiB PCIe", "hits", "floor ms", "efficiency"),
)
LEGEND = (
    "per token: waiting for the drive, for table rows and for the device, the host's own work (on a CPU: computing), "
    "bytes"
)
PARTS = (  # of a token's time, from the bottom of the plot
    ("drive_wait_ms", "waiting for the drive", "#d55e00"),
    ("row_wait_ms", "waiting for table rows", "#e69f00"),
    ("device_wait_ms", "waiting for the GPU", "#56b4e9"),
    ("host_ms", "host work", "#999999"),
)


@dataclass(frozen=True, slots=True)
class Repeat:
    """One repeat: prompt, warm-up, and the tokens that count (in a cold bench the warm-up is among them)."""

    prompt: TokenStats
    warmup: Sequence[TokenStats]
    tokens: Sequence[TokenStats]
    token_ids: Sequence[int]  # all that were decoded, the one after the prompt first
    summary: RunSummary
    joules: float | None = None  # of the GPU's whole board, for the counted tokens


@dataclass(frozen=True, slots=True)
class Drafted:
    """What became of the guesses, warm-up included, and what the same repeats took without them."""

    report: Mapping[str, Any]  # of runtime.drafts
    plain: Sequence[Repeat]  # without drafts, in turn with the others
    total: RunSummary  # over the counted tokens of those


@dataclass(frozen=True, slots=True)
class Bench:
    """All that a bench found."""

    rates: Rates
    plan: str  # the memory plan on one line
    repeats: Sequence[Repeat]
    total: RunSummary  # over the counted tokens of all repeats
    gpu: str | None  # its name
    peak_rss_nbytes: int
    peak_vram_nbytes: int
    drafted: Drafted | None = None  # None: decoded without drafts
    joules_per_token: float | None = None  # None: no GPU, or one that does not count
    conversations: int = 1  # decoded together
    head: HeadReport | None = None  # None: computed by CPU or GPU alone
    drive_gib_s: Sequence[float] = ()  # each time that it was measured; `rates` has the mean

    @property
    def is_repeatable(self) -> bool:
        """Whether every repeat decoded the same tokens, with and without drafts, as it must."""
        plain = [] if self.drafted is None else self.drafted.plain
        first = list(self.repeats[0].token_ids)
        return all(list(repeat.token_ids) == first for repeat in [*self.repeats, *plain])


# ---- text ------------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, least, most)."""
    return statistics.median(values), min(values), max(values)


def table_rows(summaries: Sequence[RunSummary], total: RunSummary) -> list[tuple[str, ...]]:
    """Return a row of cells per repeat, and one over all of them whose tok/s is `median (least..most)`."""
    rows = [
        (str(number), f"{s.decode_tok_s:.2f}", *_cells(s)) for number, s in enumerate(summaries, 1)
    ]
    median, least, most = spread([s.decode_tok_s for s in summaries])
    return [*rows, ("all", f"{median:.2f} ({least:.2f}..{most:.2f})", *_cells(total))]


def _cells(s: RunSummary) -> tuple[str, ...]:
    times = (
        s.inter_token_p50_ms, s.inter_token_p95_ms, s.drive_wait_ms_per_token, s.row_wait_ms_per_token,
        s.device_wait_ms_per_token, s.host_ms_per_token,
    )  # fmt: skip
    sizes = (s.read_nbytes_per_token, s.copied_nbytes_per_token)
    return (
        *(f"{ms:.2f}" for ms in times),
        *(f"{nbytes / MIB:.2f}" for nbytes in sizes),
        f"{s.hit_rate:.1%}",
        f"{s.floor_ms:.2f}",
        f"{s.efficiency:.1%}",
    )


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def format_prompt(prompts: Sequence[TokenStats]) -> str:
    """Return the line about the prompt: its first reading, and the median of the later ones."""
    line = f"prompt: {prompts[0].num_tokens} tokens in {_reading(prompts[:1])}"
    return f"{line}; later repeats {_reading(prompts[1:])}" if prompts[1:] else line


def _reading(prompts: Sequence[TokenStats]) -> str:
    ms = statistics.median(prompt.total_ms for prompt in prompts)
    rate = prompts[0].num_tokens / ms * 1e3 if ms else 0.0
    nbytes = statistics.median(prompt.read_nbytes for prompt in prompts)
    return f"{ms / 1e3:.3f} s ({rate:.1f} tok/s), {format_nbytes(nbytes)} read"


def format_drafts(drafted: Drafted, repeats: Sequence[Repeat], total: RunSummary) -> list[str]:
    """Return the lines about drafts; the table's tok/s and bytes include what the drafts cost."""
    r = drafted.report
    share = r["accepted"] / r["proposed"] if r["proposed"] else 0.0
    lines = [
        f"drafts ({r['source']}): {total.tokens_per_pass:.2f} tokens per pass of the model, {r['accepted']} of "
        f"{r['proposed']} guesses accepted ({share:.0%}); their time and bytes are counted in",
        f"in turn, with drafts {_speed(repeats, total)}; without {_speed(drafted.plain, drafted.total)}",
    ]
    if r["gate"] is not None:
        lines.append(format_gate(r["gate"]))
    return lines


def _speed(repeats: Sequence[Repeat], total: RunSummary) -> str:
    median, _, _ = spread([repeat.summary.decode_tok_s for repeat in repeats])
    return f"{median:.2f} tok/s and {format_nbytes(total.read_nbytes_per_token)} read per token"


def format_gate(gate: Mapping[str, Any]) -> str:
    """Return the line about the gate: what it prefers, and what it has learnt of each depth."""
    choice = f"{gate['depth']} guesses a pass are fastest"
    if gate["is_learning"]:
        choice = "still learning"
    elif gate["is_off"]:
        choice = "drafts lose here and are off"
    parts = [
        f"{d['guesses']}: {d['ms_per_pass']:.1f} ms, {d['mib_per_pass']:.2f} MiB, {d['tokens_per_pass']:.2f} tokens"
        for d in gate["depths"]
        if d["passes"]
    ]
    return f"gate: {choice}; a pass with guesses " + "; ".join(parts)


def format_together(bench: Bench) -> str:
    """Return the line about conversations decoded together; the table's tok/s are of all of them."""
    count = bench.conversations
    return f"{count} conversations decoded together: each gets {bench.total.decode_tok_s / count:.2f} tok/s"


def format_rates(rates: Rates, drive_gib_s: Sequence[float] = ()) -> str:
    """Return the line about the machine's rates, without those that were not measured.

    drive_gib_s: of the drive, if it was measured several times.
    """
    named = {"drive": rates.drive_gib_s, "memory": rates.memory_gib_s, "PCIe": rates.pcie_gib_s}
    parts = [f"{name} {rate:.2f} GiB/s" for name, rate in named.items() if rate]
    if len(drive_gib_s) > 1:
        parts[0] += f" ({min(drive_gib_s):.2f}..{max(drive_gib_s):.2f})"
    return f"measured in this run: {', '.join(parts) or 'nothing'}"


def format_report(bench: Bench) -> str:
    """Return all that is printed."""
    summaries = [repeat.summary for repeat in bench.repeats]
    peaks = f"peak memory {format_nbytes(bench.peak_rss_nbytes)}"
    if bench.peak_vram_nbytes:
        peaks += f", VRAM {format_nbytes(bench.peak_vram_nbytes)}"
    if bench.joules_per_token is not None:
        peaks += f"; {bench.joules_per_token:.2f} J a token, of the GPU's board alone"
    drafts: list[str] = []
    if bench.drafted is not None:
        drafts = format_drafts(bench.drafted, bench.repeats, bench.total)
    together = [format_together(bench)] if bench.conversations > 1 else []
    cpu = [format_cpu(bench.total)] if bench.total.cpu_experts_per_token else []
    head = [format_head(bench.head)] if bench.head is not None else []
    return "\n".join(
        (
            format_table(HEADER, table_rows(summaries, bench.total)),
            LEGEND,
            *drafts,
            *together,
            *cpu,
            *head,
            format_prompt([repeat.prompt for repeat in bench.repeats]),
            format_rates(bench.rates, bench.drive_gib_s),
            bench.plan,
            peaks,
        )
    )


# ---- JSON ------------------------------------------------------------------------------------------------------------


def document(bench: Bench, cfg: RunConfig, folder: Path) -> dict[str, Any]:
    """Return all numbers as plain JSON values; milliseconds, bytes and GiB/s, as the keys say.

    folder: where the artifacts are; its filesystem's free bytes are noted.
    """
    median, least, most = spread([repeat.summary.decode_tok_s for repeat in bench.repeats])
    return {
        "model": cfg.model.name,
        "config": {group: _plain(getattr(cfg, group)) for group in GROUPS},
        "changed": changed_keys(cfg),
        "rates": asdict(bench.rates),
        "drive_gib_s": list(bench.drive_gib_s),
        "plan": bench.plan,
        "decode_tok_s": {"median": median, "min": least, "max": most},
        "is_repeatable": bench.is_repeatable,
        "joules_per_token": bench.joules_per_token,
        "conversations": bench.conversations,
        "head": None if bench.head is None else asdict(bench.head),
        "drafted": None if bench.drafted is None else _drafted(bench.drafted),
        "repeats": [_repeat(repeat) for repeat in bench.repeats],
        "total": bench.total.to_dict(),
        "peak_rss_nbytes": bench.peak_rss_nbytes,
        "peak_vram_nbytes": bench.peak_vram_nbytes,
        "versions": versions(),
        "machine": machine(folder) | {"gpu": bench.gpu},
    }


def _drafted(drafted: Drafted) -> dict[str, Any]:
    return {
        **drafted.report,
        "plain": {
            "repeats": [_repeat(repeat) for repeat in drafted.plain],
            "total": drafted.total.to_dict(),
        },
    }


def _repeat(repeat: Repeat) -> dict[str, Any]:
    return {
        "prompt": _token(repeat.prompt),
        "summary": repeat.summary.to_dict(),
        "token_ids": list(repeat.token_ids),
        "warmup": [_token(token) for token in repeat.warmup],
        "tokens": [_token(token) for token in repeat.tokens],
    }


def _token(token: TokenStats) -> dict[str, Any]:
    return {**asdict(token), "host_ms": token.host_ms, "read_nbytes": token.read_nbytes}


def changed_keys(cfg: RunConfig) -> dict[str, Any]:
    """Return the dotted keys, of the groups that matter, whose values are not the schema's defaults."""
    found, default = _flat(cfg), _flat(RunConfig())
    return {key: value for key, value in found.items() if value != default[key]}


def _flat(cfg: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                walk(f"{prefix}.{name}", item)
        else:
            flat[prefix] = value

    for group in GROUPS:
        walk(group, _plain(getattr(cfg, group)))
    return flat


def _plain(value: Any) -> Any:
    """Return a config's value as JSON has it: groups as dicts, enums by their values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(item) for name, item in asdict(value).items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the libraries that compute; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine(folder: Path) -> dict[str, Any]:
    """Return what a reader must know of this machine to compare numbers."""
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "machine_cores": os.cpu_count(),
        "kernel": platform.release(),
        "free_disk_nbytes": shutil.disk_usage(folder).free,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()  # ARM kernels name no model


# ---- plot ------------------------------------------------------------------------------------------------------------


def draw(bench: Bench, path: Path) -> bool:
    """Draw where each counted token's time went, as a PNG; without matplotlib one warning is logged, and no plot made.

    Returns whether there is a plot.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells about its font cache
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        log.warning("no plot: matplotlib cannot be imported (%s); pip install matplotlib", error)
        return False
    tokens = [token for repeat in bench.repeats for token in repeat.tokens]
    edges = [number + 0.5 for number in range(len(tokens) + 1)]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    times, sizes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    base = [0.0] * len(tokens)
    for name, label, color in PARTS:
        top = [
            low + max(0.0, getattr(token, name)) for low, token in zip(base, tokens, strict=True)
        ]
        times.stairs(top, edges, baseline=base, fill=True, color=color, label=label)
        base = top
    if bench.total.floor_ms:
        floor = f"floor {bench.total.floor_ms:.2f} ms"
        times.axhline(bench.total.floor_ms, color="black", linestyle="--", label=floor)
    read = [token.read_nbytes / MIB for token in tokens]
    copied = [token.counters.copied_nbytes / MIB for token in tokens]
    sizes.stairs(read, edges, color="#0072b2", label="MiB read")
    sizes.stairs(copied, edges, color="#009e73", label="MiB over PCIe")
    start = 0.5
    for repeat in bench.repeats[:-1]:
        start += len(repeat.tokens)
        for axes in (times, sizes):
            axes.axvline(start, color="black", linewidth=0.8)
    median, _, _ = spread([repeat.summary.decode_tok_s for repeat in bench.repeats])
    times.set(ylabel="ms", title=f"{median:.2f} tok/s, median of {len(bench.repeats)} repeats")
    sizes.set(ylabel="MiB", xlabel="token")
    times.set_xlim(edges[0], edges[-1])
    for axes in (times, sizes):
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.rename(path)
    return True
