"""The store on the drive: append-only files, a commit log, checksums. Knows no model, no codec and no torch.

A commit appends to every file, waits for the drive, then appends one line to the log and waits again. What the log's
last whole line does not count does not exist. Blocks are read through a memory map and checked at their
first read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import shutil
import socket
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from blake3 import blake3

from runtime.errors import UserError
from runtime.living_kv import files
from runtime.living_kv.commit import LOG_NAME, Commit, Range, Whole, scan
from runtime.living_kv.errors import DiskFullError, StoreLockedError, checksum
from runtime.living_kv.layout import (
    BLOCK,
    BLOCK_HEADER,
    BLOCK_MAGIC,
    HEADER_NAME,
    SENTENCE,
    SESSIONS,
    SPANS,
    TABLE,
    TEXT,
    TOKENS,
    TOMBSTONES,
    VECTORS,
    Header,
    Session,
    header_bytes,
    kv_name,
    parse_sessions,
    read_header,
)
from runtime.units import PAGE_NBYTES, align_up, format_nbytes

log = logging.getLogger(__name__)

KV_FILE_NBYTES = 4 * 2**30  # a block file is closed before it grows beyond this


@dataclass(slots=True)
class Update:
    """What one commit adds."""

    # first position, tokens, payload
    blocks: list[tuple[int, int, bytes]] = field(default_factory=list)
    tokens: Sequence[int] = ()
    sentences: Sequence[
        tuple[int, int, int, int, int]
    ] = ()  # lo, hi, text offset, text length, session
    vectors: bytes = b""
    text: bytes = b""
    sessions: Sequence[Mapping[str, Any]] = ()
    tombstones: Sequence[int] = ()
    tail: bytes | None = None  # exact keys and values of the unfinished block; None: none there
    hot: bytes | None = None  # exact keys and values of sinks and window; None: no snapshot


class Problem(NamedTuple):
    """Something wrong in a store: which file, where, and which sentences it spoils."""

    file: str
    start: int
    nbytes: int
    sentences: tuple[int, int]  # first, one behind the last
    what: str

    def __str__(self) -> str:
        lo, hi = self.sentences
        who = f"; sentences {lo} to {hi - 1}" if hi > lo else ""
        return f"E-CHECKSUM: {self.file}, bytes {self.start:,} to {self.start + self.nbytes:,}: {self.what}{who}"


class Store:
    """One store, open for reading at a commit, or for writing at the last one."""

    def __init__(
        self, root: Path, header: Header, commits: Sequence[Commit], lock: int | None
    ) -> None:
        self.root, self.header, self._lock = root, header, lock
        self.commits = list(commits)
        self.commit = self.commits[-1] if self.commits else Commit()
        self.bad_blocks: set[int] = set()
        # (file, start) of ranges whose bytes were found right
        self._checked: set[tuple[str, int]] = set()
        self._good_blocks: set[int] = set()
        self._maps: dict[str, mmap.mmap] = {}
        self.read_nbytes = 0  # of block records
        self._load()

    # ---- opening --------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, root: Path, header: Header) -> Self:
        """Make an empty store, open for writing."""
        if sys.byteorder != "little":
            raise UserError("stores are little-endian, this machine is not", "use another machine")
        try:
            for name in ("kv", "idx", "txt", "tok", "hot", "lex"):
                (root / name).mkdir(parents=True, exist_ok=True)
            files.replace(root / HEADER_NAME, header_bytes(header))
        except OSError as error:
            raise _disk_error(error, root, 0) from error
        return cls.open(root, is_writer=True)

    @classmethod
    def open(cls, root: Path, is_writer: bool = False) -> Self:
        """Open at the last commit whose record, chain and files are whole.

        A writer takes the lock and cuts off what lies behind that commit. Raises StoreRefusedError, StoreLockedError.
        """
        header = read_header(root)
        lock = _take_lock(root) if is_writer else None
        try:
            found = scan(_read(root / LOG_NAME))
            commits = list(found.commits)
            if found.damaged:
                what = f"{LOG_NAME} line {found.damaged[0]} is damaged although later commits are whole"
                if is_writer:
                    raise checksum(what, "read what is there, or restore the file from a copy")
                log.warning("%s; reading goes on at the last whole commit", what)
            last = len(commits)
            while commits and (short := _short_file(root, commits[-1])):
                log.warning("%s: commit %d is given up: %s", root.name, commits[-1].seq, short)
                commits.pop()
            if is_writer and len(commits) < last:
                raise checksum(
                    f"{short or 'a file'}: {last - len(commits)} acknowledged commits would be lost",
                    "restore the file from a copy, or read what is there",
                )
            store = cls(root, header, commits, lock)
            if is_writer:
                store._cut(found.nbytes)
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        return store

    def _load(self) -> None:
        """Read the small tables of this commit."""
        c = self.commit
        self.sentences = self._table(SPANS, SENTENCE, c.sentences)
        self.blocks = self._table(TABLE, BLOCK, c.blocks)
        self.sessions = parse_sessions(self._bytes(SESSIONS))
        self.tombstones = frozenset(np.frombuffer(self._bytes(TOMBSTONES), "<u8").tolist())
        # each commit's text follows that of the one before
        self._text_parts = [part for _, part in self._ranges(TEXT)]
        self._text_starts = [part.start for part in self._text_parts]
        self.tail = b""
        if c.tail is not None:
            raw = _read(self.root / c.tail.name)
            if blake3(raw).hexdigest() == c.tail.digest:
                self.tail = raw
            else:
                log.warning(
                    "%s: %s is damaged: its tokens are text only", self.root.name, c.tail.name
                )

    def _table(self, name: str, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
        raw = self._bytes(name)
        if len(raw) != count * dtype.itemsize:
            raise checksum(
                f"{name} has {len(raw)} bytes for {count} entries", "restore it from a copy"
            )
        return np.frombuffer(raw, dtype)

    def _bytes(self, name: str) -> bytes:
        """Return a file up to this commit, every range checked. Raises StoreRefusedError."""
        raw = _read(self.root / name)[: self.commit.lengths.get(name, 0)]
        for file, part in self._ranges(name):
            if blake3(raw[part.start : part.start + part.nbytes]).hexdigest() != part.digest:
                raise checksum(
                    f"{file}, bytes {part.start:,} to {part.start + part.nbytes:,} are not what was written",
                    "restore the file from a copy: without it the store cannot be read",
                )
        return raw

    def _ranges(self, name: str) -> list[tuple[str, Range]]:
        return [(name, c.ranges[name]) for c in self.commits if name in c.ranges]

    def _cut(self, log_nbytes: int) -> None:
        """Remove what no commit counts."""
        for name in ("kv", "idx", "txt", "tok"):
            for path in sorted((self.root / name).iterdir()):
                relative = str(path.relative_to(self.root))
                wanted = self.commit.lengths.get(relative, 0)
                if path.stat().st_size > wanted:
                    os.truncate(path, wanted)
        for name, wanted in (
            (LOG_NAME, log_nbytes),
            (SESSIONS, self.commit.lengths.get(SESSIONS, 0)),
        ):
            if (self.root / name).exists() and (self.root / name).stat().st_size > wanted:
                os.truncate(self.root / name, wanted)

    def close(self) -> None:
        """Let go of the maps and the lock."""
        self._maps.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # ---- writing --------------------------------------------------------------------------------------------------

    def append(self, update: Update) -> Commit:
        """Commit an update. On any failure the commit before stays in force, here and on the drive."""
        assert self._lock is not None, "the store is open for reading"
        records, table = self._block_records(update.blocks)
        spans = np.array([(*s, 0, 0, 0) for s in update.sentences], SENTENCE)
        new: dict[str, bytes | bytearray] = {
            **records,
            TEXT: update.text,
            SPANS: spans.tobytes(),
            TOKENS: np.asarray(update.tokens, "<i4").tobytes(),
            VECTORS: update.vectors,
            TABLE: table.tobytes(),
            SESSIONS: "".join(
                json.dumps(s, sort_keys=True) + "\n" for s in update.sessions
            ).encode(),
            TOMBSTONES: np.asarray(update.tombstones, "<u8").tobytes(),
        }
        commit = self._next(new, update)
        self._check_spans(update, commit)
        whole = [
            (w, data) for w, data in ((commit.tail, update.tail), (commit.hot, update.hot)) if w
        ]
        need = sum(len(data) for data in new.values()) + sum(w.nbytes for w, _ in whole)
        if shutil.disk_usage(self.root).free < need + PAGE_NBYTES:
            raise _disk_error(OSError(errno.ENOSPC, "no room"), self.root, need)
        try:
            for name, data in new.items():
                if data:
                    files.append(self.root / name, self.commit.lengths.get(name, 0), data)
            for entry, exact in whole:
                assert exact is not None
                files.append(self.root / entry.name, 0, exact)
            for folder in ("kv", "hot"):
                files.sync_folder(self.root / folder)
            log_path = self.root / LOG_NAME
            at = log_path.stat().st_size if log_path.exists() else 0
            try:
                files.append(log_path, at, commit.line())
            except BaseException:
                # a line that may be whole must not come to light later
                with contextlib.suppress(OSError):
                    os.truncate(log_path, at)
                raise
        except OSError as error:
            with contextlib.suppress(OSError):
                self._cut((self.root / LOG_NAME).stat().st_size)
            raise _disk_error(error, self.root, need) from error
        before, self.commit = self.commit, commit
        self.commits.append(commit)
        self._maps.clear()
        self._load()
        self._drop_old(before)
        return commit

    def _next(self, new: Mapping[str, bytes | bytearray], update: Update) -> Commit:
        old = self.commit
        seq = old.seq + 1
        ranges = {
            name: Range(old.lengths.get(name, 0), len(data), blake3(data).hexdigest())
            for name, data in new.items()
            if data
        }
        wholes = {
            part: Whole(f"hot/{seq:08d}.{part}", len(data), blake3(data).hexdigest())
            if data
            else None
            for part, data in (("tail", update.tail), ("hot", update.hot))
        }
        return replace(
            old,
            seq=seq,
            prev=old.digest if self.commits else old.prev,
            tokens=old.tokens + len(update.tokens),
            sentences=old.sentences + len(update.sentences),
            blocks=old.blocks + len(update.blocks),
            lengths={**old.lengths, **{n: r.start + r.nbytes for n, r in ranges.items()}},
            ranges=ranges,
            tail=wholes["tail"],
            hot=wholes["hot"],
        )

    def _check_spans(self, update: Update, commit: Commit) -> None:
        at = int(self.sentences["hi"][-1]) if len(self.sentences) else 0
        text_at = self.commit.lengths.get(TEXT, 0)
        for lo, hi, offset, nbytes, _ in update.sentences:
            assert (lo, offset) == (at, text_at), "sentences must follow each other"
            assert hi > lo, "a sentence has at least one token"
            at, text_at = hi, offset + nbytes
        assert text_at == commit.lengths.get(TEXT, 0), "all text belongs to a sentence"
        if self.header.kind == "kv":
            assert at == commit.tokens, "all tokens belong to a sentence"
            covered = commit.blocks * self.header.block
            assert covered == commit.tokens // self.header.block * self.header.block, (
                "blocks are whole"
            )

    def _block_records(
        self, blocks: Sequence[tuple[int, int, bytes]]
    ) -> tuple[dict[str, bytearray], np.ndarray[Any, Any]]:
        """Return the bytes for each block file, and the table's entries."""
        h = self.header
        out: dict[str, bytearray] = {}
        table = np.zeros(len(blocks), BLOCK)
        number = max(1, sum(name.endswith(".kvb") for name in self.commit.lengths))
        at = self.commit.lengths.get(kv_name(number), 0)
        for i, (first, tokens, payload) in enumerate(blocks):
            head = BLOCK_HEADER.pack(
                BLOCK_MAGIC, 1, h.layers, h.kv_heads, h.head_dim, first, tokens, 0
            )
            size = align_up(len(head) + len(payload))
            if at + size > KV_FILE_NBYTES and at:
                number, at = number + 1, 0
            file = out.setdefault(kv_name(number), bytearray())
            start = len(file)
            file += head
            file += payload
            file += bytes(start + size - len(file))
            with memoryview(file) as view:
                digest = np.frombuffer(blake3(view[start:]).digest(), np.uint8)
            table[i] = (first, at, number, size, tokens, 0, digest)
            at += size
        return out, table

    def _drop_old(self, before: Commit) -> None:
        """Remove tails and snapshots that neither this commit nor the one before names."""
        kept = {w.name for c in (before, self.commit) for w in (c.tail, c.hot) if w is not None}
        for path in (self.root / "hot").iterdir():
            if f"hot/{path.name}" not in kept:
                path.unlink(missing_ok=True)

    # ---- reading --------------------------------------------------------------------------------------------------

    def read_block(self, number: int) -> memoryview | None:
        """Return a block's payload (and its padding); None for one whose bytes are wrong: it is never served."""
        if number in self.bad_blocks:
            return None
        entry = self.blocks[number]
        start, size = int(entry["offset"]), int(entry["nbytes"])
        name = kv_name(int(entry["file"]))
        record = memoryview(self._map(name))[start : start + size]
        if number not in self._good_blocks:
            wanted = (
                BLOCK_MAGIC,
                1,
                self.header.layers,
                self.header.kv_heads,
                self.header.head_dim,
            )
            is_right = len(record) == size and blake3(record).digest() == entry["digest"].tobytes()
            if not is_right or BLOCK_HEADER.unpack_from(record)[:5] != wanted:
                self.bad_blocks.add(number)
                log.warning("%s", self._block_problem(number))
                return None
            self._good_blocks.add(number)
        self.read_nbytes += size
        return record[BLOCK_HEADER.size :]

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            with open(self.root / name, "rb") as f:
                self._maps[name] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[name]

    def text_of(self, sentence: int) -> bytes:
        """Return exactly the stored bytes of a sentence. Raises StoreRefusedError for bytes that changed."""
        entry = self.sentences[sentence]
        start, nbytes = int(entry["text_off"]), int(entry["text_len"])
        return self.text_range(start, nbytes)

    def text_range(self, start: int, nbytes: int) -> bytes:
        """Return stored text, checked."""
        first = max(0, bisect_right(self._text_starts, start) - 1)
        last = bisect_left(self._text_starts, start + nbytes)
        for part in self._text_parts[first:last]:
            if (TEXT, part.start) not in self._checked:
                raw = _read_at(self.root / TEXT, part.start, part.nbytes)
                self._check_range(TEXT, part, raw)
        return _read_at(self.root / TEXT, start, nbytes)

    def tokens(self) -> np.ndarray[Any, Any]:
        """Return all token ids [tokens] int32."""
        return np.frombuffer(self._bytes(TOKENS), "<i4")

    def vectors(self) -> np.ndarray[Any, Any]:
        """Return the index vectors [sentences, vector_values] fp16: pages of the file, each range checked once."""
        width = max(1, self.header.vector_values)
        nbytes = self.commit.lengths.get(VECTORS, 0)
        if not nbytes:
            return np.zeros((0, width), "<f2")
        raw = memoryview(self._map(VECTORS))
        for file, part in self._ranges(VECTORS):
            self._check_range(file, part, raw[part.start : part.start + part.nbytes])
        return np.frombuffer(raw[:nbytes], "<f2").reshape(-1, width)

    def _check_range(self, file: str, part: Range, raw: bytes | memoryview) -> None:
        """Compare committed bytes with their digest, once. Raises StoreRefusedError."""
        if (file, part.start) in self._checked:
            return
        if blake3(raw).hexdigest() != part.digest:
            raise checksum(
                f"{file}, bytes {part.start:,} to {part.start + part.nbytes:,} are not what was written",
                "run stages=[memory_verify] to see which sentences are lost",
            )
        self._checked.add((file, part.start))

    def read_hot(self) -> bytes | None:
        """Return the exact snapshot of the last commit; None if there is none, or it is damaged."""
        entry = self.commit.hot
        if entry is None:
            return None
        raw = _read(self.root / entry.name)
        return raw if blake3(raw).hexdigest() == entry.digest else None

    def session_of(self, sentence: int) -> Session:
        return self.sessions[int(self.sentences["session"][sentence])]

    # ---- verifying ------------------------------------------------------------------------------------------------

    def verify(self) -> list[Problem]:
        """Hash everything that was committed; return what is wrong, and which sentences it spoils."""
        found: list[Problem] = []
        for commit in self.commits:
            for name, part in commit.ranges.items():
                raw = _read_at(self.root / name, part.start, part.nbytes)
                if blake3(raw).hexdigest() == part.digest:
                    continue
                if name.endswith(".kvb"):
                    continue  # by block, below: only the spoilt ones count
                found.append(
                    Problem(
                        name,
                        part.start,
                        part.nbytes,
                        self._spoilt(name, part),
                        "not what was written",
                    )
                )
        for number in range(len(self.blocks)):
            self._good_blocks.discard(number)
            self.bad_blocks.discard(number)
            if self.read_block(number) is None:
                found.append(self._block_problem(number))
        wholes = [w for w in (self.commit.tail, self.commit.hot) if w is not None]
        return found + [
            Problem(w.name, 0, w.nbytes, (0, 0), "not what was written")
            for w in wholes
            if blake3(_read(self.root / w.name)).hexdigest() != w.digest
        ]

    def _block_problem(self, number: int) -> Problem:
        entry = self.blocks[number]
        first = int(entry["first"])
        name = kv_name(int(entry["file"]))
        spoilt = self.sentences_between(first, first + int(entry["tokens"]))
        what = f"block {number} is not what was written"
        return Problem(name, int(entry["offset"]), int(entry["nbytes"]), spoilt, what)

    def _spoilt(self, name: str, part: Range) -> tuple[int, int]:
        if name == TEXT:
            offsets = self.sentences["text_off"]
            first = int(np.searchsorted(offsets, part.start, "right")) - 1
            return max(0, first), int(np.searchsorted(offsets, part.start + part.nbytes))
        sizes = {SPANS: SENTENCE.itemsize, VECTORS: 2 * self.header.vector_values}
        if name in sizes:
            return part.start // sizes[name], (part.start + part.nbytes) // sizes[name]
        if name == TOKENS:
            return self.sentences_between(part.start // 4, (part.start + part.nbytes) // 4)
        return 0, 0

    def sentences_between(self, lo: int, hi: int) -> tuple[int, int]:
        """Return (first, one behind the last) of the sentences with tokens in [lo, hi)."""
        first = int(np.searchsorted(self.sentences["hi"], lo, "right"))
        return first, int(np.searchsorted(self.sentences["lo"], hi, "left"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _read_at(path: Path, start: int, nbytes: int) -> bytes:
    try:
        with open(path, "rb") as f:
            f.seek(start)
            return f.read(nbytes)
    except FileNotFoundError:
        return b""


def _short_file(root: Path, commit: Commit) -> str:
    for name, nbytes in commit.lengths.items():
        path = root / name
        found = path.stat().st_size if path.exists() else 0
        if found < nbytes:
            return f"{name} has {found:,} bytes, {nbytes:,} were committed"
    return ""


def _take_lock(root: Path) -> int:
    fd = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 4096, 0).decode(errors="replace").strip()
        os.close(fd)
        raise StoreLockedError(
            f"E-LOCK: the store {root.name} is being written by {owner or 'another process'}",
            "wait for it or stop that process; reading works at any time",
        ) from error
    os.ftruncate(fd, 0)  # the kernel frees the lock of a dead owner: what stands there is old
    line = (
        f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%dT%H:%M:%S')}\n"
    )
    os.pwrite(fd, line.encode(), 0)
    return fd


def _disk_error(error: OSError, root: Path, need: int) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(root).free
        return DiskFullError(
            f"E-SPACE: the store {root.name} needs {format_nbytes(need)} more, {format_nbytes(free)} are free",
            "free some disk and run the same command again: everything committed is kept",
        )
    return UserError(
        f"the store {root} cannot be written: {error.strerror}", "check its folder's rights"
    )
