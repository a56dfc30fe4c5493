"""Waiting for what other threads and processes do: until it is so, never for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0  # a test that hangs fails


def wait_until(is_so: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    """Return once `is_so()` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
