"""One thread that owns the engine: it takes jobs from the queue, and its messages go back to the asyncio loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from runtime.engine import Engine
from runtime.hardware import is_device_fault
from runtime.server.answering import Answers
from runtime.server.errors import ApiError
from runtime.server.intake import prepare
from runtime.server.jobs import Failed, Job, JobQueue
from runtime.server.memory import Remembers
from runtime.server.metrics import EngineFigures, Metrics
from runtime.server.requests import Request
from runtime.server.served import Served
from runtime.server.status import (
    engine_facts,
    engine_figures,
    prompt_progress,
    queue_facts,
    served_facts,
    snapshot_facts,
)
from runtime.session import Cancelled, Session
from runtime.snapshot import SnapshotStore
from runtime.together import Together

log = logging.getLogger("server")


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
        open_memory: Callable[[Engine], Remembers] | None = None,
    ) -> None:
        """on_failure: called in the worker's thread when the engine is lost; `failure` says why.

        max_batch: conversations that the engine decodes together.  open_memory: None where no request may have a
        `memory` field.
        """
        self.served = served
        self._open_engine, self._open_store, self._on_failure = open_engine, open_store, on_failure
        self._open_memory = open_memory
        self._queue = JobQueue(max_waiting, max_batch)
        self._max_batch = max_batch
        self._is_stopping, self._is_loaded = threading.Event(), threading.Event()
        self._sessions: list[Session] = []  # those that are free, the one used longest ago first
        self._at_work: dict[Job, Session] = {}
        self._store: SnapshotStore | None = None
        self._memory: Remembers | None = None
        self._started = time.time()
        self.engine: Engine | None = None
        self.failure: BaseException | None = None
        self.metrics = Metrics(served.name, self._figures)
        self._answers = Answers(self.metrics)
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
        assert self.engine is not None, "check_ready was asked"
        loop, codec = asyncio.get_running_loop(), self.served.codec
        # a long prompt takes a while to encode, and the loop has streams to keep alive
        job = await asyncio.to_thread(
            prepare, request, name, loop, self.engine, codec, self._memory
        )
        self._queue.put(job)
        return job

    def cancel(self, job: Job) -> None:
        """Give a job up, whatever its state; after the answer this changes nothing."""
        phase = self._queue.cancel(job)
        if phase is not None:
            self.metrics.cancelled(phase)
            log.info("%s cancelled while %s, after %d tokens", job.name, phase, job.count)

    def progress(self, job: Job) -> dict[str, Any] | None:
        """Return how far a job's prompt has been read, in llama-server's names; None when it is not in work."""
        return prompt_progress(self._at_work.get(job))

    def position(self, job: Job) -> int | None:
        """Return how many are before a waiting job."""
        return self._queue.position(job)

    def status(self) -> dict[str, Any]:
        """Return what this server is and does now; no secrets, no text of anybody."""
        engine, store = self.engine, self._store
        state = "ready"
        try:
            self.check_ready()
        except ApiError as error:
            state = error.code or "error"
        return {
            "state": state,
            **served_facts(self.served),
            "uptime_s": round(time.time() - self._started),
            "queue": queue_facts(self._queue, self._at_work),
            "engine": None if engine is None else engine_facts(engine),
            "snapshots": None if store is None else snapshot_facts(store),
            "recent": list(self._answers.recent),
        }

    def _figures(self) -> EngineFigures | None:
        engine, store = self.engine, self._store
        self.metrics.waiting.set(len(self._queue.waiting))
        self.metrics.running.set(len(self._queue.running))
        return None if engine is None else engine_figures(engine, store)

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
            self._memory = None if self._open_memory is None else self._open_memory(engine)
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
            if self._memory is not None:
                self._memory.close()
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
        if job.question is not None:
            self._guarded(session, job, lambda: self._recall(job, job.question or ""))
        else:
            self._guarded(session, job, lambda: self._answers.generate(session, job))

    def _guarded(self, session: Session, job: Job, work: Callable[[], None]) -> None:
        """Do a job; whatever goes wrong ends it with an error, a lost device ends the service too."""
        try:
            work()
        except Cancelled:
            job.send(Failed(ApiError(503, "the server is shutting down", "shutting_down")))
        except Exception as error:
            log.exception("%s failed", job.name)
            if is_device_fault(error):
                job.send(Failed(ApiError(503, "the device is lost", "device_lost")))
                raise
            session.reset()
            job.send(Failed(ApiError.internal(error)))

    def _recall(self, job: Job, question: str) -> None:
        assert self._memory is not None, "it was refused before"
        self._answers.recall(self._memory, job, question)
