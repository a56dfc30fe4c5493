"""Files that are whole or not there, their hashes, and where configured paths start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from blake3 import blake3

ROOT = Path(__file__).resolve().parent.parent  # the folder of run.py
SAMPLE_CHUNKS, SAMPLE_NBYTES = 16, 4096


def absolute(path: str) -> Path:
    """Return a configured path; relative ones are taken from the folder of run.py."""
    expanded = Path(path).expanduser()
    return expanded if expanded.is_absolute() else ROOT / expanded


def write_atomically(path: Path, text: str) -> None:
    """Write a file under a temporary name, fsync, rename: a reader sees the old or the new one, never half."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    temporary.rename(path)
    fsync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object; None when there is no file, or anything else in it."""
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # also bytes that are no text
        return None
    return data if isinstance(data, dict) else None


def fsync_folder(path: Path) -> None:
    """Make renames in a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_digest(path: Path) -> str:
    """Return the blake3 of a file, streamed."""
    hasher = blake3(max_threads=blake3.AUTO)
    with open(path, "rb") as f:
        while chunk := f.read(2**24):
            hasher.update(chunk)
    return hasher.hexdigest(length=16)


def sample_digest(path: Path) -> str:
    """Return the blake3 of a few chunks spread over a file: quick, and sees most ways to be another file."""
    nbytes = path.stat().st_size
    hasher = blake3(str(nbytes).encode())
    with open(path, "rb") as f:
        for i in range(SAMPLE_CHUNKS):
            f.seek(max(0, nbytes - SAMPLE_NBYTES) * i // (SAMPLE_CHUNKS - 1))
            hasher.update(f.read(SAMPLE_NBYTES))
    return hasher.hexdigest(length=16)
