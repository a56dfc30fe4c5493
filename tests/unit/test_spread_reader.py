"""Several drives under the reader's threads: failures, silence, slowness and closing, with real files."""

import errno
import logging
import os
import random
import threading
import time
from queue import SimpleQueue

import pytest

from conf.schema import DriveConfig
from runtime.experts import spread_reader
from runtime.experts.arena import HostArena
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.reader import ReadError
from runtime.experts.spread_reader import SpreadReader
from runtime.units import PAGE_NBYTES
from tests.waiting import PATIENCE_S

NUM, RECORD = 24, 12 * PAGE_NBYTES


class Pack:
    """Experts on drives: each wholly on those that `homes` says, in files of the same order."""

    def __init__(self, folder, num_drives, homes=None):
        self.data = random.Random(0).randbytes(NUM * RECORD)
        self.files = tuple(folder / f"drive{i}.bin" for i in range(num_drives))
        self.places = tuple(str(file.parent) for file in self.files)
        self.drive_of = tuple(range(num_drives))
        self.missing = frozenset()
        self.homes = homes or (lambda _expert: range(num_drives))
        for file in self.files:
            file.write_bytes(self.data)

    def copies(self, key):
        at = key.expert * RECORD
        homes = [drive for drive in self.homes(key.expert) if drive not in self.missing]
        return [[Span(drive, at, RECORD, RECORD, 0)] for drive in homes]

    def lose(self, why):
        self.missing |= why.keys()

    def record(self, expert):
        return self.data[expert * RECORD : (expert + 1) * RECORD]


class Faults:
    """A `preadv` with a fault for each file."""

    def __init__(self, pack, **faults):
        self.pack, self.faults = pack, {int(k[1:]): f for k, f in faults.items()}
        self.counts = [0] * len(pack.files)

    def __call__(self, fd, buffers, offset):
        name = os.readlink(f"/proc/self/fd/{fd}")
        drive = next(i for i, file in enumerate(self.pack.files) if str(file) == name)
        self.counts[drive] += 1
        fault = self.faults.get(drive)
        return os.preadv(fd, buffers, offset) if fault is None else fault(fd, buffers, offset)


def eio(_fd, _buffers, _offset):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_reader(pack, preadv=os.preadv, configs=None):
    config = DriveConfig(window=2, pieces=2, piece_kib=4)
    configs = configs or [config] * len(pack.files)
    return SpreadReader(pack, configs, [None] * len(pack.files), preadv)


def read_all(pack, reader, arena):
    """Read every expert twice as a streamer would; returns the errors."""
    done, errors = SimpleQueue(), {}
    for repeat in range(2):
        jobs = {}
        for expert in range(NUM):
            key = ExpertKey(0, expert)
            jobs[reader.submit(key, (), arena.view(expert), expert % 3 > 0, done.put)] = expert
        while jobs:
            job = done.get(timeout=PATIENCE_S)
            if job.orphans is not None:
                job.orphans.restart(arena.view(NUM + jobs[job]))
                continue
            expert = jobs.pop(job)
            if job.error is None:
                assert job.buffer == pack.record(expert)
            else:
                errors[repeat, expert] = job.error
    return errors


@pytest.fixture
def arena():
    return HostArena(2 * NUM, RECORD)


@pytest.mark.parametrize("num_drives", [2, 3])
def test_mirrors_share_the_work(tmp_path, arena, num_drives):
    pack = Pack(tmp_path, num_drives)
    preadv = Faults(pack)
    reader = open_reader(pack, preadv)
    assert read_all(pack, reader, arena) == {}
    reader.close()
    assert reader.is_direct
    assert all(preadv.counts)
    assert sum(preadv.counts) == 2 * NUM * 2 * num_drives, "each piece once"


@pytest.mark.parametrize("first", range(0, 30, 3))
def test_a_mirror_that_fails_is_taken_out_with_a_warning(tmp_path, arena, caplog, first):
    """At any read: the other copy is read, and the drive is asked for nothing more."""
    pack, at = Pack(tmp_path, 2), []

    def fault(fd, buffers, offset):
        at.append(offset)
        return eio(fd, buffers, offset) if len(at) > first else os.preadv(fd, buffers, offset)

    reader = open_reader(pack, Faults(pack, d1=fault))
    assert read_all(pack, reader, arena) == {}
    reader.close()
    assert len(at) <= first + 4, "no more than what was on its way"
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"drive 1 of hw.drives ({tmp_path}) is taken out" in warnings[0]
    assert os.strerror(errno.EIO) in warnings[0]


def test_a_file_that_shrinks_is_read_elsewhere(tmp_path, arena, caplog):
    pack = Pack(tmp_path, 2)
    reader = open_reader(pack)
    os.truncate(pack.files[0], 3 * RECORD + 100)
    assert read_all(pack, reader, arena) == {}
    reader.close()
    assert "drive 0 of hw.drives" in caplog.text


def test_the_only_copy_that_fails_is_the_error_it_always_was(tmp_path, arena, caplog):
    pack = Pack(tmp_path, 2, homes=lambda expert: [expert % 2])
    reader = open_reader(pack, Faults(pack, d1=eio))
    errors = read_all(pack, reader, arena)
    reader.close()
    assert sorted(errors) == [(r, e) for r in range(2) for e in range(1, NUM, 2)]
    for (_, expert), error in errors.items():
        assert isinstance(error, ReadError)
        assert f"layer 0, expert {expert} from {pack.files[1]} at byte" in error.message
    assert not caplog.records, "nothing is taken out that nothing replaces"


def test_every_copy_fails(tmp_path, arena):
    pack = Pack(tmp_path, 2)
    reader = open_reader(pack, Faults(pack, d0=eio, d1=eio))
    errors = read_all(pack, reader, arena)
    reader.close()
    assert len(errors) == 2 * NUM
    assert all(isinstance(error, ReadError) for error in errors.values())


def test_a_mirror_that_stalls_is_taken_out_and_writes_to_no_memory_in_use(
    tmp_path, arena, caplog, monkeypatch
):
    """It comes back long after its record was read elsewhere and its bytes were given away, and writes other bytes."""
    monkeypatch.setattr(spread_reader, "STALL_S", 0.2)
    pack, gate, stuck, late = Pack(tmp_path, 2), threading.Event(), [], []

    def stall(fd, buffers, offset):
        stuck.append(offset)
        assert gate.wait(PATIENCE_S)
        buffers[0][:] = b"\xa5" * len(buffers[0])
        late.append(offset)
        return len(buffers[0])

    reader = open_reader(pack, Faults(pack, d1=stall))
    started = time.monotonic()
    assert read_all(pack, reader, arena) == {}
    assert time.monotonic() - started < PATIENCE_S / 2
    assert "drive 1 of hw.drives" in caplog.text
    assert "it has given nothing for" in caplog.text
    assert 0 < len(stuck) <= 4, "its threads, and nothing after them"
    rows = [bytes(arena.view(row)) for row in range(NUM)]
    gate.set()
    while len(late) < len(stuck):
        time.sleep(0.01)
    touched = [row for row in range(NUM) if bytes(arena.view(row)) != rows[row]]
    reader.close()
    # the first read of a stuck expert was into its row, which a streamer would have put aside; all else is whole
    assert len(touched) <= len(stuck)


def test_closing_does_not_wait_for_a_drive_that_hangs(tmp_path, arena, monkeypatch):
    monkeypatch.setattr(spread_reader, "STALL_S", 0.1)
    monkeypatch.setattr(spread_reader, "CLOSE_S", 0.1)
    pack, gate = Pack(tmp_path, 2), threading.Event()

    def stall(_fd, _buffers, _offset):
        gate.wait(PATIENCE_S)
        return 0

    reader = open_reader(pack, Faults(pack, d0=stall))
    assert read_all(pack, reader, arena) == {}
    closing = threading.Thread(target=reader.close)
    closing.start()
    closing.join(PATIENCE_S / 2)
    assert not closing.is_alive()
    gate.set()


def test_a_slow_drive_gets_little(tmp_path, arena):
    """No rate is told; one drive is thirty times slower."""
    pack = Pack(tmp_path, 2)
    preadv = Faults(pack)
    slow = DriveConfig(window=2, pieces=2, piece_kib=4, simulate_gib_s=0.002)
    fast = DriveConfig(window=2, pieces=2, piece_kib=4, simulate_gib_s=0.06)
    reader = open_reader(pack, preadv, [slow, fast])
    assert read_all(pack, reader, arena) == {}
    before = list(preadv.counts)
    assert read_all(pack, reader, arena) == {}
    reader.close()
    spent = [after - b for after, b in zip(preadv.counts, before, strict=True)]
    assert spent[0] < spent[1] / 6


def test_a_missing_drive_is_never_opened(tmp_path, arena):
    pack = Pack(tmp_path, 2, homes=lambda _expert: [1])
    pack.files[0].unlink()
    pack.missing = frozenset([0])
    reader = open_reader(pack)
    assert read_all(pack, reader, arena) == {}
    reader.close()


def test_a_drive_that_fails_when_it_is_opened_is_lost_before_the_first_read(
    tmp_path, arena, monkeypatch
):
    pack, real = Pack(tmp_path, 2), os.open

    def opened(path, flags, *args, **kwargs):
        if path == pack.files[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    reader = open_reader(pack)
    assert pack.missing == {0}
    assert read_all(pack, reader, arena) == {}
    reader.close()


def test_close_ends_every_thread_and_file(tmp_path, arena):
    before = set(threading.enumerate())
    pack = Pack(tmp_path, 3)
    reader = open_reader(pack)
    for expert in range(NUM):
        reader.submit(ExpertKey(0, expert), (), arena.view(expert))
    reader.close()
    assert set(threading.enumerate()) == before
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    opened = {os.readlink(link) for link in links if os.path.lexists(link)}
    assert not opened & {str(file) for file in pack.files}
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(ExpertKey(0, 0), (), arena.view(0))
