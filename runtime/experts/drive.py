"""Files opened for direct reads, and a drive of chosen speed for measurements. Knows no expert and no thread."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conf.schema import DirectIo, DriveConfig
from runtime.errors import UserError
from runtime.mounts import find_mount
from runtime.units import GIB, PAGE_NBYTES, align_down

log = logging.getLogger(__name__)

Preadv = Callable[[int, list[memoryview], int], int]


class SimulatedDrive:
    """Delay reads as a drive of `rate_gib_s` would: requests share one line, then `latency_us` passes.

    The bytes are the real ones; only the time is that of another drive. A drive slower than the real one can be
    imitated, a faster one cannot (unless the file is in the page cache and reads are buffered).
    """

    def __init__(self, rate_gib_s: float, latency_us: float) -> None:
        self._nbytes_s = rate_gib_s * GIB
        self._latency_s = latency_us / 1e6
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, started_at: float, nbytes: int) -> None:
        """Sleep until a read of `nbytes` that began at `started_at` (perf_counter seconds) would have ended."""
        with self._lock:
            self._free_at = max(self._free_at, started_at) + nbytes / self._nbytes_s
            until = self._free_at + self._latency_s
        delay = until - time.perf_counter()
        if delay > 0:
            time.sleep(delay)


class FileSet:
    """Read-only files, opened with O_DIRECT where the filesystem allows it (or as `direct` demands)."""

    def __init__(
        self, files: Sequence[Path], config: DriveConfig, preadv: Preadv = os.preadv
    ) -> None:
        self.files = tuple(files)
        self._preadv = preadv
        self._fds: list[int] = []
        self._simulated = (
            SimulatedDrive(config.simulate_gib_s, config.simulate_latency_us)
            if config.simulate_gib_s
            else None
        )
        self.is_direct = config.direct is not DirectIo.buffered
        try:
            if self.is_direct:
                self.is_direct = self._open_direct(must=config.direct is DirectIo.require)
            if not self.is_direct:
                self._fds = [_open(path, 0) for path in self.files]
            self._opened = [_stamp(fd) for fd in self._fds]
        except BaseException:
            self.close()
            raise

    def _open_direct(self, must: bool) -> bool:
        try:
            for path in self.files:
                self._fds.append(_open(path, os.O_DIRECT))
                _probe_direct(self._fds[-1])
            return True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        self.close()
        folder = self.files[0].parent
        where = f"the filesystem of {folder} ({find_mount(folder).kind}) refuses direct reads"
        if must:
            raise UserError(
                where,
                "set hw.drive.direct=auto to read through the page cache, or use another folder",
            )
        log.warning("%s: reading through the page cache, which costs a copy and memory", where)
        return False

    def read(self, file_idx: int, buffer: memoryview, offset: int, need_nbytes: int) -> None:
        """Fill `buffer` from `offset`; the file may end early, but not before `need_nbytes`.

        buffer and offset are page-aligned. Continues after short reads. Raises OSError (as the kernel gave it) or
        EOFError (with the byte at which the file ends).
        """
        started_at = time.perf_counter()
        got = 0
        while got < need_nbytes:
            # a direct read that stopped inside a page goes on from the page's start
            start = align_down(got) if self.is_direct else got
            end = start + self._preadv(self._fds[file_idx], [buffer[start:]], offset + start)
            if end <= got:
                size = os.fstat(self._fds[file_idx]).st_size
                if offset + got < size:
                    raise OSError(
                        errno.EIO, "the drive gives no more bytes, though the file goes on"
                    )
                raise EOFError(size)
            got = end
        # 1 us beside a read of 50 or more: bytes of a file that changed must reach no token
        if _stamp(self._fds[file_idx]) != self._opened[file_idx]:
            raise OSError(errno.ESTALE, "the file was written to while it was in use")
        if self._simulated is not None:
            self._simulated.wait(started_at, len(buffer))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _stamp(fd: int) -> tuple[int, int]:
    """Return what changes when a file is written to."""
    found = os.fstat(fd)
    return found.st_mtime_ns, found.st_size


def _open(path: Path, flags: int) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)


def _probe_direct(fd: int) -> None:
    """Read one page: some filesystems accept the flag and refuse the read."""
    with mmap.mmap(-1, PAGE_NBYTES) as page:
        os.preadv(fd, [page], 0)
