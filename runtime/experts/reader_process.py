"""The process that reads experts for a decoding one: its threads take no turn in that one's interpreter.

    python -m runtime.experts.reader_process COMMANDS ANSWERS ARENA CONTROL

Started by `child_reader.ChildReader` with four inherited file descriptors; `reader_wire` has what goes through them. It
ends when the pipe of commands does, so when whoever started it is gone, for whatever reason: the kernel closes a dead
process's files. (A signal at the parent's death would come at the death of the thread that started this one.)
"""

from __future__ import annotations

import gc
import json
import logging
import mmap
import os
import struct
import sys
import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from conf.schema import DirectIo, DriveConfig
from runtime.errors import UserError
from runtime.experts import reader_wire as wire
from runtime.experts.drive import Preadv
from runtime.experts.layout import CHECKSUM_NBYTES, ExpertKey, Span
from runtime.experts.reader import DirectReader, ReadError
from runtime.experts.schedule import ReadJob, ReadQueue

READ_NBYTES = 2**16


class NumberedJob(ReadJob):
    """A job of the decoding process."""

    __slots__ = ("hashes", "number")

    def __init__(
        self,
        number: int,
        hashes: Sequence[wire.Hash],
        key: Hashable,
        pieces: Sequence[Span],
        buffer: memoryview,
        kind: int,
    ) -> None:
        super().__init__(key, pieces, buffer, kind == wire.REQUIRED, is_idle=kind == wire.IDLE)
        self.number, self.hashes = number, hashes


class ClaimedQueue(ReadQueue):
    """Begins a job only when its claim is had: else it was cancelled, and the word of it is on its way."""

    control: wire.Control

    def take(self) -> tuple[ReadJob, Span] | None:
        while (taken := super().take()) is not None:
            job, _ = taken
            assert isinstance(job, NumberedJob)
            if job.next_piece > 1 or self.control.take(job.number):
                return taken
            job.next_piece = 0
            self.withdraw(job)
        return None


class ReaderProcess:
    """What is read here, and what is said of it."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._saying = threading.Lock()
        self._num_said = 0
        self._queue: ClaimedQueue
        self._reader: DirectReader
        self._arena: memoryview
        self._jobs: dict[int, NumberedJob] = {}  # of which no answer was given

    def begin(self, setup: dict[str, object], preadv: Preadv) -> dict[str, object]:
        """Open the files; return what to say of it."""
        warnings: list[str] = []
        handler = _Collector(warnings)
        logging.getLogger().addHandler(handler)
        try:
            files, config = setup["files"], setup["config"]
            assert isinstance(files, list)
            assert isinstance(config, dict)
            assert isinstance(setup["record_nbytes"], int)
            drive = DriveConfig(**{**config, "direct": DirectIo(config["direct"])})
            self._reader = DirectReader(
                [Path(file) for file in files],
                drive,
                preadv,
                record_nbytes=setup["record_nbytes"],
                make_queue=self._make_queue,
            )
        except UserError as error:
            return {"message": error.message, "hint": error.hint}
        except OSError as error:
            return {"errno": error.errno, "strerror": error.strerror, "file": error.filename}
        finally:
            logging.getLogger().removeHandler(handler)
        return {"is_direct": self._reader.is_direct, "warnings": warnings}

    def _make_queue(self, window: int) -> ClaimedQueue:
        self._queue = ClaimedQueue(window)
        return self._queue

    def use(self, arena: int, control: int) -> None:
        """Map the shared memory: it has its size now."""
        self._arena = memoryview(mmap.mmap(arena, os.fstat(arena).st_size))
        self._queue.control = wire.Control(mmap.mmap(control, os.fstat(control).st_size))

    def submit(
        self,
        number: int,
        kind: int,
        key: ExpertKey,
        place: tuple[int, int],
        spans: Sequence[Span],
        hashes: Sequence[wire.Hash],
    ) -> None:
        """Queue a job."""
        start, nbytes = place
        buffer, pieces = self._arena[start : start + nbytes], self._reader.cut(spans)
        self._jobs[number] = job = NumberedJob(number, hashes, key, pieces, buffer, kind)
        job.on_done = self._done
        self._reader.push(job)

    def promote(self, number: int) -> None:
        """Make a job required, unless it is done by now."""
        job = self._jobs.get(number)
        if job is not None:
            self._reader.promote(job)

    def cancel(self, number: int) -> None:
        """Drop a job whose claim the decoding process has."""
        self._reader.cancel(self._jobs.pop(number))
        self._say(wire.ANSWER.pack(number, wire.CANCELLED, 0))

    def close(self) -> None:
        """End what is being read, drop the rest."""
        self._reader.close()

    def _done(self, job: ReadJob) -> None:
        """In a reader's thread: hashing, too, takes no time of the decoding process."""
        assert isinstance(job, NumberedJob)
        del self._jobs[job.number]  # first: the number may be used again as soon as it is said
        if job.error is not None:
            text = _text_of(job.error)
            self._say(wire.ANSWER.pack(job.number, wire.FAILED, len(text)) + text)
        else:
            is_hashed = bool(job.hashes) and all(_is_right(job.buffer, h) for h in job.hashes)
            self._say(wire.ANSWER.pack(job.number, wire.HASHED if is_hashed else wire.READ, 0))

    def _say(self, answer: bytes) -> None:
        with self._saying:
            try:
                os.write(self._answers, answer)
            except BrokenPipeError:  # nobody listens
                os._exit(0)
            self._num_said += 1
            self._queue.control.counter[0] = self._num_said


def _is_right(buffer: memoryview, wanted: wire.Hash) -> bool:
    data = buffer[wanted.dest : wanted.dest + wanted.nbytes]
    return blake3(data).digest(length=CHECKSUM_NBYTES) == wanted.digest


def _text_of(error: Exception) -> bytes:
    """Return an error as `child_reader` takes it apart: what is cut off of a long one is its message's end."""
    if isinstance(error, ReadError):
        parts = ("drive", error.hint, error.message)
    else:  # our own mistake
        parts = ("own", "", f"{type(error).__name__}: {error}")
    return "\0".join(parts).encode(errors="replace")[: wire.MOST_TEXT_NBYTES]


class _Collector(logging.Handler):
    """Keeps what is said while files are opened, for the decoding process to say."""

    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings.append(record.getMessage())


class Commands:
    """The pipe of what the decoding process wants."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = b""
        self._at = 0

    def take(self, nbytes: int) -> bytes:
        """Wait for the next bytes. Ends this process when the other one is gone."""
        while len(self._data) - self._at < nbytes:
            more = os.read(self._fd, READ_NBYTES)
            if not more:
                os._exit(0)  # nobody waits for what is being read
            self._data, self._at = self._data[self._at :] + more, 0
        found = self._data[self._at : self._at + nbytes]
        self._at += nbytes
        return found

    def unpack(self, record: struct.Struct) -> tuple[Any, ...]:
        return record.unpack(self.take(record.size))


def main(preadv: Preadv = os.preadv) -> None:
    """Read what is asked for until there is nobody to ask."""
    commands_fd, answers, arena, control = map(int, sys.argv[1:])
    commands, process = Commands(commands_fd), ReaderProcess(answers)
    (nbytes,) = commands.unpack(wire.LENGTH)
    greeting = json.dumps(process.begin(json.loads(commands.take(nbytes)), preadv)).encode()
    os.write(answers, wire.LENGTH.pack(len(greeting)) + greeting)
    gc.freeze()
    while True:
        what, kind, num_spans, num_hashes, number, layer, expert = commands.unpack(wire.COMMAND)
        if what == wire.JOB:
            place = commands.unpack(wire.PLACE)
            spans = [Span(*commands.unpack(wire.SPAN)) for _ in range(num_spans)]
            hashes = [wire.Hash(*commands.unpack(wire.HASH)) for _ in range(num_hashes)]
            process.submit(number, kind, ExpertKey(layer, expert), place, spans, hashes)
        elif what == wire.PROMOTE:
            process.promote(number)
        elif what == wire.CANCEL:
            process.cancel(number)
        elif what == wire.ARENA:
            process.use(arena, control)
        else:
            assert what == wire.CLOSE, what
            process.close()
            return


if __name__ == "__main__":
    main()
