"""Write a dense model's layers and head in 8 or 4 bits, into one file in the order in which they are used.

The embedding table and the last norm stay where they are; gains and biases are copied. What an engine then streams is
this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from conf.schema import RunConfig, Weights
from kernels.formats import int8_rows_quantize, nvfp4_quantize
from runtime import hardware
from runtime.checkpoint import Checkpoint
from runtime.engine import load_family
from runtime.models.dense_weights import (
    EMBEDDING,
    HEAD,
    LAYERS_NAME,
    DenseSpec,
    Entry,
    LayerLayout,
    entries,
)
from stages.download import planned_spec, snapshot_of
from stages.residents import make_header
from stages.stage import Output, Stage, StageContext

if TYPE_CHECKING:
    from runtime.checkpoint import TensorInfo

ROWS = 4096  # of a matrix that are rounded at once
PEAKS = (6.0, 4.0)  # of NVFP4 groups: 8.7 % error on Gaussian rows, 9.5 % with 6 alone
HEAD_UNIT = "head"


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides the bytes besides the checkpoint."""
    return {"weights": cfg.model.weights.value}


def disk_nbytes(cfg: RunConfig, inputs: Mapping[str, Output]) -> int:
    """Return the size of the finished file."""
    spec = load_family("dense").read_spec(snapshot_of(inputs["download"]))
    return file_nbytes(spec, cfg.model.weights)


def expected_nbytes(cfg: RunConfig) -> int:
    """Return the same before the snapshot is here, from the released config.json; 0 without one."""
    spec = planned_spec(cfg)
    return 0 if spec is None else file_nbytes(spec, cfg.model.weights)


def file_nbytes(spec: DenseSpec, weights: Weights) -> int:
    """Return the size of the file that a model becomes."""
    header, nbytes = make_header(_as_stored(spec, weights, {}))
    return len(header) + nbytes


def sources(spec: DenseSpec) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yield what becomes what, in file order: unit, name in the release, name in the file, shape."""
    for layer in range(spec.depth):
        for name, shape in spec.layer_shapes().items():
            full = f"model.layers.{layer}.{name}"
            yield f"layer {layer}", full, full, shape
    yield HEAD_UNIT, EMBEDDING if spec.is_tied else HEAD, HEAD, (spec.vocab_size, spec.hidden)


def _as_stored(
    spec: DenseSpec, weights: Weights, dtypes: Mapping[str, str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the file's tensors: name -> (dtype, shape).  dtypes: of what is copied; BF16 where one is not known."""
    out = {}
    for _, source, name, shape in sources(spec):
        for part, entry in entries(name, shape, weights).items():
            is_copied = len(entry.dtypes) > 1
            out[part] = (dtypes.get(source, "BF16") if is_copied else entry.dtypes[0], entry.shape)
    return out


def run(ctx: StageContext) -> None:
    """Write header and layers at their final offsets; a layer is journalled when its bytes are on the disk."""
    snapshot = snapshot_of(ctx.inputs["download"])
    checkpoint, weights = Checkpoint.open(snapshot), ctx.cfg.model.weights
    spec = load_family("dense").read_spec(snapshot)
    LayerLayout(checkpoint, spec)  # refuses what this family does not know
    dtypes = {name: info.dtype for name, info in checkpoint.tensors.items()}
    header, nbytes = make_header(_as_stored(spec, weights, dtypes))
    places = json.loads(header[8:])
    units: dict[str, list[tuple[TensorInfo, str]]] = {}
    for unit, source, name, _ in sources(spec):
        units.setdefault(unit, []).append((checkpoint.info(source), name))
    device = hardware.resolve_device(ctx.cfg.hw.device)
    fd = os.open(ctx.out / LAYERS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, len(header) + nbytes)
        _write(fd, header, 0)
        for unit in ctx.todo(list(units), "layers"):
            for info, name in units[unit]:
                wanted = entries(name, info.shape, weights)
                for part, raw in convert(checkpoint, info, wanted, device).items():
                    start, end = places[part]["data_offsets"]
                    assert len(raw) == end - start
                    _write(fd, raw, len(header) + start)
            os.fsync(fd)
            ctx.done(unit)
    finally:
        os.close(fd)
    ctx.facts["nbytes"] = len(header) + nbytes


def _write(fd: int, raw: bytes | bytearray, at: int) -> None:
    view = memoryview(raw)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written


def convert(
    checkpoint: Checkpoint, info: TensorInfo, wanted: Mapping[str, Entry], device: torch.device
) -> dict[str, bytes | bytearray]:
    """Return the bytes of the tensors that one becomes, the same on every device.

    wanted: as `entries` gives them, in that order.
    """
    names = list(wanted)
    if len(names) == 1:
        return {names[0]: checkpoint.read(info)}
    matrix = checkpoint.load(info.name).to(device)
    parts: tuple[torch.Tensor, ...]
    if len(names) == 2:
        rounded = [int8_rows_quantize(rows) for rows in matrix.split(ROWS)]
        parts = tuple(torch.cat(part) for part in zip(*rounded, strict=True))
    else:
        amax = matrix.abs().amax().float()
        rounded4 = [nvfp4_quantize(rows, amax, PEAKS) for rows in matrix.split(ROWS)]
        codes, scales, global_scale = zip(*rounded4, strict=True)
        parts = torch.cat(codes), torch.cat(scales), global_scale[0].reshape(1)
    for name, part in zip(names, parts, strict=True):
        assert tuple(part.shape) == wanted[name].shape, name
    return {
        name: part.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, part in zip(names, parts, strict=True)
    }


STAGE = Stage(
    name="quantize",
    run=run,
    params=params,
    needs=lambda _cfg: ("download",),
    disk_nbytes=disk_nbytes,
    expected_nbytes=expected_nbytes,
)
