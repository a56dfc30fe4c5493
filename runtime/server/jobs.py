"""Requests on their way: what is asked of the engine's thread, what comes back, and the queue in between. No torch."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.answers import Event, Parser
from runtime.server.errors import ApiError
from runtime.server.replies import TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Part:
    """What one token added: parts of the answer, its log-probability, what its pass cost."""

    events: Sequence[Event]
    logprobs: TokenLogprobs | None
    timings: dict[str, Any] | None


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


Message = Part | Finished | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One request: its prompt, and the way back to whoever waits for it."""

    name: str  # the request id
    model: str
    prompt: list[int]
    params: Any  # SamplingParams
    parser: Parser
    loop: asyncio.AbstractEventLoop
    shared: int | None = None  # tokens that a next prompt of the conversation begins with
    starts_in_reasoning: bool = False
    messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    created: float = field(default_factory=time.perf_counter)
    started: float | None = None  # when the engine took it
    first_token: float | None = None
    count: int = 0  # tokens of the answer so far

    is_over: bool = False  # the last message is sent

    def send(self, message: Message) -> None:
        """Hand a message to the loop; a loop that is gone wants none."""
        self.is_over = not isinstance(message, Part)
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.messages.put_nowait, message)

    @property
    def phase(self) -> str:
        """waiting, prefill or decode."""
        if self.started is None:
            return "waiting"
        return "prefill" if self.first_token is None else "decode"


class JobQueue:
    """First in, first out, bounded; what is cancelled while it waits is gone at once."""

    def __init__(self, max_waiting: int, max_running: int = 1) -> None:
        self._max_waiting, self._max_running = max_waiting, max_running
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._running: list[Job] = []

    @property
    def running(self) -> list[Job]:
        """Those in work, the oldest first."""
        with self._changed:
            return list(self._running)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def waiting(self) -> list[Job]:
        """Those that wait, the next first."""
        with self._changed:
            return [job for job in self._jobs if not job.is_cancelled.is_set()]

    def check_room(self) -> None:
        """Raise ApiError 429 when one more would be too many."""
        waiting = len(self.waiting)
        room = self._max_waiting + self._max_running - len(self._running)
        if waiting >= room:
            raise ApiError(
                429,
                f"{waiting} requests are waiting already, this server lets {self._max_waiting} wait: try again later",
                "server_busy",
            )

    def put(self, job: Job) -> None:
        """Add a job. Raises ApiError 429 or 503."""
        with self._changed:
            if self._is_closed:
                raise ApiError(503, "the server is shutting down", "shutting_down")
            self.check_room()
            self._jobs.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> str | None:
        """Give a job up; return its phase if it was not finished. It may be called for a finished one."""
        with self._changed:
            was_set = job.is_cancelled.is_set()
            job.is_cancelled.set()
            if job in self._jobs:
                self._jobs.remove(job)
                return "waiting"
            is_in_work = job in self._running and not job.is_over
            return job.phase if is_in_work and not was_set else None

    def take(self, waits: bool = True) -> Job | None:
        """Return the next job, which is running then; None when the queue is closed.

        waits: until there is one; else None where there is none now.
        """
        with self._changed:
            while waits and not self._jobs and not self._is_closed:
                self._changed.wait()
            if self._is_closed or not self._jobs:
                return None
            job = self._jobs.popleft()
            self._running.append(job)
            return job

    def done(self, job: Job) -> None:
        """Say that a job is not running any more."""
        with self._changed:
            self._running.remove(job)

    def close(self) -> list[Job]:
        """Take no more; return those that waited. The running ones are told to stop."""
        with self._changed:
            self._is_closed = True
            left = list(self._jobs)
            self._jobs.clear()
            for job in self._running:
                job.is_cancelled.set()
            self._changed.notify()
            return left

    def position(self, job: Job) -> int | None:
        """Return how many are before a waiting job, the running ones included; None if it does not wait."""
        with self._changed:
            before = itertools.takewhile(lambda other: other is not job, self._jobs)
            count = sum(1 for _ in before)
            if count == len(self._jobs):
                return None
            return count + len(self._running)
