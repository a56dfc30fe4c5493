"""One thread that owns the engine: requests wait in a bounded queue, events go back to the asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.engine import Engine
from runtime.sampling import SamplingParams
from runtime.server.protocol import ApiError, ChatRequest, Usage
from runtime.session import Cancelled, Session
from runtime.stats import Rates, TokenStats, summarize

log = logging.getLogger("server")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer."""

    reason: str
    usage: Usage
    timings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that got no answer."""

    error: ApiError


Event = Text | Finished | Failed


@dataclass(slots=True)
class Job:
    """One request: its prompt, and the way back to whoever waits for it."""

    prompt: list[int]
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    def send(self, event: Event) -> None:
        """Hand an event to the loop; a loop that is gone wants none."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Worker:
    """Loads the engine in its own thread, then answers one job after the other."""

    def __init__(
        self, open_engine: Callable[[], Engine], max_waiting: int, on_failure: Callable[[], None]
    ) -> None:
        """on_failure: called in the worker's thread when the engine cannot be opened; `failure` says why."""
        self._open_engine, self._on_failure = open_engine, on_failure
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._max_waiting = max_waiting
        self._is_stopping = threading.Event()
        self._running: Job | None = None
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and not self._is_stopping.is_set()

    def submit(self, request: ChatRequest) -> Job:
        """Queue a request; everything that can be refused is refused here. Raises ApiError. Called in the loop."""
        if self._is_stopping.is_set():
            raise ApiError(503, "the server is shutting down", "shutting_down")
        engine = self.engine
        if engine is None:
            raise ApiError(503, "the model is still loading", "loading")
        if self._jobs.qsize() > self._max_waiting or (
            self._max_waiting == 0 and self._running is not None
        ):
            raise ApiError(429, f"{self._jobs.qsize()} requests are waiting already", "server_busy")
        prompt = engine.codec.encode_chat(request.messages)
        engine.check_prompt(prompt)
        job = Job(prompt, _sampling(engine.default_sampling(), request), asyncio.get_running_loop())
        self._jobs.put(job)
        return job

    def stop(self) -> None:
        """End the running and the waiting jobs with an error, then the thread."""
        self._is_stopping.set()
        running = self._running
        if running is not None:
            running.is_cancelled.set()
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            self.engine = engine = self._open_engine()
        except BaseException as error:  # noqa: BLE001 - it is raised again by the main thread
            self.failure = error
            self._on_failure()
            return
        session = Session(engine)
        try:
            while (job := self._jobs.get()) is not None and not self._is_stopping.is_set():
                self._running = job
                self._answer(session, job)
                self._running = None
            self._refuse_waiting(job)
        finally:
            engine.close()

    def _refuse_waiting(self, job: Job | None) -> None:
        while True:
            if job is not None:
                job.send(Failed(ApiError(503, "the server is shutting down", "shutting_down")))
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return

    def _answer(self, session: Session, job: Job) -> None:
        tokens: list[TokenStats] = []
        count = 0
        try:
            for piece in session.generate(job.prompt, job.params, job.is_cancelled.is_set):
                count += piece.token is not None
                if piece.stats is not None:
                    tokens.append(piece.stats)
                if piece.text:
                    job.send(Text(piece.text))
                if piece.finish is not None:
                    usage = Usage(len(job.prompt), session.cached_tokens, count)
                    job.send(
                        Finished(
                            piece.finish.value, usage, _timings(session, tokens, len(job.prompt))
                        )
                    )
        except Cancelled:
            log.info("cancelled after %d tokens", count)
            job.send(Failed(ApiError(503, "the server is shutting down", "shutting_down")))
        except Exception as error:
            log.exception("a request failed")
            job.send(Failed(ApiError.of(error)))


def _sampling(defaults: SamplingParams, request: ChatRequest) -> SamplingParams:
    fields = ("temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: getattr(request, name) for name in fields if getattr(request, name) is not None}
    return replace(defaults, **given, stop=request.stop, max_tokens=request.max_tokens)


def _timings(session: Session, tokens: list[TokenStats], prompt_tokens: int) -> dict[str, Any]:
    s = summarize(session.prefill_stats, tokens, prompt_tokens, 0, Rates())
    return {
        "cache_n": s.cached_tokens,
        "prompt_n": s.prompt_tokens - s.cached_tokens,
        "prompt_ms": round(s.ttft_ms, 3),
        "predicted_n": s.generated_tokens,
        "predicted_per_second": round(s.decode_tok_s, 2),
        "expert_hit_rate": round(s.hit_rate, 4),
        "expert_misses": s.counters.misses,
        "read_nbytes_per_token": round(s.read_nbytes_per_token),
    }
