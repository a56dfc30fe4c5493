"""Experts on several drives as they were written: an expert pack in parts, or copies of released shards.

Owns `drives.json`, which says what lies where, and `part.json`, by which a drive's folder is known again. Opens no
expert file.
"""

from __future__ import annotations

import itertools
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import DriveConfig, HwConfig, Spread
from runtime.errors import UserError
from runtime.experts.checks import Checksums
from runtime.experts.child_reader import ChildReader
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
from runtime.experts.schedule import depth_of
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


class _Places(ABC):
    """The folders of several drives, and which of them cannot be used."""

    places: Sequence[str]
    missing: frozenset[int] = frozenset()

    @abstractmethod
    def _has_all(self, missing: frozenset[int]) -> bool:
        """Say whether every record can be read without these drives."""

    def lose(self, why: Mapping[int, str]) -> None:
        """Do without drives, with a warning each; raise UserError where nothing else has what is on them."""
        missing = self.missing | why.keys()
        can_do_without = self._has_all(missing)
        for drive, reason in why.items():
            named = f"drive {drive} of hw.drives ({self.places[drive]})"
            if not can_do_without:
                raise UserError(
                    f"{named} is needed and cannot be used: {reason}",
                    "connect and mount it; where it is lost, run stages=[repack] force=[repack]",
                )
            log.warning(
                "%s cannot be used, its copies are read from the others: %s; connect it and start again, or make it "
                "anew with force=[repack] or force=[mirror]",
                named, reason,
            )  # fmt: skip
        self.missing = missing


def _every_key(layout: ExpertLayout) -> Iterator[ExpertKey]:
    return itertools.starmap(
        ExpertKey, itertools.product(range(layout.num_layers), range(layout.num_experts))
    )


class SpreadPack(_Places, PackedLayout):
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
        self.lose(absent)

    def _has_all(self, missing: frozenset[int]) -> bool:
        return not missing or (
            self.spread is Spread.mirror
            and all(set(self.placement.homes(key)) - missing for key in _every_key(self))
        )

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


class MirroredShards(_Places):
    """Released files of which whole copies lie on other drives."""

    def __init__(self, layout: ExpertLayout, record: DrivesRecord, snapshot: Path) -> None:
        """Raises UserError when nothing has a file that is needed."""
        self._layout = layout
        self.places = tuple(folder or str(snapshot) for folder in record.folders)
        files: list[Path] = []
        drive_of: list[int] = []
        self._ways: list[dict[int, int]] = [{} for _ in layout.files]  # drive -> number of the copy
        absent = {}
        for drive, (folder, names) in enumerate(zip(record.folders, record.files, strict=True)):
            here = [(i, file) for i, file in enumerate(layout.files) if file.name in names]
            if folder:
                sizes = [(file.name, file.stat().st_size) for _, file in here]
                reason = why_absent(Path(folder), record.token, drive, sizes)
                if reason is not None:
                    absent[drive] = reason
            for i, file in here:
                self._ways[i][drive] = len(files)
                files.append(Path(folder) / file.name if folder else file)
                drive_of.append(drive)
        self._files, self.drive_of = tuple(files), tuple(drive_of)
        if not self._has_all(frozenset()):
            raise UserError(
                "the limits of hw.drives leave experts of which no drive has all",
                "raise hw.drives[i].limit_gib, or add a drive without a folder: the shards as they are",
            )
        self.lose(absent)

    def _has_all(self, missing: frozenset[int]) -> bool:
        return all(self._homes(key) - missing for key in _every_key(self._layout))

    def _homes(self, key: ExpertKey) -> set[int]:
        """Return the drives that have all of a record."""
        return set.intersection(*(set(self._ways[s.file_idx]) for s in self._layout.spans(key)))

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def copies(self, key: ExpertKey) -> tuple[tuple[Span, ...], ...]:
        """Return the ways to read a record, on drives that are there; all of it comes from one of them."""
        spans = self._layout.spans(key)
        return tuple(
            tuple(span._replace(file_idx=self._ways[span.file_idx][drive]) for span in spans)
            for drive in sorted(self._homes(key) - self.missing)
        )


def spread_of(layout: ExpertLayout, mirror: Path | None, snapshot: Path) -> Copies | None:
    """Return where a layout's records lie on several drives; None: on one. mirror: what the mirror stage made."""
    if isinstance(layout, SpreadPack):
        return layout
    if mirror is None:
        return None
    return MirroredShards(layout, DrivesRecord.read(mirror, "mirror"), snapshot)


def has_reader_process(config: DriveConfig, has_gpu: bool) -> bool:
    """Return whether a process of its own reads: with a GPU, whose launches would wait for readers, if nobody says."""
    return has_gpu if config.process is None else config.process


def open_reader(
    layout: ExpertLayout,
    copies: Copies | None,
    hw: HwConfig,
    checksums: Checksums | None = None,
    has_process: bool = False,
) -> DirectReader | SpreadReader | ChildReader:
    """Open what reads experts: from one drive, or from several.

    checksums: for a process of its own, which compares them over there.  has_process: such a process reads, where it is
    one drive.
    """
    if copies is None and has_process:
        return ChildReader(
            layout.files, hw.drive, record_nbytes=layout.record_nbytes, checksums=checksums
        )
    if copies is None:
        return DirectReader(layout.files, hw.drive, record_nbytes=layout.record_nbytes)
    rates = [drive.rate_gib_s for drive in hw.drives]
    return SpreadReader(copies, drive_configs(hw), rates, record_nbytes=layout.record_nbytes)


def spare_rows(copies: Copies | None, hw: HwConfig, record_nbytes: int) -> int:
    """Return how many records may be on their way from drives that stall while others can give them.

    A drive has at most a window of required ones at work, as many that were guessed before, and an idle one.
    """
    if copies is None or hw.spread is not Spread.mirror:
        return 0
    return (2 * depth_of(hw.drive, record_nbytes, len(hw.drives)).window + 1) * (len(hw.drives) - 1)


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
