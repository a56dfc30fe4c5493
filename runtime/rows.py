"""Row tables that stay on the drive (hashed n-gram embeddings): ids -> rows.

Reads the pages that hold the wanted rows, each page once, and keeps recent rows in a small cache. Knows
nothing of what a row means.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from runtime.checkpoint import Extent
from runtime.experts.arena import HostArena
from runtime.experts.checks import next_arrival
from runtime.experts.layout import Span
from runtime.experts.reader import DirectReader
from runtime.experts.schedule import ReadJob
from runtime.units import PAGE_NBYTES, align_down, align_up

# two rows this close are one read: a page costs less than a request
MAX_GAP_NBYTES = 4 * PAGE_NBYTES


@dataclass(frozen=True, slots=True)
class RowTable:
    """A table in equal parts, each a run of rows in a file; part i has rows [i * rows_per_part, ...)."""

    parts: tuple[Extent, ...]
    rows_per_part: int
    row_nbytes: int

    @property
    def num_rows(self) -> int:
        return len(self.parts) * self.rows_per_part

    def locate(self, row: int) -> tuple[int, int]:
        """Return (part, byte in the part's file) of a row; IndexError when it is out of range."""
        if not 0 <= row < self.num_rows:
            raise IndexError(f"row {row} of a table of {self.num_rows}")
        part, within = divmod(row, self.rows_per_part)
        return part, self.parts[part].offset + within * self.row_nbytes


@dataclass(slots=True)
class RowRequest:
    """Rows asked for; `job` is None when all were in the cache."""

    ids: Sequence[int]
    cached: dict[int, bytes]
    missing: dict[int, tuple[int, int]]  # row -> (bytes from ..., in the arena)
    job: ReadJob | None
    arena: HostArena | None


class RowReader:
    """`request` as soon as the ids are known, `collect` when the rows are needed."""

    def __init__(
        self,
        table: RowTable,
        reader: DirectReader,
        cache_rows: int,
        limit_s: float | None = None,
    ) -> None:
        """limit_s: `collect` raises DeviceError when the drive gives nothing for that long; None: it waits."""
        self.table, self._limit_s = table, limit_s
        self._reader = reader
        self._cache_rows = cache_rows
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._done: SimpleQueue[ReadJob] = SimpleQueue()
        files = sorted({part.file for part in table.parts})
        self._file_idx = [files.index(part.file) for part in table.parts]
        self.read_nbytes = 0
        self.wait_ns = 0

    def request(self, ids: Sequence[int]) -> RowRequest:
        """Start reading the rows that are not cached."""
        cached = {i: self._cache[i] for i in ids if i in self._cache}
        wanted = sorted(set(ids) - cached.keys(), key=self._place)
        if not wanted:
            return RowRequest(ids, cached, {}, None, None)
        spans, missing = self._plan(wanted)
        nbytes = spans[-1].dest + spans[-1].nbytes
        arena = HostArena(1, nbytes)
        self.read_nbytes += nbytes
        job = self._reader.submit(
            f"table rows {wanted[0]}..", spans, arena.view(0), on_done=self._done.put
        )
        return RowRequest(ids, cached, missing, job, arena)

    def collect(self, request: RowRequest) -> Tensor:
        """Wait for a request: [len(ids), row_nbytes] uint8. Raises the reader's error."""
        rows = request.cached
        if request.job is not None:
            started = time.perf_counter_ns()
            while not request.job.is_done:
                next_arrival(self._done, self._limit_s)
            self.wait_ns += time.perf_counter_ns() - started
            if request.job.error is not None:
                raise request.job.error
            assert request.arena is not None
            view = request.arena.view(0)
            rows = rows | {
                row: bytes(view[start:end]) for row, (start, end) in request.missing.items()
            }
        self._remember(request.ids, rows)
        joined = bytearray(b"".join(rows[i] for i in request.ids))
        return torch.frombuffer(joined, dtype=torch.uint8).view(
            len(request.ids), self.table.row_nbytes
        )

    def _place(self, row: int) -> tuple[int, int]:
        part, offset = self.table.locate(row)
        return self._file_idx[part], offset

    def _plan(self, wanted: Sequence[int]) -> tuple[list[Span], dict[int, tuple[int, int]]]:
        """Return the aligned reads that cover the rows (sorted by place), and each row's place in the arena."""
        spans: list[Span] = []
        missing: dict[int, tuple[int, int]] = {}
        for row in wanted:
            file_idx, start = self._place(row)
            end = start + self.table.row_nbytes
            if (
                spans
                and spans[-1].file_idx == file_idx
                and start <= spans[-1].offset + spans[-1].nbytes + MAX_GAP_NBYTES
            ):
                last = spans[-1]
                nbytes = max(last.nbytes, align_up(end) - last.offset)
                spans[-1] = Span(file_idx, last.offset, nbytes, end - last.offset, last.dest)
            else:
                dest = spans[-1].dest + spans[-1].nbytes if spans else 0
                first = align_down(start)
                spans.append(Span(file_idx, first, align_up(end) - first, end - first, dest))
            at = spans[-1].dest + start - spans[-1].offset
            missing[row] = (at, at + self.table.row_nbytes)
        return spans, missing

    def _remember(self, ids: Sequence[int], rows: dict[int, bytes]) -> None:
        for i in ids:
            self._cache[i] = rows[i]
            self._cache.move_to_end(i)
        while len(self._cache) > self._cache_rows:
            self._cache.popitem(last=False)

    def close(self) -> None:
        self._reader.close()
