"""The paths that cost nothing or start from the machine that is there: keep, upgrade, stream, offload, go smaller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.advisor.facts import Machine
from runtime.advisor.money import prices_of
from runtime.advisor.paths.bought import with_price
from runtime.advisor.placement import best_on, cpu_on, offload_on, stream_on
from runtime.advisor.verdicts import Case, Verdict, rank
from runtime.quantities import GIB_BYTES, format_value

SMALL_ACTIVE = 8e9  # parameters that a CPU-only model reads a token, at most


def keep(case: Case) -> Verdict:
    """The machine as it is."""
    if case.machine is None:
        need, calc = case.speeds.resident(case.tokens, case.users, with_experts=True)
        question = case.kb.get("path", "keep-existing")["asks"]
        return Verdict(
            "maybe",
            need,
            "B",
            f"maybe: needs {format_value(need, 'B')} of fast memory without streaming; {question}",
            calc=calc,
            laws=("L08",),
            question=question,
        )
    return best_on(case, case.machine)


def upgrade(case: Case) -> Verdict:
    """The best of more RAM, a drive, a card in the machine that is there."""
    keep, machine = case.found["keep-existing"], case.machine
    options = [] if machine is None else _upgrades(case, machine)
    extra = {
        "options": [
            {"what": what, "tok_s": v.speed.mid if v.speed else None, "verdict": v.verdict}
            for what, v in options
        ]
    }
    money = case.situation.currency
    if keep.verdict == "yes":
        now = keep.speed.mid if keep.speed else 0.0
        cards = {case.kb.get("gpu", g)["name"] for g in case.asked}
        said = ", ".join(
            f"{what} {'at most ' if v.speed.is_bound else ''}{format_value(v.speed.mid, 'tok/s')}{'' if v.speed.mid > now else ' by the uncalibrated law'}"
            for what, v in options
            if v.speed and (v.speed.mid > now or what in cards)
        )
        return Verdict(
            "no",
            0.0,
            money,
            f"no: 0 {money} needed; keep-existing is enough; what more would give: {said or 'nothing known'}",
            laws=("L13", "L14"),
            extra=extra,
        )
    if keep.verdict == "maybe":
        options = [option for option in options if rank(option[1]) < rank(keep)]
    if not options:
        return _no_upgrade(keep, machine, extra)
    what, best = min(options, key=lambda option: rank(option[1]))
    price = best.price
    if best.verdict == "no":
        _, _, detail = best.reason.partition(": ")
        return replace(
            best, reason=f"no: {detail}; that is with {what}, the best there is", extra=extra
        )
    return with_price(case, replace(best, extra=extra), price, f"with {what}")


def _no_upgrade(keep: Verdict, machine: Machine | None, extra: dict[str, Any]) -> Verdict:
    """The machine stays what it is: nothing is known that can be changed about it, or nothing that helps."""
    _, _, detail = keep.reason.partition(": ")
    if machine is None:
        return replace(keep, extra=extra)
    is_fixed = machine.unified_memory_bytes is not None
    is_known = is_fixed or (machine.gpu_slots is not None and machine.cpu is not None)
    verdict = "no" if keep.verdict == "no" and is_known else "maybe"
    said = "no upgrade helps" if is_known else "what can be changed is not known"
    question = keep.question or (
        None if is_known else "Which processor is it, which slots are free?"
    )
    return replace(
        keep, verdict=verdict, reason=f"{verdict}: {said}; {detail}", question=question, extra=extra
    )


def _upgrades(case: Case, machine: Machine) -> list[tuple[str, Verdict]]:
    found: list[tuple[str, Verdict]] = []
    most = (machine.cpu or {}).get("ram_max_bytes")
    if most and machine.ram_bytes and most > machine.ram_bytes * 1.01:
        more = machine.changed(ram_bytes=float(most))
        found.append((f"RAM to {most / GIB_BYTES:.0f} GiB", best_on(case, more)))
    drive = machine.drive
    is_soldered = machine.unified_memory_bytes is not None
    if drive is None or is_soldered or not case.speeds.is_moe:
        pass
    elif str(drive.get("interface")).startswith("nvme"):
        more = machine.changed(drives=(*machine.drives, drive))
        found.append(("a second drive like this one", best_on(case, more)))
    else:
        faster = {"id": "drive-new", "interface": "nvme-gen4", "read_bw_spec": 7e9}
        found.append(
            ("a Gen4 NVMe drive of 7 GB/s", best_on(case, machine.changed(drives=(faster,))))
        )
    if machine.gpu_slots:
        for gpu in case.kb.all("gpu"):
            if gpu["class"] != "consumer" or gpu in machine.gpus:
                continue
            verdict = best_on(case, machine.changed(gpus=(gpu,), calibrated_as=None))
            facts = case.facts(machine, buys_gpu=True) | {"newgpu": dict(gpu)}
            rules = case.rules_of("upgrade-existing", facts)
            if any(r.is_("fail", "blocks") for r in rules):
                continue
            offers = prices_of(
                case.kb,
                gpu["id"],
                "new",
                case.as_of,
                case.situation["country"],
                case.situation["currency"],
            )
            found.append((gpu["name"], replace(verdict, price=offers[0] if offers else None)))
    return found


def streaming(case: Case) -> Verdict:
    """Experts from NVMe."""
    if case.machine is None:
        return _no_machine(case, "nvme-expert-streaming")
    return stream_on(case, case.machine)


def offload(case: Case) -> Verdict:
    """Experts in RAM."""
    if case.machine is None:
        return _no_machine(case, "cpu-ram-offload-moe")
    return offload_on(case, case.machine)


def _no_machine(case: Case, path: str) -> Verdict:
    question = case.kb.get("path", path)["asks"]
    if not case.speeds.is_moe:
        weights = case.speeds.active_resident()
        return Verdict(
            "no",
            weights,
            "B",
            f"no: {format_value(weights, 'B')} for each token; R17: a dense model reads all of its weights",
            laws=("L12",),
        )
    routed, calc = case.speeds.routed_token() or (float(case.variant["file_bytes"]), None)
    return Verdict(
        "maybe",
        routed,
        "B",
        f"maybe: {format_value(routed, 'B')} a token; {question}",
        calc=calc,
        laws=("L04",),
        question=question,
    )


def cpu_only(case: Case) -> Verdict:
    """A model small enough for the CPU alone."""
    machine = case.machine
    size = float(case.variant["file_bytes"])
    if machine is None or machine.ram_bytes is None:
        question = "How much RAM is there?"
        return Verdict(
            "maybe",
            size,
            "B",
            f"maybe: {format_value(size, 'B')} must be at most half of RAM; {question}",
            question=question,
            laws=("L10",),
        )
    if size > machine.ram_bytes / 2:
        reason = f"no: {format_value(size, 'B')} > {format_value(machine.ram_bytes / 2, 'B')}, half of RAM; a smaller model would change it"
        return Verdict("no", size, "B", reason, ">", machine.ram_bytes / 2, laws=("L10",))
    active = case.model.get("params_active")
    if active is not None and float(active) > SMALL_ACTIVE * 1.01:
        return Verdict(
            "no",
            float(active),
            "1",
            f"no: {float(active) / 1e9:.3g} billion active parameters > 8 billion",
            ">",
            SMALL_ACTIVE,
            laws=("L10",),
        )
    return cpu_on(case, machine)


def smaller(case: Case) -> Verdict:
    """The largest other model of the base that is smaller, of the same kind, and runs."""
    question = "Would a smaller model do?"
    if case.situation["accepts_smaller"] is False:
        size = float(case.variant["file_bytes"])
        return Verdict(
            "no",
            size,
            "B",
            f"no: a smaller model than {format_value(size, 'B')} is not wanted",
            laws=("L14",),
        )
    found: list[tuple[Mapping[str, Any], Mapping[str, Any], Verdict]] = []
    for model in case.kb.all("model"):
        for variant in model["variants"]:
            is_smaller = float(variant["file_bytes"]) < 0.9 * float(case.variant["file_bytes"])
            fits_kind = set(case.model["modality"]) <= set(model["modality"])
            if (
                model["id"] == case.model["id"]
                or not is_smaller
                or not fits_kind
                or float(model.get("ctx_max", 0)) < case.tokens
            ):
                continue
            if case.machine is None:
                continue
            other = Case(
                case.kb,
                model,
                variant,
                case.machine,
                case.situation,
                case.as_of,
                case.cache_bytes,
                case.own_runs,
                case.ledger,
            )
            found.append((model, variant, best_on(other, case.machine)))
    if case.machine is None:
        smallest = min(float(v["file_bytes"]) for m in case.kb.all("model") for v in m["variants"])
        return Verdict(
            "maybe",
            smallest,
            "B",
            f"maybe: the smallest model of this base takes {format_value(smallest, 'B')}; which machine is there?",
            question="Which machine do you have?",
            laws=("L14",),
        )
    if not found:
        size = float(case.variant["file_bytes"])
        return Verdict(
            "no",
            size,
            "B",
            f"no: this base has no smaller model than {format_value(size, 'B')} for {case.tokens:.0f} tokens",
            laws=("L14",),
        )
    # of those that do, the largest keeps the most; where none does, the one that comes closest
    done = [f for f in found if f[2].verdict == "yes"]
    model, variant, best = (
        max(done, key=lambda f: float(f[1]["file_bytes"]))
        if done
        else min(found, key=lambda f: rank(f[2]))
    )
    share = float(variant["file_bytes"]) / float(case.variant["file_bytes"])
    extra = {
        "model": model["id"],
        "variant": variant["id"],
        "file_bytes": variant["file_bytes"],
        "size_share": share,
    }
    said = f"{model['name']} {variant['id']}, {format_value(float(variant['file_bytes']), 'B')}, {share:.0%} of the size"
    _, _, detail = best.reason.partition(": ")
    return replace(
        best,
        reason=f"{best.verdict}: {said}; {detail}",
        extra=extra,
        question=None if best.verdict == "yes" else question,
    )
