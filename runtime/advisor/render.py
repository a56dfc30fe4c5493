"""Advice for people: a table for the terminal, and Markdown. No law and no verdict here."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.advisor.money import place
from runtime.quantities import format_value

REPORT_HEADER = ("run", "role", "law", "predicted", "measured", "error", "ceiling")


def number_text(number: Mapping[str, Any]) -> str:
    """Return a path's number with its unit."""
    return format_value(float(number["value"]), number["unit"])


def format_advice(advice: Mapping[str, Any], width: int | None = None) -> str:
    """Return all that is printed: what was heard and assumed first, a line a path, then questions and prices with age.

    width: columns to wrap at; None leaves each path on one line.
    """
    lines = [*head_lines(advice), f"in short: {summary(advice)}"]
    widths = [
        max(len(p["id"]) for p in advice["paths"]),
        max(len(number_text(p["number"])) for p in advice["paths"]),
    ]
    lines.append("")
    for path in advice["paths"]:
        number = number_text(path["number"])
        start = f"{path['id']:{widths[0]}}  {path['verdict']:5}  {number:>{widths[1]}}  "
        text = start + reason_text(path)
        if width is not None and len(start) + 30 < width:
            text = textwrap.fill(text, width, subsequent_indent=" " * len(start))
        lines.append(text)
    if advice["own_runs"]:
        lines += ["", "your benches:", *(f"  {own_line(row)}" for row in advice["own_runs"])]
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


def head_lines(advice: Mapping[str, Any]) -> list[str]:
    """Return the lines that say what is asked: model and machine, what the question said, what was assumed."""
    model, machine = advice["model"], advice["machine"]
    lines = [
        f"{model['name']} ({model['variant']}) on {machine['name'] if machine else 'a machine that is not known'}"
    ]
    heard = advice["heard"]
    if heard:
        keys = [
            _assumed({"key": k, "value": v, "unit": None}) for k, v in heard["situation"].items()
        ]
        said = ", ".join(filter(None, [*keys, heard["hardware"]]))
        lines.append(
            f"heard in the question: {said or 'no number and no part that the base knows'}"
        )
        if heard["unknown_cards"]:
            lines.append(
                f"not in the knowledge base, and left out: {', '.join(heard['unknown_cards'])}"
            )
    measured = machine["measured"] if machine else None
    if measured:
        rates = (
            ("drive", machine["disk_bw"]),
            ("link", machine["pcie_bw"]),
            ("RAM", machine["ram_bw"]),
        )
        said = ", ".join(f"{name} {format_value(v, 'B/s')}" for name, v in rates if v)
        unsteady = ", ".join(measured["unsteady"])
        note = f" (not steady from run to run: {unsteady}; run it again)" if unsteady else ""
        lines.append(f"measured here by stages=[doctor] on {measured['when'][:10]}: {said}{note}")
    if advice["unverified"]:
        lines.append(f"data that nobody has looked up: {', '.join(advice['unverified'])}")
    if advice["assumptions"]:
        assumed = ", ".join(_assumed(a) for a in advice["assumptions"])
        lines.append(f"assumed, as it was not told: {assumed}")
    return lines


def summary(advice: Mapping[str, Any]) -> str:
    """Return the answer in a sentence: whether it runs on what there is, and which ways are open."""
    paths = {p["id"]: p for p in advice["paths"]}
    keep = paths["keep-existing"]
    yes = [p for p in advice["paths"] if p["verdict"] == "yes" and p is not keep]
    maybe = [p["id"] for p in advice["paths"] if p["verdict"] == "maybe"]
    others = ", ".join(f"{p['id']} ({number_text(p['number'])})" for p in yes)
    if keep["verdict"] == "yes":
        said = f"it runs on what you have, {number_text(keep['number'])}"
        return f"{said}; {others} would do too" if others else said
    start = "not on what you have" if keep["verdict"] == "no" else "it may run on what you have"
    if keep["verdict"] == "maybe" and keep["question"]:
        start += f" ({str(keep['question']).partition(' (')[0].rstrip('?')}?)"
    if others:
        return f"{start}; {others} would do"
    open_ways = [name for name in maybe if name != "keep-existing"]
    return f"{start}; {len(open_ways)} other ways are open, each with its question below"


def reason_text(path: Mapping[str, Any]) -> str:
    """Return a path's reason without its verdict, and without the number where that stands beside it."""
    _, _, reason = path["reason"].partition(": ")
    rest = reason.removeprefix(number_text(path["number"]))
    if rest == reason:
        return str(reason)
    return str(rest.lstrip(";, ")) or str(reason)


def _assumed(a: Mapping[str, Any]) -> str:
    if isinstance(a["value"], bool):
        return f"{a['key']} = {'yes' if a['value'] else 'no'}"
    unit = f" {a['unit']}" if a["unit"] and a["unit"] != "1" else ""
    return (
        f"{a['key']} = {a['value']:g}{unit}"
        if isinstance(a["value"], (int, float))
        else f"{a['key']} = {a['value']}"
    )


def own_line(row: Mapping[str, Any]) -> str:
    """Return one own bench beside what the laws say of it."""
    low, high = row["measured"]
    most = "at most " if row["role"] == "bound" else ""
    said = (
        f"{row['run']}: {low:.3g} to {high:.3g} tok/s measured; the laws say {most}{row['predicted']:.3g}, "
        f"ceiling {row['ceiling']:.3g}"
    )
    if row["is_above_ceiling"]:
        said += (
            "; above the ceiling: the drive's rate is too low, measure again with stages=[doctor]"
        )
    return said


def price_line(p: Mapping[str, Any]) -> str:
    """Return one offer with its day and age."""
    state = "" if p["counts"] else f"; does not count: {', '.join(p['why_not'])}"
    return f"{p['name']}, {p['condition']}: {p['amount']:g} {p['currency']} ({place(p['region'])}) on {p['date']}, {p['age_days']} days old{state}"


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
                "" if row["ceiling"] is None else f"{row['ceiling']:.3g} {row['unit']}",
            )
        )
    return found


def to_markdown(advice: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the advice as Markdown, made from its JSON."""
    title, *told = head_lines(advice)
    lines = [f"# {title}", ""]
    if advice["question"]:
        lines += [f"> {advice['question']}", ""]
    for line in (*told, f"in short: {summary(advice)}"):
        lines += [f"{line[0].upper()}{line[1:]}.", ""]
    lines += ["| path | verdict | number | why | laws and rules |", "|---|---|---|---|---|"]
    for p in advice["paths"]:
        reason = reason_text(p)
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
            else f"{c['result']['value']:g} {c['result']['unit']}".removesuffix(" 1")
        )
        lines.append(f"| {c['ref']} | {c['law']} | {inputs} | {result} |")
    lines += [
        "",
        "## Published runs and your own, predicted and measured",
        "",
        "| " + " | ".join(REPORT_HEADER) + " |",
        "|" + "---|" * len(REPORT_HEADER),
    ]
    cells = format_reports([*rows, *advice["own_runs"]])
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    lines += ["", f"As of {advice['as_of']}, knowledge base {advice['kb_version']}."]
    return "\n".join(lines) + "\n"
