"""The one door to expert weights: `fetch` or `waves` for a decoded token, `sweep` for a prompt.

Brings cache, reader and arena together for one engine thread. Yields (expert id, record) pairs. A record of a decoded
token is valid until the next token or layer is asked for, one of a prompt until `hold` more have been asked for. Where
a record came from never shows in its bytes.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import filterfalse
from queue import SimpleQueue
from typing import NamedTuple

from torch import Tensor

from runtime.errors import UserError
from runtime.experts.arena import PIN_HINT, HostArena, shared_arena
from runtime.experts.cache import ExpertCache
from runtime.experts.checks import Checksums, next_arrival
from runtime.experts.child_reader import ChildReader
from runtime.experts.layout import ExpertKey, ExpertLayout
from runtime.experts.routes import RouteListener
from runtime.experts.schedule import Orphans, ReadJob
from runtime.experts.source import Arena, Arrivals, InRows, Reader, Wave, as_list, one_by_one
from runtime.stats import ExpertCounters
from runtime.units import format_nbytes

log = logging.getLogger(__name__)

TIMED = SimpleQueue, ChildReader  # arrivals that say when nothing comes


class _Ahead(NamedTuple):
    """An expert that a sweep will yield soon."""

    key: ExpertKey
    staging: int | None  # its staging row; None: it is in the cache
    job: ReadJob | None  # its read; None: it is there already


class ExpertStreamer(InRows):
    """Experts from the drive through the RAM cache."""

    def __init__(
        self,
        layout: ExpertLayout,
        reader: Reader,
        cache_rows: int,
        sweep_rows: int,
        prefetch_experts: int,
        ahead_rows: int = 0,
        checksums: Checksums | None = None,
        spare_rows: int = 0,
        *,
        least_rows: int = 1,
        limit_s: float | None = None,
        token_experts: int | None = None,
        make_cache: Callable[[int], ExpertCache[ExpertKey]] = ExpertCache,
        make_arena: Callable[[int, int], Arena] | None = None,
        arrivals: Arrivals | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """cache_rows: at least the model's top-k.  sweep_rows: staging rows, read ahead of a prompt's computing.

        ahead_rows: how many rows `ahead` may keep from eviction; the route must find room beside them.  checksums: to
        compare each expert with on its first read; None: not.  spare_rows: for records that a stalled drive may still
        write to the old memory of.  least_rows: what a token needs at once; `pin` may shrink the cache to it.
        token_experts: of a layer's route, those of one token: what several ask for at once brings as many times the
        guesses, for it is computed for as many times as long; None: it does not.
        limit_s: a decoded token raises DeviceError when the drive gives nothing for that long; None: it waits.
        The rest is for the simulator, which brings another cache, no memory, and a clock of its own. A `ChildReader` is
        asked for the arrivals too, and shares the rows.
        """
        self._layout = layout
        self._reader = reader
        num_rows = cache_rows + sweep_rows
        if isinstance(reader, ChildReader):
            make_arena = make_arena or partial(shared_arena, reader)
            arrivals = arrivals or reader
        self._arena = (make_arena or HostArena)(num_rows + spare_rows, layout.record_nbytes)
        self._staging = range(cache_rows, num_rows)
        self._spares = list(range(num_rows, num_rows + spare_rows))
        self._given_up: list[tuple[Orphans, int]] = []  # spares that may still be written to
        self._prefetch_experts, self._token_experts = prefetch_experts, token_experts
        self._ahead_rows = ahead_rows
        self._checksums = checksums
        self._least_rows = least_rows
        self._make_cache, self._clock_ns = make_cache, clock_ns
        self._limit_s = limit_s
        self.cache = make_cache(cache_rows)
        self._keys = [
            [ExpertKey(i, e) for e in range(layout.num_experts)] for i in range(layout.num_layers)
        ]
        self.counters = ExpertCounters()
        self._jobs: dict[
            ExpertKey, ReadJob
        ] = {}  # admitted to the cache, not yet known to have landed
        self._guesses: set[ExpertKey] = set()  # admitted as guesses, not yet judged
        self._warming: OrderedDict[ExpertKey, ReadJob] = OrderedDict()  # first to be read first
        self._arrivals: Arrivals = SimpleQueue() if arrivals is None else arrivals
        self._pinned: list[ExpertKey] = []  # by the call in progress
        self._ahead: list[ExpertKey] = []  # by `ahead` since that call
        self._ahead_before: list[ExpertKey] = []  # by `ahead` before it
        self._staged: dict[
            ReadJob, int
        ] = {}  # reads by the sweep in progress, and their staging rows
        self.listener: RouteListener | None = None

    @property
    def max_hold(self) -> int:
        return len(self._staging)

    @property
    def max_route(self) -> int:
        return self.cache.num_rows - self._ahead_rows

    def pin(self) -> None:
        """Make the records readable by the GPU: where not all may be pinned, the cache shrinks to what may be.

        Once, before the first fetch. Raises UserError when not even one layer's route has room.
        """
        pinned, wanted, spares = self._arena.pin_rows(), self.cache.num_rows, len(self._spares)
        rows = pinned - spares
        staging = min(len(self._staging), rows - self._least_rows)
        if rows == wanted + len(self._staging):
            return
        granted = format_nbytes(pinned * self._arena.row_nbytes)
        if staging < 1:
            least = self._least_rows + 1 + spares
            raise UserError(
                f"CUDA pins only {granted} of RAM, {least} experts need "
                f"{format_nbytes(least * self._arena.row_nbytes)}",
                PIN_HINT,
            )
        self.cache = self._make_cache(rows - staging)
        self._staging = range(rows - staging, rows)
        self._spares = list(range(rows, pinned))
        log.warning(
            "CUDA pins only %s of the %s that were planned: the expert cache holds %d experts instead of %d, so more "
            "is read from the drive; %s",
            granted, format_nbytes(self._arena.nbytes), self.cache.num_rows, wanted, PIN_HINT,
        )  # fmt: skip

    def forget(self) -> None:
        if self.listener is not None:
            self.listener.forgot()
        self._release_all()
        self._judge_guesses(())
        while self._warming:
            self._stop_warming(next(reversed(self._warming)))
        while self._jobs:
            self._wait_for_any()
        self.cache = self._make_cache(self.cache.num_rows)

    # ---- decode -----------------------------------------------------------------------------------------------

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        yield from one_by_one(self.waves(layer, ids, guesses))

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        # what stands before the first wave keeps the GPU waiting
        if self.listener is not None:
            self.listener.decoded(layer, ids, guesses := as_list(guesses))
        all_keys = self._keys[layer]
        keys = [all_keys[expert] for expert in ids]
        self._settle()
        if self._guesses:
            self._judge_guesses(keys)
        pinned = self._open_pins()
        waiting: dict[ExpertKey, ReadJob] = {}
        ready: Wave = []
        missing: list[ExpertKey] = []
        take, jobs, records = self.cache.take, self._jobs, self._arena.records
        # the whole route is pinned before anything is admitted: a miss must not evict a hit of its own layer
        for key in keys:
            row = take(key)
            if row is None:
                missing.append(key)
                continue
            pinned.append(key)
            if key in jobs:
                self._require(key)
                waiting[key] = jobs[key]
            else:
                ready.append((key.expert, records[row]))
        for key in missing:
            waiting[key] = self._read(key, is_required=True)
            self.cache.pin(key)
            pinned.append(key)
        self.counters.hits += len(ready)
        self.counters.late += len(keys) - len(ready) - len(missing)
        self.counters.misses += len(missing)
        yield ready
        self._guess(layer + 1, guesses, len(keys))
        yield []
        while waiting:
            yield [(key.expert, self._record(key)) for key in self._next_arrivals(waiting)]

    def used(self, layer: int, ids: Sequence[int]) -> None:
        for expert in ids:
            key = ExpertKey(layer, expert)
            if key in self._guesses:
                self._guesses.remove(key)
                self.counters.guesses_used += 1
            if self.cache.row_of(key) is not None:
                self.cache.touch(key)

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        found: Wave = []
        room = self._ahead_rows - len(self._ahead) - len(self._ahead_before)
        for expert in ids:
            if len(found) >= room:
                break
            key = ExpertKey(layer, expert)
            if self.cache.row_of(key) is None or key in self._jobs:
                continue
            self.cache.pin(key)
            self._ahead.append(key)
            found.append((expert, self._record(key)))
        return found

    def _open_pins(self) -> list[ExpertKey]:
        """Release what the call before holds, and start a new list of pins."""
        self._release(self._pinned)
        self._release(self._ahead_before)
        self._ahead_before, self._ahead = self._ahead, []
        self._pinned = []
        return self._pinned

    def _release_all(self) -> None:
        for pinned in (self._pinned, self._ahead_before, self._ahead):
            self._release(pinned)

    def _release(self, pinned: list[ExpertKey]) -> None:
        while pinned:
            self.cache.unpin(pinned.pop())

    def _read(self, key: ExpertKey, is_required: bool) -> ReadJob:
        row = self._admit(key)
        while row is None:
            # every row is pinned or in flight: a guess is being read into the last one
            self._wait_for_any(self._limit_s)
            row = self._admit(key)
        self._jobs[key] = job = self._submit(key, row, is_required)
        return job

    def _admit(self, key: ExpertKey) -> int | None:
        """Give an absent expert a row: one that waits for a warm start's read is as good as free."""
        while self._warming and not self.cache.has_free_row:
            self._stop_warming(next(reversed(self._warming)))
        return self.cache.admit(key)

    def _submit(self, key: ExpertKey, row: int, is_required: bool) -> ReadJob:
        self.counters.read_nbytes += self._layout.record_nbytes
        return self._reader.submit(
            key,
            self._layout.spans(key),
            self._arena.view(row),
            is_required,
            on_done=self._arrivals.put,
        )

    def _next_arrivals(self, waiting: dict[ExpertKey, ReadJob]) -> list[ExpertKey]:
        """Take those of `waiting` that have landed, at least one; raise the error of one that failed."""
        while True:
            self._settle()
            landed = [key for key, job in waiting.items() if self._jobs.get(key) is not job]
            for key in landed:
                error = waiting.pop(key).error
                if error is not None:
                    raise error
            if landed:
                return landed
            self._settle_one(self._get_arrival(self._limit_s))

    # ---- guesses ----------------------------------------------------------------------------------------------

    def _guess(self, layer: int, guesses: Iterable[int], route: int) -> None:
        """Queue reads of the first few guesses that are in no tier; they run in the gap.

        route: experts that the layer before was asked for.
        """
        left = self._prefetch_experts if layer < self._layout.num_layers else 0
        if self._token_experts is not None:
            left *= max(1, math.ceil(route / self._token_experts))
        for expert in guesses:
            if not left:
                return
            key = ExpertKey(layer, expert)
            if self.cache.row_of(key) is not None and not self._stop_warming(key):
                continue
            row = self._admit(key)
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

    # ---- warm start -------------------------------------------------------------------------------------------

    def warm_keys(self) -> list[ExpertKey]:
        """Return what is in RAM, the coldest first."""
        return list(filterfalse(self.cache.is_in_flight, self.cache.keys()))

    def warm_up(self, keys: Sequence[ExpertKey], max_rows: int) -> int:
        """Read experts, the last of `keys` first, while there is nothing else to read; return how many.

        They take rows that are free, at most `max_rows`, and give them back to whoever needs one before they are read.
        """
        self._settle()
        absent = [key for key in keys if self.cache.row_of(key) is None]
        room = min(max_rows, self.cache.num_rows) - len(self.cache)
        chosen = absent[-room:] if room > 0 else []
        rows = [(key, self.cache.admit(key)) for key in chosen]
        for key, row in reversed(rows):
            assert row is not None, "no more are chosen than rows are free"
            self._jobs[key] = self._warming[key] = self._reader.submit(
                key,
                self._layout.spans(key),
                self._arena.view(row),
                is_required=False,
                on_done=self._warmed,
                is_idle=True,
            )
        return len(chosen)

    def _warmed(self, job: ReadJob) -> None:
        """Where a reader's thread or process has time: thousands are checked before the decoding thread looks."""
        if self._checksums is not None and job.orphans is None:
            self._checksums.check(job)
        self._arrivals.put(job)

    def _require(self, key: ExpertKey) -> None:
        """Make an expert's read, which is on its way, one that is waited for."""
        self._reader.promote(self._jobs[key])
        if self._warming.pop(key, None) is not None:
            self.counters.read_nbytes += self._layout.record_nbytes

    def _stop_warming(self, key: ExpertKey) -> bool:
        """Take a warm start's read back, unless it has begun; whether its row is free now."""
        job = self._warming.pop(key, None)
        if job is None or not self._reader.cancel(job):
            return False
        del self._jobs[key]
        self.cache.drop(key)
        return True

    # ---- prefill ----------------------------------------------------------------------------------------------

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        if not 1 <= hold <= self.max_hold:
            raise ValueError(f"hold must be 1 to {self.max_hold}, got {hold}")
        if self.listener is not None:
            self.listener.swept(layer, ids)
        self._settle()
        self._judge_guesses(())
        pinned = self._open_pins()
        for abandoned in self._staged:  # its row must not be handed out while it is written
            self._wait_for(abandoned)
        self._staged = {}
        free = deque(self._staging)
        ahead: deque[_Ahead] = deque()
        held: deque[_Ahead] = deque()  # yielded, still valid
        upcoming = deque(ExpertKey(layer, expert) for expert in ids)
        try:
            while upcoming or ahead:
                while upcoming and len(ahead) + len(held) < len(self._staging):
                    ahead.append(self._look_ahead(upcoming.popleft(), free, pinned))
                current = ahead.popleft()
                if current.job is not None:
                    self._wait_for(current.job)
                    if self._checksums is not None:
                        self._checksums.check(current.job)
                    if current.job.error is not None:
                        raise current.job.error
                yield current.key.expert, self._record_of(current)
                held.append(current)
                if len(held) >= hold:
                    old = held.popleft()
                    if old.staging is None:
                        pinned.remove(old.key)
                        self.cache.unpin(old.key)
                    else:
                        free.append(old.staging)
        finally:
            self._release(pinned)

    def _record_of(self, item: _Ahead) -> Tensor:
        return self._record(item.key) if item.staging is None else self._arena.records[item.staging]

    def _look_ahead(self, key: ExpertKey, free: deque[int], pinned: list[ExpertKey]) -> _Ahead:
        if self.cache.row_of(key) is not None:
            is_there = key not in self._warming
            self.counters.sweep_hits += is_there
            self.counters.sweep_misses += not is_there
            coming = self._jobs.get(key)
            if coming is not None:
                self._require(key)
        else:
            self.counters.sweep_misses += 1
            if not self.cache.has_free_row:
                row = free.popleft()
                job = self._submit(key, row, is_required=True)
                self._staged[job] = row
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

    def _get_arrival(self, limit_s: float | None = None) -> ReadJob:
        started, arrivals = self._clock_ns(), self._arrivals
        try:
            if isinstance(arrivals, TIMED):
                return next_arrival(arrivals, limit_s)
            return arrivals.get()
        finally:
            self.counters.wait_ns += self._clock_ns() - started

    def _settle_one(self, job: ReadJob) -> None:
        """Enter one finished read into the book."""
        key = job.key
        assert isinstance(key, ExpertKey)
        if job.orphans is not None:
            self._restart(job, job.orphans)
            return
        if self._jobs.get(key) is not job:
            return  # a staging row: not in the cache's book
        if self._checksums is not None:
            self._checksums.check(job)
        del self._jobs[key]
        if self._warming.pop(key, None) is not None:
            self.counters.warmed += 1
        if job.error is None:
            self.cache.landed(key)
        else:
            self._guesses.discard(key)
            for pinned in (self._pinned, self._ahead_before, self._ahead):
                if key in pinned:
                    pinned.remove(key)
            self.cache.drop(key)

    def _restart(self, job: ReadJob, orphans: Orphans) -> None:
        """Go on with a read that a stalled drive keeps some of: elsewhere, since its row may still be written to."""
        assert isinstance(job.key, ExpertKey)
        row = self._staged.get(job)
        if row is None:
            row = self.cache.row_of(job.key)
        over = [spare for given_up, spare in self._given_up if not given_up.count]
        self._given_up = [pair for pair in self._given_up if pair[0].count]
        self._spares += over
        assert row is not None, f"{job.key} is read without a row"
        assert self._spares, "more records are on their way from a drive than it has rows to spare"
        assert orphans.restart is not None
        spare = self._spares.pop()
        self._arena.swap(row, spare)
        self._given_up.append((orphans, spare))
        orphans.restart(self._arena.view(row))

    def _settle(self) -> None:
        while not self._arrivals.empty():
            self._settle_one(self._arrivals.get())

    def _wait_for_any(self, limit_s: float | None = None) -> None:
        assert self._jobs, "every cache row is pinned: cache_rows is below the route's length"
        self._settle_one(self._get_arrival(limit_s))

    def _wait_for(self, job: ReadJob) -> None:
        while not job.is_done or self._jobs.get(job.key) is job:  # type: ignore[call-overload]
            self._settle_one(self._get_arrival())

    def close(self) -> None:
        self._reader.close()
        self._arena.close()
