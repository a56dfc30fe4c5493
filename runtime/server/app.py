"""The HTTP face: FastAPI routes over a Worker. Every error has OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from conf.schema import ServeConfig
from runtime.errors import UserError
from runtime.server.protocol import (
    DONE,
    KEEP_ALIVE,
    ApiError,
    ChatAnswer,
    ChatRequest,
    frame,
    model_body,
    parse_chat,
)
from runtime.server.worker import Event, Failed, Finished, Job, Text, Worker

log = logging.getLogger("server")

MAX_BODY_NBYTES = 32 * 2**20
POLL_S = 0.25  # how often a waiting handler looks whether its client is still there
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(
    worker: Worker, config: ServeConfig, served_name: str, context_tokens: int
) -> FastAPI:
    """Return the application for one model."""
    app = FastAPI(title="NVMoE", docs_url=None, redoc_url=None)
    created = int(time.time())
    entry = model_body(served_name, created, context_tokens)

    @app.exception_handler(ApiError)
    async def on_api_error(_request: Request, error: ApiError) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if "/v1/v1" in request.url.path:
            message += " (the path has /v1 twice: leave it out of the base URL or of the request)"
        return _error_response(
            ApiError(error.status_code, message, "not_found" if error.status_code == 404 else None)
        )

    @app.exception_handler(Exception)
    async def on_unexpected(_request: Request, error: Exception) -> Response:
        return _error_response(ApiError.of(error))

    @app.get("/health")
    async def health() -> Response:
        if worker.is_ready:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "loading"}, 503, headers={"Retry-After": "2"})

    @app.get("/")
    async def root() -> dict[str, str]:
        return {"name": "NVMoE", "model": served_name, "api": "/v1/chat/completions"}

    @app.get("/models")
    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [entry]}

    @app.get("/models/{name:path}")
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        if name != served_name:
            raise ApiError(
                404, f"there is no model {name!r}; known: {served_name}", "model_not_found", "model"
            )
        return entry

    @app.post("/chat/completions")
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        parsed = parse_chat(await _body(request), served_name, config.strict_model)
        try:
            job = worker.submit(parsed)
        except UserError as error:
            raise ApiError.of(error) from error
        if parsed.is_stream:
            return StreamingResponse(
                _stream(job, parsed, config.keep_alive_s),
                media_type="text/event-stream; charset=utf-8",
                headers=STREAM_HEADERS,
            )
        return await _whole(job, parsed, request)

    return app


def _error_response(error: ApiError) -> JSONResponse:
    headers = {"Retry-After": "2"} if error.status in (429, 503) else {"x-should-retry": "false"}
    return JSONResponse(error.body(), error.status, headers=headers)


async def _body(request: Request) -> bytes:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_NBYTES:
            raise ApiError(
                413, f"the request body is larger than {MAX_BODY_NBYTES // 2**20} MiB", "too_large"
            )
    return bytes(raw)


async def _whole(job: Job, parsed: ChatRequest, request: Request) -> Response:
    """Collect an answer, unless the client goes away first."""
    texts: list[str] = []
    looked_at = time.monotonic()
    with _cancelling(job):
        while True:
            event = await _next(job, POLL_S)
            if time.monotonic() - looked_at >= POLL_S:  # also while tokens come
                looked_at = time.monotonic()
                if await request.is_disconnected():
                    return Response(status_code=499)
            if isinstance(event, Text):
                texts.append(event.text)
            elif isinstance(event, Finished):
                answer = ChatAnswer(parsed.model)
                return JSONResponse(
                    answer.whole("".join(texts), event.reason, event.usage, event.timings)
                )
            elif isinstance(event, Failed):
                raise event.error


async def _stream(job: Job, parsed: ChatRequest, keep_alive_s: float) -> AsyncIterator[bytes]:
    """Frames of an answer; a comment frame whenever nothing else came for a while, whatever the engine does."""
    answer = ChatAnswer(parsed.model, parsed.wants_usage)
    with _cancelling(job):
        yield answer.first()
        while True:
            event = await _next(job, keep_alive_s or None)
            if event is None:
                yield KEEP_ALIVE
            elif isinstance(event, Text):
                yield answer.piece(event.text)
            elif isinstance(event, Finished):
                yield answer.last(event.reason, event.usage)
                return
            elif isinstance(event, Failed):
                yield frame(event.error.body()) + DONE
                return


async def _next(job: Job, timeout_s: float | None) -> Event | None:
    try:
        return await asyncio.wait_for(job.events.get(), timeout_s)
    except TimeoutError:
        return None


@contextlib.contextmanager
def _cancelling(job: Job):  # type: ignore[no-untyped-def]
    """Free the engine when the handler ends, for whatever reason; after the answer this changes nothing."""
    try:
        yield
    finally:
        job.is_cancelled.set()
