"""Advice for people: a table for the terminal, Markdown, and a picture of the paths. No law and no verdict here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.quantities import format_value

log = logging.getLogger("advisor")

COLORS = {"yes": "#009e73", "maybe": "#e69f00", "no": "#999999"}
REPORT_HEADER = ("run", "role", "law", "predicted", "measured", "error")


def number_text(number: Mapping[str, Any]) -> str:
    """Return a path's number with its unit."""
    return format_value(float(number["value"]), number["unit"])


def format_advice(advice: Mapping[str, Any]) -> str:
    """Return all that is printed: assumptions first, a line a path, then questions and prices with their age."""
    model, machine = advice["model"], advice["machine"]
    head = f"{model['name']} ({model['variant']}) on {machine['name'] if machine else 'a machine that is not known'}"
    lines = [head]
    if advice["assumptions"]:
        said = ", ".join(_assumed(a) for a in advice["assumptions"])
        lines.append(f"assumed, as it was not told: {said}")
    widths = [
        max(len(p["id"]) for p in advice["paths"]),
        max(len(number_text(p["number"])) for p in advice["paths"]),
    ]
    lines.append("")
    for path in advice["paths"]:
        _, _, reason = path["reason"].partition(": ")
        number = number_text(path["number"])
        lines.append(
            f"{path['id']:{widths[0]}}  {path['verdict']:5}  {number:>{widths[1]}}  {reason}"
        )
    if advice["prices"]:
        lines += ["", "prices:"]
        lines += [f"  {price_line(p)}" for p in advice["prices"]]
    if advice["questions"]:
        lines += ["", "would be good to know:", *(f"  {q}" for q in advice["questions"])]
    lines += [
        "",
        f"as of {advice['as_of']}, knowledge base {advice['kb_version']}; nothing was fetched",
    ]
    return "\n".join(lines)


def _assumed(a: Mapping[str, Any]) -> str:
    unit = f" {a['unit']}" if a["unit"] and a["unit"] != "1" else ""
    return (
        f"{a['key']} = {a['value']:g}{unit}"
        if isinstance(a["value"], (int, float))
        else f"{a['key']} = {a['value']}"
    )


def price_line(p: Mapping[str, Any]) -> str:
    """Return one offer with its day and age."""
    state = "" if p["counts"] else f"; does not count: {', '.join(p['why_not'])}"
    return f"{p['item']}, {p['condition']}: {p['amount']:g} {p['currency']} in {p['region']} on {p['date']}, {p['age_days']} days old{state}"


def format_reports(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the published runs as rows of cells: predicted against measured."""
    found: list[tuple[str, ...]] = []
    for row in rows:
        low, high = row["measured"]
        measured = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        found.append(
            (
                row["run"],
                row["role"],
                row["law"],
                f"{row['predicted']:.3g} {row['unit']}",
                f"{measured} {row['unit']}",
                f"{row['error']:+.1%}",
            )
        )
    return found


def to_markdown(advice: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the advice as Markdown, made from its JSON."""
    model, machine = advice["model"], advice["machine"]
    lines = [
        f"# {model['name']} ({model['variant']}) on {machine['name'] if machine else 'a machine that is not known'}",
        "",
    ]
    if advice["question"]:
        lines += [f"> {advice['question']}", ""]
    if advice["assumptions"]:
        lines += [
            "Assumed, as it was not told: "
            + ", ".join(_assumed(a) for a in advice["assumptions"])
            + ".",
            "",
        ]
    lines += ["| path | verdict | number | why | laws and rules |", "|---|---|---|---|---|"]
    for p in advice["paths"]:
        _, _, reason = p["reason"].partition(": ")
        rules = [f"{r['id']} {r['status']}" for r in p["rules"] if r["status"] != "pass"]
        lines.append(
            f"| {p['name']} | **{p['verdict']}** | {number_text(p['number'])} | {reason.replace('|', '/')} | {', '.join([*p['laws'], *rules])} |"
        )
    if advice["prices"]:
        lines += ["", "## Prices", "", *(f"- {price_line(p)}" for p in advice["prices"])]
    if advice["questions"]:
        lines += ["", "## Would be good to know", "", *(f"- {q}" for q in advice["questions"])]
    lines += ["", "## Calculations", "", "| | law | inputs | result |", "|---|---|---|---|"]
    for c in advice["calculations"]:
        inputs = ", ".join(
            f"{n} = {v['value']:g} {v['unit']}".removesuffix(" 1") for n, v in c["inputs"].items()
        )
        result = (
            "never"
            if c["result"]["value"] is None
            else f"{c['result']['value']:g} {c['result']['unit']}"
        )
        lines.append(f"| {c['ref']} | {c['law']} | {inputs} | {result} |")
    lines += [
        "",
        "## Published runs, predicted and measured",
        "",
        "| " + " | ".join(REPORT_HEADER) + " |",
        "|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(cells) + " |" for cells in format_reports(rows)]
    lines += ["", f"As of {advice['as_of']}, knowledge base {advice['kb_version']}."]
    return "\n".join(lines) + "\n"


def draw(advice: Mapping[str, Any], path: Path) -> bool:
    """Draw tok/s against money: a bar from least to most a path, its ceilings, the speed wanted. False: no matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        log.warning("no plot: matplotlib cannot be imported (%s); pip install matplotlib", error)
        return False
    shown = [p for p in advice["paths"] if "speed" in p and p["speed"]["tok_s"][1]]
    bought = {"upgrade-existing", "used-hardware", "new-single-gpu", "multi-gpu", "unified-memory"}
    costs = [0.0 if p["id"] not in bought else (p.get("price") or {}).get("amount") for p in shown]
    known = [c for c in costs if c]
    currency = next((p["price"]["currency"] for p in shown if p.get("price")), "EUR")
    edge = 1.3 * max(known, default=1000.0)
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = edge / 60
    taken: dict[float, int] = {}
    for p, cost in zip(shown, costs, strict=True):
        place = edge if cost is None else cost
        taken[place] = taken.get(place, 0) + 1
        at = place + width * 2.2 * (taken[place] - 1)
        low, middle, high = p["speed"]["tok_s"]
        color = COLORS[p["verdict"]]
        axes.plot([at, at], [max(low, middle / 20), high], color=color, linewidth=3, alpha=0.5)
        axes.plot([at], [middle], "o", color=color)
        for ceiling in p["speed"]["ceilings_tok_s"].values():
            axes.plot([at - width, at + width], [ceiling, ceiling], color="black", linewidth=1)
        axes.annotate(f" {p['id']}", (at, middle), rotation=45, fontsize=7, va="bottom")
    wanted = float(advice["situation"]["min_tok_s"]["value"])
    if wanted > 0:
        axes.axhline(wanted, color="#d55e00", linestyle="--", label=f"wanted: {wanted:g} tok/s")
    axes.plot([], [], color="black", linewidth=1, label="ceiling (inverse of a floor)")
    for verdict, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=verdict)
    axes.set_yscale("log")
    axes.set_xlim(-2 * width, edge * 1.35)
    axes.axvline(edge - 3 * width, color="#cccccc", linewidth=1)
    ticks = {0.0: "0", **{c: f"{c:,.0f}" for c in known}, edge: "no price known"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set(
        xlabel=f"{currency} to be spent; ways of one price stand side by side",
        ylabel="tok/s",
        title=f"{advice['model']['name']}: the ways to run it",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.rename(path)
    return True
