"""A stage's part on each drive of `hw.drives`: written under another name, renamed when all parts are whole.

A part is known again by a token, so that a stop, a drive that was exchanged, or a leftover of another run mix nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from conf.schema import RunConfig
from runtime.errors import UserError, VerificationError
from runtime.experts.layout import PACK_BLOCKS
from runtime.experts.spread import DRIVES_NAME, PART_NAME, DrivesRecord, part_json, why_absent
from runtime.mounts import find_mount
from runtime.units import GIB
from stages.core import Runner
from stages.files import absolute, fsync_folder, sample_digest, write_atomically
from stages.stage import Output, StageContext

log = logging.getLogger("stages")


def bases(cfg: RunConfig, home: Path) -> list[Path]:
    """Return the folder of each drive; that of one without is `home`."""
    return [home if drive.folder is None else absolute(drive.folder) for drive in cfg.hw.drives]


def part_folders(runner: Runner, stage: str) -> list[Path]:
    """Return the place of a stage's part on each drive."""
    name, key = runner.cfg.model.name, runner.key(stage)
    return [
        base / name / f"{stage}-{key}-drive{i}"
        for i, base in enumerate(bases(runner.cfg, runner.root.parent))
    ]


def limits_nbytes(cfg: RunConfig) -> list[int | None]:
    """Return how much may be written on each drive; None: no limit."""
    return [
        None if drive.limit_gib is None else int(drive.limit_gib * GIB) for drive in cfg.hw.drives
    ]


def room_needed(runner: Runner, stage: str, sizes: Sequence[int]) -> Mapping[Path, int]:
    """Return the bytes that are still to be written in each drive's folder."""
    needed: dict[Path, int] = {}
    places = zip(bases(runner.cfg, runner.root.parent), part_folders(runner, stage), sizes, strict=True)  # fmt: skip
    for base, folder, nbytes in places:
        made = sum(f.stat().st_blocks * 512 for f in _partial(folder).glob("*") if f.is_file())
        needed[base] = needed.get(base, 0) + max(0, nbytes - made)
    return needed


def check_folders(cfg: RunConfig, home: Path) -> None:
    """Raise UserError for a drive's folder that cannot be used; warn of two that are on one drive.

    home: where what is on the drive without a folder lies.
    """
    folders = bases(cfg, home)
    for i, folder in enumerate(folders):
        if cfg.hw.drives[i].folder is None:
            continue
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(
                f"hw.drives[{i}].folder {folder} is not a folder that can be written to",
                "mount the drive, or make the folder",
            )
    warn_of_shared_drives(folders)


def warn_of_shared_drives(folders: Sequence[Path]) -> None:
    """Say which folders are on the same drive: together they are no faster than one."""
    seen: dict[str, int] = {}
    for i, folder in enumerate(folders):
        mount = find_mount(folder)
        before = seen.setdefault(mount.device, i)
        if before != i:
            log.warning(
                "drives %d and %d of hw.drives (%s and %s) lie on the same drive (%s): together they are no faster "
                "than one", before, i, folders[before], folder, mount.device,
            )  # fmt: skip


class Parts:
    """A file of a stage on each drive, open for writing."""

    def __init__(self, ctx: StageContext, record: DrivesRecord, sizes: Sequence[int]) -> None:
        """Find the parts that a stopped run has left, or make them anew and forget the journal.

        record: what `drives.json` is to say; its token and folders are given here.  sizes: of each drive's file.
        """
        self.folders = part_folders(ctx.runner, ctx.stage.name)
        self._sizes, self._stage = sizes, ctx.stage.name
        self._fds: list[int] = []
        found = _found(ctx.out)
        record = replace(
            record, token=found or uuid.uuid4().hex, folders=tuple(map(str, self.folders))
        )
        self.token = record.token
        homes = [self._home(drive) for drive in range(len(sizes))] if found else [None]
        if None in homes:
            ctx.forget_units()
            self.token = uuid.uuid4().hex
            record = replace(record, token=self.token)
            self._make()
        write_atomically(ctx.out / DRIVES_NAME, record.to_json())
        for drive in range(len(sizes)):
            home = self._home(drive)
            assert home is not None
            with self.on_drive(drive):
                self._fds.append(os.open(home / PACK_BLOCKS, os.O_RDWR | os.O_CLOEXEC))

    def _home(self, drive: int) -> Path | None:
        """Return where a drive's part is: under its other name, or already under its own."""
        sizes = [(PACK_BLOCKS, self._sizes[drive])]
        for folder in (_partial(self.folders[drive]), self.folders[drive]):
            if why_absent(folder, self.token, drive, sizes) is None:
                return folder
        return None

    def _make(self) -> None:
        for drive, folder in enumerate(self.folders):
            partial = _partial(folder)
            with self.on_drive(drive):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                fd = os.open(partial / PACK_BLOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    if self._sizes[drive]:  # a full disk shows now, not in the last layer
                        os.posix_fallocate(fd, 0, self._sizes[drive])
                    os.fsync(fd)
                finally:
                    os.close(fd)
                write_atomically(partial / PART_NAME, part_json(self.token, drive))

    def write(self, drive: int, data: bytes | memoryview, offset: int) -> None:
        """Write to a drive's file."""
        view = memoryview(data)
        with self.on_drive(drive):
            while view:
                written = os.pwrite(self._fds[drive], view, offset)
                view, offset = view[written:], offset + written

    def sync(self) -> None:
        """Wait until all that was written is on the drives."""
        for drive, fd in enumerate(self._fds):
            with self.on_drive(drive):
                os.fsync(fd)

    def publish(self) -> list[str]:
        """Give every part its name; returns a hash of samples of each file."""
        for drive, folder in enumerate(self.folders):
            partial, home = _partial(folder), self._home(drive)
            if home is None:
                raise UserError(
                    f"{partial} was taken away or written anew while {self._stage} worked on it",
                    "give each artifacts folder that is in use drives' folders of its own, and run the same command",
                )
            if home == folder:
                continue  # a run before this one was stopped between two drives
            with self.on_drive(drive):
                replaced = folder.with_name(folder.name + ".replaced")
                if folder.exists():
                    shutil.rmtree(replaced, ignore_errors=True)
                    folder.rename(replaced)
                partial.rename(folder)
                fsync_folder(folder.parent)
                shutil.rmtree(replaced, ignore_errors=True)
        return [sample_digest(folder / PACK_BLOCKS) for folder in self.folders]

    @contextlib.contextmanager
    def on_drive(self, drive: int) -> Iterator[None]:
        """Say in which folder the disk is full, or fails."""
        with drive_errors(self._stage, drive, self.folders[drive].parent.parent):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)


@contextlib.contextmanager
def drive_errors(stage: str, drive: int, folder: Path) -> Iterator[None]:
    """Turn what the system says of a drive that is full or fails into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(
                f"{stage} ran out of disk on drive {drive} of hw.drives ({folder}): {error.strerror}",
                f"what is finished is kept: free some disk there, or set hw.drives[{drive}].limit_gib",
            ) from error
        raise UserError(
            f"{stage} cannot write on drive {drive} of hw.drives ({folder}): {error.strerror or error}",
            "see the kernel log (dmesg); what is finished is kept",
        ) from error


def _found(out: Path) -> str | None:
    """Return the token of the parts that a stopped run was writing."""
    if not (out / DRIVES_NAME).exists():
        return None
    return DrivesRecord.read(out, "repack").token


def _partial(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def check_samples(output: Output, samples: Sequence[str]) -> None:
    """Raise VerificationError when a part that is there is not what was written."""
    record = DrivesRecord.read(output.root, "repack")
    for drive, (folder, sample) in enumerate(zip(record.folders, samples, strict=True)):
        if why_absent(Path(folder), record.token, drive, ()) is None:
            check_sample(Path(folder) / PACK_BLOCKS, sample, "repack")


def check_sample(path: Path, sample: str, stage: str) -> None:
    """Raise VerificationError when a file that is there is not what a stage wrote."""
    try:
        found = sample_digest(path)
    except OSError:
        return
    if found != sample:
        raise VerificationError(
            f"{path} is not what was written: a sampled checksum differs",
            f"make it anew: stages=[{stage}] force=[{stage}]",
        )
