"""Checks of a draft's text: numbers in prose, values that were dropped, the language."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator
from typing import Any

from runtime.advisor import identity, lang
from runtime.advisor.draft import PROSE_TOLERANCE, Draft, Fault, ends, find_run, near
from runtime.advisor.slips import slip_name
from runtime.quantities import SYMBOLS, UnitError, fits, parse_number_ways, parse_unit

_UNITS = (
    "tok/s",
    "tokens/s",
    "t/s",
    "GiB/s",
    "GB/s",
    "MiB/s",
    "MB/s",
    "TiB",
    "TB",
    "GiB",
    "GB",
    "MiB",
    "MB",
    "EUR/kWh",
    "EUR/Mtok",
    "USD/Mtok",
    "EUR",
    "€",
    "USD",
    "$",
    "W",
    "months",
    "month",
    "Monate",
    "Monaten",
    "месяцев",
    "h",
    "hours",
    "Stunden",
    "%",
    "ms",
)
# at most eight groups: without a bound, a text of groups and no unit takes quadratic time
_NUMBER = r"(?:\d{1,3}(?:[   ']\d{3}){1,8}(?:[.,]\d{1,20})?|\d{1,20}(?:[.,]\d{1,20}){0,8})"
MAX_GUESSES = 50  # numbers from nowhere for which a slip is looked for
_ALL_UNITS = "|".join(re.escape(u) for u in sorted(_UNITS, key=len, reverse=True))
_PROSE = re.compile(
    rf"(?<![\w.,/-])(?:(?P<before>[€$£])\s?(?P<n1>{_NUMBER})|(?P<n2>{_NUMBER})\s?(?P<unit>{_ALL_UNITS})(?![\w/]))"
)
_WORD_UNITS = {
    "Monate": "month",
    "Monaten": "month",
    "месяцев": "month",
    "months": "month",
    "hours": "h",
    "Stunden": "h",
    "t/s": "tok/s",
    "tokens/s": "tok/s",
}


def numbers_in(text: str) -> Iterator[tuple[str, tuple[float, ...], str]]:
    """Yield (as written, its readings, unit) of every number with a unit, in European and American ways of writing."""
    for match in _PROSE.finditer(text):
        unit = match["unit"] or SYMBOLS[match["before"]]
        unit = _WORD_UNITS.get(unit, SYMBOLS.get(unit, unit))
        readings = parse_number_ways((match["n1"] or match["n2"]).rstrip(".,"))
        if readings:
            yield match[0].strip(), readings, unit


def _prose(d: Draft) -> Iterator[Fault]:
    """Every number with a unit in the text must be a calculation, a fact, a price or a value of the situation."""
    known = _known_numbers(d)
    text = re.sub(r"https?://\S+", " ", d.text)
    for entity in d.block["entities"]:
        text = text.replace(entity["name"], " ")
    for document in d.documents.values():
        for alias in (document["name"], *document.get("aliases", ())):
            text = text.replace(alias, " ")
    by_unit: dict[str, _Known] = {}
    guesses = 0
    for shown, readings, unit in dict.fromkeys(numbers_in(text)):
        if unit not in by_unit:
            by_unit[unit] = _Known.of(unit, known)
        alike = by_unit[unit]
        values = [r * alike.factor for r in readings]
        if any(alike.has(v, shown) for v in values):
            continue
        slip = None
        if guesses < MAX_GUESSES:
            guesses += 1
            slips = (slip_name(v, k, {}, d.situation) for v in values for k in alike.numbers)
            slip = next((s for s in slips if s and "power of ten" in s), None)
        said = f"; perhaps {slip}" if slip else ""
        yield Fault(
            "E-UNIT",
            "text",
            f"{shown!r} in the text matches no calculation, fact, price or value of the situation{said}",
            "compute it, or leave it out",
            got=shown,
        )


class _Known:
    """The numbers of a draft that a unit can be compared with, sorted, so that a long text is looked up fast."""

    def __init__(self, factor: float, numbers: list[float]) -> None:
        self.factor, self.numbers = factor, sorted(set(numbers))
        self._rounded: dict[int, set[str]] = {}

    @classmethod
    def of(cls, unit: str, known: list[tuple[float, Any]]) -> _Known:
        factor, parsed = parse_unit(unit)
        return cls(factor, [k for k, u in known if _alike(parsed, u)])

    def has(self, value: float, shown: str) -> bool:
        """Tell whether a number is near one of these, or one of these as it is displayed with as many digits."""
        at = bisect.bisect_left(self.numbers, value)
        if any(near(value, k, PROSE_TOLERANCE) for k in self.numbers[max(0, at - 1) : at + 1]):
            return True
        digits = len(re.sub(r"\D", "", shown).lstrip("0")) or 1
        if digits < 2:
            return False
        if digits not in self._rounded:
            self._rounded[digits] = {f"{k / self.factor:.{digits}g}" for k in self.numbers}
        return f"{value / self.factor:.{digits}g}" in self._rounded[digits]


def _alike(one: Any, other: Any) -> bool:
    return bool(fits(one, other) or fits(other, one))


def _known_numbers(d: Draft) -> list[tuple[float, Any]]:
    found: list[tuple[float, Any]] = []

    def add(value: Any, unit: str) -> None:
        try:
            factor, parsed = parse_unit(unit)
        except UnitError:
            return
        if isinstance(value, (int, float)) and math.isfinite(value):
            found.append((value * factor, parsed))
            inverse = parsed.to_the(-1)
            if value and str(inverse) == "tok/s":
                found.append((1 / (value * factor), inverse))

    for entry in d.block["calculations"]:
        for given in (*entry["inputs"].values(), entry["result"]):
            add(given["value"], given["unit"])
    for value, unit in d.results.values():
        add(value, unit)
    for path in d.block["paths"]:
        number = path.get("number") or {}
        add(number.get("value"), str(number.get("unit", "")))
    for core in d.core.values():
        add(core.number, core.unit)
        add(core.threshold, core.unit)
        for name, value in core.extra.items():
            add(value, {"watts": "W"}.get(name, "B" if name.endswith("_bytes") else "1"))
    for name, value in d.situation.values.items():
        add(value, d.situation.units.get(name, "1"))
    for price in d.block["prices"]:
        add(price["amount"], price["currency"])
    for kind, documents in (("model", d.documents.values()), ("variant", d.variants.values())):
        for document in documents:
            schema = d.kb.schemas[
                "model" if kind == "variant" else document["id"].partition("-")[0]
            ]
            properties = schema["properties"]
            if kind == "variant":
                properties = properties["variants"]["items"]["properties"]
            for name, value in document.items():
                add(value, properties.get(name, {}).get("x-unit", "1"))
    for name in [*d.block["evidence"], *(p.get("run") for p in d.block["paths"])]:
        run = find_run(d, name)
        if run is not None:
            for value in ends(run):
                add(value, run["unit"])
    if d.machine is not None:
        machine = d.machine
        add(machine.ram_bytes, "B")
        for rate in (machine.disk_bw, machine.pcie_bw, machine.ram_bw):
            add(rate, "B/s")
        for document in (*d.machine.gpus, *d.machine.drives):
            schema = d.kb.schemas.get(str(document["id"]).partition("-")[0], {"properties": {}})
            for name, value in document.items():
                add(value, schema["properties"].get(name, {}).get("x-unit", "1"))
    return found


def _dropped(d: Draft) -> Iterator[Fault]:
    """A known key may only change by being said anew in the last message."""
    for key, before in sorted(d.known_before.items()):
        entry = d.block["situation"].get(key)
        if entry is None or entry["status"] != "known":
            yield Fault(
                "E-DROP",
                f"situation.{key}",
                f"{key} was known as {before!r} and is gone",
                "keep it",
                before,
            )
            continue
        now = entry["value"]
        is_same = (
            near(now, before, 1e-9)
            if isinstance(now, (int, float)) and isinstance(before, (int, float))
            else now == before
        )
        if not is_same and not _is_said(now, d.last_message):
            yield Fault(
                "E-DROP",
                f"situation.{key}",
                f"{key} was {before!r} and is now {now!r}, which the last message does not say",
                "keep it",
                before,
                now,
            )


def _is_said(value: Any, message: str) -> bool:
    if isinstance(value, bool):
        return bool(message.strip())
    if isinstance(value, (int, float)):
        words = re.findall(r"\d[\d.,'  ]*\d|\d", message)
        return any(
            near(r, value, 1e-6) or near(r * 1000, value, 1e-6)
            for w in words
            for r in parse_number_ways(w.rstrip(".,"))
        )
    return str(value).lower() in message.lower() or len(str(value)) == 2


def _language(d: Draft) -> Iterator[Fault]:
    names = frozenset(
        t
        for doc in d.documents.values()
        for a in (doc["name"], *doc.get("aliases", ()))
        for t in identity.tokens(a)
    )
    mine = lang.detect(d.text, names)
    asked = lang.detect(d.last_message, names) if d.last_message else None
    said = d.block["language"]
    wanted = asked or said
    if mine is None:
        yield Fault(
            "E-LANG",
            "text",
            f"the text has fewer than {lang.MIN_WORDS} words or no clear language: not judged",
            "nothing to do",
            is_warning=True,
        )
    elif mine != wanted:
        asked_in = "the last message is in" if asked else "the block says"
        yield Fault(
            "E-LANG",
            "text",
            f"the text is in {mine}, {asked_in} {wanted}",
            f"write it in {wanted}",
            wanted,
            mine,
        )


CHECKS = (_prose, _dropped, _language)
