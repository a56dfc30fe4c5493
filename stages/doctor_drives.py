"""`doctor` with several drives: each one's place and rate, whether two are one, and whether their shares fit."""

from __future__ import annotations

import os

from conf.schema import RunConfig, Spread
from runtime.experts.spread import weights_of
from runtime.mounts import find_mount
from stages import doctor
from stages.core import Runner
from stages.doctor_record import DRIVE_RATES, drive_files, drive_folders, rate_name
from stages.doctor_report import Report

WELL_SHARED = 0.9  # of the rate of all drives together, below which other shares are recommended


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
