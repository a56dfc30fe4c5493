"""What `kernels.flags` does, in plain torch: for a thread that plays the GPU."""

from __future__ import annotations

import time

from torch import Tensor

LINE = (
    16  # words of a row before its data: a flag has a cache line of its own, and data starts at one
)


def publish(ticket: Tensor, poison: Tensor, source: Tensor, row: Tensor, count: int) -> None:
    """As `flags.publish`."""
    row[LINE : LINE + count] = source[:count]
    step = int(ticket)
    row[0] = -step if int(poison) == step else step


def wait(
    ticket: Tensor, poison: Tensor, row: Tensor, table: Tensor, limit: Tensor, count: int
) -> None:
    """As `flags.wait`."""
    step = int(ticket)
    end_ns = time.monotonic_ns() + int(limit)
    while abs(int(row[0])) != step and int(poison) != step and time.monotonic_ns() <= end_ns:
        time.sleep(1e-5)
    if int(row[0]) != step or int(poison) == step:
        poison.fill_(step)
        table[:count] = 0
        return
    table[:count] = row[LINE : LINE + count]
