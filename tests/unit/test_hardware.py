"""What the machine has: memory from made-up /proc and cgroup files, cores, and the device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from runtime import hardware
from runtime.errors import UserError

GIB = 2**30
KIB = 1024
UNLIMITED_V1 = 9223372036854771712  # what an unlimited v1 group says


class Machine:
    """A machine whose /proc and /sys lie in a folder of the test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.meminfo(total=58, available=50)
        self.write("/proc/self/cgroup", "0::/\n")

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def meminfo(self, total: float, available: float) -> None:
        lines = {
            "MemTotal": total, "MemFree": 0.5, "MemAvailable": available, "Buffers": 1, "Cached": 40
        }  # fmt: skip
        text = "".join(f"{k}:  {int(v * GIB / KIB)} kB\n" for k, v in lines.items())
        self.write("/proc/meminfo", text)

    def v2(self, group: str, limit: int | str, used: int | None = None, **stat: int) -> None:
        folder = f"/sys/fs/cgroup/{group.strip('/')}".rstrip("/")
        self.write(f"{folder}/memory.max", limit)
        if used is not None:
            self.write(f"{folder}/memory.current", used)
        if stat:
            self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def v1(self, limit: int, used: int, **stat: int) -> None:
        self.write("/proc/self/cgroup", "4:memory:/docker/0f\n3:cpu:/docker/0f\n")
        self.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", limit)
        self.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", used)
        if stat:
            text = "\n".join(f"{k} {v}" for k, v in stat.items())
            self.write("/sys/fs/cgroup/memory/memory.stat", text)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    def path(name: str) -> Path:
        return tmp_path / name.lstrip("/") if name.startswith(("/proc", "/sys")) else Path(name)

    monkeypatch.setattr(hardware, "Path", path)
    monkeypatch.setattr(hardware, "CGROUP_V2", tmp_path / "sys/fs/cgroup")
    monkeypatch.setattr(
        hardware, "CGROUP_V1_LIMIT", tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    return Machine(tmp_path)


def test_no_cgroup_limit(machine):
    assert hardware.total_ram_nbytes() == (58 * GIB, "MemTotal of /proc/meminfo")
    assert hardware.available_ram_nbytes() == (50 * GIB, "MemAvailable of /proc/meminfo")


def test_v2_limit_of_a_container(machine):
    machine.v2("", 32 * GIB, used=5 * GIB)
    total, source = hardware.total_ram_nbytes()
    assert total == 32 * GIB
    assert source.endswith("sys/fs/cgroup/memory.max")
    available, source = hardware.available_ram_nbytes()
    assert available == 27 * GIB
    assert "cgroup limit" in source


def test_v2_the_tightest_enclosing_group_counts(machine):
    machine.write("/proc/self/cgroup", "0::/user.slice/app.scope\n")
    machine.v2("user.slice/app.scope", "max", used=GIB)
    machine.v2("user.slice", 8 * GIB, used=3 * GIB)
    machine.v2("", 40 * GIB, used=39 * GIB)
    assert hardware.total_ram_nbytes()[0] == 8 * GIB
    available, source = hardware.available_ram_nbytes()
    assert available == 1 * GIB, "the outer group has the larger limit and less left"
    assert "user.slice" not in source


def test_v2_group_of_the_host_is_not_visible_inside(machine):
    """With --cgroupns=host the path names a folder that the container does not have."""
    machine.write("/proc/self/cgroup", "0::/docker/0f/inner\n")
    machine.v2("", 16 * GIB, used=GIB)
    assert hardware.total_ram_nbytes()[0] == 16 * GIB


def test_v1_limit(machine):
    machine.v1(8 * GIB, used=2 * GIB)
    assert hardware.total_ram_nbytes()[0] == 8 * GIB
    assert hardware.available_ram_nbytes()[0] == 6 * GIB


def test_v1_without_a_limit(machine):
    machine.v1(UNLIMITED_V1, used=2 * GIB)
    assert hardware.total_ram_nbytes() == (58 * GIB, "MemTotal of /proc/meminfo")
    assert hardware.available_ram_nbytes() == (50 * GIB, "MemAvailable of /proc/meminfo")


def test_a_limit_above_the_machine_is_none(machine):
    machine.v2("", 500 * GIB, used=GIB)
    assert hardware.total_ram_nbytes() == (58 * GIB, "MemTotal of /proc/meminfo")
    assert hardware.available_ram_nbytes()[0] == 50 * GIB


def test_more_used_than_allowed_is_nothing_left(machine):
    machine.v2("", 4 * GIB, used=5 * GIB)
    assert hardware.available_ram_nbytes()[0] == 0


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_page_cache_of_the_group_counts_as_free(machine, version):
    """`memory.current` holds the page cache too: after reading 20 GiB of a checkpoint it is the whole limit."""
    if version == "v2":
        machine.v2("", 32 * GIB, used=31 * GIB, anon=2 * GIB, inactive_file=25 * GIB)
    else:
        machine.v1(32 * GIB, used=31 * GIB, total_inactive_file=25 * GIB, inactive_file=25 * GIB)
    assert hardware.available_ram_nbytes()[0] == 26 * GIB


@pytest.mark.parametrize("text", ["", "max", "-1", "garbage"])
def test_limit_files_that_say_nothing(machine, text):
    machine.v2("", text, used=GIB)
    assert hardware.total_ram_nbytes()[0] == 58 * GIB


def test_meminfo_of_another_system(machine):
    machine.write("/proc/meminfo", "MemTotal: 1 kB")
    with pytest.raises(UserError, match="MemAvailable"):
        hardware.available_ram_nbytes()


def test_this_machine():
    total, available = hardware.total_ram_nbytes()[0], hardware.available_ram_nbytes()[0]
    assert 0 < available <= total
    assert 0 < hardware.peak_rss_nbytes() <= total * 2


# ---- cores and device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_compute_threads(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    assert hardware.compute_threads(0) == threads
    assert hardware.compute_threads(5) == 5


@pytest.mark.parametrize(
    ("wanted", "has_cuda", "device"),
    [("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_device(monkeypatch, wanted, has_cuda, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert hardware.resolve_device(wanted).type == device


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError) as caught:
        hardware.resolve_device("cuda")
    assert "no CUDA device" in caught.value.message
    assert "hw=cpu" in caught.value.hint
