"""The one door to expert weights: `fetch` for a decoded token, `sweep` for a prompt.

Brings cache, reader and arena together for one engine thread. Yields (expert id, record) pairs; a record is
valid until the next one is asked for after it, or for `fetch` until the iterator ends. Where a record came
from never shows in its bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from torch import Tensor

from runtime.experts.arena import HostArena
from runtime.experts.cache import ExpertCache
from runtime.experts.layout import ExpertKey, ExpertLayout
from runtime.experts.reader import DirectReader
from runtime.experts.schedule import ReadJob
from runtime.stats import ExpertCounters


class ExpertSource(Protocol):
    """Where an engine gets its experts from."""

    counters: ExpertCounters

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Sequence[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each of `ids` (distinct, in router order) with its record, in the order of arrival.

        `guesses`: likely experts of layer + 1, best first; they may be read ahead in the gap.
        """

    def sweep(self, layer: int, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield each of `ids` once, in the order given; what decoding keeps warm stays warm."""

    def pin(self) -> None:
        """Make the records readable by the GPU where they are. Once, before the first fetch."""

    def close(self) -> None: ...


class _Ahead(NamedTuple):
    """An expert that a sweep will yield soon."""

    key: ExpertKey
    staging: int | None  # its staging row; None: it is in the cache
    job: ReadJob | None  # its read; None: it is there already


class ExpertStreamer:
    """Experts from the drive through the RAM cache."""

    def __init__(
        self,
        layout: ExpertLayout,
        reader: DirectReader,
        cache_rows: int,
        sweep_rows: int,
        prefetch_experts: int,
    ) -> None:
        """cache_rows: at least the model's top-k.  sweep_rows: staging rows, read ahead of a prompt's computing."""
        self._layout = layout
        self._reader = reader
        self._arena = HostArena(cache_rows + sweep_rows, layout.record_nbytes)
        self._staging = range(cache_rows, cache_rows + sweep_rows)
        self._prefetch_experts = prefetch_experts
        self.cache = ExpertCache(cache_rows)
        self.counters = ExpertCounters()
        self._jobs: dict[
            ExpertKey, ReadJob
        ] = {}  # admitted to the cache, not yet known to have landed
        self._guesses: set[ExpertKey] = set()  # admitted as guesses, not yet judged
        self._arrivals: SimpleQueue[ReadJob] = SimpleQueue()
        self._pinned: list[ExpertKey] = []  # by the call in progress
        self._staged: list[ReadJob] = []  # reads into staging rows by the sweep in progress

    @property
    def arena_nbytes(self) -> int:
        return self._arena.nbytes

    def pin(self) -> None:
        self._arena.pin()

    # ---- decode -----------------------------------------------------------------------------------------------

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Sequence[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        keys = [ExpertKey(layer, expert) for expert in ids]
        self._settle()
        self._judge_guesses(keys)
        pinned = self._open_pins()
        waiting: dict[ExpertKey, ReadJob] = {}
        ready: list[ExpertKey] = []
        missing: list[ExpertKey] = []
        try:
            # the whole route is pinned before anything is admitted: a miss must not evict a hit of its own layer
            for key in keys:
                if self.cache.row_of(key) is None:
                    missing.append(key)
                    continue
                self.cache.pin(key)
                pinned.append(key)
                self.cache.touch(key)
                if key in self._jobs:
                    self._reader.promote(self._jobs[key])
                    waiting[key] = self._jobs[key]
                else:
                    ready.append(key)
            for key in missing:
                waiting[key] = self._read(key, is_required=True)
                self.cache.pin(key)
                pinned.append(key)
            self.counters.hits += len(ready)
            self.counters.late += len(keys) - len(ready) - len(missing)
            self.counters.misses += len(missing)
            self._guess(layer + 1, guesses)
            for key in ready:
                yield key.expert, self._record(key)
            while waiting:
                key = self._next_arrival(waiting)
                yield key.expert, self._record(key)
        finally:
            self._release(pinned)

    def _open_pins(self) -> list[ExpertKey]:
        """Release what a caller that gave up half-way still holds, and start a new list of pins."""
        self._release(self._pinned)
        self._pinned = []
        return self._pinned

    def _release(self, pinned: list[ExpertKey]) -> None:
        while pinned:
            key = pinned.pop()
            if self.cache.row_of(key) is not None:  # dropped when its read failed
                self.cache.unpin(key)

    def _read(self, key: ExpertKey, is_required: bool) -> ReadJob:
        row = self.cache.admit(key)
        while row is None:
            # every row is pinned or in flight: a guess is being read into the last one
            self._wait_for_any()
            row = self.cache.admit(key)
        self._jobs[key] = job = self._submit(key, row, is_required)
        return job

    def _submit(self, key: ExpertKey, row: int, is_required: bool) -> ReadJob:
        self.counters.read_nbytes += self._layout.record_nbytes
        return self._reader.submit(
            key,
            self._layout.spans(key),
            self._arena.view(row),
            is_required,
            on_done=self._arrivals.put,
        )

    def _next_arrival(self, waiting: dict[ExpertKey, ReadJob]) -> ExpertKey:
        """Take the next of `waiting` that has landed; raise its error if it failed."""
        while True:
            for key, job in waiting.items():
                if self._jobs.get(key) is not job:  # settled
                    del waiting[key]
                    if job.error is not None:
                        raise job.error
                    return key
            self._settle_one(self._get_arrival())

    # ---- guesses ----------------------------------------------------------------------------------------------

    def _guess(self, layer: int, guesses: Sequence[int]) -> None:
        """Queue reads of the first few guesses that are in no tier; they run in the gap."""
        left = self._prefetch_experts if layer < self._layout.num_layers else 0
        for expert in guesses:
            if not left:
                return
            key = ExpertKey(layer, expert)
            if self.cache.row_of(key) is not None:
                continue
            row = self.cache.admit(key)
            if row is None:
                return  # never wait for a guess
            self._jobs[key] = self._submit(key, row, is_required=False)
            self._guesses.add(key)
            self.counters.guesses_issued += 1
            left -= 1

    def _judge_guesses(self, keys: Sequence[ExpertKey]) -> None:
        """Count the guesses that were right; take back or demote the others."""
        right = self._guesses.intersection(keys)
        self.counters.guesses_used += len(right)
        for key in sorted(self._guesses - right):
            job = self._jobs.get(key)
            if job is not None and self._reader.cancel(job):
                self.counters.guesses_cancelled += 1
                self.counters.read_nbytes -= self._layout.record_nbytes
                del self._jobs[key]
                self.cache.drop(key)
            elif self.cache.row_of(key) is not None:
                self.counters.guesses_wasted += 1
                self.counters.wasted_nbytes += self._layout.record_nbytes
                self.cache.demote(key)
        self._guesses.clear()

    # ---- prefill ----------------------------------------------------------------------------------------------

    def sweep(self, layer: int, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        self._settle()
        self._judge_guesses(())
        pinned = self._open_pins()
        for abandoned in self._staged:  # its row must not be handed out while it is written
            self._wait_for(abandoned)
        self._staged = []
        free = deque(self._staging)
        ahead: deque[_Ahead] = deque()
        upcoming = deque(ExpertKey(layer, expert) for expert in ids)
        try:
            while upcoming or ahead:
                while upcoming and len(ahead) < len(self._staging):
                    ahead.append(self._look_ahead(upcoming.popleft(), free, pinned))
                key, staging, job = ahead.popleft()
                if job is not None:
                    self._wait_for(job)
                    if job.error is not None:
                        raise job.error
                if staging is None:
                    yield key.expert, self._record(key)
                    pinned.remove(key)
                    self.cache.unpin(key)
                else:
                    yield key.expert, self._arena.records[staging]
                    free.append(staging)
        finally:
            self._release(pinned)

    def _look_ahead(self, key: ExpertKey, free: deque[int], pinned: list[ExpertKey]) -> _Ahead:
        if self.cache.row_of(key) is not None:
            self.counters.sweep_hits += 1
            coming = self._jobs.get(key)
            if coming is not None:
                self._reader.promote(coming)
        else:
            self.counters.sweep_misses += 1
            if not self.cache.has_free_row:
                row = free.popleft()
                job = self._submit(key, row, is_required=True)
                self._staged.append(job)
                return _Ahead(key, row, job)
            coming = self._read(key, is_required=True)  # nobody is evicted: the cache starts warm
        self.cache.pin(key)
        pinned.append(key)
        return _Ahead(key, None, coming)

    # ---- arrivals ---------------------------------------------------------------------------------------------

    def _record(self, key: ExpertKey) -> Tensor:
        row = self.cache.row_of(key)
        assert row is not None, f"{key} was yielded without a row"
        assert not self.cache.is_in_flight(key), f"{key} was yielded before it landed"
        return self._arena.records[row]

    def _get_arrival(self) -> ReadJob:
        started = time.perf_counter_ns()
        job = self._arrivals.get()
        self.counters.wait_ns += time.perf_counter_ns() - started
        return job

    def _settle_one(self, job: ReadJob) -> None:
        """Enter one finished read into the book."""
        key = job.key
        assert isinstance(key, ExpertKey)
        if self._jobs.get(key) is not job:
            return  # a staging row: not in the cache's book
        del self._jobs[key]
        if job.error is None:
            self.cache.landed(key)
        else:
            self._guesses.discard(key)
            self.cache.drop(key)

    def _settle(self) -> None:
        while not self._arrivals.empty():
            self._settle_one(self._arrivals.get())

    def _wait_for_any(self) -> None:
        assert self._jobs, "every cache row is pinned: cache_rows is below the route's length"
        self._settle_one(self._get_arrival())

    def _wait_for(self, job: ReadJob) -> None:
        while not job.is_done or self._jobs.get(job.key) is job:  # type: ignore[call-overload]
            self._settle_one(self._get_arrival())

    def close(self) -> None:
        self._reader.close()
        self._arena.close()


class ResidentExperts:
    """All experts in memory: what every streamed run is compared with."""

    def __init__(self, layout: ExpertLayout, reader: DirectReader) -> None:
        """Read everything; the reader is closed afterwards."""
        self.counters = ExpertCounters()
        self._num_experts = layout.num_experts
        self._arena = HostArena(layout.num_layers * layout.num_experts, layout.record_nbytes)
        done: SimpleQueue[ReadJob] = SimpleQueue()
        keys = [
            ExpertKey(layer, e)
            for layer in range(layout.num_layers)
            for e in range(layout.num_experts)
        ]
        for row, key in enumerate(keys):
            reader.submit(key, layout.spans(key), self._arena.view(row), on_done=done.put)
        errors = [job.error for job in (done.get() for _ in keys) if job.error is not None]
        reader.close()
        if errors:
            raise errors[0]

    @property
    def arena_nbytes(self) -> int:
        return self._arena.nbytes

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Sequence[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        del guesses  # there is nothing to read ahead
        self.counters.hits += len(ids)
        return self.sweep(layer, ids)

    def sweep(self, layer: int, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        for expert in ids:
            yield expert, self._arena.records[layer * self._num_experts + expert]

    def pin(self) -> None:
        self._arena.pin()

    def close(self) -> None:
        self._arena.close()
