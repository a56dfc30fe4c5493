"""How fast a folder's drive reads: direct reads, page cache, rates by window and pieces.

Rates are measured through the engine's own reader. Knows no model.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from conf.schema import DirectIo, DriveConfig
from runtime.experts.arena import HostArena
from runtime.experts.layout import Span
from runtime.experts.reader import DirectReader
from runtime.experts.schedule import ReadJob, depth_of
from runtime.units import GIB, PAGE_NBYTES, align_down, align_up

SYS_CACHESTAT = 451
RAMP_S = 0.2  # not counted: a drive behind a rate limit gives more for a moment


def allows_direct_reads(path: Path) -> bool:
    """Whether one aligned page of a file can be read with O_DIRECT. Raises OSError for other failures."""
    arena = HostArena(1, PAGE_NBYTES)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.preadv(fd, [arena.view(0)], 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True


class _Range(ctypes.Structure):
    _fields_ = (("off", ctypes.c_uint64), ("len", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recent")
    )


def cached_nbytes(files: Sequence[Path]) -> int | None:
    """Return how much of files is in the page cache; None before Linux 6.5. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for path in files:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            whole, found = _Range(0, 0), _CacheStat()  # a length of 0 is to the end
            if libc.syscall(SYS_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(found), 0) != 0:
                error = ctypes.get_errno()
                if error in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                    return None
                raise OSError(error, os.strerror(error), str(path))
        finally:
            os.close(fd)
        total += found.cache * PAGE_NBYTES
    return total


# ---- rates -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DriveRate:
    """One measurement."""

    window: int  # records in flight
    pieces: int  # parallel reads of each
    gib_s: float
    is_direct: bool
    each_s: tuple[float, ...] = ()  # GiB/s of each second, of a long measurement


def random_records(files: Sequence[Path], record_nbytes: int, seed: int = 0) -> list[Span]:
    """Return every whole record-sized aligned run of the files, in random order."""
    size = align_up(record_nbytes)
    spans = [
        Span(i, at, size, size, 0)
        for i, path in enumerate(files)
        for at in range(0, align_down(path.stat().st_size) - size + 1, size)
    ]
    random.Random(seed).shuffle(spans)
    return spans


def measure_rate(
    files: Sequence[Path], record_nbytes: int, config: DriveConfig, duration_s: float
) -> DriveRate:
    """Read random records for about `duration_s`, as many in flight and in as many pieces as `config` says; no record
    twice in a row. Raises what the reader raises.

    The clock starts when a ramp is over and at least one round is back. It runs from one arrival to another, whole
    rounds of `window` apart: what is half read when it starts stands for what is half read when it stops, and records
    that arrive in bunches are counted by the bunch.
    """
    spans = random_records(files, record_nbytes)
    window, pieces, _ = depth_of(config, record_nbytes)
    if not spans:
        return DriveRate(window, pieces, 0.0, False)
    ahead = 2 * window  # so that no thread waits for us
    arena = HostArena(ahead, align_up(record_nbytes))
    arena.rows.fill_(0)  # pages that do not exist yet would be made while the clock runs
    reader = DirectReader(files, replace(config, window=window, pieces=pieces))
    done: SimpleQueue[ReadJob] = SimpleQueue()
    each: list[float] = []

    def submit(number: int, row: int) -> None:
        span = spans[number % len(spans)]
        reader.submit(row, [span], arena.view(row), on_done=done.put)

    def next_round(number: int) -> float:
        """Take `window` arrivals, ask for as many anew, from `number` on; return when the last one came."""
        for offset in range(window):
            job = done.get()
            if job.error is not None:
                raise job.error
            assert isinstance(job.key, int)
            submit(number + offset, job.key)
        return time.perf_counter()

    round_nbytes = window * arena.row_nbytes
    nbytes = in_second = 0
    try:
        for number in range(ahead):
            submit(number, number)
        opened = time.perf_counter()
        started = second = 0.0
        for number in itertools.count(ahead, window):
            now = next_round(number)
            if not started:
                if now - opened >= min(RAMP_S, duration_s / 4):
                    started = second = now
                continue
            nbytes += round_nbytes
            in_second += round_nbytes
            if now - second >= 1:
                each.append(in_second / (now - second) / GIB)
                second, in_second = now, 0
            if now - started >= duration_s:
                break
        rate = nbytes / (now - started) / GIB
    finally:
        reader.close()
    return DriveRate(window, pieces, rate, reader.is_direct, tuple(each))


def measure_grid(
    files: Sequence[Path],
    record_nbytes: int,
    config: DriveConfig,
    windows: Sequence[int],
    pieces: Sequence[int],
    each_s: float,
) -> list[DriveRate]:
    """Measure every window with every number of pieces, `each_s` seconds each; never smaller than a piece may be."""
    real = replace(config, simulate_gib_s=0.0, simulate_latency_us=0.0)
    if real.direct is DirectIo.require:
        real = replace(real, direct=DirectIo.auto)
    # fewer pieces where the reader would not cut so small
    settings = [
        replace(real, window=window, pieces=count)
        for window in windows
        for count in pieces
        if count == 1 or record_nbytes / count >= config.piece_kib * 1024 / 2
    ]
    return [measure_rate(files, record_nbytes, setting, each_s) for setting in settings]
