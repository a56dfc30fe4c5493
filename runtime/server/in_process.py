"""A request to an ASGI app of this process, its response in pieces as they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Asked:
    """An HTTP request, whole."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]  # names in lower case
    body: bytes
    client: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a response."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


async def respond(app: ASGIApp, asked: Asked) -> AsyncIterator[Head | bytes]:
    """Yield the head, then parts of the body. Closing it early tells the app that the client is gone.

    Raises what the app raises.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    is_gone = asyncio.Event()
    is_asked = False

    async def receive() -> Message:
        nonlocal is_asked
        if not is_asked:
            is_asked = True
            return {"type": "http.request", "body": asked.body, "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(asked), receive, sent.put)
        finally:
            await sent.put(None)

    running = asyncio.create_task(run())
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], tuple((n, v) for n, v in message["headers"]))
            elif message.get("body"):
                yield message["body"]
        await running
    finally:
        is_gone.set()
        await asyncio.wait([running])


def _scope(asked: Asked) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "query_string": asked.query,
        "root_path": "",
        "headers": list(asked.headers),
        "client": asked.client,
        "server": None,
    }
