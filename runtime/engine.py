"""Everything that one loaded model is made of, wired in one place: `Engine.open`."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from conf.schema import RunConfig
from runtime import cores, hardware
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
from runtime.drafts.opening import drafts_on, most_rows, open_drafting
from runtime.drafts.passes import Drafting
from runtime.errors import ContextLengthError, UserError
from runtime.experts.adaptive import cache_for
from runtime.experts.checks import Checksums
from runtime.experts.copies import Copier, CudaCopier
from runtime.experts.cpu_share import Workers
from runtime.experts.layer_slots import LayerSlots
from runtime.experts.layout import ExpertKey, ExpertLayout
from runtime.experts.paced import PacedCopier
from runtime.experts.resident import ResidentExperts
from runtime.experts.routes import RouteHeader, RouteRecorder
from runtime.experts.shared import SharedReads, share
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.experts.source import ExpertSource
from runtime.experts.spread import (
    drive_configs,
    has_reader_process,
    open_reader,
    spare_rows,
    spread_of,
)
from runtime.experts.spread_reader import Copies
from runtime.experts.streamer import ExpertStreamer
from runtime.experts.warm import WarmFile, WarmOwner
from runtime.head_shares import HeadReport
from runtime.models.token_graph import check_token_graph
from runtime.sampling import SamplingParams
from runtime.stats import ExpertCounters, Rates, TokenStats
from runtime.text import TextCodec
from runtime.units import format_nbytes

log = logging.getLogger(__name__)


class RowSource(Protocol):
    """Rows of tables on the drive."""

    @property
    def read_nbytes(self) -> int: ...

    @property
    def wait_ns(self) -> int: ...

    def close(self) -> None: ...


class Model(Protocol):
    """What an engine asks of a model family's model."""

    experts: ExpertSource

    @property
    def rows(self) -> RowSource: ...

    def new_state(self) -> Any: ...

    def prefill(
        self,
        tokens: list[int],
        state: Any,
        all_logits: bool = False,
        after_layer: Callable[[], None] = ...,
    ) -> Tensor: ...

    def decode(self, token: int, state: Any) -> Tensor: ...

    @property
    def dense_nbytes(self) -> int: ...

    @property
    def device_wait_ns(self) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """What the set-up stages made."""

    snapshot: Path  # config, tokenizer, and what is read inside the shards
    pack: Path | None = None  # of families whose experts are packed
    residents: Path | None = None  # of families whose other weights are written anew
    published: Path | None = None  # a release's own code, patched
    checksums: Path | None = None  # of experts that lie inside released files; a pack has its own
    layers: Path | None = None  # of dense models: a quantised copy of their layers and head
    mirror: Path | None = None  # what is known of copies of shards on other drives


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals at one moment."""

    experts: ExpertCounters
    row_read_nbytes: int
    row_wait_ns: int
    device_wait_ns: int  # the host, for the GPU


def _plan_vram(
    config: RunConfig, sizes: ModelSizes, device: torch.device, copied_route: int
) -> VramPlan:
    """Plan the GPU's memory, and hold torch to it where a part of the card was asked for.

    copied_route: as for `passing_slots`.
    """
    free, total = torch.cuda.mem_get_info(device)
    limit = vram_limit(config.hw.vram_gib, total, free, config.hw.vram_reserve_gib)
    copies, tokens = config.prefetch.copy, config.model.prefill_tokens
    tokens = min(tokens, config.model.context_tokens)
    passing = sizes.passing_slots
    if passing is None:
        passing = passing_slots(copies, sizes.record_nbytes, copied_route)
    try:
        plan = plan_vram(sizes, limit, tokens, passing, config.cache.vram_gib)
    except UserError as error:
        if not config.drafts.enabled:
            raise
        hint = f"lower drafts.depth (each guess has a decoder), or {error.hint}"
        raise UserError(error.message, hint) from error
    if config.hw.vram_gib is not None:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    return plan


def _check_graphs(config: RunConfig, family: Any, device: torch.device) -> None:
    """Refuse one graph per token where it cannot be. Raises UserError."""
    if config.hw.token_limit_s is None or device.type == "cpu":
        return
    if not family.HAS_TOKEN_GRAPH:
        raise UserError(
            f"hw.graphs=token is not made for models of the family {config.model.family}",
            "leave out hw.graphs",
        )
    check_token_graph(config.serve.max_batch)


def check_cpu_experts(config: RunConfig, device: torch.device) -> None:
    """Refuse to share experts between a CPU and itself."""
    if config.hw.cpu_experts != "off" and device.type == "cpu":
        raise UserError(
            "hw.cpu_experts shares experts between GPU and CPU, and this run has no GPU",
            "leave out hw.cpu_experts: the CPU computes all experts",
        )


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
        vram_plan: VramPlan | None,
        layout: ExpertLayout,
        cpus: frozenset[int] | None,
        device: torch.device,
        is_direct: bool,
        experts: ExpertStreamer | SlotExperts | LayerSlots | ResidentExperts,
        top_k: int,
        shared: SharedReads | None = None,
        spread: Copies | None = None,
    ) -> None:
        """vram_plan: None on a CPU.  cpus: where the thread ran before it was pinned; None: it was not.

        experts: of the main model, which may stand behind others in `model.experts`.  shared: in front of them, where
        several conversations are decoded together.  spread: where they lie on several drives.
        """
        self.config = config
        self.model = model
        self.drafting: Drafting | None = None
        if config.drafts.enabled:
            self.drafting = open_drafting(config.drafts, model, self._read_nbytes)
        self.codec = codec
        self.plan, self.vram_plan = plan, vram_plan
        self.context_tokens = config.model.context_tokens
        self.prefill_tokens = config.model.prefill_tokens
        if vram_plan is not None:
            self.prefill_tokens = vram_plan.prompt_tokens
        self.num_tokens = codec.vocab_size
        self.num_layers = layout.num_layers
        self.device, self.is_direct = device, is_direct  # experts are read around the page cache
        self.drive_gib_s: float | None = None  # as it was last measured
        self._layout = layout
        self._cpus = cpus
        self._experts, self._top_k, self._spread = experts, top_k, spread
        self.shared = shared
        self._recorder: RouteRecorder | None = None
        self._warm: WarmFile | None = None
        self._core_claim: cores.Claim | None = None  # of the decoding thread's core

    @classmethod
    def open(cls, config: RunConfig, files: EngineFiles, is_resident: bool = False) -> Self:
        """Plan the memory, load the residents, open the experts.

        is_resident: read every expert into memory instead of streaming (what streamed runs are compared with).
        On a GPU the calling thread is the one that decodes: it is pinned to a core until `close`.
        """
        torch.set_num_threads(hardware.compute_threads(config.hw.compute_threads))
        device = hardware.resolve_device(config.hw.device)
        core_plan, core_claim = None, None
        if device.type == "cuda" and config.hw.pin_threads:
            core_plan, core_claim = cores.claim(cores.read_topology())
            if core_plan is not None and config.hw.cpu_experts != "off":
                threads = config.hw.compute_threads  # the decoding one among them
                core_plan = cores.with_computing(core_plan, threads - 1 if threads else None)
            log.info("%s", cores.describe(core_plan))
        if core_plan is None:
            return cls._open(config, files, is_resident, device, None, ())
        # threads inherit the mask: those that read and load start here
        before = cores.pin_current_thread(core_plan.reader_cpus)
        try:
            engine = cls._open(config, files, is_resident, device, before, core_plan.computing_cpus)
        except BaseException:
            cores.pin_current_thread(before)
            if core_claim is not None:
                core_claim.close()
            raise
        engine._core_claim = core_claim
        cores.pin_current_thread({core_plan.decode_cpu})
        gc.freeze()  # a collection in the middle of a token need not look at what stays
        return engine

    @classmethod
    def _open(
        cls,
        config: RunConfig,
        files: EngineFiles,
        is_resident: bool,
        device: torch.device,
        cpus: frozenset[int] | None,
        computing_cpus: Sequence[int],
    ) -> Self:
        check_cpu_experts(config, device)
        dtype = hardware.resolve_dtype(config.hw.dtype, device)
        family = load_family(config.model.family)
        config = replace(config, drafts=drafts_on(config.drafts, device, family.HEADS_ON_GPU))
        spec = family.read_spec(files.snapshot)
        family.check_support(spec, config, device)
        _check_graphs(config, family, device)
        layout = family.expert_layout(spec, files)
        spread = spread_of(layout, files.mirror, files.snapshot)
        spares = spare_rows(spread, config.hw, layout.record_nbytes)
        sizes = family.model_sizes(spec, files, layout, config, dtype)
        sizes = sizes.for_conversations(config.serve.max_batch)
        has_rows = config.drafts.enabled and device.type == "cuda"
        tokens = config.serve.max_batch  # at once
        if has_rows:
            tokens = most_rows(config.drafts, block=0)
            sizes = sizes.for_rows(tokens)
        guess_rows = tokens * config.prefetch.experts
        wanted, reserve = config.hw.ram_gib, config.hw.reserve_gib
        total, available = hardware.total_ram_nbytes(), hardware.available_ram_nbytes()
        limit = ram_limit(wanted, total, available, reserve)
        limited_by = describe_ram_limit(wanted, available, reserve)
        log.info("RAM that may be used: %s (%s)", format_nbytes(limit), limited_by)
        limit -= spares * sizes.record_nbytes
        has_gpu = device.type == "cuda"
        plan = plan_memory(
            sizes,
            limit,
            config.cache.ram_gib,
            config.cache.sweep_experts,
            has_gpu,
            guess_rows,
        )
        for warning in plan.warnings:
            log.warning("%s", warning)
        vram_plan = None
        if has_gpu:
            # a route at a time: of several, those copied before make room for the others
            vram_plan = _plan_vram(
                config, sizes, device, 0 if family.READS_IN_PLACE else spec.top_k
            )
        checksums = None
        if config.cache.verify:
            checksums = Checksums.open(layout, files.checksums, spread)
        has_process = has_reader_process(config.hw.drive, has_gpu) and not is_resident
        reader = open_reader(layout, spread, config.hw, checksums, has_process)
        experts: ExpertStreamer | SlotExperts | LayerSlots | ResidentExperts
        if is_resident:
            experts = ResidentExperts(layout, reader)
        else:
            spare = plan.cache_rows - sizes.top_k - guess_rows
            ahead_rows = max(0, min(2 * config.prefetch.copy, spare))
            experts = ExpertStreamer(
                layout,
                reader,
                plan.cache_rows,
                plan.sweep_rows,
                config.prefetch.experts,
                ahead_rows,
                checksums,
                spares,
                make_cache=cache_for(
                    config.cache.policy,
                    sizes.num_layers,
                    sizes.token_experts,
                    sizes.num_layers * sizes.num_experts,
                ),
                least_rows=sizes.top_k + ahead_rows,
                limit_s=config.hw.token_limit_s if has_gpu else None,
                token_experts=spec.top_k,
            )
        try:
            if vram_plan is not None:
                experts.pin()
                if isinstance(experts, ExpertStreamer):  # it may have found less room than planned
                    plan = replace(
                        plan,
                        cache_rows=experts.cache.num_rows,
                        sweep_rows=experts.max_hold,
                    )
                copies_bytes = CudaCopier(vram_plan.slots, experts.record_nbytes, device)
                is_paced = config.hw.token_limit_s is not None
                copier: Copier = PacedCopier(copies_bytes) if is_paced else copies_bytes
                if family.IS_DENSE:
                    experts = LayerSlots(experts, copier, spec.num_experts, vram_plan.passing_slots)
                else:
                    copies, records = config.prefetch.copy, experts.records
                    experts = SlotExperts(
                        experts, copier, spec.num_layers, spec.top_k, copies, family.READS_IN_PLACE
                    )
                    if config.hw.cpu_experts != "off":
                        threads = hardware.compute_threads(config.hw.compute_threads)
                        threads = len(computing_cpus) + 1 if computing_cpus else threads
                        experts.workers = Workers(computing_cpus, threads, records)
            shared = share(experts) if config.serve.max_batch > 1 else None
            source = shared or (share(experts) if has_rows else experts)
            model = family.open_model(spec, files, layout, source, config, device, dtype)
        except BaseException:
            experts.close()
            raise
        codec = family.open_codec(files.snapshot)
        is_direct = reader.is_direct
        return cls(
            config,
            model,
            codec,
            plan,
            vram_plan,
            layout,
            cpus,
            device,
            is_direct,
            experts,
            spec.top_k,
            shared,
            spread,
        )

    def format_plan(self) -> str:
        """Return who gets which memory, as a table."""
        return format_plans(self.plan, self.vram_plan)

    def record_routes(self, path: Path) -> None:
        """Write every route from now on, until `close`, to a new file. Raises UserError when it cannot be made."""
        assert not isinstance(self._experts, ResidentExperts), "nothing is streamed"
        layout = self._layout
        header = RouteHeader(
            self.config.model.name,
            layout.num_layers,
            layout.num_experts,
            self._top_k,
            layout.record_nbytes,
        )
        self._recorder = self._experts.listener = RouteRecorder(path, header)

    def warm_up(self, path: Path, key: str) -> None:
        """Read what was warm when the file was saved, while nothing else is read; save there from now on.

        key: of the files that the experts are read from: another's set is not used.
        """
        self._warm = WarmFile(path, WarmOwner.of(self._layout, key))
        spare = self.plan.cache_rows - self._top_k - self.config.prefetch.experts
        count = self._streamer.warm_up(self._warm.load(), spare)
        if count:
            nbytes = format_nbytes(count * self._layout.record_nbytes)
            log.info("warm start: %d experts, %s, are read in the background", count, nbytes)

    def save_warm(self) -> None:
        """Save which experts are warm, if that was long ago. Between answers."""
        if self._warm is not None:
            self._warm.save_if_due(self._warm_keys)

    def _warm_keys(self) -> list[ExpertKey]:
        """Return who is kept, the coldest first: VRAM keeps what is used most."""
        kept = self._experts.kept_keys() if isinstance(self._experts, SlotExperts) else []
        in_vram = set(kept)
        return [*(key for key in self._streamer.warm_keys() if key not in in_vram), *kept]

    @property
    def _streamer(self) -> ExpertStreamer:
        source = self._experts.source if isinstance(self._experts, SlotExperts) else self._experts
        assert isinstance(source, ExpertStreamer), "nothing is streamed"
        return source

    def forget_experts(self) -> None:
        """Drop every expert that is kept in RAM or VRAM: the next token finds nothing."""
        if self.vram_plan is not None:
            torch.cuda.synchronize()
        self.model.experts.forget()

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

    def head_report(self) -> HeadReport | None:
        """Return how the head is shared between CPU and GPU; None where one of them has all of it."""
        split = getattr(self.model, "head_split", None)
        return None if split is None else split.report()

    def _read_nbytes(self) -> int:
        """Return the running total of what was read from the drive."""
        return self.model.experts.counters.read_nbytes + self.model.rows.read_nbytes

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

    def measure_rates(self, drive_s: float = 0.3) -> Rates:
        """Measure the drive, on this model's own expert file for `drive_s` seconds, memory and PCIe now."""
        drive = self.measure_drive(drive_s)
        with cores.pinned(self._cpus or os.sched_getaffinity(0)):
            if self.vram_plan is None:
                return Rates(drive, hardware.measure_memory_gib_s())
            return Rates(drive, hardware.measure_vram_gib_s(), hardware.measure_pcie_gib_s())

    def measure_drive(self, duration_s: float) -> float:
        """Measure how many GiB/s of whole experts the drive, or all of hw.drives, gives now."""
        # the threads that read may not be held to the decoding thread's core
        with cores.pinned(self._cpus or os.sched_getaffinity(0)):
            rate = self._measure_drives(duration_s)
        self.drive_gib_s = rate
        return rate

    def _measure_drives(self, duration_s: float) -> float:
        hw = self.config.hw
        if self._spread is None:
            return hardware.measure_drive_gib_s(self._layout, hw.drive, duration_s)
        return hardware.measure_drives_gib_s(
            self._layout, self._spread, drive_configs(hw), duration_s
        )

    @property
    def routed_nbytes(self) -> int:
        """Bytes of all the experts that one token goes through."""
        return self.num_layers * self._top_k * self._layout.record_nbytes

    @property
    def dense_nbytes(self) -> int:
        """Bytes that one token reads at least from the memory where it is computed."""
        return self.model.dense_nbytes

    def close(self) -> None:
        """End the reader threads and close the files."""
        if self._warm is not None:
            self._warm.save(self._warm_keys())
        if self._recorder is not None:
            self._recorder.close()
        self.model.experts.close()
        self.model.close()
        if self.vram_plan is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if self._cpus is not None:
            cores.pin_current_thread(self._cpus)
        if self._core_claim is not None:
            self._core_claim.close()
