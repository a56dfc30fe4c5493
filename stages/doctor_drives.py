"""What `doctor` finds of drives: each one's place and rate; of several, whether two are one and their shares fit."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from conf.schema import RunConfig, Source, Spread
from runtime.drives import DriveRate, allows_direct_reads, measure_grid, measure_rate
from runtime.experts.schedule import depth_of
from runtime.experts.spread import weights_of
from runtime.mounts import IN_MEMORY, Mount, find_mount
from runtime.units import GIB, MIB, format_nbytes
from stages.core import Runner
from stages.disk_room import DISK_MARGIN_NBYTES
from stages.doctor_record import (
    DRIVE_RATES,
    drive_files,
    drive_folders,
    expert_files,
    expert_folder,
    rate_name,
)
from stages.doctor_report import Report
from stages.hub import hub_cache

WINDOWS, PIECES = (1, 2, 4), (1, 2, 4, 8)
CEILING_WINDOW, CEILING_PIECES = 8, 1  # whole records, many at once: what the drive can do
LEAST_FILE_NBYTES = 64 * MIB  # less is no measure of a drive
PROBE_NAME = "doctor-probe.bin"
VIRTUAL = ("vd", "xvd")  # drives that say they spin, whatever is behind them
SLOW_GIB_S = 0.5  # a drive below this makes every large model crawl
THROTTLED = 0.85  # of the first seconds' rate
SETTING_SHARE = 0.9  # of the best setting's rate, below which another one is recommended
WELL_SHARED = 0.9  # of the rate of all drives together, below which other shares are recommended


def check_drives(report: Report, cfg: RunConfig, runner: Runner, record_nbytes: int) -> None:
    """Where artifacts and hub files lie; the rates are of the folder that the experts are read from."""
    files, folder = expert_files(runner), expert_folder(runner)
    places = {"experts": folder, "artifacts": runner.root}
    if cfg.hw.drives:
        del places["experts"]
    if cfg.model.source is Source.hub:
        places["hub cache"] = hub_cache(cfg).root
    for what, place in places.items():
        check_place(report, what, place, find_mount(place), is_read=what == "experts")
    if cfg.hw.drives:
        check_each(report, cfg, runner, record_nbytes)
    else:
        measure_place(report, cfg, files, folder, record_nbytes)


def check_each(report: Report, cfg: RunConfig, runner: Runner, record_nbytes: int) -> None:
    """Measure every drive; `drive_gib_s` is what they give together."""
    folders, files = list(drive_folders(runner).values()), drive_files(runner)
    seen: dict[str, int] = {}
    rates: list[float] = []
    for i, folder in enumerate(folders):
        own = Report()
        if not folder.is_dir() or not os.access(folder, os.R_OK):
            is_mirror = cfg.hw.spread is Spread.mirror
            own.add(
                "drive", "place", "warn" if is_mirror else "bad", f"{folder} is not there",
                "connect and mount it" + (": its copies are read from the others" if is_mirror else ""),
            )  # fmt: skip
        else:
            mount = find_mount(folder)
            before = seen.setdefault(mount.device, i)
            check_place(own, "place", folder, mount, is_read=True)
            if before != i:
                own.add(
                    "drive", "shared", "warn", f"on the same drive as hw.drives[{before}], {mount.device}",
                    "give each its own: two folders of one drive are no faster than one",
                )  # fmt: skip
            measure_place(own, cfg, files[i], folder, record_nbytes)
        for finding in own.findings:
            report.add(
                finding.area, f"{i}: {finding.what}", finding.verdict, finding.value, finding.advice
            )
        report.grid += own.grid
        found = {name: own.rates.get(name, 0.0) for name in DRIVE_RATES}
        rates.append(found["drive_gib_s"])
        report.rates |= {rate_name(name, i): rate for name, rate in found.items() if rate}
    report.rates["drive_gib_s"] = sum(rates)
    _check_shares(report, cfg, rates)


def _check_shares(report: Report, cfg: RunConfig, rates: list[float]) -> None:
    """Whether what is striped or split is shared out as fast as the drives are."""
    told = ", ".join(f"hw.drives[{i}].rate_gib_s={rate:.2g}" for i, rate in enumerate(rates))
    if cfg.hw.spread is Spread.mirror:
        most = f"at most {sum(rates):.2f} GiB/s, from the copy that is first"
        report.add("drive", "all together", "ok", most)
        return
    if not all(rates):
        return
    weights = weights_of(cfg.hw)
    slowest = max(weight / rate for weight, rate in zip(weights, rates, strict=True))
    found = sum(weights) / slowest
    good = found >= WELL_SHARED * sum(rates)
    report.add(
        "drive", "all together", "ok" if good else "warn",
        f"{found:.2f} GiB/s as they are shared out, {sum(rates):.2f} at most",
        "" if good else f"set {told}; the experts are then packed anew",
    )  # fmt: skip


def measure_place(
    report: Report, cfg: RunConfig, files: Sequence[Path], folder: Path, record_nbytes: int
) -> None:
    """Measure how fast a drive is read: on its own files, or where they are too few on one that is made there."""
    if sum(path.stat().st_size for path in files) < LEAST_FILE_NBYTES:
        files = []
    try:
        with _probe_files(files, folder, cfg.doctor.probe_gib, record_nbytes) as found:
            _check_rates(report, cfg, found, record_nbytes)
    except OSError as error:
        report.add(
            "drive",
            "reading",
            "bad",
            f"{error.strerror or error} in {folder}",
            "see the kernel log (dmesg): a drive that gives this error may be failing",
        )


def check_place(report: Report, what: str, place: Path, mount: Mount, is_read: bool) -> None:
    """One folder's filesystem and drive."""
    free = shutil.disk_usage(mount.point).free if os.path.isdir(mount.point) else 0
    text = f"{place} on {mount.kind}, {mount.device}"
    details = [mount.model, mount.link, f"{format_nbytes(free)} free"]
    verdict, advice = "ok", ""
    if mount.is_network:
        verdict = "bad" if is_read and mount.kind in ("9p", "drvfs") else "warn"
        advice = "put it on a local drive (under WSL: in Linux's filesystem, not /mnt/c): paths.artifacts, paths.hub"
        details.append("a network or foreign filesystem")
    elif mount.is_rotational and is_read and not mount.device.startswith(VIRTUAL):
        verdict, advice = "bad", "put it on an NVMe drive: paths.artifacts, paths.hub"
        details.append("a drive with spinning discs")
    elif mount.kind in IN_MEMORY:
        verdict, advice = "warn", "it takes RAM that the cache could have: use a folder on a drive"
    elif mount.link and mount.link_most and mount.link != mount.link_most and is_read:
        verdict = "warn"
        advice = f"the drive could do {mount.link_most}: another slot may give it more lanes"
    report.add("drive", what, verdict, ", ".join([text, *filter(None, details)]), advice)


@contextlib.contextmanager
def _probe_files(
    files: Sequence[Path], folder: Path, probe_gib: float, record_nbytes: int
) -> Iterator[list[Path]]:
    """Yield files to read: the model's own, or one of random bytes that is deleted afterwards."""
    if files:
        yield list(files)
        return
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    wanted = max(int(probe_gib * GIB), 16 * record_nbytes)
    room = shutil.disk_usage(existing).free - DISK_MARGIN_NBYTES
    if room < wanted:
        raise OSError(28, f"no room for a probe file of {format_nbytes(wanted)}")
    path = existing / f".{os.getpid()}-{PROBE_NAME}"
    try:
        _write_probe(path, wanted)
        yield [path]
    finally:
        path.unlink(missing_ok=True)


def _write_probe(path: Path, nbytes: int) -> None:
    """Write bytes that no drive can compress, and make the page cache forget them."""
    chunk = os.urandom(8 * MIB)
    with open(path, "wb", buffering=0) as f:
        for number in range(-(-nbytes // len(chunk))):
            start = number * 4099 % len(chunk)  # no two chunks are alike
            f.write(chunk[start:] + chunk[:start])
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _check_rates(report: Report, cfg: RunConfig, files: list[Path], record_nbytes: int) -> None:
    direct = allows_direct_reads(files[0])
    report.add(
        "drive",
        "direct reads",
        "ok" if direct else "warn",
        "yes" if direct else "refused: reads go through the page cache",
        "" if direct else "use ext4 or xfs on a local drive",
    )
    drive = cfg.hw.drive
    grid = measure_grid(files, record_nbytes, drive, WINDOWS, PIECES, cfg.doctor.each_s)
    ceiling = measure_grid(
        files, record_nbytes, drive, (CEILING_WINDOW,), (CEILING_PIECES,), 2 * cfg.doctor.each_s
    )[0]
    report.grid = [*grid, ceiling]
    best = max(report.grid, key=lambda rate: rate.gib_s)
    report.rates["drive_gib_s"] = best.gib_s
    slow = best.gib_s < SLOW_GIB_S
    size = format_nbytes(record_nbytes)
    report.add(
        "drive", f"random reads of {size}", "warn" if slow else "ok",
        f"{best.gib_s:.2f} GiB/s, window {best.window}, pieces {best.pieces}",
        "a faster drive is what this model needs most" if slow else "",
    )  # fmt: skip
    window, pieces, _ = depth_of(drive, record_nbytes)
    own = _nearest(grid, window, pieces)
    if own is not None:
        good = own.gib_s >= SETTING_SHARE * best.gib_s
        report.add(
            "drive", "reads as configured", "ok" if good else "warn",
            f"{own.gib_s:.2f} GiB/s, window {own.window}, pieces {own.pieces}",
            "" if good else f"try hw.drive.window={best.window} hw.drive.pieces={best.pieces} in stages=[bench]",
        )  # fmt: skip
    alone = next(
        (rate for rate in grid if (rate.window, rate.pieces) == (1, own.pieces if own else 1)), None
    )
    if alone is not None and alone.gib_s:
        report.add("drive", "one expert alone", "ok", f"{record_nbytes / alone.gib_s / GIB * 1e3:.2f} ms")  # fmt: skip
    _check_sustained(report, cfg, files, record_nbytes, best)


def _nearest(grid: Sequence[DriveRate], window: int, pieces: int) -> DriveRate | None:
    """Return the measured setting that is most like the configured one."""
    return min(grid, key=lambda r: (abs(r.window - window), abs(r.pieces - pieces)), default=None)


def _check_sustained(
    report: Report, cfg: RunConfig, files: list[Path], record_nbytes: int, best: DriveRate
) -> None:
    setting = replace(cfg.hw.drive, window=best.window, pieces=best.pieces, simulate_gib_s=0.0)
    rate = measure_rate(files, record_nbytes, setting, cfg.doctor.sustained_s)
    if len(rate.each_s) < 6:
        return
    third = len(rate.each_s) // 3
    first, last = (statistics.median(part) for part in (rate.each_s[:third], rate.each_s[-third:]))
    report.rates["drive_sustained_gib_s"] = last
    held = last >= THROTTLED * first
    if not held:
        report.rates["drive_gib_s"] = last
    report.add(
        "drive", f"held for {cfg.doctor.sustained_s:.0f} s", "ok" if held else "warn",
        f"{last:.2f} GiB/s at the end, {first:.2f} at the start",
        "" if held else "the drive throttles: give it a heat sink and air",
    )  # fmt: skip
