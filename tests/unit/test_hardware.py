"""What the machine has: memory from made-up /proc and cgroup files, cores, and the device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from runtime import cgroups, hardware
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
        target.write_text(f"{str(text).rstrip()}\n")

    def meminfo(self, total: float, available: float) -> None:
        lines = {
            "MemTotal": total, "MemFree": 0.5, "MemAvailable": available, "Buffers": 1, "Cached": 40
        }  # fmt: skip
        text = "".join(f"{k}:  {int(v * GIB / KIB)} kB\n" for k, v in lines.items())
        self.write("/proc/meminfo", text)

    def mount(self, point: str, kind: str, options: str, base: str = "/") -> None:
        path = self.root / "proc/self/mountinfo"
        path.touch()
        with path.open("a") as f:
            f.write(f"30 29 0:26 {base} {point} rw,nosuid shared:4 - {kind} cgroup {options}\n")

    def v2(self, group: str, limit: int | str, used: int | None = None, **stat: int) -> None:
        if not (self.root / "proc/self/mountinfo").exists():
            self.mount("/sys/fs/cgroup", "cgroup2", "rw,nsdelegate")
        self.group(f"/sys/fs/cgroup/{group.strip('/')}".rstrip("/"), ("max", "current"), limit, used, stat)  # fmt: skip

    def v1(self, group: str, limit: int, used: int, **stat: int) -> None:
        """A group of v1 on a system that mounts a v2 hierarchy without controllers beside, as systemd does."""
        if not (self.root / "proc/self/mountinfo").exists():
            self.write("/proc/self/cgroup", f"4:memory:{group}\n3:cpu,cpuacct:{group}\n0::/x\n")
            self.mount("/sys/fs/cgroup/unified", "cgroup2", "rw")
            self.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory")
            self.mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
        folder = f"/sys/fs/cgroup/memory/{group.strip('/')}".rstrip("/")
        self.group(folder, ("limit_in_bytes", "usage_in_bytes"), limit, used, stat)

    def group(self, folder: str, names: tuple[str, str], limit, used, stat) -> None:
        self.write(f"{folder}/memory.{names[0]}", limit)
        if used is not None:
            self.write(f"{folder}/memory.{names[1]}", used)
        if stat:
            self.write(f"{folder}/memory.stat", "\n".join(f"{k} {v}" for k, v in stat.items()))

    def total(self) -> tuple[int, str]:
        return hardware.total_ram_nbytes(self.root)

    def available(self) -> tuple[int, str]:
        return hardware.available_ram_nbytes(self.root)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def test_no_cgroup_limit(machine):
    assert machine.total() == (58 * GIB, "MemTotal of /proc/meminfo")
    assert machine.available() == (50 * GIB, "MemAvailable of /proc/meminfo")


def test_v2_limit_of_a_container(machine):
    machine.v2("", 32 * GIB, used=5 * GIB)
    total, source = machine.total()
    assert total == 32 * GIB
    assert source.endswith("sys/fs/cgroup/memory.max")
    available, source = machine.available()
    assert available == 27 * GIB
    assert "cgroup limit" in source


def test_v2_the_tightest_enclosing_group_counts(machine):
    machine.write("/proc/self/cgroup", "0::/user.slice/app.scope\n")
    machine.v2("user.slice/app.scope", "max", used=GIB)
    machine.v2("user.slice", 8 * GIB, used=3 * GIB)
    machine.v2("", 40 * GIB, used=39 * GIB)
    assert machine.total()[0] == 8 * GIB
    available, source = machine.available()
    assert available == 1 * GIB, "the outer group has the larger limit and less left"
    assert "user.slice" not in source


def test_v2_group_of_the_host_is_not_visible_inside(machine):
    """With --cgroupns=host the path names a folder that the container does not have."""
    machine.write("/proc/self/cgroup", "0::/docker/0f/inner\n")
    machine.v2("", 16 * GIB, used=GIB)
    assert machine.total()[0] == 16 * GIB


def test_v1_limit_of_the_own_group(machine):
    """Without a cgroup namespace the whole hierarchy is seen: the root says nothing, the own group does."""
    machine.v1("/docker/0f", 8 * GIB, used=2 * GIB)
    machine.v1("/", UNLIMITED_V1, used=50 * GIB)
    assert machine.total()[0] == 8 * GIB
    assert machine.total()[1].endswith("memory/docker/0f/memory.limit_in_bytes")
    assert machine.available()[0] == 6 * GIB


def test_v1_the_tightest_enclosing_group_counts(machine):
    machine.v1("/slice/app", 16 * GIB, used=GIB)
    machine.v1("/slice", 8 * GIB, used=3 * GIB)
    machine.v1("/", UNLIMITED_V1, used=50 * GIB)
    assert machine.total()[0] == 8 * GIB
    assert machine.available()[0] == 5 * GIB


@pytest.mark.parametrize("group", ["/docker/0f", "/docker/0f/inner", "/", "/elsewhere"])
def test_v1_inside_a_container(machine, group):
    """The container's own group is mounted as the root; the path is the host's, or one that is not seen from here."""
    machine.write("/proc/self/cgroup", f"4:memory:{group}\n")
    machine.mount("/sys/fs/cgroup/memory", "cgroup", "rw,memory", base="/docker/0f")
    machine.v1("", 8 * GIB, used=2 * GIB)
    assert machine.total()[0] == 8 * GIB
    assert machine.available()[0] == 6 * GIB


def test_v1_and_v2_at_once(machine):
    machine.v1("/x", 8 * GIB, used=GIB)
    machine.group("/sys/fs/cgroup/unified/x", ("max", "current"), 4 * GIB, GIB, {})
    assert machine.total()[0] == 4 * GIB


def test_a_mount_point_with_a_space(machine):
    machine.write("/proc/self/cgroup", "4:memory:/a b\n")
    machine.mount("/mnt/my\\040groups", "cgroup", "rw,memory")
    machine.group("/mnt/my groups/a b", ("limit_in_bytes", "usage_in_bytes"), 8 * GIB, GIB, {})
    assert machine.total()[0] == 8 * GIB


def test_a_kernel_without_cgroups(machine):
    (machine.root / "proc/self/cgroup").unlink()
    assert machine.total()[0] == 58 * GIB
    assert cgroups.cpu_quota(machine.root) is None


def test_cpu_time(machine):
    machine.v1("/x", UNLIMITED_V1, used=GIB)
    cpu = "/sys/fs/cgroup/cpu,cpuacct"
    machine.write(f"{cpu}/cpu.cfs_quota_us", -1)
    machine.write(f"{cpu}/cpu.cfs_period_us", 100000)
    assert cgroups.cpu_quota(machine.root) is None
    machine.write(f"{cpu}/x/cpu.cfs_quota_us", 250000)
    machine.write(f"{cpu}/x/cpu.cfs_period_us", 100000)
    assert cgroups.cpu_quota(machine.root) == 2.5
    machine.write("/sys/fs/cgroup/unified/cpu.max", "max 100000")
    assert cgroups.cpu_quota(machine.root) == 2.5
    machine.write("/sys/fs/cgroup/unified/x/cpu.max", "150000 100000")
    assert cgroups.cpu_quota(machine.root) == 1.5


def test_v1_without_a_limit(machine):
    machine.v1("/", UNLIMITED_V1, used=2 * GIB)
    assert machine.total() == (58 * GIB, "MemTotal of /proc/meminfo")
    assert machine.available() == (50 * GIB, "MemAvailable of /proc/meminfo")


def test_a_limit_above_the_machine_is_none(machine):
    machine.v2("", 500 * GIB, used=GIB)
    assert machine.total() == (58 * GIB, "MemTotal of /proc/meminfo")
    assert machine.available()[0] == 50 * GIB


def test_more_used_than_allowed_is_nothing_left(machine):
    machine.v2("", 4 * GIB, used=5 * GIB)
    assert machine.available()[0] == 0


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_page_cache_of_the_group_counts_as_free(machine, version):
    """`memory.current` holds the page cache too: after reading 20 GiB of a checkpoint it is the whole limit."""
    if version == "v2":
        machine.v2("", 32 * GIB, used=31 * GIB, anon=2 * GIB, inactive_file=25 * GIB)
    else:
        machine.v1(
            "/", 32 * GIB, used=31 * GIB, total_inactive_file=25 * GIB, inactive_file=25 * GIB
        )
    assert machine.available()[0] == 26 * GIB


@pytest.mark.parametrize("text", ["", "max", "-1", "garbage"])
def test_limit_files_that_say_nothing(machine, text):
    machine.v2("", text, used=GIB)
    assert machine.total()[0] == 58 * GIB


def test_meminfo_of_another_system(machine):
    machine.write("/proc/meminfo", "MemTotal: 1 kB")
    with pytest.raises(UserError, match="MemAvailable"):
        machine.available()


def test_this_machine():
    total, available = hardware.total_ram_nbytes()[0], hardware.available_ram_nbytes()[0]
    assert 0 < available <= total
    assert 0 < hardware.peak_rss_nbytes() <= total * 2


# ---- cores and device --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 7), (9, 8), (64, 8)])
def test_compute_threads(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: None)
    assert hardware.compute_threads(0) == threads
    assert hardware.compute_threads(5) == 5


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (2.0, 1), (3.5, 3), (100.0, 8)])
def test_compute_threads_in_a_container(monkeypatch, quota, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    assert hardware.compute_threads(0) == threads


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
