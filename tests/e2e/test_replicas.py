"""Two replicas on a Ray cluster of two nodes: sticky conversations, and one of them killed under load.

pip install -c constraints.txt -e '.[dev,replicas]'
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
args = dict(num_cpus=2, object_store_memory=10**8)
cluster = Cluster(initialize_head=True, head_node_args=args)
try:
    cluster.add_node(**args)
    print(json.dumps([cluster.address]), flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
"""
QUESTIONS = ["What is a whale?", "Name three colours.", "What is 8 + 9?", "What is a fox?"]
PATIENCE_S = 180

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def before() -> set[int]:
    """Replicas of others on this machine."""
    return replica_pids()


@pytest.fixture
def url(tmp_path, before):
    """The address of two replicas, each on a node of its own."""
    pytest.importorskip("ray.serve")
    port = free_port()
    with (
        subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        ) as cluster,
        open(tmp_path / "server.log", "w") as log,
    ):  # fmt: skip
        line = next(text for text in cluster.stdout if text.startswith("["))
        command = [
            *(sys.executable, "run.py", "hw=cpu", "serve.replicas=2", f"serve.port={port}"),
            *(f"paths.outputs={tmp_path}", "snapshots.disk_gib=0", "serve.queue=16"),
            *("cache.ram_gib=0", "hw.drive.simulate_gib_s=0.01"),  # a token takes a while
        ]
        environment = {**os.environ, "RAY_ADDRESS": json.loads(line)[0], "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            told = tmp_path / "server.log"
            wait_until(
                lambda: "2 replicas of tiny" in told.read_text() or server.poll() is not None,
                PATIENCE_S,
            )
            assert server.poll() is None, told.read_text()[-3000:]
            yield address
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
            cluster.stdin.close()
            cluster.wait(60)


def is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=20).status_code == 200
    except httpx.HTTPError:
        return False


def replica_pids() -> set[int]:
    """The processes of replicas: Ray names them so."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                name = (folder / "cmdline").read_bytes()
            except OSError:  # it has just ended
                continue
            if b"ServeReplica:nvmoe:replica" in name:
                found.add(int(folder.name))
    return found


def ask(address: str, messages: list[dict[str, str]], max_tokens: int = 8) -> dict:
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    return answer.json() | {"status": answer.status_code}


def stream(address: str, question: str, into: list[str]) -> None:
    """Read a long answer to its end; the text, or the error's code, goes to `into`."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 30,
            "temperature": 1.0, "stream": True}  # fmt: skip
    text = ""
    with httpx.stream(
        "POST", f"{address}/v1/chat/completions", json=body, timeout=PATIENCE_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    into.append(event["error"]["code"])
                    return
                text += event["choices"][0]["delta"].get("content") or ""
    into.append("answered" if text else "empty")


def test_one_of_two_is_killed_under_load(before, url):
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    wanted = []
    for talk in talks:
        answer = ask(url, talk)
        wanted.append(answer["choices"][0]["message"]["content"])
        talk += [{"role": "assistant", "content": wanted[-1]}, {"role": "user", "content": "Why?"}]
    # a follow-up finds what its conversation has left: it came to the same replica
    cached = [ask(url, talk)["usage"]["prompt_tokens_details"]["cached_tokens"] for talk in talks]
    assert all(cached)

    pids = replica_pids() - before
    assert len(pids) == 2
    outcomes: list[str] = []
    numbers = range(12)
    threads = [
        threading.Thread(target=stream, args=(url, f"Tell me story number {n}.", outcomes))
        for n in numbers
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: is_healthy(url), PATIENCE_S)
    time.sleep(1)
    os.kill(min(pids), signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE_S)
    # those of the killed one failed, in words that a client can act on; the others were answered
    assert len(outcomes) == len(threads)
    assert set(outcomes) <= {"replica_lost", "answered"}
    assert "replica_lost" in outcomes

    # every conversation goes on, also while Ray starts another replica
    for talk, first in zip(talks, wanted, strict=True):
        follow_up = ask(url, talk)
        assert follow_up["status"] == 200
        again = ask(url, talk[:1])
        assert again["choices"][0]["message"]["content"] == first
    wait_until(lambda: len(replica_pids() - before - {min(pids)}) == 2, PATIENCE_S)
