"""Every expert in memory: no cache, nothing evicted, nothing read after opening."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue

from torch import Tensor

from runtime.experts.arena import HostArena
from runtime.experts.layout import ExpertKey, ExpertLayout
from runtime.experts.schedule import ReadJob
from runtime.experts.source import InRows, Reader, Wave, one_by_one
from runtime.stats import ExpertCounters


class ResidentExperts(InRows):
    """All experts in memory: what every streamed run is compared with."""

    def __init__(self, layout: ExpertLayout, reader: Reader) -> None:
        """Read everything; the reader is closed afterwards."""
        self.counters = ExpertCounters()
        self._num_experts = layout.num_experts
        num_rows = layout.num_layers * layout.num_experts
        self._arena: HostArena = HostArena(num_rows, layout.record_nbytes)
        done: SimpleQueue[ReadJob] = SimpleQueue()
        keys = [
            ExpertKey(layer, e)
            for layer in range(layout.num_layers)
            for e in range(layout.num_experts)
        ]
        for row, key in enumerate(keys):
            reader.submit(key, layout.spans(key), self._arena.view(row), on_done=done.put)
        errors, left = [], len(keys)
        while left:
            job = done.get()
            # a row is one expert's for ever: what comes late is the same
            if job.orphans is not None:
                assert job.orphans.restart is not None
                job.orphans.restart(job.buffer)
                continue
            left -= 1
            if job.error is not None:
                errors.append(job.error)
        reader.close()
        if errors:
            raise errors[0]

    @property
    def max_hold(self) -> int:
        return self._num_experts

    @property
    def max_route(self) -> int:
        return self._num_experts

    def fetch(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()
    ) -> Iterator[tuple[int, Tensor]]:
        yield from one_by_one(self.waves(layer, ids, guesses))

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        del guesses  # there is nothing to read ahead
        self.counters.hits += len(ids)
        yield self.ahead(layer, ids)

    def used(self, layer: int, ids: Sequence[int]) -> None:
        """Everything stays: nothing is noted."""

    def ahead(self, layer: int, ids: Sequence[int]) -> Wave:
        first = layer * self._num_experts
        return [(expert, self._arena.records[first + expert]) for expert in ids]

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        del hold  # every record is valid for ever
        yield from self.ahead(layer, ids)

    def forget(self) -> None:
        """Everything stays: there is nothing to read again from."""

    def pin(self) -> None:
        self._arena.pin()

    def close(self) -> None:
        self._arena.close()
