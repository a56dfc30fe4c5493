"""What model families share: buffers that grow with a conversation, and the check of its window."""

from __future__ import annotations

from torch import Tensor

from runtime.errors import UserError

GROWTH_ROWS = 256  # buffers grow by at least this many


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


def check_context(wanted: int, max_positions: int) -> None:
    """Refuse a window that a model was not made for."""
    if wanted > max_positions:
        raise UserError(
            f"model.context_tokens is {wanted}, the model was made for {max_positions}",
            f"set model.context_tokens={max_positions} or less",
        )
