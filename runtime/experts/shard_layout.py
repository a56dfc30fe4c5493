"""Experts read where a release put them: two runs inside a shard, found by the headers.

Owns the proof that an expert's three matrices touch, and so do their three scale planes. Knows the shape of an FP4
expert; knows no model's names and opens no expert file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint import Checkpoint, CheckpointError, Extent, TensorInfo
from runtime.experts.layout import ExpertKey, Span, aligned_spans

FP4_BLOCK = 32  # columns that share an E8M0 scale


@dataclass(frozen=True, slots=True)
class Fp4Shape:
    """Sizes of one FP4 expert: codes of w1, w2, w3 (two in a byte), then their E8M0 scales."""

    hidden: int
    intermediate: int

    @property
    def codes_nbytes(self) -> int:
        """Bytes of one matrix."""
        return self.hidden * self.intermediate // 2

    @property
    def scales_nbytes(self) -> int:
        """Bytes of one matrix's scales."""
        return self.hidden * self.intermediate // FP4_BLOCK

    @property
    def payload_nbytes(self) -> int:
        return 3 * (self.codes_nbytes + self.scales_nbytes)

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return (rows, columns) of each matrix, in file order."""
        h, f = self.hidden, self.intermediate
        return {"w1": (f, h), "w2": (h, f), "w3": (f, h)}

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return (offset in the payload, nbytes) of each part: the run of codes, then the run of scales."""
        c, s = self.codes_nbytes, self.scales_nbytes
        codes = {f"{name} codes": (i * c, c) for i, name in enumerate(self.matrices())}
        scales = {f"{name} scales": (3 * c + i * s, s) for i, name in enumerate(self.matrices())}
        return codes | scales


def expert_tensors(
    checkpoint: Checkpoint, shape: Fp4Shape, prefix: str
) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """Return an expert's (weights, scales) in file order, each checked for dtype and shape.

    prefix: the expert's part of the tensor names, with the last dot. Raises CheckpointError.
    """
    weights, scales = [], []
    for name, (rows, cols) in shape.matrices().items():
        weights.append(checkpoint.info(f"{prefix}{name}.weight", "I8", (rows, cols // 2)))
        scales.append(
            checkpoint.info(f"{prefix}{name}.scale", "F8_E8M0", (rows, cols // FP4_BLOCK))
        )
    return weights, scales


class ShardLayout:
    """Two aligned reads per expert, in the released files: the run of weights, then the run of scales.

    A record is the aligned superset of both runs. Its size is that of the expert that needs most pages; where the
    payload lies in it is the expert's own (`payload_offsets`).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shape: Fp4Shape,
        num_layers: int,
        num_experts: int,
        prefix_of: Callable[[ExpertKey], str],
    ) -> None:
        """Find all experts; raise CheckpointError when a tensor is missing or a run is not in one piece.

        prefix_of: an expert -> its part of the tensor names, with the last dot.
        """
        self.shape = shape
        self.num_layers = num_layers
        self.num_experts = num_experts
        runs: list[tuple[Extent, Extent]] = []
        for layer, expert in itertools.product(range(num_layers), range(num_experts)):
            key = ExpertKey(layer, expert)
            weights, scales = expert_tensors(checkpoint, shape, prefix_of(key))
            runs.append((_joined(key, weights), _joined(key, scales)))
        self._files = tuple(sorted({extent.file for pair in runs for extent in pair}))
        index = {file: i for i, file in enumerate(self._files)}
        self._spans = [aligned_spans([(index[e.file], e) for e in pair]) for pair in runs]
        self._offsets = [
            tuple(
                span.dest + extent.offset - span.offset
                for span, extent in zip(spans, pair, strict=True)
            )
            for spans, pair in zip(self._spans, runs, strict=True)
        ]
        self.record_nbytes = max(spans[-1].dest + spans[-1].nbytes for spans in self._spans)

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        """Return the two reads that fill a record: weights, scales."""
        return self._spans[self.num_experts * key.layer + key.expert]

    def payload_offsets(self, key: ExpertKey) -> tuple[int, int]:
        """Return (offset of the weights in the record, offset of the scales).

        No power of two divides them but by luck: copy to an aligned place before a kernel reads words.
        """
        weights, scales = self._offsets[self.num_experts * key.layer + key.expert]
        return weights, scales


def _joined(key: ExpertKey, infos: list[TensorInfo]) -> Extent:
    """Return the one run of bytes that the tensors make; CheckpointError names the first two that do not touch."""
    for a, b in itertools.pairwise(infos):
        if (b.extent.file, b.extent.offset) != (a.extent.file, a.extent.offset + a.extent.nbytes):
            raise CheckpointError(
                f"layer {key.layer}, expert {key.expert}: {b.name} (byte {b.extent.offset:,} of "
                f"{b.extent.file.name}) does not follow {a.name}, which ends at byte "
                f"{a.extent.offset + a.extent.nbytes:,} of {a.extent.file.name}",
                "this checkpoint was repacked: fetch the release itself, its experts are read in place",
            )
    first = infos[0].extent
    return Extent(first.file, first.offset, sum(info.extent.nbytes for info in infos))
