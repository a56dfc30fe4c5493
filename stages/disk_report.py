"""What will be fetched and what goes where, for `dry_run` and `plan`. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import RunConfig
from runtime.forecast import Line, line
from runtime.units import format_duration, format_nbytes
from stages.disk_room import DiskRoom


def fetch_line(cfg: RunConfig, rooms: Sequence[DiskRoom]) -> Line | None:
    """Return how long what `download` will bring takes at `hub.line_mbit_s`; None when nothing is to be fetched."""
    nbytes = sum(room.parts.get("download", 0) for room in rooms)
    if not nbytes:
        return None
    what = f"to fetch at {cfg.hub.line_mbit_s:g} Mbit/s"
    return line(what, "L20", file_bytes=nbytes, line_bit_s=cfg.hub.line_mbit_s * 1e6)


def format_disk(rooms: Sequence[DiskRoom], fetching: Line | None) -> str:
    """Return what is fetched and what goes where, a line each."""
    lines = []
    if fetching is not None:
        nbytes = fetching.inputs["file_bytes"]
        lines.append(
            f"to fetch: {format_nbytes(nbytes)} ({nbytes / 1e9:.1f} GB), {format_duration(fetching.value)} at "
            f"{fetching.inputs['line_bit_s'] / 1e6:g} Mbit/s (hub.line_mbit_s), nine tenths of it used"
        )
    for room in rooms:
        if not room.need_nbytes:
            continue
        parts = ", ".join(f"{name} {format_nbytes(n)}" for name, n in room.parts.items() if n)
        short = room.need_nbytes - room.free_nbytes
        verdict = f"{format_nbytes(short)} TOO LITTLE" if short > 0 else "enough"
        lines.append(
            f"disk: {room.roots[0]} has {format_nbytes(room.free_nbytes)} free, needed "
            f"{format_nbytes(room.need_nbytes)} ({parts}): {verdict}"
        )
    return "\n".join(lines) or "disk: nothing more is needed"
