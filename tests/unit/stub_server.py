"""The real HTTP server over an engine that emits a script, without a model, and what reads its streams in tests."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import torch
import uvicorn

from conf.schema import ServeConfig, SnapshotsConfig
from runtime.deepseek_text import MARKERS
from runtime.engine import Counters, Engine
from runtime.models.qwen_codec import QwenCodec
from runtime.sampling import SamplingParams
from runtime.server.app import create_app
from runtime.server.served import Served
from runtime.server.worker import Worker
from runtime.snapshot import SnapshotStore
from runtime.stats import ExpertCounters
from runtime.text import TextCodec
from tests.waiting import wait_until

# a template as large models have it: options, strict about its first message, reasoning opened in the prompt
TEMPLATE = """
{%- for m in messages %}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("System message first.") }}{% endif %}
<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}
{#- the end of a turn #}<|im_end|>
{%- endfor %}
{%- if tools %}TOOLS {{ tools | tojson }}{% endif %}
<|im_start|>assistant
<think>
{%- if not enable_thinking %}</think>{% endif %}"""


def make_codec(tiny_qwen: Path, folder: Path, template: str = TEMPLATE) -> QwenCodec:
    """Return a codec that can think and call tools, on the bundled tokenizer."""
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(tiny_qwen / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    return QwenCodec(folder)


ENCODER = """
TOOLS = "## Tools\\n\\n<{dsml_token}{tc_block_name}>\\n\\n{tool_schemas}\\n\\nend\\n"
"""


def make_released(tiny_qwen: Path, folder: Path, has_encoder: bool = False) -> Path:
    """Return a DeepSeek snapshot by its text: a tokenizer with the markers, flagged as in the release."""
    text = (tiny_qwen / "tokenizer.json").read_text()
    for old, new in zip(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), MARKERS, strict=False):
        text = text.replace(old, new)
    raw = json.loads(text)
    present = {token["content"] for token in raw["added_tokens"]}
    more = [name for name in MARKERS if name not in present]
    raw["added_tokens"] += [
        {**raw["added_tokens"][0], "id": 4608 + i, "content": name} for i, name in enumerate(more)
    ]
    for token in raw["added_tokens"]:
        token["special"] = token["id"] < 3
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "config.json").write_text("{}")
    if has_encoder:
        (folder / "encoding").mkdir()
        (folder / "encoding" / "encoding.py").write_text(ENCODER)
    return folder


class StubState:
    """What was fed."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor(self.tokens)}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tokens = tensors["tokens"].tolist()


class StubEngine:
    """An engine whose model says `script` after any prompt, then the stop token."""

    num_layers = 4

    def __init__(self, codec: TextCodec, script: str | list[int] = "Hello there.") -> None:
        self.codec = codec
        self.script = codec.encode(script) if isinstance(script, str) else script
        self.prefill_s = self.token_s = 0.0
        self.gate = threading.Event()  # decoding waits for it
        self.gate.set()
        self.fail_at: int | None = None  # token of the answer
        self.error: BaseException = RuntimeError("secret /path")
        self.prompts: list[int] = []  # sizes of what was read
        self.decoded = 0
        self.config = SimpleNamespace(snapshots=SnapshotsConfig())
        self.context_tokens, self.prefill_tokens = 4096, 2048
        self.num_tokens, self.device, self.is_direct = codec.vocab_size, torch.device("cpu"), True
        self.drafting = self.vram_plan = self.shared = None
        self.drive_gib_s = None
        self.plan = SimpleNamespace(cache_nbytes=1 << 20)
        self.model = self
        self.is_closed = False

    check_prompt = Engine.check_prompt
    token_stats = Engine.token_stats

    def default_sampling(self) -> SamplingParams:
        return SamplingParams(temperature=0.0)

    def format_plan(self) -> str:
        return "RAM 1 MiB"

    def counters(self) -> Counters:
        return Counters(ExpertCounters(hits=3 * self.decoded, misses=self.decoded), 0, 0, 0)

    def save_warm(self) -> None:
        """There are no experts."""

    def new_state(self) -> StubState:
        return StubState()

    def prefill(self, tokens: list[int], state: StubState, after_layer: Any = None) -> torch.Tensor:
        self.prompts.append(len(tokens))
        for _ in range(self.num_layers):
            time.sleep(self.prefill_s / self.num_layers)
            if after_layer is not None:
                after_layer()
        state.tokens += tokens
        return self._logits(state)

    def decode(self, token: int, state: StubState) -> torch.Tensor:
        time.sleep(self.token_s)
        self.gate.wait(60)
        self.decoded += 1
        state.tokens.append(token)
        if self._told(state) == self.fail_at:
            raise self.error
        return self._logits(state)

    def attempt(self, tokens: list[int], state: StubState) -> StubAttempt:
        return StubAttempt(self, tokens, state)

    def _logits(self, state: StubState) -> torch.Tensor:
        logits = torch.zeros(1, self.num_tokens)
        told = self._told(state)
        token = self.script[told] if told < len(self.script) else min(self.codec.stop_ids)
        logits[0, token] = 10.0
        return logits

    def _told(self, state: StubState) -> int:
        """Return how much of the script stands at the end of what was fed."""
        longest = min(len(self.script), len(state.tokens))
        return next((n for n in range(longest, 0, -1) if state.tokens[-n:] == self.script[:n]), 0)

    def close(self) -> None:
        self.is_closed = True


class StubAttempt:
    """Tokens fed one by one, which can be taken back."""

    def __init__(self, engine: StubEngine, tokens: list[int], state: StubState) -> None:
        self.tokens, self._state, self._start = tokens, state, len(state.tokens)
        self.logits = torch.cat([engine.decode(token, state) for token in tokens])

    def keep(self, count: int) -> None:
        del self._state.tokens[self._start + count :]


class StubServer:
    """A server in threads of this process, and clients of it."""

    def __init__(
        self,
        engine: StubEngine,
        key: str | None = None,
        open_memory: Any = None,
        **serve: Any,
    ) -> None:
        self.engine = engine
        config = ServeConfig(**{"keep_alive_s": 10.0, **serve})
        served = Served("stub", "revision-1", engine.codec, engine.context_tokens, "0.1", None)
        self.gate = threading.Event()  # the model is loaded once this is set
        self.gate.set()
        self.lost = threading.Event()

        def open_engine() -> StubEngine:
            self.gate.wait()
            return engine

        self.worker = Worker(
            served,
            open_engine,  # type: ignore[arg-type]
            lambda _: SnapshotStore(1 << 24),
            config.queue,
            self.lost.set,
            config.max_batch,
            open_memory,
        )
        app = create_app(self.worker, config, key)
        settings = uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self.server.run)
        self.key = key
        self._clients: list[openai.OpenAI] = []

    def __enter__(self) -> StubServer:
        self.worker.start()
        self._thread.start()
        wait_until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if self.gate.is_set():
            wait_until(lambda: self.get("/health").status_code == 200)
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        for client in self._clients:
            client.close()
        self.worker.stop()
        self.server.should_exit = True
        self._thread.join(10)
        self.worker.join(10)
        assert not self._thread.is_alive()
        assert self.engine.is_closed

    def client(self, **more: Any) -> openai.OpenAI:
        client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key or "any", **{"max_retries": 0, **more}
        )
        self._clients.append(client)
        return client

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **more)

    def ask(self, **fields: Any) -> Any:
        return self.client().chat.completions.create(
            **{"model": "stub", "messages": HELLO, **fields}
        )


HELLO = [{"role": "user", "content": "Hello"}]


def texts(chunks: Any) -> tuple[str, str]:
    """Return (reasoning, content) of a stream."""
    reasoning = content = ""
    for chunk in chunks:
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
    return reasoning, content


def frames(raw: bytes) -> list[Any]:
    """Return the parsed data events of a stream; the last may be "[DONE]"."""
    data = [part[6:] for part in raw.decode().split("\n\n") if part.startswith("data: ")]
    return [part if part == "[DONE]" else json.loads(part) for part in data]


def stream_bytes(server: StubServer, **fields: Any) -> bytes:
    """Return a streamed answer as it came over the wire; its headers are a stream's."""
    body = {"messages": HELLO, "stream": True, **fields}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=30) as r:
        assert r.status_code == 200
        assert r.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert r.headers["cache-control"] == "no-cache"
        assert r.headers["x-accel-buffering"] == "no"
        return b"".join(r.iter_raw())


def open_request(server: Any, is_stream: bool, text: str, **fields: Any) -> socket.socket:
    """Return the socket of a request to `server.port` whose answer nobody reads."""
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"messages": messages, "stream": is_stream, **fields})
    sock = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body.encode())
    return sock
