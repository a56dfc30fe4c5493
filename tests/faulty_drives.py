"""Drives that are late, fail or wait at a gate, for readers with threads and for the reader process."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from pathlib import Path

from runtime.experts.child_reader import ChildReader
from runtime.experts.reader import DirectReader
from runtime.units import PAGE_NBYTES
from tests.waiting import PATIENCE_S


class Drive:
    """Reads after a random moment; pages in `bad` give EIO; reads at a shut gate wait."""

    def __init__(self, rng, delay_s=0.0):
        self.rng, self.delay_s = rng, delay_s
        self.bad = set()
        self.gate, self.gated = threading.Event(), set()
        self.is_waiting, self.is_through = threading.Event(), threading.Event()

    def preadv(self, fd, buffers, offset):
        inode = os.fstat(fd).st_ino
        pages = {(inode, page) for page in range(offset, offset + len(buffers[0]), PAGE_NBYTES)}
        if pages & self.gated:
            self.is_waiting.set()
            assert self.gate.wait(PATIENCE_S)
        time.sleep(self.rng.random() * self.delay_s)
        if pages & self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        got = os.preadv(fd, buffers, offset)
        if pages & self.gated:
            self.is_through.set()
        return got

    def open_reader(self, files, config, **more):
        return DirectReader(files, config, self.preadv, **more)


class Flag:
    """An event between two processes: a file that is there or not."""

    def __init__(self, path):
        self._path = path

    def set(self):
        self._path.touch()

    def is_set(self):
        return self._path.exists()

    def wait(self, seconds):
        until = time.monotonic() + seconds
        while not self.is_set():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True


class ChildDrive:
    """The same for a reader process, told through a folder. `faulty_reader_process` has the other side."""

    def __init__(self, folder, delay_s=0.0, **settings):
        self._folder = Path(folder)
        self._state = {"delay_s": delay_s, "bad": [], "gated": [], **settings}
        self.gate, self.is_waiting, self.is_through = (
            Flag(self._folder / name) for name in ("gate", "waiting", "through")
        )
        self._write()

    def _write(self):
        new = self._folder / "state.new"
        new.write_text(json.dumps(self._state))
        new.rename(self._folder / "state")

    bad = property(
        lambda self: {tuple(page) for page in self._state["bad"]},
        lambda self, pages: self.settle(bad=sorted(pages)),
    )
    gated = property(
        lambda self: {tuple(page) for page in self._state["gated"]},
        lambda self, pages: self.settle(gated=sorted(pages)),
    )

    def settle(self, **settings):
        """Change what else is told."""
        self._state |= settings
        self._write()

    @property
    def command(self):
        return sys.executable, "-m", "tests.faulty_reader_process", str(self._folder)

    def open_reader(self, files, config, **more):
        return ChildReader(files, config, command=self.command, **more)
