"""Stored text, byte for byte, with where it stands. Loads no model and no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, overload

import numpy as np
from blake3 import blake3

from runtime.living_kv.errors import MemoryUsageError, StoreRefusedError
from runtime.living_kv.lexical import LexicalIndex
from runtime.living_kv.store import Store

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Quote:
    """One sentence as it was stored."""

    sentence_id: int
    session: str
    text: bytes
    byte_offset: int  # in the store's text
    source: str
    digest: str  # blake3 of the bytes
    score: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence_id": self.sentence_id,
            "session": self.session,
            "text": self.text.decode("utf-8", "replace"),
            "byte_offset": self.byte_offset,
            "byte_length": len(self.text),
            "source": self.source,
            "blake3": self.digest,
            "score": round(self.score, 4),
        }


def readable_text(store: Store, sentence: int) -> str:
    """Return a sentence for people and tokenizers; empty where its bytes are damaged."""
    try:
        return store.text_of(sentence).decode("utf-8", "replace")
    except StoreRefusedError:
        return ""


class StoredTexts(Sequence[str]):
    """All sentences of a store for people, each read when it is asked for: a long store's text is not held in RAM."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store.sentences)

    @overload
    def __getitem__(self, i: int) -> str: ...

    @overload
    def __getitem__(self, i: slice) -> list[str]: ...

    def __getitem__(self, i: int | slice) -> str | list[str]:
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        return readable_text(self._store, i)


def open_lexical(store: Store) -> LexicalIndex:
    """Return the word index of a store's present commit."""
    return LexicalIndex(store.root / "lex", len(store.sentences), lambda i: readable_text(store, i))


def in_scope(store: Store, scope: str) -> Array:
    """Return which sentences may be used: [n] bool.

    scope: `all`, or parts joined by `+`: session:NAME, tag:NAME, since:DATE, before:DATE (2026-01-31).
    """
    count = len(store.sentences)
    allowed = np.ones(count, bool)
    if store.tombstones:
        allowed[[i for i in store.tombstones if i < count]] = False
    if scope == "all":
        return allowed
    owners = store.sentences["session"]
    for part in scope.split("+"):
        kind, _, value = part.partition(":")
        if kind not in ("session", "tag", "since", "before") or not value:
            raise MemoryUsageError(
                f"memory.scope={scope!r} is not understood",
                "use all, session:NAME, tag:NAME, since:2026-01-31, before:2026-01-31, joined by +",
            )
        chosen = [s.id for s in store.sessions if _matches(s, kind, value)]
        allowed &= np.isin(owners, chosen)
    return allowed


def check_scope(store: Store, scope: str) -> None:
    """Refuse a scope that is not understood, or names a session or tag that the store has not. MemoryUsageError."""
    in_scope(store, scope)
    for part in scope.split("+"):
        kind, _, value = part.partition(":")
        if kind in ("session", "tag") and not any(_matches(s, kind, value) for s in store.sessions):
            known = sorted({s.name if kind == "session" else s.tag for s in store.sessions} - {""})
            raise MemoryUsageError(
                f"memory.scope: the store has no {kind} {value!r:.80}",
                f"it has {', '.join(known[:8]) or 'none'}",
            )


def _matches(session: Any, kind: str, value: str) -> bool:
    if kind in ("session", "tag"):
        return bool((session.name if kind == "session" else session.tag) == value)
    at = parse_date(value)
    return bool(session.started >= at if kind == "since" else session.started < at)


def parse_date(text: str) -> float:
    """Return seconds since 1970 of a day, UTC."""
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise MemoryUsageError(f"{text!r} is no date", "write it as 2026-01-31")
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise MemoryUsageError(f"{text!r} is no date: {error}", "write it as 2026-01-31") from error


def quote_sentences(store: Store, sentences: Sequence[int], scores: Sequence[float]) -> list[Quote]:
    """Return sentences as they were stored; one whose bytes are damaged is left out."""
    out = []
    for sentence, score in zip(sentences, scores, strict=True):
        try:
            text = store.text_of(sentence)
        except StoreRefusedError:
            continue
        session = store.session_of(sentence)
        offset = int(store.sentences["text_off"][sentence])
        digest = blake3(text).hexdigest()
        out.append(
            Quote(sentence, session.name, text, offset, session.source, digest, float(score))
        )
    return out


def quote(store: Store, question: str, k: int, scope: str = "all") -> list[Quote]:
    """Return the k sentences that share most with a question, best first; those that share nothing are left out."""
    scores = open_lexical(store).scores(question)
    scores = np.where(in_scope(store, scope), scores, -1.0)
    order = np.argsort(-scores, kind="stable")[:k]
    best = [int(i) for i in order if scores[i] > 0]
    return quote_sentences(store, best, [float(scores[i]) for i in best])
