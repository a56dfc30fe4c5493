"""The server over a scripted engine: its queue, signs of life, clients that go away, and its figures."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.unit.stub_server import (
    HELLO,
    StubEngine,
    StubServer,
    frames,
    open_request,
    stream_bytes,
    texts,
)
from tests.waiting import wait_until

IDLE = {"waiting": [], "running": None, "all_running": []}


def is_full(queue: dict[str, Any]) -> bool:
    """One in work and one that waits; the first waits for a moment too."""
    return queue["running"] is not None and len(queue["waiting"]) == 1


def is_in_phase(server: StubServer, phase: str) -> bool:
    queue = server.get("/status").json()["queue"]
    if phase == "waiting":
        return is_full(queue)
    return queue["running"] is not None and queue["running"]["phase"] == phase


# ---- queue and clients that go away ----------------------------------------------------------------------------------


def test_keep_alives_come_by_the_wall_clock(codec):
    engine = StubEngine(codec)
    engine.prefill_s = 1.2
    with StubServer(engine, keep_alive_s=0.1) as server:
        raw, phases = b"", []
        body = {"messages": HELLO, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            for piece in answer.iter_raw():
                raw += piece
                if len(phases) < 2:
                    running = server.get("/status").json()["queue"]["running"]
                    phases.append(running and running["phase"])
        # the headers and a first chunk long before the prompt is read, then signs of life
        assert "decode" not in phases
        assert raw.count(b": keep-alive\n\n") >= 2
        # the official client does not see them
        assert texts(server.ask(stream=True))[1] == "Hello there."


def test_keep_alives_as_chunks_or_never(codec):
    engine = StubEngine(codec)
    engine.prefill_s = 0.5
    with StubServer(engine, keep_alive_s=0.02, keep_alive_chunks=True) as server:
        raw = stream_bytes(server)
        assert b": keep-alive" not in raw
        empty = [c for c in frames(raw)[1:-2] if c["choices"][0]["delta"] == {"content": ""}]
        assert len(empty) >= 2
    engine.is_closed = False
    with StubServer(engine, keep_alive_s=0.0) as server:
        assert b"keep-alive" not in stream_bytes(server)


def test_a_bounded_queue_in_order_that_can_be_seen(codec):
    engine = StubEngine(codec, "word " * 30)
    engine.gate.clear()
    with StubServer(engine, queue=2) as server:
        ended: list[str] = []

        def ask(name: str) -> None:
            server.ask(messages=[{"role": "user", "content": name}])
            ended.append(name)

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
        for i, thread in enumerate(threads):
            thread.start()
            wait_until(lambda n=i: len(server.get("/status").json()["queue"]["waiting"]) == n
                     and server.get("/status").json()["queue"]["running"])  # fmt: skip
        refused = server.post("/v1/chat/completions", {"messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) <= 120
        assert 'nvmoe_num_requests_waiting{model_name="stub"} 2.0' in server.get("/metrics").text
        engine.gate.set()
        for thread in threads:
            thread.join(30)
        assert ended == ["a", "b", "c"]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode"])
def test_a_client_that_goes_away_frees_the_engine(codec, is_stream, phase):
    # alone, the answer or its prompt would take longer than is waited for
    engine = StubEngine(codec, "word " * 400)
    engine.token_s, engine.prefill_s = 0.1, 60.0 if phase == "prefill" else 0.0
    engine.num_layers = 600
    with StubServer(engine, keep_alive_s=60.0) as server:
        first = None
        if phase == "waiting":
            first = open_request(server, True, "other")
            wait_until(lambda: server.get("/status").json()["queue"]["running"])
        sock = open_request(server, is_stream, "mine")
        wait_until(lambda: is_in_phase(server, phase))
        sock.close()
        if first is None:
            wait_until(lambda: server.get("/status").json()["queue"]["running"] is None)
        else:
            wait_until(lambda: server.get("/status").json()["queue"]["waiting"] == [])
            first.close()
        wait_until(lambda: f'requests_cancelled_total{{model_name="stub",phase="{phase}"}} 1.0'
                 in server.get("/metrics").text)  # fmt: skip
        engine.prefill_s = engine.token_s = 0.0
        assert server.ask(max_tokens=2).usage.completion_tokens == 2


def test_clients_that_leave_at_once_or_in_the_middle_of_their_request(server, engine, caplog):
    engine.token_s = 0.05
    for is_stream in (True, False) * 4:
        open_request(server, is_stream, "x").close()
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n{"
        sock.sendall(head.encode())
    wait_until(lambda: server.get("/status").json()["queue"] == IDLE)
    assert server.ask(max_tokens=1).usage.completion_tokens == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_async_clients_and_their_cancelling(codec):
    engine = StubEngine(codec, "word " * 200)
    engine.token_s = 0.05

    async def run(server: StubServer) -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        fields: dict[str, Any] = {"model": "stub", "messages": HELLO}
        task = asyncio.create_task(client.chat.completions.create(**fields))
        while not engine.decoded:
            await asyncio.sleep(0.005)
        task.cancel()
        stream = await client.chat.completions.create(**fields, stream=True, max_tokens=5)
        got = [chunk async for chunk in stream]
        assert got[-1].choices[0].finish_reason == "length"
        await client.close()

    with StubServer(engine) as server:
        asyncio.run(run(server))
        assert engine.decoded < 150


def test_stopping_ends_open_streams_with_an_error(codec):
    engine = StubEngine(codec, "word " * 400)
    engine.token_s = 0.02
    got: list[bytes] = []
    with StubServer(engine) as server:
        threads = [
            threading.Thread(target=lambda: got.append(stream_bytes(server))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: is_full(server.get("/status").json()["queue"]))
        server.worker.stop()
        for thread in threads:
            thread.join(30)
        refused = server.post("/v1/chat/completions", {"messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    for raw in got:
        assert frames(raw)[-2]["error"]["code"] == "shutting_down"
        assert raw.endswith(b"data: [DONE]\n\n")
    assert len(got) == 2


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_metrics_and_status(server, engine, codec):
    server.ask()
    server.get("/nowhere")
    text = server.get("/metrics").text
    for line in (
        'nvmoe_request_success_total{finished_reason="stop",model_name="stub"} 1.0',
        f'nvmoe_generation_tokens_total{{model_name="stub"}} {len(engine.script) + 1.0}',
        f'nvmoe_expert_lookups_total{{model_name="stub",tier="ram"}} {3.0 * engine.decoded}',
        'nvmoe_errors_total{code="not_found",model_name="stub"} 1.0',
        'nvmoe_io_direct{model_name="stub"} 1.0',
        'nvmoe_time_to_first_token_seconds_count{model_name="stub"} 1.0',
    ):
        assert line in text, line
    assert 'nvmoe_e2e_request_latency_seconds_bucket{le="600.0"' in text
    status = server.get("/status").json()
    assert status["state"] == "ready"
    assert status["model"]["can_think"]
    assert status["engine"]["sampling"]["temperature"] == 0.0
    assert status["recent"][0]["finish_reason"] == "stop"
    assert status["snapshots"]["in_ram"] >= 1
    assert "Hello" not in json.dumps(status)
    assert server.get("/version").json()["weights"] == "revision-1"


def test_a_long_prompt_is_in_the_log(server, engine, caplog, monkeypatch):
    monkeypatch.setattr("runtime.server.answering.PROGRESS_EVERY_S", 0.05)
    engine.prefill_s = 0.4
    with caplog.at_level("INFO", logger="server"):
        server.ask()
    assert re.search(r"reading the prompt: \d+ of 10 tokens", caplog.text)


def test_the_log_has_one_line_a_request_and_no_text_of_anybody(server, caplog):
    with caplog.at_level("INFO", logger="server"):
        server.ask(extra_headers={"x-request-id": "mine-7", "x-stainless-retry-count": "1"})
        # both lines are written when the answer has left
        wait_until(lambda: sum("mine-7" in r.getMessage() for r in list(caplog.records)) == 2)
    lines = [record.getMessage() for record in caplog.records if "mine-7" in record.getMessage()]
    assert any("tok/s" in line for line in lines)
    assert any("POST /v1/chat/completions 200" in line and "retry 1" in line for line in lines)
    assert not any("Hello" in line for line in lines)
