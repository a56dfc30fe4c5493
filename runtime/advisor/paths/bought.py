"""The paths that buy a machine or cards: used, one card, several cards, unified memory. Without a dated price: maybe."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from runtime.advisor.facts import HEADROOM, Machine, evaluate_rules, machine_of
from runtime.advisor.money import Price, prices_of
from runtime.advisor.placement import best_on, cpu_on, vram_on
from runtime.advisor.speeds import Speed
from runtime.advisor.verdicts import Case, Verdict, rank
from runtime.quantities import format_value

USED_SHARE = 0.7  # of the new price, at most
OVER_BUDGET = 1.1


def with_price(case: Case, verdict: Verdict, price: Price | None, what: str) -> Verdict:
    """Return a verdict about something that is bought: without a price that counts it is maybe at best."""
    prefix = format_value(verdict.number, verdict.unit)
    if verdict.speed is not None and verdict.speed.is_bound:
        prefix += " at most"
    elif verdict.unit == "B":
        prefix += " for each token"
    if verdict.verdict == "no":
        return verdict
    if price is None or not price.is_valid or price.amount is None:
        said = "no dated price" if price is None else price.text()
        question = f"What does {re.sub('^(with|on) ', '', what)} cost today?"
        return replace(
            verdict,
            verdict="maybe",
            price=price,
            question=question,
            reason=f"maybe: {prefix} {what}; {said}; a dated offer would change it",
        )
    budget = case.situation["budget"]
    cost = f"{price.amount:.0f} {price.currency}"
    if budget is None:
        return replace(
            verdict,
            verdict="maybe",
            price=price,
            question="What may it cost?",
            reason=f"maybe: {prefix} {what} for {cost}; the budget is not known",
        )
    if price.amount > OVER_BUDGET * budget:
        return replace(
            verdict,
            verdict="no",
            price=price,
            number=price.amount,
            unit=price.currency,
            calc=None,
            run=None,
            op=">",
            threshold=float(budget),
            reason=f"no: {cost} > {budget:g} {price.currency}, the budget",
        )
    if price.amount > budget:
        return replace(
            verdict,
            verdict="maybe",
            price=price,
            reason=f"maybe: {prefix} {what} for {cost}, a little over the budget",
        )
    return replace(
        verdict,
        price=price,
        reason=f"{verdict.verdict}: {prefix} {what} for {cost} <= {budget:g}",
    )


def used(case: Case) -> Verdict:
    """A used card that fits, judged by its price over the new one's."""
    need, _ = case.speeds.resident(case.tokens, case.users, with_experts=not case.speeds.is_moe)
    country, currency = case.situation["country"], case.situation["currency"]
    best: tuple[Verdict, Price, float] | None = None
    count = 0
    for gpu in case.kb.all("gpu"):
        used = [
            p
            for p in prices_of(case.kb, gpu["id"], "used", case.as_of, country, currency)
            if p.is_valid
        ]
        new = [
            p
            for p in prices_of(case.kb, gpu["id"], "new", case.as_of, country, currency)
            if p.is_valid
        ]
        count += len(used)
        if not used or not new or need > float(gpu["vram_bytes"]) * (1 - HEADROOM):
            continue
        assert used[0].amount is not None
        assert new[0].amount is not None
        ratio = used[0].amount / new[0].amount
        base = case.machine or Machine("a machine with this card")
        verdict = best_on(case, base.changed(gpus=(gpu,), calibrated_as=None))
        if best is None or rank(verdict) < rank(best[0]):
            best = verdict, used[0], ratio
    if best is None:
        question = "What does a fitting card cost used today?"
        said = f"{count} dated used offers, none" if count else "no dated used offer"
        reason = f"maybe: {said} of a card that fits; {question}"
        return Verdict("maybe", float(count), "offer", reason, question=question, laws=("L08",))
    verdict, price, ratio = best
    if ratio > USED_SHARE:
        reason = f"no: {ratio:.2f} of the new price > {USED_SHARE}; {price.text()}"
        return replace(
            verdict,
            verdict="no",
            number=ratio,
            unit="1",
            op=">",
            threshold=USED_SHARE,
            calc=None,
            run=None,
            reason=reason,
            price=price,
        )
    return with_price(case, verdict, price, f"used, {ratio:.2f} of the new price")


def single_gpu(case: Case) -> Verdict:
    """One card that holds everything."""
    need, calc = case.speeds.resident(case.tokens, case.users, with_experts=True)
    country, currency, budget = (case.situation[k] for k in ("country", "currency", "budget"))
    cards = [g for g in case.kb.all("gpu") if g["class"] in ("consumer", "workstation")]
    offers = {
        g["id"]: prices_of(case.kb, g["id"], "new", case.as_of, country, currency) for g in cards
    }
    affordable = [
        g
        for g in cards
        if budget is None
        or not (p := offers[g["id"]])
        or not p[0].is_valid
        or (p[0].amount or 0) <= OVER_BUDGET * budget
    ]
    largest = max(affordable or cards, key=lambda g: float(g["vram_bytes"]))
    room = float(largest["vram_bytes"]) * (1 - HEADROOM)
    if need > room:
        reason = (
            f"no: {format_value(need - room, 'B')} short: {format_value(need, 'B')} (L08) against {largest['name']} less "
            f"{HEADROOM:.0%}; a larger card would change it"
        )
        return Verdict(
            "no",
            need - room,
            "B",
            reason,
            ">",
            0.0,
            calc,
            laws=("L08",),
            extra={"need_bytes": need},
        )
    fitting = [g for g in affordable if need <= float(g["vram_bytes"]) * (1 - HEADROOM)]
    card = min(
        fitting,
        key=lambda g: (
            not offers[g["id"]] or not offers[g["id"]][0].is_valid,
            float(g["vram_bytes"]),
        ),
    )
    base = case.machine or Machine("a machine with this card")
    machine = base.changed(gpus=(card,), calibrated_as=None)
    in_card = vram_on(case, machine)
    assert in_card is not None
    facts = case.facts(base, buys_gpu=True) | {"newgpu": dict(card)}
    rules = evaluate_rules(case.kb, ["R09", "R10"], facts) if case.machine is not None else []
    blocked = [r for r in rules if r.is_("fail", "blocks")]
    if blocked and in_card.verdict != "no":
        in_card = replace(
            in_card,
            verdict="no",
            reason=f"no: {format_value(in_card.number, 'tok/s')}; {blocked[0].id}: {blocked[0].rule['consequence']}",
        )
    in_card = replace(in_card, rules=(*in_card.rules, *rules))
    return with_price(
        case,
        in_card,
        offers[card["id"]][0] if offers[card["id"]] else None,
        f"with one {card['name']}",
    )


def multi_gpu(case: Case) -> Verdict:
    """Several of the largest card."""
    need, _ = case.speeds.resident(case.tokens, case.users, with_experts=True)
    cards = [g for g in case.kb.all("gpu") if g["class"] in ("consumer", "workstation")]
    card = max(cards, key=lambda g: float(g["vram_bytes"]))
    count, calc = case.ledger.compute(
        "L23", need_bytes=need, vram_bytes=float(card["vram_bytes"]), headroom=HEADROOM
    )
    watts = count * float(card.get("board_power_w", 0))
    extra = {"watts": watts, "card": card["id"]}
    offers = prices_of(
        case.kb,
        card["id"],
        "new",
        case.as_of,
        case.situation["country"],
        case.situation["currency"],
    )
    price = offers[0] if offers else None
    common: dict[str, Any] = {
        "calc": calc,
        "laws": ("L08", "L23"),
        "extra": extra,
        "price": price,
    }
    if count == 1:
        return Verdict(
            "no",
            count,
            "card",
            f"no: 1 card is enough, {card['name']}; L23",
            "<",
            2.0,
            **common,
        )
    own = case.machine.gpus if case.machine else ()
    room = len(own) * min((float(g["vram_bytes"]) for g in own), default=0.0) * (1 - HEADROOM)
    if need <= room:
        reason = f"no: {count:.0f} cards would do, and the {len(own)} that are there hold {format_value(need, 'B')}; L23"
        return Verdict("no", count, "card", reason, "<=", float(len(own)), **common)
    said = f"{count:.0f} cards of {card['name']}, {watts:.0f} W"
    slots = case.machine.gpu_slots if case.machine else None
    if slots is not None and count > slots:
        return Verdict(
            "no",
            count,
            "card",
            f"no: {said} > {slots} slots; L23; a board with more slots would change it",
            ">",
            float(slots),
            **common,
        )
    if slots is None:
        question = "How many slots has the board?"
        return Verdict(
            "maybe", count, "card", f"maybe: {said}; {question}", question=question, **common
        )
    verdict = Verdict("yes", count, "card", "", "<=", float(slots), **common)
    if price is not None and price.amount is not None:
        price = replace(price, amount=price.amount * count)
    return with_price(case, verdict, price, said)


def unified(case: Case) -> Verdict:
    """A machine with unified memory: this one, a reported one, or one of the base."""
    reported = [
        run
        for run in case.kb.all("run")
        if run.get("model") == case.model["id"]
        and run.get("placement") == "unified"
        and run["metric"] == "decode_tok_s"
    ]
    here = case.machine is not None and case.machine.unified_memory_bytes is not None
    if here:
        assert case.machine is not None
        return cpu_on(case, case.machine)
    if reported:
        run = reported[0]
        value = run["value"]
        low, high = value if isinstance(value, list) else (value, value)
        speed = Speed(float(low), (low + high) / 2, float(high), None, run["id"])
        band = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        said = f"{band} tok/s reported ({run['id']}, variant {run['variant']}, not {case.variant['id']})"
        if high < case.wanted:
            reason = f"no: {said} < {case.wanted:g} tok/s wanted"
            return Verdict(
                "no", float(high), "tok/s", reason, "<", case.wanted, run=run["id"], speed=speed
            )
        reason = f"maybe: {said}; no dated price"
        return Verdict(
            "maybe",
            (low + high) / 2,
            "tok/s",
            reason,
            run=run["id"],
            laws=("L10",),
            speed=speed,
            question="What does the machine cost today?",
        )
    need, calc = case.speeds.resident(case.tokens, case.users, with_experts=True)
    boxes = [s for s in case.kb.all("system") if "unified_memory_bytes" in s]
    box = max(boxes, key=lambda s: float(s["unified_memory_bytes"]))
    room = float(box["unified_memory_bytes"]) * 0.75
    if need > room:
        reason = f"no: {format_value(need - room, 'B')} short: {format_value(need, 'B')} (L08) against three quarters of {format_value(box['unified_memory_bytes'], 'B')} (R21)"
        return Verdict("no", need - room, "B", reason, ">", 0.0, calc, laws=("L08",))
    fitting = [
        s for s in boxes if need <= float(s["unified_memory_bytes"]) * 0.75 and "ram_bw" in s
    ]
    if not fitting:
        return Verdict(
            "maybe",
            need,
            "B",
            f"maybe: {format_value(need, 'B')} fit into {box['name']}; its bandwidth is not known",
            calc=calc,
            laws=("L08",),
            question="How fast is its memory?",
        )

    chosen = min(fitting, key=lambda s: float(s["unified_memory_bytes"]))
    verdict = cpu_on(case, machine_of(case.kb, chosen["id"]))
    return with_price(case, verdict, None, f"on {chosen['name']}")
