"""Whether this machine is fit for a model, and what to expect: drive, memory, link, GPU, cores, kernels, software.

Everything is measured here and now, within two minutes, and nothing is changed but for a probe file where the model has
none yet. Each finding is ok, warn or bad, and says what to do. `plan` uses the rates that are recorded here.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from typing import Any

import torch

from conf.schema import RunConfig
from runtime.engine import load_family
from runtime.errors import UserError
from runtime.forecast import Machine, tok_s, usable_cache
from runtime.mounts import find_mount
from runtime.stats import Rates
from runtime.units import GIB, MIB, format_nbytes
from stages.core import Runner
from stages.doctor_drives import check_drives
from stages.doctor_gpu import check_gpu
from stages.doctor_host import check_cores, check_limits, check_memory, check_software
from stages.doctor_record import (
    DRIVE_RATES,
    RECORD_NAME,
    drive_folders,
    drive_identity,
    expert_files,
    machine_identity,
    merged_drives,
    rate_name,
    read_record,
)
from stages.doctor_report import Report, check_steadiness, format_table
from stages.download import planned_spec, snapshot_of
from stages.files import write_atomically
from stages.plan import plan_fit
from stages.stage import Stage, StageContext

PIN_MOST_NBYTES = 32 * GIB  # tried, however large the cache: each GiB takes a part of a second


def run(ctx: StageContext) -> None:
    """Look at everything, print the table, leave it as JSON; UserError when something is bad."""
    cfg, runner = ctx.cfg, ctx.runner
    spec = _spec(runner)
    report = Report()
    has_gpu = cfg.hw.device != "cpu" and torch.cuda.is_available()
    check_software(report, has_gpu)
    check_limits(report, has_gpu)
    check_cores(report)
    check_memory(report, expert_files(runner))
    sizes = None if spec is None else _sizes(cfg, spec, has_gpu)
    if has_gpu:
        ram = None if sizes is None else plan_fit(cfg, sizes, has_gpu).ram
        check_gpu(
            report,
            cfg,
            spec,
            GIB if ram is None else min(max(GIB, ram.cache_nbytes), PIN_MOST_NBYTES),
        )
    else:
        report.add("GPU", "device", "ok", "none is used: the CPU computes")
    record_nbytes = 4 * MIB if sizes is None else sizes.record_nbytes
    check_drives(report, cfg, runner, record_nbytes)
    if sizes is not None:
        check_fit(report, cfg, sizes, has_gpu)
    before = read_record(runner, record_nbytes)
    unsteady = check_steadiness(report, before, cfg.model.name)
    print(format_table(report.findings))
    _save(ctx, report, record_nbytes, unsteady)
    bad = [f"{f.area}: {f.what}" for f in report.findings if f.verdict == "bad"]
    if bad:
        raise UserError(
            f"doctor found what will not do: {', '.join(bad)}",
            "the table says what to do about each",
        )


def _spec(runner: Runner) -> Any:
    made = runner.find("download")
    if made is not None:
        return load_family(runner.cfg.model.family).read_spec(snapshot_of(made))
    return planned_spec(runner.cfg)


def _sizes(cfg: RunConfig, spec: Any, has_gpu: bool) -> Any:
    dtype = torch.bfloat16 if has_gpu else torch.float32
    return load_family(cfg.model.family).planned_sizes(spec, cfg, dtype, has_gpu)


def check_fit(report: Report, cfg: RunConfig, sizes: Any, has_gpu: bool) -> None:
    """Whether the memory plans work out, and the speed that the laws give with the rates of just now."""
    fit = plan_fit(cfg, sizes, has_gpu)
    for fault in fit.faults:
        report.add("model", "memory plan", "bad", fault.message, fault.hint)
    if fit.ram is not None and load_family(cfg.model.family).IS_DENSE:
        kept, where = fit.ram.cache_rows, "RAM"
        if fit.vram is not None:
            kept, where = fit.vram.kept_slots, "VRAM"
        is_whole = kept == sizes.num_experts
        report.add(
            "model", "layers", "ok" if is_whole else "warn", f"{kept} of {sizes.num_experts} stay in {where}",
            "" if is_whole else "the others pass through for every token: set model.weights=int8_rows or nvfp4",
        )  # fmt: skip
        return
    rates = report.rates
    drive, memory = rates.get("drive_gib_s", 0.0), rates.get("vram_gib_s" if has_gpu else "ram_gib_s", 0.0)  # fmt: skip
    if fit.ram is None or not drive or not memory or (has_gpu and not rates.get("pcie_gib_s")):
        return
    cache = fit.ram.cache_nbytes
    report.add(
        "model", "expert cache", "ok" if usable_cache(sizes, cache) else "warn",
        f"{format_nbytes(cache)}, {fit.ram.cache_rows} of {sizes.num_layers * sizes.num_experts} experts",
        "" if usable_cache(sizes, cache) else "smaller than a token's experts, little is found again: free RAM",
    )  # fmt: skip
    machine = Machine(Rates(drive, memory, rates.get("pcie_gib_s", 0.0)), has_gpu, cache)
    bound = "" if has_gpu else "at most, arithmetic not counted: "
    report.add(
        "model",
        f"speed of {cfg.model.name}",
        "ok",
        f"{bound}{tok_s(sizes, machine):.2f} tok/s by the laws (stages=[plan] shows them)",
    )


def _save(ctx: StageContext, report: Report, record_nbytes: int, unsteady: list[str]) -> None:
    """Leave the record for `plan` and `advise`, and all numbers in the run's folder."""
    path = ctx.runner.root.parent / RECORD_NAME
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    drives: list[dict[str, Any]] = []
    for number, folder in drive_folders(ctx.runner).items():
        names = {name: rate_name(name, number) for name in DRIVE_RATES}
        if not report.rates.get(names["drive_gib_s"]):
            continue
        mount = find_mount(folder)
        drives.append(
            {
                "identity": drive_identity(mount),
                "folder": str(folder),
                "interface": mount.interface,
                "record_nbytes": record_nbytes,
                "when": when,
                **({} if number is None else {"drive": number}),
                **{n: report.rates[own] for n, own in names.items() if own in report.rates},
            }
        )
    record = {
        "when": when,
        "host": platform.node(),
        "machine": machine_identity(),
        "model": ctx.cfg.model.name,
        "unsteady": unsteady,
        # a run without the GPU knows nothing of its link, an earlier one did
        "rates": {**read_record(ctx.runner).rates, **report.rates},
        "drives": merged_drives(path, *drives),
        "findings": [asdict(finding) for finding in report.findings],
        "drive_grid": [asdict(rate) for rate in report.grid],
    }
    text = json.dumps(record, indent=1) + "\n"
    write_atomically(path, text)
    if ctx.runner.run_dir is not None:
        write_atomically(ctx.runner.run_dir / RECORD_NAME, text)


STAGE = Stage(name="doctor", run=run, is_endpoint=True)
