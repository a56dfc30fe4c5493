"""How a job is answered: its messages, and what is counted of them. In the engine's thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from runtime.answers import Content, Reasoning, ToolCall
from runtime.errors import UserError
from runtime.sampling import TokenLogprob
from runtime.server.errors import ApiError
from runtime.server.jobs import Failed, Finished, Job, Part
from runtime.server.memory import Remembers
from runtime.server.metrics import Metrics
from runtime.server.replies import Alternative, TokenLogprobs, Usage
from runtime.server.timings import answer_timings, pass_timings
from runtime.session import Cancelled, Piece, Session
from runtime.stats import Rates, TokenStats, summarize
from runtime.text import TextCodec

log = logging.getLogger("server")

KEPT_REQUESTS = 16  # in `recent`
PROGRESS_EVERY_S = 10.0  # of a long prompt, in the log


class Answers:
    """Answers one job at a time in each session; counts what was answered."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS)  # for /status

    def generate(self, session: Session, job: Job) -> None:
        """Answer with what the model generates, a part for each token."""
        tokens: list[TokenStats] = []
        counter = _ReasoningCounter(job.starts_in_reasoning)
        watch = _Watch(job, session)
        for piece in session.generate(
            job.prompt, job.params, watch.is_cancelled, job.parser, job.shared
        ):
            self._count(job, piece)
            counter.count(piece)
            if piece.stats is not None:
                tokens.append(piece.stats)
            job.send(self._part(piece, session))
            if piece.finish is not None:
                self._finish(session, job, tokens, piece.finish.value, counter.tokens)

    def recall(self, memory: Remembers, job: Job, question: str) -> None:
        """Answer out of a store, in one part: until its end is known, a quote may still take its place."""
        assert job.started is not None

        def go_on() -> None:
            if job.is_cancelled.is_set():
                raise Cancelled

        try:
            found = memory.answer(job.memory, question, job.params, go_on)
        except UserError as error:  # the store may have changed while the request waited
            job.send(Failed(ApiError.of(error)))
            return
        job.first_token, job.count = time.perf_counter(), len(found.tokens)
        job.send(Part([Content(found.shown)], None, None))
        prompt, took_s = found.asked_tokens, job.first_token - job.started
        timings = {
            "cache_n": 0,
            "prompt_n": prompt,
            "predicted_n": job.count,
            "memory_ms": round(took_s * 1e3, 3),
            "queue_ms": round((job.started - job.created) * 1e3, 3),
            "ttft_ms": round((job.first_token - job.created) * 1e3, 3),
        }
        facts = {key: value for key, value in found.to_dict().items() if key != "answer"}
        job.send(Finished(found.finish, Usage(prompt, 0, job.count), timings, facts))
        self._count_answer(job, found.finish, prompt, 0, timings)
        log.info(
            "%s %s: from memory in %.0f ms, %s", job.name, job.model, took_s * 1e3, found.finish
        )

    def _count(self, job: Job, piece: Piece) -> None:
        now = time.perf_counter()
        if job.first_token is None:
            job.first_token = now
            assert job.started is not None
            self._metrics.ttft.observe(now - job.created)
            self._metrics.prefill.observe(now - job.started)
        elif piece.stats is not None:
            self._metrics.inter_token.observe(piece.stats.total_ms / piece.stats.num_tokens / 1e3)
        job.count += 1

    def _part(self, piece: Piece, session: Session) -> Part:
        logprobs = None
        if piece.logprob is not None and piece.token not in session.engine.codec.stop_ids:
            logprobs = _told(session.engine.codec, piece.logprob)
        timings = None if piece.stats is None else pass_timings(piece.stats)
        return Part(piece.events, logprobs, timings)

    def _finish(
        self, session: Session, job: Job, tokens: list[TokenStats], reason: str, reasoning: int
    ) -> None:
        assert job.started is not None
        assert job.first_token is not None
        cached, prompt = session.cached_tokens, len(job.prompt)
        summary = summarize(session.prefill_stats, tokens, prompt, 0, Rates())
        decode_s = time.perf_counter() - job.first_token
        timings = answer_timings(summary, job, decode_s)
        usage = Usage(prompt, cached, job.count, reasoning)
        job.send(Finished(reason, usage, timings))
        metrics = self._metrics
        metrics.decode.observe(decode_s)
        metrics.prompt_speed.set(summary.prefill_tok_s)
        metrics.speed.set(summary.decode_tok_s)
        metrics.read_rate.set(summary.read_nbytes_per_token * summary.decode_tok_s)
        self._count_answer(job, reason, prompt, cached, timings)
        log.info(
            "%s %s: prompt %d tokens (%d cached) at %.0f tok/s, answer %d tokens at %.2f tok/s, first token after "
            "%.0f ms, %s",
            job.name, job.model, prompt, cached, summary.prefill_tok_s, job.count, summary.decode_tok_s,
            (job.first_token - job.created) * 1e3, reason,
        )  # fmt: skip

    def _count_answer(
        self, job: Job, reason: str, prompt: int, cached: int, timings: dict[str, Any]
    ) -> None:
        """Count what every finished answer has."""
        metrics = self._metrics
        metrics.finished(reason)
        metrics.prompt_tokens.inc(prompt)
        metrics.asked_tokens.inc(prompt)
        metrics.cached_tokens.inc(cached)
        metrics.generated.inc(job.count)
        metrics.prompt_sizes.observe(prompt)
        metrics.answer_sizes.observe(job.count)
        metrics.e2e.observe(time.perf_counter() - job.created)
        self.recent.append({"id": job.name, "model": job.model, "finish_reason": reason, **timings})


class _Watch:
    """Asked at every safe point: whether to go on; on the way it tells the log how far a long prompt is."""

    def __init__(self, job: Job, session: Session) -> None:
        self._job, self._session, self._told = job, session, time.monotonic()

    def is_cancelled(self) -> bool:
        progress = self._session.progress
        if progress is not None and time.monotonic() - self._told >= PROGRESS_EVERY_S:
            self._told = time.monotonic()
            log.info(
                "%s reading the prompt: %d of %d tokens", self._job.name, progress.processed, progress.total
            )  # fmt: skip
        return self._job.is_cancelled.is_set()


class _ReasoningCounter:
    """Counts tokens of the reasoning: those before the first part of the answer, in thinking mode."""

    def __init__(self, starts_in_reasoning: bool) -> None:
        self._is_reasoning, self.tokens = starts_in_reasoning, 0

    def count(self, piece: Piece) -> None:
        for event in piece.events:
            if isinstance(event, Reasoning):
                self._is_reasoning = True
            elif isinstance(event, (Content, ToolCall)):
                self._is_reasoning = False
        self.tokens += self._is_reasoning


def _told(codec: TextCodec, found: TokenLogprob) -> TokenLogprobs:
    def alternative(token: int, logprob: float) -> Alternative:
        raw = codec.token_bytes(token)
        return Alternative(raw.decode(errors="replace"), max(logprob, -9999.0), raw)

    top = tuple(alternative(token, logprob) for token, logprob in found.top)
    return TokenLogprobs(alternative(found.token, found.logprob), top)
