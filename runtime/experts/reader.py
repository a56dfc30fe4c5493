"""Read records from the drive with a few threads, in the order that `schedule` decides.

Owns the threads and the open files; knows keys only as labels for error messages.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from conf.schema import DriveConfig
from runtime.errors import DeviceError
from runtime.experts.drive import FileSet, Preadv
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.schedule import ReadJob, ReadQueue, cut_spans, depth_of

FAILING = "see the kernel log (dmesg): a drive that gives this error may be failing"
_GONE = "the drive is gone: see the kernel log (dmesg) and `lsblk`, connect it, and start again"
_HINTS: dict[int | None, str] = {
    errno.ENODEV: _GONE, errno.ENXIO: _GONE, errno.EBADF: _GONE, errno.ENOTCONN: _GONE,
    errno.ESTALE: "start again: the set-up stages check the file and make it anew if it is wrong",
}  # fmt: skip


class ReadError(DeviceError):
    """A read that the drive refused or that met an early end of the file."""


class DirectReader:
    """A window of records in flight, each read in parallel pieces straight into the caller's memory."""

    def __init__(
        self,
        files: Sequence[Path],
        config: DriveConfig,
        preadv: Preadv = os.preadv,
        *,
        record_nbytes: int = 0,
        make_queue: Callable[[int], ReadQueue] = ReadQueue,
    ) -> None:
        """record_nbytes: of a usual record, where the config leaves the number of reads to it.

        make_queue: of a window; who decides the order.
        """
        self._files = FileSet(files, config, preadv)
        self._depth = depth_of(config, record_nbytes)
        self._queue = make_queue(self._depth.window)
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # workers wait for work
        # `wait` waits for jobs; a wake-up must not go astray between them
        self._finished = threading.Condition(lock)
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"reader-{i}", daemon=True)
            for i in range(self._depth.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_direct(self) -> bool:
        return self._files.is_direct

    def submit(
        self,
        key: Hashable,
        spans: Sequence[Span],
        buffer: memoryview,
        is_required: bool = True,
        on_done: Callable[[ReadJob], None] | None = None,
        is_idle: bool = False,
    ) -> ReadJob:
        """Queue one record. `buffer` (page-aligned) belongs to the reader until the job is done or cancelled.

        `on_done` is called once, in a reader thread, when the last piece is back or failed.  is_idle: read only while
        there is nothing else to read.
        """
        job = ReadJob(key, self.cut(spans), buffer, is_required, on_done, is_idle)
        self.push(job)
        return job

    def cut(self, spans: Sequence[Span]) -> list[Span]:
        """Cut a record's spans into the pieces that are read in parallel."""
        return cut_spans(spans, self._depth.pieces, self._depth.min_piece_nbytes)

    def push(self, job: ReadJob) -> None:
        """Queue a job, as `submit` does."""
        with self._changed:
            if self._is_closing:
                raise RuntimeError("the reader is closed")
            self._queue.push(job)
            self._changed.notify(self._queue.num_ready)

    def promote(self, job: ReadJob) -> None:
        """Move a guess or an idle job to the required reads, behind those already there."""
        with self._changed:
            self._queue.promote(job)
            self._changed.notify(self._queue.num_ready)

    def cancel(self, job: ReadJob) -> bool:
        """Take a job back if no byte of it was asked for; False when it is too late."""
        with self._changed:
            return self._queue.cancel(job)

    def wait(self, job: ReadJob) -> None:
        """Wait until a job is done; raise its error."""
        with self._finished:
            while not job.is_done:
                self._finished.wait()
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """End the threads and close the files; jobs that were never started are dropped."""
        with self._changed:
            self._is_closing = True
            self._queue.drain()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _work(self) -> None:
        taken = self._next(None)
        while taken is not None:
            job, piece = taken
            self._read_piece(job, piece)
            taken = self._next(job)

    def _next(self, finished: ReadJob | None) -> tuple[ReadJob, Span] | None:
        """Note that a piece of `finished` is back, and take the next piece; None when the reader closes."""
        with self._changed:
            is_done = finished is not None and self._queue.finish(finished)
            if is_done:
                self._finished.notify_all()
            taken = self._take()
        if finished is not None and is_done and finished.on_done is not None:
            finished.on_done(finished)
        if taken is not None:
            return taken
        with self._changed:
            while (taken := self._take()) is None:
                if self._is_closing:
                    return None
                self._changed.wait()
        return taken

    def _take(self) -> tuple[ReadJob, Span] | None:
        """Take the next piece, and wake as many threads as find more: each wake-up costs the decoding thread time."""
        taken = self._queue.take()
        if taken is not None:
            self._changed.notify(self._queue.num_ready)
        return taken

    def _read_piece(self, job: ReadJob, piece: Span) -> None:
        error = read_piece(self._files, piece.file_idx, job, piece)
        if error is not None:
            job.error = error


def read_piece(files: FileSet, file_idx: int, job: ReadJob, piece: Span) -> Exception | None:
    """Read a piece of a job from a file of `files`; return what went wrong, in words where the drive is to blame."""
    target = job.buffer[piece.dest : piece.dest + piece.nbytes]
    try:
        files.read(file_idx, target, piece.offset, piece.need_nbytes)
    except EOFError as error:
        ends_at = error.args[0]
        return ReadError(
            f"{_where(files.files[file_idx], job, piece)}: the file ends at byte {ends_at:,}, bytes up to "
            f"{piece.offset + piece.need_nbytes:,} are needed",
            "the file is truncated: run the stage that made it again (stages=[spot_check] tells which)",
        )
    except OSError as error:
        return ReadError(
            f"{_where(files.files[file_idx], job, piece)}: {error.strerror or error}",
            _HINTS.get(error.errno, FAILING),
        )
    except Exception as error:  # noqa: BLE001 - our own mistake: raised where the job is waited for
        return error
    return None


def _where(file: Path, job: ReadJob, piece: Span) -> str:
    what = (
        f"layer {job.key.layer}, expert {job.key.expert}"
        if isinstance(job.key, ExpertKey)
        else str(job.key)
    )
    return f"cannot read {what} from {file} at byte {piece.offset:,}"
