"""What this machine has, and how fast it is: RAM with container limits, cores, device, drive and memory rates."""

from __future__ import annotations

import contextlib
import math
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from conf.schema import ComputeDtype, DriveConfig
from runtime import cgroups
from runtime.errors import UserError
from runtime.experts.arena import HostArena
from runtime.experts.drive import FileSet
from runtime.experts.layout import ExpertKey, ExpertLayout, Span
from runtime.experts.spread_reader import Copies
from runtime.units import GIB

DRIVE_DEPTH = 8  # whole experts in flight when the drive is measured


def total_ram_nbytes(root: Path = cgroups.ROOT) -> tuple[int, str]:
    """Return the RAM that this process may use at most, and where the number comes from.

    root: of another system, in tests.
    """
    total = _meminfo("MemTotal", root)
    found = [(limit.nbytes, f"cgroup limit {limit.file}") for limit in cgroups.memory_limits(root)]
    return min([(total, "MemTotal of /proc/meminfo"), *found], key=lambda pair: pair[0])


def available_ram_nbytes(root: Path = cgroups.ROOT) -> tuple[int, str]:
    """Return the RAM that is free for this process now, and where the number comes from.

    The page cache counts as free: the kernel gives it up for us.
    """
    found = [(_meminfo("MemAvailable", root), "MemAvailable of /proc/meminfo")]
    found += [
        (max(0, limit.nbytes - limit.used_nbytes), f"cgroup limit {limit.file} less what is used")
        for limit in cgroups.memory_limits(root)
    ]
    return min(found, key=lambda pair: pair[0])


def _meminfo(key: str, root: Path = cgroups.ROOT) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/meminfo has no {key}", "NVMoE needs Linux")


def swap_used_nbytes() -> int:
    """Return how much memory is swapped out, of all programs."""
    return _meminfo("SwapTotal") - _meminfo("SwapFree")


def num_cores() -> int:
    """Return how many cores this process may run on (its affinity mask)."""
    return len(os.sched_getaffinity(0))


def compute_threads(wanted: int) -> int:
    """Return the number of threads for CPU arithmetic; 0 asks for all cores but one, at most 8.

    One core is left to the reader threads: on two cores the tiny model decodes faster with one thread than two. Where a
    cgroup allows less time than the cores have, more threads would only be stopped in turns.
    """
    quota = cgroups.cpu_quota()
    usable = num_cores() if quota is None else min(num_cores(), math.ceil(quota))
    return wanted or max(1, min(8, usable - 1))


def is_device_fault(error: BaseException) -> bool:
    """Whether an error means that the GPU can no longer be used by this process. Too little memory is none."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def resolve_device(wanted: str) -> torch.device:
    """Return the torch device for `auto`, `cpu` or `cuda`. Raises UserError when there is no such device."""
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise UserError(
            "hw.device is cuda, but torch finds no CUDA device", "use hw=cpu, or hw.device=cpu"
        )
    return torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")


def resolve_dtype(wanted: ComputeDtype, device: torch.device) -> torch.dtype:
    """Return the dtype of residents and hidden states: fp32 on a CPU, bf16 on a GPU unless told otherwise."""
    if wanted is ComputeDtype.auto:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.float32 if wanted is ComputeDtype.float32 else torch.bfloat16


def peak_rss_nbytes() -> int:
    """Return the most memory that this process has held at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_vram_nbytes() -> int:
    """Return the most GPU memory that this process's tensors have held at once; 0 without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def measure_memory_gib_s(nbytes: int = 2**26, repeats: int = 5) -> float:
    """Return the rate at which one thread reads memory: the best of a few sums over `nbytes` of fp32."""
    data = torch.ones(nbytes // 4)
    best = 0.0
    for _ in range(repeats):
        started = time.perf_counter()
        data.sum()
        best = max(best, nbytes / (time.perf_counter() - started))
    return best / GIB


def measure_pcie_gib_s(nbytes: int = 2**28, repeats: int = 5) -> float:
    """Return the rate of copies from pinned RAM to the GPU: the best of a few; 0 without one, or without room.

    Both buffers, of `nbytes` at most, are given back.
    """
    target = _cuda_buffer(nbytes)
    rate = 0.0 if target is None else _copy_rate(target, repeats)
    del target
    torch.cuda.empty_cache()
    return rate


def _copy_rate(target: torch.Tensor, repeats: int) -> float:
    try:
        # not torch's pinned memory, which torch would keep
        source = HostArena(1, target.nbytes)
        source.pin()
    except UserError:  # no more memory may be locked
        return 0.0
    host = source.rows[0, : target.nbytes]
    try:
        seconds = _best_cuda_s(lambda: target.copy_(host, non_blocking=True), repeats)
    finally:
        source.close()
    return target.nbytes / seconds / GIB


def measure_vram_gib_s(nbytes: int = 2**28, repeats: int = 5) -> float:
    """Return the rate at which the GPU reads its memory: the best of a few sums; 0 without one, or without room.

    The buffer, of `nbytes` at most, is given back; it must be well above the GPU's cache.
    """
    data = _cuda_buffer(nbytes)
    if data is None:
        return 0.0
    rate = data.nbytes / _best_cuda_s(data.zero_().view(torch.float32).sum, repeats) / GIB
    del data
    torch.cuda.empty_cache()
    return rate


def _cuda_buffer(nbytes: int, smallest_nbytes: int = 2**26) -> torch.Tensor | None:
    """Return uint8 memory on the GPU, half as large as often as there is no room; None without a GPU or room."""
    if not torch.cuda.is_available():
        return None
    smallest_nbytes = min(nbytes, smallest_nbytes)
    while nbytes >= smallest_nbytes:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            nbytes //= 2
    return None


def _best_cuda_s(work: Callable[[], object], repeats: int) -> float:
    """Return the least of `repeats` durations in seconds on the GPU, after one run that does not count."""
    best_ms = math.inf
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, start.elapsed_time(end))
    return best_ms / 1e3


def measure_drive_gib_s(
    layout: ExpertLayout, config: DriveConfig, duration_s: float = 0.3
) -> float:
    """Return the rate at which whole random experts come from the drive, `DRIVE_DEPTH` asked for at any time.

    Reads as an engine would (direct or not, simulated or not), but without its window: this is the drive's ceiling.
    """
    files = FileSet(layout.files, config)
    try:
        reads = [layout.spans(key) for key in _every_key(layout)]
        return _measure_gib_s([(files, reads)], layout.record_nbytes, duration_s)
    finally:
        files.close()


def measure_drives_gib_s(
    layout: ExpertLayout, copies: Copies, configs: Sequence[DriveConfig], duration_s: float = 0.3
) -> float:
    """Return the same of several drives at once, each giving what lies on it."""
    with contextlib.ExitStack() as opened:
        drives = []
        for drive, config in enumerate(configs):
            own = [i for i, home in enumerate(copies.drive_of) if home == drive]
            if drive in copies.missing or not own:
                continue
            files = FileSet([copies.files[i] for i in own], config)
            opened.callback(files.close)
            reads = [
                [s._replace(file_idx=own.index(s.file_idx)) for s in copy if s.file_idx in own]
                for key in _every_key(layout)
                for copy in copies.copies(key)
            ]
            drives.append((files, [spans for spans in reads if spans]))
        return _measure_gib_s(drives, layout.record_nbytes, duration_s)


def _every_key(layout: ExpertLayout) -> list[ExpertKey]:
    return [ExpertKey(layer, e) for layer in range(layout.num_layers) for e in range(layout.num_experts)]  # fmt: skip


def _measure_gib_s(
    drives: Sequence[tuple[FileSet, Sequence[Sequence[Span]]]],
    record_nbytes: int,
    duration_s: float,
) -> float:
    """Read what lies on each drive in random order, over and over, all drives at once."""
    arena = HostArena(DRIVE_DEPTH * len(drives), record_nbytes)
    orders = [list(reads) for _, reads in drives]
    for order in orders:
        random.Random(0).shuffle(order)
    started = time.perf_counter()

    def read_some(row: int) -> int:
        drive, at = divmod(row, DRIVE_DEPTH)
        files, order = drives[drive][0], orders[drive]
        nbytes = 0
        while order and time.perf_counter() - started < duration_s:
            for span in order[at % len(order)]:
                target = arena.view(row)[span.dest : span.dest + span.nbytes]
                files.read(span.file_idx, target, span.offset, span.need_nbytes)
                nbytes += span.nbytes
            at += DRIVE_DEPTH
        return nbytes

    with ThreadPoolExecutor(DRIVE_DEPTH * len(drives)) as pool:
        total = sum(pool.map(read_some, range(DRIVE_DEPTH * len(drives))))
    return total / (time.perf_counter() - started) / GIB
