"""Other people's clients, where they are installed (none is a dependency): each finds what it relies on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.unit.stub_server import StubEngine, StubServer, make_codec

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")


@pytest.fixture(scope="module")
def codec(tiny_qwen, tmp_path_factory):
    return make_codec(tiny_qwen, tmp_path_factory.mktemp("codec"))


@pytest.fixture
def server(codec):
    with StubServer(StubEngine(codec), queue=64) as running:
        yield running


def run_apart(code: str, server: StubServer, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a client in a process of its own: their import-time warnings and plugins are not ours."""
    command = [sys.executable, "-W", "ignore", *(("-c", code) if code else ()), *argv]
    more = {
        "OPENAI_API_KEY": "any",
        "BASE": f"{server.url}/v1",
        "OPENAI_BASE_URL": f"{server.url}/v1",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **more}
    )


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_document_says_what_bodies_look_like(server):
    document = server.get("/openapi.json").json()
    for path, field in (
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/detokenize", "tokens"),
    ):
        body = document["paths"][path]["post"]["requestBody"]
        assert field in body["content"]["application/json"]["schema"]["required"]
    assert "$ref" not in json.dumps(
        document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    )


@needs("schemathesis")
def test_no_generated_body_ends_in_a_5xx_or_in_an_error_of_another_shape(server):
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance,unsupported_method"
    )
    options = ("--max-examples", "20", "--checks", checks, "--no-color")
    check(
        run_apart(
            "", server, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options
        )
    )


# ---- LiteLLM ---------------------------------------------------------------------------------------------------------

LITELLM = """
import json, os, litellm
base = dict(model="openai/stub", api_base=os.environ["BASE"], api_key="any")
hello = [{"role": "user", "content": "Hello"}]
whole = litellm.completion(messages=hello, **base)
parts = list(litellm.completion(messages=hello, stream=True, **base))
out = {
    "whole": whole.choices[0].message.content,
    "usage": whole.usage.total_tokens,
    "stream": "".join(p.choices[0].delta.content or "" for p in parts),
    "finish": parts[-1].choices[0].finish_reason,
}
try:
    litellm.completion(messages=[{"role": "user", "content": "x" * 30000}], **base)
except litellm.ContextWindowExceededError:
    out["window"] = True
tool = json.loads(os.environ["TOOL"])
calls = litellm.completion(messages=hello, tools=[tool], model="openai/stub-thinking",
                           api_base=base["api_base"], api_key="any", stream=True)
rebuilt = litellm.stream_chunk_builder(list(calls))
out["calls"] = [c.function.arguments for c in rebuilt.choices[0].message.tool_calls or []]
print(json.dumps(out))
"""


@needs("litellm")
def test_litellm(server, codec, monkeypatch):
    monkeypatch.setenv("TOOL", json.dumps(TOOL))
    found = json.loads(check(run_apart(LITELLM, server)).splitlines()[-1])
    assert found["whole"] == found["stream"] == "Hello there."
    assert found["finish"] == "stop"
    assert found["window"]
    assert found["calls"] == []
    server.engine.script = codec.encode(f"</think>{CALL}")
    found = json.loads(check(run_apart(LITELLM, server)).splitlines()[-1])
    assert [json.loads(arguments) for arguments in found["calls"]] == [{"city": "Rome"}]


# ---- LangChain -------------------------------------------------------------------------------------------------------

LANGCHAIN = """
import os
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

class TestServer(ChatModelIntegrationTests):
    has_tool_calling = has_structured_output = supports_json_mode = has_tool_choice = False
    @property
    def chat_model_class(self):
        return ChatOpenAI
    @property
    def chat_model_params(self):
        return {"model": "stub", "base_url": os.environ["BASE"], "api_key": "any", "stream_usage": True,
                "max_retries": 0}
"""


@needs("langchain_tests")
def test_langchains_standard_suite(server, tmp_path):
    (tmp_path / "test_suite.py").write_text(LANGCHAIN)
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-W",
        "ignore",
        "--asyncio-mode=auto",
        *("-o", "asyncio_default_test_loop_scope=session"),  # its client lives longer than one test
    )
    done = run_apart("", server, "-m", "pytest", str(tmp_path / "test_suite.py"), *options)
    assert " passed" in check(done)


# ---- llm -------------------------------------------------------------------------------------------------------------


@needs("llm")
def test_the_llm_command(server, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    lines = [
        {"model_id": "here", "model_name": "stub", "api_base": f"{server.url}/v1"},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(lines))
    for options in ((), ("--no-stream",)):
        done = run_apart(
            "", server, "-m", "llm", "-m", "here", "--key", "any", "--no-log", *options, "Hi"
        )
        assert check(done).strip() == "Hello there."
