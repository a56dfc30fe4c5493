"""Which of several drives holds which expert, and where in its file. Pure arithmetic: knows no folder and no file.

What decides is a hash of (layer, expert), so that neighbours, and the popular ones among them, lie on different drives.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from blake3 import blake3

from conf.schema import Spread
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey, Span
from runtime.units import PAGE_NBYTES, format_nbytes

NOT_HERE = -1


def mix(key: ExpertKey) -> bytes:
    """Return 8 bytes that look random, and are the same everywhere."""
    return blake3(struct.pack("<II", key.layer, key.expert)).digest(length=8)


def quotas(total: int, weights: Sequence[float], rooms: Sequence[int]) -> list[int]:
    """Share `total` things out by weight (largest remainders), none getting more than its room.

    What a full one cannot take goes to the others by their weights. Raises ValueError when all rooms are too small.
    """
    if sum(rooms) < total:
        raise ValueError(f"{total} things, room for {sum(rooms)}")
    found = [0] * len(weights)
    parts = [Fraction(weight) for weight in weights]
    open_, left = list(range(len(weights))), total
    while True:
        whole = sum(parts[i] for i in open_)
        full = [i for i in open_ if parts[i] * left > rooms[i] * whole]
        if not full:
            break
        for i in full:
            found[i] = rooms[i]
            open_.remove(i)
        left = total - sum(found)
    exact = {i: parts[i] * left / whole for i in open_}
    for i in open_:
        found[i] = int(exact[i])
    by_rest = sorted(open_, key=lambda i: (found[i] - exact[i], i))
    for i in by_rest[: total - sum(found)]:
        found[i] += 1
    return found


@dataclass(frozen=True, slots=True)
class Placement:
    """Where every expert lies: on each drive one file of equal blocks, in order of layer and expert."""

    num_layers: int
    num_experts: int
    slices: tuple[tuple[int, int], ...]  # of a record, on each drive: (from byte, bytes)
    is_split: bool  # a record is all its slices; otherwise each is a whole record
    slots: tuple[array[int], ...]  # on each drive: the block of each expert, or NOT_HERE

    def homes(self, key: ExpertKey) -> list[int]:
        """Return the drives that hold an expert, or a slice of it."""
        at = self.num_experts * key.layer + key.expert
        return [drive for drive, slots in enumerate(self.slots) if slots[at] != NOT_HERE]

    def span(self, drive: int, key: ExpertKey) -> Span:
        """Return what to read on one of its homes; a drive is the number of its file."""
        start, nbytes = self.slices[drive]
        slot = self.slots[drive][self.num_experts * key.layer + key.expert]
        return Span(drive, slot * nbytes, nbytes, nbytes, start)

    def copies(self, key: ExpertKey) -> tuple[tuple[Span, ...], ...]:
        """Return the ways to read a record whole: the reads that each takes."""
        spans = [self.span(drive, key) for drive in self.homes(key)]
        return (tuple(spans),) if self.is_split else tuple((span,) for span in spans)

    def num_blocks(self, drive: int) -> int:
        """Return how many experts a drive holds, or slices of them."""
        return sum(slot != NOT_HERE for slot in self.slots[drive])

    def file_nbytes(self, drive: int) -> int:
        """Return the size of a drive's file."""
        return self.num_blocks(drive) * self.slices[drive][1]


def place(
    spread: Spread,
    num_layers: int,
    num_experts: int,
    record_nbytes: int,
    weights: Sequence[float],
    limits_nbytes: Sequence[int | None],
) -> Placement:
    """Place all experts of records of `record_nbytes`, whole pages, on as many drives as there are weights.

    weights: shares of what is striped or split; of no concern to mirrors, which hold what their limits allow.
    limits_nbytes: at most so much on a drive; None: no limit. Raises UserError when the limits are too small.
    """
    keys = [ExpertKey(layer, e) for layer in range(num_layers) for e in range(num_experts)]
    total, whole = len(keys), (0, record_nbytes)
    least = total * PAGE_NBYTES if spread is Spread.split else record_nbytes
    most = record_nbytes // PAGE_NBYTES if spread is Spread.split else total
    rooms = [most if limit is None else min(most, limit // least) for limit in limits_nbytes]
    if sum(rooms) < most:
        raise UserError(
            f"the limits of hw.drives leave room for {format_nbytes(sum(rooms) * least)}, the experts are "
            f"{format_nbytes(total * record_nbytes)}",
            "raise hw.drives[i].limit_gib, or add a drive",
        )
    if spread is Spread.split:
        counts = quotas(most, weights, rooms)
        starts = [sum(counts[:drive]) * PAGE_NBYTES for drive in range(len(counts))]
        slices = tuple((start, n * PAGE_NBYTES) for start, n in zip(starts, counts, strict=True))
        held = [set(keys) if n else set() for n in counts]
    elif spread is Spread.stripe:
        slices = (whole,) * len(rooms)
        held = _dealt(keys, quotas(total, weights, rooms))
    else:
        slices = (whole,) * len(rooms)
        held = _around(keys, rooms)
    slots = tuple(_slots(keys, here) for here in held)
    return Placement(num_layers, num_experts, slices, spread is Spread.split, slots)


def _dealt(keys: Sequence[ExpertKey], counts: Sequence[int]) -> list[set[ExpertKey]]:
    """Deal experts out layer by layer in the order of their hashes: each goes where most is owed.

    So each layer is shared out as the whole is, to within an expert or two.
    """
    held: list[set[ExpertKey]] = [set() for _ in counts]
    for number, key in enumerate(sorted(keys, key=lambda key: (key.layer, mix(key))), 1):
        owed = [
            count * number
            - len(here) * len(keys)  # of a full one at most 0, and the sum is above it
            for count, here in zip(counts, held, strict=True)
        ]
        held[owed.index(max(owed))].add(key)
    return held


def _around(keys: Sequence[ExpertKey], rooms: Sequence[int]) -> list[set[ExpertKey]]:
    """Let each drive hold as many as it can, going on in a circle where the one before has ended.

    The circle is the order of the hashes. So every expert has about as many copies as any other, and at least one.
    """
    circle, held, start = sorted(keys, key=mix), [], 0
    for room in rooms:
        held.append({circle[(start + i) % len(circle)] for i in range(room)})
        start += room
    return held


def _slots(keys: Sequence[ExpertKey], here: set[ExpertKey]) -> array[int]:
    slots, count = array("l", [NOT_HERE]) * len(keys), 0
    for at, key in enumerate(keys):
        if key in here:
            slots[at], count = count, count + 1
    return slots
