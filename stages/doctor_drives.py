"""`doctor` with several drives: each one's place and rate, whether two are one, and whether their shares fit."""

from __future__ import annotations

import os
from pathlib import Path

from conf.schema import RunConfig, Spread
from runtime.drives import find_mount
from runtime.experts.layout import PACK_BLOCKS
from runtime.experts.spread import DrivesRecord, weights_of
from stages import doctor
from stages.core import Runner
from stages.doctor_report import Report
from stages.download import snapshot_of
from stages.parts import bases

WELL_SHARED = 0.9  # of the rate of all drives together, below which other shares are recommended


def drive_files(runner: Runner) -> list[list[Path]]:
    """Return the files of each drive that this model's experts are read from, as far as they are made and there."""
    cfg = runner.cfg
    download, repack, mirror = (runner.find(name) for name in ("download", "repack", "mirror"))
    if "repack" in cfg.model.setup:
        if repack is None:
            return [[] for _ in cfg.hw.drives]
        folders = DrivesRecord.read(repack.root, "repack").folders
        return [[f for f in (Path(folder) / PACK_BLOCKS,) if f.exists()] for folder in folders]
    if download is None or mirror is None:
        return [[] for _ in cfg.hw.drives]
    record, snapshot = DrivesRecord.read(mirror.root, "mirror"), snapshot_of(download)
    return [
        [f for f in (Path(folder or snapshot) / name for name in names) if f.exists()]
        for folder, names in zip(record.folders, record.files, strict=True)
    ]


def check_each(report: Report, cfg: RunConfig, runner: Runner, home: Path, record_nbytes: int) -> None:  # fmt: skip
    """Measure every drive; `drive_gib_s` is what they give together. home: where the drive without a folder is."""
    folders, files = bases(cfg, home), drive_files(runner)
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
            doctor.check_place(own, "place", folder, mount, is_read=True)
            if before != i:
                own.add(
                    "drive", "shared", "warn", f"on the same drive as hw.drives[{before}], {mount.device}",
                    "give each its own: two folders of one drive are no faster than one",
                )  # fmt: skip
            doctor.measure_place(own, cfg, files[i], folder, record_nbytes)
        for finding in own.findings:
            report.add(
                finding.area, f"{i}: {finding.what}", finding.verdict, finding.value, finding.advice
            )
        report.grid += own.grid
        rates.append(own.rates.get("drive_gib_s", 0.0))
        report.rates[f"drive_{i}_gib_s"] = rates[-1]
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
