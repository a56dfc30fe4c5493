"""Dense models of random quantised weights that no file holds: any shape, made where they are computed, in seconds.

The numbers mean nothing; bytes and operations of a token are those of a model of that shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import Weights
from runtime.checkpoint import DTYPE_NBYTES, Checkpoint, Extent, TensorInfo, torch_dtype
from runtime.models.dense import DenseModel
from runtime.models.dense_weights import (
    EMBEDDING,
    HEAD,
    NORM,
    DenseSpec,
    Entry,
    LayerLayout,
    head_entries,
    layer_entries,
)
from runtime.stats import ExpertCounters
from runtime.units import align_up

STAND_IN = Path(__file__)  # what an identity hashes in place of weight files
CODE_RMS = {Weights.int8_rows: 73.3, Weights.nvfp4: 2.9}  # of random codes, with scales of one


class RandomLayers:
    """Records that are all there: a dense model's source of layers."""

    def __init__(self, records: Sequence[Tensor]) -> None:
        self.records, self.counters = records, ExpertCounters()

    def sweep(self, layer: int, ids: Sequence[int], hold: int = 1) -> Iterator[tuple[int, Tensor]]:
        del layer, hold
        yield from ((i, self.records[i]) for i in ids)

    def close(self) -> None:
        """Nothing is open."""


def random_model(
    config: Mapping[str, Any], weights: Weights, device: torch.device, dtype: torch.dtype
) -> DenseModel:
    """Return a model of config.json's shape in a quantised format; its embedding table is in RAM."""
    spec = DenseSpec.from_config(config)
    infos, at = {}, 0
    for layer in range(spec.depth):
        at = align_up(at)
        for name, entry in layer_entries(spec, weights).items():
            info = _info(f"model.layers.{layer}.{name}", entry, at)
            infos[info.name], at = info, align_up(at + info.extent.nbytes, 16)
    layout = LayerLayout(Checkpoint(Path(), infos), spec)
    source = torch.Generator(device).manual_seed(1)
    records = []
    for layer in range(spec.depth):
        record = torch.zeros(layout.record_nbytes, dtype=torch.uint8, device=device)
        for name, kind, shape, offset, nbytes in layout.layer_parts(layer):
            part = record[offset : offset + nbytes]
            _fill(part.view(torch_dtype(kind)).view(shape), name, weights, spec, source)
        records.append(record)
    host = torch.Generator().manual_seed(2)
    shape = (spec.vocab_size, spec.hidden)
    table = torch.randint(-99, 100, shape, dtype=torch.int8, generator=host)
    residents = {EMBEDDING: table.bfloat16() / 57, NORM: torch.ones(spec.hidden, device=device)}
    for name, entry in head_entries(spec, weights).items():
        part = torch.empty(entry.shape, dtype=torch_dtype(entry.dtypes[0]), device=device)
        _fill(part, name.removeprefix("lm_head."), Weights.int8_rows, spec, source)
        residents[name] = part
    assert HEAD in residents
    return DenseModel(spec, residents, layout, RandomLayers(records), dtype)  # type: ignore[arg-type]


def _info(name: str, entry: Entry, at: int) -> TensorInfo:
    nbytes = math.prod(entry.shape) * DTYPE_NBYTES[entry.dtypes[0]]
    return TensorInfo(name, entry.dtypes[0], entry.shape, Extent(STAND_IN, at, nbytes))


def _fill(
    part: Tensor, name: str, weights: Weights, spec: DenseSpec, source: torch.Generator
) -> None:
    """Fill one tensor so that products keep the scale of what they are given."""
    columns = spec.intermediate if "down_proj" in name else spec.hidden
    step = 1 / (CODE_RMS[weights] * math.sqrt(columns))
    if name.endswith("_global") or (name.endswith("_scale") and part.dtype is torch.float32):
        part.fill_(step)
    elif name.endswith("_scale"):
        part.fill_(1.0)
    elif part.dtype in (torch.uint8, torch.int8):
        part.view(torch.uint8).random_(0, 256, generator=source)
    elif name.endswith("norm.weight"):
        part.fill_(1.0)
    else:
        part.normal_(0, 0.5, generator=source)
