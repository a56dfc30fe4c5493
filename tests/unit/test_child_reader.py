"""The reader process: errors that say where, claims that one side gets, its end and its starter's end."""

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import count
from pathlib import Path

import pytest

from conf.schema import DirectIo, DriveConfig
from runtime.errors import UserError
from runtime.experts import child_reader
from runtime.experts import reader_wire as wire
from runtime.experts.arena import shared_arena
from runtime.experts.child_reader import ROOT, ChildReader
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.reader import ReadError
from runtime.experts.spread import has_reader_process
from runtime.units import PAGE_NBYTES
from tests.faulty_drives import ChildDrive
from tests.waiting import PATIENCE_S, wait_until

PAGES = 40


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(random.Random(0).randbytes(PAGES * PAGE_NBYTES))
    return path


@pytest.fixture
def open_reader(tmp_path, file):
    """Readers over the file, closed at the end."""
    readers, number = [], count()

    def open_it(config=None, **settings):
        folder = tmp_path / f"drive-{next(number)}"
        folder.mkdir()
        drive = ChildDrive(folder, **settings)
        readers.append(drive.open_reader([file], config or DriveConfig(window=2, pieces=2)))
        return readers[-1], drive

    yield open_it
    for reader in readers:
        reader.close()


def page_span(first, pages=1):
    nbytes = pages * PAGE_NBYTES
    return Span(0, first * PAGE_NBYTES, nbytes, nbytes, 0)


def submit(reader, arena, row, first, pages=1, **kinds):
    key, spans = ExpertKey(row, first), [page_span(first, pages)]
    return reader.submit(key, spans, arena.view(row), on_done=reader.put, **kinds)


def pages_of(file, first):
    return {(file.stat().st_ino, first * PAGE_NBYTES)}


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_others_go_on_after_one_that_failed(open_reader, file):
    """Each once, with its bytes or an error that says which expert, file and byte."""
    data = file.read_bytes()
    reader, drive = open_reader()
    drive.bad = pages_of(file, 3)
    arena = shared_arena(reader, 10, PAGE_NBYTES)
    jobs = [submit(reader, arena, i, i, is_required=i % 2 == 0) for i in range(10)]
    finished = [reader.get(timeout=PATIENCE_S) for _ in jobs]
    assert sorted(job.key for job in finished) == [job.key for job in jobs]
    assert reader.empty()
    for i, job in enumerate(jobs):
        assert job.is_done
        if i == 3:
            assert isinstance(job.error, ReadError)
            assert f"layer 3, expert 3 from {file} at byte 12,288" in job.error.message
            assert os.strerror(errno.EIO) in job.error.message
            assert "dmesg" in job.error.hint
        else:
            assert job.error is None
            assert arena.view(i) == data[i * PAGE_NBYTES : (i + 1) * PAGE_NBYTES]


def test_waiting_for_a_job(open_reader, file):
    """Its error is raised; a mistake of our own is named."""
    reader, drive = open_reader()
    arena = shared_arena(reader, 3, PAGE_NBYTES)
    drive.bad = pages_of(file, 6)
    good, bad = submit(reader, arena, 0, 2), submit(reader, arena, 1, 6)
    with pytest.raises(ReadError, match="at byte 24,576"):
        reader.wait(bad)
    reader.wait(good)
    drive.settle(mistake=True)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        reader.wait(submit(reader, arena, 2, 8))


@pytest.mark.parametrize("direct", [DirectIo.auto, DirectIo.buffered])
def test_a_file_that_shrank(open_reader, file, direct):
    reader, _ = open_reader(DriveConfig(direct=direct, window=1, pieces=1))
    arena = shared_arena(reader, 1, 2 * PAGE_NBYTES)
    os.truncate(file, 10_000)
    with pytest.raises(ReadError, match=r"ends at byte 10,000, bytes up to 12,288"):
        reader.wait(submit(reader, arena, 0, 1, 2))


def test_a_file_that_changed(open_reader, file):
    reader, _ = open_reader()
    arena = shared_arena(reader, 1, PAGE_NBYTES)
    time.sleep(0.02)  # the kernel's clock of file times ticks every few milliseconds
    with open(file, "r+b") as f:
        f.write(b"x")
    with pytest.raises(ReadError, match="written to while it was in use") as caught:
        reader.wait(submit(reader, arena, 0, 5))
    assert "start again" in caught.value.hint


def test_files_that_cannot_be_opened(file, tmp_path, open_reader, caplog):
    """As `DirectReader` says it, and no process is left."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())  # of other tests
    with pytest.raises(FileNotFoundError, match="gone"):
        ChildReader([file, tmp_path / "gone"], DriveConfig())
    with pytest.raises(UserError, match=r"hw\.drive\.direct=auto"):
        open_reader(DriveConfig(direct=DirectIo.require), refuses_direct=True)
    half = "import os, sys; os.write(int(sys.argv[2]), b'xxxxy'); exit(3)"  # of a greeting
    for code in ("exit(3)", half):
        with pytest.raises(UserError, match="ended with 3 before"):
            ChildReader([file], DriveConfig(), command=(sys.executable, "-c", code))
    assert set(children.read_text().split()) <= before
    assert not caplog.records
    reader, _ = open_reader(refuses_direct=True)
    assert not reader.is_direct
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "reading through the page cache" in caplog.text


def test_a_job_is_read_or_taken_back_and_never_both(open_reader, file):
    """What was taken back is not written any more, even where its row is given to another job at once."""
    data, rng = file.read_bytes(), random.Random(1)
    reader, _ = open_reader(DriveConfig(DirectIo.buffered, window=2, pieces=2), delay_s=2e-4)
    rows = 8
    arena = shared_arena(reader, rows, PAGE_NBYTES)
    taken_back = finished = 0
    live = {}  # row -> job
    for number in itertools.count():
        if number >= 600 and min(taken_back, finished) > 20:
            break
        assert number < 100_000, (taken_back, finished)
        row = rng.randrange(rows)
        job = live.pop(row, None)
        if job is not None:
            if rng.random() < 0.7 and reader.cancel(job):
                assert not reader.cancel(job)
                taken_back += 1
                arena.view(row)[:] = b"\xee" * PAGE_NBYTES
                continue
            reader.wait(job)
            finished += 1
            first = job.key.expert
            assert arena.view(row) == data[first * PAGE_NBYTES : (first + 1) * PAGE_NBYTES]
            arena.view(row)[:] = b"\xee" * PAGE_NBYTES
        elif rng.random() < 0.7:
            assert arena.view(row) in (b"\xee" * PAGE_NBYTES, bytes(PAGE_NBYTES)), "written to"
            is_required, is_idle = rng.choice([(True, False), (False, False), (False, True)])
            live[row] = submit(
                reader, arena, row, rng.randrange(PAGES), is_required=is_required, is_idle=is_idle
            )
            if rng.random() < 0.2:
                reader.promote(live[row])


def test_a_started_job_cannot_be_taken_back_and_waiting_ones_can(open_reader, file):
    reader, drive = open_reader(DriveConfig(window=1, pieces=1))
    arena = shared_arena(reader, 3, PAGE_NBYTES)
    drive.gated = pages_of(file, 0)
    started, waiting, idle = (
        submit(reader, arena, 0, 0, is_required=False),
        submit(reader, arena, 1, 1, is_required=False),
        submit(reader, arena, 2, 2, is_required=False, is_idle=True),
    )
    assert drive.is_waiting.wait(PATIENCE_S)
    assert [reader.cancel(job) for job in (started, waiting, idle)] == [False, True, True]
    drive.gate.set()
    reader.wait(started)
    again = submit(reader, arena, 1, 3)  # in the row of the one that was taken back
    reader.wait(again)
    assert arena.view(1) == file.read_bytes()[3 * PAGE_NBYTES : 4 * PAGE_NBYTES]
    assert not waiting.is_done


def test_more_jobs_than_the_pipes_hold(open_reader, file, monkeypatch):
    """Commands fill their pipe while nobody takes them, answers theirs: they are taken in while commands wait."""
    monkeypatch.setattr(child_reader, "PIPE_NBYTES", PAGE_NBYTES)
    rows = 4000
    reader, drive = open_reader(DriveConfig(DirectIo.buffered, window=1, pieces=1))
    arena = shared_arena(reader, rows, PAGE_NBYTES)
    drive.gated = pages_of(file, 0)
    first = submit(reader, arena, 0, 0)
    assert drive.is_waiting.wait(PATIENCE_S)
    os.kill(reader.pid, signal.SIGSTOP)  # nobody takes the commands
    threading.Timer(0.05, os.kill, (reader.pid, signal.SIGCONT)).start()
    jobs = [submit(reader, arena, row, row % PAGES, is_required=False) for row in range(1, rows)]
    assert all(reader.cancel(job) for job in jobs)
    # every number but one is waiting for its answer or free: they are used again
    jobs = [submit(reader, arena, row, 1, is_required=False) for row in range(1, rows)]
    assert sum(reader.cancel(job) for job in jobs) == rows - 1
    drive.gate.set()
    reader.wait(first)
    reader.wait(submit(reader, arena, 1, 1))


def test_close_drops_what_waits_and_ends_what_runs(open_reader, file):
    reader, drive = open_reader(DriveConfig(window=1, pieces=1))
    arena = shared_arena(reader, 2, PAGE_NBYTES)
    drive.gated = pages_of(file, 0)
    running, waiting = submit(reader, arena, 0, 0), submit(reader, arena, 1, 1)
    assert drive.is_waiting.wait(PATIENCE_S)
    threading.Timer(0.02, drive.gate.set).start()
    fds = set(os.listdir("/proc/self/fd"))
    reader.close()
    reader.close()
    assert (running.is_done, running.error, waiting.is_done) == (True, None, False)
    assert arena.view(0) == file.read_bytes()[:PAGE_NBYTES]
    assert not Path(f"/proc/{reader.pid}").exists()  # no zombie either
    assert len(set(os.listdir("/proc/self/fd"))) == len(fds) - 4
    with pytest.raises(RuntimeError, match="closed"):
        submit(reader, arena, 1, 1)


def test_a_process_that_is_killed_fails_every_job(open_reader, file):
    """Those on their way, those that waited, and those submitted afterwards; nobody hangs."""
    reader, drive = open_reader(DriveConfig(window=1, pieces=1))
    arena = shared_arena(reader, 5, PAGE_NBYTES)
    done = submit(reader, arena, 4, 4)
    wait_until(lambda: not reader.empty())  # read, and not asked for yet
    drive.gated = pages_of(file, 0)
    jobs = [submit(reader, arena, row, row) for row in range(3)]
    assert drive.is_waiting.wait(PATIENCE_S)
    os.kill(reader.pid, signal.SIGKILL)
    assert reader.get() is done
    assert done.error is None
    assert [reader.get() for _ in jobs] == jobs
    jobs.append(submit(reader, arena, 3, 3))
    assert reader.get() is jobs[-1]
    assert not reader.cancel(jobs[-1])
    for job in jobs:
        assert isinstance(job.error, ReadError)
        assert f"(pid {reader.pid}) was ended by signal 9" in job.error.message
    assert reader.empty()
    assert not Path(f"/proc/{reader.pid}").exists()


def test_ctrl_c_is_for_the_decoding_process(open_reader):
    reader, _ = open_reader()
    assert os.getpgid(reader.pid) != os.getpgid(0)


PARENT = """
    import sys, time
    from pathlib import Path
    from conf.schema import DriveConfig
    from runtime.experts.arena import shared_arena
    from runtime.experts.child_reader import ChildReader
    from runtime.experts.layout import ExpertKey, Span
    config = DriveConfig(simulate_gib_s=1e-9)  # a read takes an hour
    reader = ChildReader([Path(sys.argv[1])], config)
    arena = shared_arena(reader, 1, 4096)
    reader.submit(ExpertKey(0, 0), [Span(0, 0, 4096, 4096, 0)], arena.view(0))
    print(reader.pid, flush=True)
    time.sleep(600)
"""


def test_it_ends_when_its_starter_is_killed(file):
    """In the middle of a read."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(file)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    with parent:
        pid = int(parent.stdout.readline())
        time.sleep(0.05)
        assert is_alive(pid)
        parent.kill()
    wait_until(lambda: not is_alive(pid))


def test_it_imports_no_torch():
    code = "import sys, runtime.experts.reader_process; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"


def test_records_take_the_bytes_that_both_sides_expect():
    """One JOB, byte for byte: kind 1, a guess, one span, one hash, number 7 of layer 2, expert 3."""
    record = wire.job_record(
        7, wire.GUESSED, ExpertKey(2, 3), (4096, 8192), [Span(1, 2, 3, 4, 5)],
        [wire.Hash(6, 7, b"digest08")],
    )  # fmt: skip
    assert record.hex() == (
        "0101" "0100" "0100" "0000" "07000000" "02000000" "03000000"
        "0010000000000000" "0020000000000000"
        "0100000000000000" "0200000000000000" "0300000000000000" "0400000000000000" "0500000000000000"
        "0600000000000000" "0700000000000000" "6469676573743038"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "found"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_a_process_reads_with_a_gpu_unless_told_otherwise(wanted, has_gpu, found):
    assert has_reader_process(DriveConfig(process=wanted), has_gpu) is found
