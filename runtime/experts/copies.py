"""Copies from pinned RAM to VRAM slots on a stream of their own. Knows no expert and no layer.

Through the driver's own call: 2 us of the host for each copy, where `Tensor.copy_` takes ten times that.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

NUM_EVENTS = 64  # taken in turn; a mark is waited for long before its turn comes again


class Copier(Protocol):
    """Fills slots, in the order in which it is asked; a mark is a moment in that order."""

    slots: Tensor  # [num_slots, record_nbytes] uint8

    def copy(self, slot: int, record: Tensor) -> None:
        """Queue a copy. The record must stay until a mark behind it is reached, the slot untouched by readers."""

    def mark(self) -> Any:
        """Return a mark behind all copies queued so far."""

    def wait(self, mark: Any) -> None:
        """Let what is launched from now on run after the mark."""

    def launched(self) -> Any:
        """Return a mark behind everything launched on the GPU so far."""

    def follow(self, mark: Any) -> None:
        """Let copies queued from now on run after a mark that `launched` gave."""

    def synchronize(self, mark: Any) -> None:
        """Block the host until the mark is reached."""


class CudaCopier:
    """The copy engine, through the CUDA driver. What computes is launched on the stream that is current here."""

    def __init__(self, num_slots: int, record_nbytes: int, device: torch.device) -> None:
        # the expert kernel counts on pages
        memory = torch.empty(num_slots * record_nbytes + 4096, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % 4096
        self.slots = memory[start : start + num_slots * record_nbytes].view(
            num_slots, record_nbytes
        )
        self._addresses = [self.slots.data_ptr() + i * record_nbytes for i in range(num_slots)]
        self._nbytes = record_nbytes
        self._stream = torch.cuda.Stream(device)
        self._computing = torch.cuda.current_stream(device)
        self._handle = ctypes.c_void_p(self._stream.cuda_stream)
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._events = [torch.cuda.Event() for _ in range(NUM_EVENTS)]
        self._turn = 0

    def copy(self, slot: int, record: Tensor) -> None:
        status = self._copy(self._addresses[slot], record.data_ptr(), self._nbytes, self._handle)
        if status != 0:
            raise RuntimeError(
                f"a copy to VRAM slot {slot} was refused by the driver: CUresult {status}"
            )

    def mark(self) -> torch.cuda.Event:
        event = self._next_event()
        event.record(self._stream)
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self._computing.wait_event(mark)

    def launched(self) -> torch.cuda.Event:
        event = self._next_event()
        event.record(self._computing)
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def synchronize(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Whether the mark is reached, without waiting."""
        return bool(mark.query())

    def _next_event(self) -> torch.cuda.Event:
        self._turn = (self._turn + 1) % NUM_EVENTS
        return self._events[self._turn]
