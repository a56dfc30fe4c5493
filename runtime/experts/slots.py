"""The VRAM tier: expert slots in the GPU's memory before another source. One thread; `copies` moves the bytes.

Some slots are for copies on their way through: guesses of the next layer copied early, and the experts of a prompt in
two batches. The rest keeps the experts that are used most often (`frequency`). One that has been copied and used moves
from here to there by a change of names: it stays in its slot, and the slot of the expert that goes takes copies now.

When the host knows a layer's route, everything launched for the layers before has run, so a slot that those read
may be written again: that wait is the event of the last reader. A prompt may go on in between, if it is another
conversation's: copies follow its launches on the GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from runtime.experts.cache import ExpertCache
from runtime.experts.copies import Copier
from runtime.experts.cpu_share import CpuShare, Workers
from runtime.experts.frequency import KeptExperts
from runtime.experts.in_front import InFront
from runtime.experts.layout import ExpertKey
from runtime.experts.paced import PacedCopier
from runtime.experts.routes import RouteListener
from runtime.experts.source import ExpertSource, Wave, as_list

BATCH_EXPERTS = 8  # of a prompt, copied and computed together, at most
BATCH_NBYTES = 64 * 2**20  # two batches of them are in VRAM at once
AT_ONCE = 1  # early copies beside what a layer reads in place, where one graph is a token: they keep the link busy
KEY_STRIDE = 1 << 20  # more than a layer has experts


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
    """A source that brings experts to VRAM: those of a prompt, and those that several tokens ask for at once."""

    def waves(
        self,
        layer: int,
        ids: Sequence[int],
        guesses: Iterable[int] = (),
        several: Collection[int] = (),
    ) -> Iterator[Wave]:
        """As `ExpertSource.waves`.  several: those of `ids` that are read more than once, each from a slot."""

    def batches(self, layer: int, ids: Sequence[int]) -> Iterator[Wave]: ...


class SlotExperts(InFront):
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
        """copier.slots: at least `passing_slots(...)` for what follows; what is beyond keeps experts.

        early_copies: guesses for the next layer copied ahead when they are in RAM. With a `PacedCopier` one of them
        does not wait for what this layer reads in place: 27.4 ms a token in place of 28.9; between launched segments
        nothing is gained.
        reads_in_place: experts in RAM are yielded where they are; else each is copied to a slot first.
        """
        self.source = source
        self.copier, self.early_copies = copier, early_copies
        self._at_once = AT_ONCE if isinstance(copier, PacedCopier) else 0
        self._num_layers = num_layers
        self._nbytes = source.record_nbytes
        self._batch_slots = batch_slots(self._nbytes)
        self._reads_in_place = reads_in_place
        route = 0 if reads_in_place else top_k
        self._num_passing = passing_slots(early_copies, self._nbytes, route)
        self.kept_slots = len(copier.slots) - self._num_passing
        if self.kept_slots < 0:
            raise ValueError(f"{len(copier.slots)} slots, at least {self._num_passing} are needed")
        self._slots = list(copier.slots.unbind(0))
        self.listener: RouteListener | None = None
        self.workers: Workers | None = None  # who may compute experts in RAM beside the GPU
        self.share: CpuShare | None = None  # of those experts, the CPU's
        self._make_books()

    def _make_books(self) -> None:
        # a key is layer * KEY_STRIDE + expert
        self._early: set[int] = set()  # keys copied ahead, not yet judged
        self._early_mark: Any = None
        self._kept = KeptExperts(range(self._num_passing, len(self._slots)), self._num_layers)
        self._slot_of_row = list(range(self._num_passing))  # of the passing book
        self._make_passing()

    def _make_passing(self) -> None:
        self._passing: ExpertCache[int] = ExpertCache(self._num_passing)
        self._pinned: list[int] = []

    # ---- decode -----------------------------------------------------------------------------------------------

    def waves(
        self,
        layer: int,
        ids: Sequence[int],
        guesses: Iterable[int] = (),
        several: Collection[int] = (),
    ) -> Iterator[Wave]:
        """Yield a layer's experts in lists, as `ExpertSource.waves`; each is launched before the next is asked for.

        several: those of `ids` that more than one token reads; they cross the link once, into slots. What is launched
        after a list was yielded runs when its records are there. Experts that the CPU computes are in no list: when the
        lists are through, `share` has their rows.
        """
        # what stands before the first wave keeps the GPU waiting
        guesses = as_list(guesses)  # gone through more than once
        if self.listener is not None:
            self.listener.decoded(layer, ids, guesses)
        if self._pinned:
            self._release()
        here, early_here, elsewhere = self._find(layer, ids)
        if early_here:
            self.source.used(layer, early_here)
        arrivals = self.source.waves(layer, elsewhere, self._absent(layer + 1, guesses))
        in_ram = next(arrivals)
        on_cpu: Wave = []
        if self.share is not None:
            first = layer * KEY_STRIDE
            on_cpu, in_ram = self.share.take(
                in_ram, lambda expert: self._kept.is_worth_keeping(first + expert)
            )
        copied: list[tuple[Wave, Any]] = []
        later: Wave = []  # no slot is free for them yet
        if in_ram:
            copied, in_ram = self._copy(layer, in_ram, several)
            in_ram, later = self._split(in_ram, several)
        in_place_nbytes = len(in_ram) * self._nbytes
        over_link: Any = None  # behind all launches of this layer that read over the link
        if early_here and in_ram:  # these can be read while the early copies are on their way
            yield in_ram
            in_ram = []
            over_link = self.copier.launched()
        # also when no guess was right: behind this layer all early copies are done
        if self._early_mark is not None:
            self.copier.wait(self._early_mark)
            self._early_mark = None
        if here or in_ram:
            yield here + in_ram
        num_ahead = self.early_copies if layer + 1 < self._num_layers else 0
        at_once = 0
        if over_link is not None and self._at_once:
            found = self._ahead(layer + 1, guesses, min(num_ahead, self._at_once))
            at_once = self._copy_early(layer + 1, found)
        self.counters.early_used += len(early_here)
        self.counters.vram_hits += len(here)
        self.counters.copied_nbytes += in_place_nbytes
        yield from self._when_copied(copied)
        yield from self._in_turn(layer, later, several)
        if on_cpu:
            arrivals = chain([next(arrivals, [])], arrivals)  # guesses are asked for before
            self._compute(layer, ids, on_cpu)
        for wave in filter(None, arrivals):
            in_place, through_slots = self._split(wave, several)
            if in_place:
                self.counters.copied_nbytes += len(in_place) * self._nbytes
                yield in_place
                over_link = None
            yield from self._in_turn(layer, through_slots, several)
        found = self._ahead(layer + 1, guesses, num_ahead - at_once)
        if found:  # required before speculative
            self.copier.follow(self.copier.launched() if over_link is None else over_link)
            self._copy_early(layer + 1, found)
        if self.kept_slots:
            self._keep([layer * KEY_STRIDE + expert for expert in ids])

    def _find(self, layer: int, ids: Sequence[int]) -> tuple[Wave, list[int], list[int]]:
        """Return a route's experts in slots, those of them that came early, and those in none; judge early copies."""
        passing, kept = self._passing, self._kept
        early, self._early = self._early, set()
        for key in early:
            passing.landed(key)
        here: Wave = []
        early_here: list[int] = []
        elsewhere: list[int] = []
        for expert in ids:
            key = layer * KEY_STRIDE + expert
            slot = kept.slot_of(key)
            if slot is None:
                row = passing.take(key)
                if row is None:
                    elsewhere.append(expert)
                    continue
                self._pinned.append(key)
                slot = self._slot_of_row[row]
                if key in early:
                    early.remove(key)
                    early_here.append(expert)
            here.append((expert, self._slots[slot]))
        for key in early:  # the wrong ones
            passing.demote(key)
        return here, early_here, elsewhere

    def _compute(self, layer: int, ids: Sequence[int], on_cpu: Wave) -> None:
        """Compute on the CPU while the GPU has what was launched."""
        assert self.share is not None
        self.counters.cpu_ns += self.share.run(layer, ids, on_cpu)
        self.counters.cpu_experts += len(on_cpu)

    def _keep(self, route: Sequence[int]) -> None:
        """Count a layer's uses, and keep those of its experts in passing slots that are used often.

        The slot that is freed for one is written after the next route is known, so what was launched now may read it.
        """
        self._kept.count(route)
        pinned = []
        for key in self._pinned:
            row = self._passing.row_of(key)
            assert row is not None, "a pinned expert is in its row"
            freed = self._kept.keep(key, self._slot_of_row[row])
            if freed is None:
                pinned.append(key)
                continue
            self._passing.unpin(key)
            self._passing.remove(key)
            self._slot_of_row[row] = freed
        self._pinned = pinned

    def _absent(self, layer: int, guesses: Iterable[int]) -> Iterator[int]:
        """Yield the guesses that are in no slot, looked up when they are asked for."""
        first = layer * KEY_STRIDE
        return (
            e
            for e in guesses
            if self._kept.slot_of(first + e) is None and self._passing.row_of(first + e) is None
        )

    def _split(self, records: Wave, several: Collection[int]) -> tuple[Wave, Wave]:
        """Return the records that are read where they are, and those that are copied first, slot or no slot free."""
        if not self._reads_in_place:
            return [], records
        if not several:
            return records, []
        return (
            [item for item in records if item[0] not in several],
            [item for item in records if item[0] in several],
        )

    def _in_turn(self, layer: int, records: Wave, several: Collection[int]) -> Iterator[Wave]:
        """Yield records in slots. Where a route is longer than there are slots, those serve again."""
        while records:
            launches, records = self._copy(layer, records, several)
            yield from self._when_copied(launches)
            if records:  # all slots are taken, and what they hold is launched
                self._release()
                self.copier.follow(self.copier.launched())

    def _copy(
        self, layer: int, records: Wave, several: Collection[int]
    ) -> tuple[list[tuple[Wave, Any]], Wave]:
        """Copy what is worth a slot, while one is free; return what to launch behind which mark, and the others."""
        copied: Wave = []
        others: Wave = []
        launches: list[tuple[Wave, Any]] = []
        for expert, record in records:
            key = layer * KEY_STRIDE + expert
            is_copied = (
                not self._reads_in_place or expert in several or self._kept.is_worth_keeping(key)
            )
            row = self._passing.admit(key) if is_copied else None
            if row is None:
                others.append((expert, record))
                continue
            self._passing.landed(key)
            self._passing.pin(key)
            self._pinned.append(key)
            slot = self._slot_of_row[row]
            self.copier.copy(slot, record)
            copied.append((expert, self._slots[slot]))
            if not self._reads_in_place:  # large records: one is computed while the next is copied
                launches.append((copied, self.copier.mark()))
                copied = []
        self.counters.copied_nbytes += (len(records) - len(others)) * self._nbytes
        if copied:
            launches.append((copied, self.copier.mark()))
        return launches, others

    def _when_copied(self, launches: Iterable[tuple[Wave, Any]]) -> Iterator[Wave]:
        for wave, mark in launches:
            self.copier.wait(mark)
            yield wave

    def _ahead(self, layer: int, guesses: Iterable[int], count: int) -> Wave:
        """Return those of the first `count` guesses in no slot that are in RAM."""
        return (
            self.source.ahead(layer, list(islice(self._absent(layer, guesses), count)))
            if count
            else []
        )

    def _copy_early(self, layer: int, found: Wave) -> int:
        """Copy guesses of a layer to slots, as far as there are some; return how many."""
        num_copied = 0
        for expert, record in found:
            key = layer * KEY_STRIDE + expert
            row = self._passing.admit(key)
            if row is None:
                break
            self._early.add(key)
            self.copier.copy(self._slot_of_row[row], record)
            num_copied += 1
        if num_copied:
            self.counters.early_issued += num_copied
            self.counters.copied_nbytes += num_copied * self._nbytes
            self._early_mark = self.copier.mark()
        return num_copied

    def rehearse(self, records: Sequence[Tensor]) -> None:
        """Copy records to slots that nothing is in yet, a route at most: to measure how long that takes."""
        for slot, record in zip(self._slot_of_row, records, strict=False):
            self.copier.copy(slot, record)

    def _release(self) -> None:
        for key in self._pinned:
            self._passing.unpin(key)
        self._pinned = []

    # ---- prefill ----------------------------------------------------------------------------------------------

    @property
    def batch_experts(self) -> int:
        """Experts that `batches` yields at once."""
        return min(self._batch_slots, self.source.max_hold)

    def batches(self, layer: int, ids: Sequence[int]) -> Iterator[Wave]:
        """Yield each of `ids` once, in the order given, as lists of experts in slots; those that VRAM keeps are there.

        A list is launched before the next is asked for; what is launched then runs when its copies are done.
        """
        if self.listener is not None:
            self.listener.swept(layer, ids)
        if self._early_mark is not None:
            self.copier.synchronize(self._early_mark)
        # the passing slots are the prompt's now
        self._early, self._early_mark = set(), None
        self._make_passing()
        self.copier.follow(self.copier.launched())
        size = self.batch_experts
        here = [self._kept.slot_of(layer * KEY_STRIDE + expert) for expert in ids]
        absent = [expert for expert, slot in zip(ids, here, strict=True) if slot is None]
        self.counters.sweep_vram_hits += len(ids) - len(absent)
        records = self.source.sweep(layer, absent, hold=size)
        read: list[Any] = [None, None]  # marks behind the launches that read each half of the slots
        try:
            for number, start in enumerate(range(0, len(ids), size)):
                half = number % 2
                if read[half] is not None:
                    self.copier.follow(read[half])
                wave = []
                rows = iter(self._slot_of_row[half * self._batch_slots :])
                for expert, kept in zip(ids[start : start + size], here[start:], strict=False):
                    slot = kept
                    if slot is None:
                        found, record = next(records)
                        assert found == expert
                        slot = next(rows)
                        self.copier.copy(slot, record)
                        self.counters.copied_nbytes += self._nbytes
                    wave.append((expert, self._slots[slot]))
                mark = self.copier.mark()
                self.copier.wait(mark)
                yield wave
                read[half] = self.copier.launched()
                self.copier.synchronize(mark)  # the source may take its records back
        finally:
            # when the next token's route is known already, of a conversation beside this one, no host waits for what
            # reads these slots before copies for that token take them
            self.copier.follow(self.copier.launched())
        assert next(records, None) is None

    # ---- the rest of an ExpertSource ----------------------------------------------------------------------------

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield records in RAM, as they are for a CPU."""
        if self.listener is not None:
            self.listener.swept(layer, ids)
        return self.source.sweep(layer, ids, hold)

    def kept_keys(self) -> list[ExpertKey]:
        """Return what VRAM keeps, the least used first."""
        return [ExpertKey(*divmod(key, KEY_STRIDE)) for key in self._kept.in_order()]

    def forget(self) -> None:
        """Drop what is kept in VRAM and in the source. Nothing may be in flight on the GPU."""
        if self.listener is not None:
            self.listener.forgot()
        self._make_books()
        self.source.forget()
