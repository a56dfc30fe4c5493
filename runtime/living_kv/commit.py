"""The commit log: one line a commit, each hashed, each naming the hash of the one before. Knows no other file.

A line is canonical JSON, a blank, the blake3 of the JSON, a newline. What is not whole was never committed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blake3 import blake3

LOG_NAME = "commits.log"
NO_COMMIT = "0" * 64


class Range(NamedTuple):
    """Bytes that one commit appended to a file."""

    start: int
    nbytes: int
    digest: str


class Whole(NamedTuple):
    """A file written anew for one commit."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Commit:
    """The state of a store after one commit: counts, the length of every file, and what was appended."""

    seq: int = 0
    prev: str = NO_COMMIT
    tokens: int = 0
    sentences: int = 0
    blocks: int = 0
    lengths: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    tail: Whole | None = None  # the exact unfinished block
    hot: Whole | None = None  # the exact sinks and window

    def body(self) -> str:
        """Return the canonical JSON."""
        return json.dumps(
            {
                "seq": self.seq, "prev": self.prev, "tokens": self.tokens, "sentences": self.sentences,
                "blocks": self.blocks, "lengths": dict(self.lengths), "ranges": dict(self.ranges),
                "tail": self.tail, "hot": self.hot,
            },
            sort_keys=True, separators=(",", ":"),
        )  # fmt: skip

    @property
    def digest(self) -> str:
        return blake3(self.body().encode()).hexdigest()

    def line(self) -> bytes:
        """Return the record as it stands in the log."""
        body = self.body()
        return f"{body} {blake3(body.encode()).hexdigest()}\n".encode()


@dataclass(frozen=True, slots=True)
class Log:
    """What a scan of a log found."""

    commits: tuple[Commit, ...]  # whole and chained, oldest first
    nbytes: int  # of these
    # line numbers (from 1) that are not whole although a whole one follows
    damaged: tuple[int, ...]


def scan(raw: bytes) -> Log:
    """Read a log. A broken end is a write that was cut; a broken line before a whole one is damage."""
    commits: list[Commit] = []
    bad: list[int] = []
    damaged: list[int] = []
    end = at = 0
    for number, line in enumerate(raw.splitlines(keepends=True), 1):
        at += len(line)
        commit = _parse(line)
        chained = commit is not None and (
            bool(bad) or commit.prev == (commits[-1].digest if commits else NO_COMMIT)
        )
        if commit is None or not chained or (commits and commit.seq <= commits[-1].seq):
            bad.append(number)
            continue
        damaged += bad
        bad = []
        commits.append(commit)
        end = at
    return Log(tuple(commits), end, tuple(damaged))


def _parse(line: bytes) -> Commit | None:
    body, _, digest = line.rpartition(b" ")
    if not line.endswith(b"\n") or blake3(body).hexdigest().encode() != digest.rstrip(b"\n"):
        return None
    try:
        data: dict[str, Any] = json.loads(body)
        data["ranges"] = {name: Range(*entry) for name, entry in data["ranges"].items()}
        for name in ("tail", "hot"):
            data[name] = Whole(*data[name]) if data[name] else None
        return Commit(**data)
    except (ValueError, KeyError, TypeError):
        return None
