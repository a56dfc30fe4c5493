"""The layout of records made of whole tensors, each read where a release put it, in whatever order and shards.

Knows no model's names and opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.checkpoint import TensorInfo
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.tensor_runs import Part, lay_out


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
        self._spans: list[tuple[Span, ...]] = []
        self._parts: list[tuple[Part, ...]] = []
        for record in records:
            spans, parts = lay_out(list(record.values()), index, "")
            self._spans.append(spans)
            named = zip(record, parts, strict=True)
            self._parts.append(tuple(part._replace(name=name) for name, part in named))
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
