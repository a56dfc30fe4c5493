"""Rewriting a store: its text by session, a copy without what was pruned, the swap of two folders. Knows no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import UserError
from runtime.living_kv import files
from runtime.living_kv.layout import Session
from runtime.living_kv.store import Store, Update

Array = np.ndarray[Any, Any]
ERASED_TOKEN = -1
# of a rewritten commit: 120 MB of a 7B's blocks in RAM, whatever the store holds
GROUP_TOKENS = 4096


def session_texts(store: Store) -> Iterator[tuple[Session, bytes]]:
    """Yield each session with its text, in the order of the timeline; pruned sentences are left out."""
    owners = store.sentences["session"]
    for session in store.sessions:
        mine = [
            int(i) for i in np.flatnonzero(owners == session.id) if int(i) not in store.tombstones
        ]
        text = b"".join(store.text_of(i) for i in mine)
        if text.strip():
            yield session, text


def swap(root: Path, new_root: Path) -> Path:
    """Put a finished store in another's place; the old one becomes `.bak`, which replaces an older one."""
    backup = root.with_name(root.name + ".bak")
    shutil.rmtree(backup, ignore_errors=True)
    root.rename(backup)
    new_root.rename(root)
    files.sync_folder(root.parent)
    return backup


def compact(root: Path, is_forgotten: bool) -> str:
    """Rewrite a store without the bytes of pruned sentences: text, tokens, vectors, keys and values. Positions stay.

    The pruned text goes to archive/ inside the store, or, if forgotten, the old files are overwritten and removed.
    Returns what was done. Raises UserError for a damaged store: verify it first.
    """
    old = Store.open(root, is_writer=True)
    new_root = root.with_name(root.name + ".compact")
    try:
        if old.verify():
            raise UserError(
                f"the store {root.name} is damaged: nothing was rewritten",
                "run stages=[memory_verify]",
            )
        shutil.rmtree(new_root, ignore_errors=True)
        new = Store.create(new_root, old.header)
        if (root / "archive").exists() and not is_forgotten:
            shutil.copytree(root / "archive", new_root / "archive")
        try:
            gone = sorted(i for i in old.tombstones if i < len(old.sentences))
            for update in _updates(old, gone):
                new.append(update)
            if not is_forgotten and gone:
                (new_root / "archive").mkdir(exist_ok=True)
                number = len(list((new_root / "archive").iterdir()))
                pruned = b"".join(old.text_of(i) for i in gone)
                files.replace(new_root / "archive" / f"{number:06d}.txt", pruned)
        finally:
            new.close()
    finally:
        old.close()
    backup = swap(root, new_root)
    if is_forgotten:
        _erase(backup)
    else:
        shutil.rmtree(backup)
    return f"the bytes of {len(gone)} sentences are {'gone' if is_forgotten else 'in archive/'}"


def _updates(old: Store, gone: Sequence[int]) -> Iterator[Update]:
    """Yield a store's contents in commits of a few blocks, blanks, zeros and -1 in the place of pruned sentences."""
    h, sentences = old.header, old.sentences
    is_kv = h.kind == "kv"
    tokens, vectors = old.tokens(), old.vectors()
    is_gone = np.zeros(old.commit.tokens if is_kv else 0, bool)
    for i in gone:
        is_gone[int(sentences["lo"][i]) : int(sentences["hi"][i])] = True
    started, block, at, is_last = 0, 0, 0, False
    while not is_last:
        part, first = sentences[at:], at
        if len(part):
            limit = int(part["lo"][0]) + GROUP_TOKENS
            part = part[: max(1, int(np.searchsorted(part["hi"], limit, "right")))]
        at += len(part)
        is_last = at == len(sentences)
        update = _texts(old, part, first, frozenset(gone))
        if is_kv and len(part):
            lo, hi = int(part["lo"][0]), int(part["hi"][-1])
            update.tokens = np.where(is_gone[lo:hi], ERASED_TOKEN, tokens[lo:hi]).tolist()
            rows = vectors[first:at].copy()
            rows[[i - first for i in gone if first <= i < at]] = 0
            update.vectors = rows.tobytes()
            update.blocks = [_block(old, n, is_gone) for n in range(block, hi // h.block)]
            block = hi // h.block
        newest = len(old.sessions) if is_last else int(part["session"].max()) + 1
        lines = [_line(s) for s in old.sessions[started:newest]]
        started = max(started, newest)
        if is_last:
            lines += [{"id": s.id, "finished": True} for s in old.sessions if s.is_finished]
            update.tombstones = sorted(old.tombstones)
            if old.tail:
                update.tail = _erase_tail(old.tail, old, is_gone[block * h.block :])
            if not gone:  # the window may have seen what is gone: it is rebuilt
                update.hot = old.read_hot()
        update.sessions = lines
        yield update


def _texts(old: Store, part: Array, first: int, gone: frozenset[int]) -> Update:
    """Return an update with some sentences and their text.  first: number of the first of them."""
    if not len(part):
        return Update()
    start = int(part["text_off"][0])
    text = bytearray(old.text_range(start, int(part["text_len"].sum())))
    for i, entry in enumerate(part, first):
        if i in gone:
            place, nbytes = int(entry["text_off"]) - start, int(entry["text_len"])
            text[place : place + nbytes] = b" " * nbytes
    names = ("lo", "hi", "text_off", "text_len", "session")
    rows = [tuple(int(entry[name]) for name in names) for entry in part]
    return Update(sentences=rows, text=bytes(text))  # type: ignore[arg-type]


def _line(session: Session) -> dict[str, Any]:
    return {k: v for k, v in session._asdict().items() if k != "is_finished"}


def _block(old: Store, number: int, is_gone: Array) -> tuple[int, int, bytes]:
    entry = old.blocks[number]
    first, count = int(entry["first"]), int(entry["tokens"])
    raw = old.read_block(number)
    assert raw is not None, "verified before"
    payload = bytes(raw[: _payload_nbytes(old, len(raw))])
    erased = is_gone[first : first + count]
    return first, count, _erase_rows(payload, old, count, erased) if erased.any() else payload


def _payload_nbytes(store: Store, raw_nbytes: int) -> int:
    """Return the bytes of a block's payload without the padding."""
    h = store.header
    rows, values = h.block * h.kv_heads, h.block * h.kv_heads * h.head_dim
    per_layer = {
        "k8c_v8t": 2 * values + 2 * h.kv_heads * h.head_dim + 2 * rows,
        "k8t_v8t": 2 * values + 4 * rows,
        "fp16": 4 * values,
        "fp32": 8 * values,
    }[h.codec]
    assert h.layers * per_layer <= raw_nbytes, "the header and the blocks disagree"
    return h.layers * per_layer


def _erase_rows(payload: bytes, store: Store, count: int, erased: Array) -> bytes:
    """Zero the codes of tokens in an encoded block; scales stay, they are of the whole block or of what is zero now."""
    h = store.header
    size = {"fp16": 2, "fp32": 4}.get(h.codec, 1)
    row = h.kv_heads * h.head_dim * size
    flat = np.frombuffer(payload, np.uint8).reshape(h.layers, -1).copy()
    k_scales = {"k8c_v8t": 2 * h.kv_heads * h.head_dim, "k8t_v8t": 2 * count * h.kv_heads}.get(
        h.codec, 0
    )
    for start in (0, count * row + k_scales):
        flat[:, start : start + count * row].reshape(h.layers, count, row)[:, erased] = 0
    return flat.tobytes()


def _erase_tail(tail: bytes, store: Store, erased: Array) -> bytes:
    h = store.header
    exact = np.frombuffer(tail, np.uint8).reshape(2, h.layers, len(erased), -1).copy()
    exact[:, :, erased] = 0
    return exact.tobytes()


def _erase(folder: Path) -> None:
    """Overwrite every file with zeros, then remove it. A drive may still keep old cells: encrypt it if that matters."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "r+b") as f:
                left = path.stat().st_size
                while left:
                    left -= f.write(b"\0" * min(left, 2**20))
                f.flush()
                os.fsync(f.fileno())
    shutil.rmtree(folder)
