"""The HTTP face: routes over a Worker. Every error has OpenAI's shape; a client that goes away frees the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
)
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from conf.schema import ServeConfig
from runtime.answers import Event
from runtime.errors import UserError
from runtime.server import requests
from runtime.server.errors import ApiError
from runtime.server.guard import MAX_BODY_NBYTES, Guard, too_large
from runtime.server.intake import prompt_tokens
from runtime.server.jobs import Finished, Job, Message, Part
from runtime.server.replies import (
    DONE,
    KEEP_ALIVE,
    ChatAnswer,
    CompletionAnswer,
    ReplyOptions,
    TokenLogprobs,
    frame,
    model_body,
)
from runtime.server.requests import ChatRequest, CompletionRequest, ModelIds
from runtime.server.worker import Worker

log = logging.getLogger("server")

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"page.js": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}
# the page loads nothing from anywhere else, and text of a model may not either
PAGE_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self'; connect-src 'self'; frame-ancestors 'none'"
PROGRESS_EVERY_S = 0.25  # in a stream that asked for it
ABSENT = (  # what other servers have: said in the error shape
    *("embeddings", "images/generations", "images/edits", "audio/speech", "audio/transcriptions"),
    *("moderations", "responses", "messages", "messages/count_tokens", "files", "batches"),
)

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERROR_CONTENT = {"application/json": {"schema": _ERROR_SCHEMA}}
ERRORS: dict[int | str, dict[str, Any]] = {  # of every route, for the document
    "4XX": {"description": "what was asked cannot be done", "content": _ERROR_CONTENT},
    "5XX": {"description": "it cannot be done now", "content": _ERROR_CONTENT},
}

Answer = ChatAnswer | CompletionAnswer
Result = TypeVar("Result")


def create_app(worker: Worker, config: ServeConfig, key: str | None = None) -> Guard:
    """Return the application for one model.  key: that requests must send."""
    return Guard(_Routes(worker, config).app, config, key)


class Gone(Exception):  # noqa: N818 - nobody is left to be told
    """The client went away."""


class _Routes:
    """The routes of one server."""

    def __init__(self, worker: Worker, config: ServeConfig) -> None:
        self._worker, self._config, self._served = worker, config, worker.served
        codec = self._served.codec
        self._models = ModelIds(self._served.name, codec.can_think, config.strict_model)
        created, window = int(time.time()), self._served.context_tokens
        self._entries = {name: model_body(name, created, window) for name in self._models.all}
        self.app = app = FastAPI(
            title="NVMoE", version=self._served.version, docs_url=None, redoc_url=None
        )
        app.add_exception_handler(ApiError, self._on_error)
        app.add_exception_handler(UserError, self._on_error)
        app.add_exception_handler(Gone, self._on_gone)
        app.add_exception_handler(HTTPException, self._on_http_error)
        app.add_exception_handler(Exception, self._on_unexpected)
        for path, handler, kind in (
            ("/health", self._health, JSONResponse),
            ("/ping", self._ping, JSONResponse),
            ("/version", self._version, JSONResponse),
            ("/status", self._status, JSONResponse),
            ("/metrics", self._metrics, PlainTextResponse),
            ("/", self._page, HTMLResponse),
        ):
            app.add_api_route(path, handler, methods=["GET"], response_class=kind, responses=ERRORS)
            app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        app.add_api_route(
            "/page/{name}", self._page_file, methods=["GET", "HEAD"], include_in_schema=False
        )
        for prefix in ("", "/v1"):
            listed: Any
            for path, listed in (
                ("models", self._list_models),
                ("models/{name:path}", self._one_model),
            ):
                app.add_api_route(f"{prefix}/{path}", listed, methods=["GET"], responses=ERRORS)
            self._post(f"{prefix}/chat/completions", self._chat, requests.ChatBody)
            self._post(f"{prefix}/completions", self._completions, requests.CompletionBody)
            self._post(f"{prefix}/tokenize", self._tokenize, requests.TokenizeBody)
            self._post(f"{prefix}/detokenize", self._detokenize, requests.DetokenizeBody)
            for name in ABSENT:
                app.add_api_route(
                    f"{prefix}/{name}", self._absent, methods=["POST"], include_in_schema=False
                )

    def _post(self, path: str, handler: Any, body: type[BaseModel]) -> None:
        """The handlers read bodies themselves, for errors of our own shape; the document tells what they take."""
        content = {"application/json": {"schema": _inlined(body.model_json_schema())}}
        self.app.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            openapi_extra={"requestBody": {"required": True, "content": content}},
            responses=ERRORS,
        )

    # ---- errors --------------------------------------------------------------------------------------------------

    def _error(self, error: ApiError) -> Response:
        self._worker.metrics.failed(error.code or str(error.status))
        return JSONResponse(error.body(), error.status, headers=error.headers)

    async def _on_error(self, _request: Request, error: Exception) -> Response:
        return self._error(ApiError.of(error))

    async def _on_gone(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=499)

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        if "/v1/v1" in request.url.path:
            message += " (the path has /v1 twice: leave it out of the base URL or of the request)"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = self._error(ApiError(error.status_code, message, code))
        response.headers.update(error.headers or {})
        return response

    async def _on_unexpected(self, _request: Request, error: Exception) -> Response:
        return self._error(ApiError.internal(error))

    # ---- what the server is --------------------------------------------------------------------------------------

    async def _health(self) -> Response:
        self._worker.check_ready()
        return JSONResponse({"status": "ok"})

    async def _ping(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def _version(self) -> dict[str, Any]:
        served = self._served
        return {"version": served.version, "commit": served.commit, "weights": served.revision}

    async def _status(self) -> dict[str, Any]:
        return self._worker.status()

    async def _metrics(self) -> Response:
        text = self._worker.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": list(self._entries.values())}

    async def _one_model(self, name: str) -> dict[str, Any]:
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise ApiError(
                404, f"there is no model {name!r:.80}; known: {known}", "model_not_found", "model"
            )
        return self._entries[name]

    async def _absent(self, request: Request) -> Response:
        raise ApiError(
            501,
            f"{request.url.path} is not part of this server: it has /v1/chat/completions and /v1/completions",
            "not_implemented",
        )

    async def _page(self) -> Response:
        headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-cache"}
        return FileResponse(PAGE / "index.html", media_type="text/html", headers=headers)

    async def _page_file(self, name: str) -> Response:
        if name not in PAGE_FILES:
            raise ApiError(404, f"the page has no file {name!r:.80}", "not_found")
        headers = {"Cache-Control": "no-cache"}
        return FileResponse(PAGE / name, media_type=PAGE_FILES[name], headers=headers)

    # ---- tokens --------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: Request) -> dict[str, Any]:
        asked = requests.parse_tokenize(await _body(request), self._models)
        codec = self._served.codec
        if asked.messages is not None:
            found = await asyncio.to_thread(codec.encode_chat, asked.messages, asked.options)
        else:
            assert asked.prompt is not None
            found = await asyncio.to_thread(codec.encode_prompt, asked.prompt, asked.adds_start)
        return {"tokens": found, "count": len(found), "max_model_len": self._served.context_tokens}

    async def _detokenize(self, request: Request) -> dict[str, Any]:
        codec = self._served.codec
        tokens = requests.parse_detokenize(await _body(request), self._models, codec.vocab_size)
        return {"prompt": codec.decode(tokens, tuple(codec.markers))}

    # ---- answers -------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        parsed = requests.parse_chat(await _body(request), self._models)
        options = self._reply_options(parsed, offers_tools=bool(parsed.options.tools))
        return await self._respond(request, parsed, ChatAnswer(options))

    async def _completions(self, request: Request) -> Response:
        parsed = requests.parse_completion(await _body(request), self._models)
        echo = ""
        if parsed.is_echo:
            codec = self._served.codec
            echo = codec.decode(prompt_tokens(parsed, codec))
        answer = CompletionAnswer(self._reply_options(parsed), echo)
        return await self._respond(request, parsed, answer)

    def _reply_options(self, parsed: requests.Request, offers_tools: bool = False) -> ReplyOptions:
        return ReplyOptions(
            parsed.model,
            self._served.fingerprint,
            parsed.wants_usage,
            offers_tools,
            self._config.reasoning_alias,
        )

    async def _respond(
        self, request: Request, parsed: ChatRequest | CompletionRequest, answer: Answer
    ) -> Response:
        job = await self._worker.submit(parsed, request.scope["request_id"])
        if parsed.is_stream:
            frames = self._stream(job, parsed, answer)
            return EventStream(frames, lambda: self._worker.cancel(job))
        try:
            body = await _until_gone(request.receive, self._whole(job, parsed, answer))
        finally:
            self._worker.cancel(job)
        return JSONResponse(body, headers={"x-queue-ms": f"{body['timings']['queue_ms']:.0f}"})

    async def _whole(self, job: Job, parsed: requests.Request, answer: Answer) -> dict[str, Any]:
        """Collect an answer."""
        events: list[Event] = []
        logprobs = _no_logprobs(parsed)
        while True:
            message = await job.messages.get()
            if isinstance(message, Part):
                events += message.events
                if logprobs is not None and message.logprobs is not None:
                    logprobs.append(message.logprobs)
            elif isinstance(message, Finished):
                return answer.whole(
                    events,
                    logprobs,
                    message.reason,
                    message.usage,
                    message.timings,
                    message.memory,
                )
            else:
                raise message.error

    async def _stream(
        self, job: Job, parsed: requests.Request, answer: Answer
    ) -> AsyncIterator[bytes]:
        """Frames of an answer; a sign of life whenever nothing else came for a while, whatever the engine does."""
        beats = _Beats(self._config.keep_alive_s, parsed.wants_progress)
        held = _no_logprobs(parsed)
        yield answer.first()
        while True:
            message = await _next(job, beats.wait_s())
            if message is None:
                progress = self._progress(job) if beats.is_progress_due() else None
                if progress is not None:
                    yield answer.note({"prompt_progress": progress})
                elif beats.is_keep_alive_due():
                    is_chunk = self._config.keep_alive_chunks
                    yield answer.note({}) if is_chunk else KEEP_ALIVE
                else:
                    continue
                beats.sent()
            elif isinstance(message, Part):
                if held is not None and message.logprobs is not None:
                    held.append(message.logprobs)
                is_told = parsed.wants_timings and message.timings is not None
                extra = {"timings": message.timings} if is_told else None
                frames = answer.parts(message.events, held or None, extra)
                held = None if held is None else []
                if frames:
                    beats.sent()
                    yield frames
            elif isinstance(message, Finished):
                yield answer.last(message.reason, message.usage, message.timings, message.memory)
                return
            else:
                self._worker.metrics.failed(message.error.code or "error")
                yield frame(message.error.body()) + DONE
                return

    def _progress(self, job: Job) -> dict[str, Any] | None:
        before = self._worker.position(job)
        return {"queued_behind": before} if before is not None else self._worker.progress(job)


class _Beats:
    """When a silent stream says something, by the wall clock."""

    def __init__(self, keep_alive_s: float, wants_progress: bool) -> None:
        self._keep_alive_s, self._wants_progress = keep_alive_s, wants_progress
        self._last = time.monotonic()

    def wait_s(self) -> float | None:
        """Return how long to wait for a part of the answer; None: as long as it takes."""
        waits = [PROGRESS_EVERY_S] if self._wants_progress else []
        if self._keep_alive_s:
            waits.append(max(0.0, self._last + self._keep_alive_s - time.monotonic()))
        return min(waits, default=None)

    def is_progress_due(self) -> bool:
        return self._wants_progress

    def is_keep_alive_due(self) -> bool:
        return bool(self._keep_alive_s) and time.monotonic() - self._last >= self._keep_alive_s

    def sent(self) -> None:
        self._last = time.monotonic()


class EventStream(Response):
    """A stream of frames whose headers leave at once. When the client goes away, the frames are closed."""

    def __init__(self, frames: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        """on_end: called when nothing will be sent any more, also if nothing ever was."""
        self._frames, self._on_end = frames, on_end
        super().__init__(
            media_type="text/event-stream; charset=utf-8",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until nobody listens."""
        del scope
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}

        async def run() -> None:
            await send(start)
            async with contextlib.aclosing(self._frames) as frames:  # type: ignore[type-var]
                async for piece in frames:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            with contextlib.suppress(Gone):
                await _until_gone(receive, run())
        finally:
            self._on_end()


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema without references: the document has it inside another."""
    named = schema.pop("$defs", {})

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return walk(named[value["$ref"].rpartition("/")[2]])
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    found: dict[str, Any] = walk(schema)
    return found


async def _until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do something for a client; cancel it and raise Gone when the connection is closed before it is done."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        for pending in (task, watcher):
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pending


async def _body(request: Request) -> bytes:
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > MAX_BODY_NBYTES:
                raise too_large()
    except ClientDisconnect as error:
        raise Gone from error
    return bytes(raw)


def _no_logprobs(parsed: requests.Request) -> list[TokenLogprobs] | None:
    return None if parsed.logprobs is None else []


async def _next(job: Job, timeout_s: float | None) -> Message | None:
    try:
        return await asyncio.wait_for(job.messages.get(), timeout_s)
    except TimeoutError:
        return None
