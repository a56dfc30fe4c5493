"""The paths into the cloud: an API for exactly this model, or a rented card; both need leave and a dated price."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.advisor.facts import evaluate_rules
from runtime.advisor.kb import age_days
from runtime.advisor.money import date_faults, place, price_of
from runtime.advisor.verdicts import Case, Verdict


def _forbidden(case: Case) -> Verdict | None:
    results = evaluate_rules(case.kb, ["R16"], case.facts(case.machine, is_cloud=True))
    if results and results[0].status == "fail":
        return Verdict(
            "no",
            0.0,
            "offer",
            "no: 0 offers are looked at; R16: your texts may not leave the house",
            rules=tuple(results),
            laws=(),
        )
    return None


def _local_cost(case: Case) -> float | None:
    """Return electricity per million tokens of the best local way, None where a part is not known."""
    keep, machine, price = (
        case.found.get("keep-existing"),
        case.machine,
        case.situation["price_kwh"],
    )
    if (
        keep is None
        or keep.speed is None
        or keep.verdict == "no"
        or machine is None
        or machine.load_w is None
        or price is None
    ):
        return None
    cost, _ = case.ledger.compute(
        "L21", watts=machine.load_w, price_kwh=float(price), tok_s=keep.speed.mid
    )
    return cost


def api(case: Case) -> Verdict:
    """An API for exactly this model, against electricity here."""
    if (no := _forbidden(case)) is not None:
        return no
    offers = [
        c for c in case.kb.all("cloud") if c["kind"] == "api" and c["model"] == case.model["id"]
    ]
    fresh = [c for c in offers if not date_faults(c, case.as_of, case.situation["country"])]
    if not fresh:
        others = [
            c["model"] for c in case.kb.all("cloud") if c["kind"] == "api" and c not in offers
        ]
        family = [m for m in others if case.kb.get("model", m)["family"] == case.model["family"]]
        identity = (
            f"; prices of {', '.join(sorted(set(family)))} are of another model" if family else ""
        )
        question = f"What does {case.model['name']} cost per million tokens today?"
        said = _uncounted(offers, case.model["name"], case.as_of)
        reason = f"maybe: {said}{identity}; {question}"
        return Verdict("maybe", 0.0, "offer", reason, question=question, laws=("L22",))
    mine = case.situation.currency
    offer = min(fresh, key=lambda c: (c["currency"] != mine, float(c["price_out"])))
    money = offer["currency"]
    tok_in, tok_out = case.situation["tokens_in_month"], case.situation["tokens_out_month"]
    local = _local_cost(case)
    per_mtok = float(offer["price_out"])
    if tok_in is None or tok_out is None:
        said = (
            f"; electricity alone is {local:.3g} {case.situation.currency}/Mtok here"
            if local
            else ""
        )
        question = "How many tokens a month go in and come out?"
        return Verdict(
            "maybe",
            per_mtok,
            f"{money}/Mtok",
            f"maybe: {per_mtok:g} {money}/Mtok of output ({price_text(offer, case.as_of)}){said}; {question}",
            question=question,
            laws=("L22",),
            extra={"cloud": offer["id"]},
        )
    ledger = case.ledger.reckoned_in(money)
    month, calc = ledger.compute(
        "L22",
        tok_in=float(tok_in),
        price_in=float(offer["price_in"]),
        tok_out=float(tok_out),
        price_out=per_mtok,
    )
    common: dict[str, Any] = {
        "calc": calc,
        "laws": ("L21", "L22"),
        "extra": {"cloud": offer["id"], "local_per_mtok": local},
    }
    allowed = case.situation["cloud_allowed"]
    if allowed is None:
        return Verdict(
            "maybe",
            month,
            f"{money}/month",
            f"maybe: {month:.3g} {money} a month; may your texts leave your house?",
            question="May your texts leave your house?",
            **common,
        )
    if local is None or case.situation.currency != money:
        return Verdict(
            "yes" if case.found["keep-existing"].verdict == "no" else "maybe",
            month,
            f"{money}/month",
            f"{'yes' if case.found['keep-existing'].verdict == 'no' else 'maybe'}: {month:.3g} {money} a month ({price_text(offer, case.as_of)}); what the local way costs is not known in {money}",
            question="What does a kWh cost?",
            **common,
        )
    horizon = float(case.situation["horizon_months"])
    own = local * float(tok_out) / 1e6
    verdict, op = ("yes", "<") if month < own else ("no", ">=")
    return Verdict(
        verdict,
        month,
        f"{money}/month",
        f"{verdict}: {month * horizon:.4g} {money} over {horizon:.0f} months {op} {own * horizon:.4g} of electricity alone here ({price_text(offer, case.as_of)})",
        op,
        own,
        **common,
    )


def rent(case: Case) -> Verdict:
    """A rented card, by the months until buying it breaks even."""
    if (no := _forbidden(case)) is not None:
        return no
    offers = [c for c in case.kb.all("cloud") if c["kind"] == "gpu-rent"]
    fresh = [c for c in offers if not date_faults(c, case.as_of, case.situation["country"])]
    if not fresh:
        said = _uncounted(offers, "a rented card", case.as_of)
        question = "What does an hour cost, and how many hours a day do you need?"
        return Verdict(
            "maybe",
            0.0,
            "offer",
            f"maybe: {said}; {question}",
            question=question,
            laws=("L17",),
        )
    mine = case.situation.currency
    offer = min(fresh, key=lambda c: (c["currency"] != mine, float(c["price_hour"])))
    money, hours = offer["currency"], case.situation["hours_day"]
    per_hour = float(offer["price_hour"])
    if hours is None:
        return Verdict(
            "maybe",
            per_hour,
            f"{money}/h",
            f"maybe: {per_hour:g} {money}/h ({price_text(offer, case.as_of)}); how many hours a day?",
            question="How many hours a day does it compute?",
            laws=("L17",),
        )
    owned = [
        price_of(case.kb, o, case.as_of, case.situation["country"], money)
        for o in case.kb.all("offer")
        if o["product"] == offer["gpu"] and o["condition"] == "new"
    ]
    priced = [p for p in owned if p.is_valid and p.amount is not None]
    if not priced:
        month = per_hour * float(hours) * 30.44
        return Verdict(
            "maybe",
            per_hour,
            f"{money}/h",
            f"maybe: {per_hour:g} {money}/h, {month:.4g} {money} a month; no dated price of {offer['gpu']} to compare with",
            question="What does the card cost today?",
            laws=("L17",),
        )
    ledger = case.ledger.reckoned_in(money)
    price_kwh = case.situation["price_kwh"]
    electricity = 0.0
    if price_kwh is not None:
        watts = float(case.kb.get("gpu", offer["gpu"]).get("board_power_w", 0))
        electricity, _ = ledger.compute(
            "L18", watts=watts, hours_day=float(hours), price_kwh=float(price_kwh)
        )
    amount = priced[0].amount
    assert amount is not None
    months, calc = ledger.compute(
        "L17",
        hardware_price=amount,
        rent_hour=per_hour,
        hours_day=float(hours),
        electricity_month=electricity,
    )
    horizon = float(case.situation["horizon_months"])
    verdict = "yes" if months > 1.25 * horizon else "no" if months < 0.75 * horizon else "maybe"
    said = "never" if math.isinf(months) else f"{months:.3g} months"
    allowed = case.situation["cloud_allowed"]
    if allowed is None and verdict == "yes":
        verdict = "maybe"
    number = 1200.0 if math.isinf(months) else months
    return Verdict(
        verdict,
        number,
        "month",
        f"{verdict}: buying breaks even after {said}, the horizon is {horizon:.0f} months; L17 ({price_text(offer, case.as_of)})",
        ">" if verdict == "yes" else "<",
        horizon,
        None if math.isinf(months) else calc,
        laws=("L17", "L18"),
        price=priced[0],
        question="May your texts leave your house?" if allowed is None else None,
    )


def _uncounted(offers: Sequence[Mapping[str, Any]], what: str, as_of: str) -> str:
    """Return which prices there are, when none of them counts today."""
    if not offers:
        return f"no dated price of {what}"
    listed = "; ".join(price_text(o, as_of) for o in offers)
    return f"no price of {what} that counts today ({listed})"


def price_text(offer: Mapping[str, Any], as_of: str) -> str:
    """Return a cloud price with its day and age."""
    what = (
        f"{offer['price_hour']:g} {offer['currency']}/h"
        if offer["kind"] == "gpu-rent"
        else f"{offer['price_in']:g}/{offer['price_out']:g} {offer['currency']}/Mtok"
    )
    return f"{what}, {place(offer['region'])}, {offer['date']}, {age_days(offer['date'], as_of)} days old"
