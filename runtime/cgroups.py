"""What the cgroups of this process allow it: memory and CPU time, v1, v2 and both at once. No torch.

A group is found as the kernel tells it: the hierarchy's mount in /proc/self/mountinfo, the group's path in it in
/proc/self/cgroup. All groups above it count as well, as far as they can be seen; a container often sees only its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One group's limit, in bytes."""

    file: Path  # that says so
    nbytes: int
    used_nbytes: int  # without the page cache that the kernel gives up first


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return every memory limit that applies to this process, innermost first. root: of another system, in tests."""
    found = []
    for folder, is_v2 in _groups("memory", root):
        limit, used = (
            ("memory.max", "memory.current")
            if is_v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        nbytes = _read_int(folder / limit)
        if nbytes is not None:
            taken = (_read_int(folder / used) or 0) - _inactive_file(folder / "memory.stat")
            found.append(MemoryLimit(folder / limit, nbytes, max(0, taken)))
    return found


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many CPUs' worth of time the groups allow, the tightest; None for no limit."""
    quotas = [_quota(folder, is_v2) for folder, is_v2 in _groups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield (folder, whether it is of v2) of each group that this process is in, innermost first."""
    mine = _group_paths(root)
    for point, base, options in _mounts(root):
        is_v2 = options is None
        path = mine.get("") if options is None else mine.get(controller)
        if path is None or (options is not None and controller not in options):
            continue
        # the mount shows the hierarchy from `base` on; a group outside of it cannot be seen
        inside = path[len(base) :] if (path + "/").startswith(base.rstrip("/") + "/") else ""
        folder = point / inside.lstrip("/")
        yield from ((f, is_v2) for f in (folder, *folder.parents) if f.is_relative_to(point))


def _group_paths(root: Path) -> dict[str, str]:
    """Return controller -> this process's group; the one of v2 under ''."""
    found: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(root: Path) -> Iterator[tuple[Path, str, list[str] | None]]:
    """Yield each mounted hierarchy: where, from which group on, and its controllers; None for v2."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), f) for f in line.split()]
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        if kind in ("cgroup", "cgroup2"):
            point = root / fields[4].lstrip("/")
            yield point, fields[3], None if kind == "cgroup2" else options.split(",")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []  # a kernel without cgroups


def _inactive_file(path: Path) -> int:
    """Return a group's page cache that the kernel gives up first (v1 says it with its children's)."""
    try:
        pairs = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", 0)))


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None  # the group has no such limit, or may not be seen
    return int(text) if text.isdecimal() else None


def _quota(folder: Path, is_v2: bool) -> float | None:
    if is_v2:
        try:
            allowed, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            return None
        return int(allowed) / int(period) if allowed.isdecimal() else None
    quota, span = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return quota / span if quota is not None and span else None  # -1 is no limit
