"""What the stages of the living memory share: the store's place, the opened memory, how answers are printed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import RunConfig
from runtime.living_kv.errors import EXIT_LOW_CONFIDENCE
from runtime.living_kv.store import Store
from stages.download import PROJECT
from stages.files import write_atomically
from stages.stage import StageContext

METRICS_NAME = "memory.json"


def root_of(cfg: RunConfig) -> Path:
    """Return the store's folder."""
    assert cfg.memory.store is not None, "the schema asks for it"
    name = Path(cfg.memory.store).expanduser()
    if name.is_absolute():
        return name
    folder = Path(cfg.paths.memory).expanduser()
    return (folder if folder.is_absolute() else PROJECT / folder) / name


@contextlib.contextmanager
def opened_store(cfg: RunConfig, is_writer: bool = False) -> Iterator[Store]:
    """Open a store without a model."""
    store = Store.open(root_of(cfg), is_writer)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def opened_memory(ctx: StageContext, is_writer: bool = False) -> Iterator[Any]:
    """Open the store with its model: (memory, engine).  Torch is loaded here, not when the stage is looked up."""
    from runtime.living_kv.service import open_memory
    from stages.download import snapshot_of
    from stages.opening import open_engine

    engine = open_engine(ctx.cfg, ctx.inputs, ctx.runner)
    try:
        snapshot = snapshot_of(ctx.inputs["download"])
        memory = open_memory(engine, snapshot, root_of(ctx.cfg), ctx.cfg.memory, is_writer)
        try:
            yield memory, engine
        finally:
            memory.close()
    finally:
        engine.close()


def sampling(ctx: StageContext, engine: Any) -> Any:
    """Return how an answer is drawn: the config's sampling, greedy where it says nothing."""
    temperature = ctx.cfg.model.sampling.temperature
    return replace(
        engine.default_sampling(), temperature=temperature or 0.0, max_tokens=ctx.cfg.max_tokens
    )


def show_answer(ctx: StageContext, answer: Any) -> None:
    """Print an answer, flagged where the memory is not sure, what it rests on to stderr; set the exit code."""
    if answer.verdict.is_low:
        ctx.runner.exit_code = EXIT_LOW_CONFIDENCE
    print(answer.shown)
    print(
        f"confidence {answer.verdict.confidence:.2f}, mode {answer.mode}, positions {answer.position_mode} up to "
        f"{answer.largest_distance:,}, {answer.fetched_tokens} tokens retrieved",
        file=sys.stderr,
    )
    for found in answer.sentences:
        text = found["text"].strip()
        print(f"  [{found['session']}, sentence {found['sentence_id']}] {text}", file=sys.stderr)


def leave_metrics(ctx: StageContext, found: dict[str, Any]) -> None:
    """Write a run's figures to its folder."""
    if ctx.runner.run_dir is not None:
        write_atomically(ctx.runner.run_dir / METRICS_NAME, json.dumps(found, indent=1) + "\n")
