"""A path's verdict, and the case that it is about: yes, no or maybe with one number, its unit and a reason.

A verdict is made by code from laws, rules and measured runs; reasons come from templates, never from free text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.advisor.facts import Machine, RuleResult, Situation, evaluate_rules
from runtime.advisor.kb import KnowledgeBase
from runtime.advisor.ledger import Ledger
from runtime.advisor.money import Price
from runtime.advisor.speeds import Speed, Speeds
from runtime.quantities import format_value

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


class Case:
    """A variant, a machine (or none), a situation and a day; `found` holds the verdicts of the paths walked so far."""

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
        asked: Sequence[str] = (),
    ) -> None:
        """asked: cards that the question names, by id: what they would give is said in any case."""
        self.asked = tuple(asked)
        self.kb, self.model, self.variant, self.machine = kb, model, variant, machine
        self.situation, self.as_of, self.cache_bytes, self.own_runs = (
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

    def cache_of(self, machine: Machine) -> float:
        """Return the RAM cache of experts on a machine: as told, else by default, at most all of them."""
        routed = self.speeds.routed_set()
        cache = machine.default_cache() if self.cache_bytes is None else self.cache_bytes
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
        self, speed: Speed | None, rules: Sequence[RuleResult], asks: str, *, laws: Sequence[str]
    ) -> Verdict:
        """Return the verdict of a way that costs nothing: rules first, then the speed's band against the speed wanted.

        asks: the question that stays open when no speed is known.
        """
        blocked = [r for r in rules if r.is_("fail", "blocks")]
        open_rules = [r for r in rules if r.is_("unknown", "blocks", "unreliable")]
        doubts = [r for r in rules if r.is_("fail", "unreliable")]
        common: dict[str, Any] = {"rules": tuple(rules), "laws": tuple(laws), "speed": speed}
        if blocked:
            return self._blocked(blocked, speed, common)
        if speed is None:
            nbytes, calc = self.speeds.token_bytes()
            said = f"maybe: {format_value(nbytes, 'B')} for each token; {asks}"
            return Verdict("maybe", nbytes, "B", said, calc=calc, question=asks, **common)
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
                self._line("maybe", speed.mid, "", f"{source}; {open_rules[0].id}: {question}"),
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
                    "maybe", speed.mid, "", f"{source}; {doubts[0].id}: {rule['consequence']}"
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
                    "maybe",
                    speed.mid,
                    " at most",
                    f"{source}, an upper bound: arithmetic is not counted",
                ),
                **common,
            )
        if speed.lo >= self.wanted:
            return Verdict(
                "yes", speed.mid, "tok/s", self._line("yes", speed.mid, ">=", source), **common
            )
        band = f"{source}; between {speed.lo:.3g} and {speed.hi:.3g}"
        return Verdict(
            "maybe", speed.mid, "tok/s", self._line("maybe", speed.mid, "", band), **common
        )

    def _source(self, speed: Speed) -> str:
        if speed.run is not None:
            return f"measured, {speed.run}"
        return next(str(e["law"]) for e in self.ledger.entries if e["ref"] == speed.calc)

    def _line(self, verdict: str, number: float, op: str, source: str) -> str:
        """Return a reason: `op` is < or >= where the number decides, else empty or what the number is."""
        compared = f" {op} {self.wanted:g}" if op in ("<", ">=") else f"{op}, {self.wanted:g}"
        return f"{verdict}: {format_value(number, 'tok/s')}{compared} tok/s wanted; {source}"

    def _blocked(
        self, blocked: Sequence[RuleResult], speed: Speed | None, common: dict[str, Any]
    ) -> Verdict:
        result, rule = blocked[0], blocked[0].rule
        change = f"; {rule['workaround']} would change it" if "workaround" in rule else ""
        if len(blocked) > 1:
            change += f"; also {', '.join(r.id for r in blocked[1:])}"
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
        if speed is None:
            nbytes, calc = self.speeds.token_bytes()
            said = f"no: {format_value(nbytes, 'B')} for each token"
            return Verdict(
                "no",
                nbytes,
                "B",
                f"{said}; {result.id}: {rule['consequence']}{change}",
                calc=calc,
                **common,
            )
        return Verdict(
            "no",
            speed.mid,
            "tok/s",
            f"no: {format_value(speed.mid, 'tok/s')} on paper; {result.id}: {rule['consequence']}{change}",
            calc=speed.calc,
            run=speed.run,
            **common,
        )

    def rules_of(
        self, path: str, facts: Mapping[str, Mapping[str, Any]], *more: str
    ) -> list[RuleResult]:
        """Return a path's rules, evaluated."""
        names = [*self.kb.get("path", path).get("rules", ()), *more]
        return evaluate_rules(self.kb, list(dict.fromkeys(names)), facts)


def rank(verdict: Verdict) -> tuple[int, int, float]:
    """Return the key that sorts ways: yes before maybe before no, then the fastest."""
    # of noes, bytes that are short come before speeds that a rule forbids
    speed = verdict.speed.mid if verdict.speed else 0.0
    return (
        ORDER[verdict.verdict],
        0 if verdict.unit == "tok/s" else 1,
        -speed if verdict.unit == "tok/s" else verdict.number,
    )
