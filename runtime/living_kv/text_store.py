"""Stores of text alone: sentences of words, quoted without a model. Knows no torch."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from runtime.living_kv.errors import MemoryUsageError
from runtime.living_kv.layout import HEADER_NAME, TEXT, Header, new_store_id
from runtime.living_kv.quote import open_lexical
from runtime.living_kv.sentences import byte_offsets, split_text, to_token_spans
from runtime.living_kv.store import Store, Update


def text_header() -> Header:
    """Return the header of a new store of text alone; its positions count words."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Header(store_id=new_store_id(), kind="text", created=created)


def ingest_text(
    root: Path,
    data: bytes,
    session: str,
    tag: str = "",
    source: str = "",
    clock: Callable[[], float] = time.time,
) -> int:
    """Append text as one session and one commit. Returns its words. Raises MemoryUsageError for a kv store."""
    text = data.decode("utf-8", "surrogateescape")
    offsets = [m.span() for m in re.finditer(r"\S+", text)]
    if not offsets:
        raise MemoryUsageError(
            "there is no text to take in", "give a file with text: memory.file=notes.txt"
        )
    exists = (root / HEADER_NAME).exists()
    store = Store.open(root, is_writer=True) if exists else Store.create(root, text_header())
    try:
        if store.header.kind != "text":
            raise MemoryUsageError(
                f"the store {root.name} keeps keys and values",
                "leave memory.kind=text out, or name another store",
            )
        first = int(store.sentences["hi"][-1]) if len(store.sentences) else 0
        at, bytes_at = store.commit.lengths.get(TEXT, 0), byte_offsets(text)
        number = len(store.sessions)
        spans = to_token_spans(split_text(text), offsets)
        line = {
            "id": number,
            "name": session,
            "tag": tag,
            "started": clock(),
            "source": source,
            "digest": "",
        }
        store.append(
            Update(
                text=data,
                sentences=[
                    (first + s.lo, first + s.hi, at + int(bytes_at[s.start]), int(bytes_at[s.end] - bytes_at[s.start]),
                     number)
                    for s in spans
                ],
                sessions=[line, {"id": number, "finished": True}],
            )
        )  # fmt: skip
        open_lexical(store).save()
    finally:
        store.close()
    return len(offsets)
