"""Who goes on when several conversations share an engine: the decoding ones in step, one prompt beside them.

A round takes in one token of every conversation that decodes, layer by layer. Then the oldest prompt gets as much time
as the round took, so that neither starves the other; where nobody decodes it gets a layer, and the caller may look for
new conversations. Other prompts wait for it: there is memory for one. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from greenlet import GreenletExit

from runtime.experts.shared import Conversation, SharedReads


class Together:
    """Conversations over one source of experts."""

    def __init__(
        self, source: SharedReads, clock_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._source, self._clock_s = source, clock_s
        self._conversations: list[Conversation] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def num_decoding(self) -> int:
        """How many are past their prompt."""
        return sum(conversation.ask is not None for conversation in self._conversations)

    def start(self, run: Callable[[], object]) -> None:
        """Add a conversation: `run` reads a prompt, then decodes; it begins in a coming round."""
        self._conversations.append(Conversation(run))

    # as in every decode step: greenlets must not leave each other's modes behind
    @torch.inference_mode()
    def round(self) -> None:
        """Give everybody a turn. Raises what a conversation does not catch; the others can still be closed."""
        started = self._clock_s()
        self._decode()
        self._read(self._clock_s() + (self._clock_s() - started))
        self._conversations = [c for c in self._conversations if not c.dead]

    def _decode(self) -> None:
        """Take in a token of each conversation that decodes."""
        going = [c for c in self._conversations if c.ask is not None]
        while going:
            layer = min(c.ask.layer for c in going if c.ask is not None)
            meeting = [c for c in going if c.ask is not None and c.ask.layer == layer]
            self._source.serve(meeting)
            # who asks for an earlier layer now has begun its next token
            done = [c for c in meeting if c.ask is None or c.ask.layer <= layer]
            going = [c for c in going if c not in done]

    def _read(self, end_s: float) -> None:
        """Go on with the oldest prompt, by a layer or until `end_s`, whichever takes longer."""
        reading = next((c for c in self._conversations if c.ask is None and not c.dead), None)
        if reading is None:
            return
        while True:
            reading.go_on()
            if reading.dead or reading.ask is not None or self._clock_s() >= end_s:
                return

    def join(self) -> None:
        """Let everybody read its prompt to the end, one after the other."""
        with torch.inference_mode():
            for conversation in self._conversations:
                while conversation.ask is None and not conversation.dead:
                    conversation.go_on()

    # a conversation that ends in the middle of a step restores the mode in which that step was begun
    @torch.inference_mode()
    def close(self) -> None:
        """End every conversation where it is; what it has to clean up is cleaned up."""
        for conversation in self._conversations:
            if conversation and not conversation.dead:
                conversation.throw(GreenletExit)
        self._conversations = []
