"""Whether this machine is fit for a model, and what to expect: drive, memory, link, GPU, cores, kernels, software.

Everything is measured here and now, within two minutes, and nothing is changed but for a probe file where the model has
none yet. Each finding is ok, warn or bad, and says what to do. `plan` uses the rates that are recorded here.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import json
import logging
import os
import platform
import resource
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from conf.schema import RunConfig, Source
from runtime import cgroups, cores, hardware
from runtime.drives import (
    DriveRate,
    allows_direct_reads,
    cached_nbytes,
    measure_grid,
    measure_rate,
)
from runtime.engine import load_family
from runtime.errors import UserError
from runtime.experts.arena import CUDA_REGISTRAR, PIN_HINT, HostArena, Registrar
from runtime.experts.schedule import depth_of
from runtime.forecast import Machine, tok_s, usable_cache
from runtime.mounts import IN_MEMORY, Mount, find_mount
from runtime.stats import Rates
from runtime.units import GIB, MIB, format_nbytes
from stages.core import DISK_MARGIN_NBYTES, Runner, Stage, StageContext
from stages.doctor_record import (
    DRIVE_RATES,
    RECORD_NAME,
    Record,
    changes,
    drive_folders,
    drive_identity,
    expert_files,
    expert_folder,
    machine_identity,
    merged_drives,
    rate_name,
    read_record,
)
from stages.doctor_report import Finding, Report
from stages.download import planned_spec, snapshot_of
from stages.files import write_atomically
from stages.hub import hub_cache
from stages.plan import plan_fit

log = logging.getLogger("stages")

WINDOWS, PIECES = (1, 2, 4), (1, 2, 4, 8)
CEILING_WINDOW, CEILING_PIECES = 8, 1  # whole records, many at once: what the drive can do
LEAST_FILE_NBYTES = 64 * MIB  # less is no measure of a drive
PROBE_NAME = "doctor-probe.bin"
VIRTUAL = ("vd", "xvd")  # drives that say they spin, whatever is behind them
SLOW_GIB_S = 0.5  # a drive below this makes every large model crawl
THROTTLED = 0.85  # of the first seconds' rate
SETTING_SHARE = 0.9  # of the best setting's rate, below which another one is recommended
MEMLOCK_UNLIMITED = resource.RLIM_INFINITY
PIN_STEP_NBYTES = 64 * MIB
PIN_MOST_NBYTES = 32 * GIB  # tried, however large the cache: each GiB takes a part of a second
FEW_FILES = 1024  # open at once: shards, threads and connections need some hundreds


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


# ---- software and limits ---------------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_software(report: Report, has_gpu: bool) -> None:
    """Versions, and those that are known to go wrong."""
    names = ("torch", "triton", "numpy", "huggingface_hub")
    found = {name: _version(name) for name in names}
    report.add(
        "software",
        "versions",
        "ok",
        ", ".join(
            f"{n} {v}" for n, v in {"python": platform.python_version(), **found}.items() if v
        ),
    )
    if not hasattr(torch, "float8_e8m0fnu"):
        report.add(
            "software",
            "torch",
            "bad",
            f"{found['torch']} has no E8M0 numbers",
            "pip install -c constraints.txt torch",
        )
    if not hasattr(torch, "float4_e2m1fn_x2"):
        report.add(
            "software",
            "torch",
            "warn",
            f"{found['torch']} has no FP4 numbers: deepseek.arithmetic=reference needs them",
            "pip install -c constraints.txt torch, or keep deepseek.arithmetic=native",
        )
    if has_gpu and found["triton"] is None:
        report.add(
            "software",
            "triton",
            "bad",
            "not installed, and the GPU's kernels are written in it",
            "pip install -c constraints.txt triton",
        )
    if not has_gpu and Path("/dev/nvidiactl").exists():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch finds no CUDA device"
        )
        report.add(
            "software",
            "torch",
            "warn",
            f"there is an NVIDIA driver, but {why}",
            "install a CUDA build of torch, or use hw=cpu on purpose",
        )
    tilelang, capability = (
        _version("tilelang"),
        torch.cuda.get_device_capability() if has_gpu else (0, 0),
    )
    if tilelang == "0.1.8" and capability[0] == 12:
        report.add(
            "software",
            "tilelang",
            "bad",
            "0.1.8 computes wrong numbers on sm_120 without an error",
            "pip install 'tilelang>=0.1.9'; this engine does not use it",
        )
    if has_gpu and ctypes.util.find_library("cuda") is None:
        report.add(
            "software",
            "driver",
            "warn",
            "libcuda is not on the library path",
            "in a container: start it with --gpus all",
        )


def check_limits(report: Report, has_gpu: bool) -> None:
    """Limits of this process."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = files != resource.RLIM_INFINITY and files < FEW_FILES
    report.add(
        "limits",
        "open files",
        "warn" if few else "ok",
        f"{files}",
        f"ulimit -n {FEW_FILES}" if few else "",
    )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == MEMLOCK_UNLIMITED else format_nbytes(locked)
    # CUDA pins through its driver, which does not ask this limit; some container set-ups do
    report.add("limits", "locked memory", "ok", text + (", not asked by CUDA's driver" if has_gpu else ""))  # fmt: skip


def check_cores(report: Report) -> None:
    """Which cores there are, and what a container takes away."""
    found = cores.read_topology()
    slow = sum(core.is_efficiency for core in found)
    kinds = f"{len(found)} CPUs" + (f", {slow} of them efficiency cores" if slow else "")
    report.add("CPU", "cores", "ok", f"{kinds}; {cores.describe(cores.assign(found))}")
    quota = cgroups.cpu_quota()
    if quota is not None and quota < len(found):
        report.add(
            "CPU",
            "container",
            "warn",
            f"a cgroup allows {quota:.1f} of {len(found)} CPUs",
            "raise the container's CPU limit, or set hw.compute_threads",
        )


# ---- memory ----------------------------------------------------------------------------------------------------------


def check_memory(report: Report, files: Sequence[Path]) -> None:
    """RAM as it is now, and how fast one thread reads it."""
    (total, where), (available, source) = hardware.total_ram_nbytes(), hardware.available_ram_nbytes()  # fmt: skip
    report.add("memory", "total", "ok", f"{format_nbytes(total)} ({where})")
    cached = cached_nbytes(files) if files else 0
    note = ""
    if cached:
        note = f"; {format_nbytes(cached)} of it is page cache of this model's files, which direct reads do not need"
    report.add("memory", "available", "ok", f"{format_nbytes(available)} ({source}){note}")
    used = hardware.swap_used_nbytes()
    if used > 256 * MIB:
        report.add(
            "memory",
            "swap",
            "warn",
            f"{format_nbytes(used)} are swapped out",
            "end other programs, or raise hw.reserve_gib: a cache that is swapped is slower than none",
        )
    rate = hardware.measure_memory_gib_s()
    report.rates["ram_gib_s"] = rate
    report.add("memory", "reading, one thread", "ok", f"{rate:.1f} GiB/s")


# ---- GPU -------------------------------------------------------------------------------------------------------------


def check_gpu(report: Report, cfg: RunConfig, spec: Any, wanted_nbytes: int) -> None:
    """The card, its link, and whether its expert kernel computes what plain torch does.

    wanted_nbytes: of RAM that is to be pinned.
    """
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    report.add(
        "GPU",
        "card",
        "ok",
        f"{name}, sm_{major}{minor}, {format_nbytes(free)} of {format_nbytes(total)} free",
    )
    taken = total - free
    if taken > 2 * GIB and cfg.hw.vram_gib is None:
        report.add("GPU", "memory taken", "warn", format_nbytes(taken), "end what else uses the card")  # fmt: skip
    check_link(report, torch.cuda.get_device_properties(0))
    check_pinning(report, wanted_nbytes)
    pcie, vram = hardware.measure_pcie_gib_s(), hardware.measure_vram_gib_s()
    report.rates |= {"pcie_gib_s": pcie, "vram_gib_s": vram}
    verdict = "ok" if pcie >= 5 else "warn"
    advice = "" if pcie >= 5 else "put the card into a slot with more lanes"
    report.add("GPU", "copies from pinned RAM", verdict, f"{pcie:.1f} GiB/s", advice)
    report.add("GPU", "reading its memory", "ok", f"{vram:.0f} GiB/s")
    if spec is not None:
        check_expert_kernel(report, cfg, spec)


def check_expert_kernel(report: Report, cfg: RunConfig, spec: Any) -> None:
    """The kernel that computes the model's experts, against plain torch; not of a family that has none."""
    from stages.doctor_kernels import expert_error

    found = expert_error(cfg.model.family, spec)
    if found is None:
        return
    kernel, error, limit = found
    good = error <= limit
    report.add(
        "GPU", f"kernel {kernel}", "ok" if good else "bad",
        f"relative error {error:.1e} against plain torch, at most {limit:.0e}",
        "" if good else "use hw=cpu, and report card, driver, torch and triton: answers of this GPU may be wrong",
    )  # fmt: skip


def check_pinning(
    report: Report, wanted_nbytes: int, registrar: Registrar = CUDA_REGISTRAR
) -> None:
    """How much RAM the system lets the GPU read in place, of what the expert cache wants, and how fast it is pinned."""
    arena = HostArena(max(1, wanted_nbytes // PIN_STEP_NBYTES), PIN_STEP_NBYTES, registrar)
    try:
        started = time.perf_counter()
        pinned = arena.pin_rows() * arena.row_nbytes
        seconds = time.perf_counter() - started
    finally:
        arena.close()
    report.rates["pinned_gib"] = pinned / GIB
    enough = pinned == arena.nbytes
    verdict = "ok" if enough else "warn" if pinned else "bad"
    text = f"{format_nbytes(pinned)} of {format_nbytes(arena.nbytes)} for experts"
    rate = f" at {pinned / seconds / GIB:.1f} GiB/s" if pinned else ""
    advice = "" if enough else f"the cache shrinks to it: {PIN_HINT}"
    report.add("GPU", "pinning", verdict, text + rate, advice)


def check_link(report: Report, card: Any, root: Path = Path("/sys/bus/pci/devices")) -> None:
    """The PCIe link as it is and as it could be; some cards slow it down while they idle."""
    numbers = (getattr(card, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    found = {}
    for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width"):
        with contextlib.suppress(OSError):
            found[name] = (root / address / name).read_text().strip()
    if len(found) < 4:
        report.add("GPU", "link", "ok", "the system does not say")
        return
    narrow = int(found["current_link_width"]) < int(found["max_link_width"])
    report.add(
        "GPU", "link", "warn" if narrow else "ok",
        f"{found['current_link_speed']} x{found['current_link_width']}, the card could do {found['max_link_speed']} "
        f"x{found['max_link_width']}",
        "use the slot with the most lanes, and look for other cards that share them" if narrow else "",
    )  # fmt: skip


# ---- drives ----------------------------------------------------------------------------------------------------------


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
        from stages.doctor_drives import check_each

        check_each(report, cfg, runner, record_nbytes)
    else:
        measure_place(report, cfg, files, folder, record_nbytes)


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


# ---- what it means ---------------------------------------------------------------------------------------------------


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
        "" if usable_cache(sizes, cache) else "smaller than one token's experts, it finds nothing again: free RAM",
    )  # fmt: skip
    machine = Machine(Rates(drive, memory, rates.get("pcie_gib_s", 0.0)), has_gpu, cache)
    bound = "" if has_gpu else "at most, arithmetic not counted: "
    report.add(
        "model",
        f"speed of {cfg.model.name}",
        "ok",
        f"{bound}{tok_s(sizes, machine):.2f} tok/s by the laws (stages=[plan] shows them)",
    )


def format_table(findings: Sequence[Finding]) -> str:
    """Return a line a finding, with the advice below those that are not ok."""
    lines = []
    for f in findings:
        lines.append(f"{f.verdict:4}  {f.area:8}  {f.what:26}  {f.value}".rstrip())
        if f.advice:
            lines.append(f"      -> {f.advice}")
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("ok", "warn", "bad")}  # fmt: skip
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return "\n".join(lines)


def check_steadiness(report: Report, before: Record, model: str) -> list[str]:
    """Compare the rates with the last record of this machine; return the names of those that moved."""
    moved = changes(before, model, report.rates)
    for name, then in moved.items():
        report.add(
            "steady",
            name,
            "warn",
            f"{report.rates[name]:.3g} now, {then:.3g} on {before.when[:16]}",
            "more than 15 % apart: run it again with nothing else running",
        )
    return sorted(moved)


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
