"""A record made of a release's tensors where they lie: one aligned read for each run of tensors that touch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from runtime.checkpoint import Extent, TensorInfo
from runtime.experts.layout import Span, aligned_spans


class Part(NamedTuple):
    """Where a tensor lies in its record."""

    name: str  # without the prefix that all tensors of the record share
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def lay_out(
    infos: list[TensorInfo], index: Mapping[Path, int], prefix: str
) -> tuple[tuple[Span, ...], tuple[Part, ...]]:
    """Join tensors that touch into runs, and say where each comes to lie, in the order given.

    index: numbers of the files.
    """
    ordered = sorted(infos, key=lambda info: (index[info.extent.file], info.extent.offset))
    runs: list[list[TensorInfo]] = [ordered[:1]]
    for a, b in itertools.pairwise(ordered):
        touches = b.extent[:2] == (a.extent.file, a.extent.offset + a.extent.nbytes)
        if touches:
            runs[-1].append(b)
        else:
            runs.append([b])
    extents = [Extent(*run[0].extent[:2], sum(info.extent.nbytes for info in run)) for run in runs]
    spans = aligned_spans([(index[extent.file], extent) for extent in extents])
    places = {
        info.name: span.dest + info.extent.offset - span.offset
        for span, run in zip(spans, runs, strict=True)
        for info in run
    }
    return spans, tuple(
        Part(i.name.removeprefix(prefix), i.dtype, i.shape, places[i.name], i.extent.nbytes)
        for i in infos
    )
