"""A picture of the paths: tok/s against what has to be spent, with bands, ceilings and the speed wanted."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.advisor.render import number_text

log = logging.getLogger("advisor")

COLORS = {"yes": "#009e73", "maybe": "#e69f00", "no": "#999999"}
BOUGHT = frozenset(
    ["upgrade-existing", "used-hardware", "new-single-gpu", "multi-gpu", "unified-memory"]
)
CLOUD = frozenset(["cloud-api", "cloud-gpu-rent"])


def draw(advice: Mapping[str, Any], path: Path) -> bool:
    """Draw a column a path, grouped by what has to be spent: band, ceilings and the speed wanted in tok/s.

    Returns False, and says why, without matplotlib.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        log.warning("no plot: matplotlib cannot be imported (%s); pip install matplotlib", error)
        return False
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    groups = _by_price(advice["paths"])
    columns = [p for _, paths in groups for p in paths]
    for at, p in enumerate(columns):
        _draw_path(axes, at, p)
    speeds = [v for p in columns if "speed" in p for v in p["speed"]["tok_s"] if v]
    wanted = float(advice["situation"]["min_tok_s"]["value"])
    if wanted > 0:
        axes.axhline(wanted, color="#d55e00", linestyle="--", label=f"wanted: {wanted:g} tok/s")
        speeds.append(wanted)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0.3 * min(speeds, default=1.0), None)
    axes.margins(y=0.15)
    edge = -0.5
    for price, paths in groups:
        middle = edge + len(paths) / 2
        axes.annotate(price, (middle, 1.02), xycoords=("data", "axes fraction"), ha="center")
        edge += len(paths)
        if edge < len(columns) - 0.5:
            axes.axvline(edge, color="#cccccc", linewidth=1)
    axes.plot([], [], color="black", linewidth=1.5, label="ceiling (inverse of a floor)")
    for verdict, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=verdict)
    axes.set_xlim(-0.6, len(columns) - 0.4)
    names = [p["id"] for p in columns]
    axes.set_xticks(range(len(columns)), names, rotation=35, ha="right", fontsize=9)
    axes.set_ylabel("tok/s (bar: from least to most)")
    axes.set_title(
        f"{advice['model']['name']}: the ways to run it, by what has to be spent", pad=38
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.rename(path)
    return True


def _by_price(
    paths: Sequence[Mapping[str, Any]],
) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the paths grouped by what has to be spent, the cheapest first, those without a price last."""
    groups: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for p in paths:
        price = p.get("price") or {}
        if p["id"] in CLOUD:
            key = (float("inf"), "paid by use")
        elif p["id"] not in BOUGHT or (p["id"], p["number"]["value"]) == ("upgrade-existing", 0):
            key = (0.0, "nothing to buy")
        elif price.get("amount") is not None:
            stale = "" if price["counts"] else "\nold price"
            key = (price["amount"], f"{price['amount']:,.0f} {price['currency']}{stale}")
        else:
            key = (1e300, "no price known")
        groups.setdefault(key, []).append(p)
    return [(label, groups[amount, label]) for amount, label in sorted(groups)]


def _draw_path(axes: Any, at: int, p: Mapping[str, Any]) -> None:
    color = COLORS[p["verdict"]]
    if "speed" not in p or not p["speed"]["tok_s"][1]:
        text = f"{p['verdict']}: {number_text(p['number'])}"
        axes.annotate(
            text, (at, 0.02), xycoords=("data", "axes fraction"), rotation=90, color="#555555",
            ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
        return
    low, middle, high = p["speed"]["tok_s"]
    axes.plot([at, at], [max(low, middle / 20), high], color=color, linewidth=5, alpha=0.4)
    axes.plot(
        [at], [middle], "v" if p["speed"]["is_upper_bound"] else "o", color=color, markersize=9
    )
    if p["speed"]["is_upper_bound"]:
        text, offset, ha = f"at most {middle:.3g}", (0, -16), "center"
    else:
        text, offset, ha = f"{middle:.3g}", (8, 0), "left"
    axes.annotate(
        text, (at, middle), xytext=offset, textcoords="offset points", fontsize=9, va="center",
        ha=ha, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.7},
    )  # fmt: skip
    for name, ceiling in p["speed"]["ceilings_tok_s"].items():
        axes.plot([at - 0.3, at + 0.3], [ceiling, ceiling], color="black", linewidth=1.5)
        axes.annotate(
            name, (at, ceiling), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7,
        )  # fmt: skip
