"""Read records that lie on several drives: each drive has its own threads, files and queue; `balance` decides.

Where a record has copies, a drive that fails or stalls is taken out with a warning, and another copy is read.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from conf.schema import DriveConfig
from runtime.experts.balance import Part, SpreadQueue
from runtime.experts.drive import FileSet, Preadv
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.reader import ReadError, read_piece
from runtime.experts.schedule import ReadJob, depth_of
from runtime.units import format_duration

log = logging.getLogger(__name__)

STALL_S = 5.0  # of silence, after which a drive is taken out where others have what it keeps
CLOSE_S = 1.0  # that `close` waits for the threads of a drive that was taken out


class Copies(Protocol):
    """Where records lie on several drives. Drives are numbers from 0."""

    @property
    def files(self) -> tuple[Path, ...]: ...

    @property
    def drive_of(self) -> Sequence[int]:
        """The drive of each file."""

    @property
    def places(self) -> Sequence[str]:
        """The folder of each drive, for messages."""

    @property
    def missing(self) -> frozenset[int]:
        """Drives that are not there; no copy is on them."""

    def lose(self, why: Mapping[int, str]) -> None:
        """Do without drives, each for a reason. Raises UserError where nothing else has what is on them."""

    def copies(self, key: ExpertKey) -> Sequence[Sequence[Span]]:
        """Return the ways to read a record whole: the reads that each takes."""


class SpreadReader:
    """As `DirectReader`, for records on several drives."""

    def __init__(
        self,
        source: Copies,
        configs: Sequence[DriveConfig],
        gib_s: Sequence[float | None],
        preadv: Preadv = os.preadv,
        *,
        record_nbytes: int = 0,
    ) -> None:
        """configs: how each drive is read; window, pieces and piece_kib are the same.  gib_s: what is known of them.
        record_nbytes: of a record, where the configs leave the number of reads to it.

        Raises UserError when a drive cannot be opened whose experts no other one has.
        """
        self._source = source
        depth = depth_of(configs[0], record_nbytes, len(configs))
        self._queue = SpreadQueue(
            source.drive_of,
            len(configs),
            *depth,
            gib_s,
        )
        self._file_idx: list[int] = []  # of each file, in its drive's set
        self._files = self._open(configs, preadv)
        lock = threading.Lock()
        self._changed = [threading.Condition(lock) for _ in configs]
        self._closing = threading.Condition(lock)
        self._is_closing = False
        self._threads = [
            [
                threading.Thread(target=self._work, args=(i,), name=f"reader-{i}-{n}", daemon=True)
                for n in range(depth.num_threads if self._files[i] is not None else 0)
            ]
            for i in range(len(configs))
        ]
        self._watch = threading.Thread(target=self._look, name="reader-watch", daemon=True)
        for threads in (*self._threads, [self._watch]):
            for thread in threads:
                thread.start()

    def _open(self, configs: Sequence[DriveConfig], preadv: Preadv) -> list[FileSet | None]:
        source, opened = self._source, []
        of_drive: list[list[Path]] = [[] for _ in configs]
        for file, drive in zip(source.files, source.drive_of, strict=True):
            self._file_idx.append(len(of_drive[drive]))
            of_drive[drive].append(file)
        try:
            for drive, (files, config) in enumerate(zip(of_drive, configs, strict=True)):
                is_used = bool(files) and drive not in source.missing
                try:
                    opened.append(FileSet(files, config, preadv) if is_used else None)
                except OSError as error:
                    source.lose({drive: f"{error.filename or files[0]}: {error.strerror}"})
                    opened.append(None)
        except BaseException:
            for made in filter(None, opened):
                made.close()
            raise
        return opened

    @property
    def is_direct(self) -> bool:
        return all(files.is_direct for files in self._files if files is not None)

    def submit(
        self,
        key: Hashable,
        spans: Sequence[Span],
        buffer: memoryview,
        is_required: bool = True,
        on_done: Callable[[ReadJob], None] | None = None,
        is_idle: bool = False,
    ) -> ReadJob:
        """Queue one expert, as `DirectReader.submit` does; where it is read is decided here, not by `spans`.

        `on_done` is also called for a job whose `orphans` are set: it goes on when they are told other memory.
        """
        del spans
        assert isinstance(key, ExpertKey)
        copies = self._source.copies(key)
        with self._closing:
            if self._is_closing:
                raise RuntimeError("the reader is closed")
            now = time.perf_counter()
            job = self._queue.job(key, copies, buffer, is_required, on_done, now, is_idle)
            self._wake()
        return job

    def _restart(self, job: ReadJob, buffer: memoryview) -> None:
        with self._closing:
            self._queue.restart(job, buffer, time.perf_counter())
            self._wake()

    def promote(self, job: ReadJob) -> None:
        """Move a guess or an idle job to the required reads, behind those already there."""
        with self._closing:
            self._queue.promote(job)
            self._wake()

    def cancel(self, job: ReadJob) -> bool:
        """Take a job back if no byte of it was asked for; False when it is too late."""
        with self._closing:
            return self._queue.cancel(job)

    def close(self) -> None:
        """End the threads and close the files; what a stalled drive keeps is left to it."""
        with self._closing:
            self._is_closing = True
            self._queue.drain()
            for changed in (*self._changed, self._closing):
                changed.notify_all()
        self._watch.join()
        for drive, (threads, files) in enumerate(zip(self._threads, self._files, strict=True)):
            until = time.monotonic() + CLOSE_S
            for thread in threads:
                is_out = self._queue.is_out(drive)
                thread.join(max(0.0, until - time.monotonic()) if is_out else None)
            if files is not None and not any(thread.is_alive() for thread in threads):
                files.close()

    def _wake(self) -> None:
        for drive, changed in enumerate(self._changed):
            changed.notify(self._queue.num_ready(drive))

    def _work(self, drive: int) -> None:
        taken = self._next(drive)
        while taken is not None:
            part, piece = taken
            files = self._files[drive]
            assert files is not None
            error = read_piece(files, self._file_idx[piece.file_idx], part, piece)
            self._back(drive, part, piece, error)
            taken = self._next(drive)

    def _next(self, drive: int) -> tuple[Part, Span] | None:
        """Take the next piece; None when the reader closes."""
        with self._closing:
            while (taken := self._queue.take(drive, time.perf_counter())) is None:
                if self._is_closing:
                    return None
                self._changed[drive].wait()
            self._changed[drive].notify(self._queue.num_ready(drive))
        return taken

    def _back(self, drive: int, part: Part, piece: Span, error: Exception | None) -> None:
        """Note that a piece is back. One that failed is read elsewhere, if it lies elsewhere."""
        now = time.perf_counter()
        with self._closing:
            was_out = self._queue.is_out(drive)
            if isinstance(error, ReadError) and self._queue.fail(drive, part, piece, now):
                if not was_out:
                    self._say_out(drive, error.message)
                self._wake()
                return
            if error is not None and part.lost is None:
                part.record.error = error
            job = self._queue.finish(drive, part, piece, now)
            for other in self._queue.may_help(drive):
                self._changed[other].notify()
        if job is not None:
            self._deliver(job)

    def _deliver(self, job: ReadJob) -> None:
        if job.orphans is not None:
            job.orphans.restart = partial(self._restart, job)
        if job.on_done is not None:
            job.on_done(job)

    def _look(self) -> None:
        """Take out a drive that is silent for long while others have what is wanted of it.

        It is looked at twice: after a process was stopped, every drive seems silent once.
        """
        suspects: set[int] = set()
        while True:
            with self._closing:
                if self._is_closing:
                    return
                self._closing.wait(STALL_S / 4)
                now, delivered = time.perf_counter(), []
                for drive in range(self._queue.num_drives):
                    silent_s = self._queue.silent(drive, now)
                    if silent_s < STALL_S:
                        suspects.discard(drive)
                    elif drive not in suspects:
                        suspects.add(drive)
                    else:
                        delivered += self._queue.give_up(drive, now)
                        self._say_out(
                            drive, f"it has given nothing for {format_duration(silent_s)}"
                        )
                        self._wake()
            for job in delivered:
                self._deliver(job)

    def _say_out(self, drive: int, why: str) -> None:
        log.warning(
            "drive %d of hw.drives (%s) is taken out, its copies are read from the others: %s; see dmesg, and start "
            "again when it is mended",
            drive, self._source.places[drive], why,
        )  # fmt: skip
