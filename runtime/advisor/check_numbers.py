"""Checks of a draft's numbers: calculations recomputed, the number of each path, and the laws that a claim needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.advisor.draft import (
    CALC_TOLERANCE,
    FACT_TOLERANCE,
    Draft,
    Fault,
    ends,
    find_run,
    near,
    plain,
    shows,
)
from runtime.advisor.facts import machine_of
from runtime.advisor.paths.walk import walk
from runtime.advisor.slips import slip_name
from runtime.advisor.verdicts import Case
from runtime.laws import LawError
from runtime.quantities import UnitError, fits, parse_unit

KV_LAWS = {"gqa": "L05", "mla": "L06", "hybrid": "L07", "compressed": "L07C"}
SPEED_LAWS = frozenset({"L09", "L10", "L11", "L12", "L14", "L16"})


def _calculations(d: Draft) -> Iterator[Fault]:
    seen = set()
    for entry in d.block["calculations"]:
        where = f"calculations.{entry['ref']}"
        if entry["ref"] in seen:
            yield Fault(
                "E-SCHEMA", where, "the reference stands twice", "give each calculation its own"
            )
        seen.add(entry["ref"])
        yield from _calculation(d, entry, where)


def _calculation(d: Draft, entry: Mapping[str, Any], where: str) -> Iterator[Fault]:
    law = d.kb.laws.get(entry["law"])
    if law is None:
        yield Fault(
            "E-LAW", where, f"there is no law {entry['law']!r}", f"known: {', '.join(d.kb.laws)}"
        )
        return
    inputs: dict[str, tuple[float, str]] = {}
    for name, given in entry["inputs"].items():
        if given["value"] is None:
            yield Fault("E-CALC", f"{where}.{name}", "the input has no value", "give a number")
            return
        inputs[name] = (given["value"], given["unit"])
        yield from _unit_of_input(law, name, given, where)
    yield from _input_facts(d, entry, where)
    try:
        value, unit = law.compute(inputs)
    except LawError as error:
        code = (
            "E-UNIT"
            if "where" in str(error) or "unit" in str(error) or "not compared" in str(error)
            else "E-CALC"
        )
        yield Fault(code, where, str(error), f"{law.id} is {law.text}")
        return
    d.results[entry["ref"]] = (value, unit)
    stated = entry["result"]
    if math.isinf(value) or stated["value"] is None:
        if not (math.isinf(value) and stated["value"] is None):
            said = "never" if math.isinf(value) else f"{value:.6g} {unit}"
            yield Fault(
                "E-CALC",
                where,
                f"{law.id} gives {said}",
                "never is written as null",
                None if math.isinf(value) else value,
                stated["value"],
            )
        return
    try:
        factor, given_unit = parse_unit(stated["unit"])
    except UnitError as error:
        yield Fault(
            "E-UNIT", where, f"result: {error}", f"the law gives {unit}", unit, stated["unit"]
        )
        return
    if not fits(parse_unit(unit)[1], given_unit):
        yield Fault(
            "E-UNIT",
            where,
            f"the result is in {stated['unit'] or 'no unit'}, {law.id} gives {unit}",
            "give the result's unit",
            unit,
            stated["unit"],
        )
        return
    got = stated["value"] * factor
    if near(got, value, CALC_TOLERANCE) or shows(stated["value"], value / factor):
        return
    slip = slip_name(got, value, dict(inputs), d.situation)
    wanted = value / factor
    if slip is None:
        yield Fault(
            "E-CALC",
            where,
            f"{law.id} gives {wanted:.6g} {stated['unit']}, the draft says {stated['value']:.6g}",
            "recompute it with compute_law",
            wanted,
            stated["value"],
        )
    else:
        yield Fault(
            "E-SLIP",
            where,
            f"{law.id} gives {wanted:.6g} {stated['unit']}, the draft says {stated['value']:.6g}: {slip}",
            "recompute it with compute_law",
            wanted,
            stated["value"],
        )


def _unit_of_input(law: Any, name: str, given: Mapping[str, Any], where: str) -> Iterator[Fault]:
    if name in law.variables and given["unit"] == "" and law.variables[name].unit not in ("1", ""):
        yield Fault(
            "E-UNIT",
            f"{where}.{name}",
            "the input has no unit",
            f"give it in {law.variables[name].unit}",
            law.variables[name].unit,
            "",
        )


def _input_facts(d: Draft, entry: Mapping[str, Any], where: str) -> Iterator[Fault]:
    """Compare inputs with the facts of the entities that a calculation is for, and with the situation."""
    law = d.kb.laws[entry["law"]]
    about = [d.documents[ref] for ref in entry.get("for", ()) if ref in d.documents]
    variants = [d.variants[ref] for ref in entry.get("for", ()) if ref in d.variants]
    for name, variable in law.variables.items():
        if variable.source is None or name not in entry["inputs"]:
            continue
        kind, _, fieldname = variable.source.partition(".")
        given = entry["inputs"][name]
        try:
            value = given["value"] * parse_unit(given["unit"])[0]
        except UnitError:
            continue
        if kind == "situation":
            if (
                d.situation.status.get(fieldname) == "known"
                and not near(value, plain(d.situation[fieldname]), FACT_TOLERANCE)
                and name in ("tokens", "seqs", "hours_day", "price_kwh")
                and not (name == "seqs" and value == 1)
            ):
                known = d.situation[fieldname]
                yield Fault(
                    "E-INPUT",
                    f"{where}.{name}",
                    f"the situation says {fieldname} = {known:g}",
                    "take the situation's value",
                    known,
                    value,
                )
            continue
        candidates = (
            variants if kind == "variant" else [x for x in about if x["id"].startswith(f"{kind}-")]
        )
        facts = [c[fieldname] for c in candidates if fieldname in c]
        if kind == "model" and entry["law"] == "L01" and name == "params":
            continue  # a part of the model may be sized
        if facts and not any(near(value, plain(f), FACT_TOLERANCE) for f in facts):
            yield Fault(
                "E-INPUT",
                f"{where}.{name}",
                f"the knowledge base says {variable.source} = {plain(facts[0]):g}",
                "take its value",
                facts[0],
                value,
            )
    used = entry["law"]
    for document in about:
        kind = str(document.get("kv_kind"))
        if used in KV_LAWS.values() and kind in KV_LAWS and used != KV_LAWS[kind]:
            yield Fault(
                "E-KVKIND",
                where,
                f"{document['name']} keeps keys and values as {kind}: {KV_LAWS[kind]}, not {used}",
                f"use {KV_LAWS[kind]}",
                KV_LAWS[kind],
                used,
            )


def _situation(d: Draft) -> Iterator[Fault]:
    for key, entry in d.block["situation"].items():
        if entry["status"] == "known" and entry["value"] is None:
            yield Fault(
                "E-SCHEMA",
                f"situation.{key}",
                "known, but without a value",
                "give it, or say unknown",
            )


def _core(d: Draft) -> Iterator[Fault]:
    """Walk the paths for the draft's own model, machine and situation."""
    models = list(d.variants)
    systems = [doc for doc in d.documents.values() if doc["id"].startswith("system-")]
    if not models:
        return
    if systems:
        d.machine = machine_of(d.kb, systems[0]["id"])
    model, variant = d.documents[models[0]], d.variants[models[0]]
    as_of = str(d.block.get("as_of", d.kb.as_of))
    d.core = walk(Case(d.kb, model, variant, d.machine, d.situation, as_of))
    yield from ()


def _paths(d: Draft) -> Iterator[Fault]:
    wanted = [path["id"] for path in d.kb.paths]
    got = [p["id"] for p in d.block["paths"]]
    for name in wanted:
        if got.count(name) == 0:
            yield Fault(
                "E-PATHS",
                f"paths.{name}",
                f"the path {name} is missing",
                "walk all of them, each with a verdict and a number",
            )
        elif got.count(name) > 1:
            yield Fault(
                "E-PATHS",
                f"paths.{name}",
                f"the path {name} stands {got.count(name)} times",
                "once each",
            )
    for name in sorted(set(got) - set(wanted)):
        yield Fault(
            "E-PATHS", f"paths.{name}", f"there is no path {name!r}", f"known: {', '.join(wanted)}"
        )
    for path in d.block["paths"]:
        where = f"paths.{path['id']}"
        if path["verdict"] not in ("yes", "no", "maybe"):
            yield Fault(
                "E-PATHS",
                where,
                f"the verdict {path['verdict']!r} is none of yes, no, maybe",
                "say one of them",
            )
        number = path.get("number") or {}
        value, unit = number.get("value"), number.get("unit")
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not isinstance(unit, str)
            or not unit
        ):
            yield Fault(
                "E-PATHS",
                where,
                "the verdict has no number with a unit",
                "give the deciding number and its unit",
            )
            continue
        yield from _path_number(d, path, float(value), unit, where)


def _path_number(
    d: Draft, path: Mapping[str, Any], value: float, unit: str, where: str
) -> Iterator[Fault]:
    try:
        factor, given = parse_unit(unit)
    except UnitError as error:
        yield Fault("E-UNIT", where, str(error), "use a unit such as tok/s, GB, EUR")
        return
    got = value * factor
    accepted: list[float] = []
    if path.get("calc"):
        if path["calc"] not in {c["ref"] for c in d.block["calculations"]}:
            yield Fault(
                "E-NUMBER",
                where,
                f"there is no calculation {path['calc']!r}",
                "name one of the block",
            )
            return
        if path["calc"] in d.results:
            result, result_unit = d.results[path["calc"]]
            base = parse_unit(result_unit)[1]
            if fits(base, given) or fits(given, base):
                accepted.append(result)
            elif base.to_the(-1) == given and result:
                accepted.append(1 / result)
    run = find_run(d, path.get("run"))
    if run is not None:
        low, high = ends(run)
        run_factor, run_unit = parse_unit(run["unit"])
        if run_unit == given and low * run_factor * 0.99 <= got <= high * run_factor * 1.01:
            return
    core = d.core.get(path["id"])
    if core is not None and _same_unit(core.unit, given):
        accepted.append(core.number)
    if (
        path["id"] in d.core
        and core is not None
        and given == parse_unit(core.unit)[1]
        and not path.get("calc")
        and run is None
        and near(got, core.number, CALC_TOLERANCE)
    ):
        return
    facts = [
        v
        for document in [*d.documents.values(), *d.variants.values()]
        for v in document.values()
        if isinstance(v, (int, float)) and not isinstance(v, bool)
    ]
    facts += [plain(d.situation[k]) for k in d.situation.values]
    facts += [float(p["amount"]) for p in d.block["prices"]]
    if not path.get("calc") and run is None and any(near(got, f, CALC_TOLERANCE) for f in facts):
        return
    if any(near(got, a, CALC_TOLERANCE) or shows(value, a / factor) for a in accepted):
        return
    expected = accepted[0] / factor if accepted else None
    slip = slip_name(got, accepted[0], {}, d.situation) if accepted else None
    said = f"; {slip}" if slip else ""
    yield Fault(
        "E-NUMBER",
        where,
        f"{value:g} {unit} is the result of no calculation or run that the path names{said}",
        "name its calculation or run",
        expected,
        value,
    )


def _same_unit(text: str, given: Any) -> bool:
    return fits(parse_unit(text)[1], given)


def _laws(d: Draft) -> Iterator[Fault]:
    """The laws that a kind of claim needs must be among the calculations."""
    used = {c["law"] for c in d.block["calculations"]}
    speeds = [
        p
        for p in d.block["paths"]
        if (p.get("number") or {}).get("unit") == "tok/s" and p["verdict"] != "no"
    ]
    without = [p["id"] for p in speeds if not p.get("run") and not p.get("calc")]
    core_only = [
        n for n in without if n in d.core and d.core[n].speed is None and d.core[n].run is None
    ]
    if [n for n in without if n not in core_only] and not used & SPEED_LAWS:
        yield Fault(
            "E-LAW",
            "calculations",
            f"{', '.join(without)} claims a speed, and no law of speed is computed",
            "compute L14 or L16",
        )
    for name, laws in (("cloud-api", ("L22",)), ("cloud-gpu-rent", ("L17",))):
        verdict = next((p for p in d.block["paths"] if p["id"] == name), None)
        if verdict is not None and verdict["verdict"] == "yes" and not used & set(laws):
            yield Fault(
                "E-LAW",
                f"paths.{name}",
                f"{name} is yes, and {laws[0]} is not computed",
                f"compute {laws[0]}",
            )
    for ref, variant in d.variants.items():
        document = d.documents[ref]
        if "params_total" in document and "file_bytes" not in variant and "L01" not in used:
            yield Fault("E-LAW", f"entities.{ref}", "the model is sized by nothing", "compute L01")


CHECKS = (_calculations, _situation, _core, _paths, _laws)
