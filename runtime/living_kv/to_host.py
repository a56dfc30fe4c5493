"""A tensor on its way into RAM, for which nothing waits until its numbers are needed."""

from __future__ import annotations

import torch
from torch import Tensor


class ToHost:
    """A copy out of VRAM that was queued behind the present kernels; a tensor in RAM is there already."""

    def __init__(self, tensor: Tensor) -> None:
        """tensor: its memory may be used for later kernels of the same stream."""
        self._host = tensor
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # pinned memory comes from torch's cache, which takes it back behind the copy
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> Tensor:
        """Return the copy once it is whole."""
        if self._done is not None:
            self._done.synchronize()
        return self._host
