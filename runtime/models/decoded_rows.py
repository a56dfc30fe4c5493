"""Several tokens through decoders of fixed shapes as so many single steps, and the way back from those not accepted.

Each token has a decoder of its own, and all of them the state buffers of one conversation. They go through the layers
in step, as conversations do that are decoded together (`experts.shared`): when all are at a layer's experts the source
is asked once, and then they go on in their order. So a token meets the state as the one before it left it, in the
launches of a single step, and what is shared is the reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from greenlet import GreenletExit
from torch import Tensor

from runtime.experts.shared import Conversation, SharedReads


class RowDecoder(Protocol):
    """A decoder beside another one."""

    wait_ns: int

    @property
    def is_settled(self) -> bool: ...

    def feed(self, token: int, position: int, context: Sequence[int]) -> Tensor: ...

    def take_back(self) -> None: ...


RowT = TypeVar("RowT", bound=RowDecoder)
StateT = TypeVar("StateT", bound=Any)


class DecodedRows(Generic[RowT]):
    """The decoders beside one, as many as a pass may have tokens."""

    def __init__(self, decoder: RowT, rows: Sequence[RowT], source: SharedReads) -> None:
        """decoder: whose conversation it is.  rows: opened beside it.  source: that all of them ask."""
        self.decoder, self.rows, self._source = decoder, list(rows), source

    def is_settled(self, count: int) -> bool:
        """Whether a pass of `count` tokens takes as long as those after it."""
        rows = [self.decoder] if count == 1 else self.rows[:count]
        return all(row.is_settled for row in rows)

    @property
    def wait_ns(self) -> int:
        """Nanoseconds that the host has waited for routes."""
        return self.decoder.wait_ns + sum(row.wait_ns for row in self.rows)

    def feed(self, tokens: Sequence[int], start: int, contexts: Sequence[Sequence[int]]) -> Tensor:
        """Take in tokens from position `start`, in inference mode: fp32 logits [T, vocab].

        What it raises leaves the state half-way.

        contexts: of each token, what stands before it.
        """
        if len(tokens) > len(self.rows):
            raise ValueError(f"{len(tokens)} tokens, but {len(self.rows)} decoders beside")
        found: list[Tensor] = []

        def take_in(row: RowT, *where: Any) -> None:
            found.append(row.feed(*where))

        parts = zip(self.rows, tokens, range(start, start + len(tokens)), contexts, strict=False)
        going = [Conversation(partial(take_in, *part)) for part in parts]
        try:
            for conversation in going:  # up to the first layer's experts
                conversation.go_on()
            while any(conversation.ask is not None for conversation in going):
                self._source.serve(going)
        finally:
            for conversation in going:
                if conversation and not conversation.dead:
                    conversation.throw(GreenletExit)
        return torch.cat(found)


class RowsAttempt(ABC, Generic[RowT, StateT]):
    """Tokens that were taken in and may be taken back, before the next forward of the same conversation."""

    context_tokens: int  # that a token's rows of tables depend on

    @torch.inference_mode()
    def __init__(self, rows: DecodedRows[RowT], tokens: Sequence[int], state: StateT) -> None:
        self.tokens, self.state = list(tokens), state
        self.decoder, self._rows = rows.decoder, rows.rows
        self.enter()
        self._start, self._before = state.position, list(self.context())
        contexts = [self._context(count) for count in range(len(tokens))]
        self.logits = rows.feed(tokens, self._start, contexts)
        self._count = len(tokens)
        self._move()

    @abstractmethod
    def enter(self) -> None:
        """Bring the state into the decoder's buffers."""

    @abstractmethod
    def context(self) -> list[int]:
        """Return the tokens before the state's position, oldest first."""

    @abstractmethod
    def move(self, position: int, context: list[int]) -> None:
        """Let the state be at a position."""

    @torch.inference_mode()
    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens had been fed; at most as many as the last time."""
        for row in reversed(self._rows[count : self._count]):
            row.take_back()
        self._count = count
        self._move()

    def _move(self) -> None:
        self.move(self._start + self._count, self._context(self._count))

    def _context(self, count: int) -> list[int]:
        return [*self._before, *self.tokens[:count]][-self.context_tokens :]
