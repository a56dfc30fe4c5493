"""Where the weights of a case's variant lie on a machine (drive, RAM, card), and the verdict of each way."""

from __future__ import annotations

import math
from dataclasses import replace

from runtime.advisor.facts import HEADROOM, Machine, evaluate_rules
from runtime.advisor.speeds import Speed
from runtime.advisor.verdicts import Case, Verdict, rank
from runtime.quantities import GIB_BYTES, format_value

RAM_OVER_SET = 1.1
HOW_FAST = (
    "How fast are the drive and the link? (here, `python run.py stages=[doctor]` measures them)"
)


def stream_on(case: Case, machine: Machine) -> Verdict:
    """Experts from NVMe on a machine."""
    cache = case.cache_of(machine)
    speed = case.speeds.streamed(machine, cache)
    if not case.speeds.is_moe:
        return _dense_on_disk(case, machine)
    resident, _ = case.speeds.resident(case.tokens, case.users, with_experts=False)
    capacity = float((machine.drive or {}).get("capacity_bytes", 0))
    need, _ = case.ledger.compute(
        "L19",
        file_bytes=case.variant["file_bytes"],
        repack=case.variant.get("repack", 0),
        capacity=capacity,
    )
    has_run = speed is not None and speed.run is not None
    held = has_run or any(case.model["id"] in d.get("holds", ()) for d in machine.drives)
    facts = case.facts(
        machine,
        uses_gpu=machine.gpu is not None,
        uses_disk=True,
        moves_experts=True,
        resident_bytes=resident,
        cache_bytes=cache,
        disk_need=need,
        has_run_here=held,
        is_unified=machine.unified_memory_bytes is not None,
    )
    rules = case.rules_of(
        "nvme-expert-streaming", facts, "R07", "R08", "R12", "R13", "R11", "R23", "R19"
    )
    verdict = case.judge(speed, rules, HOW_FAST, laws=("L04", "L13", "L14"))
    return replace(verdict, extra={"disk_bytes": need, "cache_bytes": cache})


def _dense_on_disk(case: Case, machine: Machine) -> Verdict:
    facts = case.facts(machine, moves_experts=True)
    rules = evaluate_rules(case.kb, ["R17"], facts)
    weights = case.speeds.active_resident()
    if machine.disk_bw is None:
        return Verdict(
            "no",
            weights,
            "B",
            f"no: {format_value(weights, 'B')} for each token; R17: {rules[0].rule['consequence']}; a MoE model would change it",
            rules=tuple(rules),
            laws=("L12",),
        )
    top, calc = case.ledger.compute(
        "L12", disk_bw=machine.disk_bw, h=0, routed_bytes_per_token=weights
    )
    reason = f"no: {format_value(top, 'tok/s')} at most; L12 with all weights for each token (R17: a dense model); a MoE model would change it"
    return Verdict(
        "no",
        top,
        "tok/s",
        reason,
        "<",
        case.wanted,
        calc,
        rules=tuple(rules),
        laws=("L12",),
        speed=Speed(0, top, top, calc, is_bound=True, ceilings={"drive": top}),
    )


def offload_on(case: Case, machine: Machine) -> Verdict:
    """All experts in RAM."""
    if not case.speeds.is_moe:
        rules = evaluate_rules(case.kb, ["R17"], case.facts(machine, moves_experts=True))
        speed = case.speeds.on_cpu(machine)
        number = speed.hi if speed else case.speeds.active_resident()
        unit = "tok/s" if speed else "B"
        reason = f"no: {format_value(number, unit)}{' at most' if speed else ''}; a dense model reads 100 % of its weights for each token (R17); a MoE model would change it"
        return Verdict(
            "no",
            number,
            unit,
            reason,
            calc=speed.calc if speed else None,
            rules=tuple(rules),
            laws=("L10",),
            speed=speed,
        )
    routed = case.speeds.routed_set()
    if routed is None or machine.ram_bytes is None:
        size, question = float(case.variant["file_bytes"]), "How much RAM is there?"
        if routed is None:
            question = "How large is one expert of the model?"
        reason = f"maybe: {format_value(size, 'B')} of files; {question}"
        return Verdict("maybe", size, "B", reason, laws=("L03",), question=question)
    need = routed[0] * RAM_OVER_SET + 8 * GIB_BYTES
    speed = case.speeds.from_ram(machine)
    resident, _ = case.speeds.resident(case.tokens, case.users, with_experts=False)
    facts = case.facts(
        machine,
        uses_gpu=machine.gpu is not None,
        moves_experts=True,
        resident_bytes=resident,
        is_unified=machine.unified_memory_bytes is not None,
    )
    rules = case.rules_of("cpu-ram-offload-moe", facts, "R01", "R07", "R12", "R11", "R23", "R19")
    if machine.ram_bytes < need:
        short = need - machine.ram_bytes
        reason = (
            f"no: RAM need {format_value(need, 'B')}, have {format_value(machine.ram_bytes, 'B')}; L03 times "
            f"{RAM_OVER_SET} and 8 GiB; {format_value(short, 'B')} more RAM would change it"
        )
        return Verdict(
            "no",
            need,
            "B",
            reason,
            ">",
            machine.ram_bytes,
            routed[1],
            rules=tuple(rules),
            laws=("L03",),
            speed=speed,
            extra={"short_bytes": short},
        )
    return case.judge(speed, rules, "How fast are RAM and the link?", laws=("L03", "L10", "L14"))


def vram_on(case: Case, machine: Machine) -> Verdict | None:
    """Everything in the card of a machine; None without a card."""
    if machine.gpu is None:
        return None
    need, _ = case.speeds.resident(case.tokens, case.users, with_experts=True)
    kv = case.speeds.kv(case.tokens, 1)
    speed = case.speeds.in_vram(machine.gpu, machine, kv[0] if kv else 0)
    cards = _cards_used(case, machine, need)
    facts = case.facts(machine, uses_gpu=True, resident_bytes=need / cards)
    rules = evaluate_rules(case.kb, ["R01", "R06", "R07", "R12", "R11", "R23", "R19"], facts)
    verdict = case.judge(speed, rules, "How fast is the card's memory?", laws=("L08", "L16"))
    if cards == 1:
        return verdict
    reason = f"{verdict.reason}; layers split over {cards} cards, which work in turn (L23)"
    if len({g["id"] for g in machine.gpus}) > 1:
        reason += f"; {machine.gpu['name']}, the smallest of them, bounds it"
    return replace(verdict, reason=reason, laws=(*verdict.laws, "L23"), extra={"cards": cards})


def _cards_used(case: Case, machine: Machine, need: float) -> int:
    """Return how many of the machine's cards are needed, by the smallest of them (L23); all when they are too few."""
    if len(machine.gpus) < 2:
        return 1
    assert machine.gpu is not None
    count, _ = case.ledger.compute(
        "L23", need_bytes=need, vram_bytes=float(machine.gpu["vram_bytes"]), headroom=HEADROOM
    )
    return min(int(count), len(machine.gpus))


def cpu_on(case: Case, machine: Machine) -> Verdict:
    """Everything in RAM, computed by the CPU (or by unified memory's own card)."""
    need, calc = case.speeds.resident(case.tokens, case.users, with_experts=True)
    is_unified = machine.unified_memory_bytes is not None
    facts = case.facts(machine, is_unified=is_unified, total_bytes=need)
    rules = evaluate_rules(case.kb, ["R06", "R12", "R21", "R11", "R23", "R19"], facts)
    ram = machine.ram_bytes
    room = math.inf if ram is None else max(ram / 2, ram - 8 * GIB_BYTES)
    if need > room and not is_unified:
        left = "half of RAM" if ram is not None and room == ram / 2 else "RAM less 8 GiB"
        reason = f"no: {format_value(need - room, 'B')} short; {format_value(need, 'B')} (L08) over {left}"
        return Verdict(
            "no", need - room, "B", reason, ">", 0.0, calc, rules=tuple(rules), laws=("L08",)
        )
    speed = case.speeds.unified(machine) if is_unified else case.speeds.on_cpu(machine)
    return case.judge(speed, rules, "How fast is the memory?", laws=("L08", "L10"))


def best_on(case: Case, machine: Machine) -> Verdict:
    """Return the best way to place the weights on a machine: yes before maybe before no, then the fastest."""
    ways = [stream_on(case, machine)] if case.speeds.is_moe else []
    if case.speeds.is_moe and machine.unified_memory_bytes is None:
        ways.append(offload_on(case, machine))
    in_card = vram_on(case, machine)
    if in_card is not None:
        ways.append(in_card)
    ways.append(cpu_on(case, machine))
    return min(ways, key=rank)
