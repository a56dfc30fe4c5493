"""Advice as data: every path, what was assumed, calculated and looked up; the same bytes for the same inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runtime.advisor.facts import Machine, RuleResult, Situation
from runtime.advisor.kb import KnowledgeBase, age_days
from runtime.advisor.money import prices_of
from runtime.advisor.own_runs import compare, compare_own
from runtime.advisor.paths.cloud import price_text
from runtime.advisor.paths.walk import walk
from runtime.advisor.verdicts import Case, Verdict
from runtime.quantities import rounded

SCHEMA = 1


def advise(
    kb: KnowledgeBase,
    model: Mapping[str, Any],
    variant: Mapping[str, Any],
    machine: Machine | None,
    situation: Situation,
    as_of: str,
    *,
    question: str | None = None,
    heard: Mapping[str, Any] | None = None,
    asked: Sequence[str] = (),
    cache_bytes: float | None = None,
    own_runs: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the advice as plain JSON values, sizes in bytes, numbers at six digits.

    heard: what was taken from the question; asked: cards that it names.
    """
    situation = _fitted(situation, model)
    case = Case(kb, model, variant, machine, situation, as_of, cache_bytes, own_runs, asked=asked)
    verdicts = walk(case)
    paths = [_path(kb, name, verdict) for name, verdict in verdicts.items()]
    runs = {r["id"]: r for r in [*kb.all("run"), *own_runs]}
    cited = sorted({v.run for v in verdicts.values() if v.run})
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "kb_version": kb.version,
        "as_of": as_of,
        "question": question,
        "heard": heard,
        "model": {"id": model["id"], "name": model["name"], "variant": variant["id"]},
        "machine": _machine(machine),
        "situation": situation.document(),
        "unverified": _unverified(kb, model, machine),
        "assumptions": [
            {
                "key": key,
                "value": situation[key],
                "unit": situation.units.get(key),
                "question": kb.get("situation", key)["question"],
            }
            for key, status in situation.status.items()
            if status == "assumed"
        ],
        "paths": paths,
        "questions": list(dict.fromkeys(v.question for v in verdicts.values() if v.question)),
        "calculations": case.ledger.entries,
        "evidence": [_evidence(runs[name]) for name in cited],
        "own_runs": compare_own(kb, model, variant, machine, own_runs),
        "prices": prices(kb, as_of, situation, verdicts),
    }
    cleaned: dict[str, Any] = clean(found)
    return cleaned


def _unverified(kb: KnowledgeBase, model: Mapping[str, Any], machine: Machine | None) -> list[str]:
    """Return the documents that the advice rests on and that nobody has looked up."""
    used = [model]
    if machine is not None:
        used += [*machine.gpus, *machine.drives, *([machine.cpu] if machine.cpu else [])]
        if machine.system_id is not None:
            used.append(kb.get("system", machine.system_id))
    return sorted({d["id"] for d in used if d.get("status") == "unverified"})


def _fitted(situation: Situation, model: Mapping[str, Any]) -> Situation:
    """Return the situation with an assumed context no longer than the model's window."""
    most = float(model.get("ctx_max", math.inf))
    if situation.status["context_tokens"] != "assumed" or situation["context_tokens"] <= most:
        return situation
    return replace(situation, values={**situation.values, "context_tokens": most})


def prices(
    kb: KnowledgeBase, as_of: str, situation: Situation, verdicts: Mapping[str, Verdict]
) -> list[dict[str, Any]]:
    """Return the offers that were looked at, with their age."""
    looked = {v.price.offer["product"] for v in verdicts.values() if v.price is not None}
    found = []
    for product in sorted(looked):
        for condition in ("new", "used"):
            listed = prices_of(
                kb, product, condition, as_of, situation["country"], situation["currency"]
            )
            found += [
                {
                    "offer": p.offer["id"],
                    "item": product,
                    "name": kb.get("gpu", product)["name"]
                    if product.startswith("gpu-")
                    else product,
                    "amount": p.offer["price"],
                    "currency": p.offer["currency"],
                    "region": p.offer["region"],
                    "date": p.offer["date"],
                    "age_days": p.age_days,
                    "condition": condition,
                    "counts": p.is_valid,
                    "why_not": list(p.faults),
                    "source": p.offer["sources"][0],
                }
                for p in listed
            ]
    for cloud in filter(None, (v.extra.get("cloud") for v in verdicts.values())):
        if cloud:
            document = kb.get("cloud", cloud)
            found.append(
                {
                    "offer": cloud,
                    "item": document.get("model", document.get("gpu")),
                    "name": document["name"],
                    "text": price_text(document, as_of),
                    "amount": document.get("price_out", document.get("price_hour")),
                    "currency": document["currency"],
                    "region": document["region"],
                    "date": document["date"],
                    "age_days": age_days(document["date"], as_of),
                    "condition": document["kind"],
                    "counts": True,
                    "why_not": [],
                    "source": document["sources"][0],
                }
            )
    return found


def _path(kb: KnowledgeBase, name: str, v: Verdict) -> dict[str, Any]:
    speed = v.speed
    found: dict[str, Any] = {
        "id": name,
        "name": kb.get("path", name)["name"],
        "verdict": v.verdict,
        "number": {"value": v.number, "unit": v.unit},
        "reason": v.reason,
        "laws": list(v.laws),
        "rules": [_rule(r) for r in v.rules],
        "calc": v.calc,
        "run": v.run,
        "question": v.question,
        "details": dict(v.extra),
    }
    if v.threshold is not None:
        found["threshold"] = {"op": v.op, "value": v.threshold, "unit": v.unit}
    if speed is not None:
        found["speed"] = {
            "tok_s": [speed.lo, speed.mid, speed.hi],
            "is_upper_bound": speed.is_bound,
            "ceilings_tok_s": dict(speed.ceilings),
            "parts_ms": dict(speed.parts_ms),
            "hit_rate": speed.hit_rate,
            "law_tok_s": speed.law_mid,
        }
    if v.price is not None:
        found["price"] = {
            "amount": v.price.amount,
            "currency": v.price.currency,
            "offer": v.price.offer["id"],
            "age_days": v.price.age_days,
            "counts": v.price.is_valid,
            "text": v.price.text(),
        }
    return found


def _rule(r: RuleResult) -> dict[str, Any]:
    return {"id": r.id, "name": r.rule["name"], "status": r.status, "severity": r.rule["severity"]}


def _machine(machine: Machine | None) -> dict[str, Any] | None:
    if machine is None:
        return None
    return {
        "name": machine.name,
        "system": machine.system_id,
        "ram_bytes": machine.ram_bytes,
        "ram_bw": machine.ram_bw,
        "pcie_bw": machine.pcie_bw,
        "gpus": [g["id"] for g in machine.gpus],
        "cpu": machine.cpu["id"] if machine.cpu else None,
        "drives": [d["id"] for d in machine.drives],
        "disk_bw": machine.disk_bw,
        "is_disk_measured": machine.is_disk_measured,
        "unified_memory_bytes": machine.unified_memory_bytes,
        "measured": machine.measured,
    }


def _evidence(run: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: run[key]
        for key in ("id", "name", "value", "unit", "date", "evidence", "engine", "status")
    }


def reports(kb: KnowledgeBase) -> list[dict[str, Any]]:
    """Return every published run that a law speaks about: predicted, measured, the difference."""
    rows: list[dict[str, Any]] = clean(compare(kb))
    return rows


def clean(value: Any) -> Any:
    """Return plain JSON values with numbers at six digits; infinite ones become null."""
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return rounded(value)


def to_json(advice: Mapping[str, Any]) -> str:
    """Return advice as text: keys sorted, the same for the same inputs."""
    return json.dumps(advice, sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def draft_of(advice: Mapping[str, Any], language: str = "en") -> dict[str, Any]:
    """Return advice as the `check` block of an answer: what a careful writer would hand to check_answer."""
    model = advice["model"]
    entities = [
        {
            "ref": "e1",
            "kind": "model",
            "name": model["name"],
            "kb_id": model["id"],
            "variant": model["variant"],
        }
    ]
    machine = advice["machine"]
    if machine and machine["system"]:
        entities.append(
            {"ref": "e2", "kind": "system", "name": machine["name"], "kb_id": machine["system"]}
        )
    paths = []
    for path in advice["paths"]:
        entry = {
            "id": path["id"],
            "verdict": path["verdict"],
            "number": path["number"],
            "entities": [e["ref"] for e in entities],
            "why": path["reason"],
        }
        entry |= {key: path[key] for key in ("calc", "run") if path[key]}
        paths.append(entry)
    return {
        "schema": 1,
        "kb_version": advice["kb_version"],
        "language": language,
        "situation": advice["situation"],
        "entities": entities,
        "calculations": advice["calculations"],
        "paths": paths,
        "prices": [
            {k: p[k] for k in ("item", "amount", "currency", "region", "date", "source")}
            for p in advice["prices"]
            if any(p["date"] in path["reason"] for path in advice["paths"])
        ],
        "evidence": [e["id"] for e in advice["evidence"]],
        "override": [],
    }
