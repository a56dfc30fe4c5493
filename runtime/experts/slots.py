"""The VRAM tier: expert slots in the GPU's memory before another source. One thread; `copies` moves the bytes.

The slots are in three parts. The first `kept_slots` are an LRU tier over the first `kept_layers` layers, as many as it
holds two tokens' routes of: an LRU smaller than its cycle finds nothing, so the other layers do without. The rest is
for copies on their way through: guesses of the next layer copied early, and the experts of a prompt in two batches.

When the host knows a layer's route, everything launched for the layers before has run, so a slot that those read
may be written again: that wait is the event of the last reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from runtime.experts.cache import ExpertCache
from runtime.experts.copies import Copier
from runtime.experts.routes import RouteListener
from runtime.experts.streamer import ExpertSource, Wave, as_list, one_by_one

BATCH_EXPERTS = 8  # of a prompt, copied and computed together, at most
BATCH_NBYTES = 64 * 2**20  # two batches of them are in VRAM at once
KEY_STRIDE = 1 << 20  # more than a layer has experts
ROUTES_KEPT = 2  # tokens' routes that the LRU tier holds of each layer it serves


def batch_slots(record_nbytes: int) -> int:
    """Return how many experts of a prompt are copied and computed together: fewer of large ones, at least two."""
    return max(2, min(BATCH_EXPERTS, BATCH_NBYTES // record_nbytes))


def passing_slots(early_copies: int, record_nbytes: int = 1, copied_route: int = 0) -> int:
    """Return how many slots copies on their way need: two layers' guesses, or two batches of a prompt.

    copied_route: top-k where a layer's experts are copied before they are read, else 0.
    """
    route = copied_route + early_copies if copied_route else 0
    return max(2 * early_copies, 2 * batch_slots(record_nbytes), route)


@runtime_checkable
class BatchedSource(ExpertSource, Protocol):
    """A source that brings the experts of a prompt to VRAM."""

    def batches(self, layer: int, ids: Sequence[int]) -> Iterator[Wave]: ...


class SlotExperts:
    """Experts from VRAM slots, from pinned RAM in place, or from the drive."""

    def __init__(
        self,
        source: ExpertSource,
        copier: Copier,
        num_layers: int,
        top_k: int,
        early_copies: int = 0,
        reads_in_place: bool = True,
    ) -> None:
        """copier.slots: at least `passing_slots(...)` for what follows; what is beyond is the LRU tier.

        early_copies: guesses for the next layer copied ahead when they are in RAM.
        reads_in_place: experts in RAM are yielded where they are; else each is copied to a slot first.
        """
        self.source, self.counters = source, source.counters
        self._copier, self._early_copies = copier, early_copies
        self._num_layers = num_layers
        self._nbytes = source.record_nbytes
        self._batch_slots = batch_slots(self._nbytes)
        self._reads_in_place = reads_in_place
        route = 0 if reads_in_place else top_k
        self._num_passing = passing_slots(early_copies, self._nbytes, route)
        self.kept_slots = len(copier.slots) - self._num_passing
        if self.kept_slots < 0:
            raise ValueError(f"{len(copier.slots)} slots, at least {self._num_passing} are needed")
        self.kept_layers = min(num_layers, self.kept_slots // (ROUTES_KEPT * top_k))
        self._slots = list(copier.slots.unbind(0))
        self.listener: RouteListener | None = None
        self._make_books()

    def _make_books(self) -> None:
        self._pinned: list[tuple[ExpertCache[int], int]] = []
        self._early: set[int] = set()  # keys copied ahead, not yet judged
        self._early_mark: Any = None
        # a book's row is a slot less its first; a key is layer * KEY_STRIDE + expert
        self._passing: ExpertCache[int] = ExpertCache(self._num_passing)
        self._kept: ExpertCache[int] | None = None
        if self.kept_layers:
            self._kept = ExpertCache(self.kept_slots)

    def _book(self, layer: int) -> tuple[ExpertCache[int], int]:
        """Return the book of a layer's slots and the number of its first slot."""
        if self._kept is not None and layer < self.kept_layers:
            return self._kept, self._num_passing
        return self._passing, 0

    # ---- decode -----------------------------------------------------------------------------------------------

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        """Yield a layer's experts in lists, as `ExpertSource.waves`; each is launched before the next is asked for.

        What is launched after a list was yielded runs when its records are there.
        """
        # what stands before the first wave keeps the GPU waiting
        if self.listener is not None:
            self.listener.decoded(layer, ids, guesses := as_list(guesses))
        book, first = self._book(layer)
        if self._pinned:
            self._release()
        early, self._early = self._early, set()
        for key in early:
            self._book(key // KEY_STRIDE)[0].landed(key)
        here: Wave = []
        elsewhere = ids
        if len(book):
            elsewhere = []
            for expert in ids:
                key = layer * KEY_STRIDE + expert
                row = book.take(key)
                if row is None:
                    elsewhere.append(expert)
                    continue
                self._pinned.append((book, key))
                here.append((expert, self._slots[first + row]))
                if key in early:
                    early.remove(key)
                    self.counters.early_used += 1
        arrivals = self.source.waves(layer, elsewhere, self._absent(layer + 1, guesses))
        in_ram = next(arrivals)
        kept: list[tuple[Wave, Any]] = []
        if in_ram and (book is self._kept or not self._reads_in_place):
            kept, in_ram = self._keep(book, first, layer, in_ram)
        # also when no guess was right: behind this layer all early copies are done
        if self._early_mark is not None:
            self._copier.wait(self._early_mark)
            self._early_mark = None
        if here or in_ram:
            yield here + in_ram
        self.counters.vram_hits += len(here)
        self.counters.copied_nbytes += len(in_ram) * self._nbytes
        for key in early:  # the wrong ones
            self._book(key // KEY_STRIDE)[0].demote(key)
        yield from self._when_copied(kept)
        for wave in filter(None, arrivals):
            others = wave
            if not self._reads_in_place:
                kept, others = self._keep(book, first, layer, wave)
                yield from self._when_copied(kept)
            if others:
                self.counters.copied_nbytes += len(others) * self._nbytes
                yield others
        if self._early_copies and layer + 1 < self._num_layers:
            self._copy_ahead(layer + 1, guesses)

    def _absent(self, layer: int, guesses: Iterable[int]) -> Iterator[int]:
        """Yield the guesses that are in no slot, looked up when they are asked for."""
        book, _ = self._book(layer)
        return (e for e in guesses if book.row_of(layer * KEY_STRIDE + e) is None)

    def _keep(
        self, book: ExpertCache[int], first: int, layer: int, records: Wave
    ) -> tuple[list[tuple[Wave, Any]], Wave]:
        """Copy records into slots; return what to launch behind which mark, and the records that found no slot."""
        kept: Wave = []
        others: Wave = []
        launches: list[tuple[Wave, Any]] = []
        for expert, record in records:
            key = layer * KEY_STRIDE + expert
            row = book.admit(key)
            if row is None:
                others.append((expert, record))
                continue
            book.landed(key)
            book.pin(key)
            self._pinned.append((book, key))
            self._copier.copy(first + row, record)
            kept.append((expert, self._slots[first + row]))
            if not self._reads_in_place:  # large records: one is computed while the next is copied
                launches.append((kept, self._copier.mark()))
                kept = []
        self.counters.copied_nbytes += (len(records) - len(others)) * self._nbytes
        if kept:
            launches.append((kept, self._copier.mark()))
        return launches, others

    def _when_copied(self, launches: Iterable[tuple[Wave, Any]]) -> Iterator[Wave]:
        for wave, mark in launches:
            self._copier.wait(mark)
            yield wave

    def _copy_ahead(self, layer: int, guesses: Iterable[int]) -> None:
        """Copy the first few guesses that are in RAM and in no slot, behind what the layer before launched."""
        book, first = self._book(layer)
        absent = list(islice(self._absent(layer, guesses), self._early_copies))
        found = self.source.ahead(layer, absent)
        if not found:
            return
        self._copier.follow(self._copier.launched())  # required before speculative
        for expert, record in found:
            key = layer * KEY_STRIDE + expert
            row = book.admit(key)
            if row is None:
                break
            self._early.add(key)
            self._copier.copy(first + row, record)
            self.counters.early_issued += 1
            self.counters.copied_nbytes += self._nbytes
        self._early_mark = self._copier.mark()

    def _release(self) -> None:
        for book, key in self._pinned:
            book.unpin(key)
        self._pinned = []

    # ---- prefill ----------------------------------------------------------------------------------------------

    @property
    def batch_experts(self) -> int:
        """Experts that `batches` yields at once."""
        return min(self._batch_slots, self.source.max_hold)

    def batches(self, layer: int, ids: Sequence[int]) -> Iterator[Wave]:
        """Yield each of `ids` once, in the order given, as lists of experts in slots.

        A list is launched before the next is asked for; what is launched then runs when its copies are done.
        """
        if self.listener is not None:
            self.listener.swept(layer, ids)
        if self._early_mark is not None:
            self._copier.synchronize(self._early_mark)
        # the passing slots are the prompt's now
        self._release()
        self._early, self._early_mark = set(), None
        self._passing = ExpertCache(self._num_passing)
        if self._kept is not None:
            for key in filter(self._kept.is_in_flight, self._kept.keys()):
                self._kept.landed(key)
        self._copier.follow(self._copier.launched())
        size = self.batch_experts
        records = self.source.sweep(layer, ids, hold=size)
        read: list[Any] = [None, None]  # marks behind the launches that read each half of the slots
        for number, start in enumerate(range(0, len(ids), size)):
            half = number % 2
            if read[half] is not None:
                self._copier.follow(read[half])
            wave = []
            for place, expert in enumerate(ids[start : start + size]):
                found, record = next(records)
                assert found == expert
                slot = half * self._batch_slots + place
                self._copier.copy(slot, record)
                wave.append((expert, self._slots[slot]))
            self.counters.copied_nbytes += len(wave) * self._nbytes
            mark = self._copier.mark()
            self._copier.wait(mark)
            yield wave
            read[half] = self._copier.launched()
            self._copier.synchronize(mark)  # the source may take its records back
        assert next(records, None) is None

    # ---- the rest of an ExpertSource ----------------------------------------------------------------------------

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        yield from one_by_one(self.waves(layer, ids, guesses))

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        return self.source.ahead(layer, ids)

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield records in RAM, as they are for a CPU."""
        if self.listener is not None:
            self.listener.swept(layer, ids)
        return self.source.sweep(layer, ids, hold)

    @property
    def max_hold(self) -> int:
        return self.source.max_hold

    @property
    def max_route(self) -> int:
        return self.source.max_route

    @property
    def record_nbytes(self) -> int:
        return self.source.record_nbytes

    def pin(self) -> None:
        self.source.pin()

    def forget(self) -> None:
        """Drop what is kept in VRAM and in the source. Nothing may be in flight on the GPU."""
        if self.listener is not None:
            self.listener.forgot()
        self._make_books()
        self.source.forget()

    def close(self) -> None:
        self.source.close()
