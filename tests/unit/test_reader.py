"""Reads that go wrong: errors that say where, files that shrink, filesystems that refuse direct reads, closing."""

import errno
import os
import random
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

import pytest

from conf.schema import DirectIo, DriveConfig
from runtime.errors import UserError
from runtime.experts.arena import HostArena
from runtime.experts.drive import FileSet
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.reader import DirectReader, ReadError
from runtime.units import PAGE_NBYTES
from tests.waiting import PATIENCE_S


@pytest.fixture
def file(tmp_path):
    """Ten pages of random bytes."""
    path = tmp_path / "experts.bin"
    path.write_bytes(random.Random(0).randbytes(10 * PAGE_NBYTES))
    return path


def page_span(first, count):
    nbytes = count * PAGE_NBYTES
    return Span(0, first * PAGE_NBYTES, nbytes, nbytes, 0)


def read(reader, key, span):
    """Return (bytes, error) of one record."""
    done = SimpleQueue()
    arena = HostArena(1, span.nbytes)
    job = reader.submit(key, [span], arena.view(0), on_done=done.put)
    assert done.get(timeout=PATIENCE_S) is job
    return bytes(arena.view(0)), job.error


def failing_at(offset, error=errno.EIO):
    def preadv(fd, buffers, at):
        if at == offset:
            raise OSError(error, os.strerror(error))
        return os.preadv(fd, buffers, at)

    return preadv


def num_open(path):
    """Return how many file descriptors of this process are open on a file."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}") == str(path)
        except FileNotFoundError:  # the listing's own
            continue
    return found


@pytest.mark.parametrize("direct", [DirectIo.auto, DirectIo.buffered])
def test_a_read_error_says_where(file, direct):
    config = DriveConfig(direct=direct, window=1, pieces=4, piece_kib=4)
    reader = DirectReader([file], config, failing_at(6 * PAGE_NBYTES))
    _, error = read(reader, ExpertKey(17, 203), page_span(4, 4))
    reader.close()
    assert isinstance(error, ReadError)
    assert f"layer 17, expert 203 from {file} at byte 24,576" in str(error)
    assert os.strerror(errno.EIO) in error.message


def test_other_jobs_go_on_after_a_failed_one(file):
    data = file.read_bytes()
    reader = DirectReader([file], DriveConfig(window=2, pieces=2), failing_at(3 * PAGE_NBYTES))
    done = SimpleQueue()
    arena = HostArena(10, PAGE_NBYTES)
    jobs = [
        reader.submit(
            ExpertKey(0, i), [page_span(i, 1)], arena.view(i), i % 2 == 0, on_done=done.put
        )
        for i in range(10)
    ]
    finished = [done.get(timeout=PATIENCE_S) for _ in jobs]
    reader.close()
    assert sorted(job.key for job in finished) == [job.key for job in jobs]  # each once
    assert done.empty()
    for i, job in enumerate(jobs):
        assert (job.error is not None) == (i == 3)
        if i != 3:
            assert arena.view(i) == data[i * PAGE_NBYTES : (i + 1) * PAGE_NBYTES]


def test_waiting_for_a_job(file):
    """Its bytes are there afterwards; its error is raised, our own mistakes as well."""

    def preadv(fd, buffers, at):
        if at == 8 * PAGE_NBYTES:
            raise ZeroDivisionError
        return failing_at(6 * PAGE_NBYTES)(fd, buffers, at)

    reader = DirectReader([file], DriveConfig(window=1, pieces=2), preadv)
    arena = HostArena(3, PAGE_NBYTES)
    good, bad, mistaken = (
        reader.submit(page, [page_span(page, 1)], arena.view(row))
        for row, page in enumerate((2, 6, 8))
    )
    with pytest.raises(ReadError, match="at byte 24,576"):
        reader.wait(bad)
    reader.wait(good)
    with pytest.raises(ZeroDivisionError):
        reader.wait(mistaken)
    assert arena.view(0) == file.read_bytes()[2 * PAGE_NBYTES : 3 * PAGE_NBYTES]
    reader.close()


@pytest.mark.parametrize("direct", [DirectIo.auto, DirectIo.buffered])
@pytest.mark.parametrize("ends_at", [10_000, 2 * PAGE_NBYTES, PAGE_NBYTES, 0])
def test_a_file_that_shrank(file, direct, ends_at):
    """The end inside a page, on a page, before the record, at nothing."""
    reader = DirectReader([file], DriveConfig(direct=direct, window=1, pieces=1))
    os.truncate(file, ends_at)
    _, error = read(reader, ExpertKey(1, 2), page_span(1, 2))
    reader.close()
    assert isinstance(error, ReadError)
    assert f"layer 1, expert 2 from {file}" in error.message
    assert f"ends at byte {ends_at:,}, bytes up to 12,288" in error.message


def test_close_drops_what_waits_and_ends_what_runs(file):
    gate, is_running = threading.Event(), threading.Event()

    def gated(fd, buffers, at):
        is_running.set()
        assert gate.wait(PATIENCE_S)
        return os.preadv(fd, buffers, at)

    threads_before = set(threading.enumerate())
    reader = DirectReader([file], DriveConfig(window=1, pieces=2, piece_kib=4), gated)
    arena = HostArena(3, 4 * PAGE_NBYTES)
    jobs = [reader.submit(i, [page_span(i, 4)], arena.view(i)) for i in range(3)]
    assert is_running.wait(PATIENCE_S)
    closing = threading.Thread(target=reader.close)
    closing.start()
    with suppress(RuntimeError):  # until close has begun: then it takes no more
        while closing.is_alive():
            jobs.append(reader.submit(3, [page_span(0, 1)], arena.view(2)))
            time.sleep(0.001)
    gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert [job.is_done for job in jobs] == [True] + [False] * (len(jobs) - 1)
    assert arena.view(0) == file.read_bytes()[: 4 * PAGE_NBYTES]
    assert set(threading.enumerate()) == threads_before
    assert num_open(file) == 0
    with pytest.raises(RuntimeError, match="closed"):
        reader.submit(0, [page_span(0, 1)], arena.view(0))


def refuse_flag(monkeypatch, error=errno.EINVAL):
    real = os.open

    def opened(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)


def refuse_read(monkeypatch, error=errno.EINVAL):
    def refused(*args):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "preadv", refused)  # the default of FileSet was bound before


@pytest.mark.parametrize("refuse", [refuse_flag, refuse_read])
def test_a_filesystem_without_direct_reads(file, monkeypatch, caplog, refuse):
    """It refuses the flag, or takes the flag and refuses the read: through the page cache, said once."""
    refuse(monkeypatch)
    reader = DirectReader([file, file], DriveConfig(direct=DirectIo.auto))
    data, error = read(reader, 0, page_span(2, 3))
    assert not reader.is_direct
    assert error is None
    assert data == file.read_bytes()[2 * PAGE_NBYTES : 5 * PAGE_NBYTES]
    assert num_open(file) == 2  # the refused ones are closed
    reader.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(file.parent) in caplog.text


@pytest.mark.parametrize("refuse", [refuse_flag, refuse_read])
def test_direct_required_and_refused(file, monkeypatch, caplog, refuse):
    refuse(monkeypatch)
    with pytest.raises(UserError, match=r"hw\.drive\.direct=auto"):
        FileSet([file], DriveConfig(direct=DirectIo.require))
    assert not caplog.records
    assert num_open(file) == 0


def test_an_error_that_is_no_refusal_is_not_hidden(file, monkeypatch, caplog):
    refuse_flag(monkeypatch, errno.EMFILE)  # too many open files
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        FileSet([file], DriveConfig(direct=DirectIo.auto))
    assert not caplog.records


def test_a_missing_file_leaves_nothing_open(file):
    with pytest.raises(FileNotFoundError):
        FileSet([file, file.with_name("gone")], DriveConfig(direct=DirectIo.auto))
    assert num_open(file) == 0


def test_buffered_never_asks_for_direct(file, monkeypatch, caplog):
    refuse_flag(monkeypatch)
    files = FileSet([file], DriveConfig(direct=DirectIo.buffered))
    files.close()
    assert not caplog.records


@pytest.mark.parametrize("kinds", [(True, True), (True, False), (False, False)])
def test_every_thread_that_may_work_is_woken(file, kinds):
    config = DriveConfig(window=2, pieces=4, piece_kib=4)
    together = threading.Barrier(8)

    def preadv(fd, buffers, at):
        together.wait(PATIENCE_S)  # only when all pieces of both records are in flight
        return os.preadv(fd, buffers, at)

    arena, done = HostArena(2, 4 * PAGE_NBYTES), SimpleQueue()
    reader = DirectReader([file], config, preadv)
    for repeat in range(5):
        for row, is_required in enumerate(kinds):
            span = page_span(row * 4, 4)
            reader.submit((repeat, row), [span], arena.view(row), is_required, done.put)
        for _ in kinds:
            assert done.get(timeout=PATIENCE_S).error is None
    reader.close()
