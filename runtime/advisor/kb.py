"""The knowledge base: yaml files checked against their schemas, references, units and coverage, with one clear sentence
for each mistake. Knows no path and no verdict.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.advisor import identity
from runtime.errors import UserError
from runtime.laws import Law, LawError, build_laws
from runtime.quantities import UnitError, parse_quantity, parse_unit
from runtime.yaml_files import read_yaml

DEFAULT_ROOT = Path(__file__).resolve().parents[2] / "conf" / "advisor"
FILES = {
    "source": "sources",
    "model": "models",
    "gpu": "gpus",
    "cpu": "cpus",
    "drive": "drives",
    "system": "systems",
    "engine": "engines",
    "run": "runs",
    "offer": "offers",
    "cloud": "clouds",
    "law": "laws",
    "rule": "rules",
    "path": "paths",
    "situation": "situations",
    "failure": "failures",
    "glossary": "glossary",
}
SCHEMA_VERSION = 1
_GUESSES = re.compile(r"^\s*(n/?a|none|unknown|null|tbd|todo|\?+|-+)\s*$", re.IGNORECASE)

# facts that rules may test beside the fields of documents; gathered by runtime.advisor.facts
FACTS = {
    "placement": {
        "uses_gpu",
        "uses_disk",
        "is_unified",
        "is_cloud",
        "buys_gpu",
        "has_price",
        "moves_experts",
        "has_run_here",
        "resident_bytes",
        "cache_bytes",
        "disk_need",
        "total_bytes",
    },
    "newgpu": {"psu_recommended_w"},
    "offer": {"is_valid"},
    "engine": {"kernels_checked", "pins_threads"},
}


class KnowledgeError(UserError):
    """A knowledge base that cannot be used; every mistake on a line."""

    exit_code = 3

    def __init__(self, faults: Sequence[str]) -> None:
        shown = "\n  ".join(faults[:40])
        more = f"\n  and {len(faults) - 40} more" if len(faults) > 40 else ""
        super().__init__(
            f"the knowledge base has {len(faults)} mistake{'s' * (len(faults) > 1)}:\n  {shown}{more}",
            "mend the file that is named; conf/advisor/schema has every field",
        )
        self.faults = tuple(faults)


@dataclass(frozen=True, slots=True)
class KnowledgeBase:
    """All documents by kind and id, the laws ready to compute."""

    version: str
    as_of: str  # YYYY-MM-DD
    documents: Mapping[str, Mapping[str, Mapping[str, Any]]]
    laws: Mapping[str, Law]
    schemas: Mapping[str, Mapping[str, Any]] = field(repr=False)

    def all(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the documents of a kind in their file's order."""
        return list(self.documents[kind].values())

    def get(self, kind: str, name: str) -> Mapping[str, Any]:
        """Return one document. Raises KeyError."""
        return self.documents[kind][name]

    def find(self, kind: str, name: str, variant: str | None = None) -> identity.Match:
        """Resolve a name among the documents of a kind."""
        return identity.resolve(name, self.all(kind), variant)

    def by_id(self, name: str) -> tuple[str, Mapping[str, Any]] | None:
        """Return (kind, document) of an id, whatever its kind."""
        for kind, documents in self.documents.items():
            if name in documents:
                return kind, documents[name]
        return None

    @property
    def paths(self) -> list[Mapping[str, Any]]:
        """The solution paths in the order in which they are walked."""
        return sorted(self.all("path"), key=lambda path: int(path["order"]))

    def counts(self) -> dict[str, int]:
        """Return how many documents of each kind there are."""
        return {kind: len(documents) for kind, documents in self.documents.items()}


def load(root: Path = DEFAULT_ROOT) -> KnowledgeBase:
    """Read and check a knowledge base. Raises KnowledgeError with every mistake that was found."""
    faults: list[str] = []
    head = _read(root / "kb.yaml", faults)
    head = head if isinstance(head, dict) else {}
    if head.get("schema_version") != SCHEMA_VERSION:
        faults.append(
            f"kb.yaml: schema_version must be {SCHEMA_VERSION}, got {head.get('schema_version')!r}"
        )
    if not re.fullmatch(r"\d{4}\.\d{1,2}\.\d+", str(head.get("kb_version", ""))):
        faults.append(f"kb.yaml: kb_version must be YYYY.MM.N, got {head.get('kb_version')!r}")
    if not is_date(str(head.get("as_of", ""))):
        faults.append(f"kb.yaml: as_of must be a day such as 2026-11-30, got {head.get('as_of')!r}")
    schemas = _schemas(root, faults)
    documents: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in FILES}
    law_file: Any = None
    # kinds whose file cannot be read: nothing is said about references to them
    unread: set[str] = set()
    present: set[str] = set()  # ids that stand in a file, also of documents with mistakes
    for kind, stem in FILES.items():
        name = f"{stem}.yaml"
        content = _read(root / name, faults)
        if kind == "law":
            law_file = content
            content = content.get("laws") if isinstance(content, dict) else None
        if not isinstance(content, list):
            if content is not None or not any(fault.startswith(name) for fault in faults):
                faults.append(f"{name}: a list of documents is wanted")
            unread.add(kind)
            continue
        named = {str(d["id"]) for d in content if isinstance(d, dict) and "id" in d}
        present |= named
        for number, document in enumerate(content, 1):
            _take(kind, name, number, document, schemas.get(kind, {}), documents, faults)
    laws: dict[str, Law] = {}
    if not any(fault.startswith("laws.yaml") for fault in faults):
        try:
            laws = build_laws(law_file)
        except (LawError, KeyError, TypeError, ValueError) as error:
            faults += [f"laws.yaml: {line}" for line in str(error).splitlines()]
    faults += _references(documents, schemas, unread, present)
    kb = KnowledgeBase(
        str(head.get("kb_version")), str(head.get("as_of")), documents, laws, schemas
    )
    faults += check(kb)
    if faults:
        raise KnowledgeError(faults)
    return kb


@functools.lru_cache(maxsize=4)
def _cached(root: Path, _stamp: tuple[tuple[str, int], ...]) -> KnowledgeBase:
    return load(root)


def current(root: Path = DEFAULT_ROOT) -> KnowledgeBase:
    """Return the knowledge base as it is on the disk now, read again only when a file changed."""
    stamp = tuple((p.name, p.stat().st_mtime_ns) for p in sorted(root.glob("**/*")) if p.is_file())
    return _cached(root, stamp)


def is_date(text: str) -> bool:
    """Tell whether a text is a day, YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def age_days(date: str, as_of: str) -> int:
    """Return the days from a date to `as_of`; negative for a date that is still to come."""
    return (datetime.date.fromisoformat(as_of) - datetime.date.fromisoformat(date)).days


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(path: Path, faults: list[str]) -> Any:
    try:
        return read_yaml(path)
    except OSError as error:
        faults.append(f"{path.name}: cannot be read: {error.strerror}")
    except ValueError as error:
        faults.append(str(error))
    return None


def _schemas(root: Path, faults: list[str]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for path in sorted((root / "schema").glob("*.json")):
        try:
            found[path.stem] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            faults.append(f"schema/{path.name}: cannot be read: {error}")
    missing = sorted({*FILES, "answer"} - found.keys())
    faults += [f"schema/{kind}.json is missing" for kind in missing]
    return found


def _take(
    kind: str,
    name: str,
    number: int,
    document: Any,
    schema: Mapping[str, Any],
    documents: dict[str, dict[str, dict[str, Any]]],
    faults: list[str],
) -> None:
    if not isinstance(document, dict):
        faults.append(f"{name}: document {number} is not a mapping")
        return
    label = f"{name}: {document.get('id', f'document {number}')}"
    found = list(schema_faults(document, schema))
    faults += [f"{label}: {fault}" for fault in found]
    if found:
        return
    identifier = str(document["id"])
    if identifier in documents[kind]:
        faults.append(f"{label}: the id stands twice")
        return
    try:
        documents[kind][identifier] = _in_base_units(document, schema)
    except UnitError as error:
        faults.append(f"{label}: {error}")


def schema_faults(document: Any, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a schema says against a document, a sentence each."""
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(schema).iter_errors(document)
    for error in sorted(errors, key=lambda e: (str(e.json_path), str(e.validator))):
        yield _sentence(error)
    yield from _guesses(document, "")


def _sentence(error: Any) -> str:
    where = ".".join(str(p) for p in error.absolute_path)
    at = f"{where}: " if where else ""
    value, wanted = error.instance, error.validator_value
    match error.validator:
        case "required":
            missing = [key for key in wanted if key not in value]
            return f"{at}{', '.join(missing)} is missing (leave out only what is optional)"
        case "additionalProperties":
            known = sorted(error.schema.get("properties", {}))
            odd = sorted(set(value) - set(known))
            return f"{at}unknown field {', '.join(map(str, odd))}; known: {', '.join(known)}"
        case "enum":
            return f"{at}{value!r} is none of {', '.join(map(str, wanted))}"
        case "type":
            kinds = wanted if isinstance(wanted, str) else " or ".join(wanted)
            return f"{at}{value!r} must be of type {kinds}"
        case "pattern":
            return f"{at}{value!r} does not have the form {wanted}"
        case "minItems":
            return f"{at}at least {wanted} entries are wanted, got {len(value)}"
        case "exclusiveMinimum":
            return f"{at}{value!r} must be above {wanted}; what is not known is left out, not written as 0"
        case "minimum":
            return f"{at}{value!r} must be at least {wanted}; what is not known is left out"
    return f"{at}{error.message}"


def _guesses(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _guesses(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _guesses(item, f"{where}.{number}")
    elif isinstance(value, str) and _GUESSES.match(value):
        yield f"{where}: {value!r} says nothing; what is not known is left out"
    elif value is None:
        yield f"{where}: is empty; what is not known is left out"


def _in_base_units(value: Any, schema: Mapping[str, Any]) -> Any:
    """Return a document whose texts with units are numbers in base units."""
    if "x-unit" in schema:
        unit = parse_unit(schema["x-unit"])[1]
        return parse_quantity(value, unit) if isinstance(value, str) else value
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        found = {}
        for key, item in value.items():
            try:
                found[key] = _in_base_units(item, properties.get(key, {}))
            except UnitError as error:
                raise UnitError(f"{key}: {error}") from error
        return found
    if isinstance(value, list):
        return [_in_base_units(item, schema.get("items", {})) for item in value]
    return value


# ---- references and coverage -----------------------------------------------------------------------------------------


def _references(
    documents: Mapping[str, Mapping[str, Mapping[str, Any]]],
    schemas: Mapping[str, Mapping[str, Any]],
    unread: set[str],
    present: set[str],
) -> Iterator[str]:
    for kind, found in documents.items():
        for identifier, document in found.items():
            label = f"{FILES[kind]}.yaml: {identifier}"
            for where, target, name in _pointers(document, schemas.get(kind, {}), ""):
                kinds = target.split("|")
                if name == "fx" and "fx" in kinds:
                    continue
                if unread & set(kinds):
                    continue
                is_there = any(name in documents.get(k, {}) for k in kinds)
                if not is_there and name not in present:
                    yield f"{label}: {where}: there is no {' or '.join(kinds)} {name!r}"
            for name in document.get("field_sources", {}):
                if name not in document:
                    yield f"{label}: field_sources names {name!r}, which the document does not have"


def _pointers(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, str]]:
    if "x-ref" in schema:
        yield where, schema["x-ref"], value
    elif isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            below = properties.get(key, others if isinstance(others, dict) else {})
            yield from _pointers(item, below, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for item in value:
            yield from _pointers(item, schema.get("items", {}), where)


def check(kb: KnowledgeBase) -> Iterator[str]:
    """Yield what does not hold together: fields that do not exist, aliases that stand twice, odd runs and prices."""
    fields = known_fields(kb)
    for law in kb.laws.values():
        for name, variable in law.variables.items():
            if variable.source is not None and variable.source not in fields:
                yield f"laws.yaml: {law.id}: {name} comes from {variable.source!r}, which is no field"
    for rule in kb.all("rule"):
        conditions = [rule, *rule.get("applies_when", ())]
        for side in ("left", "right"):
            for condition in conditions:
                named = condition.get(side)
                is_field = side == "left" or (
                    isinstance(named, str) and re.fullmatch(r"[a-z]+\.[a-z_]+", named)
                )
                if is_field and named not in fields:
                    yield f"rules.yaml: {rule['id']}: {named!r} is no field"
        if rule["op"] != "is_known" and "right" not in rule:
            yield f"rules.yaml: {rule['id']}: right is missing"
    orders = [path["order"] for path in kb.all("path")]
    if sorted(orders) != list(range(1, len(orders) + 1)):
        yield f"paths.yaml: order must be 1 to {len(orders)}, each once, got {sorted(orders)}"
    for kind in ("model", "gpu", "cpu", "system", "engine"):
        yield from _alias_faults(kb, kind)
    for run in kb.all("run"):
        yield from _run_faults(kb, run)
    for kind in ("offer", "cloud"):
        for document in kb.all(kind):
            if not is_date(document["date"]):
                yield f"{FILES[kind]}.yaml: {document['id']}: date {document['date']!r} is no day"
            if document.get("product") == "fx" and "to_currency" not in document:
                yield f"offers.yaml: {document['id']}: a rate of exchange needs to_currency"
    for source in kb.all("source"):
        if not is_date(source["retrieved"]):
            yield f"sources.yaml: {source['id']}: retrieved {source['retrieved']!r} is no day"


def known_fields(kb: KnowledgeBase) -> set[str]:
    """Return every dotted field that a law or a rule may name."""
    fields = {
        f"{kind}.{name}"
        for kind, schema in kb.schemas.items()
        for name in schema.get("properties", {})
    }
    variants = kb.schemas.get("model", {}).get("properties", {}).get("variants", {})
    fields |= {f"variant.{name}" for name in variants.get("items", {}).get("properties", {})}
    fields |= {f"situation.{name}" for name in kb.documents["situation"]} | {
        "situation.cache_bytes"
    }
    return fields | {f"{kind}.{name}" for kind, names in FACTS.items() for name in names}


def _alias_faults(kb: KnowledgeBase, kind: str) -> Iterator[str]:
    owners: dict[str, str] = {}
    for document in kb.all(kind):
        for alias in {identity.normalised(a) for a in (document["name"], *document["aliases"])}:
            other = owners.setdefault(alias, document["id"])
            if other != document["id"]:
                file = FILES[kind]
                yield f"{file}.yaml: {document['id']}: the alias {alias!r} is also one of {other}"


def _run_faults(kb: KnowledgeBase, run: Mapping[str, Any]) -> Iterator[str]:
    label = f"runs.yaml: {run['id']}"
    if not is_date(run["date"]):
        yield f"{label}: date {run['date']!r} is no day"
    try:
        parse_unit(run["unit"])
    except UnitError as error:
        yield f"{label}: {error}"
    if isinstance(run["value"], list) and run["value"][0] > run["value"][1]:
        yield f"{label}: a range is [least, most], got {run['value']}"
    model = kb.documents["model"].get(run.get("model", ""))
    if model is not None and run["evidence"] == "measured":
        known = [v["id"] for v in model["variants"]]
        if run["variant"] not in known:
            yield f"{label}: {model['id']} has no variant {run['variant']!r}; known: {', '.join(known) or 'none'}"
