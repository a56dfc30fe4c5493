"""Put everything that is not an expert into one safetensors file, in the form in which it is computed with."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch

from conf.schema import Deltanet, RunConfig
from kernels.formats import fp8_rows_quantize
from runtime.checkpoint import DTYPE_NBYTES, Checkpoint
from runtime.engine import load_family
from runtime.models import qwen_weights as weights
from stages.download import planned_spec, snapshot_of
from stages.files import write_atomically
from stages.stage import Output, Stage, StageContext

ALIGN_NBYTES = 64


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides the bytes besides the checkpoint."""
    return {"deltanet": cfg.model.deltanet.value}


def disk_nbytes(cfg: RunConfig, inputs: Mapping[str, Output]) -> int:
    """Return the size of the finished file."""
    snapshot = snapshot_of(inputs["download"])
    spec = load_family(cfg.model.family).read_spec(snapshot)
    entries = plan_entries(Checkpoint.open(snapshot), spec, cfg.model.deltanet)
    header, nbytes = make_header(_tensors(entries))
    return len(header) + nbytes


def expected_nbytes(cfg: RunConfig) -> int:
    """Return about the same before the snapshot is here, from the released config.json; 0 without one."""
    spec = planned_spec(cfg)
    if spec is None:
        return 0
    header, nbytes = make_header(spec.kept_shapes(cfg.model.deltanet is Deltanet.fp8_rows))
    return len(header) + nbytes


def plan_entries(
    checkpoint: Checkpoint, spec: weights.QwenSpec, deltanet: Deltanet
) -> list[tuple[weights.Resident, dict[str, tuple[str, tuple[int, ...]]]]]:
    """Return each resident with the tensors that it becomes: name -> (dtype, shape)."""
    entries = []
    for resident in weights.read_residents(checkpoint, spec, deltanet is Deltanet.fp8_rows):
        shape = resident.info.shape
        if resident.is_fp8_rows:
            tensors = {
                resident.name: ("F8_E4M3", shape),
                f"{resident.name}_scale": ("F32", shape[:1]),
            }
        else:
            tensors = {resident.name: (resident.info.dtype, shape)}
        entries.append((resident, tensors))
    return entries


def _tensors(
    entries: list[tuple[weights.Resident, dict[str, tuple[str, tuple[int, ...]]]]],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: entry for _, tensors in entries for name, entry in tensors.items()}


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    """Return the file's header (length prefix included) and the bytes of data behind it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = DTYPE_NBYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_NBYTES)
    return struct.pack("<Q", len(text)) + text, at


def run(ctx: StageContext) -> None:
    """Write header and layers at their final offsets; a layer is journalled when its bytes are on the disk."""
    snapshot = snapshot_of(ctx.inputs["download"])
    checkpoint = Checkpoint.open(snapshot)
    spec = load_family(ctx.cfg.model.family).read_spec(snapshot)
    ctx.facts["tensors"] = weights.account(checkpoint, spec)
    entries = plan_entries(checkpoint, spec, ctx.cfg.model.deltanet)
    header, nbytes = make_header(_tensors(entries))
    offsets = {
        name: entry["data_offsets"]
        for name, entry in json.loads(header[8:]).items()
        if name != "__metadata__"
    }
    units = {unit: list(group) for unit, group in groupby(entries, key=lambda entry: entry[0].unit)}
    assert sum(map(len, units.values())) == len(entries), (
        "residents of one unit must stand together"
    )
    fd = os.open(ctx.out / weights.RESIDENTS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, len(header) + nbytes)
        os.pwrite(fd, header, 0)
        for unit in ctx.todo(list(units), "layers"):
            for resident, _ in units[unit]:
                for name, raw in convert(checkpoint, resident).items():
                    start, end = offsets[name]
                    assert len(raw) == end - start
                    view, at = memoryview(raw), len(header) + start
                    while view:
                        written = os.pwrite(fd, view, at)
                        view, at = view[written:], at + written
            os.fsync(fd)
            ctx.done(unit)
    finally:
        os.close(fd)
    table, scale = weights.read_ngram_table(checkpoint, spec)
    write_atomically(
        ctx.out / weights.TABLES_NAME,
        json.dumps(weights.table_to_json(table, scale, snapshot), indent=1) + "\n",
    )
    ctx.facts["nbytes"] = len(header) + nbytes


def convert(checkpoint: Checkpoint, resident: weights.Resident) -> dict[str, bytes | bytearray]:
    """Return the bytes of the tensors that a resident becomes."""
    if not resident.is_fp8_rows:
        return {resident.name: checkpoint.read(resident.info)}
    values, scales = fp8_rows_quantize(checkpoint.load(resident.info.name))
    return {
        resident.name: values.view(torch.uint8).numpy().tobytes(),
        f"{resident.name}_scale": scales.numpy().tobytes(),
    }


STAGE = Stage(
    name="residents",
    run=run,
    params=params,
    needs=lambda _cfg: ("download",),
    disk_nbytes=disk_nbytes,
    expected_nbytes=expected_nbytes,
)
