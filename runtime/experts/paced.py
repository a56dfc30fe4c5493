"""Copies to VRAM slots while one graph computes a whole token: no event of its stream fires before its end.

Until then the host stands in for events. That a layer has been computed it sees in words that the graph writes; that a
copy has arrived it asks of the copy's event, before it lets the graph go on to what reads it. Knows no expert.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from runtime.errors import DeviceError
from runtime.experts.copies import Copier


class AskedCopier(Copier, Protocol):
    """A copier whose marks the host can look at."""

    def is_reached(self, mark: Any) -> bool:
        """Whether the mark is reached, without waiting."""


class _Later:
    """A mark behind copies that are held back, and the copier's own once they are not."""

    def __init__(self) -> None:
        self.mark: Any = None


class PacedCopier:
    """Another copier; between `begin` and `end` its marks are layers of the token in work and copies that arrived."""

    def __init__(self, inner: AskedCopier) -> None:
        self._inner, self.slots = inner, inner.slots
        self._has_computed: Callable[[int], bool] | None = None  # None: no token is in work
        self._layer = 0
        self._behind: int | None = None  # copies asked for now follow this layer's experts
        self._held: list[tuple[int, Tensor] | _Later] = []
        self._needed: list[Any] = []  # marks that what is launched next must run after
        self._breathe = select.poll().poll  # with 0: lets the threads go on that read

    # ---- for whoever runs the graph -------------------------------------------------------------------------------

    def begin(self, has_computed: Callable[[int], bool]) -> None:
        """A token's graph is launched.  has_computed: whether it is through with the experts of a layer."""
        self._has_computed = has_computed

    def reach(self, layer: int) -> None:
        """The layer's route is known, so all that was launched for the layers before has run."""
        self._let_go()
        self._layer = layer

    def look(self) -> None:
        """Start the copies that were held back, if what they follow has run."""
        if (
            self._behind is not None
            and self._has_computed is not None
            and self._has_computed(self._behind)
        ):
            self._let_go()

    def arrive(self, limit_s: float) -> None:
        """Wait until the copies have arrived that what is launched next must run after. Raises DeviceError."""
        if not self._needed:
            return
        end_s = time.monotonic() + limit_s
        for mark in self._needed:
            while not self._inner.is_reached(mark):
                self._breathe(0)
                if time.monotonic() > end_s:
                    raise DeviceError(
                        f"a copy to the GPU's memory has not ended within {limit_s:g} s",
                        "see the kernel log (dmesg) and `nvidia-smi`: the card may be failing",
                    )
        self._needed.clear()

    def end(self) -> None:
        """The graph is over, or no more than its head is left of it."""
        self._let_go()
        self._has_computed = None
        for mark in self._needed:
            self._inner.wait(mark)
        self._needed.clear()

    def _let_go(self) -> None:
        self._behind = None
        for item in self._held:
            if isinstance(item, _Later):
                item.mark = self._inner.mark()
            else:
                self._inner.copy(*item)
        self._held.clear()

    # ---- a Copier --------------------------------------------------------------------------------------------------

    def copy(self, slot: int, record: Tensor) -> None:
        if self._behind is None:
            self._inner.copy(slot, record)
        else:
            self._held.append((slot, record))

    def mark(self) -> Any:
        if self._behind is None:
            return self._inner.mark()
        self._held.append(later := _Later())
        return later

    def wait(self, mark: Any) -> None:
        mark = self._own(mark)
        if self._has_computed is None:
            self._inner.wait(mark)
        else:
            self._needed.append(mark)

    def launched(self) -> Any:
        return self._inner.launched() if self._has_computed is None else self._layer

    def follow(self, mark: Any) -> None:
        if self._has_computed is None:
            self._inner.follow(mark)
        else:
            self._behind = mark

    def synchronize(self, mark: Any) -> None:
        self._inner.synchronize(self._own(mark))

    def _own(self, mark: Any) -> Any:
        if not isinstance(mark, _Later):
            return mark
        assert mark.mark is not None, "a mark is waited for before the layer that its copies follow"
        return mark.mark
