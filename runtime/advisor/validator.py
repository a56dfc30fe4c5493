"""Judge a draft answer: recompute every number, resolve every name, walk every path again, and say all that is wrong.

A draft is text with one block fenced as `check` that holds JSON (conf/advisor/schema/answer.json). Nothing is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from runtime.advisor import check_entities, check_numbers, check_sense, check_sources, check_text
from runtime.advisor.draft import Draft, Fault
from runtime.advisor.facts import situation_of
from runtime.advisor.kb import KnowledgeBase, schema_faults
from runtime.errors import UserError
from runtime.quantities import rounded

MAX_NBYTES = 256 * 1024
MAX_ROUNDS = 3
HARD = frozenset({"S-PRE", "S-CEIL", "S-SIZE"})  # no override reaches these


def check_answer(
    kb: KnowledgeBase,
    answer: str,
    *,
    last_user_message: str = "",
    searched_web: bool = True,
    known_before: Mapping[str, Any] | None = None,
    rounds_used: int = 0,
) -> dict[str, Any]:
    """Return {ok, errors, warnings, recomputed, paths_walked, rounds_left}; all errors at once, in a fixed order.

    known_before: situation values of the same conversation that may only change by being said anew.
    """
    left = max(0, MAX_ROUNDS - rounds_used - 1)
    if len(answer.encode("utf-8", "replace")) > MAX_NBYTES:
        fault = Fault(
            "E-FORMAT", "", f"the answer has more than {MAX_NBYTES // 1024} KiB", "shorten it"
        )
        return _result([fault], {}, [], left)
    found = _take_apart(kb, answer, last_user_message, searched_web, known_before or {})
    if isinstance(found, list):
        return _result(found, {}, [], left)
    faults: list[Fault] = []
    checks = (
        _version,
        *check_entities.CHECKS,
        *check_numbers.CHECKS,
        *check_sources.CHECKS,
        *check_sense.CHECKS,
        *check_text.CHECKS,
    )
    for check in checks:
        faults += check(found)
    faults = list(_overridden(found, faults))
    recomputed = {ref: {"value": rounded(v), "unit": u} for ref, (v, u) in found.results.items()}
    return _result(faults, recomputed, [p.get("id") for p in found.block["paths"]], left)


def _result(
    faults: Sequence[Fault], recomputed: Mapping[str, Any], paths: Sequence[Any], left: int
) -> dict[str, Any]:
    unique = {(f.code, f.path, f.message): f for f in faults}
    ordered = sorted(unique.values(), key=lambda f: (f.path, f.code, f.message))

    def plain(fault: Fault) -> dict[str, Any]:
        entry = {k: v for k, v in asdict(fault).items() if v is not None and k != "is_warning"}
        return {k: rounded(v) for k, v in entry.items()}

    errors = [plain(f) for f in ordered if not f.is_warning]
    return {
        "ok": not errors,
        "errors": errors,
        "warnings": [plain(f) for f in ordered if f.is_warning],
        "recomputed": dict(recomputed),
        "paths_walked": list(paths),
        "rounds_left": left,
    }


def _take_apart(
    kb: KnowledgeBase,
    answer: str,
    last_message: str,
    searched_web: bool,
    known_before: Mapping[str, Any],
) -> Draft | list[Fault]:
    blocks = re.findall(r"```check[ \t]*\n(.*?)```", answer, re.DOTALL)
    if len(blocks) != 1:
        return [
            Fault(
                "E-FORMAT",
                "",
                f"{len(blocks)} blocks fenced as ```check, exactly one is wanted",
                "add one block ```check with JSON",
            )
        ]
    try:
        block = json.loads(blocks[0], parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return [
            Fault(
                "E-FORMAT",
                "check",
                f"the block is no JSON: {error}",
                "write numbers as 1234.5 and close all brackets",
            )
        ]
    try:
        wrong = [
            f
            for f in schema_faults(block, kb.schemas["answer"])
            if "says nothing" not in f and "is empty" not in f
        ]
    except RecursionError:
        wrong = ["the block is nested too deep"]
    if wrong:
        return [
            Fault("E-SCHEMA", "check", fault, "see /schema/answer.json") for fault in wrong[:50]
        ]
    too_large = [
        c["ref"]
        for c in block["calculations"]
        for v in [*c["inputs"].values(), c["result"]]
        if v["value"] is not None and abs(v["value"]) > 1e30
    ]
    if too_large:
        return [
            Fault("E-SCHEMA", ref, "a number beyond 1e30", "give it in a fitting unit")
            for ref in too_large
        ]
    told = {
        k: {"value": v["value"], "unit": v.get("unit", "")}
        for k, v in block["situation"].items()
        if v["status"] != "unknown" and v["value"] is not None
    }
    try:
        situation = situation_of(kb, told)
        stated = {k: v["status"] for k, v in block["situation"].items() if k in told}
        situation = replace(situation, status={**situation.status, **stated})
    except UserError as error:
        return [Fault("E-SCHEMA", "situation", error.message, error.hint)]
    text = re.sub(r"```check[ \t]*\n.*?```", " ", answer, flags=re.DOTALL)
    return Draft(text, block, kb, situation, last_message, searched_web, known_before)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _version(d: Draft) -> Iterator[Fault]:
    said, mine = d.block["kb_version"], d.kb.version
    if said == mine:
        return
    is_minor = said.rpartition(".")[0] == mine.rpartition(".")[0]
    yield Fault(
        "E-VERSION",
        "kb_version",
        f"made with knowledge base {said}, this is {mine}",
        "get the context again and recompute",
        mine,
        said,
        is_minor,
    )


def _overridden(d: Draft, faults: Iterable[Fault]) -> Iterator[Fault]:
    for fault in faults:
        override = next(
            (
                o
                for o in d.block["override"]
                if f"paths.{o['path']}" == fault.path and o["code"] == fault.code
            ),
            None,
        )
        if override is None or fault.is_warning:
            yield fault
        elif (
            fault.code in ("S-VERDICT", "S-EVIDENCE")
            and override["reason"].strip()
            and override["source"].strip()
        ):
            yield Fault(
                fault.code,
                fault.path,
                f"{fault.message}; overridden: {override['reason']}",
                fault.fix,
                fault.expected,
                fault.got,
                True,
            )
        else:
            yield fault
            if fault.code in HARD:
                yield Fault(fault.code, fault.path, "this cannot be overridden", "mend it")


def answer_text(block: Mapping[str, Any], prose: str) -> str:
    """Return a draft: prose, then the block."""
    return f"{prose}\n\n```check\n{json.dumps(block, ensure_ascii=False, indent=1)}\n```\n"
