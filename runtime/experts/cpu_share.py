"""Experts in RAM that the CPU computes while the GPU reads the others over PCIe: which ones, and where their rows go.

The arithmetic is a family's (`runtime/models/cpu_experts.py`); the split is fixed for a run, so that the same state
gives the same numbers. What the CPU sums up, it sums up in another order than the GPU: equal by tolerance, not by bits.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime import cores
from runtime.experts.source import Wave
from runtime.units import GIB

log = logging.getLogger(__name__)

ROUNDS = 7  # of a measurement; the median counts
MOST_RECORDS = 128  # that are measured in turn: more than the CPU's caches hold


@dataclass(frozen=True, slots=True)
class Workers:
    """Who computes experts in RAM beside a GPU."""

    # for the threads beside the one that decodes; none: wherever the system puts them
    cpus: Collection[int]
    num_threads: int  # the decoding one among them
    records: Sequence[Tensor]  # rows of the RAM cache to measure with, whatever is in them


class Compute(Protocol):
    """A family's experts of one token on the CPU."""

    def set_threads(self, count: int) -> int:
        """Let `count` threads compute; return how many do."""

    def run(
        self, layer: int, experts: Sequence[int], records: Sequence[Tensor], places: Sequence[int], out: Tensor
    ) -> None:  # fmt: skip
        """Fill the first rows of out [k, H] fp32 with the outputs of experts, whose rows in the route are `places`."""


class Sharing(Protocol):
    """A source before the GPU whose experts in RAM may be shared: `slots.SlotExperts`."""

    workers: Workers | None
    share: CpuShare | None


# ---- the split -------------------------------------------------------------------------------------------------------


def fixed_counts(share: float, most: int) -> tuple[int, ...]:
    """Return how many of 0..most experts in RAM a fixed share is, to the nearest; of a half the CPU gets more."""
    return tuple(int(share * count + 0.5) for count in range(most + 1))


def balanced_counts(first_s: float, each_s: float, link_s: float, most: int) -> tuple[int, ...]:
    """Return how many of 0..most experts in RAM the CPU takes so that the later side ends earliest.

    first_s: the CPU's seconds for one expert; each_s: for each further one; link_s: for one over PCIe. Of equal counts
    the least.
    """

    def end_s(on_cpu: int, count: int) -> float:
        cpu_s = first_s + (on_cpu - 1) * each_s if on_cpu else 0.0
        return max(cpu_s, (count - on_cpu) * link_s)

    return tuple(
        min(range(count + 1), key=lambda on_cpu: (end_s(on_cpu, count), on_cpu))
        for count in range(most + 1)
    )


# ---- a run's share ---------------------------------------------------------------------------------------------------


class CpuShare:
    """The CPU's part of each layer's experts: chosen, computed, and put among the rows that the GPU sums up."""

    def __init__(
        self, compute: Compute, counts: Sequence[int], hidden: int, device: torch.device
    ) -> None:
        """counts: of 0..top-k experts in RAM, how many the CPU takes."""
        self._compute, self._counts = compute, counts
        top_k = len(counts) - 1

        def pinned(*shape: int, dtype: torch.dtype) -> Tensor:
            host = torch.zeros(shape, dtype=dtype)
            return host.pin_memory() if device.type == "cuda" else host

        self.rows = pinned(top_k, hidden, dtype=torch.float32)  # in the order of computing
        self.table = pinned(top_k, dtype=torch.int64)  # by place in the route: address of its row
        self._table_view = self.table.numpy()
        self._addresses = [row.data_ptr() for row in self.rows]
        self._places: list[int] = []
        self._is_armed = False

    def arm(self) -> None:
        """Take a part of the layer that is asked for next. Whoever does will put the rows where they belong."""
        self._is_armed = True

    def take(self, in_ram: Wave, is_worth_keeping: Callable[[int], bool]) -> tuple[Wave, Wave]:
        """Split experts in RAM: the CPU's, and those for the GPU, among them all that are worth a place in VRAM."""
        wanted = self._counts[len(in_ram)] if self._is_armed else 0
        self._is_armed, self._places = False, []
        if not wanted:
            return [], in_ram
        taken: Wave = []
        left: Wave = []
        for expert, record in reversed(in_ram):  # the likeliest experts stay with the GPU
            is_taken = len(taken) < wanted and not is_worth_keeping(expert)
            (taken if is_taken else left).append((expert, record))
        return taken, left[::-1]

    def run(self, layer: int, route: Sequence[int], taken: Wave) -> int:
        """Compute what was taken, its rows by the expert's rank in the route; return the nanoseconds that it took."""
        started = time.perf_counter_ns()
        place_of = {expert: place for place, expert in enumerate(sorted(route))}
        experts, records = zip(*taken, strict=True)
        self._places = [place_of[expert] for expert in experts]
        self._compute.run(layer, experts, records, self._places, self.rows)
        table = self._table_view
        table[:] = 0
        for place, address in zip(self._places, self._addresses, strict=False):
            table[place] = address
        return time.perf_counter_ns() - started

    @property
    def has_rows(self) -> bool:
        """Whether rows of the layer in work are to be put among the others."""
        return bool(self._places)

    def put(self, rows: Tensor) -> None:
        """Copy what was computed to its places in rows [k, H]: on a GPU one launch, which may be replayed."""
        if rows.is_cuda:
            from kernels.host_rows import take_rows

            take_rows(self.table, rows)
            return
        for row, place in zip(self.rows, self._places, strict=False):
            rows[place] = row


def open_share(
    wanted: str,
    experts: Sharing,
    compute: Compute,
    rows: Tensor,
    over_link: Callable[[Sequence[Tensor]], None],
) -> CpuShare | None:
    """Start the threads, split, and let `experts` share: `wanted` is a share from 0 to 1, or `auto`, as measured now.

    rows: like those that a decode step sums up, [top-k, hidden].  over_link: lets the GPU have some records as a decode
    step does.  None: the CPU is too slow to help, which is logged.
    """
    workers = experts.workers
    assert workers is not None, "somebody is there to compute"
    top_k, hidden = rows.shape
    records = workers.records[:MOST_RECORDS]
    out = torch.empty(top_k, hidden)

    def on_cpu(some: Sequence[Tensor]) -> None:
        compute.run(0, range(len(some)), some, range(len(some)), out)

    # threads inherit the mask of the one that starts them
    with cores.pinned(workers.cpus) if workers.cpus else nullcontext():
        threads = compute.set_threads(workers.num_threads)
        on_cpu(records[:top_k])
    if wanted != "auto":
        counts = fixed_counts(float(wanted), top_k)
    else:
        first_s = _median_s(on_cpu, records, 1)
        all_s = _median_s(on_cpu, records, top_k)
        link_s = _median_s(over_link, records, top_k) / top_k
        counts = balanced_counts(
            first_s, max(0.0, all_s - first_s) / max(1, top_k - 1), link_s, top_k
        )
        nbytes = records[0].nbytes
        log.info(
            "CPU experts: %d threads compute %.1f GiB/s, the link gives %.1f: of %d experts in RAM the CPU takes %d",
            threads, top_k * nbytes / all_s / GIB, nbytes / link_s / GIB, top_k, counts[top_k],
        )  # fmt: skip
    if not any(counts):
        log.warning("hw.cpu_experts=%s is off: the GPU alone is as fast", wanted)
        return None
    experts.share = share = CpuShare(compute, counts, hidden, rows.device)
    share.put(rows)  # compiled now: a graph's capture must not meet that
    return share


def _median_s(
    work: Callable[[Sequence[Tensor]], None], records: Sequence[Tensor], count: int
) -> float:
    """Return the median seconds that work takes on `count` records, other ones each time as far as there are."""
    seconds = []
    for number in range(ROUNDS + 1):
        some = [records[(number * count + i) % len(records)] for i in range(count)]
        _synchronize()
        started = time.perf_counter()
        work(some)
        _synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
