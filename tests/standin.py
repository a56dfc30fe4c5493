"""Snapshots with inference code: the stand-in package beside the golden or the bundled checkpoint."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from stages import patch

ROOT = Path(__file__).resolve().parents[1]
STANDIN = ROOT / "tests" / "data" / "deepseek_standin"
GOLDEN = ROOT / "tests" / "data" / "deepseek_golden" / "checkpoint"
TINY = ROOT / "runtime" / "bundled" / "tiny-deepseek"


def make_snapshot(folder: Path, checkpoint: Path = GOLDEN) -> Path:
    """Link a checkpoint's files into `folder` and copy the stand-in's code beside them."""
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    code = folder / "inference"
    shutil.copytree(checkpoint / "inference", code)
    for path in STANDIN.glob("*.py"):
        shutil.copy(path, code)
    return folder


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def know_the_standin(monkeypatch, snapshot: Path) -> None:
    """Take the stand-in's files for the known ones."""
    known = {name: sha256(snapshot / "inference" / name) for name in patch.KNOWN_SHA256}
    monkeypatch.setattr(patch, "KNOWN_SHA256", known)


def make_patched(snapshot: Path, folder: Path) -> Path:
    """Return a copy of a snapshot's code as the patch stage makes it, without its bookkeeping."""
    shutil.copytree(snapshot / "inference", folder)
    kernel = folder / patch.KERNEL
    kernel.write_bytes(patch.patched(kernel, kernel.read_bytes()))
    return folder
