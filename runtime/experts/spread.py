"""Experts on several drives as they were written: an expert pack in parts, or copies of released shards.

Owns `drives.json`, which says what lies where, and `part.json`, by which a drive's folder is known again. Opens no
expert file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import DriveConfig, HwConfig, Spread
from runtime.errors import UserError
from runtime.experts.layout import (
    PACK_BLOCKS,
    ExpertKey,
    ExpertLayout,
    PackedLayout,
    PackHeader,
    Span,
)
from runtime.experts.placement import Placement, place
from runtime.experts.reader import DirectReader
from runtime.experts.spread_reader import Copies, SpreadReader

log = logging.getLogger(__name__)

DRIVES_NAME = "drives.json"
PART_NAME = "part.json"


@dataclass(frozen=True, slots=True)
class DrivesRecord:
    """What `drives.json` says."""

    spread: str
    token: str = ""  # of this set of parts: a drive with another one is not of it
    folders: tuple[str, ...] = ()  # of each drive's part
    weights: tuple[float, ...] = ()
    limits_nbytes: tuple[int | None, ...] = ()
    files: tuple[tuple[str, ...], ...] = ()  # of mirrored shards: their names on each drive

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, root: Path, stage: str) -> DrivesRecord:
        """Read a stage's record. Raises UserError when it cannot be used."""
        try:
            data: dict[str, Any] = json.loads((root / DRIVES_NAME).read_text())
            for key in ("folders", "weights", "limits_nbytes", "files"):
                data[key] = tuple(tuple(x) if isinstance(x, list) else x for x in data[key])
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{root / DRIVES_NAME} is not usable: {error}",
                f"run the {stage} stage again: stages=[{stage}] force=[{stage}]",
            ) from error


def part_json(token: str, drive: int) -> str:
    """Return the text of `part.json`."""
    return json.dumps({"token": token, "drive": drive}) + "\n"


def why_absent(
    folder: Path, token: str, drive: int, sizes: Sequence[tuple[str, int]]
) -> str | None:
    """Return why a drive's part cannot be used, or None. sizes: its files and their bytes."""
    try:
        if json.loads((folder / PART_NAME).read_text()) != {"token": token, "drive": drive}:
            return f"{folder} is of another run of the stage"
        for name, nbytes in sizes:
            found = (folder / name).stat().st_size
            if found != nbytes:
                return f"{folder / name} has {found:,} bytes, {nbytes:,} were written"
    except FileNotFoundError as error:
        return f"{error.filename} is not there"
    except (OSError, ValueError) as error:
        return f"{folder} cannot be read: {error}"
    return None


def _missing(why: dict[int, str], folders: Sequence[str], can_do_without: bool) -> frozenset[int]:
    """Warn of drives that are not there, or raise UserError where nothing else has what is on them."""
    for drive, reason in why.items():
        named = f"drive {drive} of hw.drives ({folders[drive]})"
        if not can_do_without:
            raise UserError(
                f"{named} is needed and cannot be used: {reason}",
                "connect and mount it; where it is lost, run stages=[repack] force=[repack]",
            )
        log.warning(
            "%s cannot be used, its copies are read from the others: %s; connect it and start again, or make it anew "
            "with force=[repack] or force=[mirror]",
            named, reason,
        )  # fmt: skip
    return frozenset(why)


class SpreadPack(PackedLayout):
    """An expert pack whose blocks lie in a file on each of several drives."""

    def __init__(self, root: Path, header: PackHeader, record: DrivesRecord) -> None:
        """Raises UserError when a drive is not there that is needed."""
        super().__init__(root, header)
        self.record = record
        self.spread = Spread(record.spread)
        self.placement: Placement = place(
            self.spread,
            header.num_layers,
            header.num_experts,
            header.record_nbytes,
            record.weights,
            record.limits_nbytes,
        )
        self.places = record.folders
        self.drive_of = tuple(range(len(record.folders)))
        absent = {}
        for drive, folder in enumerate(record.folders):
            sizes = [(PACK_BLOCKS, self.placement.file_nbytes(drive))]
            reason = why_absent(Path(folder), record.token, drive, sizes)
            if reason is not None:
                absent[drive] = reason
        is_covered = self.spread is Spread.mirror and all(
            set(self.placement.homes(key)) - absent.keys() for key in self._keys()
        )
        self.missing = _missing(absent, record.folders, is_covered)

    def _keys(self) -> list[ExpertKey]:
        return [
            ExpertKey(layer, e) for layer in range(self.num_layers) for e in range(self.num_experts)
        ]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(Path(folder) / PACK_BLOCKS for folder in self.record.folders)

    def copies(self, key: ExpertKey) -> tuple[tuple[Span, ...], ...]:
        """Return the ways to read a record, on drives that are there."""
        found = self.placement.copies(key)
        if not self.missing:
            return found
        return tuple(copy for copy in found if copy[0].file_idx not in self.missing)

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        return self.copies(key)[0]


def open_pack(root: Path) -> PackedLayout:
    """Open what `repack` made: one file, or a part on each drive. Raises UserError."""
    if not (root / DRIVES_NAME).exists():
        return PackedLayout.open(root)
    return SpreadPack(root, PackedLayout.read_header(root), DrivesRecord.read(root, "repack"))


class MirroredShards:
    """Released files of which whole copies lie on other drives."""

    def __init__(self, layout: ExpertLayout, record: DrivesRecord, snapshot: Path) -> None:
        """Raises UserError when nothing has a file that is needed."""
        self._layout = layout
        self.places = tuple(folder or str(snapshot) for folder in record.folders)
        files: list[Path] = []
        drive_of: list[int] = []
        index: dict[tuple[int, str], int] = {}  # (drive, file's name) -> number of the file
        absent = {}
        for drive, (folder, names) in enumerate(zip(record.folders, record.files, strict=True)):
            root = Path(folder) if folder else None
            if root is not None:
                sizes = [(f.name, f.stat().st_size) for f in layout.files if f.name in names]
                reason = why_absent(root, record.token, drive, sizes)
                if reason is not None:
                    absent[drive] = reason
            for source in layout.files:
                if source.name not in names:
                    continue
                if drive not in absent:
                    index[drive, source.name] = len(files)
                files.append(source if root is None else root / source.name)
                drive_of.append(drive)
        self._files, self.drive_of = tuple(files), tuple(drive_of)
        names_there = {name for _, name in index}
        self.missing = _missing(
            absent, record.folders, all(file.name in names_there for file in layout.files)
        )
        self._ways = [  # of each file of the layout, drive -> number of its copy
            {d: index[d, f.name] for d in range(len(record.folders)) if (d, f.name) in index}
            for f in layout.files
        ]

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def copies(self, key: ExpertKey) -> tuple[tuple[Span, ...], ...]:
        """Return the ways to read a record; one that lies in two files needs both on a drive."""
        spans = self._layout.spans(key)
        drives = set.intersection(*(set(self._ways[span.file_idx]) for span in spans))
        return tuple(
            tuple(span._replace(file_idx=self._ways[span.file_idx][drive]) for span in spans)
            for drive in sorted(drives)
        )


def spread_of(layout: ExpertLayout, mirror: Path | None, snapshot: Path) -> Copies | None:
    """Return where a layout's records lie on several drives; None: on one. mirror: what the mirror stage made."""
    if isinstance(layout, SpreadPack):
        return layout
    if mirror is None:
        return None
    return MirroredShards(layout, DrivesRecord.read(mirror, "mirror"), snapshot)


def open_reader(
    layout: ExpertLayout, copies: Copies | None, hw: HwConfig
) -> DirectReader | SpreadReader:
    """Open what reads experts: from one drive, or from several."""
    if copies is None:
        return DirectReader(layout.files, hw.drive)
    return SpreadReader(copies, drive_configs(hw), [drive.rate_gib_s for drive in hw.drives])


def spare_rows(copies: Copies | None, hw: HwConfig) -> int:
    """Return how many records may be on their way from drives that stall while others can give them.

    A drive has at most a window of required ones at work, and as many that were guessed before.
    """
    if copies is None or hw.spread is not Spread.mirror:
        return 0
    return 2 * hw.drive.window * (len(hw.drives) - 1)


def drive_configs(hw: HwConfig) -> list[DriveConfig]:
    """Return how each of `hw.drives` is read."""
    return [
        replace(
            hw.drive,
            simulate_gib_s=hw.drive.simulate_gib_s
            if drive.simulate_gib_s is None
            else drive.simulate_gib_s,
        )
        for drive in hw.drives
    ]


def weights_of(hw: HwConfig) -> list[float]:
    """Return the shares of what is striped or split: as given, else by rate, else alike."""
    return [
        drive.share if drive.share is not None else (drive.rate_gib_s or 1.0) for drive in hw.drives
    ]
