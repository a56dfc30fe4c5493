"""Where experts come from, as protocols: what an engine asks of a source, and a source of its reader and memory.

Knows no cache, no thread and no file. The functions use nothing but what the protocols say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from runtime.experts.layout import Span
from runtime.experts.schedule import ReadJob
from runtime.stats import ExpertCounters

Wave = list[tuple[int, Tensor]]


class ExpertSource(Protocol):
    """Where an engine gets its experts from."""

    @property
    def counters(self) -> ExpertCounters: ...

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        """Yield `ids` (distinct, in router order) with their records in lists: first what is there already; then, as
        it arrives, all that has arrived. A list may be empty. Valid until the next call.

        `guesses`: likely experts of layer + 1, best first; they may be read ahead in the gap, and are asked for after
        the first list, which is wanted soon.
        """

    def used(self, layer: int, ids: Sequence[int]) -> None:
        """Note, before a layer's `waves`, which experts of its route were found in front of this source.

        They came from here a moment ago, and are as much in use as those that are asked for.
        """

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        """Return those of `ids` whose records are there already, valid until the call after the next of `waves`."""

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield what `waves` does, one by one."""

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield each of `ids` once, in the order given; what decoding keeps warm stays warm.

        A record is valid until `hold` more have been asked for (at most `max_hold`).
        """

    @property
    def max_hold(self) -> int: ...

    @property
    def max_route(self) -> int:
        """How many experts of a layer `waves` and `fetch` can be asked for at once."""

    @property
    def record_nbytes(self) -> int: ...

    def forget(self) -> None:
        """Drop what is kept: the next token finds nothing."""

    def pin(self) -> None:
        """Make the records readable by the GPU where they are. Once, before the first fetch."""

    def close(self) -> None: ...


def as_list(guesses: Iterable[int]) -> list[int]:
    """Return guesses that can be gone through twice, with their scores if they have some."""
    return guesses if isinstance(guesses, list) else list(guesses)


def fetch_union(
    experts: ExpertSource, layer: int, routes: Sequence[Sequence[int]], guesses: Iterable[int] = ()
) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that the routes of several tokens name once, as `fetch` does; the first token's come first.

    More than the cache can hold are fetched in turns, and the guesses asked for in the last of them.
    """
    if len(routes) == 1:
        yield from experts.fetch(layer, routes[0], guesses)
        return
    union = list(dict.fromkeys(expert for route in routes for expert in route))
    turns = [union[at : at + experts.max_route] for at in range(0, len(union), experts.max_route)]
    for turn in turns:
        yield from experts.fetch(layer, turn, guesses if turn is turns[-1] else ())


def one_by_one(waves: Iterator[Wave]) -> Iterator[tuple[int, Tensor]]:
    """Yield what is in the lists; what is read ahead is on its way before the first is computed."""
    first = next(waves)
    second = next(waves, [])
    yield from first
    yield from second
    for wave in waves:
        yield from wave


class Reader(Protocol):
    """What a streamer asks of the one who reads: a `DirectReader`, a `ChildReader`, or the simulator's."""

    def submit(
        self,
        key: Hashable,
        spans: Sequence[Span],
        buffer: memoryview,
        is_required: bool = True,
        on_done: Callable[[ReadJob], None] | None = None,
        is_idle: bool = False,
    ) -> ReadJob: ...

    def promote(self, job: ReadJob) -> None: ...

    def cancel(self, job: ReadJob) -> bool: ...

    def close(self) -> None: ...


class Arena(Protocol):
    """Rows of memory: `arena.HostArena`, or the simulator's, which has none."""

    records: list[Tensor]
    row_nbytes: int
    nbytes: int

    def view(self, row: int) -> memoryview: ...

    def swap(self, row: int, other: int) -> None: ...

    def pin_rows(self) -> int: ...

    def close(self) -> None: ...


class InRows:
    """A source whose records are rows of an arena."""

    _arena: Arena

    @property
    def arena_nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def record_nbytes(self) -> int:
        return self._arena.row_nbytes

    @property
    def records(self) -> Sequence[Tensor]:
        """The rows of RAM, whatever is in them: to measure with, before anything is read."""
        return self._arena.records


class Arrivals(Protocol):
    """Finished reads on their way to the decoding thread: a `SimpleQueue`, a `ChildReader`, the simulator's clock."""

    def put(self, item: ReadJob) -> None: ...

    def get(self) -> ReadJob: ...

    def empty(self) -> bool: ...
