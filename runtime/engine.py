"""Everything that one loaded model is made of, wired in one place: `Engine.open`."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from conf.schema import RunConfig
from runtime import hardware
from runtime.budget import MemoryPlan, plan_memory, ram_limit
from runtime.errors import ContextLengthError, UserError
from runtime.experts.layout import PackedLayout
from runtime.experts.reader import DirectReader
from runtime.experts.streamer import ExpertSource, ExpertStreamer, ResidentExperts
from runtime.rows import RowReader
from runtime.sampling import SamplingParams
from runtime.stats import ExpertCounters, Rates, TokenStats
from runtime.text import TextCodec

log = logging.getLogger(__name__)


class Model(Protocol):
    """What an engine asks of a model family's model."""

    experts: ExpertSource
    rows: RowReader

    def new_state(self) -> Any: ...

    def prefill(self, tokens: list[int], state: Any, all_logits: bool = False) -> Tensor: ...

    def decode(self, token: int, state: Any) -> Tensor: ...

    def expert_scales(self, layer: int, expert: int) -> Tensor: ...

    @property
    def dense_nbytes(self) -> int: ...

    @property
    def device_wait_ns(self) -> int: ...


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """What the set-up stages made."""

    snapshot: Path  # config, tokenizer, and the row tables inside their shards
    pack: Path
    residents: Path


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals at one moment."""

    experts: ExpertCounters
    row_read_nbytes: int
    row_wait_ns: int
    device_wait_ns: int  # the host, for the GPU


def load_family(name: str) -> Any:
    """Return the module of a model family, `runtime/models/<name>.py`."""
    return importlib.import_module(f"runtime.models.{name}")


class Engine:
    """One model, ready to compute. Not for two threads at once."""

    def __init__(
        self,
        config: RunConfig,
        model: Model,
        codec: TextCodec,
        plan: MemoryPlan,
        layout: PackedLayout,
    ) -> None:
        self.config = config
        self.model = model
        self.codec = codec
        self.plan = plan
        self.context_tokens = config.model.context_tokens
        self.prefill_tokens = config.model.prefill_tokens
        self.num_tokens = codec.vocab_size
        self._layout = layout

    @classmethod
    def open(cls, config: RunConfig, files: EngineFiles, is_resident: bool = False) -> Self:
        """Plan the memory, load the residents, open the experts.

        is_resident: read every expert into memory instead of streaming (what streamed runs are compared with).
        """
        torch.set_num_threads(hardware.compute_threads(config.hw.compute_threads))
        device = hardware.resolve_device(config.hw.device)
        dtype = hardware.resolve_dtype(config.hw.dtype, device)
        family = load_family(config.model.family)
        spec = family.read_spec(files.snapshot)
        family.check_context(spec, config.model.context_tokens)
        layout = PackedLayout.open(files.pack)
        sizes = family.model_sizes(
            spec, files.residents, layout, config.model.context_tokens, dtype
        )
        limit = ram_limit(
            config.hw.ram_gib,
            hardware.total_ram_nbytes(),
            hardware.available_ram_nbytes(),
            config.hw.reserve_gib,
        )
        plan = plan_memory(sizes, limit, config.cache.ram_gib, config.cache.sweep_experts)
        for warning in plan.warnings:
            log.warning("%s", warning)
        reader = DirectReader(layout.files, config.hw.drive)
        experts: ExpertSource
        if is_resident:
            experts = ResidentExperts(layout, reader)
        else:
            experts = ExpertStreamer(
                layout, reader, plan.cache_rows, plan.sweep_rows, config.prefetch.experts
            )
        try:
            if device.type == "cuda":
                experts.pin()
            model = family.open_model(spec, files, experts, config, device, dtype)
        except BaseException:
            experts.close()
            raise
        return cls(config, model, TextCodec(files.snapshot), plan, layout)

    def new_state(self) -> Any:
        """Return the state of an empty conversation."""
        return self.model.new_state()

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise UserError for an empty prompt, ContextLengthError for one that leaves no room for an answer."""
        if not prompt:
            raise UserError("the prompt is empty", "send at least one message with text")
        if len(prompt) >= self.context_tokens:
            raise ContextLengthError(len(prompt), self.context_tokens)

    def default_sampling(self) -> SamplingParams:
        """Return the config's sampling, completed by the model's generation_config.json."""
        own, released = self.config.model.sampling, self.codec.generation
        does_sample = bool(released.get("do_sample", True))

        def pick(value: Any, key: str, fallback: Any) -> Any:
            return value if value is not None else released.get(key, fallback)

        return SamplingParams(
            temperature=float(pick(own.temperature, "temperature", 1.0))
            if does_sample or own.temperature
            else 0.0,
            top_p=float(pick(own.top_p, "top_p", 1.0)),
            top_k=int(pick(own.top_k, "top_k", 0)),
            min_p=own.min_p,
            seed=own.seed,
        )

    def counters(self) -> Counters:
        """Return the running totals."""
        rows = self.model.rows
        return Counters(
            self.model.experts.counters.copy(),
            rows.read_nbytes,
            rows.wait_ns,
            self.model.device_wait_ns,
        )

    def token_stats(
        self, position: int, num_tokens: int, started: float, before: Counters
    ) -> TokenStats:
        """Return what was spent since `started` (perf_counter seconds) and `before`."""
        now = self.counters()
        spent = now.experts.since(before.experts)
        return TokenStats(
            position=position,
            num_tokens=num_tokens,
            total_ms=(time.perf_counter() - started) * 1e3,
            drive_wait_ms=spent.wait_ns / 1e6,
            row_wait_ms=(now.row_wait_ns - before.row_wait_ns) / 1e6,
            device_wait_ms=(now.device_wait_ns - before.device_wait_ns) / 1e6,
            counters=spent,
            row_read_nbytes=now.row_read_nbytes - before.row_read_nbytes,
        )

    def measure_rates(self) -> Rates:
        """Measure drive and memory now, on this model's own expert file: about half a second."""
        drive = hardware.measure_drive_gib_s(self._layout, self.config.hw.drive)
        return Rates(drive, hardware.measure_memory_gib_s())

    @property
    def dense_nbytes(self) -> int:
        """Bytes that one token reads from memory at least: residents and its experts."""
        return self.model.dense_nbytes

    def close(self) -> None:
        """End the reader threads and close the files."""
        self.model.experts.close()
        self.model.rows.close()
