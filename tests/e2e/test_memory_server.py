"""A request's `memory` field through the real HTTP server, answered by a small model that recalls facts."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest

from conf.schema import Fuse, PositionMode, Template
from runtime.engine import Engine, EngineFiles
from runtime.living_kv.service import MemoryService, open_memory
from runtime.living_kv.store import Store
from runtime.living_kv.text_store import ingest_text
from tests.dense_models import open_dense
from tests.living import config, make_snapshot
from tests.living import open_memory as open_other
from tests.unit.stub_server import StubEngine, StubServer, make_codec
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "recall_model"
TEXT = "code of Banak 117 .\nthe river runs past old mill and quiet boat waits .\ncode of Lurim 203 .\n"
SETTINGS = config(template=Template.none, position=PositionMode.near, fuse=Fuse.lex)
WAIT_S = 120  # at most, on a machine that is busy
LIMIT = {"max_tokens": 1, "temperature": 0}


class NotedEngine(Engine):
    """An engine that says when it was closed."""

    is_closed = False

    def close(self):
        super().close()
        self.is_closed = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def server(make_config, folder):
    settings = make_config("qwen25_7b_1m", **{"model.source": "local", "model.path": str(MODEL)})
    engine = NotedEngine.open(settings, EngineFiles(MODEL))
    memory = open_memory(engine, MODEL, folder / "notes", SETTINGS, is_writer=True)
    memory.ingest(TEXT.encode(), "first", tag="codes")
    memory.close()

    def open_service(found):
        return MemoryService(found, MODEL, folder, SETTINGS)

    with StubServer(engine, open_memory=open_service, keep_alive_s=0.05) as running:
        yield running


def ask(server, question="code of Banak", path="/v1/chat/completions", **fields):
    """Post a chat about the store `notes`, unless a field says otherwise."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "memory": {"store": "notes"},
        **LIMIT,
        **fields,
    }
    return server.post(path, body)


def test_an_answer_says_what_it_rests_on(server):
    body = ask(server).json()
    assert body["choices"][0]["message"]["content"] == "117"
    assert body["choices"][0]["finish_reason"] == "length"  # max_tokens is what one number takes
    memory = body["memory"]
    assert memory["sentences"][0]["text"] == "code of Banak 117 .\n"
    assert memory["sentences"][0]["session"] == "first"
    assert not memory["low_confidence"]
    assert memory["confidence"] > 0.5
    assert "answer" not in memory
    assert body["usage"]["completion_tokens"] == 1
    # "code of Banak": for its vector, then to answer
    assert body["usage"]["prompt_tokens"] == 2 * 3
    wait_until(lambda: server.worker.status()["recent"])  # noted behind the last message
    assert server.worker.status()["recent"][-1]["memory_ms"] > 0


def test_what_is_not_stored_is_said_first(server):
    body = ask(server, "code of Lurik").json()
    assert body["choices"][0]["message"]["content"].startswith("LOW CONFIDENCE (")
    assert body["memory"]["low_confidence"]
    assert body["memory"]["mode"] == "quote"


def test_a_stream_carries_the_same(server):
    whole = ask(server).json()
    response = ask(server, stream=True, stream_options={"include_usage": True})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content", "") for d in deltas) == "117"
    told = [c for c in chunks if "memory" in c]
    assert len(told) == 1
    assert told[0]["choices"][0]["finish_reason"] == "length"
    for memory in (told[0]["memory"], whole["memory"]):
        memory.pop("read_nbytes")  # the second time the block is in RAM
    assert told[0]["memory"] == whole["memory"]
    assert chunks[-1]["usage"] == whole["usage"]


def test_the_official_client_passes_the_field_and_reads_it(server):
    found = server.client().chat.completions.create(
        model="stub",
        messages=[
            {"role": "system", "content": "Answer."},
            {"role": "user", "content": "code of Banak"},
            {"role": "assistant", "content": "117"},
            {"role": "user", "content": "code of Lurim"},
        ],
        extra_body={"memory": {"store": "notes", "mode": "kv", "scope": "tag:codes", "budget": 24}},
        **LIMIT,
    )
    assert found.choices[0].message.content == "203"
    assert found.memory["mode"] == "kv"


def test_stop_strings_end_an_answer_from_memory(server):
    body = ask(server, max_tokens=8, stop=["17"], memory={"store": "notes", "mode": "kv"}).json()
    assert body["choices"][0]["message"]["content"].splitlines()[-1] == "1"
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "status", "code", "said"),
    [
        ({"memory": {"store": "other"}}, 404, "memory_store_not_found", "no store 'other'"),
        ({"memory": {"store": "../notes"}}, 400, "invalid_value", "must be a store's name"),
        ({"memory": {}}, 400, "invalid_value", "memory.store"),
        ({"memory": "notes"}, 400, "invalid_value", "memory"),
        ({"memory": {"store": "notes", "top_k": 3}}, 400, "invalid_value", "memory.top_k"),
        ({"memory": {"store": "notes", "budget": 49}}, 400, "invalid_value", "1 to 48"),
        ({"memory": {"store": "notes", "mode": "guess"}}, 400, "invalid_value", "memory.mode"),
        ({"memory": {"store": "notes", "scope": "day:1"}}, 400, "invalid_value", "not understood"),
        ({"memory": {"store": "notes", "scope": "tag:no"}}, 400, "invalid_value", "it has codes"),
        ({"memory": {"store": "words"}}, 400, "memory_store_refused", "holds text only"),
        ({"memory": {"store": "alien"}}, 400, "memory_store_refused", "E-MODEL"),
        ({"logprobs": True}, 400, "unsupported", "logprobs"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "unsupported",
            "tools",
        ),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "invalid_value", "a question"),
        ({"messages": [{"role": "user", "content": "code " * 300}]}, 400, "invalid_request", "E-RANGE"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_by_name(
    server, folder, tmp_path_factory, fields, status, code, said, stream
):
    if not (folder / "words").exists():
        ingest_text(folder / "words", TEXT.encode(), "a")
        other = make_snapshot(tmp_path_factory.mktemp("other"))
        open_other(other, folder / "alien", SETTINGS).close()
    response = ask(server, stream=stream, **fields)
    if stream and response.status_code == 200:  # found when the store was asked
        found = json.loads(response.text.split("data: ")[-2])["error"]
    else:
        assert response.status_code == status
        found = response.json()["error"]
    assert (found["code"], found["type"]) == (code, "invalid_request_error")
    assert said in found["message"]
    assert str(folder) not in response.text


def test_completions_have_no_memory(server):
    body = {"prompt": "code of Banak", "memory": {"store": "notes"}, **LIMIT}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert "/v1/chat/completions" in response.json()["error"]["message"]


def test_plain_requests_are_answered_as_ever(server):
    body = {"prompt": TEXT + "code of Lurim", **LIMIT}
    found = server.post("/v1/completions", body).json()
    assert found["choices"][0]["text"].strip() == "203"
    assert "memory" not in found
    again = server.post("/v1/completions", body).json()  # from the copy of its state
    assert again["choices"] == found["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_writer_is_not_waited_for_and_its_commit_is_seen(server, folder):
    assert "LOW CONFIDENCE" in ask(server, "code of Lurik").text
    writer = open_other(MODEL, folder / "notes", SETTINGS, open_dense(MODEL))  # takes the lock
    try:
        assert ask(server).json()["choices"][0]["message"]["content"] == "117"
        writer.ingest(b"code of Lurik 151 .\n", "second")
        answer = ask(server, "code of Lurik").json()
        assert answer["choices"][0]["message"]["content"] == "151"
    finally:
        writer.close()
    Store.open(folder / "notes", is_writer=True).close()  # the server holds no lock of its own


def test_a_client_that_goes_away_ends_the_answer_from_memory(server, monkeypatch):
    kind, started, is_gone = type(server.engine.model), threading.Event(), threading.Event()
    run = kind.run

    def slow(self, tokens, state, after_layer):
        def wait():
            started.set()
            assert is_gone.wait(WAIT_S)
            after_layer()

        return run(self, tokens, state, wait)

    monkeypatch.setattr(kind, "run", slow)
    body = {
        "messages": [{"role": "user", "content": "code of Banak"}],
        "memory": {"store": "notes"},
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}
    ) as response:
        frames = response.iter_raw()  # held: one that is let go of closes the connection
        next(frames)
        assert started.wait(WAIT_S)
        (job,) = server.worker._queue.running
    wait_until(job.is_cancelled.is_set, WAIT_S)
    is_gone.set()
    wait_until(lambda: server.worker.status()["queue"]["running"] is None, WAIT_S)
    monkeypatch.undo()
    assert not job.count
    assert ask(server).json()["choices"][0]["message"]["content"] == "117"


def test_a_server_without_a_memory_says_so(tiny_qwen, tmp_path):
    with StubServer(StubEngine(make_codec(tiny_qwen, tmp_path))) as plain:
        response = ask(plain)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported"


def test_a_model_without_keys_and_values_that_grow_says_so(tiny_qwen, tmp_path):
    engine = StubEngine(make_codec(tiny_qwen, tmp_path))
    engine.config.model = type("Model", (), {"family": "qwen"})
    with StubServer(
        engine, open_memory=lambda e: MemoryService(e, tiny_qwen, tmp_path, SETTINGS)
    ) as plain:
        response = ask(plain)
        assert response.status_code == 400
        assert "E-ARCH" in response.json()["error"]["message"]
