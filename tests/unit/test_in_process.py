"""An ASGI app spoken to without a socket: the same bytes as over one, and it learns when the client goes."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from runtime.server.in_process import Asked, Head, respond


async def echo(request: Request) -> JSONResponse:
    body = (await request.body()).decode()
    told = {"query": request.url.query, "body": body, "x": request.headers.get("x-a")}
    return JSONResponse(told, 201, headers={"x-b": "c"})


async def fail(request: Request) -> JSONResponse:
    raise ZeroDivisionError


GONE: list[bool] = []


async def endless(request: Request) -> StreamingResponse:
    async def parts():
        try:
            while not await request.is_disconnected():
                yield b"part "
                await asyncio.sleep(0)
        finally:
            GONE.append(True)

    return StreamingResponse(parts(), media_type="text/event-stream")


APP = Starlette(
    routes=[
        Route("/echo", echo, methods=["POST"]),
        Route("/fail", fail),
        Route("/endless", endless),
    ]
)


def asked(method: str, path: str, body: bytes = b"", query: bytes = b"") -> Asked:
    return Asked(method, path, query, ((b"x-a", b"y"),), body, ("127.0.0.1", 1))


def test_the_same_as_over_a_transport():
    async def both():
        found = [part async for part in respond(APP, asked("POST", "/echo", b"hello", b"q=1"))]
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            wanted = await client.post("/echo?q=1", content=b"hello", headers={"x-a": "y"})
        return found, wanted

    (head, *body), wanted = asyncio.run(both())
    assert isinstance(head, Head)
    assert head.status == wanted.status_code == 201
    assert dict(head.headers)[b"x-b"] == b"c"
    assert b"".join(body) == wanted.content


def test_whoever_leaves_is_noticed():
    async def leave():
        parts = respond(APP, asked("GET", "/endless"))
        head = await anext(parts)
        assert isinstance(head, Head)
        assert [await anext(parts) for _ in range(3)] == [b"part "] * 3
        await parts.aclose()

    GONE.clear()
    asyncio.run(leave())
    assert GONE == [True]


def test_what_the_app_raises_comes_out():
    async def run():
        return [part async for part in respond(APP, asked("GET", "/fail"))]

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())
