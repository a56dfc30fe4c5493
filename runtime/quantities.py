"""Units as exponents of base units, and numbers with a unit read from text. Knows no law and no file.

Bases: B, bit, s, tok, layer, W·h is built of kW and h, and currencies. Bits and bytes are different bases on purpose,
and so are `h`, `day`, `month` and `s`: only a constant with a unit leads from one to the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CURRENCIES = ("EUR", "USD", "GBP", "CHF", "JPY", "PLN", "CNY")
SYMBOLS = {"€": "EUR", "$": "USD", "£": "GBP", "¥": "JPY", "USDT": "USD"}
MONEY = "money"  # any one currency; the inputs of a law must agree on it

GIB_BYTES = 2**30

BASES = (
    "B", "bit", "s", "tok", "layer", "W", "kW", "h", "day", "month", "Mtok", "card", "offer", MONEY,
    *CURRENCIES,
)  # fmt: skip

# a name that people write -> (factor, exponents)
_SCALED: dict[str, tuple[float, dict[str, int]]] = {
    **{name: (10.0**power, {"B": 1}) for name, power in
       (("kB", 3), ("KB", 3), ("MB", 6), ("GB", 9), ("TB", 12), ("PB", 15))},
    **{name: (float(2**power), {"B": 1}) for name, power in
       (("KiB", 10), ("MiB", 20), ("GiB", 30), ("TiB", 40))},
    **{name: (10.0**power, {"bit": 1}) for name, power in
       (("kbit", 3), ("Mbit", 6), ("Gbit", 9))},
    "ms": (1e-3, {"s": 1}),
    "us": (1e-6, {"s": 1}),
    "min": (60.0, {"s": 1}),
    "tokens": (1.0, {"tok": 1}),
    "token": (1.0, {"tok": 1}),
    "kWh": (1.0, {"kW": 1, "h": 1}),
    "months": (1.0, {"month": 1}),
    "layers": (1.0, {"layer": 1}),
    "cards": (1.0, {"card": 1}),
    "offers": (1.0, {"offer": 1}),
    "%": (0.01, {}),
    "1": (1.0, {}),
    "": (1.0, {}),
    "K": (1e3, {}),
}  # fmt: skip


class UnitError(ValueError):
    """A unit that is unknown, or that does not fit where it stands."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Exponents of base units, sorted, none zero."""

    powers: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, powers: Mapping[str, float]) -> Unit:
        return cls(tuple(sorted((name, p) for name, p in powers.items() if p)))

    def times(self, other: Unit, sign: int = 1) -> Unit:
        """Return the unit of a product, or of a quotient with sign -1."""
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) + sign * power
        return Unit.of(powers)

    def to_the(self, exponent: float) -> Unit:
        return Unit.of({name: power * exponent for name, power in self.powers})

    def without(self, base: str) -> Unit:
        return Unit.of({name: power for name, power in self.powers if name != base})

    def with_money_as(self, currency: str) -> Unit:
        return Unit.of({currency if n == MONEY else n: p for n, p in self.powers})

    @property
    def currency(self) -> str | None:
        return next((name for name, _ in self.powers if name in CURRENCIES), None)

    def __str__(self) -> str:
        above = [_power(n, p) for n, p in self.powers if p > 0]
        below = [_power(n, -p) for n, p in self.powers if p < 0]
        return "/".join(["*".join(above) or "1", *below])


def _power(name: str, power: float) -> str:
    return name if power == 1 else f"{name}^{power:g}"


NONE = Unit()


def parse_unit(text: str) -> tuple[float, Unit]:
    """Return (factor, unit) of a written unit: `GiB/s` is (2**30, B/s). Raises UnitError naming the unknown part."""
    factor, unit = 1.0, NONE
    for position, part in enumerate(str(text).replace(" ", "").split("/")):
        sign = -1 if position else 1
        for word in part.split("*"):
            name = SYMBOLS.get(word, word)
            if name in _SCALED:
                scale, powers = _SCALED[name]
                found = Unit.of(powers)
            elif name in BASES:
                scale, found = 1.0, Unit.of({name: 1})
            else:
                raise UnitError(f"unknown unit {word!r} in {text!r}")
            factor *= scale**sign
            unit = unit.times(found, sign)
    return factor, unit


def fits(wanted: Unit, given: Unit) -> bool:
    """Tell whether a number in `given` may stand where `wanted` is declared.

    `per token` may be left out (B for B/tok, s for s/tok), and any one currency stands for money.
    """
    if given.currency:
        wanted = wanted.with_money_as(given.currency)
    return given == wanted or given == wanted.without("tok")


def convert(value: float, text: str, wanted: Unit) -> float:
    """Return a value given in the written unit `text` in base units. Raises UnitError when it is of another kind."""
    factor, unit = parse_unit(text)
    if not fits(wanted, unit):
        raise UnitError(f"{value:g} {text or '(no unit)'} where {wanted} is wanted")
    return value * factor


_NUMBER = r"[-+]?(?:\d[\d.,   '’]*\d|\d)(?:[eE][-+]?\d+)?"


def parse_number(text: str) -> float | None:
    """Return a number as people write it: 1,234.5 and 1.234,5 and 1 234,5 and 2.4e9; None if it is none.

    One separator followed by exactly three digits is read as grouping when it stands twice or before another
    separator, and as a decimal sign otherwise; `parse_number_ways` gives both readings.
    """
    ways = parse_number_ways(text)
    return ways[0] if ways else None


def parse_number_ways(text: str) -> tuple[float, ...]:
    """Return every plausible reading of a number, the likeliest first: `1.024` is 1.024 or 1024."""
    body = re.sub(r"[\s  '’]", "", text.strip())
    mantissa, _, exponent = body.partition("e") if "e" in body else body.partition("E")
    if not re.fullmatch(r"[-+]?[\d.,]*\d[\d.,]*", mantissa):
        return ()
    dot, comma = mantissa.rfind("."), mantissa.rfind(",")
    if dot >= 0 and comma >= 0:
        grouping = "," if dot > comma else "."
        readings = [mantissa.replace(grouping, "").replace(",", ".")]
    elif dot < 0 and comma < 0:
        readings = [mantissa]
    else:
        sign = "." if dot >= 0 else ","
        grouped = re.fullmatch(rf"[-+]?\d{{1,3}}(\{sign}\d{{3}})+", mantissa) is not None
        plain = mantissa.replace(sign, "")
        if mantissa.count(sign) > 1:
            readings = [plain] if grouped else []
        else:
            decimal = mantissa.replace(sign, ".")
            readings = [decimal, plain] if grouped and sign == "." else [decimal]
            if grouped and sign == ",":
                readings = [plain, decimal]
    found = []
    for reading in readings:
        try:
            value = float(reading + (f"e{exponent}" if exponent else ""))
        except ValueError:
            continue
        if math.isfinite(value):
            found.append(value)
    return tuple(found)


def parse_quantity(text: str, wanted: Unit) -> float:
    """Return `8 GiB` or `448 GB/s` in base units of `wanted`. Raises UnitError with what is wrong."""
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([A-Za-z%€$£¥][\w/*%€$£¥]*)?\s*", text)
    value = parse_number(match[1]) if match else None
    if match is None or value is None:
        raise UnitError(f"{text!r} is no number with a unit (wanted: a number in {wanted})")
    return convert(value, match[2] or "", wanted)


def rounded(value: Any) -> Any:
    """Return a number at 6 significant digits (whole ones stay whole); anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if not math.isfinite(value):
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def format_value(value: float, unit: str) -> str:
    """Return a value with its unit for people, bytes in GB: `2.43 tok/s`, `296 GB`."""
    if not math.isfinite(value):
        return "never"
    if unit == "B":
        return f"{value / 1e9:,.3g} GB" if abs(value) < 1e12 else f"{value / 1e9:,.0f} GB"
    if unit == "B/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit in ("card", "offer"):
        return f"{value:g} {unit}" + ("" if value == 1 else "s")
    if unit in ("1", "") and abs(value) >= 1e9:
        return f"{value / 1e9:.3g} billion"
    if unit in ("1", ""):
        return f"{value:.3g}"
    return f"{value:,.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"
