"""The solution paths, walked always and all of them: yes, no or maybe, each with one number, its unit and a reason.

A verdict is made by code from laws, rules and measured runs; reasons come from templates, never from free text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.advisor.facts import HEADROOM, Machine, RuleResult, Situation, evaluate_rules
from runtime.advisor.kb import KnowledgeBase
from runtime.advisor.ledger import Ledger
from runtime.advisor.money import Price, date_faults, price_of, prices_of
from runtime.advisor.speeds import Speed, Speeds
from runtime.quantities import GIB_BYTES, format_value

USED_SHARE = 0.7  # of the new price, at most
OVER_BUDGET = 1.1
SMALL_ACTIVE = 8e9  # parameters that a CPU-only model reads a token, at most
RAM_OVER_SET = 1.1
ORDER = {"yes": 0, "maybe": 1, "no": 2}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One path's outcome. number is in base units of unit; calc or run says where it comes from."""

    verdict: str
    number: float
    unit: str
    reason: str
    op: str = ""
    threshold: float | None = None
    calc: str | None = None
    run: str | None = None
    speed: Speed | None = None
    rules: tuple[RuleResult, ...] = ()
    laws: tuple[str, ...] = ()
    price: Price | None = None
    question: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class Walk:
    """One question: a model's variant, a machine (or none), a situation, a day."""

    def __init__(
        self,
        kb: KnowledgeBase,
        model: Mapping[str, Any],
        variant: Mapping[str, Any],
        machine: Machine | None,
        situation: Situation,
        as_of: str,
        cache_bytes: float | None = None,
        own_runs: Sequence[Mapping[str, Any]] = (),
        ledger: Ledger | None = None,
    ) -> None:
        self.kb, self.model, self.variant, self.machine = kb, model, variant, machine
        self.situation, self.as_of, self._cache, self.own_runs = (
            situation,
            as_of,
            cache_bytes,
            own_runs,
        )
        self.ledger = ledger or Ledger(kb.laws, situation.currency)
        self.speeds = Speeds(kb, self.ledger, model, variant, own_runs)
        self.wanted = float(situation["min_tok_s"])
        self.tokens, self.users = float(situation["context_tokens"]), float(situation["users"])
        self.found: dict[str, Verdict] = {}

    def run(self) -> dict[str, Verdict]:
        """Walk every path in order and return its verdict by id."""
        walkers: dict[str, Callable[[], Verdict]] = {
            "keep-existing": self.keep,
            "upgrade-existing": self.upgrade,
            "used-hardware": self.used,
            "new-single-gpu": self.single_gpu,
            "multi-gpu": self.multi_gpu,
            "unified-memory": self.unified,
            "cpu-ram-offload-moe": self.offload,
            "cpu-only-small": self.cpu_only,
            "smaller-model": self.smaller,
            "cloud-api": self.api,
            "cloud-gpu-rent": self.rent,
            "nvme-expert-streaming": self.streaming,
        }
        # the local ways first: keeping and the cloud are judged against them
        for name in ("nvme-expert-streaming", "cpu-ram-offload-moe"):
            self.found[name] = walkers[name]()
        for path in self.kb.paths:
            if path["id"] not in self.found:
                self.found[path["id"]] = walkers[path["id"]]()
        return {path["id"]: self.found[path["id"]] for path in self.kb.paths}

    # ---- facts and judging ---------------------------------------------------------------------------------------

    def cache_of(self, machine: Machine) -> float:
        """Return the RAM cache of experts on a machine: as told, else by default, at most all of them."""
        routed = self.speeds.routed_set()
        cache = machine.default_cache() if self._cache is None else self._cache
        return min(cache, routed[0]) if routed else cache

    def facts(self, machine: Machine | None, **placement: Any) -> dict[str, dict[str, Any]]:
        """Return what rules may look at."""
        engine = self.engine(bool(placement.get("uses_disk")))
        system: dict[str, Any] = {}
        if machine is not None:
            system = {
                "ram_bytes": machine.ram_bytes,
                "psu_w": machine.psu_w,
                "gpu_slots": machine.gpu_slots,
                "unified_memory_bytes": machine.unified_memory_bytes,
            }
        return {
            "model": dict(self.model),
            "variant": dict(self.variant),
            "engine": engine,
            "system": system,
            "gpu": dict(machine.gpu or {}) if machine else {},
            "cpu": dict(machine.cpu or {}) if machine else {},
            "drive": dict(machine.drive or {}) if machine else {},
            "situation": {**self.situation.values},
            "placement": placement,
        }

    def engine(self, is_streaming: bool = False) -> dict[str, Any]:
        """Return the engine that reads the variant's format, this project's first; it may have to stream experts."""
        able = [
            e
            for e in self.kb.all("engine")
            if self.variant["format"] in e["formats"]
            and (e.get("streams_experts") or not is_streaming)
        ]
        return dict(able[0] if able else self.kb.all("engine")[0])

    def judge(
        self, speed: Speed | None, rules: Sequence[RuleResult], missing: str, *, laws: Sequence[str]
    ) -> Verdict:
        """Return the verdict of a way that costs nothing: rules first, then the speed's band against the speed wanted."""
        blocked = [r for r in rules if r.is_("fail", "blocks")]
        open_rules = [r for r in rules if r.is_("unknown", "blocks", "unreliable")]
        doubts = [r for r in rules if r.is_("fail", "unreliable")]
        common: dict[str, Any] = {"rules": tuple(rules), "laws": tuple(laws), "speed": speed}
        if blocked:
            return self._blocked(blocked[0], speed, common)
        if speed is None:
            return Verdict(
                "maybe",
                self.wanted,
                "tok/s",
                f"maybe: {self.wanted:g} tok/s are wanted, and {missing} is not known",
                question=missing,
                **common,
            )
        common |= {"calc": speed.calc, "run": speed.run, "op": ">=", "threshold": self.wanted}
        source = self._source(speed)
        if speed.hi < self.wanted:
            return Verdict(
                "no",
                speed.hi,
                "tok/s",
                self._line("no", speed.hi, "<", source),
                **common | {"op": "<"},
            )
        if open_rules:
            rule = open_rules[0].rule
            question = rule.get("ask_if_unknown", rule["name"])
            return Verdict(
                "maybe",
                speed.mid,
                "tok/s",
                self._line("maybe", speed.mid, "~", f"{source}; {open_rules[0].id}: {question}"),
                question=question,
                **common,
            )
        if doubts:
            rule = doubts[0].rule
            return Verdict(
                "maybe",
                speed.mid,
                "tok/s",
                self._line(
                    "maybe", speed.mid, "~", f"{source}; {doubts[0].id}: {rule['consequence']}"
                ),
                question=rule.get("ask_if_unknown"),
                **common,
            )
        if speed.is_bound:
            return Verdict(
                "maybe",
                speed.mid,
                "tok/s",
                self._line(
                    "maybe", speed.mid, "<=", f"{source}, an upper bound: arithmetic is not counted"
                ),
                **common,
            )
        if speed.lo >= self.wanted:
            return Verdict(
                "yes", speed.mid, "tok/s", self._line("yes", speed.mid, ">=", source), **common
            )
        band = f"{source}; between {speed.lo:.3g} and {speed.hi:.3g}"
        return Verdict(
            "maybe", speed.mid, "tok/s", self._line("maybe", speed.mid, "~", band), **common
        )

    def _source(self, speed: Speed) -> str:
        if speed.run is not None:
            return f"measured, {speed.run}"
        return next(str(e["law"]) for e in self.ledger.entries if e["ref"] == speed.calc)

    def _line(self, verdict: str, number: float, op: str, source: str, change: str = "") -> str:
        said = f"{verdict}: {number:.3g} tok/s {op} {self.wanted:g} tok/s; {source}"
        return f"{said}; {change}" if change else said

    @staticmethod
    def _blocked(result: RuleResult, speed: Speed | None, common: dict[str, Any]) -> Verdict:
        rule = result.rule
        change = f"; {rule['workaround']} would change it" if "workaround" in rule else ""
        left, right = result.left, result.right
        is_size = (
            isinstance(left, float | int)
            and isinstance(right, float | int)
            and rule["op"] in ("<=", ">=")
        )
        if is_size and str(rule["left"]).endswith("_bytes"):
            short = abs(float(left) - float(right))
            said = f"no: {format_value(short, 'B')} short ({format_value(left, 'B')} {'>' if rule['op'] == '<=' else '<'} {format_value(right, 'B')})"
            return Verdict(
                "no",
                short,
                "B",
                f"{said}; {result.id}: {rule['consequence']}{change}",
                ">",
                0.0,
                **common,
            )
        number = speed.mid if speed is not None else 0.0
        calc: dict[str, Any] = {"calc": speed.calc, "run": speed.run} if speed is not None else {}
        return Verdict(
            "no",
            number,
            "tok/s",
            f"no: {number:.3g} tok/s at most on paper; {result.id}: {rule['consequence']}{change}",
            **calc,
            **common,
        )

    def rules_of(
        self, path: str, facts: Mapping[str, Mapping[str, Any]], *more: str
    ) -> list[RuleResult]:
        """Return a path's rules, evaluated."""
        names = [*self.kb.get("path", path).get("rules", ()), *more]
        return evaluate_rules(self.kb, list(dict.fromkeys(names)), facts)

    # ---- ways to place the weights -------------------------------------------------------------------------------

    def stream_on(self, machine: Machine) -> Verdict:
        """Experts from NVMe on a machine."""
        cache = self.cache_of(machine)
        speed = self.speeds.streamed(machine, cache)
        if not self.speeds.is_moe:
            return self._dense_on_disk(machine)
        resident, _ = self.speeds.resident(self.tokens, self.users, with_experts=False)
        capacity = float((machine.drive or {}).get("capacity_bytes", 0))
        need, _ = self.ledger.compute(
            "L19",
            file_bytes=self.variant["file_bytes"],
            repack=self.variant.get("repack", 0),
            capacity=capacity,
        )
        held = any(self.model["id"] in d.get("holds", ()) for d in machine.drives)
        facts = self.facts(
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
        rules = self.rules_of(
            "nvme-expert-streaming", facts, "R07", "R08", "R12", "R13", "R23", "R19"
        )
        verdict = self.judge(
            speed, rules, "how fast the drive and the link are", laws=("L04", "L13", "L14")
        )
        return replace(verdict, extra={"disk_bytes": need, "cache_bytes": cache})

    def _dense_on_disk(self, machine: Machine) -> Verdict:
        facts = self.facts(machine, moves_experts=True)
        rules = evaluate_rules(self.kb, ["R17"], facts)
        weights = self.speeds.active_resident()
        if machine.disk_bw is None:
            return Verdict(
                "no",
                weights,
                "B",
                f"no: {format_value(weights, 'B')} for each token; R17: {rules[0].rule['consequence']}; a MoE model would change it",
                rules=tuple(rules),
                laws=("L12",),
            )
        top, calc = self.ledger.compute(
            "L12", disk_bw=machine.disk_bw, h=0, routed_bytes_per_token=weights
        )
        reason = f"no: {top:.3g} tok/s at most; L12 with all weights for each token (R17: a dense model); a MoE model would change it"
        return Verdict(
            "no",
            top,
            "tok/s",
            reason,
            "<",
            self.wanted,
            calc,
            rules=tuple(rules),
            laws=("L12",),
            speed=Speed(0, top, top, calc, is_bound=True, ceilings={"drive": top}),
        )

    def offload_on(self, machine: Machine) -> Verdict:
        """All experts in RAM."""
        if not self.speeds.is_moe:
            rules = evaluate_rules(self.kb, ["R17"], self.facts(machine, moves_experts=True))
            speed = self.speeds.on_cpu(machine)
            number = speed.hi if speed else self.speeds.active_resident()
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
        routed = self.speeds.routed_set()
        if routed is None or machine.ram_bytes is None:
            return Verdict(
                "maybe",
                float(self.variant["file_bytes"]),
                "B",
                "maybe: the size of an expert or of RAM is not known",
                laws=("L03",),
            )
        need = routed[0] * RAM_OVER_SET + 8 * GIB_BYTES
        speed = self.speeds.from_ram(machine)
        resident, _ = self.speeds.resident(self.tokens, self.users, with_experts=False)
        facts = self.facts(
            machine,
            uses_gpu=machine.gpu is not None,
            moves_experts=True,
            resident_bytes=resident,
            is_unified=machine.unified_memory_bytes is not None,
        )
        rules = self.rules_of("cpu-ram-offload-moe", facts, "R01", "R07", "R12", "R23", "R19")
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
        return self.judge(speed, rules, "how fast RAM and the link are", laws=("L03", "L10", "L14"))

    def vram_on(self, machine: Machine) -> Verdict | None:
        """Everything in the card of a machine; None without a card."""
        if machine.gpu is None:
            return None
        need, _ = self.speeds.resident(self.tokens, self.users, with_experts=True)
        kv = self.speeds.kv(self.tokens, 1)
        speed = self.speeds.in_vram(machine.gpu, machine, kv[0] if kv else 0)
        facts = self.facts(machine, uses_gpu=True, resident_bytes=need)
        rules = evaluate_rules(self.kb, ["R01", "R06", "R07", "R12", "R23", "R19"], facts)
        return self.judge(speed, rules, "how fast the card is", laws=("L08", "L16"))

    def cpu_on(self, machine: Machine) -> Verdict:
        """Everything in RAM, computed by the CPU (or by unified memory's own card)."""
        need, calc = self.speeds.resident(self.tokens, self.users, with_experts=True)
        is_unified = machine.unified_memory_bytes is not None
        facts = self.facts(machine, is_unified=is_unified, total_bytes=need)
        rules = evaluate_rules(self.kb, ["R06", "R12", "R21", "R23", "R19"], facts)
        room = math.inf if machine.ram_bytes is None else machine.ram_bytes - 8 * GIB_BYTES
        if need > room and not is_unified:
            reason = f"no: {format_value(need - room, 'B')} short; L08 over RAM less 8 GiB"
            return Verdict(
                "no", need - room, "B", reason, ">", 0.0, calc, rules=tuple(rules), laws=("L08",)
            )
        speed = self.speeds.unified(machine) if is_unified else self.speeds.on_cpu(machine)
        return self.judge(speed, rules, "how fast the memory is", laws=("L08", "L10"))

    def best_on(self, machine: Machine) -> Verdict:
        """Return the best way to place the weights on a machine: yes before maybe before no, then the fastest."""
        ways = [self.stream_on(machine)] if self.speeds.is_moe else []
        if self.speeds.is_moe and machine.unified_memory_bytes is None:
            ways.append(self.offload_on(machine))
        in_card = self.vram_on(machine)
        if in_card is not None:
            ways.append(in_card)
        ways.append(self.cpu_on(machine))
        return min(ways, key=_rank)

    # ---- the twelve paths ----------------------------------------------------------------------------------------

    def keep(self) -> Verdict:
        if self.machine is None:
            need, calc = self.speeds.resident(self.tokens, self.users, with_experts=True)
            question = self.kb.get("path", "keep-existing")["asks"]
            return Verdict(
                "maybe",
                need,
                "B",
                f"maybe: needs {format_value(need, 'B')} of fast memory without streaming; {question}",
                calc=calc,
                laws=("L08",),
                question=question,
            )
        return self.best_on(self.machine)

    def upgrade(self) -> Verdict:
        keep, machine = self.found["keep-existing"], self.machine
        options = [] if machine is None else self._upgrades(machine)
        extra = {
            "options": [
                {"what": what, "tok_s": v.speed.mid if v.speed else None, "verdict": v.verdict}
                for what, v in options
            ]
        }
        money = self.situation.currency
        if keep.verdict == "yes":
            now = keep.speed.mid if keep.speed else 0.0
            said = ", ".join(
                f"{what} {v.speed.mid:.3g} tok/s"
                for what, v in options
                if v.speed and v.speed.mid > now
            )
            return Verdict(
                "no",
                0.0,
                money,
                f"no: 0 {money} needed; keep-existing is enough; what more would give: {said or 'nothing known'}",
                laws=("L13", "L14"),
                extra=extra,
            )
        if not options:
            question = (
                "which machine there is" if machine is None else "what can be changed about it"
            )
            return Verdict(
                "maybe",
                self.wanted,
                "tok/s",
                f"maybe: {self.wanted:g} tok/s are wanted; {question} is not known",
                question=question,
                laws=("L14",),
            )
        what, best = min(options, key=lambda option: _rank(option[1]))
        price = best.price
        if best.verdict == "no":
            number = best.speed.hi if best.speed else 0.0
            return replace(
                best,
                number=number,
                unit="tok/s",
                op="<",
                threshold=self.wanted,
                calc=best.speed.calc if best.speed else None,
                run=best.speed.run if best.speed else None,
                reason=f"no: {number:.3g} tok/s at most with {what}; {best.reason.removeprefix('no: ')}",
                extra=extra,
            )
        return self._with_price(replace(best, extra=extra), price, f"with {what}")

    def _upgrades(self, machine: Machine) -> list[tuple[str, Verdict]]:
        found: list[tuple[str, Verdict]] = []
        most = (machine.cpu or {}).get("ram_max_bytes")
        if most and machine.ram_bytes and most > machine.ram_bytes * 1.01:
            more = machine.changed(ram_bytes=float(most))
            found.append((f"RAM to {most / GIB_BYTES:.0f} GiB", self.best_on(more)))
        drive = machine.drive
        if (
            drive is not None
            and str(drive.get("interface")).startswith("nvme")
            and self.speeds.is_moe
        ):
            more = machine.changed(drives=(*machine.drives, drive))
            found.append(("a second drive like this one", self.best_on(more)))
        elif drive is not None and self.speeds.is_moe:
            faster = {"id": "drive-new", "interface": "nvme-gen4", "read_bw_spec": 7e9}
            found.append(
                ("a Gen4 NVMe drive of 7 GB/s", self.best_on(machine.changed(drives=(faster,))))
            )
        if machine.gpu_slots:
            for gpu in self.kb.all("gpu"):
                if gpu["class"] != "consumer" or gpu in machine.gpus:
                    continue
                verdict = self.best_on(machine.changed(gpus=(gpu,), calibrated_as=None))
                facts = self.facts(machine, buys_gpu=True) | {"newgpu": dict(gpu)}
                rules = self.rules_of("upgrade-existing", facts)
                if any(r.is_("fail", "blocks") for r in rules):
                    continue
                offers = prices_of(
                    self.kb,
                    gpu["id"],
                    "new",
                    self.as_of,
                    self.situation["country"],
                    self.situation["currency"],
                )
                found.append((gpu["name"], replace(verdict, price=offers[0] if offers else None)))
        return found

    def _with_price(self, verdict: Verdict, price: Price | None, what: str) -> Verdict:
        """Return a verdict about something that is bought: without a price that counts it is maybe at best."""
        prefix = format_value(verdict.number, verdict.unit)
        if verdict.speed is not None and verdict.speed.is_bound:
            prefix += " at most"
        if verdict.verdict == "no":
            return verdict
        if price is None or not price.is_valid or price.amount is None:
            said = "no dated price" if price is None else price.text()
            question = "What does it cost today?"
            return replace(
                verdict,
                verdict="maybe",
                price=price,
                question=question,
                reason=f"maybe: {prefix} {what}; {said}; a dated offer would change it",
            )
        budget = self.situation["budget"]
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

    def used(self) -> Verdict:
        need, _ = self.speeds.resident(self.tokens, self.users, with_experts=not self.speeds.is_moe)
        country, currency = self.situation["country"], self.situation["currency"]
        best: tuple[Verdict, Price, float] | None = None
        count = 0
        for gpu in self.kb.all("gpu"):
            used = [
                p
                for p in prices_of(self.kb, gpu["id"], "used", self.as_of, country, currency)
                if p.is_valid
            ]
            new = [
                p
                for p in prices_of(self.kb, gpu["id"], "new", self.as_of, country, currency)
                if p.is_valid
            ]
            count += len(used)
            if not used or not new or need > float(gpu["vram_bytes"]) * (1 - HEADROOM):
                continue
            assert used[0].amount is not None
            assert new[0].amount is not None
            ratio = used[0].amount / new[0].amount
            base = self.machine or Machine("a machine with this card")
            verdict = self.best_on(base.changed(gpus=(gpu,), calibrated_as=None))
            if best is None or _rank(verdict) < _rank(best[0]):
                best = verdict, used[0], ratio
        if best is None:
            question = "What does a fitting card cost used today?"
            reason = f"maybe: {count} dated used offers of a card that fits; {question}"
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
        return self._with_price(verdict, price, f"used, {ratio:.2f} of the new price")

    def single_gpu(self) -> Verdict:
        need, calc = self.speeds.resident(self.tokens, self.users, with_experts=True)
        country, currency, budget = (self.situation[k] for k in ("country", "currency", "budget"))
        cards = [g for g in self.kb.all("gpu") if g["class"] in ("consumer", "workstation")]
        offers = {
            g["id"]: prices_of(self.kb, g["id"], "new", self.as_of, country, currency)
            for g in cards
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
        base = self.machine or Machine("a machine with this card")
        machine = base.changed(gpus=(card,), calibrated_as=None)
        in_card = self.vram_on(machine)
        assert in_card is not None
        facts = self.facts(base, buys_gpu=True) | {"newgpu": dict(card)}
        rules = evaluate_rules(self.kb, ["R09", "R10"], facts) if self.machine is not None else []
        blocked = [r for r in rules if r.is_("fail", "blocks")]
        if blocked and in_card.verdict != "no":
            in_card = replace(
                in_card,
                verdict="no",
                reason=f"no: {in_card.number:.3g} tok/s; {blocked[0].id}: {blocked[0].rule['consequence']}",
            )
        in_card = replace(in_card, rules=(*in_card.rules, *rules))
        return self._with_price(
            in_card,
            offers[card["id"]][0] if offers[card["id"]] else None,
            f"with one {card['name']}",
        )

    def multi_gpu(self) -> Verdict:
        need, _ = self.speeds.resident(self.tokens, self.users, with_experts=True)
        cards = [g for g in self.kb.all("gpu") if g["class"] in ("consumer", "workstation")]
        card = max(cards, key=lambda g: float(g["vram_bytes"]))
        count, calc = self.ledger.compute(
            "L23", need_bytes=need, vram_bytes=float(card["vram_bytes"]), headroom=HEADROOM
        )
        watts = count * float(card.get("board_power_w", 0))
        extra = {"watts": watts, "card": card["id"]}
        offers = prices_of(
            self.kb,
            card["id"],
            "new",
            self.as_of,
            self.situation["country"],
            self.situation["currency"],
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
        said = f"{count:.0f} cards of {card['name']}, {watts:.0f} W"
        slots = self.machine.gpu_slots if self.machine else None
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
        return self._with_price(verdict, price, said)

    def unified(self) -> Verdict:
        reported = [
            run
            for run in self.kb.all("run")
            if run.get("model") == self.model["id"]
            and run.get("placement") == "unified"
            and run["metric"] == "decode_tok_s"
        ]
        here = self.machine is not None and self.machine.unified_memory_bytes is not None
        if here:
            assert self.machine is not None
            return self.cpu_on(self.machine)
        if reported:
            run = reported[0]
            value = run["value"]
            low, high = value if isinstance(value, list) else (value, value)
            reason = f"maybe: {low:g} to {high:g} tok/s reported ({run['id']}, variant {run['variant']}, not {self.variant['id']}); no dated price"
            speed = Speed(float(low), (low + high) / 2, float(high), None, run["id"])
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
        need, calc = self.speeds.resident(self.tokens, self.users, with_experts=True)
        boxes = [s for s in self.kb.all("system") if "unified_memory_bytes" in s]
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
        from runtime.advisor.facts import machine_of

        chosen = min(fitting, key=lambda s: float(s["unified_memory_bytes"]))
        verdict = self.cpu_on(machine_of(self.kb, chosen["id"]))
        return self._with_price(verdict, None, f"on {chosen['name']}")

    def offload(self) -> Verdict:
        if self.machine is None:
            return self._no_machine("cpu-ram-offload-moe")
        return self.offload_on(self.machine)

    def streaming(self) -> Verdict:
        if self.machine is None:
            return self._no_machine("nvme-expert-streaming")
        return self.stream_on(self.machine)

    def _no_machine(self, path: str) -> Verdict:
        question = self.kb.get("path", path)["asks"]
        if not self.speeds.is_moe:
            weights = self.speeds.active_resident()
            return Verdict(
                "no",
                weights,
                "B",
                f"no: {format_value(weights, 'B')} for each token; R17: a dense model reads all of its weights",
                laws=("L12",),
            )
        routed, calc = self.speeds.routed_token() or (float(self.variant["file_bytes"]), None)
        return Verdict(
            "maybe",
            routed,
            "B",
            f"maybe: {format_value(routed, 'B')} a token; {question}",
            calc=calc,
            laws=("L04",),
            question=question,
        )

    def cpu_only(self) -> Verdict:
        machine = self.machine
        size = float(self.variant["file_bytes"])
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
        active = self.model.get("params_active")
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
        return self.cpu_on(machine)

    def smaller(self) -> Verdict:
        question = "Would a smaller model do?"
        if self.situation["accepts_smaller"] is False:
            size = float(self.variant["file_bytes"])
            return Verdict(
                "no",
                size,
                "B",
                f"no: a smaller model than {format_value(size, 'B')} is not wanted",
                laws=("L14",),
            )
        found: list[tuple[Mapping[str, Any], Mapping[str, Any], Verdict]] = []
        for model in self.kb.all("model"):
            for variant in model["variants"]:
                is_smaller = float(variant["file_bytes"]) < 0.9 * float(self.variant["file_bytes"])
                fits_kind = set(self.model["modality"]) <= set(model["modality"])
                if (
                    model["id"] == self.model["id"]
                    or not is_smaller
                    or not fits_kind
                    or float(model.get("ctx_max", 0)) < self.tokens
                ):
                    continue
                if self.machine is None:
                    continue
                walk = Walk(
                    self.kb,
                    model,
                    variant,
                    self.machine,
                    self.situation,
                    self.as_of,
                    self._cache,
                    self.own_runs,
                    self.ledger,
                )
                found.append((model, variant, walk.best_on(self.machine)))
        if self.machine is None:
            smallest = min(
                float(v["file_bytes"]) for m in self.kb.all("model") for v in m["variants"]
            )
            return Verdict(
                "maybe",
                smallest,
                "B",
                f"maybe: the smallest model of this base takes {format_value(smallest, 'B')}; which machine is there?",
                question="Which machine do you have?",
                laws=("L14",),
            )
        if not found:
            size = float(self.variant["file_bytes"])
            return Verdict(
                "no",
                size,
                "B",
                f"no: this base has no smaller model than {format_value(size, 'B')} for {self.tokens:.0f} tokens",
                laws=("L14",),
            )
        # the largest that is fast enough keeps the most; among equals the fastest
        model, variant, best = min(
            found, key=lambda f: (ORDER[f[2].verdict], -float(f[1]["file_bytes"]))
        )
        share = float(variant["file_bytes"]) / float(self.variant["file_bytes"])
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

    # ---- the cloud -----------------------------------------------------------------------------------------------

    def _forbidden(self) -> Verdict | None:
        results = evaluate_rules(self.kb, ["R16"], self.facts(self.machine, is_cloud=True))
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

    def _local_cost(self) -> float | None:
        """Return electricity per million tokens of the best local way, None where a part is not known."""
        keep, machine, price = (
            self.found.get("keep-existing"),
            self.machine,
            self.situation["price_kwh"],
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
        cost, _ = self.ledger.compute(
            "L21", watts=machine.load_w, price_kwh=float(price), tok_s=keep.speed.mid
        )
        return cost

    def api(self) -> Verdict:
        if (no := self._forbidden()) is not None:
            return no
        offers = [
            c for c in self.kb.all("cloud") if c["kind"] == "api" and c["model"] == self.model["id"]
        ]
        fresh = [c for c in offers if not date_faults(c, self.as_of, self.situation["country"])]
        if not fresh:
            stale = "; ".join(price_text(c, self.as_of) for c in offers)
            others = [
                c["model"] for c in self.kb.all("cloud") if c["kind"] == "api" and c not in offers
            ]
            family = [
                m for m in others if self.kb.get("model", m)["family"] == self.model["family"]
            ]
            identity = (
                f"; prices of {', '.join(sorted(set(family)))} are of another model"
                if family
                else ""
            )
            question = f"What does {self.model['name']} cost per million tokens today?"
            reason = f"maybe: {len(offers)} prices of {self.model['name']}, none that counts{f' ({stale})' if stale else ''}{identity}; {question}"
            return Verdict("maybe", 0.0, "offer", reason, question=question, laws=("L22",))
        offer = min(fresh, key=lambda c: float(c["price_out"]))
        money = offer["currency"]
        tok_in, tok_out = self.situation["tokens_in_month"], self.situation["tokens_out_month"]
        local = self._local_cost()
        per_mtok = float(offer["price_out"])
        if tok_in is None or tok_out is None:
            said = (
                f"; electricity alone is {local:.3g} {self.situation.currency}/Mtok here"
                if local
                else ""
            )
            question = "How many tokens a month go in and come out?"
            return Verdict(
                "maybe",
                per_mtok,
                f"{money}/Mtok",
                f"maybe: {per_mtok:g} {money}/Mtok of output ({price_text(offer, self.as_of)}){said}; {question}",
                question=question,
                laws=("L22",),
                extra={"cloud": offer["id"]},
            )
        ledger = Ledger(self.kb.laws, money)
        ledger.entries, ledger._seen = self.ledger.entries, self.ledger._seen
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
        allowed = self.situation["cloud_allowed"]
        if allowed is None:
            return Verdict(
                "maybe",
                month,
                f"{money}/month",
                f"maybe: {month:.3g} {money} a month; may your texts leave your house?",
                question="May your texts leave your house?",
                **common,
            )
        if local is None or self.situation.currency != money:
            return Verdict(
                "yes" if self.found["keep-existing"].verdict == "no" else "maybe",
                month,
                f"{money}/month",
                f"{'yes' if self.found['keep-existing'].verdict == 'no' else 'maybe'}: {month:.3g} {money} a month ({price_text(offer, self.as_of)}); what the local way costs is not known in {money}",
                question="What does a kWh cost?",
                **common,
            )
        horizon = float(self.situation["horizon_months"])
        own = local * float(tok_out) / 1e6
        verdict, op = ("yes", "<") if month < own else ("no", ">=")
        return Verdict(
            verdict,
            month,
            f"{money}/month",
            f"{verdict}: {month * horizon:.4g} {money} over {horizon:.0f} months {op} {own * horizon:.4g} of electricity alone here ({price_text(offer, self.as_of)})",
            op,
            own,
            **common,
        )

    def rent(self) -> Verdict:
        if (no := self._forbidden()) is not None:
            return no
        offers = [c for c in self.kb.all("cloud") if c["kind"] == "gpu-rent"]
        fresh = [c for c in offers if not date_faults(c, self.as_of, self.situation["country"])]
        if not fresh:
            stale = "; ".join(price_text(c, self.as_of) for c in offers)
            question = "What does an hour cost, and how many hours a day do you need?"
            return Verdict(
                "maybe",
                0.0,
                "offer",
                f"maybe: {len(offers)} prices to rent a card, none that counts{f' ({stale})' if stale else ''}; {question}",
                question=question,
                laws=("L17",),
            )
        offer = min(fresh, key=lambda c: float(c["price_hour"]))
        money, hours = offer["currency"], self.situation["hours_day"]
        per_hour = float(offer["price_hour"])
        if hours is None:
            return Verdict(
                "maybe",
                per_hour,
                f"{money}/h",
                f"maybe: {per_hour:g} {money}/h ({price_text(offer, self.as_of)}); how many hours a day?",
                question="How many hours a day does it compute?",
                laws=("L17",),
            )
        owned = [
            price_of(self.kb, o, self.as_of, self.situation["country"], money)
            for o in self.kb.all("offer")
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
        ledger = Ledger(self.kb.laws, money)
        ledger.entries, ledger._seen = self.ledger.entries, self.ledger._seen
        price_kwh = self.situation["price_kwh"]
        electricity = 0.0
        if price_kwh is not None:
            watts = float(self.kb.get("gpu", offer["gpu"]).get("board_power_w", 0))
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
        horizon = float(self.situation["horizon_months"])
        verdict = "yes" if months > 1.25 * horizon else "no" if months < 0.75 * horizon else "maybe"
        said = "never" if math.isinf(months) else f"{months:.3g} months"
        allowed = self.situation["cloud_allowed"]
        if allowed is None and verdict == "yes":
            verdict = "maybe"
        number = 1200.0 if math.isinf(months) else months
        return Verdict(
            verdict,
            number,
            "month",
            f"{verdict}: buying breaks even after {said}, the horizon is {horizon:.0f} months; L17 ({price_text(offer, self.as_of)})",
            ">" if verdict == "yes" else "<",
            horizon,
            None if math.isinf(months) else calc,
            laws=("L17", "L18"),
            price=priced[0],
            question="May your texts leave your house?" if allowed is None else None,
        )


def price_text(offer: Mapping[str, Any], as_of: str) -> str:
    """Return a cloud price with its day and age."""
    from runtime.advisor.kb import age_days

    what = (
        f"{offer['price_hour']:g} {offer['currency']}/h"
        if offer["kind"] == "gpu-rent"
        else f"{offer['price_in']:g}/{offer['price_out']:g} {offer['currency']}/Mtok"
    )
    return f"{what}, {offer['region']}, {offer['date']}, {age_days(offer['date'], as_of)} days old"


def _rank(verdict: Verdict) -> tuple[int, int, float]:
    # of noes, bytes that are short come before speeds that a rule forbids
    speed = verdict.speed.mid if verdict.speed else 0.0
    return (
        ORDER[verdict.verdict],
        0 if verdict.unit == "tok/s" else 1,
        -speed if verdict.unit == "tok/s" else verdict.number,
    )
