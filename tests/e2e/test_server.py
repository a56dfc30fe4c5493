"""The server as its clients see it: `python run.py` in a process of its own, spoken to by the official client."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from runtime.experts.routes import Kind, read_routes
from tests.unit.stub_server import open_request
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FOX = [{"role": "user", "content": "Tell me a short story about a fox."}]
LONG = [{"role": "user", "content": "Write a very long story."}]  # greedily, over 200 tokens
GOLDEN = json.loads((ROOT / "runtime/bundled/tiny-qwen/golden_answers.json").read_text())["greedy"]
DEADLINE_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """One server process with its own outputs folder."""

    def __init__(self, outputs: Path, *overrides: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = outputs / "server.log"
        outputs.mkdir(exist_ok=True)
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "run.py",
                    f"serve.port={self.port}",
                    f"paths.outputs={outputs}",
                    *overrides,
                ],
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: self.is_healthy() or self.process.poll() is not None, DEADLINE_S)
        assert self.process.poll() is None, self.log.read_text()

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def queue(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/status").json()["queue"]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    def stop(self, sig: int = signal.SIGINT) -> int:
        self.process.send_signal(sig)
        return self.process.wait(timeout=15)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), "serve.keep_alive_s=0.05", "serve.queue=1")
    yield server
    server.process.kill()
    server.process.wait()


def ask(server: Server, **fields: Any) -> Any:
    return server.client().chat.completions.create(
        **{"model": "tiny", "messages": FOX, "temperature": 0, "max_tokens": 40, **fields}
    )


def test_models_and_health(server: Server):
    assert [model.id for model in server.client().models.list()] == ["tiny"]
    assert server.client().models.retrieve("tiny").model_dump()["max_model_len"] == 4096
    assert httpx.get(f"{server.url}/models").json()["data"][0]["id"] == "tiny"
    with pytest.raises(openai.NotFoundError, match="known: tiny"):
        server.client().models.retrieve("gpt-4o")


def test_a_greedy_answer_is_the_references(server: Server):
    fox = next(g for g in GOLDEN if g["question"] == FOX[0]["content"])
    answer = ask(server, max_tokens=len(fox["answer_ids"]))
    assert answer.choices[0].message.content == fox["answer"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(fox["prompt_ids"])
    assert answer.usage.completion_tokens == len(fox["answer_ids"])


def test_streamed_and_not_are_the_same_text(server: Server):
    whole = ask(server).choices[0].message.content
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40


def test_a_stop_string_across_tokens_never_leaves(server: Server):
    whole = ask(server).choices[0].message.content
    stop = whole[20:32]
    for stream in (False, True):
        answer = ask(server, stop=[stop], stream=stream)
        text = (
            "".join(c.choices[0].delta.content or "" for c in answer)
            if stream
            else answer.choices[0].message.content
        )
        assert text == whole[: whole.index(stop)]


def test_the_same_seed_gives_the_same_text(server: Server):
    one, two, other = (
        ask(server, temperature=1.0, seed=seed, top_p=0.95).choices[0].message.content
        for seed in (1, 1, 2)
    )
    assert one == two
    assert one != other


def test_a_follow_up_computes_only_what_is_new(server: Server):
    first = ask(server, messages=[{"role": "user", "content": "What is a whale?"}])
    messages = [
        {"role": "user", "content": "What is a whale?"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    answer = ask(server, messages=messages)
    assert answer.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert (
        answer.choices[0].message.content
        == ask(server, messages=messages).choices[0].message.content
    )


def test_a_prompt_over_the_window_is_400_with_both_numbers(server: Server):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, messages=[{"role": "user", "content": "one two three " * 3000}])
    error = caught.value.response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == 4096
    assert error["n_prompt_tokens"] > 4096


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/v1/chat/completions", 404),
    ],
)
def test_wrong_paths_have_the_error_shape(server: Server, method: str, path: str, status: int):
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_413(server: Server):
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=b"x" * (33 * 2**20))
    assert answer.status_code == 413


def raw_stream(server: Server) -> Iterator[bytes]:
    body = {"messages": LONG, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield from answer.iter_raw()


def test_waiting_streams_get_keep_alives_and_a_full_queue_is_429(server: Server):
    """One runs, one waits (and is sent comment frames meanwhile), the next is told when to come back."""
    got: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: got.append(b"".join(raw_stream(server)))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.queue()["running"] and len(server.queue()["waiting"]) == 1)
    refused = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": FOX})
    for thread in threads:
        thread.join(DEADLINE_S)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) <= 120
    assert any(b": keep-alive\n\n" in text for text in got)
    assert [text.endswith(b"data: [DONE]\n\n") for text in got] == [True, True]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_goes_away_frees_the_engine(server: Server, is_stream: bool):
    """A long answer is given up; the log says after how few tokens, and the next request is served."""
    seen = server.log.read_text().count("cancelled while")
    whole = ask(server, messages=LONG, max_tokens=4000).usage.completion_tokens
    asked = open_request(server, is_stream, LONG[0]["content"], max_tokens=4000, temperature=0)
    wait_until(lambda: server.queue()["running"])
    asked.close()
    answer = ask(server, max_tokens=3, messages=[{"role": "user", "content": "What is 8 + 9?"}])
    assert answer.usage.completion_tokens == 3
    (count,) = re.findall(r"cancelled while \w+, after (\d+) tokens", server.log.read_text())[seen:]
    assert int(count) < whole


def test_a_second_signal_waits_for_nobody(tmp_path: Path):
    server = Server(tmp_path / "outputs")
    body = {"messages": [{"role": "user", "content": "one two three " * 900}], "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        next(answer.iter_raw())
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=15) in (0, 130)
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_with_a_stream_open(tmp_path: Path, sig: int):
    server = Server(tmp_path / "outputs", "record=true")
    body = {"messages": LONG, "stream": True, "max_tokens": 4000, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
        chunks = answer.iter_raw()
        while not re.search(rb'"content": ?"[^"]', next(chunks)):  # a word: the prompt is read
            pass
        server.process.send_signal(sig)
        text = b"".join(chunks)
    assert server.process.wait(timeout=15) == 0
    assert b'"error"' in text
    assert text.endswith(b"data: [DONE]\n\n")
    assert "Traceback" not in server.log.read_text()
    (path,) = (tmp_path / "outputs").glob("runs/*/*/routes.bin")
    first = read_routes(path).steps[0]  # how far it came depends on when the signal did
    assert (first.kind, first.layer) == (Kind.sweep, 0)


@pytest.mark.parametrize("model", ["tiny", "tiny_deepseek"])
def test_conversations_go_on_after_a_restart(tmp_path: Path, model: str):
    """Also after kill -9: what an answer left on the disk is used, and the answer is the same. So is what was warm."""
    whale = [{"role": "user", "content": "What is a whale?"}]
    name = {"tiny": "tiny", "tiny_deepseek": "tiny-deepseek"}[model]
    settings = (f"model={model}", "hw=cpu", "cache.warm_start=true")
    warm = tmp_path / "outputs" / "warm" / f"{model}.warm"
    warm_line = re.compile(r"warm start: \d+ experts, .* are read in the background")

    def follow(server: Server, text: str) -> Any:
        turn = {"role": "assistant", "content": text}
        return ask(server, model=name, messages=[*whale, turn, *FOX], max_tokens=12)

    server = Server(tmp_path / "outputs", *settings)
    first = ask(server, model=name, messages=whale)
    wanted = follow(server, first.choices[0].message.content)
    assert not warm.exists()
    assert server.stop() == 0
    assert not warm_line.search(server.log.read_text())
    saved = warm.read_bytes()
    server = Server(tmp_path / "outputs", *settings)
    assert warm_line.search(server.log.read_text())
    again = follow(server, first.choices[0].message.content)
    assert again.choices[0].message.content == wanted.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == wanted.usage.prompt_tokens
    server.process.kill()
    server.process.wait()
    shutil.rmtree(tmp_path / "outputs" / "snapshots")
    assert warm.read_bytes() == saved, "killed before it was due again"
    warm.write_bytes(saved[:-1])
    server = Server(tmp_path / "outputs", *settings)
    assert f"{warm} is not used, its checksum is wrong" in server.log.read_text()
    alone = follow(server, first.choices[0].message.content)
    server.stop()
    assert alone.usage.prompt_tokens_details.cached_tokens == 0
    assert alone.choices[0].message.content == wanted.choices[0].message.content


def test_a_taken_port_is_one_sentence_before_anything_is_loaded(server: Server, tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "run.py", f"serve.port={server.port}", f"paths.outputs={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CI": "true"},
    )
    assert done.returncode == 1
    assert f"127.0.0.1:{server.port} is taken" in done.stderr
    assert "Traceback" not in done.stderr
