"""Experts read one at a time, each when it is asked for: what every way of being faster is compared with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from runtime.checkpoint import ShortFileError
from runtime.experts.layout import ExpertKey, ExpertLayout
from runtime.experts.source import Wave
from runtime.stats import ExpertCounters


class PlainExperts:
    """An ExpertSource without cache, threads, guesses or direct reads. Every record is memory of its own."""

    max_hold = 1

    def __init__(self, layout: ExpertLayout) -> None:
        self._layout = layout
        self._files = [os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in layout.files]
        self.counters = ExpertCounters()

    @property
    def max_route(self) -> int:
        return self._layout.num_experts

    @property
    def record_nbytes(self) -> int:
        return self._layout.record_nbytes

    def _read(self, layer: int, expert: int) -> Tensor:
        record = bytearray(self._layout.record_nbytes)
        for span in self._layout.spans(ExpertKey(layer, expert)):
            data = os.pread(self._files[span.file_idx], span.need_nbytes, span.offset)
            if len(data) < span.need_nbytes:
                raise ShortFileError(
                    f"{self._layout.files[span.file_idx].name} ends inside expert {expert} of layer {layer}",
                    "fetch the file again",
                )
            record[span.dest : span.dest + len(data)] = data
        self.counters.misses += 1
        self.counters.read_nbytes += len(record)
        return torch.frombuffer(record, dtype=torch.uint8)

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        del guesses
        for expert in ids:
            yield [(expert, self._read(layer, expert))]

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        for wave in self.waves(layer, ids, guesses):
            yield from wave

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        del hold  # every record stays as it is
        yield from self.fetch(layer, ids)

    def used(self, layer: int, ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        del layer, ids
        return []

    def forget(self) -> None:
        """Nothing is kept."""

    def pin(self) -> None:
        """No record is read in place."""

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []
