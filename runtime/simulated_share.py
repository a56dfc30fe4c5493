"""The CPU's share of experts in the simulator: the real split, and time instead of arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.experts.cpu_share import CpuShare, balanced_counts
from runtime.experts.routes import RouteHeader
from runtime.experts.source import Wave
from runtime.units import GIB

if TYPE_CHECKING:
    from runtime.simulator import Clock, Gpu, Machine


class SimulatedShare(CpuShare):
    """The experts that the CPU computes, as the real split has them: time passes, nothing is computed.

    The split is made by what CPU and link do alone. The CPU then gets what the link and the drives leave of the RAM
    while they are at work.
    """

    def __init__(
        self, clock: Clock, gpu: Gpu, machine: Machine, reads_in_place: bool, header: RouteHeader
    ) -> None:
        self._clock, self._gpu, self._machine = clock, gpu, machine
        self._nbytes = header.record_nbytes
        self._link_gib_s = machine.from_ram_gib_s if reads_in_place else machine.link_gib_s
        each_s = self._nbytes / (machine.cpu_gib_s * GIB)
        link_s = self._nbytes / (self._link_gib_s * GIB)
        first_s = each_s + machine.cpu_ms / 1e3
        self._counts = balanced_counts(first_s, each_s, link_s, header.top_k)
        self._places, self._is_armed = [], False

    def run(self, layer: int, route: Sequence[int], taken: Wave) -> int:
        del layer, route
        clock, machine = self._clock, self._machine
        started = clock.now
        clock.pass_by(machine.cpu_ms / 1e3)
        left = float(len(taken) * self._nbytes)
        while left > 0:
            link_until, drive_until = self._gpu.link_free_at, clock.drive.next_end()
            others = self._link_gib_s if link_until > clock.now else 0.0
            if drive_until < math.inf:
                others += machine.drive_gib_s
            rate = machine.beside(others, machine.cpu_gib_s) * GIB
            changes = [
                moment for moment in (link_until, drive_until) if clock.now < moment < math.inf
            ]
            end = clock.now + left / rate if rate else math.inf
            until = min([end, *changes])
            left = 0.0 if until == end else left - (until - clock.now) * rate
            clock.pass_to(until)
        return round((clock.now - started) * 1e9)
