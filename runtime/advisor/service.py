"""What the advisor answers, as plain functions: the tools of the MCP server and their HTTP twins call these and nothing
else. Knows no transport. Arguments hold no path and no code; filters are parsed, never evaluated.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from runtime.advisor import kb as knowledge
from runtime.advisor.advice import advise, clean, reports
from runtime.advisor.facts import Machine, machine_from, machine_of, situation_of
from runtime.advisor.kb import KnowledgeBase, is_date
from runtime.advisor.ledger import Ledger
from runtime.advisor.own_runs import read_own_runs
from runtime.advisor.question import hear
from runtime.advisor.question_hardware import hear_hardware, heard_of, machine_heard
from runtime.advisor.speeds import Speeds
from runtime.advisor.validator import MAX_NBYTES, MAX_ROUNDS, check_answer
from runtime.errors import UserError
from runtime.laws import LawError

MAX_PARTS, PART_SECONDS, MAX_DRAFTS = 60, 3600.0, 500
_T = TypeVar("_T")
KINDS = tuple(kind for kind in knowledge.FILES if kind != "glossary")
WORK_ORDER = [
    "read the question; ask what is unknown of priority 1, or go on with what is assumed and say so first",
    "advise, or predict and compute_law for single numbers; never reckon yourself",
    "write the answer in the person's language, numbers with units, each from a calculation, fact, price or run",
    "end with one block ```check that holds JSON by the answer schema",
    f"check_answer; mend all errors and check again, at most {MAX_ROUNDS} times",
]


class ServiceError(Exception):
    """An argument that cannot be used: a status as in HTTP, a sentence, the field."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.field = status, message, field


class Context(BaseModel):
    """All that a writer needs to start."""

    kb_version: str
    as_of: str
    work_order: list[str]
    paths: list[dict[str, Any]]
    situation: list[dict[str, Any]]
    laws: list[dict[str, Any]]
    rules: list[dict[str, Any]]
    answer_schema: dict[str, Any]


class Advice(BaseModel):
    """Every path with its verdict, number and reason; what was assumed, calculated, measured and priced."""

    kb_version: str
    as_of: str
    question: str | None
    heard: dict[str, Any] | None
    model: dict[str, Any]
    machine: dict[str, Any] | None
    situation: dict[str, Any]
    unverified: list[str]
    assumptions: list[dict[str, Any]]
    paths: list[dict[str, Any]]
    questions: list[str]
    calculations: list[dict[str, Any]]
    evidence: list[dict[str, Any]]
    own_runs: list[dict[str, Any]]
    prices: list[dict[str, Any]]


class Prediction(BaseModel):
    """The speed of one placement: a band in tok/s, ceilings, and where a token's milliseconds go."""

    kb_version: str
    model: str
    variant: str
    machine: str
    cache_bytes: float
    tok_s: list[float]
    is_upper_bound: bool
    run: str | None
    law_tok_s: float | None
    ceilings_tok_s: dict[str, float]
    parts_ms: dict[str, float]
    hit_rate: float | None
    calculations: list[dict[str, Any]]
    reports: list[dict[str, Any]]


class LawResult(BaseModel):
    """One law evaluated; value is null where the law says never."""

    law: str
    value: float | None
    unit: str
    formula: str
    validity: str


class Document(BaseModel):
    """One document of the knowledge base, or the candidates that a name may mean."""

    kb_version: str
    kind: str | None
    document: dict[str, Any] | None
    candidates: list[str]


class Rows(BaseModel):
    """Documents of a kind; next_cursor is null at the end."""

    kb_version: str
    kind: str
    rows: list[dict[str, Any]]
    total: int
    next_cursor: int | None


class CheckResult(BaseModel):
    """What is wrong with a draft, all at once."""

    kb_version: str
    ok: bool
    errors: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    recomputed: dict[str, Any]
    paths_walked: list[str]
    rounds_left: int


class Service:
    """The eight answers, over the knowledge base as it is on the disk now."""

    def __init__(
        self,
        root: Path = knowledge.DEFAULT_ROOT,
        outputs: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """outputs: folder with this project's own bench results, None for none."""
        self._root, self._outputs, self._clock = root, outputs, clock
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Any]] = {}  # conversation -> known situation
        self._rounds: dict[str, int] = {}
        self._drafts: dict[str, tuple[float, dict[int, str]]] = {}

    @property
    def kb(self) -> KnowledgeBase:
        return knowledge.current(self._root)

    def get_context(self) -> Context:
        """Return the order of work, paths, situation keys, laws, rules and the schema of an answer."""
        kb = self.kb
        return Context(
            kb_version=kb.version,
            as_of=kb.as_of,
            work_order=WORK_ORDER,
            paths=clean(kb.paths),
            situation=clean(kb.all("situation")),
            laws=[
                {
                    "id": x.id,
                    "name": x.name,
                    "formula": x.text,
                    "unit": x.unit,
                    "validity": x.validity,
                    "inputs": x.inputs,
                }
                for x in kb.laws.values()
            ],
            rules=[
                {k: r[k] for k in ("id", "name", "severity", "consequence")} for r in kb.all("rule")
            ],
            answer_schema=dict(kb.schemas["answer"]),
        )

    def advise(
        self,
        model: str | None = None,
        hw: str | None = None,
        hardware: dict[str, Any] | None = None,
        situation: dict[str, Any] | None = None,
        question: str | None = None,
        variant: str | None = None,
        as_of: str | None = None,
    ) -> Advice:
        """Walk all twelve paths for a model on a machine. hw: a machine of the base; hardware: parts and sizes."""
        kb = self.kb
        heard = _asked("question", lambda: hear(kb, question)) if question else None
        if model is None and heard is not None and len(heard.models) == 1:
            model = heard.models[0]
        if model is None:
            raise ServiceError(400, "which model? name one of list_entities kind=model", "model")
        document, found_variant = self._model(kb, model, variant)
        machine = self._machine(kb, hw, hardware)
        parts = hear_hardware(kb, question) if question else None
        if parts is not None and hardware is None:
            machine = machine_heard(kb, parts, machine, is_named=hw is not None)
        told = {**(heard.situation if heard else {}), **(situation or {})}
        day = as_of or kb.as_of
        if not is_date(day):
            raise ServiceError(400, f"as_of is {day!r}; give a day such as 2026-11-30", "as_of")
        parsed = _asked("situation", lambda: situation_of(kb, told))
        own = read_own_runs(kb, self._outputs) if self._outputs is not None else []
        found = advise(
            kb,
            document,
            found_variant,
            machine,
            parsed,
            day,
            question=question,
            heard=heard_of(kb, heard, parts),
            asked=() if heard is None else heard.gpus,
            own_runs=own,
        )
        return Advice(**{k: v for k, v in found.items() if k != "schema"})

    def predict(
        self,
        model: str,
        hw: str,
        variant: str | None = None,
        cache_bytes: float | None = None,
        context: float = 8192,
    ) -> Prediction:
        """Return the speed of experts streamed from the drive (a dense model: in video memory), as a band in tok/s."""
        kb = self.kb
        document, found_variant = self._model(kb, model, variant)
        machine = self._machine(kb, hw, None)
        assert machine is not None
        for name, value in (("cache_bytes", cache_bytes), ("context", context)):
            if value is not None and not 0 <= value < 1e18:
                raise ServiceError(422, f"{name} is {value}, it must be between 0 and 1e18", name)
        ledger = Ledger(kb.laws)
        own = read_own_runs(kb, self._outputs) if self._outputs is not None else []
        speeds = Speeds(kb, ledger, document, found_variant, own)
        cache = machine.default_cache() if cache_bytes is None else cache_bytes
        routed = speeds.routed_set()
        speed = None
        if routed is not None:
            cache = min(cache, routed[0])
            speed = speeds.streamed(machine, cache)
        elif machine.gpu is not None:
            kv = speeds.kv(context, 1)
            speed = speeds.in_vram(machine.gpu, machine, kv[0] if kv else 0)
        else:
            speed = speeds.on_cpu(machine)
        if speed is None:
            raise ServiceError(
                422, f"a rate of {machine.name} or a size of {document['name']} is not known", "hw"
            )
        rows = [
            r for r in reports(kb)
            if kb.get("run", r["run"]).get("model") == document["id"]
        ]  # fmt: skip
        return Prediction(
            kb_version=kb.version,
            model=document["id"],
            variant=found_variant["id"],
            machine=machine.name,
            cache_bytes=clean(cache),
            tok_s=clean([speed.lo, speed.mid, speed.hi]),
            is_upper_bound=speed.is_bound,
            run=speed.run,
            law_tok_s=clean(speed.law_mid),
            ceilings_tok_s=clean(speed.ceilings),
            parts_ms=clean(speed.parts_ms),
            hit_rate=clean(speed.hit_rate),
            calculations=clean(ledger.entries),
            reports=rows,
        )

    def compute_law(self, law: str, inputs: dict[str, dict[str, Any]]) -> LawResult:
        """Evaluate one law. inputs: name -> {value, unit}."""
        found = self.kb.laws.get(law)
        if found is None:
            raise ServiceError(
                404, f"there is no law {law!r}; known: {', '.join(self.kb.laws)}", "law"
            )
        given = {}
        for name, entry in inputs.items():
            value = entry.get("value") if isinstance(entry, Mapping) else None
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ServiceError(
                    400, f"{name} must be {{value, unit}} with a number", f"inputs.{name}"
                )
            given[name] = (float(value), str(entry.get("unit", "")))
        try:
            value, unit = found.compute(given)
        except LawError as error:
            raise ServiceError(422, str(error), "inputs") from error
        return LawResult(law=law, value=clean(value), unit=unit, formula=found.text, validity=found.validity)  # fmt: skip

    def explain_law(self, law: str) -> Document:
        """Return a law's whole document: formula, variables, validity, worked examples, properties."""
        found = self.kb.laws.get(law)
        if found is None:
            raise ServiceError(
                404, f"there is no law {law!r}; known: {', '.join(self.kb.laws)}", "law"
            )
        return Document(
            kb_version=self.kb.version, kind="law", document=clean(found.document), candidates=[law]
        )

    def list_entities(
        self, kind: str, filter: str | None = None, limit: int = 20, cursor: int = 0  # noqa: A002
    ) -> Rows:  # fmt: skip
        """Return documents of a kind. filter: `field op value` with op of == != >= <= contains."""
        kb = self.kb
        if kind not in KINDS:
            raise ServiceError(400, f"there is no kind {kind!r}; known: {', '.join(KINDS)}", "kind")
        if not 1 <= limit <= 100 or cursor < 0:
            raise ServiceError(400, "limit is 1 to 100, cursor at least 0", "limit")
        documents = [d for d in kb.all(kind) if filter is None or _matches(d, filter)]
        rows = clean(documents[cursor : cursor + limit])
        end = cursor + limit
        return Rows(kb_version=kb.version, kind=kind, rows=rows, total=len(documents), next_cursor=end if end < len(documents) else None)  # fmt: skip

    def get_entity(self, name: str) -> Document:
        """Return a document by id or name, or the candidates when the name may mean several."""
        kb = self.kb
        found = kb.by_id(name)
        if found is not None:
            return Document(kb_version=kb.version, kind=found[0], document=clean(found[1]), candidates=[name])  # fmt: skip
        candidates: list[str] = []
        for kind in ("model", "gpu", "cpu", "system", "drive", "engine"):
            match = kb.find(kind, name)
            if match.document is not None:
                return Document(kb_version=kb.version, kind=kind, document=clean(match.document), candidates=[match.document["id"]])  # fmt: skip
            candidates += match.candidates
        if not candidates:
            raise ServiceError(404, f"{name!r} is in no document", "name")
        return Document(kb_version=kb.version, kind=None, document=None, candidates=candidates)

    def check_answer(
        self,
        answer: str,
        last_user_message: str = "",
        searched_web: bool = False,
        conversation_id: str | None = None,
    ) -> CheckResult:
        """Judge a draft answer: its text with one ```check block. All errors come at once."""
        if len(answer.encode("utf-8", "replace")) > MAX_NBYTES:
            raise ServiceError(413, f"an answer has at most {MAX_NBYTES // 1024} KiB", "answer")
        kb = self.kb
        with self._lock:
            before = dict(self._known.get(conversation_id or "", {}))
            used = self._rounds.get(conversation_id or "", 0)
        found = check_answer(
            kb, answer, last_user_message=last_user_message, searched_web=searched_web, known_before=before, rounds_used=used,
        )  # fmt: skip
        if conversation_id:
            with self._lock:
                if len(self._known) > 10 * MAX_DRAFTS:
                    self._known.clear()
                    self._rounds.clear()
                self._rounds[conversation_id] = 0 if found["ok"] else used + 1
                if found["ok"]:
                    self._known[conversation_id] = _known_values(answer)
        return CheckResult(kb_version=kb.version, **found)

    def take_part(self, draft: str, number: int, text: str) -> int:
        """Keep a part of a draft that comes by GET; return how many there are. Parts live for an hour."""
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", draft):
            raise ServiceError(400, "draft is 1 to 64 letters, digits, - and _", "draft")
        if not 1 <= number <= MAX_PARTS:
            raise ServiceError(400, f"n is 1 to {MAX_PARTS}", "n")
        now = self._clock()
        with self._lock:
            for name in [k for k, (at, _) in self._drafts.items() if now - at > PART_SECONDS]:
                del self._drafts[name]
            if draft not in self._drafts and len(self._drafts) >= MAX_DRAFTS:
                raise ServiceError(429, "too many drafts are open; try again later", "draft")
            _, parts = self._drafts.setdefault(draft, (now, {}))
            if sum(map(len, parts.values())) + len(text) > MAX_NBYTES:
                raise ServiceError(413, f"an answer has at most {MAX_NBYTES // 1024} KiB", "text")
            parts[number] = text
            return len(parts)

    def whole(self, draft: str) -> str:
        """Return a draft's parts joined."""
        with self._lock:
            _, parts = self._drafts.get(draft, (0.0, {}))
        if not parts:
            raise ServiceError(404, f"there is no draft {draft!r}", "draft")
        missing = [n for n in range(1, max(parts) + 1) if n not in parts]
        if missing:
            raise ServiceError(400, f"part {missing[0]} of the draft is missing", "n")
        return "".join(parts[n] for n in sorted(parts))

    def _model(
        self, kb: KnowledgeBase, name: str, variant: str | None
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        match = kb.find("model", name, variant)
        if match.document is None:
            near = ", ".join(match.candidates) or "nothing; use list_entities kind=model"
            raise ServiceError(404, f"{match.why}; near it: {near}", "model")
        if not match.document["variants"]:
            raise ServiceError(422, f"of {match.document['name']} no sizes are known", "model")
        return match.document, match.variant or match.document["variants"][0]

    def _machine(
        self, kb: KnowledgeBase, hw: str | None, hardware: dict[str, Any] | None
    ) -> Machine | None:
        if hardware is not None:
            given = hardware if hw is None else {"system": hw, **hardware}
            return _asked("hardware", lambda: machine_from(kb, given))
        return None if hw is None else _asked("hw", lambda: machine_of(kb, hw))


def _asked(field: str, ask: Callable[[], _T]) -> _T:
    try:
        return ask()
    except UserError as error:
        raise ServiceError(400, f"{error.message}; {error.hint}", field) from error


def _known_values(answer: str) -> dict[str, Any]:
    import json

    block = json.loads(re.findall(r"```check[ \t]*\n(.*?)```", answer, re.DOTALL)[0])
    return {k: v["value"] for k, v in block["situation"].items() if v["status"] == "known"}


def _matches(document: Mapping[str, Any], text: str) -> bool:
    match = re.fullmatch(r"\s*([a-z_]+)\s*(==|!=|>=|<=|contains)\s*(.{1,100}?)\s*", text)
    if match is None:
        raise ServiceError(400, f"the filter {text!r} is not `field op value`", "filter")
    name, op, wanted = match.groups()
    value = document.get(name)
    if op == "contains":
        return wanted.lower() in str(value).lower() if value is not None else False
    if op in ("==", "!="):
        return (str(value).lower() == wanted.lower()) == (op == "==")
    try:
        number = float(wanted)
    except ValueError as error:
        raise ServiceError(400, f"{wanted!r} is no number", "filter") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value >= number if op == ">=" else value <= number
