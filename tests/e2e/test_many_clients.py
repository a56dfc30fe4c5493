"""Many clients at once on the bundled model, half of them leaving at any moment: nothing is lost, leaked or changed."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import openai
import pytest

from conf.schema import SnapshotsConfig
from runtime import hardware
from runtime.snapshot import SnapshotStore
from tests.unit.stub_server import StubServer
from tests.waiting import wait_until

QUESTIONS = (
    "What is a whale?",
    "What is the capital of France?",
    "What is 8 + 9?",
    "Tell me a short story about a fox.",
    "Какая столица Италии?",
)
CLIENTS = 16
IDLE = {"waiting": [], "running": None, "all_running": []}


class Asked:
    """One request of the mix, and what came of it."""

    def __init__(self, number: int) -> None:
        drawn = random.Random(number)
        self.question = drawn.choice(QUESTIONS)
        self.is_stream = drawn.random() < 0.5
        self.max_tokens = drawn.randrange(1, 14)
        self.follows = drawn.random() < 0.3  # a second turn
        # leave after a while: waiting, while the prompt is read, while it answers, or when it is over
        self.leaves_s = drawn.expovariate(2.0) if drawn.random() < 0.4 else None
        self.text: str | None = None

    def fields(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.question}]
        if self.follows:
            messages += [
                {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": QUESTIONS[0]},
            ]
        return {
            "model": "stub",
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
        }

    async def run(self, client: openai.AsyncOpenAI) -> None:
        try:
            async with asyncio.timeout(self.leaves_s):
                self.text = await self._ask(client)
        except TimeoutError:
            pass

    async def _ask(self, client: openai.AsyncOpenAI) -> str:
        if not self.is_stream:
            answer = await client.chat.completions.create(**self.fields())
            return answer.choices[0].message.content or ""
        async with await client.chat.completions.create(**self.fields(), stream=True) as stream:
            reason, text = None, ""
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason
            assert reason in ("stop", "length")
            return text


@pytest.mark.parametrize("max_batch", [1, 3])
@pytest.mark.parametrize("total", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_mixed_requests_with_random_disconnects(open_tiny, total, max_batch):
    engine = open_tiny(**{"model.context_tokens": 256, "serve.max_batch": max_batch})
    engine.config.snapshots = SnapshotsConfig()
    closes, engine.close = engine.close, lambda: setattr(engine, "is_closed", True)
    engine.is_closed = False
    try:
        with StubServer(engine, queue=total, max_batch=max_batch) as server:
            _ask_all(server, [Asked(number) for number in range(total)])
    finally:
        engine.close = closes


def _ask_all(server: StubServer, asked: list[Asked]) -> None:
    async def run(requests: list[Asked], clients: int) -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=120
        ) as client:
            left = iter(requests)

            async def one() -> None:
                for request in left:
                    await request.run(client)

            await asyncio.gather(*(one() for _ in range(clients)))

    asyncio.run(run(asked, CLIENTS))
    wait_until(lambda: server.get("/status").json()["queue"] == IDLE)
    undisturbed = [request for request in asked if request.leaves_s is None]
    assert len(undisturbed) > len(asked) // 3
    assert all(request.text is not None for request in undisturbed)
    # the same alone, without any copy of a state
    alone: dict[tuple[str, bool], str] = {}
    sessions = server.worker._sessions
    for session in sessions:
        session._store = SnapshotStore(0)
    for request in sorted(undisturbed, key=lambda r: -r.max_tokens):
        key = (request.question, request.follows)
        if key not in alone:
            for session in sessions:
                session.reset()
            single = Asked(0)
            single.__dict__ |= {**request.__dict__, "is_stream": False, "text": None}
            asyncio.run(run([single], 1))
            assert single.text is not None
            alone[key] = single.text
        assert request.text is not None
        assert alone[key].startswith(request.text), "an answer changed among others"
    assert any(request.text is None for request in asked), "nobody left too early to tell"
    # no task and no thread is left behind, and the engine's memory is what it was
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("engine") == 1
    before = hardware.peak_rss_nbytes()
    asyncio.run(run([Asked(number) for number in range(30)], CLIENTS))
    gc.collect()
    assert hardware.peak_rss_nbytes() - before < 64 * 2**20
