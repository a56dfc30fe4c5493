"""Checks of a draft's sense: verdicts against structure, rules, ceilings and what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.advisor.draft import EVIDENCE_TOLERANCE, Draft, Fault
from runtime.quantities import UnitError, parse_unit

EXPERT_PATHS = ("cpu-ram-offload-moe", "nvme-expert-streaming")
CLOUD_PATHS = ("cloud-api", "cloud-gpu-rent")


def _sense(d: Draft) -> Iterator[Fault]:
    verdicts = {p["id"]: p for p in d.block["paths"]}
    arch = next((d.documents[ref]["arch"] for ref in d.variants), None)
    for name in EXPERT_PATHS:
        if arch in ("dense", "diffusion") and verdicts.get(name, {}).get("verdict") == "yes":
            yield Fault(
                "S-PRE",
                f"paths.{name}",
                f"the model is {arch}: it has no experts, and reads all of its weights for each token",
                "the verdict is no",
                "no",
                "yes",
            )
    if d.situation["cloud_allowed"] is False:
        for name in CLOUD_PATHS:
            if verdicts.get(name, {}).get("verdict") == "yes":
                yield Fault(
                    "S-PRE",
                    f"paths.{name}",
                    "the situation forbids the cloud",
                    "the verdict is no",
                    "no",
                    "yes",
                )
    unified = verdicts.get("unified-memory", {})
    has_unified = any("unified_memory_bytes" in doc for doc in d.documents.values())
    if (
        unified.get("verdict") == "yes"
        and not has_unified
        and d.core.get("unified-memory") is not None
    ):
        yield Fault(
            "S-PRE",
            "paths.unified-memory",
            "no machine with unified memory is among the entities",
            "name it, or say maybe",
        )
    if all(
        verdicts.get(n, {}).get("verdict") == "yes" for n in ("keep-existing", "upgrade-existing")
    ):
        yield Fault(
            "S-CONFLICT",
            "paths.upgrade-existing",
            "keep-existing is yes, so no upgrade is needed",
            "no, 0 EUR needed",
        )
    single, multi = verdicts.get("new-single-gpu", {}), verdicts.get("multi-gpu", {})
    if single.get("verdict") == multi.get("verdict") == "yes":
        yield Fault(
            "S-CONFLICT", "paths.multi-gpu", "one card is enough by new-single-gpu", "no, 1 card"
        )
    if verdicts.get("keep-existing", {}).get("verdict") == "no" and re.search(
        r"nothing to buy|nichts (zu )?kaufen|ничего покупать", d.text, re.IGNORECASE
    ):
        yield Fault(
            "S-CONFLICT",
            "text",
            "keep-existing is no, and the text says that nothing has to be bought",
            "say one of them",
        )
    for name, path in verdicts.items():
        yield from _path_sense(d, name, path)
    yield from _sizes(d)


def _path_sense(d: Draft, name: str, path: Mapping[str, Any]) -> Iterator[Fault]:
    where = f"paths.{name}"
    core = d.core.get(name)
    number = path.get("number") or {}
    value = number.get("value")
    is_speed = number.get("unit") == "tok/s" and isinstance(value, (int, float))
    value = float(value) if isinstance(value, (int, float)) else math.nan
    wanted = float(d.situation["min_tok_s"])
    if is_speed and path["verdict"] == "yes" and value < wanted * 0.995:
        yield Fault(
            "S-DIRECTION",
            where,
            f"yes with {value:g} tok/s, {wanted:g} are wanted",
            "the verdict is no",
            "no",
            "yes",
        )
    if core is None:
        return
    blocking = [r.id for r in core.rules if r.is_("fail", "blocks")]
    if core.verdict == "no" and path["verdict"] == "yes":
        if not (name in EXPERT_PATHS and "R17" in blocking):
            yield Fault(
                "S-VERDICT",
                where,
                f"the laws and rules say {core.reason}",
                "no, or an override with its reason",
                "no",
                "yes",
            )
    elif core.verdict == "yes" and path["verdict"] == "no":
        if is_speed and value >= wanted:
            yield Fault(
                "S-DIRECTION",
                where,
                f"no with {value:g} tok/s, though {wanted:g} are enough and every rule passes",
                "the verdict is yes",
                "yes",
                "no",
            )
        else:
            yield Fault(
                "S-VERDICT",
                where,
                f"the laws and rules say {core.reason}",
                "yes, or say what forbids it",
                "yes",
                "no",
                is_warning=True,
            )
    elif core.verdict != path["verdict"]:
        yield Fault(
            "S-VERDICT",
            where,
            f"the laws and rules say {core.reason}",
            f"{core.verdict}, or say why not",
            core.verdict,
            path["verdict"],
            is_warning=True,
        )
    if not is_speed or core.speed is None or name == "smaller-model":
        return
    ceilings = dict(core.speed.ceilings)
    if (ceilings and core.speed.run is None) or (ceilings and value > 1.25 * core.speed.hi):
        top = min(ceilings.values())
        if value > top * 1.01:
            yield Fault(
                "S-CEIL",
                where,
                f"{value:g} tok/s is above the ceiling of {top:.3g} tok/s",
                "no speed passes what the slowest part carries",
                top,
                value,
            )
            return
    if (
        core.speed.run is not None
        and d.kb.documents["run"].get(core.speed.run, {}).get("evidence") == "measured"
    ):
        low, high = core.speed.lo, core.speed.hi
        if not low * (1 - EVIDENCE_TOLERANCE) <= value <= high * (1 + EVIDENCE_TOLERANCE):
            yield Fault(
                "S-EVIDENCE",
                where,
                f"{core.speed.run} measured {low:g} to {high:g} tok/s",
                "measured beats calculated",
                (low + high) / 2,
                value,
            )


def _sizes(d: Draft) -> Iterator[Fault]:
    for entry in d.block["calculations"]:
        if entry["law"] not in ("L08", "L23") or not entry.get("for"):
            continue
        variants = [d.variants[ref] for ref in entry["for"] if ref in d.variants]
        name = "resident_weights" if entry["law"] == "L08" else "need_bytes"
        given = entry["inputs"].get(name)
        if not variants or given is None or given["value"] is None:
            continue
        try:
            value = given["value"] * parse_unit(given["unit"])[0]
        except UnitError:
            continue
        least = float(variants[0].get("resident_bytes", variants[0]["file_bytes"]))
        if value < least * 0.99:
            yield Fault(
                "S-SIZE",
                f"calculations.{entry['ref']}",
                f"{value / 1e9:.3g} GB are less than the weights of {least / 1e9:.3g} GB",
                "count all weights",
                least,
                value,
            )


CHECKS = (_sense,)
