"""Replay a route through the real streamer, cache, read queue and VRAM slots, with a clock instead of a machine.

Real: who is in which row and slot, who goes, which piece is read next, which guesses are issued, taken back or wasted,
which waves come when, which experts the CPU computes beside a GPU. Modelled: how long a read, a copy and a computation
take (`Machine`). Reads, copies, kernels and the host's own work overlap as they do in life; nothing varies, so the same
input gives the same output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from conf.schema import CachePolicy, Spread
from runtime.experts.adaptive import cache_for
from runtime.experts.cache import ExpertCache
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.placement import place
from runtime.experts.policies import BeladyCache, PerLayerCache, SlruCache, uses_of
from runtime.experts.routes import Kind, RouteHeader, RouteTrace, Step
from runtime.experts.schedule import ReadJob, ReadQueue, cut_spans
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.experts.source import Reader, Wave
from runtime.experts.streamer import ExpertStreamer
from runtime.simulated_drive import Drive, LineDrive, SharedDrive
from runtime.simulated_share import SimulatedShare
from runtime.simulated_spread import DriveSet, SimulatedSpreadReader
from runtime.stats import TokenStats
from runtime.units import GIB, PAGE_NBYTES, align_up


@dataclass(frozen=True, slots=True)
class Machine:
    """How long things take. Rates in GiB/s of 2**30 bytes."""

    drive_gib_s: float  # of several, what they give together
    latency_us: float = 0.0  # of each read, beside its bytes
    depth: int = 32  # reads that the drive has in work at once; more wait
    # reads in work share the rate; otherwise they are served one after the other
    is_shared: bool = False
    link_gib_s: float = 0.0  # from RAM to the GPU; 0: there is none, the CPU computes
    # the same link, when a kernel reads RAM in place; 0: as fast as copies
    in_place_gib_s: float = 0.0
    vram_gib_s: float = 0.0  # how fast a kernel reads an expert from VRAM; 0: in no time
    expert_ms: float = 0.0  # at least this long computes one expert
    layer_ms: float = 0.0  # computing of a layer beside its routed experts, router included
    # the host's own work for a layer, before its experts; on a CPU part of the computing
    host_ms: float = 0.0
    host_after_ms: float = 0.0  # its work behind a layer's launches, while a GPU computes
    token_ms: float = 0.0  # the head, sampling, whatever a token needs once
    drives_gib_s: tuple[float, ...] = ()  # of each of several drives; empty: there is one
    cpu_gib_s: float = 0.0  # at which the CPU computes experts in RAM beside a GPU; 0: it does not
    cpu_ms: float = 0.0  # to start it for a layer
    ram_gib_s: float = 0.0  # of the RAM, for link, drives and CPU together; 0: enough for all
    head_nbytes: int = 0  # of a head in RAM, that every token reads; 0: in token_ms
    head_cpu_gib_s: float = 0.0  # at which the CPU computes it; 0: it does not

    @property
    def from_ram_gib_s(self) -> float:
        """The link, when a kernel reads RAM in place."""
        return self.in_place_gib_s or self.link_gib_s

    @property
    def head_s(self) -> float:
        """Seconds of the head: CPU and link begin together, and end together; no drive is at work then."""
        if not self.head_nbytes:
            return 0.0
        cpu = self.beside(self.from_ram_gib_s, self.head_cpu_gib_s)
        return self.head_nbytes / ((self.from_ram_gib_s + cpu) * GIB)

    def beside(self, taken_gib_s: float, wanted_gib_s: float) -> float:
        """Return what a CPU that wants to read RAM at a rate gets of it beside others."""
        if not self.ram_gib_s:
            return wanted_gib_s
        return max(0.0, min(wanted_gib_s, self.ram_gib_s - taken_gib_s))


@dataclass(frozen=True, slots=True)
class Setting:
    """What can be chosen on a machine."""

    cache_rows: int  # experts in RAM
    prefetch_experts: int = 2  # read ahead
    early_copies: int = 0  # copied ahead, with a GPU
    kept_slots: int = 0  # experts that VRAM keeps
    # experts in RAM are read where they are; else copied to a slot first
    reads_in_place: bool = True
    sweep_rows: int = 32
    window: int = 2
    pieces: int = 4
    piece_kib: int = 128
    spread: Spread = Spread.stripe  # of experts over several drives
    shares: tuple[float, ...] = ()  # of what is striped or split
    limits_nbytes: tuple[int | None, ...] = ()  # of each drive


class SimulatedLayout:
    """Experts one after the other on an imagined drive, each read in one run."""

    files: tuple[Path, ...] = ()

    def __init__(self, header: RouteHeader) -> None:
        self.num_layers, self.num_experts = header.num_layers, header.num_experts
        self.record_nbytes = align_up(header.record_nbytes, PAGE_NBYTES)

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        offset = (self.num_experts * key.layer + key.expert) * self.record_nbytes
        return (Span(0, offset, self.record_nbytes, self.record_nbytes, 0),)


# ---- the clock and its reads -----------------------------------------------------------------------------------------


class Ending(Protocol):
    """What a clock asks of drives."""

    def next_end(self) -> float: ...

    def end(self) -> Any: ...


class Clock:
    """The time, and the reads that end while it passes."""

    def __init__(self, drive: Ending) -> None:
        self.now = 0.0  # seconds
        self.drive = drive
        self.on_end: Callable[[Any], None] = lambda _tag: None

    def ns(self) -> int:
        return round(self.now * 1e9)

    def pass_to(self, moment: float) -> None:
        while self.drive.next_end() <= moment:
            self.step()
        self.now = max(self.now, moment)

    def pass_by(self, seconds: float) -> None:
        self.pass_to(self.now + seconds)

    def step(self) -> None:
        """Go to the end of the next read."""
        self.now = max(self.now, self.drive.next_end())
        self.on_end(self.drive.end())


class SimulatedReader:
    """The real read queue, with as many reads under way as `DirectReader` has threads."""

    def __init__(self, clock: Clock, drive: Drive, setting: Setting) -> None:
        self._clock, self._drive, self._setting = clock, drive, setting
        self._queue = ReadQueue(setting.window)
        self._idle_threads = setting.window * setting.pieces
        clock.on_end = self._finish

    def submit(
        self,
        key: Hashable,
        spans: Sequence[Span],
        buffer: memoryview,
        is_required: bool = True,
        on_done: Callable[[ReadJob], None] | None = None,
        is_idle: bool = False,
    ) -> ReadJob:
        pieces = cut_spans(spans, self._setting.pieces, self._setting.piece_kib * 1024)
        job = ReadJob(key, pieces, buffer, is_required, on_done, is_idle)
        self._queue.push(job)
        self._start()
        return job

    def promote(self, job: ReadJob) -> None:
        self._queue.promote(job)
        self._start()

    def cancel(self, job: ReadJob) -> bool:
        return self._queue.cancel(job)

    def _start(self) -> None:
        while self._idle_threads and (taken := self._queue.take()) is not None:
            job, piece = taken
            self._idle_threads -= 1
            self._drive.begin(self._clock.now, piece.nbytes, job)

    def _finish(self, job: ReadJob) -> None:
        self._idle_threads += 1
        if self._queue.finish(job) and job.on_done is not None:
            job.on_done(job)
        self._start()

    def close(self) -> None:
        self._queue.drain()


class _Arrivals:
    """Waiting for a read is letting time pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: deque[ReadJob] = deque()

    def put(self, item: ReadJob) -> None:
        self._jobs.append(item)

    def empty(self) -> bool:
        return not self._jobs

    def get(self) -> ReadJob:
        while not self._jobs:
            assert self._clock.drive.next_end() < math.inf, "waiting for a read that nobody began"
            self._clock.step()
        return self._jobs.popleft()


class _NoMemory:
    """An arena whose records are the word `ram`."""

    def __init__(self, num_rows: int, row_nbytes: int) -> None:
        self.num_rows = num_rows
        self.row_nbytes, self.nbytes = row_nbytes, num_rows * row_nbytes
        self.records: list[Any] = ["ram"] * num_rows

    def view(self, row: int) -> memoryview:
        del row
        return memoryview(b"")

    def swap(self, row: int, other: int) -> None:
        """There is nothing to swap."""

    def pin_rows(self) -> int:
        """There is nothing to pin."""
        return self.num_rows

    def close(self) -> None:
        """There is nothing to free."""


# ---- the GPU ---------------------------------------------------------------------------------------------------------


class _Slots:
    """Slots whose records are the word `vram`."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def unbind(self, _dim: int) -> list[str]:
        return ["vram"] * self._count


class Gpu:
    """A stream that computes, a copy engine, and the link that both read RAM over. As a `Copier`: marks are moments."""

    def __init__(self, clock: Clock, machine: Machine, num_slots: int, record_nbytes: int) -> None:
        self.slots: Any = _Slots(num_slots)
        self._clock, self._machine = clock, machine
        self._link_s = record_nbytes / (machine.link_gib_s * GIB)
        self._in_place_s = record_nbytes / (machine.from_ram_gib_s * GIB)
        self._vram_s = record_nbytes / (machine.vram_gib_s * GIB) if machine.vram_gib_s else 0.0
        self.computed_at = 0.0  # when all that is launched has run
        self._copied_at = 0.0
        self.link_free_at = 0.0
        self._copies_from = 0.0

    def compute(self, seconds: float) -> None:
        self.computed_at = max(self.computed_at, self._clock.now) + seconds

    def compute_experts(self, wave: Wave) -> None:
        least = self._machine.expert_ms / 1e3
        for _, record in wave:
            place: Any = record
            start = max(self.computed_at, self._clock.now)
            if place == "ram":  # read in place, over the link
                start = max(start, self.link_free_at)
                self.computed_at = start + max(least, self._in_place_s)
                self.link_free_at = start + self._in_place_s
            else:
                self.computed_at = start + max(least, self._vram_s)

    def copy(self, slot: int, record: Any) -> None:
        del slot, record
        start = max(self.link_free_at, self._copies_from, self._clock.now)
        self._copied_at = self.link_free_at = start + self._link_s

    def mark(self) -> float:
        return self._copied_at

    def wait(self, mark: float) -> None:
        self.computed_at = max(self.computed_at, mark)

    def launched(self) -> float:
        return max(self.computed_at, self._clock.now)

    def follow(self, mark: float) -> None:
        self._copies_from = max(self._copies_from, mark)

    def synchronize(self, mark: float) -> None:
        self._clock.pass_to(mark)


# ---- the whole -------------------------------------------------------------------------------------------------------

CacheMaker = Callable[[int], ExpertCache[ExpertKey]]


def cache_maker(policy: str, trace: RouteTrace) -> CacheMaker:
    """Return what makes a cache of a policy: auto, lru, lfu, slru, per_layer, belady (knows the trace's future)."""
    header = trace.header
    if policy == "belady":
        uses = uses_of([_keys(step) for step in trace.steps if step.kind is Kind.decode])
        return lambda rows: BeladyCache(rows, uses)
    if policy == "per_layer":
        return lambda rows: PerLayerCache(rows, header.num_layers, header.top_k)
    if policy == "slru":
        return SlruCache
    layers = header.num_layers
    step_experts = layers * header.top_k
    return cache_for(CachePolicy(policy), layers, step_experts, layers * header.num_experts)


def _keys(step: Step) -> list[ExpertKey]:
    return [ExpertKey(step.layer, expert) for expert in step.experts]


class Simulation:
    """One machine, one setting, one model: replays routes, and keeps what it has learnt between them."""

    def __init__(
        self,
        header: RouteHeader,
        machine: Machine,
        setting: Setting,
        make_cache: CacheMaker = ExpertCache,
    ) -> None:
        self.machine = machine
        layout = SimulatedLayout(header)
        reader = self._open_reader(layout, setting)
        copies = setting.early_copies if machine.link_gib_s else 0
        self.streamer = ExpertStreamer(
            layout,
            reader,
            setting.cache_rows,
            setting.sweep_rows,
            setting.prefetch_experts,
            max(0, min(2 * copies, setting.cache_rows - header.top_k)),
            make_cache=make_cache,
            make_arena=_NoMemory,
            arrivals=_Arrivals(self.clock),
            clock_ns=self.clock.ns,
        )
        self.gpu: Gpu | None = None
        self.slots: SlotExperts | None = None
        if machine.link_gib_s:
            route = 0 if setting.reads_in_place else header.top_k
            count = passing_slots(copies, layout.record_nbytes, route) + setting.kept_slots
            self.gpu = Gpu(self.clock, machine, count, layout.record_nbytes)
            self.slots = SlotExperts(
                self.streamer,
                self.gpu,
                header.num_layers,
                header.top_k,
                copies,
                setting.reads_in_place,
            )
            if machine.cpu_gib_s:
                self.slots.share = SimulatedShare(
                    self.clock, self.gpu, machine, setting.reads_in_place, header
                )
        self.counters = self.streamer.counters
        self._device_wait_s = 0.0
        self._requests = 0

    def _open_reader(self, layout: SimulatedLayout, setting: Setting) -> Reader:
        machine = self.machine
        make = SharedDrive if machine.is_shared else LineDrive
        drives: list[Drive] = [
            make(replace(machine, drive_gib_s=rate))
            for rate in machine.drives_gib_s or (machine.drive_gib_s,)
        ]
        if len(drives) == 1:
            self.clock = Clock(drives[0])
            return SimulatedReader(self.clock, drives[0], setting)
        self.clock = Clock(DriveSet(drives))
        placement = place(
            setting.spread,
            layout.num_layers,
            layout.num_experts,
            layout.record_nbytes,
            setting.shares,
            setting.limits_nbytes,
        )
        return SimulatedSpreadReader(self.clock, drives, setting, placement)

    def replay(self, trace: RouteTrace) -> list[TokenStats]:
        """Go through a trace; returns what each decoded token cost.

        Prompts change what is cached, as they do in life; their time is not modelled beyond their reads.
        """
        stats: list[TokenStats] = []
        for forward in trace.forwards():
            kind = forward[0].kind
            if kind is Kind.forget:
                (self.slots or self.streamer).forget()
            elif kind is Kind.sweep:
                self._sweep(forward)
            else:
                stats.append(self._token(forward, len(stats) + 1))
        return stats

    def _token(self, steps: Iterable[Step], position: int) -> TokenStats:
        before, started, waited = self.counters.copy(), self.clock.now, self._device_wait_s
        for step in steps:
            if isinstance(self.streamer.cache, BeladyCache):
                self.streamer.cache.position = self._requests
            self._requests += 1
            if self.gpu is None:
                self._layer_on_cpu(step)
            else:
                self._layer_on_gpu(step, self.gpu)
        if self.gpu is None:
            self.clock.pass_by(self.machine.token_ms / 1e3)
        else:
            self.gpu.compute(self.machine.token_ms / 1e3 + self.machine.head_s)
            self._wait_for(self.gpu)
        spent = self.counters.since(before)
        return TokenStats(
            position=position,
            num_tokens=1,
            total_ms=(self.clock.now - started) * 1e3,
            drive_wait_ms=spent.wait_ns / 1e6,
            row_wait_ms=0.0,
            device_wait_ms=(self._device_wait_s - waited) * 1e3,
            counters=spent,
            row_read_nbytes=0,
        )

    def _layer_on_cpu(self, step: Step) -> None:
        machine = self.machine
        self.clock.pass_by((machine.layer_ms + machine.host_ms) / 1e3)
        for _ in self.streamer.fetch(step.layer, step.experts, step.guesses):
            self.clock.pass_by(machine.expert_ms / 1e3)

    def _layer_on_gpu(self, step: Step, gpu: Gpu) -> None:
        assert self.slots is not None
        gpu.compute(self.machine.layer_ms / 1e3)  # behind the experts of the layer before
        self._wait_for(gpu)  # the host needs the route
        self.clock.pass_by(self.machine.host_ms / 1e3)
        if self.slots.share is not None:
            self.slots.share.arm()
        for wave in self.slots.waves(step.layer, step.experts, step.guesses):
            gpu.compute_experts(wave)
        self.clock.pass_by(self.machine.host_after_ms / 1e3)

    def _wait_for(self, gpu: Gpu) -> None:
        self._device_wait_s += max(0.0, gpu.computed_at - self.clock.now)
        self.clock.pass_to(gpu.computed_at)

    def _sweep(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if self.slots is None or self.gpu is None:
                for _ in self.streamer.sweep(step.layer, step.experts):
                    self.clock.pass_by(self.machine.expert_ms / 1e3)
                continue
            for wave in self.slots.batches(step.layer, step.experts):
                self.gpu.compute_experts(wave)
            self._wait_for(self.gpu)
