"""What `doctor` finds of the host: software, limits of this process, cores, memory."""

from __future__ import annotations

import ctypes.util
import platform
import resource
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

from runtime import cgroups, cores, hardware
from runtime.drives import cached_nbytes
from runtime.units import MIB, format_nbytes
from stages.doctor_report import Report

MEMLOCK_UNLIMITED = resource.RLIM_INFINITY
FEW_FILES = 1024  # open at once: shards, threads and connections need some hundreds


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_software(report: Report, has_gpu: bool) -> None:
    """Versions, and those that are known to go wrong."""
    names = ("torch", "triton", "numpy", "huggingface_hub")
    found = {name: _version(name) for name in names}
    report.add(
        "software",
        "versions",
        "ok",
        ", ".join(
            f"{n} {v}" for n, v in {"python": platform.python_version(), **found}.items() if v
        ),
    )
    if not hasattr(torch, "float8_e8m0fnu"):
        report.add(
            "software",
            "torch",
            "bad",
            f"{found['torch']} has no E8M0 numbers",
            "pip install -c constraints.txt torch",
        )
    if not hasattr(torch, "float4_e2m1fn_x2"):
        report.add(
            "software",
            "torch",
            "warn",
            f"{found['torch']} has no FP4 numbers: deepseek.arithmetic=reference needs them",
            "pip install -c constraints.txt torch, or keep deepseek.arithmetic=native",
        )
    if has_gpu and found["triton"] is None:
        report.add(
            "software",
            "triton",
            "bad",
            "not installed, and the GPU's kernels are written in it",
            "pip install -c constraints.txt triton",
        )
    if not has_gpu and Path("/dev/nvidiactl").exists():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device"
        )
        report.add(
            "software",
            "torch",
            "warn",
            f"there is an NVIDIA driver, but {why}",
            "install a CUDA build of torch, or use hw=cpu on purpose",
        )
    tilelang, capability = (
        _version("tilelang"),
        torch.cuda.get_device_capability() if has_gpu else (0, 0),
    )
    if tilelang == "0.1.8" and capability[0] == 12:
        report.add(
            "software",
            "tilelang",
            "bad",
            "0.1.8 computes wrong numbers on sm_120 without an error",
            "pip install 'tilelang>=0.1.9'; this engine does not use it",
        )
    if has_gpu and ctypes.util.find_library("cuda") is None:
        report.add(
            "software",
            "driver",
            "warn",
            "libcuda is not on the library path",
            "in a container: start it with --gpus all",
        )


def check_limits(report: Report, has_gpu: bool) -> None:
    """Limits of this process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < FEW_FILES
    report.add(
        "limits",
        "open files",
        "warn" if few else "ok",
        f"{files}",
        f"ulimit -n {FEW_FILES}" if few else "",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == MEMLOCK_UNLIMITED else format_nbytes(locked)
    # CUDA pins through its driver, which does not ask this limit; some container set-ups do
    report.add("limits", "locked memory", "ok", text + (", not asked by CUDA's driver" if has_gpu else ""))  # fmt: skip


def check_cores(report: Report) -> None:
    """Which cores there are, and what a container takes away."""
    found = cores.read_topology()
    slow = sum(core.is_efficiency for core in found)
    kinds = f"{len(found)} CPUs" + (f", {slow} of them efficiency cores" if slow else "")
    report.add("CPU", "cores", "ok", f"{kinds}; {cores.describe(cores.assign(found))}")
    quota = cgroups.cpu_quota()
    if quota is not None and quota < len(found):
        report.add(
            "CPU",
            "container",
            "warn",
            f"a cgroup allows {quota:.1f} of {len(found)} CPUs",
            "raise the container's CPU limit, or set hw.compute_threads",
        )


def check_memory(report: Report, files: Sequence[Path]) -> None:
    """RAM as it is now, and how fast one thread reads it."""
    (total, where), (available, source) = hardware.total_ram_nbytes(), hardware.available_ram_nbytes()  # fmt: skip
    report.add("memory", "total", "ok", f"{format_nbytes(total)} ({where})")
    cached = cached_nbytes(files) if files else 0
    note = ""
    if cached:
        note = f"; {format_nbytes(cached)} of it is page cache of this model's files, which direct reads do not need"
    report.add("memory", "available", "ok", f"{format_nbytes(available)} ({source}){note}")
    used = hardware.swap_used_nbytes()
    if used > 256 * MIB:
        report.add(
            "memory",
            "swap",
            "warn",
            f"{format_nbytes(used)} are swapped out",
            "end other programs, or raise hw.reserve_gib: a cache that is swapped is slower than none",
        )
    rate = hardware.measure_memory_gib_s()
    report.rates["ram_gib_s"] = rate
    report.add("memory", "reading, one thread", "ok", f"{rate:.1f} GiB/s")
