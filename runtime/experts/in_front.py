"""What stands in front of an expert source passes on all that it does not do itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from runtime.experts.source import ExpertSource, Wave, one_by_one
from runtime.stats import ExpertCounters


class InFront(ABC):
    """An ExpertSource before another; `waves` is what it changes."""

    source: ExpertSource

    @abstractmethod
    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        """As `ExpertSource.waves`."""

    @property
    def counters(self) -> ExpertCounters:
        return self.source.counters

    @property
    def max_hold(self) -> int:
        return self.source.max_hold

    @property
    def max_route(self) -> int:
        return self.source.max_route

    @property
    def record_nbytes(self) -> int:
        return self.source.record_nbytes

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        yield from one_by_one(self.waves(layer, ids, guesses))

    def used(self, layer: int, ids: Sequence[int]) -> None:
        self.source.used(layer, ids)

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        return self.source.ahead(layer, ids)

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        return self.source.sweep(layer, ids, hold)

    def pin(self) -> None:
        self.source.pin()

    def forget(self) -> None:
        self.source.forget()

    def close(self) -> None:
        self.source.close()
