"""Checks of a draft's entities: each is one document of the base, or brings its own sourced facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from runtime.advisor import identity
from runtime.advisor.draft import (
    FACT_TOLERANCE,
    Draft,
    Fault,
    near,
)

_VAGUE = re.compile(
    r"^\s*(a|an|some|any|ein|eine|какая|какой)\s|modern|typical|decent|some gpu", re.IGNORECASE
)


def _entities(d: Draft) -> Iterator[Fault]:
    refs = [e["ref"] for e in d.block["entities"]]
    for ref in sorted({r for r in refs if refs.count(r) > 1}):
        yield Fault(
            "E-SCHEMA", f"entities.{ref}", "the reference stands twice", "give each entity its own"
        )
    for entity in d.block["entities"]:
        yield from _entity(d, entity)


def _entity(d: Draft, entity: Mapping[str, Any]) -> Iterator[Fault]:
    where, kind, name = f"entities.{entity['ref']}", entity["kind"], entity["name"]
    is_word = len(identity.tokens(name)) < 2 and not any(c.isdigit() for c in name)
    if (_VAGUE.search(name) or is_word) and not entity.get("kb_id"):
        yield Fault("E-VAGUE", where, f"{name!r} is no product", "name the exact model or device")
        return
    match = d.kb.find(kind, name, entity.get("variant"))
    wanted = entity.get("kb_id")
    if wanted is None:
        if match.document is not None:
            yield from _take_entity(d, entity, match.document, match.variant)
        elif entity.get("facts"):
            yield from _own_facts(entity, where)
        else:
            near = ", ".join(match.candidates) or "nothing"
            yield Fault(
                "E-IDENT",
                where,
                f"{match.why}; near it: {near}",
                "name the document's id, or give facts with their sources",
            )
        return
    document = d.kb.documents[kind].get(wanted)
    if document is None:
        yield Fault(
            "E-IDENT",
            where,
            f"there is no {kind} {wanted!r} in the knowledge base",
            "use list_entities",
        )
        return
    named = match.document or d.kb.find(kind, name).document
    if named is None or named["id"] != wanted:
        odd = identity.difference(name, document["name"])
        said = f" ({', '.join(odd)} makes it another product)" if odd else ""
        yield Fault(
            "E-IDENT",
            where,
            f"{name!r} is not {document['name']!r}{said}",
            "name the entity as its document does",
            document["name"],
            name,
        )
        return
    variant = None
    if entity.get("variant"):
        variant = identity.find_variant(document, entity["variant"])
        if variant is None:
            known = ", ".join(v["id"] for v in document.get("variants", ())) or "none"
            yield Fault(
                "E-IDENT",
                where,
                f"{document['name']} has no variant {entity['variant']!r}; known: {known}",
                "name one of them",
            )
            return
    yield from _take_entity(d, entity, document, variant or match.variant)


def _take_entity(
    d: Draft,
    entity: Mapping[str, Any],
    document: Mapping[str, Any],
    variant: Mapping[str, Any] | None,
) -> Iterator[Fault]:
    d.documents[entity["ref"]] = document
    if entity["kind"] == "model" and document["variants"]:
        d.variants[entity["ref"]] = variant or document["variants"][0]
    for name, value in entity.get("facts", {}).items():
        stated = value.get("value") if isinstance(value, Mapping) else value
        known = document.get(name, (variant or {}).get(name))
        if (
            isinstance(known, (int, float))
            and isinstance(stated, (int, float))
            and not near(stated, known, FACT_TOLERANCE)
        ):
            yield Fault(
                "E-INPUT",
                f"entities.{entity['ref']}.{name}",
                f"the knowledge base says {known:g}",
                "take its value",
                known,
                stated,
            )


_NEEDED = {
    "model": ("arch", "layers", "ctx_max", "kv_kind", "modality"),
    "gpu": ("vram_bytes", "vram_bw", "compute_capability"),
    "cpu": ("isa",),
    "drive": ("interface", "read_bw_measured"),
    "system": ("ram_bytes",),
    "engine": ("formats",),
}


def _own_facts(entity: Mapping[str, Any], where: str) -> Iterator[Fault]:
    facts = entity["facts"]
    needed = list(_NEEDED[entity["kind"]])
    if entity["kind"] == "model" and "file_bytes" not in facts:
        needed += ["params_total", "bits_eff"]
    missing = [name for name in needed if name not in facts]
    if missing:
        yield Fault(
            "E-VAGUE",
            where,
            f"not in the knowledge base, and {', '.join(missing)} is not given",
            "give each with its source",
        )
    values = {n: (v.get("value") if isinstance(v, Mapping) else v) for n, v in facts.items()}
    unknown = [n for n, v in values.items() if v == "unknown"]
    if len(unknown) > 0.3 * max(1, len(needed)):
        yield Fault(
            "E-VAGUE",
            where,
            f"{', '.join(unknown)} is unknown: too much to judge",
            "find out at least 70 % of the facts",
        )
    for name, value in facts.items():
        has_source = isinstance(value, Mapping) and (value.get("source") or value.get("web"))
        if not has_source and not entity.get("web") and values[name] != "unknown":
            yield Fault(
                "E-SOURCE", f"{where}.{name}", "the fact has no source", "add where it comes from"
            )


CHECKS = (_entities,)
