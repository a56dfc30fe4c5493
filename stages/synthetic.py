"""Write a checkpoint of random bytes: the released names, dtypes and shapes, fewer layers and experts, any disk budget.

Owns the stage: what is written when, and how it goes on after a stop. Which tensors there are and what stands in them
is the family's, `stages/synthetic_<family>.py`. Knows no engine: the stages behind it take its folder for a snapshot.
Its numbers mean nothing, the bytes and operations of a token are the release's. Routing is only as uneven as the skew
makes it: the release's locality from token to token is not imitated, nor how well its next layer can be guessed, so
hit rates measured here are not the release's.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from conf.schema import RunConfig, Source
from runtime.checkpoint import INDEX_NAME
from runtime.errors import UserError
from stages.files import write_atomically
from stages.stage import Output, Stage, StageContext
from stages.synthetic_parts import Tensor, make_header


class Bytes(Protocol):
    """What stands in the tensors of one plan and seed."""

    def shard(self, number: int) -> Iterator[bytes | memoryview]:
        """Yield the data of weight file `number`, in the order of `shard_tensors`."""


class Family(Protocol):
    """What `stages/synthetic_<family>.py` offers. A plan is all that decides the bytes, but for seed and skew."""

    METADATA: dict[str, str]  # of every shard's header
    ALIGN_NBYTES: int  # of a shard's data

    def make_plan(self, cfg: RunConfig) -> Any:
        """Return the sizes that fit the budget. Raises UserError for those that do not, or that cannot be."""

    def params(self, plan: Any) -> dict[str, Any]:
        """Return what decides the bytes, but for seed and skew; `layers` and `experts` are among it."""

    def setup_nbytes(self, plan: Any) -> int:
        """Return what the whole set-up takes on the disk, at most."""

    def shard_names(self, plan: Any) -> list[str]:
        """Return the weight files in the order in which they are made."""

    def shard_tensors(self, plan: Any, number: int) -> list[Tensor]:
        """Return the tensors of weight file `number` (its place in `shard_names`), in file order."""

    def small_files(self, plan: Any) -> dict[str, str]:
        """Return the files besides weights and index: name -> text."""

    def Writer(self, plan: Any, seed: int, skew: float) -> Bytes:  # noqa: N802 - a class
        """Return what makes the bytes."""


def load_family(cfg: RunConfig) -> Family:
    """Return the module of a family. Raises UserError for a model that is not synthetic."""
    if cfg.model.source is not Source.synthetic:
        raise UserError(
            f"model={cfg.model.name} is not synthetic: its source is {cfg.model.source.value}",
            f"python run.py model={cfg.model.family}_synthetic stages=[synthetic]",
        )
    family: Family = importlib.import_module(f"stages.synthetic_{cfg.model.family}")
    return family


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides the bytes: sizes that are chosen already, not the budget that they were chosen by."""
    family, wanted = load_family(cfg), cfg.model.synthetic
    return family.params(family.make_plan(cfg)) | {"skew": wanted.skew, "seed": wanted.seed}


def disk_nbytes(cfg: RunConfig, _inputs: Mapping[str, Output]) -> int:
    """Return what the whole set-up will take: repack and residents cannot say it before this stage has run."""
    family = load_family(cfg)
    return family.setup_nbytes(family.make_plan(cfg))


def run(ctx: StageContext) -> None:
    """Write one weight file after the other; one is journalled when its bytes are on the disk."""
    family, wanted = load_family(ctx.cfg), ctx.cfg.model.synthetic
    plan = family.make_plan(ctx.cfg)
    shards = {
        name: family.shard_tensors(plan, number)
        for number, name in enumerate(family.shard_names(plan))
    }
    names = list(shards)
    writer = family.Writer(plan, wanted.seed, wanted.skew)
    layer_nbytes = sum(tensor.nbytes for tensor in shards[names[1]])
    for name in ctx.todo(names, "weight files", layer_nbytes):
        header = make_header(shards[name], family.METADATA, family.ALIGN_NBYTES)
        nbytes = len(header) + sum(tensor.nbytes for tensor in shards[name])
        pieces = writer.shard(names.index(name))
        ctx.done(name, blake3=_write_shard(ctx.out / name, header, nbytes, pieces))
    ctx.digests |= {name: ctx.units[name]["blake3"] for name in names}
    index = json.dumps(_index(shards), separators=(",", ":"))
    write_atomically(ctx.out / INDEX_NAME, index + "\n")
    for name, text in family.small_files(plan).items():
        write_atomically(ctx.out / name, text)
    made = family.params(plan)
    ctx.facts = {
        "layers": made["layers"],
        "experts": made["experts"],
        "nbytes": sum((ctx.out / name).stat().st_size for name in names),
    }


def _index(shards: Mapping[str, Sequence[Tensor]]) -> dict[str, Any]:
    """Return what the checkpoint's index file says: which tensor is in which file."""
    return {
        "metadata": {"total_size": sum(t.nbytes for tensors in shards.values() for t in tensors)},
        "weight_map": {t.name: name for name, tensors in shards.items() for t in tensors},
    }


def _write_shard(
    path: Path, header: bytes, nbytes: int, pieces: Iterator[bytes | memoryview]
) -> str:
    """Write a weight file of `nbytes` from its first byte and wait for the disk. Returns its hash."""
    hasher = blake3()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a full disk shows now, not at the last expert
        at = _pwrite_all(fd, header, 0)
        hasher.update(header)
        for piece in pieces:
            hasher.update(piece)
            at = _pwrite_all(fd, piece, at)
        assert at == nbytes, f"{path.name}: {at} bytes of {nbytes} were made"
        os.fsync(fd)
    finally:
        os.close(fd)
    return hasher.hexdigest(length=16)


def _pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write all of `data`; return the offset behind it."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    return offset


STAGE = Stage(name="synthetic", run=run, params=params, disk_nbytes=disk_nbytes)
