"""Read experts as an engine reads them, and compare: packed ones with the checkpoint, byte for byte; those inside
released files with their checksums.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from conf.schema import RunConfig
from runtime.checkpoint import Checkpoint
from runtime.engine import load_family
from runtime.errors import UserError, VerificationError
from runtime.experts.arena import HostArena
from runtime.experts.checks import Checksums
from runtime.experts.layout import (
    CHECKSUM_NBYTES,
    CHECKSUMS_NAME,
    ExpertKey,
    ExpertLayout,
    PackedLayout,
    Span,
)
from runtime.experts.reader import DirectReader
from runtime.experts.schedule import ReadJob
from runtime.experts.spread import SpreadPack, open_pack
from runtime.models import qwen_weights as weights
from stages.checksums import layout_of
from stages.download import snapshot_of
from stages.stage import Stage, StageContext

EXPERTS_PER_UNIT = 64

# a read and the spans that it was made of; raises VerificationError
Compare = Callable[[ExpertKey, ReadJob, Sequence[Span]], None]


def run(ctx: StageContext) -> None:
    """Check the chosen experts; raise VerificationError at the first difference, naming it."""
    snapshot = snapshot_of(ctx.inputs["download"])
    compare, layout = (
        _with_checkpoint(ctx, snapshot)
        if "repack" in ctx.inputs
        else _with_checksums(ctx, snapshot)
    )
    chosen = choose(ctx.cfg.spot_check.experts, ctx.cfg.spot_check.seed, layout)
    reader = DirectReader(layout.files, ctx.cfg.hw.drive, record_nbytes=layout.record_nbytes)
    row = HostArena(1, layout.record_nbytes)
    try:
        for unit in ctx.todo(
            [str(i) for i in range(0, len(chosen), EXPERTS_PER_UNIT)], "batches of experts"
        ):
            for key in chosen[int(unit) : int(unit) + EXPERTS_PER_UNIT]:
                for copy in _copies(layout, key):
                    job = reader.submit(key, copy, row.view(0))
                    reader.wait(job)
                    compare(key, job, copy)
            ctx.done(unit)
    finally:
        reader.close()
    ctx.facts = {
        "experts": len(chosen),
        "of": layout.num_layers * layout.num_experts,
        "nbytes": len(chosen) * layout.record_nbytes,
        "is_direct": reader.is_direct,
        "compared_with": "checkpoint" if "repack" in ctx.inputs else "checksums",
    }


def _with_checkpoint(ctx: StageContext, snapshot: Path) -> tuple[Compare, ExpertLayout]:
    """Compare packed experts with what the checkpoint's headers say of them."""
    pack = ctx.inputs["repack"].root
    checkpoint = Checkpoint.open(snapshot)
    spec = load_family(ctx.cfg.model.family).read_spec(snapshot)
    layout = open_pack(pack)
    _check_all_there(layout)
    scalars = weights.read_pack_scalars(pack, spec)

    def compare(key: ExpertKey, job: ReadJob, copy: Sequence[Span]) -> None:
        packed = bytes(job.buffer[: layout.record_nbytes])
        original = bytes(weights.read_expert_block(checkpoint, spec, key))
        compare_block(packed, original, key, layout, copy)
        _compare_checksum(packed, key, layout, pack)
        _compare_scalars(scalars, weights.read_expert_scalars(checkpoint, key), key, layout)

    return compare, layout


def _with_checksums(ctx: StageContext, snapshot: Path) -> tuple[Compare, ExpertLayout]:
    """Compare experts inside released files with checksums of bytes whose file hash `download` had checked."""
    layout = layout_of(ctx.cfg, snapshot)
    recorded = Checksums.open(layout, ctx.inputs["checksums"].root)

    def compare(_key: ExpertKey, job: ReadJob, _copy: Sequence[Span]) -> None:
        recorded.check(job)
        if job.error is not None:
            raise job.error

    return compare, layout


def _copies(layout: ExpertLayout, key: ExpertKey) -> Sequence[Sequence[Span]]:
    """Return the ways to read an expert: every copy in a pack; shards where they were fetched to."""
    return layout.copies(key) if isinstance(layout, PackedLayout) else (layout.spans(key),)


def choose(wanted: str, seed: int, layout: ExpertLayout) -> list[ExpertKey]:
    """Return which experts to check: all, or a seeded choice with the first, the last and one of every layer."""
    every = [
        ExpertKey(layer, e) for layer in range(layout.num_layers) for e in range(layout.num_experts)
    ]
    if wanted == "all":
        return every
    generator = random.Random(seed)
    chosen = {every[0], every[-1]}
    chosen |= {
        ExpertKey(layer, generator.randrange(layout.num_experts))
        for layer in range(layout.num_layers)
    }
    rest = [key for key in every if key not in chosen]
    extra = max(0, min(int(wanted), len(every)) - len(chosen))
    return sorted(chosen | set(generator.sample(rest, extra)))


def _check_all_there(layout: PackedLayout) -> None:
    """Raise UserError when a drive with copies is not there: they could not be checked."""
    if isinstance(layout, SpreadPack) and layout.missing:
        raise UserError(
            f"the copies on {', '.join(layout.places[drive] for drive in sorted(layout.missing))} cannot be checked: "
            "they are not there",
            "connect the drive, or make its part anew: stages=[repack] force=[repack]",
        )


def compare_block(
    packed: bytes, original: bytes, key: ExpertKey, layout: PackedLayout, copy: Sequence[Span]
) -> None:
    """Raise VerificationError naming layer, expert, part and offset of the first byte that differs, and its file.

    copy: the reads that the packed bytes are from.
    """
    if packed == original:
        return
    at = next(i for i, (a, b) in enumerate(zip(packed, original, strict=True)) if a != b)
    part, offset = "padding", at
    for name, (start, nbytes) in layout.shape.parts().items():
        if start <= at < start + nbytes:
            part, offset = name, at - start
    span = next(s for s in copy if s.dest <= at < s.dest + s.nbytes)
    place = f"byte {span.offset + at - span.dest:,} of {layout.files[span.file_idx]}"
    if isinstance(layout, SpreadPack):
        place += f", drive {layout.drive_of[span.file_idx]} of hw.drives"
    raise VerificationError(
        f"layer {key.layer}, expert {key.expert}, {part}, byte {offset:,}: the pack has 0x{packed[at]:02X}, the "
        f"checkpoint 0x{original[at]:02X} ({place})",
        "the pack is damaged: run the same command with force=[repack]",
    )


def _compare_checksum(packed: bytes, key: ExpertKey, layout: PackedLayout, pack: Path) -> None:
    at = CHECKSUM_NBYTES * (layout.num_experts * key.layer + key.expert)
    with open(pack / CHECKSUMS_NAME, "rb") as f:
        f.seek(at)
        recorded = f.read(CHECKSUM_NBYTES)
    if blake3(packed).digest(length=CHECKSUM_NBYTES) != recorded:
        raise VerificationError(
            f"layer {key.layer}, expert {key.expert}: the block is right, its entry in {CHECKSUMS_NAME} is not",
            "the pack is damaged: run the same command with force=[repack]",
        )


def _compare_scalars(
    packed: Any, original: list[float], key: ExpertKey, layout: PackedLayout
) -> None:
    start = len(original) * (layout.num_experts * key.layer + key.expert)
    for name, value, recorded in zip(
        ("gate", "up", "down"), original, packed[start : start + len(original)], strict=False
    ):
        if value != recorded:
            raise VerificationError(
                f"layer {key.layer}, expert {key.expert}, global scale of {name}: the pack has {recorded}, the "
                f"checkpoint {value}",
                "the pack is damaged: run the same command with force=[repack]",
            )


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides which experts are looked at."""
    return {"experts": cfg.spot_check.experts, "seed": cfg.spot_check.seed}


def needs(cfg: RunConfig) -> tuple[str, ...]:
    """Return what is compared."""
    return ("download", "repack" if "repack" in cfg.model.setup else "checksums")


STAGE = Stage(name="spot_check", run=run, params=params, needs=needs)
