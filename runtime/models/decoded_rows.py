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
from typing import Any

import torch
from greenlet import GreenletExit
from torch import Tensor

from runtime.experts.shared import Conversation, SharedReads


class RowDecoder(ABC):
    """What a family's decoder adds to its steps, so that it can take in tokens beside another one."""

    CONTEXT_TOKENS: int  # before a token, that its rows of tables depend on
    logits: Tensor  # [1, vocab] fp32, of the last step
    wait_ns: int
    tapped: Tensor | None = (
        None  # [1, ...], what draft heads read of the last step, where there are some
    )
    _steps: int

    @property
    def is_settled(self) -> bool:
        """Whether a step's launches are compiled and captured, so that the next takes as long as those after it."""
        return self._steps > 1

    def feed(self, token: int, position: int, context: Sequence[int]) -> Tensor:
        """Take in a token of the conversation beside, in inference mode: fp32 logits [1, vocab], as a step's.

        context: up to `CONTEXT_TOKENS` before it, oldest first. The conversation's state is left to say where it was.
        """
        self._compute_layers(self._enter(token, position, context))
        self._steps += 1
        return self.logits

    @abstractmethod
    def bring_in(self, state: Any) -> None:
        """Have a conversation's state in the buffers."""

    @abstractmethod
    def move(self, state: Any, position: int, context: list[int]) -> None:
        """Let the conversation in the buffers be at a position, behind these tokens."""

    @abstractmethod
    def context_of(self, state: Any) -> list[int]:
        """Return the tokens before a conversation's position, oldest first."""

    @abstractmethod
    def take_back(self) -> None:
        """Make the state what it was before the last token that was fed. Of a decoder beside another."""

    @abstractmethod
    def _enter(self, token: int, position: int, context: Sequence[int]) -> Any:
        """Fill in a step's inputs; return what its rows of tables are asked for with."""

    @abstractmethod
    def _compute_layers(self, request: Any) -> None:
        """Run all layers and the head."""


class DecodedRows:
    """The decoders beside one, as many as a pass may have tokens."""

    def __init__(
        self, decoder: RowDecoder, rows: Sequence[RowDecoder], source: SharedReads
    ) -> None:
        """decoder: whose conversation it is.  rows: opened beside it.  source: that all of them ask."""
        self.decoder, self.rows, self._source = decoder, list(rows), source

    def is_settled(self, count: int) -> bool:
        """Whether a pass of `count` tokens takes as long as those after it."""
        rows = [self.decoder] if count == 1 else self.rows[:count]
        return all(row.is_settled for row in rows)

    def taps(self, count: int) -> Tensor | None:
        """Return what draft heads read of the last pass, of its first `count` tokens: [count, ...]."""
        kept = [row.tapped for row in self.rows[:count] if row.tapped is not None]
        return torch.cat(kept) if kept else None

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

        def take_in(row: RowDecoder, *where: Any) -> None:
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


class RowsAttempt:
    """Tokens that were taken in and may be taken back, before the next forward of the same conversation."""

    @torch.inference_mode()
    def __init__(self, rows: DecodedRows, tokens: Sequence[int], state: Any) -> None:
        self.tokens, self._state = list(tokens), state
        self._decoder, self._rows = rows.decoder, rows.rows
        self._decoder.bring_in(state)
        self._start, self._before = state.position, self._decoder.context_of(state)
        contexts = [self._context(count) for count in range(len(tokens))]
        self.logits = rows.feed(tokens, self._start, contexts)
        self.taps = rows.taps(len(tokens))
        self._count = len(tokens)
        self._move()

    @torch.inference_mode()
    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens had been fed; at most as many as the last time."""
        for row in reversed(self._rows[count : self._count]):
            row.take_back()
        self._count = count
        self._move()

    def _move(self) -> None:
        self._decoder.move(self._state, self._start + self._count, self._context(self._count))

    def _context(self, count: int) -> list[int]:
        return [*self._before, *self.tokens[:count]][-self._decoder.CONTEXT_TOKENS :]
