"""What `kernels.flags` does, in plain torch: for a thread that plays the GPU."""

from __future__ import annotations

import time

from torch import Tensor

# words of a row before its data: a flag has a cache line of its own, and data starts at one
LINE = 16


def publish(ticket: Tensor, poison: Tensor, source: Tensor, row: Tensor, count: int) -> None:
    """As `flags.publish`."""
    row[LINE : LINE + count] = source[:count]
    step = int(ticket[0])
    row[0] = -step if int(poison) == step else step


def wait(
    ticket: Tensor, poison: Tensor, closed: Tensor, row: Tensor, table: Tensor, count: int
) -> None:
    """As `flags.wait`."""
    step, limit_ns = ticket.tolist()
    end_ns = time.monotonic_ns() + limit_ns
    said = 0
    if step not in (int(poison), int(closed)):
        while (said := int(row[0])) not in (step, step + 1, -step) and time.monotonic_ns() < end_ns:
            time.sleep(1e-5)
    is_go = said in (step, step + 1)
    if said == step + 1:
        closed.fill_(step)
    if not is_go and int(closed) != step:
        poison.fill_(step)
    table[:count] = row[LINE : LINE + count] if is_go else 0
