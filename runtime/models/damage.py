"""What the controls of every family need: experts changed on the way, attributes changed for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor

from runtime.experts.source import ExpertSource, Wave, one_by_one


class HasExperts(Protocol):
    """A model with an expert source."""

    experts: ExpertSource


class DamagedExperts:
    """An expert source whose ids or records are changed on the way."""

    def __init__(
        self,
        source: ExpertSource,
        change_record: Callable[[Tensor], Tensor] = lambda record: record,
        change_id: Callable[[int], int] = lambda expert: expert,
    ) -> None:
        self._source, self._change_record, self._change_id = source, change_record, change_id
        self.counters = source.counters

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        for wave in self._source.waves(layer, [self._change_id(e) for e in ids], guesses):
            yield list(self._changed(ids, iter(wave)))

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        yield from one_by_one(self.waves(layer, ids, guesses))

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        changed = [self._change_id(e) for e in ids]
        return self._changed(ids, self._source.sweep(layer, changed, hold))

    def _changed(
        self, ids: Sequence[int], records: Iterator[tuple[int, Tensor]]
    ) -> Iterator[tuple[int, Tensor]]:
        asked_as = {self._change_id(e): e for e in ids}
        for expert, record in records:
            yield asked_as[expert], self._change_record(record)

    def used(self, layer: int, ids: Sequence[int]) -> None:
        self._source.used(layer, [self._change_id(e) for e in ids])

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        changed = [self._change_id(e) for e in ids]
        return list(self._changed(ids, iter(self._source.ahead(layer, changed))))

    @property
    def max_hold(self) -> int:
        return self._source.max_hold

    @property
    def max_route(self) -> int:
        return self._source.max_route

    @property
    def record_nbytes(self) -> int:
        return self._source.record_nbytes

    def forget(self) -> None:
        self._source.forget()

    def pin(self) -> None:
        self._source.pin()

    def close(self) -> None:
        self._source.close()


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Give attributes other values for a while: (owner, name, value) each."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def damaged_experts(
    model: HasExperts,
    change_record: Callable[[Tensor], Tensor] = lambda record: record,
    change_id: Callable[[int], int] = lambda expert: expert,
) -> AbstractContextManager[None]:
    """Let a model see other records or experts than it asks for."""
    damaged = DamagedExperts(model.experts, change_record, change_id)
    return replaced((model, "experts", damaged))
