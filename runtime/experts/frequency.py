"""Which experts VRAM keeps: those used most often of late, over all layers. Numbers only, one thread only.

A use counts half after `HALF_LIFE_TOKENS` tokens. Nobody has to be taken in: an expert that is not kept is read where
it is. So a newcomer must have been used more often than the coldest of the kept, by a margin, or the two would take
turns. An LRU, which takes in what it is asked for, finds nothing here: a token's cycle is larger than VRAM.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

HALF_LIFE_TOKENS = 6
MARGIN = 1.2
LARGEST_UNIT = 2.0**100  # then all scores are brought down, long before they are infinite


class KeptExperts:
    """Keys in slots, and how often every key was used."""

    def __init__(self, slots: Iterable[int], num_layers: int) -> None:
        """num_layers: routes of a token, each of which is told to `count`."""
        self._free = list(slots)
        self._slot_of: dict[int, int] = {}
        self._score: dict[int, float] = {}  # uses, in the units of the first
        self._coldest: list[
            tuple[float, int]
        ] = []  # heap of the kept; scores may be old, so too low
        # what a use counts now: later ones weigh more, instead of all earlier ones less
        self._unit = 1.0
        self._growth = 2 ** (1 / (HALF_LIFE_TOKENS * num_layers))
        self._bar = 0.0 if self._free else math.inf

    def __len__(self) -> int:
        return len(self._slot_of)

    def in_order(self) -> list[int]:
        """Return what is kept, the least used first."""
        return sorted(self._slot_of, key=self._score.__getitem__)

    def slot_of(self, key: int) -> int | None:
        return self._slot_of.get(key)

    def is_worth_keeping(self, key: int) -> bool:
        """Whether an expert that is used now, and not kept, is used more often than the coldest of the kept."""
        return self._score.get(key, 0.0) + self._unit > self._bar

    def count(self, keys: Iterable[int]) -> None:
        """Note the route of one layer."""
        self._unit *= self._growth
        if self._unit > LARGEST_UNIT:
            self._scale_down()
        for key in keys:
            self._score[key] = self._score.get(key, 0.0) + self._unit
        self._set_bar()

    def keep(self, key: int, slot: int) -> int | None:
        """Keep a counted expert where it is, in `slot`, if it is worth it; return the slot that is free for it then."""
        score = self._score[key]
        if score <= self._bar:
            return None
        if self._free:
            freed = self._free.pop()
        else:
            _, victim = heapq.heappop(self._coldest)
            freed = self._slot_of.pop(victim)
        self._slot_of[key] = slot
        heapq.heappush(self._coldest, (score, key))
        self._set_bar()
        return freed

    def _set_bar(self) -> None:
        if self._free or not self._coldest:
            return
        while (found := self._coldest[0])[0] != (score := self._score[found[1]]):
            heapq.heapreplace(self._coldest, (score, found[1]))
        self._bar = MARGIN * found[0]

    def _scale_down(self) -> None:
        self._score = {key: score / self._unit for key, score in self._score.items()}
        self._coldest = [(self._score[key], key) for key in self._slot_of]
        heapq.heapify(self._coldest)
        self._bar /= self._unit
        self._unit = 1.0
