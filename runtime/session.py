"""A session: one token timeline and the state that belongs to it. Callers hand in whole prompts.

The common prefix is reused. States cannot be rolled back: a prompt that departs from the timeline goes on from the copy
of a state that fits it best, and starts anew without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from runtime.answers import Content, Event, Parser, PlainParser
from runtime.drafts.passes import Pass
from runtime.engine import Engine
from runtime.experts.shared import pause
from runtime.sampling import Sampler, SamplingParams, TokenLogprob
from runtime.snapshot import Snapshot, SnapshotStore
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
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        """The content among the parts."""
        return "".join(event.text for event in self.events if isinstance(event, Content))


class _Rows:
    """Logits of one pass, to be given out in order, and the tokens drawn from them."""

    def __init__(
        self,
        logits: Tensor,
        tokens: Sequence[int] = (),
        drawn: Sequence[int] | None = None,
        found: Pass | None = None,
    ) -> None:
        """logits: [n, vocab] fp32.  tokens: that were fed, logits[i] is after tokens[i].  drawn: None: not yet."""
        self._logits, self._at = logits, 0
        self.tokens, self._drawn, self.found = tokens, drawn, found

    @property
    def num_left(self) -> int:
        return len(self._logits) - self._at

    @property
    def is_empty(self) -> bool:
        return not self.num_left

    @property
    def last(self) -> Tensor:
        """The row given out last: [1, vocab]."""
        return self._logits[self._at - 1 : self._at]

    def next(self, sampler: Sampler) -> tuple[Tensor, int]:
        """Return the next row, [1, vocab], and the token drawn from it."""
        self._at += 1
        token = sampler(self.last) if self._drawn is None else self._drawn[self._at - 1]
        return self.last, token


@dataclass(slots=True)
class Progress:
    """How far a prompt has been read; another thread may look at it."""

    total: int  # tokens of the prompt
    cached: int  # of them not computed again
    processed: float  # of them done; a part of a piece counts by its layers
    started: float = field(default_factory=time.perf_counter)


class Session:
    """One conversation at a time on an engine, and copies of others. One thread at a time."""

    def __init__(self, engine: Engine, store: SnapshotStore | None = None) -> None:
        """store: where states are copied to, and found again; None: a prompt that departs starts anew."""
        self.engine = engine
        self.tokens: list[int] = []
        self.prefill_stats: TokenStats | None = None
        self.cached_tokens = 0  # of the last prompt
        self.progress: Progress | None = None  # of the prompt in work
        self._store = store
        self._state = engine.new_state()
        self._logits: Tensor | None = None  # after the last token

    def reset(self) -> None:
        """Forget everything but the copies."""
        self.tokens, self._logits, self._state = [], None, self.engine.new_state()

    def sync(
        self,
        prompt: Sequence[int],
        is_cancelled: Callable[[], bool] = lambda: False,
        shared: int | None = None,
    ) -> Tensor:
        """Make the timeline equal to `prompt`: fp32 logits [1, vocab] after its last token.

        Only what is new is computed, in pieces; between pieces `is_cancelled` is asked, and Cancelled raised. A piece
        that begins where nothing is lost (at the start, or at a copy) is given up after any layer.  shared: tokens that
        a next prompt of the same conversation will begin with; a copy is kept there, of the whole prompt if None.
        """
        started = time.perf_counter()
        before = self.engine.counters()
        self.engine.check_prompt(prompt)
        self._resume(prompt)
        self.cached_tokens = len(self.tokens)
        self.progress = Progress(len(prompt), len(self.tokens), len(self.tokens))
        try:
            self._read(prompt, is_cancelled, len(prompt) if shared is None else shared)
        except Cancelled:
            self.snapshot()
            raise
        finally:
            self.progress = None
        assert self._logits is not None
        self.prefill_stats = self.engine.token_stats(
            len(prompt), len(prompt) - self.cached_tokens, started, before
        )
        return self._logits

    def known_tokens(self, prompt: Sequence[int]) -> int:
        """Return how many of a prompt's tokens the timeline is; 0 if it is anything else."""
        return len(self.tokens) if list(prompt[: len(self.tokens)]) == self.tokens else 0

    def _resume(self, prompt: Sequence[int]) -> None:
        """Go to the longest beginning of `prompt` that is known: the timeline as it is, a copy, or nothing."""
        known = self.known_tokens(prompt)
        is_going_on = known == len(self.tokens)
        found = None if self._store is None else self._store.longest(prompt, known)
        if found is not None:
            self.reset()
            self._state.restore(found.tensors)
            self.tokens, self._logits = list(found.tokens), found.logits.to(self.engine.device)
        elif not is_going_on:
            self.reset()

    def _read(self, prompt: Sequence[int], is_cancelled: Callable[[], bool], shared: int) -> None:
        every = self._copy_every()
        while len(self.tokens) < len(prompt):
            if is_cancelled():
                raise Cancelled
            start = len(self.tokens)
            end = min(start + self.engine.prefill_tokens, len(prompt))
            if self._store is not None and start < shared < end:
                end = shared
            is_safe = not start or (self._store is not None and self._store.has(self.tokens))
            self._logits = self._advance(list(prompt[start:end]), is_cancelled if is_safe else None)
            if end == shared:
                self.snapshot()
            elif every and end // every > start // every:
                self.snapshot(is_saved=False)

    def _copy_every(self) -> int:
        return self.engine.config.snapshots.every_tokens if self._store is not None else 0

    def snapshot(self, is_saved: bool = True) -> None:
        """Keep a copy of the conversation as it is, where there is a store and anything to keep."""
        store = self._store
        if store is None or not store.is_enabled or self._logits is None or store.has(self.tokens):
            return
        logits = self._logits.to("cpu", copy=True)
        tensors = {name: tensor.cpu() for name, tensor in self._state.tensors().items()}
        store.add(Snapshot(tuple(self.tokens), tensors, logits), is_saved)

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        is_cancelled: Callable[[], bool] = lambda: False,
        parser: Parser | None = None,
        shared: int | None = None,
    ) -> Iterator[Piece]:
        """Answer a prompt, one piece per token; the last has a finish reason. Stop strings are never given out.

        The answer ends with `length` at params.max_tokens or at the end of the window.  parser: takes the answer
        apart; None: all of it is content.  shared: as for `sync`; a copy is kept at the answer's end too.
        """
        logits = self.sync(prompt, is_cancelled, shared)
        sampler = Sampler(params, self.engine.num_tokens, prompt)
        stream = AnswerStream(self.engine.codec, parser or PlainParser(), params.stop)
        room = self.engine.context_tokens - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        rows, stats = _Rows(logits), None
        try:
            for count in range(1, limit + 1):
                row, token = rows.next(sampler)
                logprob = sampler.logprob(row, token)
                is_end = token in self.engine.codec.stop_ids
                events = [] if is_end else stream.push(token)
                if is_end or count == limit:
                    events += stream.finish()
                if is_end or stream.is_stopped or count == limit:
                    is_stop = is_end or stream.is_stopped
                    finish = FinishReason.stop if is_stop else FinishReason.length
                    yield Piece(token, events, stats, logprob, finish)
                    return
                yield Piece(token, events, stats, logprob)
                if is_cancelled():
                    raise Cancelled
                stats = None
                if rows.is_empty:
                    # nothing of it is taken back any more: the states of its rows can go
                    rows.found = None
                    started, before = time.perf_counter(), self.engine.counters()
                    rows = self._pass(token, limit - count, sampler)
                    fed = len(rows.tokens)
                    stats = self.engine.token_stats(len(self.tokens), fed, started, before)
        finally:
            self._take_back(rows)
            self.snapshot()

    def _pass(self, token: int, limit: int, sampler: Sampler) -> _Rows:
        """Feed the token drawn last; with drafts also guesses, and draw as long as they are right, at most `limit`."""
        engine = self.engine
        if engine.drafting is None:
            self._logits = self._advance([token])
            return _Rows(self._logits, [token])
        try:
            found = engine.drafting.run(
                self.tokens, token, self._state, limit, sampler, engine.codec.stop_ids
            )
        except BaseException:
            self.reset()
            raise
        self.tokens += found.tokens
        self._logits = found.logits[-1:]
        return _Rows(found.logits, found.tokens, found.drawn, found)

    def _take_back(self, rows: _Rows) -> None:
        """Leave the timeline as it would be without drafts: an answer may end in the middle of a pass."""
        left = rows.num_left
        if left and rows.found is not None:
            rows.found.keep(len(rows.tokens) - left)
            del self.tokens[-left:]
            self._logits = rows.last

    def _advance(self, tokens: list[int], is_cancelled: Callable[[], bool] | None = None) -> Tensor:
        """is_cancelled: asked after each layer of a prompt; None: the tokens are taken in whatever happens."""
        layers = self.engine.num_layers

        def after_layer() -> None:
            pause()
            if self.progress is not None:
                self.progress.processed += len(tokens) / layers
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
        if self.progress is not None:
            self.progress.processed = len(self.tokens)
        return logits
