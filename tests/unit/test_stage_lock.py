"""Two runs of one stage at once: who goes on, what the other is told, and what a dead owner leaves behind."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.errors import BusyError, UserError
from stages.lock import Lock
from tests.unit.stage_world import NUM_UNITS, World

ROOT = Path(__file__).resolve().parents[2]
PROCESS = Path(__file__).with_name("stage_process.py")


@pytest.fixture
def holder(world):
    """Another process that holds the lock of `first`."""
    path = world.artifacts / "made-up" / f"{world.runner().folder('first').name}.lock"
    path.parent.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, str(PROCESS), "hold", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_of_two_runs_is_told_who_holds_the_lock(world, holder, caplog, fault_row):
    with pytest.raises(BusyError) as caught:
        world.run()
    assert f"pid {holder.pid} on {socket.gethostname()}" in str(caught.value)
    assert "first" in str(caught.value)
    assert caught.value.exit_code == 4
    assert sum(world.executed().values()) == 0

    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert list(world.artifacts.rglob("*.lock")), "the dead owner's file is still there"
    with caplog.at_level(logging.INFO, "stages"):
        world.run()
    assert f"taking over from pid {holder.pid}" in caplog.text
    fault_row("two runs of one stage", caught.value.message, "taken over when its owner is killed")
    assert not list(world.artifacts.rglob("*.lock"))
    assert world.runner().decide("first").action == "skip"


def test_a_lock_file_of_an_older_run_locks_nobody_out(world):
    path = world.artifacts / "made-up" / f"{world.runner().folder('first').name}.lock"
    path.parent.mkdir(parents=True)
    path.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")  # the pid lives, but not here
    world.run()
    assert world.runner().decide("first").action == "skip"


def test_a_lock_unlinked_by_its_last_owner_between_open_and_lock(tmp_path, monkeypatch):
    """Two runs must not hold two files of one name: the loser of this race opens it again."""
    path, real = tmp_path / "x.lock", fcntl.flock
    races = iter([True, False])

    def flock(fd: int, flags: int) -> None:
        if next(races):
            path.unlink()
        real(fd, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Lock(path):
        monkeypatch.setattr(fcntl, "flock", real)
        assert path.exists()
        with pytest.raises(BusyError), Lock(path):
            pass
    assert not path.exists()


def test_another_run_that_finished_while_we_waited_is_not_repeated(world, monkeypatch):
    """The decision is taken again under the lock."""
    other, real = World(world.artifacts.parent), Lock.__enter__
    is_first = iter([True])

    def enter(lock: Lock) -> Lock:
        if next(is_first, False):
            other.run("first")
        return real(lock)

    monkeypatch.setattr(Lock, "__enter__", enter)
    world.run("first")
    assert sum(world.executed().values()) == NUM_UNITS


def test_a_filesystem_without_locks(world, monkeypatch, fault_row):
    def flock(_fd: int, _flags: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError) as caught:
        world.run()
    assert not isinstance(caught.value, BusyError)
    assert "has no file locks: Function not implemented" in str(caught.value)
    assert "paths.artifacts" in str(caught.value)
    assert sum(world.executed().values()) == 0
    fault_row("a filesystem without locks", caught.value.message, "said before any work")
