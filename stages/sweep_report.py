"""What a sweep found: its points read from their folders, merged, shown as table, CSV, JSON and picture. No torch."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.units import MIB
from stages.bench_report import PARTS, format_table
from stages.files import write_atomically

log = logging.getLogger("stages")

POINT_NAME = "point.json"  # in each point's folder
CSV_NAME, JSON_NAME = "sweep.csv", "sweep.json"  # in the sweep's folder
RESULT_NAMES = ("bench.json", "simulate.json", "result.json")  # where the figures are, best first
UNKNOWN_MS = float("inf")
AUTOMATIC, GOOD_SHARE = "cache.ram_gib", 0.9  # null is what fits; of the best size given beside it
MAX_LINES = 12  # of the curves; more cannot be told apart
SHOWN = (  # column, figure, how it is written
    ("p50 ms", "inter_token_p50_ms", "{:.2f}"),
    ("drive ms", "drive_wait_ms", "{:.2f}"),
    ("device ms", "device_wait_ms", "{:.2f}"),
    ("host ms", "host_ms", "{:.2f}"),
    ("MiB read", "read_mib", "{:.2f}"),
    ("wasted", "wasted_mib", "{:.2f}"),
    ("hits", "hit_rate", "{:.1%}"),
    ("floor ms", "floor_ms", "{:.2f}"),
    ("efficiency", "efficiency", "{:.1%}"),
    ("J/token", "joules", "{:.2f}"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of a sweep, and what came of it."""

    name: str  # of its folder
    overrides: list[str]
    config: dict[str, Any]  # every key, dotted
    figures: dict[str, float]  # per token, where they are times or sizes; empty after an error
    error: str | None
    exit_code: int
    commit: str | None
    machine: dict[str, Any]
    versions: dict[str, str | None]
    started: float  # seconds since 1970
    duration_s: float

    def to_json(self) -> str:
        """Return what `from_json` takes."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Point:
        """Raises ValueError or TypeError when the text is no point."""
        return cls(**json.loads(text))

    @property
    def token_ms(self) -> float:
        """Milliseconds a token; infinite where it is not known."""
        rate = self.figures.get("tok_s", 0.0)
        return 1e3 / rate if rate else UNKNOWN_MS


def figures_of(folder: Path) -> dict[str, float]:
    """Return the figures that the stages left in a run's folder: of bench, simulate or chat; {} if none did."""
    for name in RESULT_NAMES:
        path = folder / name
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        s = found["total"] if "total" in found else found["summary"]
        tokens = max(1, s["generated_tokens"])
        rates = found.get("decode_tok_s", {"median": s["decode_tok_s"]})
        figures = {
            "tok_s": rates["median"],
            "tok_s_min": rates.get("min", rates["median"]),
            "tok_s_max": rates.get("max", rates["median"]),
            "inter_token_p50_ms": s["inter_token_p50_ms"],
            "inter_token_p95_ms": s["inter_token_p95_ms"],
            "drive_wait_ms": s["drive_wait_ms_per_token"],
            "row_wait_ms": s["row_wait_ms_per_token"],
            "device_wait_ms": s["device_wait_ms_per_token"],
            "host_ms": s["host_ms_per_token"],
            "read_mib": s["read_nbytes_per_token"] / MIB,
            "copied_mib": s["copied_nbytes_per_token"] / MIB,
            "wasted_mib": s["counters"]["wasted_nbytes"] / tokens / MIB,
            "hit_rate": s["hit_rate"],
            "floor_ms": s["floor_ms"],
            "efficiency": s["efficiency"],
        }
        if found.get("joules_per_token") is not None:
            figures["joules"] = found["joules_per_token"]
        return figures
    return {}


def read_points(folder: Path) -> list[Point]:
    """Return a sweep's points, ordered by the values of the keys in which they differ."""
    points = []
    for path in sorted(folder.glob(f"*/{POINT_NAME}")):
        try:
            points.append(Point.from_json(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read and is left out: %s", path, error)
    keys = swept_keys(points)
    return sorted(points, key=lambda point: [_order(point.config.get(key)) for key in keys])


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then words, then null: everything that fits, which is the most."""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return (2 if value is None else 1), 0.0, str(value)


def swept_keys(points: Sequence[Point]) -> list[str]:
    """Return the keys in which the points differ, those that were given on the command line first."""
    keys = {key: None for point in points for key in point.config}
    differ = [key for key in keys if len({_text(p.config.get(key)) for p in points}) > 1]
    given = [
        override.partition("=")[0].lstrip("+~") for point in points for override in point.overrides
    ]
    first = [key for key in dict.fromkeys(given) if key in differ]
    # a group's choice (cache=none) stands for the keys that it sets
    return first + [key for key in differ if key not in first]


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def label(point: Point, keys: Sequence[str]) -> str:
    """Return a point's values of these keys, as they are typed."""
    return " ".join(f"{key}={_text(point.config.get(key))}" for key in keys) or point.name


# ---- table -----------------------------------------------------------------------------------------------------------


def format_sweep(points: Sequence[Point]) -> str:
    """Return the table, which point is best, and what went wrong."""
    keys = swept_keys(points)
    done = [point for point in points if not point.error]
    measured = [point for point in done if point.figures]
    lines = []
    if measured:
        lines.append(_table(measured, keys))
        lines.append(
            "per token: waiting for the drive and for the device, the host's own work (on a CPU: computing), bytes"
        )
        lines += _verdict(measured, keys)
        lines += _automatic_verdict(measured, keys)
    if len(done) > len(measured):
        lines.append(f"{len(done) - len(measured)} points left no figures")
    lines += [f"failed: {label(p, keys)}: {p.error}" for p in points if p.error]
    return "\n".join(lines)


def _table(points: Sequence[Point], keys: Sequence[str]) -> str:
    best = min(points, key=lambda point: point.token_ms)
    where = {
        "commit": lambda point: point.commit,
        "machine": lambda point: point.machine.get("gpu") or point.machine.get("cpu"),
    }
    # comparable across machines and commits: named where they differ
    extra = {name: of for name, of in where.items() if len({of(point) for point in points}) > 1}
    shown = [c for c in SHOWN if any(point.figures.get(c[1]) for point in points)]
    header = ["", *keys, *extra, "tok/s", *(column for column, _, _ in shown), "mostly"]
    rows = []
    for point in points:
        figures = point.figures
        rate = f"{figures['tok_s']:.2f}"
        if figures["tok_s_min"] < figures["tok_s_max"]:
            rate += f" ({figures['tok_s_min']:.2f}..{figures['tok_s_max']:.2f})"
        cells = [form.format(figures.get(name, 0.0)) for _, name, form in shown]
        rows.append(
            ["*" if point is best else "", *(_text(point.config.get(key)) for key in keys)]
            + [str(of(point)) for of in extra.values()]
            + [rate, *cells, mostly(figures)]
        )
    return format_table(header, rows)


def mostly(figures: Mapping[str, float]) -> str:
    """Return what most of a token's time is, with its share."""
    times = {what: max(0.0, figures.get(name, 0.0)) for name, what, _ in PARTS}
    total = sum(times.values())
    if not total:
        return ""
    what = max(times, key=lambda name: times[name])
    return f"{what} {times[what] / total:.0%}"


def _verdict(points: Sequence[Point], keys: Sequence[str]) -> list[str]:
    """Say which settings win, by how much, what they save, and which are as good."""
    best = min(points, key=lambda point: point.token_ms)
    worst = max(points, key=lambda point: point.token_ms)
    if len(points) < 2 or not best.figures["tok_s"]:
        return []
    lines = [f"best: {label(best, keys)}: {best.figures['tok_s']:.2f} tok/s"]
    if worst.figures["tok_s"]:
        saved = {
            what: worst.figures.get(name, 0.0) - best.figures.get(name, 0.0)
            for name, what, _ in PARTS
        }
        what = max(saved, key=lambda part: saved[part])
        lines[0] += (
            f", {worst.token_ms / best.token_ms:.2f} times the slowest ({label(worst, keys)}): "
            f"of {worst.token_ms - best.token_ms:.2f} ms saved a token, {what} {saved[what]:.2f}"
        )
    low = best.figures["tok_s_min"]
    equal = [p for p in points if p is not best and p.figures["tok_s_max"] >= low]
    if equal and any(p.figures["tok_s_min"] < p.figures["tok_s_max"] for p in points):
        names = "; ".join(label(p, keys) for p in equal)
        lines.append(f"within the spread of the repeats as fast: {names}")
    return lines


def _automatic_verdict(points: Sequence[Point], keys: Sequence[str]) -> list[str]:
    """Say how the cache size that the plan chooses compares with those that were given beside it."""
    lines = []
    others = [key for key in keys if key != AUTOMATIC]
    for point in points:
        if AUTOMATIC not in keys or point.config.get(AUTOMATIC) is not None:
            continue
        given = [
            p for p in points
            if p.config.get(AUTOMATIC) is not None
            and all(p.config.get(key) == point.config.get(key) for key in others)
        ]  # fmt: skip
        if not given or not point.figures["tok_s"]:
            continue
        best = min(given, key=lambda p: p.token_ms)
        share = best.token_ms / point.token_ms
        where = f" ({label(point, others)})" if others else ""
        text = f"automatic cache{where}: {share:.0%} of the best size given ({label(best, [AUTOMATIC])})"
        if share < GOOD_SHARE and point.figures["tok_s_max"] < best.figures["tok_s_min"]:
            text += (
                ": WORSE than it should be; look for swapping and other programs (stages=[doctor])"
            )
        lines.append(text)
    return lines


# ---- files -----------------------------------------------------------------------------------------------------------


def write_tables(points: Sequence[Point], folder: Path) -> tuple[Path, Path]:
    """Write sweep.csv (a row per point) and sweep.json (all that is known of each); returns their paths."""
    keys = swept_keys(points)
    figures = list(dict.fromkeys(name for point in points for name in point.figures))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, *figures, "error", "commit", "cpu", "cores", "gpu", "started", "point"])
    for point in points:
        writer.writerow(
            [
                *("" if point.config.get(key) is None else point.config[key] for key in keys),
                *(point.figures.get(name, "") for name in figures),
                *(point.error or "", point.commit or ""),
                *(point.machine.get(name) or "" for name in ("cpu", "cores", "gpu")),
                *(round(point.started, 3), point.name),
            ]
        )
    document = {
        "keys": keys,
        "points": [
            {"diff": {key: point.config.get(key) for key in keys}, **asdict(point)}
            for point in points
        ],
    }
    csv_path, json_path = folder / CSV_NAME, folder / JSON_NAME
    write_atomically(csv_path, text.getvalue())
    write_atomically(json_path, json.dumps(document, indent=1) + "\n")
    return csv_path, json_path


# ---- picture ---------------------------------------------------------------------------------------------------------


def draw(points: Sequence[Point], path: Path) -> bool:
    """Draw a heat map of two keys, curves of the first key, and each point's time by its parts, as a PNG.

    Without matplotlib one warning is logged. Returns whether there is a picture.
    """
    measured = [point for point in points if point.figures.get("tok_s")]
    if not measured:
        return False
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells about its font cache
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        log.warning("no picture: matplotlib cannot be imported (%s); pip install matplotlib", error)
        return False
    keys = swept_keys(points)
    has_map = len(keys) >= 2
    width = max(11.0, 0.5 * len(measured) + 4)
    figure = Figure(figsize=(width, 9 if keys else 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    if keys:
        parts: Any = figure.subfigures(2, 1, height_ratios=(5, 4))
        upper, lower = parts
        axes = upper.subplots(1, 2 if has_map else 1, squeeze=False)[0]
        if has_map:
            _heat_map(figure, axes[0], points, keys)
        _curves(axes[-1], measured, keys)
        _bars(lower.subplots(), measured, keys)
    else:
        _bars(figure.subplots(), measured, keys)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.rename(path)
    return True


def _values(points: Sequence[Point], key: str) -> list[Any]:
    found = {_text(point.config.get(key)): point.config.get(key) for point in points}
    return sorted(found.values(), key=_order)


def _heat_map(figure: Any, axes: Any, points: Sequence[Point], keys: Sequence[str]) -> None:
    """Colour is tok/s, of the best point where further keys differ; the best is framed, failures are hatched."""
    from matplotlib.patches import Rectangle

    across, up = keys[0], keys[1]
    columns, rows = _values(points, across), _values(points, up)
    grid = [[math.nan] * len(columns) for _ in rows]
    failed = set()
    for point in points:
        x = [_text(v) for v in columns].index(_text(point.config.get(across)))
        y = [_text(v) for v in rows].index(_text(point.config.get(up)))
        if point.error:
            failed.add((x, y))
        rate = point.figures.get("tok_s", math.nan)
        if not grid[y][x] >= rate:
            grid[y][x] = rate
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=axes, label="tok/s")
    cells = {(x, y): grid[y][x] for y in range(len(rows)) for x in range(len(columns))}
    known = {place: rate for place, rate in cells.items() if not math.isnan(rate)}
    middle = (min(known.values()) + max(known.values())) / 2
    for (x, y), rate in known.items():
        color = "white" if rate < middle else "black"
        axes.text(x, y, f"{rate:.1f}", ha="center", va="center", color=color)
    for x, y in failed - set(known):
        axes.add_patch(
            Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor="grey")
        )
    x, y = max(known, key=lambda place: known[place])
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2))
    axes.set_xticks(range(len(columns)), [_text(v) for v in columns])
    axes.set_yticks(range(len(rows)), [_text(v) for v in rows])
    more = f", best over {', '.join(keys[2:])}" if len(keys) > 2 else ""
    axes.set(xlabel=across, ylabel=up, title=f"tok/s{more}")


def _curves(axes: Any, points: Sequence[Point], keys: Sequence[str]) -> None:
    """A line per combination of the other keys; bars are the least and the most of the repeats."""
    columns = [_text(v) for v in _values(points, keys[0])]
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(label(point, keys[1:]) if keys[1:] else "", []).append(point)
    by_rate = sorted(lines.items(), key=lambda item: min(p.token_ms for p in item[1]))
    for name, line in by_rate[:MAX_LINES]:
        rates = [p.figures["tok_s"] for p in line]
        low = [p.figures["tok_s"] - p.figures["tok_s_min"] for p in line]
        high = [p.figures["tok_s_max"] - p.figures["tok_s"] for p in line]
        at = [columns.index(_text(p.config.get(keys[0]))) for p in line]
        axes.errorbar(at, rates, yerr=(low, high), marker="o", capsize=3, label=name)
    title = "tok/s" if len(lines) <= MAX_LINES else f"tok/s, the best {MAX_LINES} of {len(lines)}"
    axes.set_xticks(range(len(columns)), columns)
    axes.set(xlabel=keys[0], ylabel="tok/s", title=title)
    axes.set_ylim(bottom=0)
    if keys[1:]:
        axes.legend(fontsize="small", frameon=False)


def _bars(axes: Any, points: Sequence[Point], keys: Sequence[str]) -> None:
    """Where each point's time goes, and its floor."""
    base = [0.0] * len(points)
    places = range(len(points))
    for name, what, color in PARTS:
        part = [max(0.0, point.figures.get(name, 0.0)) for point in points]
        axes.bar(places, part, bottom=base, color=color, label=what)
        base = [low + more for low, more in zip(base, part, strict=True)]
    floors = [point.figures.get("floor_ms", 0.0) for point in points]
    if any(floors):
        axes.hlines(
            floors, [x - 0.4 for x in places], [x + 0.4 for x in places],
            color="black", linestyle="--", label="floor",
        )  # fmt: skip
    names = ["\n".join(_text(point.config.get(key)) for key in keys) for point in points]
    axes.set_xticks(places, names, fontsize="small")
    axes.set(ylabel="ms a token", xlabel=", ".join(keys), title="where the time goes")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
