"""Decoding with drafts: a pass feeds the token drawn last and guesses, and draws as plain decoding would.

Why no token changes: the model takes each row in as a single step would, to the bit; tokens are drawn from the rows in
order by the sampler of the answer, with the random numbers that plain decoding would use; at the first drawn token that
is not the guess, the rows behind it are taken back from every state. This holds greedily and sampled, whatever the
guesses are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from torch import Tensor

from runtime.drafts.gate import DepthGate


class Attempt(Protocol):
    """Tokens that a model has taken in and that may be taken back."""

    tokens: list[int]
    logits: Tensor  # [len(tokens), vocab] fp32, after each of them

    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens had been fed; before the next forward."""


class RowsModel(Protocol):
    """What decoding with drafts asks of a model."""

    def decode(self, token: int, state: Any) -> Tensor: ...

    def attempt(self, tokens: Sequence[int], state: Any) -> Attempt:
        """Take tokens in, each as `decode` would, to the bit."""


class Source(Protocol):
    """Who guesses."""

    def propose(self, tokens: Sequence[int], token: int, state: Any, depth: int) -> list[int]:
        """Return at most `depth` tokens that may follow `tokens`, which were fed, and `token`, which was drawn."""


class Pass:
    """What one pass of the model gave: at least one token."""

    def __init__(
        self, tokens: list[int], logits: Tensor, drawn: list[int], attempt: Attempt | None
    ) -> None:
        self.tokens = tokens  # that were fed and stand
        self.logits = logits  # [len(tokens), vocab] fp32, after each of them
        self.drawn = drawn  # from each of the logits
        self._attempt = attempt

    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens, 1 or more, had been fed; before the next pass."""
        if self._attempt is not None and count < len(self._attempt.tokens):
            self._attempt.keep(count)


class Drafting:
    """Decodes with guesses. One engine, any number of conversations in turn."""

    def __init__(
        self,
        model: RowsModel,
        source: Source,
        source_name: str,
        depth: int,
        read_nbytes: Callable[[], int],
        gate: DepthGate | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        is_settled: Callable[[int], bool] | None = None,
    ) -> None:
        """depth: guesses at most.  read_nbytes: running total of what was read from the drive.

        gate: chooses the depth of each pass; None: always `depth`.  is_settled: whether a pass of so many rows takes as
        long as those after it, so that the gate may learn from it; None: all do.
        """
        self._model, self.source, self.source_name, self.depth = model, source, source_name, depth
        self._read_nbytes, self._gate, self._clock_ns = read_nbytes, gate, clock_ns
        self._is_settled = is_settled
        self.proposed = self.accepted = self.passes = 0

    def run(
        self,
        tokens: Sequence[int],
        token: int,
        state: Any,
        limit: int,
        draw: Callable[[Tensor], int],
        stops: Collection[int] = (),
    ) -> Pass:
        """Feed `token`, drawn after `tokens`, and guesses; draw from the rows as long as the guesses are right.

        limit: tokens still wanted.  draw: [1, vocab] -> the next token of the answer.  stops: none stands behind one.
        """
        started, before = self._clock_ns(), self._read_nbytes()
        wanted = self.depth if self._gate is None else self._gate.choose()
        wanted = min(wanted, limit - 1)
        guesses = self.source.propose(tokens, token, state, wanted) if wanted > 0 else []
        is_settled = self._is_settled is None or self._is_settled(1 + len(guesses))
        if not guesses:
            logits = self._model.decode(token, state)
            found = Pass([token], logits, [draw(logits)], None)
        else:
            found = self._try([token, *guesses], state, draw, stops)
        right = sum(a == b for a, b in zip(guesses, found.drawn, strict=False))
        self.passes += 1
        self.proposed += len(guesses)
        self.accepted += right
        if self._gate is not None and is_settled:
            spent = self._clock_ns() - started
            self._gate.record(len(guesses), right, spent, self._read_nbytes() - before)
        return found

    def _try(
        self,
        rows: list[int],
        state: Any,
        draw: Callable[[Tensor], int],
        stops: Collection[int],
    ) -> Pass:
        attempt = self._model.attempt(rows, state)
        drawn: list[int] = []
        for guess, row in zip([*rows[1:], None], attempt.logits.split(1), strict=True):
            drawn.append(draw(row))
            if drawn[-1] != guess or drawn[-1] in stops:
                break
        found = Pass(rows[: len(drawn)], attempt.logits[: len(drawn)], drawn, attempt)
        found.keep(len(drawn))
        return found

    def report(self) -> dict[str, Any]:
        """Return where guesses come from, what became of them, and what the gate has learnt."""
        return {
            "source": self.source_name,
            "depth": self.depth,
            "passes": self.passes,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "gate": None if self._gate is None else self._gate.report(),
        }
