"""The doors to the living memory: where stores are, and questions that come from elsewhere (a server's `memory`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.schema import AnswerMode, MemoryConfig
from runtime.engine import Engine
from runtime.living_kv.answer import Answer
from runtime.living_kv.commit import LOG_NAME
from runtime.living_kv.errors import MemoryUsageError, StoreNotFoundError, arch
from runtime.living_kv.identity import check_identity, new_header
from runtime.living_kv.layout import HEADER_NAME
from runtime.living_kv.memory import Memory
from runtime.living_kv.quote import check_scope
from runtime.living_kv.store import Store
from runtime.models.dense import DenseModel
from runtime.sampling import SamplingParams

FIELDS = ("store", "mode", "budget", "scope")


def created_now() -> str:
    """Return the time for a header."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def dense_model(engine: Engine) -> DenseModel:
    """Return an engine's model. Raises MemoryUsageError for one without growing keys and values."""
    if not isinstance(engine.model, DenseModel):
        raise arch(
            f"the living memory needs keys and values of a dense model, this one is {engine.config.model.family}"
        )
    return engine.model


def open_memory(
    engine: Engine, snapshot: Path, root: Path, config: MemoryConfig, is_writer: bool = False
) -> Memory:
    """Open a store with an engine's model; a writer makes it where there is none.

    Raises MemoryUsageError for a model that has no memory, StoreRefusedError, StoreLockedError.
    """
    model = dense_model(engine)
    if is_writer and not (root / HEADER_NAME).exists():
        store = Store.create(root, new_header(model, snapshot, config, created_now()))
    else:
        store = Store.open(root, is_writer)
    try:
        check_identity(store.header, model, snapshot)
        return Memory(model, engine.codec, store, config)
    except BaseException:
        store.close()
        raise


class MemoryService:
    """Answers from the stores of one folder, for one engine. Stores are read, never changed.

    The store asked last stays open, at its newest commit: a writer elsewhere is never waited for, and what it has
    committed before a question is found by it.
    """

    def __init__(self, engine: Engine, snapshot: Path, folder: Path, config: MemoryConfig) -> None:
        """folder: of the stores; a request names one in it, never a path."""
        self._engine, self._snapshot, self._folder, self._config = engine, snapshot, folder, config
        self._memory: Memory | None = None
        self._version: tuple[object, ...] = ()

    def check(self, field: Mapping[str, Any]) -> None:
        """Refuse what `answer` would refuse. From any thread, at any time.

        Raises MemoryUsageError for a field that is not understood, StoreNotFoundError, StoreRefusedError.
        """
        model = dense_model(self._engine)
        name, settings = self._read(field)
        store = Store.open(self._folder / name)
        try:
            check_identity(store.header, model, self._snapshot)
            check_scope(store, settings.scope)
        finally:
            store.close()

    def answer(
        self,
        field: Mapping[str, Any],
        question: str,
        params: SamplingParams,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Answer as a request's `memory` field asks: {store, mode, budget, scope}, all but store optional.

        In the engine's thread.  after_layer: called again and again while the model reads and draws; may raise.
        """
        name, settings = self._read(field)
        memory = self._opened(name)
        # buffers are made for the config's budget, which no request exceeds
        memory.config, memory.after_layer = settings, after_layer
        return memory.ask(question, params)

    def close(self) -> None:
        """Let go of the store."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _opened(self, name: str) -> Memory:
        root = self._folder / name
        version = (name, _version(root / HEADER_NAME), _version(root / LOG_NAME))
        if self._memory is None or version != self._version:
            self.close()
            self._memory = open_memory(self._engine, self._snapshot, root, self._config)
            self._version = version
        return self._memory

    def _read(self, field: Mapping[str, Any]) -> tuple[str, MemoryConfig]:
        """Return a store's name and the settings of one question."""
        config = self._config
        odd = sorted(field.keys() - set(FIELDS))
        if odd:
            raise MemoryUsageError(f"memory.{odd[0]} is not known", f"use {', '.join(FIELDS)}")
        name = field.get("store")
        if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
            raise MemoryUsageError(
                f"memory.store must be a store's name, got {name!r:.80}",
                "name one of the folder of stores",
            )
        if name in (".", "..") or not (self._folder / name / HEADER_NAME).is_file():
            raise StoreNotFoundError(
                f"there is no store {name!r:.80} on this server",
                "make it with stages=[memory_ingest]",
            )
        budget, mode = field.get("budget", config.budget), field.get("mode", config.mode.value)
        if type(budget) is not int or not 1 <= budget <= config.budget:
            raise MemoryUsageError(
                f"memory.budget must be 1 to {config.budget}, got {budget!r:.40}", "leave it out"
            )
        if mode not in [m.value for m in AnswerMode]:
            raise MemoryUsageError(
                f"memory.mode {mode!r:.40} is unknown", "use auto, kv, ground or quote"
            )
        scope = field.get("scope", config.scope)
        if not isinstance(scope, str):
            raise MemoryUsageError(
                f"memory.scope must be text, got {scope!r:.40}", "leave it out, or use all"
            )
        return name, replace(config, budget=budget, mode=AnswerMode(mode), scope=scope)


def _version(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is appended to or replaced."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None  # a store without a commit has no log
    return found.st_ino, found.st_size, found.st_mtime_ns
