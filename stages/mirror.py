"""Copy released shards with experts to the other drives of hw.drives, whole and checked by hash.

A copy appears under its name when its bytes were read back and are right; one that is there already is hashed, not
copied, so force=[mirror] checks every copy and mends what is not whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from conf.schema import RunConfig
from runtime.engine import EngineFiles, load_family
from runtime.errors import UserError, VerificationError
from runtime.experts.spread import DRIVES_NAME, PART_NAME, DrivesRecord, part_json
from runtime.units import format_nbytes
from stages.core import Runner
from stages.download import planned_spec, snapshot_of
from stages.files import file_digest, fsync_folder, sample_digest, write_atomically
from stages.parts import (
    bases,
    check_folders,
    check_sample,
    drive_errors,
    limits_nbytes,
    part_folders,
)
from stages.stage import Output, Stage, StageContext

log = logging.getLogger("stages")

CHUNK_NBYTES = 2**24


def expert_shards(cfg: RunConfig, download: Output) -> tuple[Path, ...]:
    """Return the files of the snapshot that experts are read from."""
    family, snapshot = load_family(cfg.model.family), snapshot_of(download)
    layout = family.expert_layout(family.read_spec(snapshot), EngineFiles(snapshot))
    files: tuple[Path, ...] = layout.files
    return files


def choose(files: Sequence[Path], limit_nbytes: int | None) -> list[Path]:
    """Return the files that are copied to a drive: in order, as long as its limit holds them."""
    chosen, left = [], limit_nbytes
    for file in files:
        nbytes = file.stat().st_size
        if left is None or nbytes <= left:
            chosen.append(file)
            left = None if left is None else left - nbytes
    return chosen


def run(ctx: StageContext) -> None:
    """Copy shard after shard; one is journalled when its copy is whole."""
    cfg, download = ctx.cfg, ctx.inputs["download"]
    check_folders(cfg, snapshot_of(download))
    files = expert_shards(cfg, download)
    folders = part_folders(ctx.runner, "mirror")
    names: list[tuple[str, ...]] = []
    work: dict[str, tuple[int, Path]] = {}
    for drive, limit in enumerate(limits_nbytes(cfg)):
        is_original = cfg.hw.drives[drive].folder is None
        chosen = list(files) if is_original else choose(files, limit)
        names.append(tuple(file.name for file in chosen))
        if not is_original:
            work |= {f"{drive}/{file.name}": (drive, file) for file in chosen}
    lacking = {file.name for file in files} - {name for each in names for name in each}
    if lacking:
        raise UserError(
            f"the limits of hw.drives leave {len(lacking)} of {len(files)} shards without a place: "
            f"{', '.join(sorted(lacking)[:3])}",
            "raise hw.drives[i].limit_gib, or add a drive without a folder: the shards as they are",
        )
    for unit, (drive, file) in work.items():  # journalled, and gone since
        copy = folders[drive] / file.name
        if unit in ctx.units and not (copy.exists() and copy.stat().st_size == file.stat().st_size):
            del ctx.units[unit]
    for unit in ctx.todo(list(work), "shards"):
        drive, file = work[unit]
        with drive_errors("mirror", drive, folders[drive].parent.parent):
            digest = _bring(file, folders[drive], _recorded(download, file))
        ctx.done(unit, blake3=digest)
    token = download.record["digest"]
    kept = [
        "" if drive.folder is None else str(folder)
        for drive, folder in zip(cfg.hw.drives, folders, strict=True)
    ]
    for drive, folder in enumerate(kept):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_atomically(Path(folder) / PART_NAME, part_json(token, drive))
    record = DrivesRecord(cfg.hw.spread.value, token, tuple(kept), files=tuple(names))
    write_atomically(ctx.out / DRIVES_NAME, record.to_json())
    copies = [folders[drive] / file.name for drive, file in work.values()]
    ctx.facts = {
        "copies": len(copies),
        "nbytes": sum(copy.stat().st_size for copy in copies),
        "samples": {str(copy): sample_digest(copy) for copy in copies},
    }


def _recorded(download: Output, file: Path) -> str | None:
    """Return the hash of a shard that the download stage found, where it recorded one."""
    entry = download.record["files"].get(str(file.resolve()))
    return None if entry is None else str(entry["blake3"])


def _bring(source: Path, folder: Path, recorded: str | None) -> str:
    """Have a whole copy of `source` in `folder`; returns its hash. Raises VerificationError."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = folder / source.name
    if copy.exists() and copy.stat().st_size == source.stat().st_size:
        wanted = recorded or file_digest(source)
        if file_digest(copy) == wanted:
            return wanted
        log.warning("mirror: %s is not what was copied: it is copied again", copy)
    temporary = copy.with_name(copy.name + ".partial")
    digest = _copy(source, temporary)
    if recorded is not None and digest != recorded:
        raise VerificationError(
            f"{source} is not what was fetched: its hash is {digest}, {recorded} was recorded",
            "run stages=[download] force=[download]",
        )
    found = file_digest(temporary)
    if found != digest:
        raise VerificationError(
            f"{temporary} reads back wrong: its hash is {found}, {digest} was written",
            "see the kernel log (dmesg): this drive or its link may be failing",
        )
    temporary.rename(copy)
    fsync_folder(folder)
    return digest


def _copy(source: Path, target: Path) -> str:
    """Copy a file, wait for the drive, and have the page cache forget it; returns the hash of what was read."""
    hasher = blake3(max_threads=blake3.AUTO)
    with open(source, "rb") as read, open(target, "wb") as written:
        os.posix_fallocate(written.fileno(), 0, max(1, os.fstat(read.fileno()).st_size))
        while chunk := read.read(CHUNK_NBYTES):
            hasher.update(chunk)
            written.write(chunk)
        written.flush()
        written.truncate()
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return hasher.hexdigest(length=16)


def elsewhere(runner: Runner, inputs: Mapping[str, Output] | None) -> Mapping[Path, int]:
    """Return what is still to be copied to each drive; of shards that are not here, the bytes of the experts."""
    cfg = runner.cfg
    needed: dict[Path, int] = {}
    drives, limits = cfg.hw.drives, limits_nbytes(cfg)
    homes, folders = bases(cfg, runner.root.parent), part_folders(runner, "mirror")
    files = () if inputs is None else expert_shards(cfg, inputs["download"])
    for drive, base, folder, limit in zip(drives, homes, folders, limits, strict=True):
        if drive.folder is None:
            continue
        if inputs is None:
            whole = _expected_nbytes(cfg)
            nbytes = whole if limit is None else min(limit, whole)
        else:
            chosen = choose(files, limit)
            nbytes = sum(f.stat().st_size for f in chosen if not (folder / f.name).exists())
        needed[base] = needed.get(base, 0) + nbytes
    return needed


def _expected_nbytes(cfg: RunConfig) -> int:
    spec = planned_spec(cfg)
    if spec is None:
        return 0
    sizes = load_family(cfg.model.family).planned_sizes(spec, cfg, torch.bfloat16, False)
    return int(sizes.num_layers * sizes.num_experts * sizes.record_nbytes)


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides which copies lie where."""
    return {
        "folders": [drive.folder for drive in cfg.hw.drives],
        "limits_nbytes": limits_nbytes(cfg),
    }


def show(_cfg: RunConfig, output: Output) -> None:
    """Say what is there."""
    facts = output.facts
    log.info("mirror: %d copies of shards, %s", facts["copies"], format_nbytes(facts["nbytes"]))


def watch(_cfg: RunConfig, output: Output) -> None:
    """Look at samples of the copies that are there, as the runner does of other files."""
    for path, sample in output.facts["samples"].items():
        check_sample(Path(path), sample, "mirror")


STAGE = Stage(
    name="mirror",
    run=run,
    params=params,
    needs=lambda _cfg: ("download",),
    elsewhere=elsewhere,
    show=show,
    watch=watch,
)
