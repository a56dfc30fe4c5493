"""What the coming stages will write to each filesystem, and what is free there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.units import MIB

DISK_MARGIN_NBYTES = 64 * MIB  # never fill a filesystem to the last block


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """One filesystem: what is free, and what the stages will write there."""

    roots: tuple[Path, ...]  # folders on it
    free_nbytes: int
    parts: Mapping[str, int]  # stage -> bytes

    @property
    def need_nbytes(self) -> int:
        """What all stages together will write."""
        return sum(self.parts.values())


def disk_rooms(needed: Mapping[Path, Mapping[str, int]]) -> list[DiskRoom]:
    """Put together what goes to the same filesystem. needed: folder, which need not be there yet -> stage -> bytes."""
    rooms: dict[int, DiskRoom] = {}
    for root, parts in needed.items():
        existing = next(path for path in (root, *root.parents) if path.exists())
        device = existing.stat().st_dev
        free = shutil.disk_usage(existing).free
        before = rooms.get(device, DiskRoom((), free, {}))
        names = {**before.parts, **parts}
        together = {name: before.parts.get(name, 0) + parts.get(name, 0) for name in names}
        rooms[device] = DiskRoom((*before.roots, root), free, together)
    return list(rooms.values())
