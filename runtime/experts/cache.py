"""The RAM tier's book: which expert is in which row, and who goes. Integers only, one thread only.

LRU over all layers (it beat LFU, segmented LRU and per-layer LRU on recorded routes, where many tokens' experts fit;
`policies` has them, and `adaptive` the choice where few do). Two things are never evicted: a row that is pinned (the
route in use) and a row in flight (a read is writing it).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ExpertCache(Generic[Key]):
    """`num_rows` rows, least recently used first out. A key names one expert."""

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"a cache needs at least one row, got {num_rows}")
        self.num_rows = num_rows
        self._row_of: OrderedDict[Key, int] = OrderedDict()  # oldest first
        self._free = list(range(num_rows - 1, -1, -1))
        self._pins: dict[Key, int] = {}
        self._in_flight: set[Key] = set()

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free)

    def keys(self) -> list[Key]:
        """Return what is here, the first to go first."""
        return list(self._row_of)

    def row_of(self, key: Key) -> int | None:
        """Return the row of an expert that is here or on its way, without touching its age."""
        return self._row_of.get(key)

    def is_in_flight(self, key: Key) -> bool:
        return key in self._in_flight

    def touch(self, key: Key) -> None:
        """Make an expert the most recently used."""
        self._row_of.move_to_end(key)

    def demote(self, key: Key) -> None:
        """Make an expert the first to go: a guess that was wrong."""
        self._row_of.move_to_end(key, last=False)

    def pin(self, key: Key) -> None:
        """Protect an expert from eviction; pins count."""
        if key not in self._row_of:
            raise KeyError(key)
        self._pins[key] = self._pins.get(key, 0) + 1

    def take(self, key: Key) -> int | None:
        """Pin an expert, make it the most recently used and return its row; None when it is absent."""
        row = self._row_of.get(key)
        if row is not None:
            self._row_of.move_to_end(key)
            self._pins[key] = self._pins.get(key, 0) + 1
        return row

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def admit(self, key: Key) -> int | None:
        """Give an absent expert a row, as the most recent and in flight; None when every row is protected."""
        if key in self._row_of:
            raise ValueError(f"{key} is already in the cache")
        if not self._free:
            victim = self._victim()
            if victim is None:
                return None
            self._free.append(self._row_of.pop(victim))
        row = self._free.pop()
        self._row_of[key] = row
        self._in_flight.add(key)
        return row

    def _victim(self) -> Key | None:
        """Return who goes, or None when everybody is protected."""
        return next((key for key in self._row_of if not self.is_protected(key)), None)

    def is_protected(self, key: Key) -> bool:
        """Whether an expert that is here may not be evicted now."""
        return key in self._pins or key in self._in_flight

    def remove(self, key: Key) -> None:
        """Forget an expert that is here and may be evicted; its row is free again."""
        if self.is_protected(key):
            raise ValueError(f"{key} is pinned or in flight")
        self._free.append(self._row_of.pop(key))

    def landed(self, key: Key) -> None:
        """Note that an admitted expert's bytes are all there."""
        self._in_flight.remove(key)

    def drop(self, key: Key) -> None:
        """Forget an admitted expert whose read failed or was cancelled; its row is free again."""
        self._in_flight.remove(key)
        self._pins.pop(key, None)
        self._free.append(self._row_of.pop(key))
