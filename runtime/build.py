"""Which code this is: the package's version, and the commit where the project is a git checkout."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def version() -> str:
    """Return the installed package's version; `0` where it runs without being installed."""
    try:
        return metadata.version("nvmoe")
    except metadata.PackageNotFoundError:
        return "0"


def commit(root: Path = PROJECT) -> str | None:
    """Return the 40 digits of the checked-out commit, read from git's own files; None without them."""
    try:
        git = root / ".git"
        if git.is_file():  # a worktree: the file names its folder
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head if re.fullmatch(r"[0-9a-f]{40}", head) else None
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        shared = git / common.read_text().strip() if common.exists() else git
        for folder in (git, shared):
            if (folder / name).is_file():
                return (folder / name).read_text().strip()
        for line in (shared / "packed-refs").read_text().splitlines():
            if line.endswith(f" {name}"):
                return line.split()[0]
    except OSError:
        pass
    return None
