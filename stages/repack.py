"""Turn a checkpoint's experts into a pack: one page-aligned block per expert, in layer order, bytes verbatim."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from conf.schema import RunConfig
from runtime.checkpoint import Checkpoint
from runtime.engine import load_family
from runtime.experts.layout import (
    CHECKSUM_NBYTES,
    CHECKSUMS_NAME,
    PACK_BLOCKS,
    PACK_HEADER,
    PACK_SCALARS,
    PACK_VERSION,
    SCALARS_PER_EXPERT,
    ExpertKey,
    Nvfp4Shape,
    PackHeader,
)
from runtime.models import qwen_weights as weights
from stages.core import Output, Stage, StageContext
from stages.download import planned_spec, snapshot_of
from stages.files import write_atomically


def disk_nbytes(_cfg: RunConfig, inputs: Mapping[str, Output]) -> int:
    """Return the size of the finished pack."""
    return _pack_nbytes(load_family(_cfg.model.family).read_spec(snapshot_of(inputs["download"])))


def expected_nbytes(cfg: RunConfig) -> int:
    """Return the same before the snapshot is here, from the released config.json; 0 without one."""
    spec = planned_spec(cfg)
    return 0 if spec is None else _pack_nbytes(spec)


def _pack_nbytes(spec: weights.QwenSpec) -> int:
    block = (
        Nvfp4Shape(spec.hidden, spec.intermediate).record_nbytes
        + CHECKSUM_NBYTES
        + 4 * SCALARS_PER_EXPERT
    )
    return int(spec.num_layers * spec.num_experts * block)


def run(ctx: StageContext) -> None:
    """Write one layer after the other; a layer is journalled when its bytes are on the disk."""
    snapshot = snapshot_of(ctx.inputs["download"])
    checkpoint = Checkpoint.open(snapshot)
    spec = load_family(ctx.cfg.model.family).read_spec(snapshot)
    ctx.facts["tensors"] = weights.account(checkpoint, spec)
    shape = Nvfp4Shape(spec.hidden, spec.intermediate)
    layer_nbytes = spec.num_experts * shape.record_nbytes
    sizes = {
        PACK_BLOCKS: layer_nbytes,
        PACK_SCALARS: 4 * SCALARS_PER_EXPERT * spec.num_experts,
        CHECKSUMS_NAME: CHECKSUM_NBYTES * spec.num_experts,
    }
    fds = {
        name: os.open(ctx.out / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for name in sizes
    }
    try:
        for name, nbytes in sizes.items():
            os.posix_fallocate(
                fds[name], 0, spec.num_layers * nbytes
            )  # a full disk shows now, not in the last layer
        for unit in ctx.todo([str(i) for i in range(spec.num_layers)], "layers", layer_nbytes):
            digest = _write_layer(checkpoint, spec, int(unit), fds, sizes)
            ctx.done(unit, blake3=digest)
    finally:
        for fd in fds.values():
            os.close(fd)
    header = PackHeader(
        version=PACK_VERSION,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        record_nbytes=shape.record_nbytes,
        payload_nbytes=shape.payload_nbytes,
        source_revision=ctx.cfg.model.revision,
    )
    write_atomically(ctx.out / PACK_HEADER, header.to_json())
    layers = "".join(ctx.units[str(i)]["blake3"] for i in range(spec.num_layers))
    ctx.digests[PACK_BLOCKS] = "layers:" + blake3(layers.encode()).hexdigest(length=16)
    ctx.facts["record_nbytes"] = shape.record_nbytes


def _write_layer(
    checkpoint: Checkpoint,
    spec: weights.QwenSpec,
    layer: int,
    fds: Mapping[str, int],
    sizes: Mapping[str, int],
) -> str:
    """Write a layer's blocks, scalars and checksums, and wait for the disk. Returns the hash of its blocks."""
    hasher = blake3()
    scalars, checksums = array("f"), bytearray()
    for expert in range(spec.num_experts):
        key = ExpertKey(layer, expert)
        block = weights.read_expert_block(checkpoint, spec, key)
        _pwrite_all(fds[PACK_BLOCKS], block, layer * sizes[PACK_BLOCKS] + expert * len(block))
        hasher.update(block)
        checksums += blake3(block).digest(length=CHECKSUM_NBYTES)
        scalars.extend(weights.read_expert_scalars(checkpoint, key))
    _pwrite_all(fds[PACK_SCALARS], scalars.tobytes(), layer * sizes[PACK_SCALARS])
    _pwrite_all(fds[CHECKSUMS_NAME], checksums, layer * sizes[CHECKSUMS_NAME])
    for fd in fds.values():
        os.fsync(fd)
    return hasher.hexdigest(length=16)


def _pwrite_all(fd: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def params(_cfg: RunConfig) -> dict[str, Any]:
    """Return what decides the bytes besides the checkpoint."""
    return {"layout": PACK_VERSION}


STAGE = Stage(
    name="repack",
    run=run,
    params=params,
    needs=lambda _cfg: ("download",),
    disk_nbytes=disk_nbytes,
    expected_nbytes=expected_nbytes,
)
