"""What a model needs and how fast it will be on a machine, from the yaml files alone: nothing is fetched or opened.

The machine is the one that `hw` describes, which need not be this one. Rates that it does not give are those that
`doctor` measured here.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from conf.schema import RunConfig
from runtime import hardware
from runtime.budget import (
    MemoryPlan,
    ModelSizes,
    VramPlan,
    describe_ram_limit,
    format_plans,
    plan_memory,
    plan_vram,
    ram_limit,
    vram_limit,
)
from runtime.errors import UserError
from runtime.experts.slots import passing_slots
from runtime.forecast import (
    PROMPT_TOKENS,
    Machine,
    format_lines,
    improvements,
    line,
    prompt_line,
    tok_s,
    token_lines,
)
from runtime.stats import Rates
from runtime.units import GIB, format_duration, format_nbytes
from stages.core import Runner
from stages.disk_report import fetch_line, format_disk
from stages.disk_room import DiskRoom
from stages.doctor_record import read_record
from stages.download import planned_spec, snapshot_of
from stages.files import write_atomically
from stages.stage import Stage, StageContext

log = logging.getLogger("stages")

RESULT_NAME = "plan.json"


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory plans, or why there are none."""

    ram: MemoryPlan | None
    vram: VramPlan | None
    faults: tuple[UserError, ...]
    ram_source: str  # where the RAM that may be used has its number from


def run(ctx: StageContext) -> None:
    """Print disk, memory, floors and speed, each with formula and inputs; refuse a machine that is too small last."""
    cfg = ctx.cfg
    spec = _spec(ctx.runner)
    has_gpu = _has_gpu(cfg)
    family = importlib.import_module(f"runtime.models.{cfg.model.family}")
    dtype = torch.bfloat16 if has_gpu else torch.float32
    sizes: ModelSizes = family.planned_sizes(spec, cfg, dtype, has_gpu)
    fit = plan_fit(cfg, sizes, has_gpu)
    rates, source = planned_rates(cfg, ctx.runner, has_gpu, sizes.record_nbytes)
    if family.IS_DENSE:
        rates, source = None, "the laws are of routed experts, this model takes every layer"
    rooms = ctx.runner.expected_disk(cfg.engine_stages)
    fetching = fetch_line(cfg, rooms)
    print(f"{cfg.model.name} on hw={cfg.hw.name}{'' if has_gpu else ', on the CPU'}")
    print(format_disk(rooms, fetching))
    if plans := format_plans(fit.ram, fit.vram):
        print(plans)
    print(f"RAM that may be used: {fit.ram_source}")
    for warning in () if fit.ram is None else fit.ram.warnings:
        print(f"warning: {warning}")
    found: dict[str, Any] = {}
    if rates is None:
        print(f"speed: not known, {source}")
    else:
        print(f"rates: {_format_rates(rates)} ({source})")
        cache = 0 if fit.ram is None else fit.ram.cache_nbytes
        written = sum(n for room in rooms for name, n in room.parts.items() if name != "download")
        if written:
            making = line(
                "to set up, at least", "L19T",
                read_bytes=written, write_bytes=written, disk_bw=rates.drive_gib_s * GIB,
            )  # fmt: skip
            print(format_lines([making]))
        found = _speed(sizes, Machine(rates, has_gpu, cache))
        found["setup_s"] = making.value if written else 0.0
    result = {
        "model": cfg.model.name,
        "hw": cfg.hw.name,
        "has_gpu": has_gpu,
        "fetch_nbytes": 0 if fetching is None else fetching.inputs["file_bytes"],
        "fetch_s": 0 if fetching is None else fetching.value,
        "disk": [
            {
                "folder": str(room.roots[0]),
                "free_nbytes": room.free_nbytes,
                "stages": dict(room.parts),
            }
            for room in rooms
        ],
        "memory": [
            (what.strip(), nbytes)
            for plan in (fit.ram, fit.vram)
            if plan is not None
            for what, nbytes, _ in plan.rows()
        ],
        "does_not_fit": [fault.message for fault in fit.faults],
        **found,
    }
    if ctx.runner.run_dir is not None:
        path = ctx.runner.run_dir / RESULT_NAME
        write_atomically(path, json.dumps(result, indent=1) + "\n")
        print(f"every number: {path}", file=sys.stderr)
    # of another machine the memory is told by the yaml, the disk by nothing
    _refuse(fit, rooms if cfg.hw.ram_gib is None else ())


def _spec(runner: Runner) -> Any:
    cfg = runner.cfg
    spec = planned_spec(cfg)
    made = runner.find("download")
    if spec is None and made is not None:
        family = importlib.import_module(f"runtime.models.{cfg.model.family}")
        spec = family.read_spec(snapshot_of(made))
    if spec is None:
        raise UserError(
            f"plan finds no usable config.json of model={cfg.model.name}",
            "set model.released to a folder with the model's config.json, or run stages=[download] first",
        )
    return spec


def _has_gpu(cfg: RunConfig) -> bool:
    """Whether the planned machine has a GPU: the yaml says so, or for `auto` this machine."""
    if cfg.hw.device == "cuda" and cfg.hw.vram_gib is None and not torch.cuda.is_available():
        raise UserError(
            "hw.device is cuda, but neither hw.vram_gib nor a GPU here says how much memory it has",
            "set hw.vram_gib to the card's memory, for instance hw.vram_gib=8",
        )
    return cfg.hw.device == "cuda" or (cfg.hw.device == "auto" and torch.cuda.is_available())


def plan_fit(cfg: RunConfig, sizes: ModelSizes, has_gpu: bool) -> Fit:
    """Plan RAM and VRAM of the machine that `hw` describes; a size that it does not give is this machine's."""
    faults = []
    ram = vram = None
    wanted = cfg.hw.ram_gib
    total = hardware.total_ram_nbytes() if wanted is None else (int(wanted * GIB), "hw.ram_gib")
    available = hardware.available_ram_nbytes() if wanted is None else total
    limit = ram_limit(wanted, total, available, cfg.hw.reserve_gib)
    try:
        ram = plan_memory(
            sizes,
            limit,
            cfg.cache.ram_gib,
            cfg.cache.sweep_experts,
            has_gpu,
            cfg.prefetch.experts,
        )
    except UserError as error:
        faults.append(error)
    if has_gpu:
        if cfg.hw.vram_gib is None:
            free, card = torch.cuda.mem_get_info()
        else:
            free = card = int(cfg.hw.vram_gib * GIB)
        in_place = importlib.import_module(f"runtime.models.{cfg.model.family}").READS_IN_PLACE
        copied = 0 if in_place else sizes.top_k
        try:
            vram = plan_vram(
                sizes,
                vram_limit(cfg.hw.vram_gib, card, free, cfg.hw.vram_reserve_gib),
                min(cfg.model.prefill_tokens, cfg.model.context_tokens),
                passing_slots(cfg.prefetch.copy, sizes.record_nbytes, copied)
                if sizes.passing_slots is None
                else sizes.passing_slots,
                cfg.cache.vram_gib,
            )
        except UserError as error:
            faults.append(error)
    return Fit(ram, vram, tuple(faults), describe_ram_limit(wanted, available, cfg.hw.reserve_gib))


def planned_rates(
    cfg: RunConfig, runner: Runner, has_gpu: bool, record_nbytes: int
) -> tuple[Rates | None, str]:
    """Return the rates of the yaml, completed by doctor's record, and where they come from; None: one is missing.

    What of the record does not hold for this machine and drive is said on the log.
    """
    own, kind = cfg.hw.rates, "vram_gib_s" if has_gpu else "ram_gib_s"
    given = {"drive_gib_s": own.drive_gib_s, kind: own.memory_gib_s}
    if has_gpu:
        given["pcie_gib_s"] = own.pcie_gib_s
    missing = [name for name, rate in given.items() if rate is None]
    if not missing:
        return _rates(given, has_gpu), f"conf/hw/{cfg.hw.name}.yaml or the command line"
    if _is_elsewhere(cfg):
        why = f"hw={cfg.hw.name} describes another machine than this one, and gives no {', '.join(missing)}"
        return None, f"{why}: set hw.rates.drive_gib_s and the others"
    record = read_record(runner, record_nbytes)
    for note in record.notes:
        log.warning("plan: %s", note)
    found = {name: record.rates.get(name) if rate is None else rate for name, rate in given.items()}
    if not all(found.values()):
        hint = "run stages=[doctor] to measure it here, or set hw.rates.drive_gib_s and the others"
        return None, f"no rates of this machine: {hint}"
    measured = f"measured by doctor on {record.when}"
    return _rates(found, has_gpu), measured if len(missing) == len(given) else f"given, and {measured}"  # fmt: skip


def _rates(found: Mapping[str, float | None], has_gpu: bool) -> Rates:
    memory = found["vram_gib_s" if has_gpu else "ram_gib_s"]
    return Rates(found["drive_gib_s"] or 0.0, memory or 0.0, found.get("pcie_gib_s") or 0.0)


def _is_elsewhere(cfg: RunConfig) -> bool:
    """Whether `hw` cannot be this machine: it has more RAM, or a GPU that is not here."""
    ram_gib = cfg.hw.ram_gib or 0
    needs_card = cfg.hw.device == "cuda" and not torch.cuda.is_available()
    return needs_card or ram_gib * GIB > hardware.total_ram_nbytes()[0]


def _speed(sizes: ModelSizes, machine: Machine) -> dict[str, Any]:
    lines = token_lines(sizes, machine)
    print(format_lines(lines))
    with_cache, bare = tok_s(sizes, machine), replace(machine, cache_nbytes=0)
    without = tok_s(sizes, bare)
    prompts = [prompt_line(sizes, m) for m in (machine, bare)]
    print(format_lines(prompts[:1]))
    bound = "" if machine.has_gpu else " at most: arithmetic on the CPU is not in these laws"
    print(
        f"expected: {with_cache:.2f} tok/s with {format_nbytes(machine.cache_nbytes)} of expert cache, {without:.2f} "
        f"without{bound}"
    )
    print(
        f"first token after {PROMPT_TOKENS} tokens: {format_duration(prompts[0].value)} with what the cache holds, "
        f"{format_duration(prompts[1].value)} without (within 30 %)"
    )
    better = improvements(sizes, machine)
    print("what would help: " + "; ".join(f"{what}: {value:.2f} tok/s" for what, value in better))
    return {
        "tok_s": with_cache,
        "tok_s_without_cache": without,
        "first_token_s": prompts[0].value,
        "first_token_s_without_cache": prompts[1].value,
        "improvements": dict(better),
        "lines": [
            {
                "what": x.what,
                "value": x.value,
                "unit": x.law.unit,
                "law": x.law.id,
                "formula": x.law.text,
                "inputs": x.inputs,
            }
            for x in (*lines, *prompts)
        ],
    }


def _format_rates(rates: Rates) -> str:
    named = {"drive": rates.drive_gib_s, "link": rates.pcie_gib_s, "memory": rates.memory_gib_s}
    return ", ".join(f"{name} {rate:.2f} GiB/s" for name, rate in named.items() if rate)


def _refuse(fit: Fit, rooms: Sequence[DiskRoom]) -> None:
    """Raise the first reason why this machine will not do, with by how much."""
    for fault in fit.faults:
        raise fault
    for room in rooms:
        if room.need_nbytes > room.free_nbytes:
            raise UserError(
                f"{room.roots[0]} has {format_nbytes(room.free_nbytes)} free, {format_nbytes(room.need_nbytes)} are "
                f"needed: {format_nbytes(room.need_nbytes - room.free_nbytes)} too little",
                "free some disk, or set paths.hub and paths.artifacts to a larger drive",
            )


STAGE = Stage(name="plan", run=run, is_endpoint=True)
