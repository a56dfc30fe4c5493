"""The advisor's server: tools by the SDK's client, their HTTP twins, and equal answers by every way."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from advisor_drafts import base, right
from mcp import Client

from runtime.advisor.server import Limiter, build_app, build_server
from runtime.advisor.service import Service, ServiceError
from runtime.advisor.validator import answer_text

TOOLS = [
    "get_context",
    "advise",
    "predict",
    "compute_law",
    "explain_law",
    "list_entities",
    "get_entity",
    "check_answer",
]


def run(function):
    return anyio.run(function)


@asynccontextmanager
async def http(service: Service | None = None, headers=None):
    app = build_app(service or Service(), port=8010)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8010", headers=headers
    ) as client:
        yield client


def test_the_tools_are_there_with_schemas_of_what_they_give():
    async def session():
        async with Client(build_server(Service())) as client:
            return (await client.list_tools()).tools

    tools = run(session)
    assert [t.name for t in tools] == TOOLS
    for tool in tools:
        assert tool.output_schema["type"] == "object"
        assert tool.annotations.read_only_hint is True
        assert tool.annotations.open_world_hint is False
        assert tool.description


def test_three_questions_of_a_real_client_end_to_end():
    async def session():
        async with Client(build_server(Service())) as client:
            first = await client.call_tool("advise", {"model": "deepseek", "hw": "rtx5060"})
            second = await client.call_tool(
                "predict", {"model": "qwen", "hw": "rtx5060", "cache_bytes": 16e9}
            )
            block, prose = right()
            third = await client.call_tool("check_answer", {"answer": answer_text(block, prose)})
            law = await client.read_resource("advisor://law/L14")
            return first, second, third, law

    first, second, third, law = run(session)
    assert len(first.structured_content["paths"]) == 12
    assert all(p["number"]["unit"] for p in first.structured_content["paths"])
    assert second.structured_content["run"] == "run-qw-05"
    assert second.structured_content["tok_s"] == [11.65, 11.65, 11.65]
    assert third.structured_content["ok"] is True
    assert "max(t_disk, R)" in law.contents[0].text


def _calls() -> list[tuple[str, dict, str, str, dict]]:
    """(tool, arguments, method, path, query or body) of 50 calls."""
    found: list = [("get_context", {}, "GET", "/api/context", {})]
    for model in ("deepseek", "qwen", "llama-70b", "llama-8b", "DeepSeek-V3"):
        for hw in ("rtx5060", "4070-32", "laptop"):
            given = {"model": model, "hw": hw}
            found.append(("advise", given, "GET", "/api/advise", given))
            found.append(("predict", given, "GET", "/api/predict", given))
    found.append(
        (
            "advise",
            {
                "model": "qwen",
                "hardware": {
                    "gpu": "RTX 4090",
                    "ram": "64 GiB",
                    "drive": "nvme-gen4",
                    "disk_bw": "6 GB/s",
                },
                "situation": {"min_tok_s": 5},
            },
            "POST",
            "/api/advise",
            {},
        )
    )
    found.append(
        (
            "advise",
            {"question": "Can DeepSeek V4.1 Flash run here at 2 tok/s?", "hw": "rtx5060"},
            "POST",
            "/api/advise",
            {},
        )
    )
    for question in (
        "I have two RTX 4090 and 64 GB RAM: Llama 3.3 70B?",
        "DeepSeek V4.1 Flash, no GPU?",
    ):
        found.append(("advise", {"question": question}, "POST", "/api/advise", {}))
    for law in ("L01", "L12", "L14", "L17"):
        found.append(("explain_law", {"law": law}, "GET", f"/api/law/{law}", {}))
    inputs = {
        "disk_bw": {"value": 8.2, "unit": "GiB/s"},
        "h": {"value": 0, "unit": "1"},
        "routed_bytes_per_token": {"value": 4.5, "unit": "GB"},
    }
    found.append(("compute_law", {"law": "L12", "inputs": inputs}, "POST", "/api/compute", {}))
    found.append(
        (
            "compute_law",
            {"law": "L12", "inputs": inputs},
            "GET",
            "/api/compute",
            {"law": "L12", "inputs": json.dumps(inputs)},
        )
    )
    for kind in ("model", "gpu", "run", "offer", "rule"):
        found.append(
            (
                "list_entities",
                {"kind": kind, "limit": 5},
                "GET",
                "/api/entities",
                {"kind": kind, "limit": "5"},
            )
        )
    found.append(
        (
            "list_entities",
            {"kind": "gpu", "filter": "vram_bytes >= 20e9"},
            "GET",
            "/api/entities",
            {"kind": "gpu", "filter": "vram_bytes >= 20e9"},
        )
    )
    for name in ("gpu-rtx-5060", "RTX 4090", "run-ds-09", "RTX 5060 Ti"):
        found.append(("get_entity", {"name": name}, "GET", f"/api/entity/{name}", {}))
    block, prose = right()
    good = {"answer": answer_text(block, prose), "last_user_message": "Which one?"}
    found.append(("check_answer", good, "POST", "/api/check", {}))
    found.append(("check_answer", {"answer": "no block"}, "POST", "/api/check", {}))
    return found


async def _ask_mcp(client, call):
    result = await client.call_tool(call[0], call[1])
    assert not result.is_error, result.content
    return result.structured_content


async def _ask_http(client, call):
    _, arguments, method, path, query = call
    if method == "GET":
        answer = await client.get(path, params=query)
    else:
        answer = await client.post(path, json=arguments)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_tool_and_its_twin_say_the_same():
    calls = _calls()
    assert len(calls) >= 50
    assert {c[0] for c in calls} == set(TOOLS)

    async def session():
        async with Client(build_server(Service())) as client, http() as web:
            for call in calls:
                assert await _ask_mcp(client, call) == await _ask_http(web, call), call[:2]

    run(session)


def test_a_machine_in_the_question_is_the_machine_where_none_is_named():
    asked = "I have two RTX 4090 and 64 GB RAM: does Llama 3.3 70B run?"
    heard = Service().advise(question=asked)
    assert heard.machine["gpus"] == ["gpu-rtx-4090", "gpu-rtx-4090"]
    assert heard.machine["ram_bytes"] == pytest.approx(64 * 2**30, rel=1e-5)
    assert heard.heard["hardware"] == "RAM 64 GiB, card 2 x GeForce RTX 4090 24 GB"
    told = Service().advise(question=asked, hardware={"gpu": "RTX 3060"})
    assert told.machine["gpus"] == ["gpu-rtx-3060"], "what is told by key wins"
    assert Service().advise(model="qwen", question="what would an RTX 4090 do?", hw="rtx5060").machine["gpus"] == ["gpu-rtx-5060"]  # fmt: skip


def test_arguments_that_cannot_be_used_are_told_with_the_field():
    async def session():
        async with http() as web:
            for path, status, field in (
                ("/api/advise", 400, "model"), ("/api/advise?model=GPT-9", 404, "model"),
                ("/api/advise?model=qwen&hw=mars", 400, "hw"), ("/api/advise?model=qwen&as_of=tomorrow", 400, "as_of"),
                ("/api/advise?model=qwen&situation={\"budget\": -1}", 400, "situation"),
                ("/api/advise?model=qwen&situation=x", 400, "situation"), ("/api/advise?modle=qwen", 400, "modle"),
                ("/api/advise?model=DeepSeek-V4-Flash", 422, "model"), ("/api/predict?model=qwen", 400, "hw"),
                ("/api/predict?model=qwen&hw=rtx5060&cache_bytes=-5", 422, "cache_bytes"),
                ("/api/predict?model=qwen&hw=rtx5060&cache_bytes=many", 400, "cache_bytes"),
                ("/api/compute?law=L12&inputs={}", 422, "inputs"), ("/api/law/L99", 404, "law"),
                ("/api/entities?kind=ghost", 400, "kind"), ("/api/entities?kind=gpu&limit=0", 400, "limit"),
                ("/api/entities?kind=gpu&filter=__import__('os')", 400, "filter"),
                ("/api/entity/Nothing At All", 404, "name"), ("/api/check", 400, "answer"), ("/schema/ghost.json", 404, "type"),
            ):  # fmt: skip
                answer = await web.get(path)
                assert (answer.status_code, answer.json()["error"]["field"]) == (status, field), (
                    path
                )
            assert (await web.post("/api/check", content=b"[")).status_code == 400
            assert (await web.post("/api/check", content=b"[1]")).status_code == 400
            assert (await web.post("/api/check", json={"answer": "x" * 300_000})).status_code == 413
            assert (await web.post("/api/check", content=b"x" * 600_000)).status_code == 413

    run(session)


def test_texts_for_machines_and_people():
    async def session():
        async with http() as web:
            assert (await web.get("/llms.txt")).text.startswith("# ")
            for link in ("/setup.md", "/api/context", "/schema/answer.json", "/health"):
                assert (await web.get(link)).status_code == 200
            health = (await web.get("/health")).json()
            assert health["kb_version"] == base().version
            assert health["documents"] == base().counts()

    run(session)


def test_a_draft_in_parts():
    block, prose = right()
    text = answer_text(block, prose)
    pieces = [text[i : i + 6000] for i in range(0, len(text), 6000)]
    now = [0.0]
    service = Service(clock=lambda: now[0])

    async def session():
        async with http(service) as web:
            for number, piece in reversed(list(enumerate(pieces, 1))):
                answer = await web.get(
                    "/api/part", params={"draft": "d1", "n": number, "text": piece}
                )
                assert answer.status_code == 200
            assert (await web.get("/api/check?draft=d1")).json()["ok"] is True
            assert (await web.get("/api/check?draft=d2")).status_code == 404
            assert (await web.get("/api/part?draft=d2&n=61&text=x")).status_code == 400
            assert (await web.get("/api/part?draft=../etc&n=1&text=x")).status_code == 400
            await web.get("/api/part?draft=d3&n=2&text=x")
            assert "part 1" in (await web.get("/api/check?draft=d3")).json()["error"]["message"]
            now[0] = 3601.0
            await web.get("/api/part?draft=d4&n=1&text=x")
            assert (await web.get("/api/check?draft=d1")).status_code == 404, "an hour is over"

    run(session)


def test_a_conversation_remembers_what_is_known():
    service = Service()
    block, prose = right(budget=2000.0, currency="EUR")
    assert service.check_answer(answer_text(block, prose), conversation_id="c").ok
    block["situation"]["budget"]["value"] = 900.0
    found = service.check_answer(answer_text(block, prose), conversation_id="c")
    assert [e["code"] for e in found.errors] == ["E-DROP"]
    assert found.rounds_left == 2
    assert service.check_answer(answer_text(block, prose), conversation_id="c").rounds_left == 1
    assert service.check_answer(answer_text(block, prose), conversation_id="other").ok
    told = service.check_answer(
        answer_text(block, prose), "Now I have 900 euros.", conversation_id="c"
    )
    assert told.ok


def test_too_many_requests_and_other_hosts():
    now = [0.0]
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    async def nothing(*_):
        return None

    async def session():
        limiter = Limiter(app, 3, lambda: now[0])
        for _ in range(5):
            await limiter({"type": "http", "client": ("10.0.0.1", 1)}, nothing, nothing)
        assert len(seen) == 3
        await limiter({"type": "http", "client": ("10.0.0.2", 1)}, nothing, nothing)
        now[0] = 60.0
        await limiter({"type": "http", "client": ("10.0.0.1", 1)}, nothing, nothing)
        assert len(seen) == 5
        async with http(headers={"host": "evil.example"}) as web:
            assert (await web.get("/health")).status_code == 400
        async with http(headers={"origin": "http://evil.example"}) as web:
            assert (await web.get("/health")).status_code == 403

    run(session)


def test_a_broken_base_is_an_internal_error_without_a_traceback(tmp_path):
    import shutil

    from runtime.advisor.kb import DEFAULT_ROOT

    shutil.copytree(DEFAULT_ROOT, tmp_path / "kb")
    service = Service(tmp_path / "kb")
    before = service.get_context().kb_version
    text = (tmp_path / "kb/kb.yaml").read_text()
    (tmp_path / "kb/kb.yaml").write_text(text.replace(before, "2026.12.7"))
    assert service.get_context().kb_version == "2026.12.7", "read again when a file changes"
    (tmp_path / "kb/gpus.yaml").write_text("[")

    async def session():
        async with http(service) as web:
            return await web.get("/api/context")

    answer = run(session)
    assert answer.status_code == 500
    assert answer.json() == {"error": {"message": "internal error", "field": None}}


def test_too_many_drafts_are_refused():
    service = Service()
    for number in range(500):
        service.take_part(f"d{number}", 1, "x")
    with pytest.raises(ServiceError, match="too many"):
        service.take_part("one-more", 1, "x")
