"""Read experts through a process of its own, from the decoding process: no thread of it stands in line for this one's
interpreter.

`submit` is a write to a pipe, waiting for an arrival a read of another one by the decoding thread itself, and the bytes
go straight into memory that both processes map. `reader_process` is the other side. For one thread only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from ctypes import addressof, c_char
from dataclasses import asdict
from pathlib import Path
from queue import Empty
from typing import Any

from conf.schema import DriveConfig
from runtime.errors import UserError
from runtime.experts import reader_wire as wire
from runtime.experts.checks import Checksums
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.reader import ReadError
from runtime.experts.schedule import ReadJob

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "runtime.experts.reader_process")
ROOT = Path(__file__).resolve().parents[2]  # from where `-m` finds it
READ_NBYTES = 2**16
PIPE_NBYTES = 2**20  # for answers: 131,072 reads go on while nobody takes them in
CLOSE_S = 5.0  # for the reads that are on their way


class ChildJob(ReadJob):
    """A job of the reader process."""

    __slots__ = ("number",)
    number: int


class ChildReader:
    """As `reader.DirectReader`, and the arrivals of its jobs; they are read into one arena, which both processes map.

    `on_done` is called in the decoding thread, when it takes the arrival in. When the process ends, every job fails.
    """

    def __init__(
        self,
        files: Sequence[Path],
        config: DriveConfig,
        *,
        record_nbytes: int = 0,
        checksums: Checksums | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """record_nbytes: of a usual record, where the config leaves the number of reads to it.

        checksums: compared over there, each expert's at its first read.  Raises OSError and UserError as `DirectReader`
        does when files cannot be opened.
        """
        self._checksums = checksums
        self._landed: deque[ReadJob] = deque()
        self._live: dict[int, ChildJob] = {}
        self._free: list[int] = []  # numbers
        self._num_taken_in = 0
        self._unread = b""
        self._ended = ""  # how; empty while it runs
        self._is_closed = False
        self._control: wire.Control | None = None
        self._arena_address, self._arena_nbytes = 0, 0
        self._fds = [os.memfd_create("nvmoe-arena"), os.memfd_create("nvmoe-control")]
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._fds += [self._commands, self._answers]
        # refused where the user has many large pipes: then a long warm start waits for whoever decodes
        with suppress(PermissionError):
            fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, PIPE_NBYTES)
        given = (commands, answers, *self._fds[:2])
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=given,
                cwd=ROOT,
                process_group=0,  # Ctrl-C is for the decoding process
            )
        except BaseException:
            self._close_files()
            raise
        finally:
            os.close(commands)
            os.close(answers)
        try:
            self.is_direct = self._greet(files, config, record_nbytes)
        except BaseException:
            self._process.kill()
            self._process.wait()
            self._close_files()
            raise
        os.set_blocking(self._commands, False)
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(self._answers, select.POLLIN)
        self._either.register(self._answers, select.POLLIN)
        self._either.register(self._commands, select.POLLOUT)

    def _greet(self, files: Sequence[Path], config: DriveConfig, record_nbytes: int) -> bool:
        """Say what is to be read; return whether it is read around the page cache."""
        setup = {
            "files": [str(Path(file).absolute()) for file in files],
            "config": asdict(config) | {"direct": config.direct.value},
            "record_nbytes": record_nbytes,
        }
        text = json.dumps(setup).encode()
        with open(self._commands, "wb", closefd=False) as out, suppress(BrokenPipeError):
            out.write(wire.LENGTH.pack(len(text)) + text)
        (nbytes,) = wire.LENGTH.unpack(self._read_greeting(wire.LENGTH.size))
        found: dict[str, Any] = json.loads(self._read_greeting(nbytes))
        if "message" in found:
            raise UserError(found["message"], found["hint"])
        if "errno" in found:
            raise OSError(found["errno"], found["strerror"], found["file"])
        for warning in found["warnings"]:
            log.warning("%s", warning)
        return bool(found["is_direct"])

    def _read_greeting(self, nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            more = os.read(self._answers, nbytes - len(found))
            if not more:
                raise UserError(
                    f"the process that reads experts {self._ending()} before it had opened their files",
                    "see what it said above, or set hw.drive.process=false",
                )
            found += more
        return found

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def arena_fd(self) -> int:
        """An empty memfd for the rows, which the process maps too when `use` is called."""
        return self._fds[0]

    def use(self, address: int, nbytes: int, num_rows: int) -> None:
        """Read into these rows, which start at `address` in this process. Once, before the first job."""
        self._arena_address, self._arena_nbytes = address, nbytes
        control_fd = self._fds[1]
        # a row is read into by one job, and perhaps was by another whose cancelling was not answered yet
        num_claims = 2 * num_rows + 1
        os.ftruncate(control_fd, wire.control_nbytes(num_claims))
        self._control = wire.Control(mmap.mmap(control_fd, wire.control_nbytes(num_claims)))
        for number in range(num_claims):
            self._control.offer(number)
        self._free = list(reversed(range(num_claims)))
        self._send(wire.COMMAND.pack(wire.ARENA, 0, 0, 0, 0, 0, 0))

    # ---- what a streamer asks of a reader -------------------------------------------------------------------------

    def submit(
        self,
        key: Hashable,
        spans: Sequence[Span],
        buffer: memoryview,
        is_required: bool = True,
        on_done: Callable[[ReadJob], None] | None = None,
        is_idle: bool = False,
    ) -> ReadJob:
        """Queue one expert; `buffer` is of the arena. As `DirectReader.submit`."""
        if self._is_closed:
            raise RuntimeError("the reader is closed")
        assert isinstance(key, ExpertKey)
        start = addressof(c_char.from_buffer(buffer)) - self._arena_address
        assert 0 <= start <= self._arena_nbytes - len(buffer), "a buffer that is not of the arena"
        job = ChildJob(key, spans, buffer, is_required, on_done, is_idle)
        while not self._free and not self._ended:
            self._take_in()
        if self._ended:
            self._end(job, self._ended_error())
            return job
        job.number = number = self._free.pop()
        self._live[number] = job
        kind = wire.IDLE if is_idle else wire.REQUIRED if is_required else wire.GUESSED
        hashes = self._checksums.expected(key) if self._checksums is not None else ()
        self._send(wire.job_record(number, kind, key, (start, len(buffer)), spans, hashes))
        return job

    def promote(self, job: ReadJob) -> None:
        """Move a guess or an idle job to the required reads, behind those already there."""
        assert isinstance(job, ChildJob)
        if job.is_required or job.is_done:
            return
        job.is_required, job.is_idle = True, False
        self._send(wire.COMMAND.pack(wire.PROMOTE, 0, 0, 0, job.number, 0, 0))

    def cancel(self, job: ReadJob) -> bool:
        """Take a job back if no byte of it was asked for; False when it is too late. Waits for no answer."""
        assert isinstance(job, ChildJob)
        assert self._control is not None
        if (
            job.is_done
            or self._live.get(job.number) is not job
            or not self._control.take(job.number)
        ):
            return False
        del self._live[job.number]
        self._send(wire.COMMAND.pack(wire.CANCEL, 0, 0, 0, job.number, 0, 0))
        return True

    def wait(self, job: ReadJob) -> None:
        """Wait until a job is done; raise its error."""
        while not job.is_done:
            self._take_in()
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """End the process, and what it is reading; jobs that were never started are dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._send(wire.COMMAND.pack(wire.CLOSE, 0, 0, 0, 0, 0, 0))
        while not self._ended:
            if not self._readable.poll(CLOSE_S * 1e3):
                self._process.kill()
            self._take_in()
        self._close_files()

    # ---- what a streamer asks of arrivals -------------------------------------------------------------------------

    def put(self, item: ReadJob) -> None:
        self._landed.append(item)

    def get(self, *, timeout: float | None = None) -> ReadJob:
        """Wait for a job whose `on_done` is `put`. Raises queue.Empty after `timeout` seconds without an answer."""
        while not self._landed:
            assert self._live, "waiting for a read that nobody began"
            if not self._readable.poll(None if timeout is None else timeout * 1e3):
                raise Empty
            self._take_in()
        return self._landed.popleft()

    def empty(self) -> bool:
        """Whether no job has landed. Asks the pipe only when the process has said something."""
        if self._landed or self._control is None:
            return not self._landed
        if self._control.counter[0] != self._num_taken_in and self._readable.poll(0):
            self._take_in()
        return not self._landed

    # ---- answers --------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Wait for answers, and take them in."""
        data = os.read(self._answers, READ_NBYTES)
        if not data:
            self._end_all()
            return
        if self._unread:
            data = self._unread + data
        at, head = 0, wire.ANSWER
        while len(data) - at >= head.size:
            number, what, nbytes = head.unpack_from(data, at)
            end = at + head.size + nbytes
            if end > len(data):
                break
            self._answered(number, what, data[at + head.size : end])
            at = end
        self._unread = data[at:]

    def _answered(self, number: int, what: int, text: bytes) -> None:
        assert self._control is not None, "an answer before there was an arena"
        self._num_taken_in += 1
        job = self._live.pop(number, None)
        self._control.give_back(number)
        self._free.append(number)
        if what == wire.CANCELLED:
            return
        assert job is not None, "an answer for a job that was cancelled"
        if what == wire.HASHED and self._checksums is not None:
            self._checksums.passed(job.key)
        self._end(job, _error_of(text) if what == wire.FAILED else None)

    @staticmethod
    def _end(job: ReadJob, error: Exception | None) -> None:
        job.error, job.is_done = error, True
        if job.on_done is not None:
            job.on_done(job)

    def _end_all(self) -> None:
        """Fail what the process has not answered.

        It writes to no row any more: the pipe ends with its last thread, and a thread that reads ends behind its read.
        """
        self._ended = self._ended or self._ending()
        jobs = [] if self._is_closed else list(self._live.values())
        self._live.clear()
        for job in jobs:
            self._end(job, self._ended_error())

    def _ended_error(self) -> ReadError:
        return ReadError(
            f"the process that reads experts {self._ended} while it was in use",
            "see the kernel log (dmesg), memory may have run out, and start again",
        )

    def _ending(self) -> str:
        code = self._process.wait()
        how = f"ended with {code}"
        if code < 0:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"(pid {self._process.pid}) {how}"

    # ---- commands -------------------------------------------------------------------------------------------------

    def _send(self, data: bytes) -> None:
        """Write a command, taking in answers while the pipe is full: neither side waits for one that waits for it."""
        while data and not self._ended:
            try:
                data = data[os.write(self._commands, data) :]
            except BlockingIOError:
                self._either.poll()
                if self._readable.poll(0):
                    self._take_in()
            except BrokenPipeError:
                while not self._ended:
                    self._take_in()

    def _close_files(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        self._commands = self._answers = -1


def _error_of(text: bytes) -> Exception:
    kind, hint, message = text.decode(errors="replace").split("\0", 2)
    if kind == "drive":
        return ReadError(message, hint)
    return RuntimeError(f"in the reader process: {message}")
