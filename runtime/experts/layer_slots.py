"""The VRAM tier of a dense model, whose layers all come by for every token, always in the same order.

Keeping the layers used last would find nothing again, so the first ones that fit stay where they are; the others pass
through a few slots, each copied while the one before it computes. One thread; `copies` moves the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from runtime.experts.copies import Copier
from runtime.experts.in_front import InFront
from runtime.experts.routes import RouteListener
from runtime.experts.source import ExpertSource, Wave


class _Coming(NamedTuple):
    """A layer on its way into a slot."""

    slot: int
    mark: Any


class LayerSlots(InFront):
    """Layers from VRAM, or from another source through it."""

    def __init__(
        self, source: ExpertSource, copier: Copier, num_layers: int, passing_slots: int
    ) -> None:
        """copier.slots: at least `passing_slots`, of which there are two or more; what is beyond keeps layers."""
        self.source = source
        self._copier, self._nbytes = copier, source.record_nbytes
        self._slots = list(copier.slots.unbind(0))
        if passing_slots < 2 or len(self._slots) < passing_slots:
            raise ValueError(f"{len(self._slots)} slots, {passing_slots} to pass through")
        self._passing = range(passing_slots)
        self.kept_layers = min(num_layers, len(self._slots) - passing_slots)
        self._loaded: set[int] = set()  # layers that are in their slot, or on the way there
        self._last: Any = None  # mark behind the copies of the sweep before; None: it made none
        self.listener: RouteListener | None = None

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield each of `ids` once, in the order given, in VRAM: what is launched before the next is asked for may
        read it.  hold: 1, a record is valid for those launches alone.
        """
        assert hold == 1, "slots are few"
        if self.listener is not None:
            self.listener.swept(layer, ids)
        copier = self._copier
        # also of a sweep that was given up: the source takes its records back
        if self._last is not None:
            copier.synchronize(self._last)
            self._last = None
        here = self._loaded.intersection(ids)
        absent = deque(i for i in ids if i not in here)
        self.counters.vram_hits += len(here)
        hold = min(2, self.source.max_hold)
        records = self.source.sweep(layer, list(absent), hold) if absent else iter(())
        if absent:
            copier.follow(copier.launched())
        free: deque[tuple[int, Any]] = deque((slot, None) for slot in self._passing)
        coming: deque[_Coming] = deque()
        lent: deque[Any] = deque()  # marks behind which the source may have its records back
        for wanted in ids:
            while absent and len(coming) < 2 and (free or absent[0] < self.kept_layers):
                if len(lent) == hold:
                    copier.synchronize(lent.popleft())
                coming.append(self._copy(absent.popleft(), records, free))
                lent.append(coming[-1].mark)
            if wanted in here:
                yield wanted, self._slots[self._home(wanted)]
                continue
            slot, mark = coming.popleft()
            copier.wait(mark)
            yield wanted, self._slots[slot]
            if slot in self._passing:
                free.append((slot, copier.launched()))
        assert next(records, None) is None

    def _home(self, layer: int) -> int:
        return len(self._passing) + layer

    def _copy(
        self, layer: int, records: Iterator[tuple[int, Tensor]], free: deque[tuple[int, Any]]
    ) -> _Coming:
        """Queue the next record's copy: into its own slot, or into one that is free once its reader has run."""
        found, record = next(records)
        assert found == layer
        if layer < self.kept_layers:
            slot = self._home(layer)
            self._loaded.add(layer)
        else:
            slot, read = free.popleft()
            if read is not None:
                self._copier.follow(read)
        self._copier.copy(slot, record)
        self.counters.copied_nbytes += self._nbytes
        self._last = self._copier.mark()
        return _Coming(slot, self._last)

    # ---- the rest of an ExpertSource ----------------------------------------------------------------------------

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        """Yield records in RAM, as the source does."""
        return self.source.waves(layer, ids, guesses)

    @property
    def max_hold(self) -> int:
        return 1

    def forget(self) -> None:
        """Drop what is kept in VRAM and in the source. Nothing may be in flight on the GPU."""
        if self.listener is not None:
            self.listener.forgot()
        self._loaded, self._last = set(), None
        self.source.forget()
