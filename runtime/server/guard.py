"""What every request passes, whatever its path: an id, one line in the log, CORS, the key, the size of its body."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from conf.schema import ServeConfig
from runtime.server.errors import ApiError
from runtime.units import MIB

log = logging.getLogger("server")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_NBYTES = 32 * MIB
OPEN_PATHS = ("/", "/health", "/ping")  # without a key; the page asks for it itself
OPEN_FOLDER = "/page/"
ALLOWED_HEADERS = "Authorization, Content-Type, x-request-id"
QUIET_PATHS = ("/health", "/ping", "/metrics", "/status", "/v1/status")  # polled: not in the log
_ID_FORM = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Guard:
    """An ASGI application around another."""

    def __init__(self, app: App, config: ServeConfig, key: str | None) -> None:
        """key: None lets everybody in, whatever key they send."""
        self._app, self._config = app, config
        self._key = None if key is None else key.encode()
        self._open = {*OPEN_PATHS, *(["/metrics"] if config.open_metrics else [])}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        asked = headers.get("x-request-id", "")
        name = asked if _ID_FORM.fullmatch(asked) else f"req-{secrets.token_hex(8)}"
        path = scope["path"].rstrip("/") or "/"
        scope = {**scope, "path": path, "raw_path": path.encode(), "request_id": name}
        extra = {"x-request-id": name, **self._cors(headers.get("origin"))}
        started, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = [(k.encode(), v.encode("latin-1")) for k, v in extra.items()]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        try:
            refusal = self._refusal(scope["method"], path, headers)
            if self._is_preflight(scope["method"], headers):
                await _respond(send_with_headers, 204, b"", self._preflight(headers))
            elif refusal is not None:
                body = json.dumps(refusal.body()).encode()
                await _respond(send_with_headers, refusal.status, body, refusal.headers)
            else:
                await self._app(scope, receive, send_with_headers)
        finally:
            if path not in QUIET_PATHS:
                ms = (time.perf_counter() - started) * 1e3
                log.info(
                    "%s %s %s %s %.0f ms%s",
                    name, scope["method"], path, status or 499, ms, _client_facts(headers),
                )  # fmt: skip

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> ApiError | None:
        is_open = path in self._open or path.startswith(OPEN_FOLDER)
        if self._key is not None and not is_open and not self._has_key(headers):
            return ApiError(
                401,
                "this server wants a key: send the header `Authorization: Bearer KEY` with the key of serve.api_key",
                "invalid_api_key",
            )
        length = headers.get("content-length", "")
        if method == "POST" and length.isdecimal() and int(length) > MAX_BODY_NBYTES:
            return too_large()
        return None

    def _has_key(self, headers: dict[str, str]) -> bool:
        assert self._key is not None
        kind, _, sent = headers.get("authorization", "").partition(" ")
        given = sent if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return secrets.compare_digest(given.strip().encode("latin-1", "replace"), self._key)

    def _cors(self, origin: str | None) -> dict[str, str]:
        allowed = self._config.cors_origins
        if origin is None or not allowed:
            return {}
        if "*" in allowed:
            return {"access-control-allow-origin": "*", "access-control-expose-headers": "*"}
        if origin not in allowed:
            return {}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": "x-request-id, retry-after",
            "vary": "Origin",
        }

    def _is_preflight(self, method: str, headers: dict[str, str]) -> bool:
        is_asking = method == "OPTIONS" and "access-control-request-method" in headers
        return is_asking and bool(self._config.cors_origins)

    def _preflight(self, headers: dict[str, str]) -> dict[str, str]:
        """A browser asks before it sends a key: it is answered without one."""
        asked = headers.get("access-control-request-headers", "")
        stainless = [
            name.strip()
            for name in asked.split(",")
            if re.fullmatch(r"x-[\w-]{1,64}", name.strip(), re.IGNORECASE | re.ASCII)
        ]
        return {
            "access-control-allow-methods": "GET, POST, OPTIONS",
            "access-control-allow-headers": ", ".join([ALLOWED_HEADERS, *stainless]),
            "access-control-max-age": "600",
        }


def too_large() -> ApiError:
    """Return the error about a body over the limit."""
    return ApiError(
        413, f"the request body is larger than {MAX_BODY_NBYTES // MIB} MiB", "too_large"
    )


async def _respond(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    given = {"content-length": str(len(body)), **headers}
    if body:
        given["content-type"] = "application/json"
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _client_facts(headers: dict[str, str]) -> str:
    """What OpenAI's clients say of themselves: their read timeout, and which attempt this is."""
    facts = [
        f"{what} {headers[name]:.20}"
        for what, name in (
            ("read timeout", "x-stainless-read-timeout"),
            ("retry", "x-stainless-retry-count"),
        )
        if headers.get(name, "0") != "0"
    ]
    return f" ({', '.join(facts)})" if facts else ""
