"""A drive of chosen speed, on a clock that only sleeping moves."""

import pytest

from conf.schema import DirectIo, DriveConfig
from runtime.experts import drive
from runtime.experts.drive import FileSet, SimulatedDrive
from runtime.units import GIB, MIB, PAGE_NBYTES


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(drive, "time", clock)
    return clock


def ends(clock, drive, started_at, nbytes):
    drive.wait(started_at, nbytes)
    return pytest.approx(clock.now, abs=1e-9)


def test_one_line_then_latency(clock):
    simulated = SimulatedDrive(rate_gib_s=2, latency_us=500)
    assert ends(clock, simulated, 0, GIB) == 0.5005
    # three at once share the line; the latencies pass side by side
    assert ends(clock, simulated, 0, GIB) == 1.0005
    assert ends(clock, simulated, 0, 2 * GIB) == 2.0005
    # the line was idle from 2.0 on: that time is not saved up
    clock.now = 7
    assert ends(clock, simulated, 7, GIB) == 7.5005


def test_a_read_that_took_longer_than_simulated_is_not_delayed(clock):
    simulated = SimulatedDrive(rate_gib_s=1, latency_us=0)
    clock.now = 3
    assert ends(clock, simulated, 1, GIB) == 3
    # and the line was free again at 2, not at 3
    assert ends(clock, simulated, 1.5, GIB) == 3


def test_reads_of_a_file_are_delayed_by_their_size(clock, tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(4 * MIB))
    config = DriveConfig(direct=DirectIo.buffered, simulate_gib_s=1, simulate_latency_us=100)
    files = FileSet([path], config)
    buffer = memoryview(bytearray(MIB))
    files.read(0, buffer, 0, MIB)
    files.read(0, buffer[:PAGE_NBYTES], MIB, PAGE_NBYTES)
    files.close()
    # the second began when the first was back, 100 us after the line was free
    assert clock.now == pytest.approx(MIB / GIB + 1e-4 + PAGE_NBYTES / GIB + 1e-4, abs=1e-12)
