"""A head that lies in RAM, computed by CPU and GPU at the same time: rows of the vocabulary, the first ones by the CPU.

The GPU reads its rows in place over the link while threads read theirs from RAM. How many rows each takes is measured
once, both at work: they share the RAM. Knows no model; a decoder owns a `HeadLane`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from conf.schema import Head
from kernels.cpu_matvec import bf16_rows, has_numba
from runtime import cores
from runtime.head_shares import (
    HeadReport,
    Timing,
    find_split,
    find_threads,
    format_head,
    rounded_rows,
)

log = logging.getLogger(__name__)

# fills out [rows] on the device with those rows of W x: x [K] on the device, weight [rows, K] in RAM
Product = Callable[[Tensor, Tensor, Tensor], None]

CHUNK_ROWS = 1024  # that a thread takes at a time: 10 MB of 5,120 columns, a third of a millisecond


class HeadSplit:
    """The CPU's threads and the split, for all decoders of a model."""

    def __init__(self, weight: Tensor, product: Product, threads: int) -> None:
        """weight: [vocab, K] bf16 in RAM, pinned where there is a GPU.  threads: at most, the calling one among them.

        Threads may run where the calling one may now.
        """
        self.weight, self.product = weight, product
        self.total = len(weight)
        self.cpu_rows = 0
        self.threads = max(1, threads)
        self.is_compiled = has_numba()
        # compiles, if it does, before several threads would
        bf16_rows(weight, torch.zeros(weight.shape[1]), torch.zeros(self.total), 0, 0)
        self.measured: Timing | None = None
        self.tokens = 0
        self.cpu_ns = 0
        self.gpu_ms = 0.0
        self.timed_tokens = 0  # whose GPU time is known: that of the last one is not yet
        cpus = os.sched_getaffinity(0)
        self._pool = ThreadPoolExecutor(
            max(1, self.threads - 1), "head", initializer=cores.pin_current_thread, initargs=(cpus,)
        )

    @classmethod
    def open(
        cls, weight: Tensor, product: Product, device: torch.device, mode: Head, share: float | None, threads: int
    ) -> HeadSplit:  # fmt: skip
        """Measure how many threads help, and how many rows are the CPU's, unless told by mode or share."""
        split = cls(weight, product, threads)
        lane = HeadLane(split, torch.zeros(weight.shape[1], dtype=torch.bfloat16, device=device),
                        torch.zeros(split.total, device=device))  # fmt: skip
        if not split.is_compiled:
            log.warning("the CPU's part of the head is slow without numba: pip install '.[cpu]'")
        split.cpu_rows = split.total
        lane.send()
        lane.sent()
        lane.finish()  # starts threads

        def time_threads(count: int) -> float:
            split.threads = count
            return min(split.compute(lane.x, lane.host_logits) for _ in range(3))

        split.threads = find_threads(time_threads, max(1, threads))
        if mode is Head.auto and share is None:
            split.measured = find_split(lane.time_split, split.total)
            split.cpu_rows = split.measured.rows
        elif share is not None:
            split.cpu_rows = rounded_rows(share * split.total, split.total) if share else 0
        split.tokens, split.timed_tokens, split.cpu_ns, split.gpu_ms = 0, 0, 0, 0.0
        log.info("%s", format_head(split.report()))
        return split

    def compute(self, x: Tensor, out: Tensor) -> float:
        """Fill out[:cpu_rows] with the CPU's rows: x [K] and out [vocab] fp32 in RAM.  Returns seconds."""
        started = time.perf_counter()
        starts = iter(range(0, self.cpu_rows, CHUNK_ROWS))  # each start goes to one thread
        others = [
            self._pool.submit(self._some_rows, starts, x, out) for _ in range(self.threads - 1)
        ]
        try:
            self._some_rows(starts, x, out)
        finally:
            for other in others:
                other.result()
        return time.perf_counter() - started

    def _some_rows(self, starts: Iterator[int], x: Tensor, out: Tensor) -> None:
        for start in starts:
            end = min(start + CHUNK_ROWS, self.cpu_rows)
            bf16_rows(self.weight, x, out, start, end, self.is_compiled)

    def report(self) -> HeadReport:
        tokens = max(1, self.tokens)
        return HeadReport(
            self.total, self.cpu_rows, self.threads, self.is_compiled, self.measured, self.tokens,
            self.cpu_ns / 1e6 / tokens, self.gpu_ms / max(1, self.timed_tokens),
        )  # fmt: skip

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class HeadLane:
    """One decoder's part: where its token's hidden state comes to the host, and where logits come from there.

    A token: `send` behind what makes u, `sent`, `launch`, `finish`. The first and the third may be captured.
    """

    def __init__(self, split: HeadSplit, u: Tensor, logits: Tensor) -> None:
        """u: [K] bf16, logits: [vocab] fp32, both on the device, at the same address for ever."""
        self.split, self.u, self.logits = split, u, logits
        self._has_gpu = u.is_cuda
        self.x = torch.zeros(u.shape)
        self._host_u, self.host_logits = torch.zeros_like(u, device="cpu"), torch.zeros(split.total)
        self._events: list[Any] = []
        if self._has_gpu:
            self._host_u, self.host_logits = (
                host.pin_memory() for host in (self._host_u, self.host_logits)
            )
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._is_timed = False  # the events stand around the launch of the token before

    def send(self) -> None:
        """Copy u to the host."""
        self._host_u.copy_(self.u, non_blocking=True)

    def sent(self) -> None:
        """Mark, outside of any capture, where u is on the host."""
        if not self._has_gpu:
            return
        if self._is_timed:  # the device is past the token before: its route was waited for
            self.split.gpu_ms += self._events[0].elapsed_time(self._events[1])
            self.split.timed_tokens += 1
        self._events[0].record()
        self._is_timed = False

    def launch(self) -> None:
        """Launch the GPU's rows."""
        rows = self.split.cpu_rows
        self.split.product(self.u, self.split.weight[rows:], self.logits[rows:])

    @property
    def has_launch(self) -> bool:
        """Whether the GPU has rows at all."""
        return self.split.cpu_rows < self.split.total

    def finish(self) -> int:
        """Compute the CPU's rows while the GPU is at its own, and send them behind those.

        Returns nanoseconds of waiting for u.
        """
        started = waited = time.perf_counter_ns()
        if self._has_gpu:
            self._events[1].record()
            self._is_timed = True
            self._events[0].synchronize()
            waited = time.perf_counter_ns()
        split, rows = self.split, self.split.cpu_rows
        if rows:
            self.x.copy_(self._host_u)
            split.compute(self.x, self.host_logits)
            split.cpu_ns += time.perf_counter_ns() - waited
            self.logits[:rows].copy_(self.host_logits[:rows], non_blocking=True)
        split.tokens += 1
        return waited - started

    def time_split(self, rows: int) -> Timing:
        """Compute the head with so many rows on the CPU, the second time with a clock."""
        split = self.split
        split.cpu_rows = rows
        for _ in range(2):
            self._is_timed = False
            split.cpu_ns, split.gpu_ms = 0, 0.0
            self.send()
            self.sent()
            started = time.perf_counter()
            if self.has_launch:
                self.launch()
            if not self._has_gpu:
                split.gpu_ms = (time.perf_counter() - started) * 1e3
            self.finish()
            if self._has_gpu:
                torch.cuda.synchronize()
                split.gpu_ms = self._events[0].elapsed_time(self._events[1])
        self._is_timed = False
        return Timing(rows, split.cpu_ns / 1e6, split.gpu_ms)
