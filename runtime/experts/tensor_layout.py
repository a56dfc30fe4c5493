"""Records made of whole tensors, each read where a release put it: the runs they make, and where each comes to lie.

Tensors of one record that touch are one read, in whatever order and shards they are. Knows no model's names and opens
no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.checkpoint import Extent, TensorInfo
from runtime.experts.layout import ExpertKey, Span, aligned_spans


class Part(NamedTuple):
    """Where a tensor lies in its record. `dtype` is the checkpoint's name for it."""

    name: str  # within the record
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class TensorLayout:
    """Aligned reads per record, one for each run of its tensors in a shard.

    A record is the aligned superset of its runs. All have the size of the one that needs most pages; where a tensor
    lies is the record's own (`parts`).
    """

    def __init__(self, records: Sequence[Mapping[str, TensorInfo]], num_layers: int) -> None:
        """records: name within the record -> tensor, in the order of use; layer by layer, as many in each."""
        self.num_layers, self.num_experts = num_layers, len(records) // num_layers
        infos = [info for record in records for info in record.values()]
        self._files = tuple(sorted({info.extent.file for info in infos}))
        index = {file: i for i, file in enumerate(self._files)}
        laid_out = [_lay_out(record, index) for record in records]
        self._spans = [spans for spans, _ in laid_out]
        self._parts = [parts for _, parts in laid_out]
        self.record_nbytes = max(spans[-1].dest + spans[-1].nbytes for spans in self._spans)

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        """Return the reads that fill a record."""
        return self._spans[self.num_experts * key.layer + key.expert]

    def parts(self, key: ExpertKey) -> tuple[Part, ...]:
        """Return where each tensor lies in the record, in the order of use.

        Only a tensor's own bytes are at a place that is known; a shard's tensors need not be aligned to their dtype.
        """
        return self._parts[self.num_experts * key.layer + key.expert]


def _lay_out(
    record: Mapping[str, TensorInfo], index: Mapping[Path, int]
) -> tuple[tuple[Span, ...], tuple[Part, ...]]:
    """Join tensors that touch into runs, and say where each comes to lie."""
    runs = _runs(sorted(record.values(), key=lambda i: (index[i.extent.file], i.extent.offset)))
    extents = [Extent(*run[0].extent[:2], sum(info.extent.nbytes for info in run)) for run in runs]
    spans = aligned_spans([(index[extent.file], extent) for extent in extents])
    places = {
        info.name: span.dest + info.extent.offset - span.offset
        for span, run in zip(spans, runs, strict=True)
        for info in run
    }
    return spans, tuple(
        Part(name, info.dtype, info.shape, places[info.name], info.extent.nbytes)
        for name, info in record.items()
    )


def _runs(ordered: Iterable[TensorInfo]) -> list[list[TensorInfo]]:
    """Cut tensors in file order where one does not begin at the end of the one before."""
    runs: list[list[TensorInfo]] = []
    end: tuple[Path, int] | None = None
    for info in ordered:
        if info.extent[:2] != end:
            runs.append([])
        runs[-1].append(info)
        end = (info.extent.file, info.extent.offset + info.extent.nbytes)
    return runs
