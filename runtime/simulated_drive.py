"""How long reads of a simulated drive take: one after the other at the full rate, or by equal shares of it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from runtime.units import GIB

if TYPE_CHECKING:
    from runtime.simulator import Machine


class Drive(Protocol):
    """Reads that were begun, and when the next of them ends. Seconds."""

    busy_s: float  # in which bytes flowed

    def begin(self, now: float, nbytes: int, tag: Any) -> None: ...

    def next_end(self) -> float:
        """Return when the next read ends, if none is begun before; infinite while there is none."""

    def end(self) -> Any:
        """Take out the read that ends next, and return its tag."""


class LineDrive:
    """Reads share one line at the full rate, in their order, then the latency passes: `drive.SimulatedDrive`."""

    def __init__(self, machine: Machine) -> None:
        self._nbytes_s, self._latency_s = machine.drive_gib_s * GIB, machine.latency_us / 1e6
        self._depth = machine.depth
        self._free_at = 0.0
        self._ends: list[tuple[float, int, Any]] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        self._count = 0
        self.busy_s = 0.0

    def begin(self, now: float, nbytes: int, tag: Any) -> None:
        if len(self._ends) >= self._depth:
            self._waiting.append((nbytes, tag))
            return
        self._count += 1
        self._free_at = max(self._free_at, now) + nbytes / self._nbytes_s
        self.busy_s += nbytes / self._nbytes_s
        heapq.heappush(self._ends, (self._free_at + self._latency_s, self._count, tag))

    def next_end(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def end(self) -> Any:
        now, _, tag = heapq.heappop(self._ends)
        if self._waiting:
            self.begin(now, *self._waiting.popleft())
        return tag


class SharedDrive:
    """After its latency a read gets an equal share of the rate until its bytes are there."""

    def __init__(self, machine: Machine) -> None:
        self._nbytes_s, self._latency_s = machine.drive_gib_s * GIB, machine.latency_us / 1e6
        self._depth = machine.depth
        self._now = 0.0
        self._coming: list[
            tuple[float, int, float, Any]
        ] = []  # (when it may flow, ..., bytes, tag)
        self._flowing: list[
            tuple[float, int, Any]
        ] = []  # (where its end is, in bytes of an equal share, ..., tag)
        self._share = 0.0  # bytes that each flowing read has got since the beginning of time
        self._waiting: deque[tuple[int, Any]] = deque()
        self._count = 0
        self.busy_s = 0.0

    def begin(self, now: float, nbytes: int, tag: Any) -> None:
        if len(self._coming) + len(self._flowing) >= self._depth:
            self._waiting.append((nbytes, tag))
            return
        self._flow_to(now)
        self._count += 1
        heapq.heappush(self._coming, (now + self._latency_s, self._count, float(nbytes), tag))
        self._flow_to(now)

    def _flow_to(self, now: float) -> None:
        """Let bytes flow up to a moment at or before the next end."""
        while True:
            until = min(now, self._coming[0][0] if self._coming else math.inf)
            if self._flowing and until > self._now:
                self._share += (until - self._now) * self._nbytes_s / len(self._flowing)
                self.busy_s += until - self._now
            self._now = max(self._now, until)
            if not self._coming or self._coming[0][0] > now:
                return
            _, count, nbytes, tag = heapq.heappop(self._coming)
            heapq.heappush(self._flowing, (self._share + nbytes, count, tag))

    def next_end(self) -> float:
        """Go through the coming starts: each makes the shares smaller."""
        now, share = self._now, self._share
        ends = [end for end, _, _ in self._flowing]
        starts = sorted((at, nbytes) for at, _, nbytes, _ in self._coming)
        heapq.heapify(ends)
        for at, nbytes in [*starts, (math.inf, 0.0)]:
            if ends:
                done = now + (ends[0] - share) * len(ends) / self._nbytes_s
                if done <= at:
                    return done
                share += (at - now) * self._nbytes_s / len(ends)
            if at == math.inf:
                break
            now = max(now, at)
            heapq.heappush(ends, share + nbytes)
        return math.inf

    def end(self) -> Any:
        now = self.next_end()
        self._flow_to(now)
        _, _, tag = heapq.heappop(self._flowing)
        if self._waiting:
            self.begin(now, *self._waiting.popleft())
        return tag
