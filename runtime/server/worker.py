"""One thread that owns the engine: it takes jobs from the queue, and its messages go back to the asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from runtime.answers import Content, Reasoning, ToolCall
from runtime.engine import Engine
from runtime.hardware import is_device_fault
from runtime.sampling import SamplingParams, TokenLogprob
from runtime.server.errors import ApiError
from runtime.server.jobs import Failed, Finished, Job, JobQueue, Part
from runtime.server.metrics import EngineFigures, Metrics
from runtime.server.replies import Alternative, TokenLogprobs, Usage
from runtime.server.requests import ChatRequest, CompletionRequest, Request
from runtime.session import Cancelled, Piece, Session
from runtime.snapshot import SnapshotStore
from runtime.stats import Rates, RunSummary, TokenStats, summarize
from runtime.text import TextCodec
from runtime.together import Together

log = logging.getLogger("server")

KEPT_REQUESTS = 16  # of /status
PROGRESS_EVERY_S = 10.0  # of a long prompt, in the log


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the model before it is loaded."""

    name: str
    revision: str
    codec: TextCodec
    context_tokens: int
    version: str
    commit: str | None

    @property
    def fingerprint(self) -> str:
        """What an answer's bytes depend on: this code and these weights."""
        return f"nvmoe-{self.version}-{(self.commit or 'unknown')[:10]}-{self.revision[:12]}"


class Worker:
    """Loads the engine in its own thread, then answers one job after the other."""

    def __init__(
        self,
        served: Served,
        open_engine: Callable[[], Engine],
        open_store: Callable[[Engine], SnapshotStore],
        max_waiting: int,
        on_failure: Callable[[], None],
        max_batch: int = 1,
    ) -> None:
        """on_failure: called in the worker's thread when the engine is lost; `failure` says why.

        max_batch: conversations that the engine decodes together.
        """
        self.served = served
        self._open_engine, self._open_store, self._on_failure = open_engine, open_store, on_failure
        self._queue = JobQueue(max_waiting, max_batch)
        self._max_batch = max_batch
        self._is_stopping, self._is_loaded = threading.Event(), threading.Event()
        self._sessions: list[Session] = []  # those that are free, the one used longest ago first
        self._at_work: dict[Job, Session] = {}
        self._store: SnapshotStore | None = None
        self._recent: deque[dict[str, Any]] = deque(maxlen=KEPT_REQUESTS)
        self._started = time.time()
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.metrics = Metrics(served.name, self._figures)
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- in the loop's thread ------------------------------------------------------------------------------------

    def check_ready(self) -> None:
        """Raise ApiError 503 when a request could not be answered now, with the reason."""
        if self.failure is not None:
            raise ApiError(
                503,
                "the device or the model is lost: this server ends; start it again",
                "device_lost",
            )
        if self._is_stopping.is_set():
            raise ApiError(503, "the server is shutting down", "shutting_down")
        if self.engine is None:
            raise ApiError(503, "the model is still loading", "loading")

    async def submit(self, request: Request, name: str) -> Job:
        """Queue a request; everything that can be refused is refused here. Raises ApiError."""
        self.check_ready()
        self._queue.check_room()
        # a long prompt takes a while to encode, and the loop has streams to keep alive
        job = await asyncio.to_thread(self._prepare, request, name, asyncio.get_running_loop())
        self._queue.put(job)
        return job

    def _prepare(self, request: Request, name: str, loop: asyncio.AbstractEventLoop) -> Job:
        engine, codec = self.engine, self.served.codec
        assert engine is not None, "check_ready was asked"
        params = _sampling(engine.default_sampling(), request)
        if isinstance(request, ChatRequest):
            prompt = codec.encode_chat(request.messages, request.options)
            engine.check_prompt(prompt)
            parser = codec.parser(request.options)
            if request.forced is not None:
                prompt = prompt + codec.force_call(request.forced, parser)
                engine.check_prompt(prompt)
            shared = codec.shared_tokens(prompt, request.messages, request.options)
            thinks = request.options.thinking
            return Job(name, request.model, prompt, params, parser, loop, shared, thinks)
        assert isinstance(request, CompletionRequest)
        prompt = self.prompt_tokens(request)
        engine.check_prompt(prompt)
        return Job(name, request.model, prompt, params, codec.plain_parser(), loop)

    def prompt_tokens(self, request: CompletionRequest) -> list[int]:
        """Return a text completion's prompt: markers in it are markers, and the start token stands once."""
        codec = self.served.codec
        if isinstance(request.prompt, tuple):
            if any(token >= codec.vocab_size for token in request.prompt):
                raise ApiError(
                    400,
                    f"prompt holds ids beyond this model's {codec.vocab_size} tokens",
                    "invalid_value",
                    "prompt",
                )
            return list(request.prompt)
        return codec.encode_prompt(request.prompt)

    def cancel(self, job: Job) -> None:
        """Give a job up, whatever its state; after the answer this changes nothing."""
        phase = self._queue.cancel(job)
        if phase is not None:
            self.metrics.cancelled(phase)
            log.info("%s cancelled while %s, after %d tokens", job.name, phase, job.count)

    def progress(self, job: Job) -> dict[str, Any] | None:
        """Return how far a job's prompt has been read, in llama-server's names; None when it is not in work."""
        session = self._at_work.get(job)
        found = None if session is None else session.progress
        if found is None:
            return None
        return {
            "total": found.total,
            "cache": found.cached,
            "processed": round(found.processed),
            "time_ms": round((time.perf_counter() - found.started) * 1e3),
        }

    def position(self, job: Job) -> int | None:
        """Return how many are before a waiting job."""
        return self._queue.position(job)

    def status(self) -> dict[str, Any]:
        """Return what this server is and does now; no secrets, no text of anybody."""
        engine, store, running = self.engine, self._store, self._queue.running
        state = "ready"
        try:
            self.check_ready()
        except ApiError as error:
            state = error.code or "error"
        now = time.perf_counter()
        served = self.served
        return {
            "state": state,
            "model": {
                "id": served.name,
                "revision": served.revision,
                "can_think": served.codec.can_think,
                "can_call_tools": served.codec.can_call,
                "context_tokens": served.context_tokens,
            },
            "version": served.version,
            "commit": served.commit,
            "fingerprint": served.fingerprint,
            "uptime_s": round(time.time() - self._started),
            "queue": {
                "waiting": [
                    {"id": job.name, "since_ms": round((now - job.created) * 1e3)}
                    for job in self._queue.waiting
                ],
                "running": self._running(running[0], now) if running else None,
                "all_running": [self._running(job, now) for job in running],
            },
            "engine": None if engine is None else _engine_facts(engine),
            "snapshots": None
            if store is None
            else {
                "in_ram": len(store),
                "nbytes": store.used_nbytes,
                "saved": store.num_saved,
                "saved_nbytes": store.saved_nbytes,
            },
            "recent": list(self._recent),
        }

    def _running(self, job: Job, now: float) -> dict[str, Any]:
        return {
            "id": job.name,
            "model": job.model,
            "phase": job.phase,
            "since_ms": round((now - job.created) * 1e3),
            "prompt_tokens": len(job.prompt),
            "generated_tokens": job.count,
            "prompt_progress": self.progress(job),
        }

    def _figures(self) -> EngineFigures | None:
        engine, store = self.engine, self._store
        self.metrics.waiting.set(len(self._queue.waiting))
        self.metrics.running.set(len(self._queue.running))
        if engine is None:
            return None
        counters = engine.counters()
        return EngineFigures(
            experts=counters.experts,
            row_read_nbytes=counters.row_read_nbytes,
            ram_cache_nbytes=engine.plan.cache_nbytes,
            vram_expert_nbytes=0
            if engine.vram_plan is None
            else engine.vram_plan.slots * engine.vram_plan.record_nbytes,
            is_direct=engine.is_direct,
            snapshot_nbytes=0 if store is None else store.used_nbytes,
            snapshot_saved_nbytes=0 if store is None else store.saved_nbytes,
        )

    def stop(self) -> None:
        """End the running and the waiting jobs with an error, then the thread."""
        self._is_stopping.set()
        for job in self._queue.close():
            job.send(Failed(ApiError(503, "the server is shutting down", "shutting_down")))

    def wait_until_loaded(self) -> None:
        """Return when the model is loaded. Raises what loading it raised."""
        self._is_loaded.wait()
        if self.failure is not None:
            raise self.failure

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # ---- in the engine's thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            engine = self._open_engine()
        except BaseException as error:  # noqa: BLE001 - it is raised again by the main thread
            self._lose(error)
            return
        try:
            self._store = store = self._open_store(engine)
            self._sessions = [Session(engine, store) for _ in range(self._max_batch)]
            self.engine = engine
            self._is_loaded.set()
            if engine.shared is None:
                self._serve_alone()
            else:
                self._serve_together(Together(engine.shared))
            store.close()
        except BaseException as error:  # noqa: BLE001 - as above
            self._lose(error)
        finally:
            engine.close()

    def _serve_alone(self) -> None:
        while (job := self._queue.take()) is not None:
            self._answer(self._session_for(job), job)

    def _serve_together(self, together: Together) -> None:
        """Take in jobs between two tokens, as long as there is a free session."""
        try:
            while not self._queue.is_closed or len(together):
                while self._sessions:
                    job = self._queue.take(waits=not len(together))
                    if job is None:
                        break
                    together.start(partial(self._answer, self._session_for(job), job))
                together.round()
        finally:
            together.close()

    def _lose(self, error: BaseException) -> None:
        self.failure = error
        self._is_loaded.set()
        self.stop()
        for job in self._queue.running:
            if not job.is_over:
                job.send(Failed(ApiError(503, "the device is lost", "device_lost")))
        self._on_failure()

    def _session_for(self, job: Job) -> Session:
        """Take the free session whose conversation the job goes on with, else the one used longest ago."""
        found = max(self._sessions, key=lambda session: session.known_tokens(job.prompt))
        self._sessions.remove(found)
        return found

    def _answer(self, session: Session, job: Job) -> None:
        self._at_work[job] = session
        try:
            self._generate(session, job)
        finally:
            del self._at_work[job]
            self._sessions.append(session)
            self._queue.done(job)
        session.engine.save_warm()

    def _generate(self, session: Session, job: Job) -> None:
        job.started = time.perf_counter()
        self.metrics.queued.observe(job.started - job.created)
        tokens: list[TokenStats] = []
        counter = _ReasoningCounter(job.starts_in_reasoning)
        watch = _Watch(job, session)
        try:
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
        except Cancelled:
            job.send(Failed(ApiError(503, "the server is shutting down", "shutting_down")))
        except Exception as error:
            log.exception("%s failed", job.name)
            if is_device_fault(error):
                job.send(Failed(ApiError(503, "the device is lost", "device_lost")))
                raise
            session.reset()
            job.send(Failed(ApiError.internal(error)))

    def _count(self, job: Job, piece: Piece) -> None:
        now = time.perf_counter()
        if job.first_token is None:
            job.first_token = now
            assert job.started is not None
            self.metrics.ttft.observe(now - job.created)
            self.metrics.prefill.observe(now - job.started)
        elif piece.stats is not None:
            self.metrics.inter_token.observe(piece.stats.total_ms / piece.stats.num_tokens / 1e3)
        job.count += 1

    def _part(self, piece: Piece, session: Session) -> Part:
        logprobs = None
        if piece.logprob is not None and piece.token not in session.engine.codec.stop_ids:
            logprobs = _told(session.engine.codec, piece.logprob)
        return Part(piece.events, logprobs, None if piece.stats is None else _token(piece.stats))

    def _finish(
        self, session: Session, job: Job, tokens: list[TokenStats], reason: str, reasoning: int
    ) -> None:
        assert job.started is not None
        assert job.first_token is not None
        cached, prompt = session.cached_tokens, len(job.prompt)
        summary = summarize(session.prefill_stats, tokens, prompt, 0, Rates())
        decode_s = time.perf_counter() - job.first_token
        timings = _timings(summary, job, decode_s)
        usage = Usage(prompt, cached, job.count, reasoning)
        job.send(Finished(reason, usage, timings))
        metrics = self.metrics
        metrics.finished(reason)
        metrics.prompt_tokens.inc(prompt)
        metrics.asked_tokens.inc(prompt)
        metrics.cached_tokens.inc(cached)
        metrics.generated.inc(job.count)
        metrics.prompt_sizes.observe(prompt)
        metrics.answer_sizes.observe(job.count)
        metrics.decode.observe(decode_s)
        metrics.e2e.observe(time.perf_counter() - job.created)
        metrics.prompt_speed.set(summary.prefill_tok_s)
        metrics.speed.set(summary.decode_tok_s)
        metrics.read_rate.set(summary.read_nbytes_per_token * summary.decode_tok_s)
        self._recent.append(
            {"id": job.name, "model": job.model, "finish_reason": reason, **timings}
        )
        log.info(
            "%s %s: prompt %d tokens (%d cached) at %.0f tok/s, answer %d tokens at %.2f tok/s, first token after "
            "%.0f ms, %s",
            job.name, job.model, prompt, cached, summary.prefill_tok_s, job.count, summary.decode_tok_s,
            (job.first_token - job.created) * 1e3, reason,
        )  # fmt: skip


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


def _sampling(defaults: SamplingParams, request: Request) -> SamplingParams:
    names = (
        *("temperature", "top_p", "top_k", "min_p", "seed", "logprobs"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    )
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    return replace(defaults, **given, stop=request.stop, max_tokens=request.max_tokens)


def _told(codec: TextCodec, found: TokenLogprob) -> TokenLogprobs:
    def alternative(token: int, logprob: float) -> Alternative:
        raw = codec.token_bytes(token)
        return Alternative(raw.decode(errors="replace"), max(logprob, -9999.0), raw)

    top = tuple(alternative(token, logprob) for token, logprob in found.top)
    return TokenLogprobs(alternative(found.token, found.logprob), top)


def _token(stats: TokenStats) -> dict[str, Any]:
    """Return where one pass's milliseconds and bytes went."""
    c = stats.counters
    return {
        "tokens": stats.num_tokens,
        "total_ms": round(stats.total_ms, 3),
        "drive_ms": round(stats.drive_wait_ms, 3),
        "rows_ms": round(stats.row_wait_ms, 3),
        "device_ms": round(stats.device_wait_ms, 3),
        "host_ms": round(stats.host_ms, 3),
        "drive_nbytes": stats.read_nbytes,
        "pcie_nbytes": c.copied_nbytes,
        "vram_hits": c.vram_hits,
        "ram_hits": c.hits + c.sweep_hits,
        "late": c.late,
        "misses": c.misses + c.sweep_misses,
    }


def _timings(s: RunSummary, job: Job, decode_s: float) -> dict[str, Any]:
    """Return one answer's figures: llama-server's names first, then ours."""
    assert job.started is not None
    assert job.first_token is not None
    return {
        "cache_n": s.cached_tokens,
        "prompt_n": s.prompt_tokens - s.cached_tokens,
        "prompt_ms": round(s.ttft_ms, 3),
        "prompt_per_second": round(s.prefill_tok_s, 2),
        "predicted_n": job.count,
        "predicted_ms": round(decode_s * 1e3, 3),
        "predicted_per_second": round(s.decode_tok_s, 2),
        "queue_ms": round((job.started - job.created) * 1e3, 3),
        "ttft_ms": round((job.first_token - job.created) * 1e3, 3),
        "expert_hit_rate": round(s.hit_rate, 4),
        "expert_misses": s.counters.misses + s.counters.sweep_misses,
        "read_nbytes_per_token": round(s.read_nbytes_per_token),
        "copied_nbytes_per_token": round(s.copied_nbytes_per_token),
        "tokens_per_pass": round(s.tokens_per_pass, 3),
    }


def _engine_facts(engine: Engine) -> dict[str, Any]:
    plan, vram = engine.plan, engine.vram_plan
    return {
        "device": str(engine.device),
        "plan": engine.format_plan().splitlines(),
        "ram_cache_nbytes": plan.cache_nbytes,
        "vram_expert_nbytes": 0 if vram is None else vram.slots * vram.record_nbytes,
        "io_direct": engine.is_direct,
        "drive_gib_s": engine.drive_gib_s,
        "prefill_tokens": engine.prefill_tokens,
        "drafts": None if engine.drafting is None else engine.drafting.report(),
        "sampling": asdict(engine.default_sampling()),
    }
