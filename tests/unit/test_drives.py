"""What a folder lies on, from made-up /proc and /sys files; rates from a drive of known speed."""

from __future__ import annotations

import errno
import os
import platform
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.schema import DriveConfig
from runtime import drives
from runtime.drives import (
    allows_direct_reads,
    cached_nbytes,
    measure_grid,
    measure_rate,
    random_records,
)
from runtime.mounts import find_mount
from runtime.units import GIB, PAGE_NBYTES


class System:
    """A machine whose mounts and drives lie in a folder of the test."""

    def __init__(self, root: Path) -> None:
        self.mounts, self.blocks, self.devices = root / "mountinfo", root / "block", root / "devices"  # fmt: skip
        self.blocks.mkdir()
        self.mounts.write_text("")

    def mount(self, point: Path, kind: str, number: str, source: str) -> None:
        escaped = str(point).replace(" ", "\\040")
        line = f"36 35 {number} / {escaped} rw,noatime shared:1 - {kind} {source} rw\n"
        self.mounts.write_text(self.mounts.read_text() + line)

    def nvme(self, number: str, name: str = "nvme0n1", lanes: int = 4) -> Path:
        device = self.devices / "nvme0" / name
        (device / "queue").mkdir(parents=True)
        (device / "queue/rotational").write_text("0\n")
        bus = self.devices / "0000:01:00.0"
        bus.mkdir(exist_ok=True)
        for kind, width in (("current", lanes), ("max", 4)):
            (bus / f"{kind}_link_speed").write_text("32.0 GT/s PCIe\n")
            (bus / f"{kind}_link_width").write_text(f"{width}\n")
        controller = self.devices / "controller"
        controller.mkdir(exist_ok=True)
        (controller / "model").write_text("Fast Drive 2TB   \n")
        (controller / "device").symlink_to(bus)
        (device / "device").symlink_to(controller)
        (self.blocks / number).symlink_to(device)
        return device

    def find(self, path: Path):
        return find_mount(path, self.mounts, self.blocks)


@pytest.fixture
def system(tmp_path) -> System:
    return System(tmp_path)


def test_a_partition_of_an_nvme_drive(system, tmp_path):
    device = system.nvme("259:0", lanes=2)
    partition = device / "nvme0n1p2"
    partition.mkdir()
    (partition / "partition").write_text("2\n")
    (system.blocks / "259:2").symlink_to(partition)
    system.mount(Path("/"), "ext4", "8:1", "/dev/sda1")
    system.mount(tmp_path, "xfs", "259:2", "/dev/nvme0n1p2")
    found = system.find(tmp_path / "not" / "there" / "yet")
    assert (found.kind, found.device, found.is_rotational) == ("xfs", "nvme0n1", False)
    assert found.model == "Fast Drive 2TB"
    assert (found.link, found.link_most) == ("32.0 GT/s PCIe x2", "32.0 GT/s PCIe x4")


def test_below_a_mapper_the_real_drive_counts(system, tmp_path):
    real = system.nvme("259:0")
    mapper = system.devices / "dm-0"
    (mapper / "slaves").mkdir(parents=True)
    (mapper / "slaves" / real.name).symlink_to(real)
    (system.blocks / "253:0").symlink_to(mapper)
    system.mount(tmp_path, "ext4", "253:0", "/dev/mapper/root")
    assert system.find(tmp_path).device == "nvme0n1"


def test_the_innermost_and_the_last_mount_counts(system, tmp_path):
    inner = tmp_path / "a folder"
    inner.mkdir()
    system.mount(Path("/"), "ext4", "8:1", "/dev/sda1")
    system.mount(inner, "ext4", "8:2", "/dev/sda2")
    system.mount(inner, "nfs4", "0:50", "server:/models")
    found = system.find(inner / "x")
    assert (found.kind, found.device) == ("nfs4", "server:/models")
    assert found.is_network
    assert system.find(tmp_path).kind == "ext4"


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [("9p", True), ("fuse.sshfs", True), ("cifs", True), ("virtiofs", True), ("btrfs", False), ("overlay", False)],
)  # fmt: skip
def test_network_filesystems(system, tmp_path, kind, is_network):
    system.mount(tmp_path, kind, "0:40", "x")
    assert system.find(tmp_path).is_network is is_network


def test_a_machine_that_says_nothing(system, tmp_path):
    assert system.find(tmp_path).kind == "unknown"


def test_this_machine(tmp_path):
    found = find_mount(tmp_path)
    assert tmp_path.resolve().is_relative_to(found.point)
    assert os.stat(found.point).st_dev == os.stat(tmp_path).st_dev


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(40 * PAGE_NBYTES + 100))
    return path


def test_records_are_aligned_whole_and_all_there(file):
    spans = random_records([file, file], 3 * PAGE_NBYTES - 5)
    offsets = sorted((span.file_idx, span.offset) for span in spans)
    assert offsets == [(i, at) for i in (0, 1) for at in range(0, 39 * PAGE_NBYTES, 3 * PAGE_NBYTES)]  # fmt: skip
    assert {span.nbytes for span in spans} == {3 * PAGE_NBYTES}
    assert random_records([file], 41 * PAGE_NBYTES) == []


def test_the_rate_is_not_above_a_drive_of_known_speed(file):
    config = DriveConfig(window=2, pieces=2, piece_kib=4, simulate_gib_s=0.01)
    found = measure_rate([file], 2 * PAGE_NBYTES, config, 0.2)
    # two records are asked for before the clock's first look
    assert 0 < found.gib_s <= 0.01 * 1.1 + 4 * 2 * PAGE_NBYTES / GIB / 0.2


@pytest.mark.parametrize("bunch", [1, 8])
@pytest.mark.parametrize("free", [0, 1, 8, 30])
def test_the_rate_is_exact_on_a_clock_of_our_own(tmp_path, monkeypatch, bunch, free):
    """Records that arrive one by one or in bunches, from a drive that gives the first ones for nothing."""
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(64 * PAGE_NBYTES))
    now, count, cost_s = [0.0], [0], 0.01

    class Drive:
        is_direct = True

        def __init__(self, *_args) -> None:
            """Opens nothing."""

        def submit(self, key, _spans, _buffer, on_done) -> None:
            count[0] += 1
            if count[0] > free and count[0] % bunch == 0:
                now[0] += cost_s * bunch
            on_done(SimpleNamespace(key=key, error=None))

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr(drives, "DirectReader", Drive)
    monkeypatch.setattr(drives, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found = measure_rate([path], PAGE_NBYTES, DriveConfig(window=8, pieces=1), 2.0)
    assert found.gib_s == pytest.approx(PAGE_NBYTES / cost_s / GIB, rel=1e-6)
    assert found.each_s == pytest.approx([found.gib_s] * len(found.each_s))


def test_the_grid_measures_the_real_drive_in_every_way_that_the_reader_can_cut(file):
    config = DriveConfig(piece_kib=4, simulate_gib_s=1e-6)
    found = measure_grid([file], 2 * PAGE_NBYTES, config, (1, 2), (1, 2, 8), 0.02)
    assert [(rate.window, rate.pieces) for rate in found] == [(w, p) for w in (1, 2) for p in (1, 2)]  # fmt: skip
    assert all(rate.gib_s > 1e-5 for rate in found), "a simulated drive would be slower"


def test_direct_reads(file, monkeypatch):
    real = os.open

    def refusing(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing)
    assert not allows_direct_reads(file)
    monkeypatch.setattr(os, "open", real)
    with pytest.raises(FileNotFoundError):
        allows_direct_reads(file.with_name("nowhere"))


def test_page_cache_of_files(file):
    release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if release < (6, 5):
        assert cached_nbytes([file]) is None, "kernels tell from 6.5 on"
        return
    file.read_bytes()
    assert cached_nbytes([file]) == 41 * PAGE_NBYTES
    assert cached_nbytes([]) == 0
