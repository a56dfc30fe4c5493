"""The few calls by which a store touches the drive. Tests put faults here."""

from __future__ import annotations

import os
from pathlib import Path


def append(path: Path, at: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data` at byte `at`, the committed end, and wait for the drive. Raises OSError when it is full."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        write_at(fd, at, data)
        os.ftruncate(fd, at + len(data))  # what a failed commit left behind the end goes
        sync(fd)
    finally:
        os.close(fd)


def write_at(fd: int, at: int, data: bytes | bytearray | memoryview) -> None:
    """Write everything, however short the single writes are."""
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], at + done)


def sync(fd: int) -> None:
    """Wait until a file's bytes are on the drive."""
    os.fdatasync(fd)


def sync_folder(path: Path) -> None:
    """Wait until names in a folder are on the drive."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(path: Path, data: bytes) -> None:
    """Write a file under a temporary name, sync, rename: old or new, never half."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    append(temporary, 0, data)
    temporary.rename(path)
    sync_folder(path.parent)
