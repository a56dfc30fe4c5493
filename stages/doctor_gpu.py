"""What `doctor` finds of the GPU: the card, its link, what may be pinned, whether its expert kernel is right."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch

from conf.schema import RunConfig
from runtime import hardware
from runtime.experts.arena import CUDA_REGISTRAR, PIN_HINT, HostArena, Registrar
from runtime.units import GIB, MIB, format_nbytes
from stages.doctor_report import Report

PIN_STEP_NBYTES = 64 * MIB


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
