"""What to do to run a model: every path with a verdict and a number. Needs no language model, no GPU and no network."""

from __future__ import annotations

import logging
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conf.schema import RunConfig, Source
from runtime import cgroups
from runtime.advisor import kb as knowledge
from runtime.advisor.advice import advise, reports, to_json
from runtime.advisor.facts import Machine, machine_of, situation_of, with_known
from runtime.advisor.identity import find_variant
from runtime.advisor.kb import KnowledgeBase, is_date
from runtime.advisor.local_model import model_from_folder
from runtime.advisor.own_runs import Here, read_own_runs
from runtime.advisor.picture import draw
from runtime.advisor.question import Heard, hear
from runtime.advisor.question_hardware import hear_hardware, heard_of, machine_heard
from runtime.advisor.render import format_advice, to_markdown
from runtime.errors import UsageError
from runtime.units import GIB
from stages.core import Runner
from stages.doctor_record import read_record
from stages.files import write_atomically
from stages.stage import Stage, StageContext

log = logging.getLogger("stages")

JSON_NAME, TEXT_NAME, PLOT_NAME = "advice.json", "advice.md", "advice.png"
ROOT = Path(__file__).resolve().parents[1]


def run(ctx: StageContext) -> None:
    """Print a line a path; leave the advice as JSON, Markdown and a picture in the folder of the run."""
    cfg = ctx.cfg
    kb = knowledge.load()
    heard = hear(kb, cfg.advise.question) if cfg.advise.question else None
    hardware = hear_hardware(kb, cfg.advise.question) if cfg.advise.question else None
    model, variant = wanted_model(kb, cfg, heard)
    if heard is not None and model["id"].startswith("model-local-"):
        print(
            f"the question names no model of the base: this is about model={cfg.model.name}, "
            "advise.model= names another",
            file=sys.stderr,
        )
    machine = wanted_machine(kb, cfg, ctx.runner)
    if hardware is not None:
        machine = machine_heard(kb, hardware, machine, is_named=is_machine_named(kb, cfg))
    here = Here(platform.node(), _total_ram(), model)
    told = {k: v for k, v in asdict(cfg.advise.situation).items() if v is not None}
    situation = situation_of(kb, {**(heard.situation if heard else {}), **told})
    cache = None if cfg.cache.ram_gib is None else cfg.cache.ram_gib * GIB
    advice = advise(
        kb,
        model,
        variant,
        machine,
        situation,
        as_of(kb, cfg),
        question=cfg.advise.question,
        heard=heard_of(kb, heard, hardware),
        asked=() if heard is None else heard.gpus,
        cache_bytes=cache,
        own_runs=read_own_runs(kb, outputs_of(cfg), here),
    )
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(format_advice(advice, width), flush=True)
    folder = ctx.runner.run_dir
    if folder is None:
        return
    write_atomically(folder / JSON_NAME, to_json(advice))
    write_atomically(folder / TEXT_NAME, to_markdown(advice, reports(kb)))
    print(f"with every calculation: {folder / TEXT_NAME}", file=sys.stderr)
    if cfg.advise.plot and draw(advice, folder / PLOT_NAME):
        print(f"plot: {folder / PLOT_NAME}", file=sys.stderr)


def is_machine_named(kb: KnowledgeBase, cfg: RunConfig) -> bool:
    """Return whether advise.system or hw= names a machine of the base, and not just the one that this runs on."""
    return cfg.advise.system is not None or any(
        d.get("hw") == cfg.hw.name for d in kb.all("system")
    )


def as_of(kb: KnowledgeBase, cfg: RunConfig) -> str:
    """Return the day that ages of prices are counted to; never the clock's. Raises UsageError."""
    day = cfg.advise.as_of or kb.as_of
    if not is_date(day):
        raise UsageError(f"advise.as_of is {day!r}", "give a day such as 2026-11-30")
    return day


def outputs_of(cfg: RunConfig) -> Path:
    """Return the folder with all runs."""
    path = Path(cfg.paths.outputs).expanduser()
    return path if path.is_absolute() else ROOT / path


def wanted_model(
    kb: KnowledgeBase, cfg: RunConfig, heard: Heard | None = None
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the model and variant asked about: advise.model, else model=, else the one that the question names, else
    what stands in the model's folder. Raises UsageError.
    """
    name = cfg.advise.model or cfg.model.name
    match = kb.find("model", name, cfg.advise.variant)
    if match.document is None and cfg.advise.model is None and heard and len(heard.models) == 1:
        match = kb.find("model", heard.models[0], cfg.advise.variant)
    if (
        match.document is None
        and cfg.advise.model is None
        and cfg.model.path
        and cfg.model.source in (Source.bundled, Source.local)
    ):
        path = Path(cfg.model.path).expanduser()
        folder = path if path.is_absolute() else ROOT / path
        known = {"qwen": "nvfp4", "deepseek": "fp4-fp8"}
        document = model_from_folder(folder, cfg.model.name, known.get(cfg.model.family))
        return document, document["variants"][0]
    if match.document is None:
        near = (
            f"near it: {', '.join(match.candidates)}"
            if match.candidates
            else f"known: {', '.join(m['name'] for m in kb.all('model'))}"
        )
        raise UsageError(
            f"{match.why} of the knowledge base",
            f"{near}; else add it to conf/advisor/models.yaml, or point model.path at its folder",
        )
    if match.variant is not None:
        return match.document, match.variant
    if not match.document["variants"]:
        raise UsageError(
            f"of {match.document['name']} no sizes are known",
            "add a variant in conf/advisor/models.yaml",
        )
    variant = find_variant(match.document, match.document["variants"][0]["id"])
    assert variant is not None
    return match.document, variant


def wanted_machine(kb: KnowledgeBase, cfg: RunConfig, runner: Runner) -> Machine | None:
    """Return the machine: advise.system, else the one of hw=, else this one as far as files tell."""
    hw = cfg.hw
    if cfg.advise.system is not None:
        return machine_of(kb, cfg.advise.system)
    told: dict[str, float | None] = {
        "ram_bytes": None if hw.ram_gib is None else hw.ram_gib * GIB,
        "disk_bw": None if hw.rates.drive_gib_s is None else hw.rates.drive_gib_s * GIB,
        "pcie_bw": None if hw.rates.pcie_gib_s is None else hw.rates.pcie_gib_s * GIB,
    }
    if any(d.get("hw") == hw.name for d in kb.all("system")):
        return machine_of(kb, hw.name, **told)
    record = read_record(runner)
    for note in record.notes:
        log.warning("advise: %s", note)
    drive = {"id": "drive-here", "interface": record.interface}
    found = Machine(
        f"this machine (hw={hw.name})",
        ram_bytes=_total_ram(),
        cpu=_this_cpu(),
        drives=({k: v for k, v in drive.items() if v},) if record.rates.get("drive_gib_s") else (),
    )
    is_as_it_is = all(value is None for value in told.values())
    for field, key in (
        ("disk_bw", "drive_gib_s"),
        ("pcie_bw", "pcie_gib_s"),
        ("ram_bw", "ram_gib_s"),
    ):
        if told.get(field) is None and record.rates.get(key):
            told[field] = record.rates[key] * GIB
    told["disk_free"] = float(_free(runner.root)) if found.drives else None
    about = {"when": record.when, "unsteady": list(record.unsteady)} if record.rates else None
    return replace(with_known(found, told), is_here=is_as_it_is, measured=about)


def _free(folder: Path) -> int:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free


def _total_ram() -> float | None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    here = [1024 * float(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    limits = [float(limit.nbytes) for limit in cgroups.memory_limits()]
    return min([*here, *limits], default=None)


def _this_cpu() -> dict[str, Any] | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return {
                "id": "cpu-here",
                "name": "this processor",
                "isa": line.partition(":")[2].split(),
            }
    return None


STAGE = Stage(name="advise", run=run, is_endpoint=True)
