"""Copies of conversations: the state at a token, found again by what a new prompt begins with.

Owns who is kept (LRU by bytes, in RAM and on the disk) and the file format. Knows no model: a state is flat tensors.

A file is MAGIC, the length of its head (8 bytes, little endian), the head (JSON: tokens, size and digest of the body),
the head's blake3, and the body (safetensors). It is written under another name and appears whole by a rename; a file
whose bytes are not what its digests say is put aside and never used. Each key has a folder of its own: it must name
everything that decides the state's bytes.
"""

from __future__ import annotations

import array
import base64
import json
import logging
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from safetensors.torch import load, save
from torch import Tensor

from runtime.errors import UserError
from runtime.units import format_nbytes

log = logging.getLogger("snapshots")

MAGIC = b"nvmoe snapshot 1\n"
SUFFIX, TEMPORARY, ASIDE = ".snapshot", ".partial", ".broken"
LOGITS = "logits"  # in the body, beside the state's tensors
MAX_WAITING = 2  # writes; a busy disk misses a snapshot rather than holding a conversation up


class SnapshotError(UserError):
    """A file whose bytes are not those that were written."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after some tokens."""

    tokens: tuple[int, ...]
    tensors: Mapping[str, Tensor]  # in RAM
    logits: Tensor  # [1, vocab] fp32, after the last token

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes + sum(tensor.nbytes for tensor in self.tensors.values())


def make_key(facts: Mapping[str, object]) -> str:
    """Return the name for everything that decides a state's bytes."""
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


class SnapshotStore:
    """Snapshots of one model under one key. For one thread; writes to the disk happen in another."""

    def __init__(self, ram_nbytes: int, folder: Path | None = None, disk_nbytes: int = 0) -> None:
        """folder: of this key alone; None: nothing is saved.  Files in it that cannot be used are put aside."""
        self.ram_nbytes, self.disk_nbytes = ram_nbytes, disk_nbytes
        self._kept: OrderedDict[bytes, Snapshot] = OrderedDict()  # the last used at the end
        self._used_nbytes = 0
        self._disk = None if folder is None or not disk_nbytes else _Folder(folder, disk_nbytes)

    @property
    def is_enabled(self) -> bool:
        return self.ram_nbytes > 0

    @property
    def used_nbytes(self) -> int:
        return self._used_nbytes

    @property
    def saved_nbytes(self) -> int:
        return 0 if self._disk is None else self._disk.nbytes

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_saved(self) -> int:
        return 0 if self._disk is None else len(self._disk.files)

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether exactly this timeline is in RAM."""
        return _packed(tokens) in self._kept

    def longest(self, prompt: Sequence[int], more_than: int = 0) -> Snapshot | None:
        """Return the snapshot of the longest beginning of `prompt`, or the whole, of more than `more_than` tokens."""
        whole = _packed(prompt)
        found = [key for key in self._kept if whole.startswith(key)]
        best = max(found, key=len, default=b"")
        while self._disk is not None:
            name = self._disk.longest(whole)
            if name is None or len(self._disk.files[name].key) <= max(len(best), 4 * more_than):
                break
            snapshot = self._disk.load(name)
            if snapshot is not None:
                self._keep(self._disk.files[name].key, snapshot)
                return snapshot
        if len(best) <= 4 * more_than:
            return None
        self._kept.move_to_end(best)
        return self._kept[best]

    def add(self, snapshot: Snapshot, is_saved: bool = True) -> None:
        """Keep a snapshot.  is_saved: on the disk as well, where there is one."""
        key = _packed(snapshot.tokens)
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._keep(key, snapshot)
        if is_saved and self._disk is not None:
            self._disk.save(key, snapshot)

    def _keep(self, key: bytes, snapshot: Snapshot) -> None:
        if snapshot.nbytes > self.ram_nbytes:
            log.warning(
                "a conversation's state of %s does not fit into snapshots.ram_gib: it is not kept",
                format_nbytes(snapshot.nbytes),
            )
            return
        self._kept[key] = snapshot
        self._used_nbytes += snapshot.nbytes
        while self._used_nbytes > self.ram_nbytes:
            _, oldest = self._kept.popitem(last=False)
            self._used_nbytes -= oldest.nbytes

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was to be saved is on the disk; false when it takes longer."""
        return self._disk is None or self._disk.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish the writes that wait."""
        if self._disk is not None:
            self._disk.close(timeout_s)


def _packed(tokens: Sequence[int]) -> bytes:
    """Return ids as bytes: 4 each, so that a beginning of the ids is a beginning of the bytes."""
    return array.array("i", tokens).tobytes()


@dataclass(frozen=True, slots=True)
class _File:
    key: bytes
    nbytes: int


class _Folder:
    """The files of one key, the last used at the end."""

    def __init__(self, folder: Path, limit_nbytes: int) -> None:
        self._folder, self._limit = folder, limit_nbytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in folder.glob(f"*{TEMPORARY}"):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
        self._lock = threading.Lock()
        self.files: OrderedDict[str, _File] = OrderedDict()
        for path in sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns):
            try:
                head = read_head(path)
                self.files[path.name] = _File(head.key, path.stat().st_size)
            except (OSError, SnapshotError) as error:
                self._put_aside(path.name, error)
        self._jobs: queue.Queue[tuple[bytes, Snapshot] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self._thread.start()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in list(self.files.values()))

    def longest(self, whole: bytes) -> str | None:
        with self._lock:
            fits = [name for name, file in self.files.items() if whole.startswith(file.key)]
            return max(fits, key=lambda name: len(self.files[name].key), default=None)

    def load(self, name: str) -> Snapshot | None:
        """Return a file's snapshot, None if it cannot be read or is not what was written: it is put aside then."""
        path = self._folder / name
        try:
            snapshot = read_snapshot(path)
            os.utime(path)
        except (OSError, SnapshotError) as error:
            self._put_aside(name, error)
            return None
        with self._lock:
            if name in self.files:
                self.files.move_to_end(name)
        return snapshot

    def save(self, key: bytes, snapshot: Snapshot) -> None:
        if _name(key) in self.files:
            return
        try:
            self._jobs.put_nowait((key, snapshot))
        except queue.Full:
            log.info("the disk is busy: a snapshot is not saved")

    def flush(self, timeout_s: float) -> bool:
        jobs = self._jobs
        with jobs.all_tasks_done:
            return jobs.all_tasks_done.wait_for(lambda: not jobs.unfinished_tasks, timeout_s)

    def close(self, timeout_s: float) -> None:
        if self.flush(timeout_s):
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(*job)
            except Exception as error:  # noqa: BLE001 - a full disk or worse: one copy less, no answer
                log.warning("a snapshot could not be saved: %s", error)
            finally:
                self._jobs.task_done()

    def _write(self, key: bytes, snapshot: Snapshot) -> None:
        name = _name(key)
        if name in self.files or snapshot.nbytes > self._limit:
            return
        nbytes = write_snapshot(self._folder / name, snapshot)
        with self._lock:
            self.files[name] = _File(key, nbytes)
            while self.nbytes > self._limit:
                oldest, _ = self.files.popitem(last=False)
                (self._folder / oldest).unlink(missing_ok=True)

    def _put_aside(self, name: str, error: Exception) -> None:
        log.warning("the snapshot %s is not used: %s", name, error)
        with self._lock:
            self.files.pop(name, None)
        path = self._folder / name
        if path.exists():
            path.replace(path.with_suffix(ASIDE))


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Head:
    key: bytes
    body_at: int
    body_nbytes: int
    digest: str


def _name(key: bytes) -> str:
    return blake3(key).hexdigest()[:40] + SUFFIX


def write_snapshot(path: Path, snapshot: Snapshot) -> int:
    """Write a file that appears whole or not at all. Returns its bytes."""
    tensors = {name: tensor.contiguous() for name, tensor in snapshot.tensors.items()}
    body = save({**tensors, LOGITS: snapshot.logits.contiguous()})
    head = json.dumps(
        {
            "tokens": base64.b64encode(_packed(snapshot.tokens)).decode(),
            "body_nbytes": len(body),
            "body_blake3": blake3(body).hexdigest(),
        }
    ).encode()
    partial = path.with_suffix(TEMPORARY)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            for part in (MAGIC, len(head).to_bytes(8, "little"), head, blake3(head).digest(), body):
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)  # a full disk gets its room back
        raise
    return path.stat().st_size


def read_head(path: Path) -> _Head:
    """Return what stands before a file's body. Raises SnapshotError."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + 8)
        length = int.from_bytes(start[len(MAGIC) :], "little")
        if start[: len(MAGIC)] != MAGIC or length > nbytes:
            raise SnapshotError(f"{path.name} is no snapshot of this version")
        head, digest = file.read(length), file.read(32)
    if blake3(head).digest() != digest:
        raise SnapshotError(f"the head of {path.name} has other bytes than were written")
    facts = json.loads(head)
    body_at = len(MAGIC) + 8 + length + 32
    if nbytes != body_at + facts["body_nbytes"]:
        raise SnapshotError(
            f"{path.name} has {nbytes} bytes, {body_at + facts['body_nbytes']} were written"
        )
    key = base64.b64decode(facts["tokens"])
    return _Head(key, body_at, facts["body_nbytes"], facts["body_blake3"])


def read_snapshot(path: Path) -> Snapshot:
    """Return a file's snapshot. Raises SnapshotError for any byte that is not what was written."""
    head = read_head(path)
    with path.open("rb") as file:
        file.seek(head.body_at)
        body = file.read()
    if blake3(body).hexdigest() != head.digest:
        raise SnapshotError(f"the body of {path.name} has other bytes than were written")
    tensors = load(body)
    logits = tensors.pop(LOGITS)
    tokens = array.array("i")
    tokens.frombytes(head.key)
    return Snapshot(tuple(tokens), tensors, logits)
