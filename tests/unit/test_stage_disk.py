"""The stage runner on a disk that is too small or full, and what it shows of its progress without a terminal."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple

import pytest

from runtime.errors import UserError
from stages import progress
from stages.disk_room import DISK_MARGIN_NBYTES
from tests.unit.stage_world import NUM_UNITS, UNIT_NBYTES, Killed, stop_after, unstopped

# ---- disk --------------------------------------------------------------------------------------------------------


def test_too_little_disk_is_said_before_the_first_byte(world, monkeypatch):
    world.disk = {"first": 3 * 2**30, "second": 5 * 2**30, "other": 2**20}
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**40, 2**40, 3 * 2**30))
    with pytest.raises(UserError) as caught:
        world.run()
    # second cannot be asked yet, first and other can; 64 MiB stay free
    assert "3.00 GiB free" in str(caught.value)
    assert "need 3.06 GiB (first 3.00 GiB, other 1.00 MiB)" in str(caught.value)
    assert "paths.artifacts" in str(caught.value)
    assert sum(world.executed().values()) == 0
    assert world.files() == {}


def test_a_later_stage_is_asked_as_soon_as_it_can_say(world, monkeypatch):
    world.disk["second"] = 5 * 2**30
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**40, 2**40, 3 * 2**30))
    with pytest.raises(UserError, match=r"second 5\.00 GiB"):
        world.run()
    assert world.executed_stages() == ["first"]


def test_partial_work_counts_as_disk_already_taken(world, monkeypatch):
    world.on_done = stop_after("first", "3", Killed())
    with pytest.raises(Killed):
        world.run("first")
    world.on_done = lambda *_: None
    world.disk["first"] = NUM_UNITS * UNIT_NBYTES
    usage = namedtuple("usage", "total used free")
    free = DISK_MARGIN_NBYTES + 100  # not enough for the whole output, enough for the rest
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**40, 2**40, free))
    world.run("first")
    assert sum(world.executed().values()) == NUM_UNITS


def test_a_full_disk_inside_a_unit(world, tmp_path, fault_row):
    world.on_unit = stop_after("second", "2", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(UserError) as caught:
        world.run()
    assert "second ran out of disk" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert str(world.artifacts) in str(caught.value)
    world.on_unit = lambda *_: None
    assert world.explain()["second"] == "resume: 2 of 4 units are done"
    world.run()
    assert world.content("second") == unstopped(tmp_path).content("second")
    fault_row("the disk fills in a stage's work", caught.value.message, "2 of 4 units kept, same bytes")  # fmt: skip


def test_a_full_disk_at_any_moment_is_one_sentence(world, tmp_path, monkeypatch):
    """Also while plan, journal and record are written, which is outside of the stage's own code."""
    real, reference = os.fsync, unstopped(tmp_path)
    for nth in range(1, 60):
        calls = 0

        def fsync(fd: int, nth: int = nth) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(errno.ENOSPC, "No space left on device")

        shutil.rmtree(world.artifacts, ignore_errors=True)
        monkeypatch.setattr(os, "fsync", fsync)
        try:
            world.run("second")
        except UserError as error:
            if "ran out of disk" not in str(error):
                pytest.fail(f"fsync number {nth} is said as: {error}")
        except OSError as error:
            pytest.fail(f"fsync number {nth} made a traceback: {error!r}")
        finally:
            monkeypatch.setattr(os, "fsync", real)
        if calls < nth:
            break
        world.run("second")
        assert world.content("second") == reference.content("second"), f"fsync number {nth}"
    assert calls > 10, "the calls were not intercepted"


def test_a_folder_that_cannot_be_made(world, tmp_path):
    (tmp_path / "artifacts").write_text("a file")
    with pytest.raises(UserError, match=r"paths\.artifacts"):
        world.run()


# ---- progress without a terminal -----------------------------------------------------------------------------------


def test_progress_of_bytes_in_lines(monkeypatch, capsys):
    """A line now and then with bytes, rate and time left, and no control characters."""
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.Progress("fetch", 400 * 2**20, 100 * 2**20, is_nbytes=True) as bar:
        now = 104.0
        bar.advance(50 * 2**20)  # too early for a line
        now = 110.0
        bar.advance(70 * 2**20)
        now = 120.0
        bar.advance(-20 * 2**20)  # thrown away
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "fetch 220.00 MiB of 400.00 MiB at 12.00 MiB/s, 15.0 s left",
        "fetch 200.00 MiB of 400.00 MiB at 5.00 MiB/s, 40.0 s left",
    ]
