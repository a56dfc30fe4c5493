"""Several drives of the simulator: the real queue over them, each read ending when its drive says so."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from runtime.experts.balance import Part, SpreadQueue
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.placement import Placement
from runtime.experts.schedule import ReadJob

if TYPE_CHECKING:
    from runtime.simulated_drive import Drive
    from runtime.simulator import Clock, Setting


class DriveSet:
    """Several drives: what ends next on any of them."""

    def __init__(self, drives: Sequence[Drive]) -> None:
        self.drives = drives

    def _next(self) -> Drive:
        return min(self.drives, key=lambda drive: drive.next_end())

    def next_end(self) -> float:
        return self._next().next_end()

    def end(self) -> Any:
        return self._next().end()


class SimulatedSpreadReader:
    """The real queue over several drives, each with as many reads under way as it has threads in `SpreadReader`."""

    def __init__(
        self, clock: Clock, drives: Sequence[Drive], setting: Setting, placement: Placement
    ) -> None:
        self._clock, self._drives, self._placement = clock, drives, placement
        count = len(drives)
        self._queue = SpreadQueue(
            range(count),
            count,
            setting.window,
            setting.pieces,
            setting.piece_kib * 1024,
            [None] * count,
        )
        self._idle_threads = [setting.window * setting.pieces] * count
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
        del spans
        assert isinstance(key, ExpertKey)
        copies = self._placement.copies(key)
        now = self._clock.now
        job = self._queue.job(key, copies, buffer, is_required, on_done, now, is_idle)
        self._start()
        return job

    def promote(self, job: ReadJob) -> None:
        self._queue.promote(job)
        self._start()

    def cancel(self, job: ReadJob) -> bool:
        return self._queue.cancel(job)

    def _start(self) -> None:
        for number, drive in enumerate(self._drives):
            while self._idle_threads[number]:
                taken = self._queue.take(number, self._clock.now)
                if taken is None:
                    break
                self._idle_threads[number] -= 1
                drive.begin(self._clock.now, taken[1].nbytes, (number, *taken))

    def _finish(self, tag: tuple[int, Part, Span]) -> None:
        number, part, piece = tag
        self._idle_threads[number] += 1
        job = self._queue.finish(number, part, piece, self._clock.now)
        if job is not None and job.on_done is not None:
            job.on_done(job)
        self._start()

    def close(self) -> None:
        self._queue.drain()
