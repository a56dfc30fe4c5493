"""The doors to the living memory: where stores are, and one call for a question that comes from elsewhere.

A server's `memory` field is `answer(engine, snapshot, folder, config, field, question, params)`, a reply's its result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import AnswerMode, MemoryConfig
from runtime.engine import Engine
from runtime.living_kv.errors import MemoryUsageError, arch
from runtime.living_kv.memory import Answer, Memory, check_identity, new_header
from runtime.living_kv.store import Store
from runtime.models.dense import DenseModel
from runtime.sampling import SamplingParams


def created_now() -> str:
    """Return the time for a header."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def open_memory(
    engine: Engine, snapshot: Path, root: Path, config: MemoryConfig, is_writer: bool = False
) -> Memory:
    """Open a store with an engine's model; a writer makes it where there is none.

    Raises MemoryUsageError for a model without growing keys and values, StoreRefusedError, StoreLockedError.
    """
    model = engine.model
    if not isinstance(model, DenseModel):
        raise arch(
            f"the living memory needs keys and values of a dense model, this one is {engine.config.model.family}"
        )
    if is_writer and not (root / "HEADER.json").exists():
        store = Store.create(root, new_header(model, snapshot, config, created_now()))
    else:
        store = Store.open(root, is_writer)
    try:
        check_identity(store.header, model, snapshot)
        return Memory(model, engine.codec, store, config)
    except BaseException:
        store.close()
        raise


def answer(
    engine: Engine, snapshot: Path, folder: Path, config: MemoryConfig, field: Mapping[str, Any], question: str,
    params: SamplingParams,
) -> Answer:  # fmt: skip
    """Answer from a store as a request's `memory` field asks: {store, mode, budget, scope}, all but store optional.

    folder: of the stores; a request names one in it, never a path.  The store is read, not changed; `Answer.to_dict` is
    the reply's field. Raises MemoryUsageError for a field that is not understood.
    """
    known = {"store", "mode", "budget", "scope"}
    odd = sorted(field.keys() - known)
    if odd:
        raise MemoryUsageError(f"memory.{odd[0]} is not known", f"use {', '.join(sorted(known))}")
    name = field.get("store")
    if not isinstance(name, str) or not name or Path(name).name != name or name in (".", ".."):
        raise MemoryUsageError(
            f"memory.store must be a store's name, got {name!r}", "name one of the folder of stores"
        )
    budget, mode = field.get("budget", config.budget), field.get("mode", config.mode.value)
    if type(budget) is not int or not 1 <= budget <= config.budget:
        raise MemoryUsageError(
            f"memory.budget must be 1 to {config.budget}, got {budget!r}", "leave it out"
        )
    if mode not in [m.value for m in AnswerMode]:
        raise MemoryUsageError(f"memory.mode {mode!r} is unknown", "use auto, kv, ground or quote")
    scope = field.get("scope", config.scope)
    if not isinstance(scope, str):
        raise MemoryUsageError(
            f"memory.scope must be text, got {scope!r}", "leave it out, or use all"
        )
    settings = replace(config, budget=budget, mode=AnswerMode(mode), scope=scope)
    memory = open_memory(engine, snapshot, folder / name, settings)
    try:
        return memory.ask(question, params)
    finally:
        memory.close()
