"""Known mistakes of arithmetic: by what ratio a number is off, and what that ratio is called."""

from __future__ import annotations

import math
from collections.abc import Mapping

from runtime.advisor.draft import near
from runtime.advisor.facts import Situation


def slip_name(
    got: float, wanted: float, inputs: Mapping[str, tuple[float, str]], situation: Situation
) -> str | None:
    """Return the name of the mistake that turns one number into the other, if it is a known one."""
    if not wanted or not got or not math.isfinite(wanted):
        return None
    ratio = got / wanted
    if ratio < 0:
        return "the sign is wrong" if near(-ratio, 1, 0.02) else None
    exact = {
        1.024: "thousands read as 1,024 once (KiB and KB, a factor of 1.024)",
        1.048576: "MB taken for MiB (a factor of 1.0486)",
        1.073741824: "GB taken for GiB (a factor of 1.0737)",
    }
    for factor, name in exact.items():
        if near(ratio, factor, 0.003) or near(ratio, 1 / factor, 0.003):
            return name
    hours = inputs["hours_day"][0] if "hours_day" in inputs else situation["hours_day"]
    loose: list[tuple[float, str]] = [(10.0**p, f"a power of ten (×10^{p})") for p in range(1, 7)]
    loose += [
        (8, "bits for bytes (a factor of 8)"),
        (2, "keys and values counted wrong (a factor of 2)"),
    ]
    if hours:
        if hours != 24:
            loose.append((24 / hours, f"24 hours a day instead of {hours:g}"))
        if hours > 1:
            loose.append(
                (float(hours), f"the {hours:g} hours a day are left out (×{hours:g} hours)")
            )
    loose += [
        (12, "years for months (a factor of 12)"),
        (30.44, "days for months (a factor of 30.44)"),
        (100, "percent (a factor of 100)"),
    ]
    for factor, name in loose:
        if near(ratio, factor, 0.02) or near(ratio, 1 / factor, 0.02):
            return name
    return _rent_slip(got, inputs)


def _rent_slip(got: float, inputs: Mapping[str, tuple[float, str]]) -> str | None:
    """The twin of L17: rent around the clock, and own electricity added instead of subtracted."""
    names = ("hardware_price", "rent_hour", "hours_day", "electricity_month")
    if not all(n in inputs for n in names):
        return None
    price, rent, hours, electricity = (inputs[n][0] for n in names)
    month = rent * hours * 30.44
    if not hours or not month:
        return None
    twins = {
        "own electricity is added instead of subtracted (sign)": month + electricity,
        "24 hours a day instead of the hours of use, and electricity added instead of subtracted (24 h, sign)": month
        * 24
        / hours
        + electricity * 24 / hours,
        "24 hours a day instead of the hours of use": month * 24 / hours - electricity,
        "24 h and sign": month * 24 / hours + electricity,
    }
    return next((name for name, d in twins.items() if d and near(got, price / d, 0.02)), None)
