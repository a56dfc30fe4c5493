"""What is wrong with a run: every group's own checks, and those that look at several groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from conf.schema import (
    advise,
    bench,
    cache,
    deepseek,
    drafts,
    files,
    hw,
    memory,
    model,
    run_config,
    serve,
    simulate,
)
from conf.schema.names import nearest
from conf.schema.run_config import RunConfig
from conf.schema.stages import NOT_FOR_FAMILY, STAGES

# key -> (smallest, largest), of all groups
RANGES: dict[str, tuple[float, float]] = {
    **model.RANGES,
    **hw.RANGES,
    **cache.RANGES,
    **drafts.RANGES,
    **deepseek.RANGES,
    **memory.RANGES,
    **serve.RANGES,
    **files.RANGES,
    **bench.RANGES,
    **simulate.RANGES,
    **advise.RANGES,
    **run_config.RANGES,
}


def faults(run: RunConfig) -> Iterable[str]:
    """Yield every fault of a run, one sentence each."""
    yield from _range_faults(run)
    yield from model.faults(run.model)
    yield from hw.faults(run.hw)
    yield from drafts.faults(run.drafts)
    yield from memory.faults(run.memory, run.stages)
    yield from bench.faults(run.spot_check)
    yield from advise.faults(run.advise)
    yield from _drives_faults(run)
    yield from _family_faults(run)
    yield from _drafts_faults(run)
    yield from _batch_faults(run)
    yield from _cpu_experts_faults(run)
    yield from _weight_faults(run)
    yield from _stage_faults(run)


def _range_faults(run: RunConfig) -> Iterable[str]:
    for key, (low, high) in RANGES.items():
        value: Any = run
        for part in key.split("."):
            value = getattr(value, part)
        if value is None:
            continue
        if not math.isfinite(value) or value < low:
            yield f"{key} must be at least {low:g}, got {value:g}"
        elif value > high:
            yield f"{key} must be at most {high:g}, got {value:g}"


def _drives_faults(run: RunConfig) -> Iterable[str]:
    drives = run.hw.drives
    if drives and "repack" not in run.model.setup and run.hw.spread is not hw.Spread.mirror:
        yield (
            f"hw.spread={run.hw.spread.value} packs experts anew, and model={run.model.name} reads them in the "
            "released shards: set hw.spread=mirror"
        )
    if drives and run.model.weights is not model.Weights.stored:
        yield (
            f"hw.drives has copies of released shards, not of model.weights={run.model.weights.value}: leave one of "
            "them out"
        )


def _family_faults(run: RunConfig) -> Iterable[str]:
    if run.deepseek.arithmetic is not deepseek.Arithmetic.reference:
        return
    if run.deepseek.head is not deepseek.Head.gpu:
        yield "deepseek.head is of deepseek.arithmetic=native: leave out one of the two"
    if "patch" not in run.model.setup:
        yield (
            "deepseek.arithmetic=reference needs the release's own code, and "
            f"model={run.model.name} comes without it: set deepseek.arithmetic=native"
        )
    if run.deepseek.replay is not deepseek.Replay.exact:
        yield "deepseek.replay=bounded is of deepseek.arithmetic=native: leave out one of the two"
    if run.drafts.enabled:
        yield "drafts are of deepseek.arithmetic=native: leave out drafts.enabled, or set that"
    if run.hw.cpu_experts != "off":
        yield "hw.cpu_experts is of deepseek.arithmetic=native: leave out hw.cpu_experts, or set that"


def _drafts_faults(run: RunConfig) -> Iterable[str]:
    if not run.drafts.enabled:
        if run.bench.acceptance is not None and "bench" in run.stages:
            yield "bench.acceptance says how many guesses are right, and nobody guesses: add drafts.enabled=true"
        return
    if run.record:
        yield "record=true writes what single tokens ask for: leave out drafts.enabled, or record"
    plain = [name for name in run.stages if name.startswith("memory_") or name == "simulate"]
    if plain:
        yield f"stages=[{plain[0]}] knows no drafts: leave out drafts.enabled"


def _batch_faults(run: RunConfig) -> Iterable[str]:
    if run.serve.max_batch == 1:
        return
    if run.drafts.enabled:
        yield "drafts are for one conversation at a time: leave out drafts.enabled or serve.max_batch"
    if run.record:
        yield "record=true writes the routes of one conversation at a time: leave out record or serve.max_batch"


def _cpu_experts_faults(run: RunConfig) -> Iterable[str]:
    if run.hw.cpu_experts == "off":
        return
    if run.model.family not in ("qwen", "deepseek"):
        yield (
            f"hw.cpu_experts is of models with FP4 experts, model={run.model.name} is of the family "
            f"{run.model.family}: leave it out"
        )
    if run.hw.device == "cpu":
        yield "hw.cpu_experts shares experts between GPU and CPU, and hw.device is cpu: leave out one of the two"
    if run.serve.max_batch > 1:
        yield "hw.cpu_experts is for one conversation at a time: leave out hw.cpu_experts or serve.max_batch"
    if run.hw.graphs == "token":
        yield "hw.cpu_experts needs the host between router and experts: leave it out, or set hw.graphs=true"


def _weight_faults(run: RunConfig) -> Iterable[str]:
    is_dense, is_stored = run.model.family == "dense", run.model.weights is model.Weights.stored
    if not is_stored and not is_dense:
        yield (
            f"model.weights={run.model.weights.value} is of dense models, model={run.model.name} is of the family "
            f"{run.model.family}: leave it out"
        )
    if not is_stored and run.cache.verify:
        yield "cache.verify compares layers as they are released: leave it out, or leave out model.weights"
    if is_stored and is_dense and "quantize" in run.stages:
        yield "stages=[quantize] needs a format: add model.weights=int8_rows or model.weights=nvfp4"


def _stage_faults(run: RunConfig) -> Iterable[str]:
    if not isinstance(run.force, (bool, list, str)):
        yield f"force must be a list of stages or true, got {run.force!r}"
    for key, names in (
        ("stages", run.stages),
        ("force", run.forced_stages),
        ("model.setup", run.model.setup),
    ):
        for name in names:
            if name not in STAGES:
                yield f"unknown stage {name!r} in {key}: {nearest(str(name), STAGES)}"
    for name, why in NOT_FOR_FAMILY.get(run.model.family, {}).items():
        if name in run.stages:
            yield f"stages=[{name}] is not for model={run.model.name}: {why}; try stages=[chat] or stages=[bench]"
    if not run.stages:
        yield "stages is empty: name at least one, for instance stages=[chat]"
    if "advise_check" in run.stages and run.advise.answer is None:
        yield "stages=[advise_check] needs a draft: add advise.answer=FILE"
    if "chat" in run.stages and run.prompt is None:
        yield 'stages=[chat] needs a prompt: add prompt="..."'
    if run.prompt is not None and not run.prompt.strip():
        yield 'the prompt is empty: give it as prompt="..."'
