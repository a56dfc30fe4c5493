"""Turn a checkpoint's experts into a pack: one page-aligned block per expert, in layer order, bytes verbatim."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from conf.schema import RunConfig, Spread
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
from runtime.experts.placement import Placement, place
from runtime.experts.spread import DrivesRecord, weights_of
from runtime.models import qwen_weights as weights
from stages.core import Runner
from stages.download import planned_spec, snapshot_of
from stages.files import write_atomically
from stages.parts import Parts, check_folders, check_samples, limits_nbytes, room_needed
from stages.stage import Output, Stage, StageContext


def disk_nbytes(cfg: RunConfig, inputs: Mapping[str, Output]) -> int:
    """Return the size of the finished pack, without what goes to hw.drives."""
    return _pack_nbytes(cfg, load_family(cfg.model.family).read_spec(snapshot_of(inputs["download"])))  # fmt: skip


def expected_nbytes(cfg: RunConfig) -> int:
    """Return the same before the snapshot is here, from the released config.json; 0 without one."""
    spec = planned_spec(cfg)
    return 0 if spec is None else _pack_nbytes(cfg, spec)


def elsewhere(runner: Runner, inputs: Mapping[str, Output] | None) -> Mapping[Path, int]:
    """Return what goes to each of hw.drives."""
    cfg = runner.cfg
    spec = (
        planned_spec(cfg)
        if inputs is None
        else load_family(cfg.model.family).read_spec(snapshot_of(inputs["download"]))
    )
    if not cfg.hw.drives or spec is None:
        return {}
    placement = placement_of(cfg, spec)
    sizes = [placement.file_nbytes(drive) for drive in range(len(cfg.hw.drives))]
    return room_needed(runner, "repack", sizes)


def placement_of(cfg: RunConfig, spec: weights.QwenSpec) -> Placement:
    """Return which of hw.drives gets which expert. Raises UserError when their limits are too small."""
    shape = Nvfp4Shape(spec.hidden, spec.intermediate)
    return place(
        cfg.hw.spread,
        spec.num_layers,
        spec.num_experts,
        shape.record_nbytes,
        weights_of(cfg.hw),
        limits_nbytes(cfg),
    )


def _pack_nbytes(cfg: RunConfig, spec: weights.QwenSpec) -> int:
    shape = Nvfp4Shape(spec.hidden, spec.intermediate)
    here = 0 if cfg.hw.drives else shape.record_nbytes
    return int(
        spec.num_layers * spec.num_experts * (here + CHECKSUM_NBYTES + 4 * SCALARS_PER_EXPERT)
    )


def run(ctx: StageContext) -> None:
    """Write one layer after the other; a layer is journalled when its bytes are on the disk."""
    snapshot = snapshot_of(ctx.inputs["download"])
    checkpoint = Checkpoint.open(snapshot)
    spec = load_family(ctx.cfg.model.family).read_spec(snapshot)
    ctx.facts["tensors"] = weights.account(checkpoint, spec)
    shape = Nvfp4Shape(spec.hidden, spec.intermediate)
    layer_nbytes = spec.num_experts * shape.record_nbytes
    sizes = {
        PACK_SCALARS: 4 * SCALARS_PER_EXPERT * spec.num_experts,
        CHECKSUMS_NAME: CHECKSUM_NBYTES * spec.num_experts,
    }
    with contextlib.ExitStack() as opened:
        fds = {
            name: _open_file(ctx.out / name, nbytes * spec.num_layers, opened)
            for name, nbytes in sizes.items()
        }
        blocks: Blocks = (
            _OnDrives(ctx, spec, opened) if ctx.cfg.hw.drives else _OneFile(ctx.out, spec, opened)
        )
        for unit in ctx.todo([str(i) for i in range(spec.num_layers)], "layers", layer_nbytes):
            digest = _write_layer(checkpoint, spec, int(unit), blocks, fds, sizes)
            ctx.done(unit, blake3=digest)
        ctx.facts |= blocks.finish()
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
    digest = "layers:" + blake3(layers.encode()).hexdigest(length=16)
    if ctx.cfg.hw.drives:
        ctx.facts["blocks"] = digest
    else:
        ctx.digests[PACK_BLOCKS] = digest
    ctx.facts["record_nbytes"] = shape.record_nbytes


class Blocks(Protocol):
    """Where the blocks of all experts go."""

    def write(self, key: ExpertKey, block: bytearray) -> None:
        """Write an expert's block."""

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""

    def finish(self) -> dict[str, Any]:
        """Note that all blocks are written; return what the record is to say of them."""


class _OneFile:
    """All blocks in one file of the stage's folder."""

    def __init__(self, out: Path, spec: weights.QwenSpec, opened: contextlib.ExitStack) -> None:
        self._num_experts = spec.num_experts
        nbytes = spec.num_layers * spec.num_experts * _record_nbytes(spec)
        self._fd = _open_file(out / PACK_BLOCKS, nbytes, opened)

    def write(self, key: ExpertKey, block: bytearray) -> None:
        at = self._num_experts * key.layer + key.expert
        _pwrite_all(self._fd, block, at * len(block))

    def sync(self) -> None:
        os.fsync(self._fd)

    def finish(self) -> dict[str, Any]:
        return {}


class _OnDrives:
    """Each block, or each slice of it, in the files of the drives that shall hold it."""

    def __init__(self, ctx: StageContext, spec: weights.QwenSpec, opened: contextlib.ExitStack) -> None:  # fmt: skip
        cfg = ctx.cfg
        check_folders(cfg, ctx.runner.root.parent)
        self._placement = placement_of(cfg, spec)
        self._sizes = [self._placement.file_nbytes(drive) for drive in range(len(cfg.hw.drives))]
        record = DrivesRecord(
            cfg.hw.spread.value,
            weights=tuple(weights_of(cfg.hw)),
            limits_nbytes=tuple(limits_nbytes(cfg)),
        )
        self._parts = opened.enter_context(Parts(ctx, record, self._sizes))

    def write(self, key: ExpertKey, block: bytearray) -> None:
        view = memoryview(block)
        for copy in self._placement.copies(key):
            for span in copy:
                slice_ = view[span.dest : span.dest + span.nbytes]
                self._parts.write(span.file_idx, slice_, span.offset)

    def sync(self) -> None:
        self._parts.sync()

    def finish(self) -> dict[str, Any]:
        return {"drive_nbytes": self._sizes, "samples": self._parts.publish()}


def _write_layer(
    checkpoint: Checkpoint,
    spec: weights.QwenSpec,
    layer: int,
    blocks: Blocks,
    fds: Mapping[str, int],
    sizes: Mapping[str, int],
) -> str:
    """Write a layer's blocks, scalars and checksums, and wait for the disk. Returns the hash of its blocks."""
    hasher = blake3()
    scalars, checksums = array("f"), bytearray()
    for expert in range(spec.num_experts):
        key = ExpertKey(layer, expert)
        block = weights.read_expert_block(checkpoint, spec, key)
        blocks.write(key, block)
        hasher.update(block)
        checksums += blake3(block).digest(length=CHECKSUM_NBYTES)
        scalars.extend(weights.read_expert_scalars(checkpoint, key))
    _pwrite_all(fds[PACK_SCALARS], scalars.tobytes(), layer * sizes[PACK_SCALARS])
    _pwrite_all(fds[CHECKSUMS_NAME], checksums, layer * sizes[CHECKSUMS_NAME])
    blocks.sync()
    for fd in fds.values():
        os.fsync(fd)
    return hasher.hexdigest(length=16)


def _record_nbytes(spec: weights.QwenSpec) -> int:
    return Nvfp4Shape(spec.hidden, spec.intermediate).record_nbytes


def _open_file(path: Path, nbytes: int, opened: contextlib.ExitStack) -> int:
    """Open a file of `nbytes` for writing: a full disk shows now, not in the last layer."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    opened.callback(os.close, fd)
    os.posix_fallocate(fd, 0, nbytes)
    return fd


def _pwrite_all(fd: int, data: bytes | bytearray, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides the bytes besides the checkpoint, and where they lie."""
    found: dict[str, Any] = {"layout": PACK_VERSION}
    if cfg.hw.drives:
        is_mirror = cfg.hw.spread is Spread.mirror
        found |= {
            "spread": cfg.hw.spread.value,
            "folders": [drive.folder for drive in cfg.hw.drives],
            "limits_nbytes": limits_nbytes(cfg),
            "weights": None if is_mirror else weights_of(cfg.hw),
        }
    return found


def watch(_cfg: RunConfig, output: Output) -> None:
    """Look at samples of the parts on hw.drives, as the runner does of other files."""
    if "samples" in output.facts:
        check_samples(output, output.facts["samples"])


STAGE = Stage(
    name="repack",
    run=run,
    params=params,
    needs=lambda _cfg: ("download",),
    disk_nbytes=disk_nbytes,
    expected_nbytes=expected_nbytes,
    elsewhere=elsewhere,
    watch=watch,
)
