"""Words of pinned memory by which the host and a graph that is running wait for each other, in Triton.

A row is LINE words of which the first is its flag, then data. A flag holds the number of the step that it was last
written for, an even one: nothing is reset between steps. The number after it says that this is the last of several
rows, minus the number that the step is given up. What the one side wrote before a flag, the other reads behind it
(release and acquire, at the scope of the system).

A wait ends in any case: with the flag, or when the step is given up, or after a time. Whatever ends it but its flag
poisons the step: its later waits end at once, and give out no address. Definitions: `reference_flags`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_flags import LINE

_LINE = tl.constexpr(LINE)
# lane 0 decides for the warp: two lanes may see a word before and after it is written
_FROM_LANE_0 = tl.constexpr(
    """
    mov.b64 {low, high}, v;
    shfl.sync.idx.b32 low, low, 0, 31, 0xffffffff;
    shfl.sync.idx.b32 high, high, 0, 31, 0xffffffff;
    mov.b64 $0, {low, high};
    }"""
)
_ACQUIRE = tl.constexpr(
    "{ .reg .b64 v; .reg .b32 low, high; ld.acquire.sys.global.b64 v, [$1];" + _FROM_LANE_0.value
)
_CLOCK = tl.constexpr(
    "{ .reg .b64 v; .reg .b32 low, high; mov.u64 v, %globaltimer;" + _FROM_LANE_0.value
)
_RELEASE = tl.constexpr("st.release.sys.global.b64 [$1], $2; mov.b32 $0, 0;")


@triton.jit
def _acquire(word, on_gpu: tl.constexpr):
    """The value of a word that another writes."""
    if on_gpu:
        value = tl.inline_asm_elementwise(
            _ACQUIRE, "=l,l", [word], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        value = tl.load(word)
    return value


@triton.jit
def _release(word, value, on_gpu: tl.constexpr):
    """Write a word behind all that the program has written."""
    tl.debug_barrier()
    if on_gpu:
        tl.inline_asm_elementwise(
            _RELEASE, "=r,l,l", [word, value], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(word, value)


@triton.jit
def _now(polls, on_gpu: tl.constexpr):
    """Nanoseconds; the interpreter has no clock and counts polls."""
    if on_gpu:
        polls = tl.inline_asm_elementwise(_CLOCK, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    return polls


@triton.jit
def _publish_kernel(
    ticket, poison, source, row, count: tl.constexpr, width: tl.constexpr, on_gpu: tl.constexpr
):
    step = tl.load(ticket)
    place = tl.arange(0, width)
    is_place = place < count
    tl.store(row + _LINE + place, tl.load(source + place, mask=is_place, other=0), mask=is_place)
    flag = tl.where(tl.load(poison) == step, -step, step)
    _release(row, flag, on_gpu)


@triton.jit
def _wait_kernel(
    ticket, poison, closed, row, table, count: tl.constexpr, width: tl.constexpr, on_gpu: tl.constexpr
):  # fmt: skip
    step, limit = tl.load(ticket), tl.load(ticket + 1)
    is_closed = tl.load(closed) == step
    is_over = is_closed | (tl.load(poison) == step)
    said = step - step
    polls = step - step
    started = _now(polls, on_gpu)
    waited = started - started
    while (
        (said != step) & (said != step + 1) & (said != -step) & (waited <= limit) & (is_over == 0)
    ):
        said = _acquire(row, on_gpu)
        polls += 1
        waited = _now(polls, on_gpu) - started
    is_go = (said == step) | (said == step + 1)
    tl.store(closed, step, mask=said == step + 1)
    tl.store(poison, step, mask=(is_go == 0) & (is_closed == 0))
    tl.debug_barrier()  # the data is read behind the flag that lane 0 has seen
    place = tl.arange(0, width)
    is_place = place < count
    address = tl.load(row + _LINE + place, mask=is_place & is_go, other=0, volatile=True)
    tl.store(table + place, address, mask=is_place)


def publish(ticket: Tensor, poison: Tensor, source: Tensor, row: Tensor, count: int) -> None:
    """Write the first `count` words of `source` into a row that the host reads, then the step's number as its flag.

    ticket: [2] int64, the step's number, even and above 0, and how long a wait may take.  poison: [1] int64.
    source: at least [count] int64, contiguous.  row: [LINE + count or more] int64, pinned. Where the step is given up
    the flag is minus its number.
    """
    _publish_kernel[(1,)](
        ticket, poison, source, row, count=count, width=triton.next_power_of_2(max(1, count)), on_gpu=ticket.is_cuda,
        num_warps=1,
    )  # fmt: skip


def wait(
    ticket: Tensor, poison: Tensor, closed: Tensor, row: Tensor, table: Tensor, count: int
) -> None:
    """Wait until the host has written the step's number as the flag of a row, and copy its first `count` words.

    ticket: [2] int64 on the device, the step's number and the nanoseconds that a wait may take (interpreted: polls).
    poison: [1] int64, the step that is given up.  closed: [1] int64, the step in which the last of some rows has come;
    what would wait for another of them goes on with nothing.  row: as for `publish`, written by the host.
    table: at least [count] int64 on the device; zeros when there is nothing, or when the step is given up: its flag
    says so, or an earlier wait did, or the flag has not come.
    """
    _wait_kernel[(1,)](
        ticket, poison, closed, row, table, count=count, width=triton.next_power_of_2(max(1, count)),
        on_gpu=ticket.is_cuda, num_warps=1,
    )  # fmt: skip
