"""Page-aligned host memory, cut into rows of one record each."""

from __future__ import annotations

import errno
import mmap

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.units import PAGE_NBYTES, align_up, format_nbytes

REGISTER_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostArena:
    """`num_rows` rows of `row_nbytes` (rounded up to pages), one anonymous mapping, zeroed by the kernel.

    A row is handed out twice: as a memoryview for reads and as a uint8 tensor for kernels, over the same bytes.
    """

    def __init__(self, num_rows: int, row_nbytes: int) -> None:
        self.num_rows = num_rows
        self.row_nbytes = align_up(row_nbytes, PAGE_NBYTES)
        self.nbytes = self.num_rows * self.row_nbytes
        self._is_pinned = False
        try:
            # mmap, not torch: the start must be page-aligned for direct reads
            memory = mmap.mmap(-1, max(self.nbytes, PAGE_NBYTES))
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise UserError(
                f"the machine refuses {format_nbytes(self.nbytes)} for {num_rows} expert rows",
                "lower cache.ram_gib",
            ) from error
        self._view = memoryview(memory)
        self.rows: Tensor = torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes].view(
            num_rows, self.row_nbytes
        )
        self.records: list[Tensor] = list(
            self.rows.unbind(0)
        )  # indexing a list costs a tenth of indexing a tensor
        self._places = list(range(num_rows))

    def pin(self) -> None:
        """Register the memory with CUDA: the GPU reads records in place, at the same addresses.

        The pages are touched first: registering pages that do not exist yet is slow and may fail half-way.
        """
        self.rows.view(-1, PAGE_NBYTES)[:, 0].add_(0)
        status = torch.cuda.cudart().cudaHostRegister(
            self.rows.data_ptr(), self.nbytes, REGISTER_MAPPED
        )
        if int(status) != 0:
            torch.cuda.cudart().cudaGetLastError()  # clear it: the next CUDA call must not meet it
            raise UserError(
                f"CUDA refuses to pin {format_nbytes(self.nbytes)} of RAM for the expert cache (error {int(status)})",
                "lower cache.ram_gib, or raise the limit on locked memory (ulimit -l)",
            )
        self._is_pinned = True

    def close(self) -> None:
        """Undo `pin`."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.rows.data_ptr())
            self._is_pinned = False

    def view(self, row: int) -> memoryview:
        """Return the bytes of one row, writable."""
        start = self._places[row] * self.row_nbytes
        return self._view[start : start + self.row_nbytes]

    def swap(self, row: int, other: int) -> None:
        """Let two rows change their memory, in `records` and `view`."""
        places, records = self._places, self.records
        places[row], places[other] = places[other], places[row]
        records[row], records[other] = records[other], records[row]
