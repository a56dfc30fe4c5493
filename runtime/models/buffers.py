"""What families share: buffers that grow with a conversation, the check of its window, parts of records, no tables."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.checkpoint import torch_dtype
from runtime.errors import UserError
from runtime.experts.tensor_runs import Part

GROWTH_ROWS = 256  # buffers grow by at least this many


class NoRows:
    """A family without tables on the drive."""

    read_nbytes = wait_ns = 0

    def close(self) -> None:
        """Nothing is open."""


def sendable(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor in RAM such that `non_blocking` copies of it to `device` wait for nothing there.

    Out of pageable memory a copy first waits for the stream, and with it for all that was launched before.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def appended(buffer: Tensor, length: int, new: Tensor) -> Tensor:
    """Return `buffer` with `new` written at `length`, grown where it is too small."""
    end = length + new.shape[0]
    if end > buffer.shape[0]:
        capacity = max(end, buffer.shape[0] + max(GROWTH_ROWS, buffer.shape[0] // 2))
        grown = buffer.new_zeros((capacity, *buffer.shape[1:]))
        grown[:length] = buffer[:length]
        buffer = grown
    buffer[length:end] = new
    return buffer


def open_part(record: Tensor, part: Part) -> Tensor:
    """Return a tensor of a record [record_nbytes] uint8 as it is stored: a view, a copy where it is not aligned."""
    raw = record[part.offset : part.offset + part.nbytes]
    stored = torch_dtype(part.dtype)
    if raw.data_ptr() % stored.itemsize:
        raw = raw.clone()
    return raw.view(stored).view(part.shape)


def check_context(wanted: int, max_positions: int) -> None:
    """Refuse a window that a model was not made for."""
    if wanted > max_positions:
        raise UserError(
            f"model.context_tokens is {wanted}, the model was made for {max_positions}",
            f"set model.context_tokens={max_positions} or less",
        )
