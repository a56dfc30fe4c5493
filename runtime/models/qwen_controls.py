"""Damage on purpose: each control breaks one thing that could be silently wrong, and must spoil the text.

Fluent output is not evidence: several real mistakes leave most greedy choices unchanged. A measure that does not
see these would not see the real ones either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from runtime.experts.layout import Nvfp4Shape
from runtime.experts.streamer import ExpertSource, Wave, one_by_one
from runtime.models.qwen import QwenModel


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

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        changed = [self._change_id(e) for e in ids]
        return list(self._changed(ids, iter(self._source.ahead(layer, changed))))

    @property
    def max_hold(self) -> int:
        return self._source.max_hold

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
def _experts(model: QwenModel, damaged: DamagedExperts) -> Iterator[None]:
    source, model.experts = model.experts, damaged
    try:
        yield
    finally:
        model.experts = source


def _codes_nbytes(model: QwenModel) -> int:
    return 3 * Nvfp4Shape(model.spec.hidden, model.spec.intermediate).codes_nbytes


def nibbles_swapped(model: QwenModel) -> AbstractContextManager[None]:
    """Take the high nibble of each byte for the first column."""
    nbytes = _codes_nbytes(model)

    def swap(record: Tensor) -> Tensor:
        codes = record[:nbytes]
        return torch.cat([(codes >> 4) | (codes << 4), record[nbytes:]])

    return _experts(model, DamagedExperts(model.experts, swap))


def experts_removed(model: QwenModel) -> AbstractContextManager[None]:
    """Take every routed expert for zero."""
    return _experts(model, DamagedExperts(model.experts, torch.zeros_like))


def experts_shifted(model: QwenModel) -> AbstractContextManager[None]:
    """Take expert e + 1 where e was asked for."""
    return _experts(
        model, DamagedExperts(model.experts, change_id=lambda e: (e + 1) % model.spec.num_experts)
    )


@contextmanager
def global_scale_dropped(model: QwenModel) -> Iterator[None]:
    """Take every global scale for one."""
    kept = [moe.scales for moe in model.moes]
    try:
        for moe in model.moes:
            moe.scales = torch.ones_like(moe.scales)
        yield
    finally:
        for moe, scales in zip(model.moes, kept, strict=True):
            moe.scales = scales


@contextmanager
def ngram_hash_wrong(model: QwenModel) -> Iterator[None]:
    """Take the hash multipliers in reverse order."""
    kept = model.ple.multipliers
    try:
        model.ple.multipliers = kept.flip(0)
        yield
    finally:
        model.ple.multipliers = kept


CONTROLS: dict[str, Callable[[QwenModel], AbstractContextManager[None]]] = {
    "nibbles swapped": nibbles_swapped,
    "routed experts removed": experts_removed,
    "experts shifted by one": experts_shifted,
    "global scale dropped": global_scale_dropped,
    "n-gram hash wrong": ngram_hash_wrong,
}
