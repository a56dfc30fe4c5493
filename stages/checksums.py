"""Record a checksum of every expert that is read inside released files, for `cache.verify` and `spot_check`.

Each file is read once, from its first byte to its last: its own hash must be the one that `download` recorded, and the
experts' are of the very same bytes. A finished file is a unit. Packed experts have theirs from `repack`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from conf.schema import RunConfig
from runtime.engine import EngineFiles, load_family
from runtime.errors import VerificationError
from runtime.experts.checks import all_runs
from runtime.experts.layout import CHECKSUM_NBYTES, CHECKSUMS_NAME, ExpertLayout
from stages.download import snapshot_of
from stages.stage import Output, Stage, StageContext

CHUNK_NBYTES = 2**24


class Run(NamedTuple):
    """Bytes of one expert that lie together in a file."""

    start: int
    end: int
    number: int  # of the checksum


def run(ctx: StageContext) -> None:
    """Hash file after file; raise VerificationError for one that is not what `download` has checked."""
    download = ctx.inputs["download"]
    layout = layout_of(ctx.cfg, snapshot_of(download))
    by_file: dict[int, list[Run]] = {i: [] for i in range(len(layout.files))}
    runs = all_runs(layout)
    for number, span in enumerate(runs):
        by_file[span.file_idx].append(Run(span.offset, span.offset + span.need_nbytes, number))
    recorded = {Path(name): entry["blake3"] for name, entry in download.record["files"].items()}
    total = sum(path.stat().st_size for path in layout.files)
    fd = os.open(ctx.out / CHECKSUMS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, CHECKSUM_NBYTES * len(runs))
        numbers = [str(i) for i in range(len(layout.files))]
        for unit in ctx.todo(numbers, "files hashed", total // len(numbers)):
            path = layout.files[int(unit)]
            whole, digests = hash_runs(path, by_file[int(unit)])
            if whole != recorded.get(path.resolve()):
                raise VerificationError(
                    f"{path} has the hash {whole}, download recorded {recorded.get(path.resolve())}: it was damaged "
                    "or changed since then",
                    "fetch it again: stages=[download] force=[download]",
                )
            for number, digest in digests.items():
                os.pwrite(fd, digest, CHECKSUM_NBYTES * number)
            os.fsync(fd)
            ctx.done(unit)
    finally:
        os.close(fd)
    ctx.facts = {"experts": layout.num_layers * layout.num_experts, "nbytes": total}


def layout_of(cfg: RunConfig, snapshot: Path) -> ExpertLayout:
    """Return where a snapshot's experts lie."""
    family = load_family(cfg.model.family)
    layout: ExpertLayout = family.expert_layout(family.read_spec(snapshot), EngineFiles(snapshot))
    return layout


def hash_runs(path: Path, runs: Sequence[Run]) -> tuple[str, dict[int, bytes]]:
    """Return a file's hash, and number -> checksum of each run in it, from one reading. Runs may share bytes."""
    whole = blake3(max_threads=blake3.AUTO)
    waiting = sorted(runs, reverse=True)
    open_runs: list[tuple[Run, Any]] = []
    digests: dict[int, bytes] = {}
    at = 0
    with open(path, "rb") as f:
        while data := memoryview(f.read(CHUNK_NBYTES)):
            whole.update(data)
            while waiting and waiting[-1].start < at + len(data):
                open_runs.append((waiting.pop(), blake3()))
            for entry in open_runs[:]:
                found, hasher = entry
                hasher.update(data[max(0, found.start - at) : found.end - at])
                if found.end <= at + len(data):
                    digests[found.number] = hasher.digest(length=CHECKSUM_NBYTES)
                    open_runs.remove(entry)
            at += len(data)
    return whole.hexdigest(length=16), digests


def disk_nbytes(cfg: RunConfig, inputs: Mapping[str, Output]) -> int:
    """Return the size of all checksums."""
    return CHECKSUM_NBYTES * len(all_runs(layout_of(cfg, snapshot_of(inputs["download"]))))


STAGE = Stage(name="checksums", run=run, needs=lambda _cfg: ("download",), disk_nbytes=disk_nbytes)
