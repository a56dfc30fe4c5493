"""How far a stage is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, Self

from runtime.units import format_duration, format_nbytes

QUIET_LINE_EVERY_S = 5.0


class Progress:
    """A tqdm bar on a terminal, a line every few seconds elsewhere. `advance` may be called by any thread."""

    def __init__(
        self, what: str, total: int, initial: int = 0, nbytes_each: int = 0, is_nbytes: bool = False
    ) -> None:
        """nbytes_each: of one thing that is counted.  is_nbytes: bytes are what is counted."""
        self._what, self._total, self._count, self._nbytes_each = what, total, initial, nbytes_each
        self._initial, self._is_nbytes = initial, is_nbytes
        self._lock = threading.Lock()
        self._started = self._last_line = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from tqdm import tqdm

            scale = {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if is_nbytes else {}
            self._bar = tqdm(
                total=total, initial=initial, desc=what, leave=False, dynamic_ncols=True, **scale
            )

    def advance(self, count: int = 1) -> None:
        """Note that `count` more are done; less than 0 takes some back."""
        with self._lock:
            self._count += count
            if self._bar is not None:
                self._bar.update(count)
                return
            now = time.monotonic()
            if now - self._last_line >= QUIET_LINE_EVERY_S:
                self._last_line = now
                print(self._line(now), file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        made = max(1, self._count - self._initial)
        left_s = (now - self._started) / made * (self._total - self._count)
        nbytes_each = 1 if self._is_nbytes else self._nbytes_each
        rate = format_nbytes(made * nbytes_each / max(1e-9, now - self._started))
        if self._is_nbytes:
            done = f"{format_nbytes(self._count)} of {format_nbytes(self._total)} at {rate}/s"
        else:
            size = (
                f", {format_nbytes(self._count * nbytes_each)} at {rate}/s" if nbytes_each else ""
            )
            done = f"{self._count}/{self._total}{size}"
        return f"{self._what} {done}, {format_duration(left_s)} left"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
