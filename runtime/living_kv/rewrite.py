"""Rewriting a store: its text by session, a copy without what was pruned, the swap of two folders. Knows no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import UserError
from runtime.living_kv import files
from runtime.living_kv.store import (
    Session,
    Store,
    Update,
)

Array = np.ndarray[Any, Any]
ERASED_TOKEN = -1


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
            new.append(_without(old, gone))
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


def _without(old: Store, gone: list[int]) -> Update:
    """Return everything of a store as one update, with blanks, zeros and -1 in the place of pruned sentences."""
    h = old.header
    text = bytearray(old.text_range(0, old.commit.lengths["txt/000001.txt"]))
    tokens, vectors = old.tokens().copy(), old.vectors().copy()
    is_gone = np.zeros(old.commit.tokens, bool)
    for i in gone:
        entry = old.sentences[i]
        start, nbytes = int(entry["text_off"]), int(entry["text_len"])
        text[start : start + nbytes] = b" " * nbytes
        if h.kind == "kv":
            lo, hi = int(entry["lo"]), int(entry["hi"])
            is_gone[lo:hi] = True
            tokens[lo:hi] = ERASED_TOKEN
            vectors[i] = 0
    blocks = []
    for number, entry in enumerate(old.blocks):
        first, count = int(entry["first"]), int(entry["tokens"])
        raw = old.read_block(number)
        assert raw is not None, "verified above"
        payload = bytes(raw[: _payload_nbytes(old, len(raw))])
        erased = is_gone[first : first + count]
        if erased.any():
            payload = _erase_rows(payload, old, count, erased)
        blocks.append((first, count, payload))
    tail_at = old.commit.blocks * h.block
    tail = _erase_tail(old.tail, old, is_gone[tail_at:]) if old.tail else None
    lines = [{k: v for k, v in s._asdict().items() if k != "is_finished"} for s in old.sessions]
    ends = [{"id": s.id, "finished": True} for s in old.sessions if s.is_finished]
    return Update(
        blocks=blocks,
        tokens=tokens.tolist(),
        sentences=[
            (int(s["lo"]), int(s["hi"]), int(s["text_off"]), int(s["text_len"]), int(s["session"]))
            for s in old.sentences
        ],
        vectors=vectors.tobytes() if h.kind == "kv" else b"",
        text=bytes(text),
        sessions=[*lines, *ends],
        tombstones=sorted(old.tombstones),
        tail=tail,
        hot=None
        if gone
        else old.read_hot(),  # the window may have seen what is gone: it is rebuilt
    )


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
