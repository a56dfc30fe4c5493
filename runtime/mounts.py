"""What a folder lies on: filesystem, drive and its PCIe link, as /proc and /sys tell. No torch.

A machine or container that says little is no error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

NETWORK = (
    "9p",
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
    "gpfs",
    "beegfs",
    "drvfs",
    "virtiofs",
)
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Mount:
    """The filesystem that a path is on, and what is known of its drive; None where the machine does not say."""

    point: str
    kind: str
    device: str  # as the kernel names it: `nvme0n1`, or the mount's source
    is_rotational: bool | None = None
    model: str | None = None
    link: str | None = None  # of a PCIe drive: `32.0 GT/s PCIe x4`
    link_most: str | None = None  # what drive and slot could do

    @property
    def interface(self) -> str | None:
        """`nvme-gen4` and the like by the link's rate, `hdd` for spinning discs, None where that is not known."""
        if self.device.startswith("nvme"):
            rate = float((self.link or "0").split()[0])
            return "nvme-gen5" if rate >= 32 else "nvme-gen4" if rate >= 16 else "nvme-gen3"
        is_virtual = self.device.startswith(("vd", "xvd"))
        return "hdd" if self.is_rotational and not is_virtual else None

    @property
    def is_network(self) -> bool:
        """Whether reads cross a network or another system's file server (WSL's Windows drives among them)."""
        return self.kind in NETWORK or self.kind.startswith("fuse")


def find_mount(
    path: Path,
    mounts: Path = Path("/proc/self/mountinfo"),
    sys_block: Path = Path("/sys/dev/block"),
) -> Mount:
    """Return what `path`, or its nearest folder that exists, lies on."""
    existing = next(p for p in (path, *path.parents) if p.exists()).resolve()
    best: tuple[int, list[str]] | None = None
    for text in mounts.read_text().splitlines():
        fields = text.split()
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])
        if existing.is_relative_to(point) and (best is None or len(point) >= best[0]):
            best = (len(point), [fields[2], point, *fields[fields.index("-") + 1 :]])
    if best is None:
        return Mount(str(existing), "unknown", "unknown")
    number, point, kind, source = best[1][:4]
    device = _device_folder(sys_block / number)
    if device is None:
        return Mount(point, kind, source)
    return Mount(
        point,
        kind,
        device.name,
        {"1": True, "0": False}.get(_read(device / "queue/rotational") or ""),
        (_read(device / "device/model") or "").strip() or None,
        *_links(device),
    )


def _device_folder(folder: Path) -> Path | None:
    """Return the whole drive's folder in sysfs: of a partition its parent, below mappers the first real drive."""
    if not folder.exists():
        return None
    device = folder.resolve()
    if (device / "partition").exists():
        device = device.parent
    while (device / "slaves").is_dir() and (slaves := sorted((device / "slaves").iterdir())):
        device = slaves[0].resolve()
        if (device / "partition").exists():
            device = device.parent
    return device


def _links(device: Path) -> tuple[str | None, str | None]:
    """Return the PCIe link of an NVMe drive as it is, and as it could be."""
    for folder in (device / "device/device", device / "device"):
        if (folder / "current_link_speed").exists():
            found = []
            for kind in ("current", "max"):
                speed, width = (_read(folder / f"{kind}_link_{what}") for what in ("speed", "width"))  # fmt: skip
                found.append(f"{speed} x{width}" if speed and width else None)
            return found[0], found[1]
    return None, None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
