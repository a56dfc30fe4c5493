"""One process per output."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Self

from runtime.errors import BusyError, UserError

log = logging.getLogger("stages")


class Lock:
    """A lock file with its owner's name in it.

    The kernel lets go when the owner dies, so a left-over file locks nobody out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> Self:
        self._acquire()
        while not self._is_ours():  # its last owner unlinked the file between our open and our lock
            os.close(self._fd)
            self._acquire()
        previous = os.pread(self._fd, 4096, 0).decode(errors="replace").strip()
        if previous:
            log.info(
                "%s: taking over from %s, which ended without finishing", self._path.stem, previous
            )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return self

    def _acquire(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}",
                "set paths.artifacts to a folder that you may write to",
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 4096, 0).decode(errors="replace").strip()
            os.close(self._fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise UserError(
                    f"the filesystem of {self._path.parent} has no file locks: {error.strerror}",
                    "set paths.artifacts to a folder on a local drive",
                ) from error
            raise BusyError(
                f"{self._path.stem} is being made by another run ({owner or 'owner unknown'})",
                "wait for it, or stop that process; what it has finished is kept",
            ) from error

    def _is_ours(self) -> bool:
        try:
            return os.stat(self._path).st_ino == os.fstat(self._fd).st_ino
        except FileNotFoundError:
            return False

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
