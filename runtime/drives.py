"""What a folder lies on, and how fast it reads: filesystem, drive, link, direct reads; rates by window and pieces.

Facts come from /proc and /sys; a machine or container that says little is no error. Rates are measured through the
engine's own reader. Knows no model.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from conf.schema import DirectIo, DriveConfig
from runtime.experts.arena import HostArena
from runtime.experts.layout import Span
from runtime.experts.reader import DirectReader
from runtime.experts.schedule import ReadJob
from runtime.units import GIB, PAGE_NBYTES, align_down, align_up

NETWORK = (
    "9p",
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "gpfs",
    "beegfs",
    "drvfs",
    "virtiofs",
)
IN_MEMORY = ("tmpfs", "ramfs")
SYS_CACHESTAT = 451


@dataclass(frozen=True, slots=True)
class Mount:
    """The filesystem that a path is on, and what is known of its drive; None where the machine does not say."""

    point: str
    kind: str
    device: str  # as the kernel names it: `nvme0n1`, or the mount's source
    is_rotational: bool | None = None
    model: str | None = None
    link: str | None = None  # of a PCIe drive: `32.0 GT/s PCIe x4`
    link_most: str | None = None  # what drive and slot could do

    @property
    def interface(self) -> str | None:
        """`nvme-gen4` and the like by the link's rate, `hdd` for spinning discs, None where that is not known."""
        if self.device.startswith("nvme"):
            rate = float((self.link or "0").split()[0])
            return "nvme-gen5" if rate >= 32 else "nvme-gen4" if rate >= 16 else "nvme-gen3"
        is_virtual = self.device.startswith(("vd", "xvd"))
        return "hdd" if self.is_rotational and not is_virtual else None

    @property
    def is_network(self) -> bool:
        """Whether reads cross a network or another system's file server (WSL's Windows drives among them)."""
        return self.kind in NETWORK or self.kind.startswith("fuse")


def find_mount(
    path: Path,
    mounts: Path = Path("/proc/self/mountinfo"),
    sys_block: Path = Path("/sys/dev/block"),
) -> Mount:
    """Return what `path`, or its nearest folder that exists, lies on."""
    existing = next(p for p in (path, *path.parents) if p.exists()).resolve()
    best: tuple[int, list[str]] | None = None
    for text in mounts.read_text().splitlines():
        fields = text.split()
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])
        if existing.is_relative_to(point) and (best is None or len(point) >= best[0]):
            best = (len(point), [fields[2], point, *fields[fields.index("-") + 1 :]])
    if best is None:
        return Mount(str(existing), "unknown", "unknown")
    number, point, kind, source = best[1][:4]
    device = _device_folder(sys_block / number)
    if device is None:
        return Mount(point, kind, source)
    return Mount(
        point,
        kind,
        device.name,
        {"1": True, "0": False}.get(_read(device / "queue/rotational") or ""),
        (_read(device / "device/model") or "").strip() or None,
        *_links(device),
    )


def _device_folder(folder: Path) -> Path | None:
    """Return the whole drive's folder in sysfs: of a partition its parent, below mappers the first real drive."""
    if not folder.exists():
        return None
    device = folder.resolve()
    if (device / "partition").exists():
        device = device.parent
    while (device / "slaves").is_dir() and (slaves := sorted((device / "slaves").iterdir())):
        device = slaves[0].resolve()
        if (device / "partition").exists():
            device = device.parent
    return device


def _links(device: Path) -> tuple[str | None, str | None]:
    """Return the PCIe link of an NVMe drive as it is, and as it could be."""
    for folder in (device / "device/device", device / "device"):
        if (folder / "current_link_speed").exists():
            found = []
            for kind in ("current", "max"):
                speed, width = (_read(folder / f"{kind}_link_{what}") for what in ("speed", "width"))  # fmt: skip
                found.append(f"{speed} x{width}" if speed and width else None)
            return found[0], found[1]
    return None, None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


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
    """Read random records for `duration_s` with `config.window` in flight, each in `config.pieces`; no record twice in
    a row. Raises what the reader raises.
    """
    spans = random_records(files, record_nbytes)
    if not spans:
        return DriveRate(config.window, config.pieces, 0.0, False)
    ahead = 2 * config.window  # so that no thread waits for us
    arena = HostArena(ahead, align_up(record_nbytes))
    arena.rows.fill_(0)  # pages that do not exist yet would be made while the clock runs
    reader = DirectReader(files, config)
    done: SimpleQueue[ReadJob] = SimpleQueue()
    each: list[float] = []
    nbytes = in_second = 0

    def submit(number: int, row: int) -> None:
        span = spans[number % len(spans)]
        reader.submit(row, [span], arena.view(row), on_done=done.put)

    try:
        started = second = time.perf_counter()
        for number in range(ahead):
            submit(number, number)
        for number in itertools.count(ahead):
            job = done.get()
            if job.error is not None:
                raise job.error
            nbytes += arena.row_nbytes
            in_second += arena.row_nbytes
            now = time.perf_counter()
            if now - second >= 1:
                each.append(in_second / (now - second) / GIB)
                second, in_second = now, 0
            if now - started >= duration_s:
                break
            assert isinstance(job.key, int)
            submit(number, job.key)
        rate = nbytes / (now - started) / GIB
    finally:
        reader.close()
    return DriveRate(config.window, config.pieces, rate, reader.is_direct, tuple(each))


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
