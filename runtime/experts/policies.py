"""Other rules than LRU for who goes, and the optimum that no rule can beat. Numbers only.

LRU and LFU decode (`adaptive` has which of them); the others are for the simulator.

Each is an `ExpertCache`: pins, reads in flight and wrong guesses mean the same, so that the same streamer runs on it.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from runtime.errors import UserError
from runtime.experts.cache import ExpertCache
from runtime.experts.layout import ExpertKey

Key = TypeVar("Key", bound=Hashable)

STALE_RANKS = 8  # ranks kept for each row, most of which no longer hold
PROTECTED_SHARE = 0.8  # of a segmented LRU's rows
NEVER = math.inf


class _Noting(ExpertCache[Key]):
    """A cache that notes each use of what is in it."""

    @abstractmethod
    def _used(self, key: Key) -> None:
        """Note a use."""

    def touch(self, key: Key) -> None:
        super().touch(key)
        self._used(key)

    def take(self, key: Key) -> int | None:
        row = super().take(key)
        if row is not None:
            self._used(key)
        return row


class RankedCache(_Noting[Key]):
    """A cache whose victim has the lowest rank; ranks change only when their expert is used."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._rank_of: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []  # also ranks that no longer hold
        self._count = 0  # equal ranks: the one ranked first goes first

    def _rank(self, key: Key, rank: float) -> None:
        self._count += 1
        self._rank_of[key] = rank
        heapq.heappush(self._heap, (rank, self._count, key))
        # where all is found, nobody looks for a victim
        if len(self._heap) > STALE_RANKS * self.num_rows:
            self._heap = [entry for entry in self._heap if self._holds(entry)]
            heapq.heapify(self._heap)

    def _holds(self, entry: tuple[float, int, Key]) -> bool:
        return entry[2] in self._row_of and self._rank_of[entry[2]] == entry[0]

    def keys(self) -> list[Key]:
        return sorted(self._row_of, key=self._rank_of.__getitem__)

    def demote(self, key: Key) -> None:
        super().demote(key)
        self._rank(key, -NEVER)

    def admit(self, key: Key) -> int | None:
        row = super().admit(key)
        if row is not None:
            self._used(key)
        return row

    def _victim(self) -> Key | None:
        protected = []
        victim = None
        while self._heap and victim is None:
            entry = heapq.heappop(self._heap)
            if not self._holds(entry):
                continue
            if self.is_protected(entry[2]):
                protected.append(entry)
            else:
                victim = entry[2]
        for entry in protected:
            heapq.heappush(self._heap, entry)
        return victim


class LfuCache(RankedCache[Key]):
    """Least frequently used first out. Uses of those that have gone are remembered."""

    def __init__(self, num_rows: int, half_life_uses: float | None = None) -> None:
        """half_life_uses: after as many uses a use counts half; None: as many as there are rows."""
        super().__init__(num_rows)
        self._half_life_uses = half_life_uses or num_rows
        self._weight_of: dict[Key, float] = {}  # log2 of the counts, in the units of the first use
        self._uses = 0

    def _used(self, key: Key) -> None:
        self._uses += 1
        # later uses weigh more, instead of all earlier ones less
        weight = self._uses / self._half_life_uses
        before = self._weight_of.get(key, -NEVER)
        high, low = max(before, weight), min(before, weight)
        self._weight_of[key] = high + math.log2(1 + 2 ** (low - high))
        self._rank(key, self._weight_of[key])


class SlruCache(_Noting[Key]):
    """Segmented LRU: who is used again while here is protected, and goes only when nobody else is left."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self._protected: OrderedDict[Key, None] = OrderedDict()
        self._num_protected = int(PROTECTED_SHARE * num_rows)

    def _used(self, key: Key) -> None:
        self._protected[key] = None
        self._protected.move_to_end(key)
        if len(self._protected) > self._num_protected:
            oldest, _ = self._protected.popitem(last=False)
            self._row_of.move_to_end(oldest)

    def demote(self, key: Key) -> None:
        super().demote(key)
        self._protected.pop(key, None)

    def _victim(self) -> Key | None:
        on_trial = (key for key in self._row_of if key not in self._protected)
        for group in (on_trial, self._protected):
            victim = next((key for key in group if not self.is_protected(key)), None)
            if victim is not None:
                self._protected.pop(victim, None)
                return victim
        return None

    def drop(self, key: Key) -> None:
        super().drop(key)
        self._protected.pop(key, None)


class PerLayerCache(ExpertCache[ExpertKey]):
    """An LRU for each layer, of as many rows as there are for one layer."""

    def __init__(self, num_rows: int, num_layers: int, top_k: int) -> None:
        """Raises UserError when a layer's rows cannot hold a route."""
        super().__init__(num_rows)
        self._quota = num_rows // num_layers
        if self._quota < top_k:
            raise UserError(
                f"a per-layer LRU of {num_rows} rows has {self._quota} for each of {num_layers} layers, a route needs "
                f"{top_k}",
                f"raise cache.ram_gib until it holds {num_layers * top_k} experts, or use simulate.policy=lru",
            )
        self._layers: list[OrderedDict[ExpertKey, None]] = [
            OrderedDict() for _ in range(num_layers)
        ]

    def touch(self, key: ExpertKey) -> None:
        super().touch(key)
        self._layers[key.layer].move_to_end(key)

    def take(self, key: ExpertKey) -> int | None:
        row = super().take(key)
        if row is not None:
            self._layers[key.layer].move_to_end(key)
        return row

    def demote(self, key: ExpertKey) -> None:
        super().demote(key)
        self._layers[key.layer].move_to_end(key, last=False)

    def admit(self, key: ExpertKey) -> int | None:
        own = self._layers[key.layer]
        if key not in own and len(own) >= self._quota:
            victim = next((k for k in own if not self.is_protected(k)), None)
            if victim is None:
                return None
            del own[victim]
            self._free.append(self._row_of.pop(victim))
        row = super().admit(key)
        assert row is not None, "quotas add up to no more than there is"
        own[key] = None
        return row

    def drop(self, key: ExpertKey) -> None:
        super().drop(key)
        del self._layers[key.layer][key]


class BeladyCache(RankedCache[Key]):
    """Who is used again last goes first: no rule that must take in what was asked for finds more.

    Whoever drives it sets `position` to the number of the request that is served.
    """

    def __init__(self, num_rows: int, uses: Mapping[Key, Sequence[int]]) -> None:
        """uses: of each key, the numbers of the requests that want it, ascending."""
        super().__init__(num_rows)
        self._uses = uses
        self._wanted: dict[int, list[Key]] = {}  # request -> its keys
        for key, numbers in uses.items():
            for number in numbers:
                self._wanted.setdefault(number, []).append(key)
        self._position = -1

    @property
    def position(self) -> int:
        return self._position

    @position.setter
    def position(self, number: int) -> None:
        passed = range(self._position + 1, number + 1)
        self._position = number
        for key in (key for at in passed for key in self._wanted.get(at, ())):
            if key in self._row_of:  # also where another tier served this use
                self._used(key)

    def _used(self, key: Key) -> None:
        uses = self._uses.get(key, ())
        after = bisect_right(uses, self._position)
        self._rank(key, -uses[after] if after < len(uses) else -NEVER)


def uses_of(requests: Iterable[Sequence[Key]]) -> dict[Key, list[int]]:
    """Return, of each key, the numbers of the requests that want it."""
    uses: dict[Key, list[int]] = {}
    for number, keys in enumerate(requests):
        for key in keys:
            uses.setdefault(key, []).append(number)
    return uses


def count_hits(cache: ExpertCache[Key], requests: Sequence[Sequence[Key]]) -> int:
    """Return how often a key is found when each request is pinned as a whole, then read, then given back.

    A request's keys are distinct and no more than the cache has rows.
    """
    hits = 0
    for number, keys in enumerate(requests):
        if isinstance(cache, BeladyCache):
            cache.position = number
        missing = [key for key in keys if cache.take(key) is None]
        hits += len(keys) - len(missing)
        for key in missing:
            row = cache.admit(key)
            assert row is not None, "a request is longer than the cache"
            cache.landed(key)
            cache.pin(key)
        for key in keys:
            cache.unpin(key)
    return hits


def most_hits(requests: Sequence[Sequence[Key]], num_rows: int) -> int:
    """Return how many hits any cache of `num_rows` rows can have at most, from an empty start, without guesses."""
    cache: BeladyCache[Key] = BeladyCache(num_rows, uses_of(requests))
    return count_hits(cache, requests)
