"""What `doctor` found on this machine, kept beside the artifacts for `plan` and `advise`. No torch.

A record says of which machine and drive it is. What has changed since then is not used, and said.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import Source, Spread
from runtime.experts.layout import PACK_BLOCKS
from runtime.experts.spread import DrivesRecord
from runtime.mounts import Mount, find_mount
from runtime.units import format_nbytes
from stages.core import Runner
from stages.parts import bases

RECORD_NAME = "doctor.json"
DRIVE_RATES = ("drive_gib_s", "drive_sustained_gib_s")
STEADY = 0.15  # two measurements of one rate differ by less
SAME_RAM = 0.05  # MemTotal moves with kernels
LIKE_SIZE = 2.0  # a drive's rate with records so much larger or smaller says little


@dataclass(frozen=True, slots=True)
class Record:
    """Rates in GiB/s that hold for this machine as it is now."""

    rates: Mapping[str, float] = field(default_factory=dict)
    when: str = ""
    notes: tuple[str, ...] = ()  # what of the record does not hold, a sentence each
    model: str = ""  # that was measured last
    unsteady: tuple[str, ...] = ()  # rates that moved between the last two measurements
    interface: str | None = None  # of the drive: `nvme-gen4` and the like


def machine_identity(root: Path = Path("/")) -> dict[str, Any]:
    """Return what makes another machine: processor, RAM, NVIDIA cards. root: of another system, in tests.

    Not its name, which is another one in every container.
    """
    cpuinfo, meminfo = (_read(root / f"proc/{name}") for name in ("cpuinfo", "meminfo"))
    cards = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "cpu": _value(cpuinfo, "model name") or platform.machine(),
        "ram_nbytes": int((_value(meminfo, "MemTotal") or "0 kB").split()[0]) * 1024,
        "gpus": [_value(_read(card), "Model") or "unknown" for card in cards],
    }


def drive_identity(mount: Mount) -> dict[str, str | None]:
    """Return what makes another drive. A kernel gives drives other names from one start to the next."""
    named = {"model": mount.model} if mount.model else {"device": mount.device}
    return {"filesystem": mount.kind, **named, "link": mount.link}


def expert_files(runner: Runner) -> list[Path]:
    """Return the files in which this model's experts are read, as far as they are made."""
    if runner.cfg.hw.drives:
        return [file for files in drive_files(runner) for file in files]
    pack, download = (
        runner.find(n) if n in runner.cfg.model.setup else None for n in ("repack", "download")
    )
    if pack is not None:
        return [pack.root / "experts.bin"]
    if download is not None and "repack" not in runner.cfg.model.setup:
        return sorted(Path(download.facts["snapshot"]).glob("*.safetensors"))
    return []


def expert_folder(runner: Runner) -> Path:
    """Return the folder in which experts are read, or will be."""
    files = expert_files(runner)
    if files:
        return files[0].resolve().parent
    return _expected_folder(runner)


def _expected_folder(runner: Runner) -> Path:
    cfg = runner.cfg
    if cfg.model.source is not Source.hub or "repack" in cfg.model.setup:
        return runner.root
    from stages.hub import hub_cache  # the hub's library takes a second to load, advice less

    return hub_cache(cfg).root


def drive_files(runner: Runner) -> list[list[Path]]:
    """Return the files of each of hw.drives that experts are read from, as far as they are made and there."""
    cfg = runner.cfg
    download, repack, mirror = (runner.find(name) for name in ("download", "repack", "mirror"))
    if "repack" in cfg.model.setup:
        if repack is None:
            return [[] for _ in cfg.hw.drives]
        folders = DrivesRecord.read(repack.root, "repack").folders
        return [[f for f in (Path(folder) / PACK_BLOCKS,) if f.exists()] for folder in folders]
    if download is None or mirror is None:
        return [[] for _ in cfg.hw.drives]
    record, snapshot = DrivesRecord.read(mirror.root, "mirror"), download.facts["snapshot"]
    return [
        [f for f in (Path(folder or snapshot) / name for name in names) if f.exists()]
        for folder, names in zip(record.folders, record.files, strict=True)
    ]


def drive_folders(runner: Runner) -> dict[int | None, Path]:
    """Return where experts are read, or will be: a folder for each number in hw.drives; None: the only one."""
    cfg = runner.cfg
    if not cfg.hw.drives:
        return {None: expert_folder(runner)}
    home, download = runner.root.parent, runner.find("download")
    if "repack" not in cfg.model.setup:
        shards = () if download is None else Path(download.facts["snapshot"]).glob("*.safetensors")
        home = next((shard.resolve().parent for shard in shards), _expected_folder(runner))
    return dict(enumerate(bases(cfg, home)))


def rate_name(name: str, drive: int | None) -> str:
    """Return the name of a rate of one of hw.drives among all rates; None: of the only drive, or of all together."""
    return name if drive is None else name.replace("drive_", f"drive_{drive}_")


def read_record(runner: Runner, record_nbytes: int | None = None) -> Record:
    """Return what doctor measured here that still holds; empty without a record.

    record_nbytes: of one expert, to say when the drive was measured with very different ones.
    """
    path = runner.root.parent / RECORD_NAME
    try:
        data = json.loads(path.read_text())
        rates, when = dict(data["rates"]), str(data["when"])
        machine, drives = data["machine"], data["drives"]
        model, unsteady = str(data.get("model", "")), tuple(data.get("unsteady", ()))
    except FileNotFoundError:
        return Record()
    except (OSError, ValueError, KeyError, TypeError):
        return Record(notes=(f"{path} cannot be used: run stages=[doctor] to measure anew",))
    other = _differences(machine, machine_identity())
    if other:
        said = f"what doctor measured on {when} is of another machine ({', '.join(other)})"
        return Record(when=when, notes=(f"{said}: run stages=[doctor] here",))
    rates = {name: rate for name, rate in rates.items() if not name.startswith("drive_")}
    folders = drive_folders(runner)
    found = {n: _drive_of(drives, folder, record_nbytes, n) for n, folder in folders.items()}
    measured = [drive for drive, _ in found.values() if drive]
    for name in DRIVE_RATES:
        own = {rate_name(name, n): drive[name] for n, (drive, _) in found.items() if name in drive}
        # copies are read from the drives that are there; of slices and stripes each is needed
        if len(own) == len(found) or (own and runner.cfg.hw.spread is Spread.mirror):
            rates |= own | {name: sum(own.values())}
    notes = tuple(dict.fromkeys(note for _, note in found.values() if note))
    interfaces = {drive.get("interface") for drive in measured}
    interface = interfaces.pop() if len(interfaces) == 1 else None
    return Record(rates, when, notes, model, unsteady, interface)


def changes(before: Record, model: str, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the rates that differ by more than 15 % from a record of the same model: name -> what it was."""
    if before.model != model:
        return {}
    return {
        name: then
        for name, rate in rates.items()
        if (then := before.rates.get(name)) and abs(rate - then) > STEADY * max(rate, then)
    }


def _drive_of(
    drives: list[dict[str, Any]], folder: Path, record_nbytes: int | None, number: int | None
) -> tuple[dict[str, Any], str]:
    """Return what was measured of the drive below `folder`, with records most like ours, and what is to be said.

    number: in hw.drives, by which two drives alike are told apart.
    """
    here = drive_identity(find_mount(folder))
    mine = [d for d in drives if d["identity"] == here]
    again = "run stages=[doctor] with this model"
    if not mine:
        if not drives:
            return {}, ""
        changed = " -> ".join(
            ", ".join(filter(None, identity.values()))
            for identity in (drives[-1]["identity"], here)
        )
        return {}, f"{folder} is not on the drive that doctor measured ({changed}): {again}"
    wanted = record_nbytes or max(d["record_nbytes"] for d in mine)
    best = min(mine, key=lambda d: (_ratio(d["record_nbytes"], wanted), d.get("drive") != number))
    if _ratio(best["record_nbytes"], wanted) <= LIKE_SIZE:
        return best, ""
    sizes = format_nbytes(best["record_nbytes"]), format_nbytes(wanted)
    return (
        best,
        f"the drive was measured with reads of {sizes[0]}, this model's are of {sizes[1]}: {again}",
    )


def _ratio(a: int, b: int) -> float:
    return max(a, b) / max(1, min(a, b))


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what is another one now, as `cpu A -> B`; sizes may differ a little."""
    found = []
    for name in now.keys() | then.keys():
        old, new = then.get(name), now.get(name)
        if name == "ram_nbytes" and old and new:
            if abs(old - new) > SAME_RAM * old:
                found.append(f"RAM {format_nbytes(old)} -> {format_nbytes(new)}")
        elif old != new:
            found.append(f"{name} {_text(old)} -> {_text(new)}")
    return sorted(found)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)


def merged_drives(old: Path, *new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the drives of an earlier record with new measurements last, in the place of those of the same kind."""
    try:
        drives = json.loads(old.read_text())["drives"]
    except (OSError, ValueError, KeyError, TypeError):
        drives = []
    kinds = [_kind(d) for d in new]
    return [*(d for d in drives if _kind(d) not in kinds), *new]


def _kind(drive: Mapping[str, Any]) -> list[Any]:
    return [drive.get(key) for key in ("identity", "record_nbytes", "drive")]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _value(text: str, key: str) -> str | None:
    """Return the value of a `key: value` line."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
