"""Page-aligned host memory, cut into rows of one record each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.units import MIB, PAGE_NBYTES, align_up, format_nbytes

REGISTER_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
PIN_STEPS = 64  # of a whole that is refused
PIN_MARGIN_NBYTES = 64 * MIB  # given back of what is granted then: CUDA itself pins memory later
PIN_HINT = (
    "raise the limit on locked memory (ulimit -l; containers: --ulimit memlock=-1; WSL: .wslconfig)"
)


class Registrar(Protocol):
    """Who makes host memory readable by a device."""

    def register(self, address: int, nbytes: int) -> bool:
        """Pin whole pages; False when the system does not grant it, and nothing is pinned then."""

    def unregister(self, address: int) -> None: ...

    def check(self) -> None:
        """Prove, after something was refused, that the device still works."""


class CudaRegistrar:
    """Pins with CUDA, mapped at the same addresses."""

    def register(self, address: int, nbytes: int) -> bool:
        status = torch.cuda.cudart().cudaHostRegister(address, nbytes, REGISTER_MAPPED)
        if int(status) != 0:
            _forget_cuda_error()
        return int(status) == 0

    def unregister(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)

    def check(self) -> None:
        torch.zeros(1, device="cuda").add_(1).item()


def _forget_cuda_error() -> None:
    """Clear a refusal, which the next CUDA call would meet. torch binds no call for it: its library is asked itself.

    Where the library is part of another one nothing is done; `CudaRegistrar.check` tells whether that matters.
    """
    mapped = Path("/proc/self/maps").read_text().split()
    for path in {word for word in mapped if "libcudart" in word}:
        ctypes.CDLL(path).cudaGetLastError()


CUDA_REGISTRAR = CudaRegistrar()


class Sharer(Protocol):
    """A reader whose other process maps the rows too: a `ChildReader`."""

    @property
    def arena_fd(self) -> int: ...

    def use(self, address: int, nbytes: int, num_rows: int) -> None:
        """Read into these rows, which start at `address` in this process."""


class HostArena:
    """`num_rows` rows of `row_nbytes` (rounded up to pages), one mapping, zeroed by the kernel.

    A row is handed out twice: as a memoryview for reads and as a uint8 tensor for kernels, over the same bytes.
    """

    def __init__(
        self,
        num_rows: int,
        row_nbytes: int,
        registrar: Registrar = CUDA_REGISTRAR,
        *,
        shared_fd: int = -1,
    ) -> None:
        """shared_fd: an empty memfd for the rows, which another process maps too; -1: they are this process's own."""
        self.num_rows = num_rows
        self.row_nbytes = align_up(row_nbytes, PAGE_NBYTES)
        self.nbytes = self.num_rows * self.row_nbytes
        self._registrar = registrar
        self._pinned: list[tuple[int, int]] = []  # (first row, rows) of each registration
        try:
            # mmap, not torch: the start must be page-aligned for direct reads
            nbytes = max(self.nbytes, PAGE_NBYTES)
            if shared_fd >= 0:
                os.ftruncate(shared_fd, nbytes)
            memory = mmap.mmap(shared_fd, nbytes)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise UserError(
                f"the machine refuses {format_nbytes(self.nbytes)} for {num_rows} expert rows",
                "lower cache.ram_gib",
            ) from error
        self._memory = memory
        self._view = memoryview(memory)
        self.rows: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes].view(
            num_rows, self.row_nbytes
        )
        # indexing a list costs a tenth of indexing a tensor
        self.records: list[Tensor] = list(self.rows.unbind(0))
        self._places = list(range(num_rows))

    def pin(self) -> None:
        """Register the memory with CUDA: the GPU reads records in place, at the same addresses. Raises UserError."""
        pinned = self.pin_rows()
        if pinned < self.num_rows:
            self.close()
            raise UserError(
                f"CUDA pins {format_nbytes(pinned * self.row_nbytes)} of the {format_nbytes(self.nbytes)} of RAM that "
                "the GPU is to read",
                PIN_HINT,
            )

    def pin_rows(self) -> int:
        """Register as many rows, from the first on, as the system grants; return how many. The rest is given back.

        All at once where that is granted, else in steps that become smaller; then a little is given back, for what CUDA
        itself will pin. A record never spans two registrations: a copy out of such a one is refused.
        """
        if self._register(0, self.num_rows):
            return self.num_rows
        step = max(1, self.num_rows // PIN_STEPS)
        rows = 0
        while step:
            if rows + step <= self.num_rows and self._register(rows, step):
                rows += step
            else:
                step //= 2
        granted = rows
        while rows and (granted - rows) * self.row_nbytes < min(
            PIN_MARGIN_NBYTES, self.nbytes // PIN_STEPS
        ):
            start, count = self._pinned.pop()
            self._registrar.unregister(self._address(start))
            rows -= count
        self._memory.madvise(mmap.MADV_REMOVE, rows * self.row_nbytes)
        self._registrar.check()
        return rows

    def _register(self, first: int, count: int) -> bool:
        # pages that do not exist yet are slow to register, and it may fail half-way
        self.rows[first : first + count].view(-1, PAGE_NBYTES)[:, 0].add_(0)
        is_done = self._registrar.register(self._address(first), count * self.row_nbytes)
        if is_done:
            self._pinned.append((first, count))
        return is_done

    def _address(self, row: int) -> int:
        return self.rows.data_ptr() + row * self.row_nbytes

    def close(self) -> None:
        """Undo `pin`."""
        while self._pinned:
            self._registrar.unregister(self._address(self._pinned.pop()[0]))

    def view(self, row: int) -> memoryview:
        """Return the bytes of one row, writable."""
        start = self._places[row] * self.row_nbytes
        return self._view[start : start + self.row_nbytes]

    def swap(self, row: int, other: int) -> None:
        """Let two rows change their memory, in `records` and `view`."""
        places, records = self._places, self.records
        places[row], places[other] = places[other], places[row]
        records[row], records[other] = records[other], records[row]


def shared_arena(reader: Sharer, num_rows: int, row_nbytes: int) -> HostArena:
    """Return rows that a reader's process reads into. Once for a reader."""
    arena = HostArena(num_rows, row_nbytes, shared_fd=reader.arena_fd)
    reader.use(arena.rows.data_ptr(), arena.nbytes, num_rows)
    return arena
