"""A session: one token timeline and the state that belongs to it. Callers hand in whole prompts.

The common prefix is reused; states cannot be rolled back, so a prompt that departs from the timeline starts anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from runtime.answers import Content, Event, Parser, PlainParser
from runtime.engine import Engine, GreedyPass
from runtime.sampling import Sampler, SamplingParams
from runtime.stats import TokenStats
from runtime.text import AnswerStream


class FinishReason(Enum):
    """Why an answer ended."""

    stop = "stop"
    length = "length"


class Cancelled(Exception):  # noqa: N818 - not an error: the caller asked for it
    """The caller lost interest."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one decoding step gave: its token, the parts of the answer that became certain, what it cost.

    The first token's cost is the prompt's: its stats are None, as are those of all but the first token of a pass with
    drafts.
    """

    token: int
    events: Sequence[Event]
    stats: TokenStats | None
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        """The content among the parts."""
        return "".join(event.text for event in self.events if isinstance(event, Content))


class _Rows:
    """Logits of one pass, to be drawn from in order."""

    def __init__(
        self, logits: Tensor, tokens: Sequence[int] = (), found: GreedyPass | None = None
    ) -> None:
        """logits: [n, vocab] fp32.  tokens: that were fed, logits[i] is after tokens[i]."""
        self._logits, self._at = logits, 0
        self.tokens, self.found = tokens, found

    @property
    def num_left(self) -> int:
        return len(self._logits) - self._at

    @property
    def is_empty(self) -> bool:
        return not self.num_left

    @property
    def last(self) -> Tensor:
        """The row drawn from last: [1, vocab]."""
        return self._logits[self._at - 1 : self._at]

    def next(self) -> Tensor:
        """Return the next row: [1, vocab]."""
        self._at += 1
        return self.last


class Session:
    """One conversation on an engine. One thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: list[int] = []
        self.prefill_stats: TokenStats | None = None
        self.cached_tokens = 0  # of the last prompt
        self._state = engine.new_state()
        self._logits: Tensor | None = None  # after the last token

    def reset(self) -> None:
        """Forget everything."""
        self.tokens, self._logits, self._state = [], None, self.engine.new_state()

    def sync(
        self, prompt: Sequence[int], is_cancelled: Callable[[], bool] = lambda: False
    ) -> Tensor:
        """Make the timeline equal to `prompt`: fp32 logits [1, vocab] after its last token.

        Only what is new is computed, in pieces; between pieces `is_cancelled` is asked, and Cancelled raised. A first
        piece, which has nothing to lose, is given up after any layer.
        """
        started = time.perf_counter()
        before = self.engine.counters()
        self.engine.check_prompt(prompt)
        if list(prompt[: len(self.tokens)]) != self.tokens:
            self.reset()
        self.cached_tokens = len(self.tokens)
        size = self.engine.prefill_tokens
        for start in range(len(self.tokens), len(prompt), size):
            if is_cancelled():
                raise Cancelled
            piece = list(prompt[start : start + size])
            self._logits = self._advance(piece, None if self.tokens else is_cancelled)
        assert self._logits is not None
        self.prefill_stats = self.engine.token_stats(
            len(prompt), len(prompt) - self.cached_tokens, started, before
        )
        return self._logits

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        is_cancelled: Callable[[], bool] = lambda: False,
        parser: Parser | None = None,
    ) -> Iterator[Piece]:
        """Answer a prompt, one piece per token; the last has a finish reason. Stop strings are never given out.

        The answer ends with `length` at params.max_tokens or at the end of the window.  parser: takes the answer
        apart; None: all of it is content.
        """
        logits = self.sync(prompt, is_cancelled)
        sampler = Sampler(params, self.engine.num_tokens)
        stream = AnswerStream(self.engine.codec, parser or PlainParser(), params.stop)
        room = self.engine.context_tokens - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        rows, stats = _Rows(logits), None
        try:
            for count in range(1, limit + 1):
                token = sampler(rows.next())
                is_end = token in self.engine.codec.stop_ids
                events = [] if is_end else stream.push(token)
                if is_end or count == limit:
                    events += stream.finish()
                if is_end or stream.is_stopped or count == limit:
                    is_stop = is_end or stream.is_stopped
                    finish = FinishReason.stop if is_stop else FinishReason.length
                    yield Piece(token, events, stats, finish)
                    return
                yield Piece(token, events, stats)
                if is_cancelled():
                    raise Cancelled
                stats = None
                if rows.is_empty:
                    started, before = time.perf_counter(), self.engine.counters()
                    rows = self._pass(token, limit - count, params)
                    fed = len(rows.tokens)
                    stats = self.engine.token_stats(len(self.tokens), fed, started, before)
        finally:
            self._take_back(rows)

    def _pass(self, token: int, limit: int, params: SamplingParams) -> _Rows:
        """Feed the token drawn last: with drafts and greedily also those that will be drawn, at most `limit` in all."""
        drafting = self.engine.drafting
        if drafting is None or params.temperature != 0:
            self._logits = self._advance([token])
            return _Rows(self._logits, [token])
        engine = self.engine
        try:
            found = drafting.greedy_pass(
                token, self._state, limit, engine.codec.stop_ids, engine.num_tokens
            )
        except BaseException:
            self.reset()
            raise
        self.tokens += found.tokens
        self._logits = found.logits[-1:]
        return _Rows(found.logits, found.tokens, found)

    def _take_back(self, rows: _Rows) -> None:
        """Leave the timeline as it would be without drafts: an answer may end in the middle of a pass."""
        left = rows.num_left
        if left and rows.found is not None:
            rows.found.keep(len(rows.tokens) - left)
            del self.tokens[-left:]
            self._logits = rows.last

    def _advance(self, tokens: list[int], is_cancelled: Callable[[], bool] | None = None) -> Tensor:
        """is_cancelled: asked after each layer of a prompt; None: the tokens are taken in whatever happens."""

        def after_layer() -> None:
            if is_cancelled is not None and is_cancelled():
                raise Cancelled

        try:
            if len(tokens) == 1:
                logits = self.engine.model.decode(tokens[0], self._state)
            else:
                logits = self.engine.model.prefill(tokens, self._state, after_layer=after_layer)
        except BaseException:
            self.reset()  # some layers have seen these tokens, others have not
            raise
        self.tokens += tokens
        return logits
