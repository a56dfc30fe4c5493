"""Page-aligned host memory, cut into rows of one record each."""

from __future__ import annotations

import errno
import mmap

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.units import PAGE_NBYTES, align_up, format_nbytes


class HostArena:
    """`num_rows` rows of `row_nbytes` (rounded up to pages), one anonymous mapping, zeroed by the kernel.

    A row is handed out twice: as a memoryview for reads and as a uint8 tensor for kernels, over the same bytes.
    """

    def __init__(self, num_rows: int, row_nbytes: int) -> None:
        self.num_rows = num_rows
        self.row_nbytes = align_up(row_nbytes, PAGE_NBYTES)
        self.nbytes = self.num_rows * self.row_nbytes
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

    def view(self, row: int) -> memoryview:
        """Return the bytes of one row, writable."""
        return self._view[row * self.row_nbytes : (row + 1) * self.row_nbytes]
