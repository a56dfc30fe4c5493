"""The advisor over MCP (stdio and HTTP) and over plain HTTP: each tool and its twin call the same function.

Loopback by default, hosts and origins checked, 120 requests a minute and client, bodies of 256 KiB, no traceback and no
visitor's address in any log.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import ToolAnnotations
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.advisor.kb import KnowledgeError
from runtime.advisor.service import (
    Advice,
    CheckResult,
    Context,
    Document,
    LawResult,
    Prediction,
    Rows,
    Service,
    ServiceError,
)
from runtime.advisor.validator import MAX_NBYTES

log = logging.getLogger("advisor")

PER_MINUTE = 120
READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)


def build_server(service: Service) -> MCPServer:
    """Return the MCP server with its tools, resources and HTTP twins."""
    server: MCPServer = MCPServer(
        "NVMoE hardware advisor",
        instructions="Which computer runs a language model, or keep, upgrade, rent. Start with get_context; end with check_answer.",
    )
    _tools(server, service)
    _resources(server, service)
    _twins(server, service)
    return server


def _said(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a service's error into a tool's."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ServiceError as error:
            raise ToolError(error.message) from error
        except KnowledgeError as error:
            raise ToolError("the knowledge base cannot be used at the moment") from error

    return call


def _tools(server: MCPServer, service: Service) -> None:
    def tool(function: Callable[..., Any]) -> None:
        description = (function.__doc__ or "").strip()
        server.add_tool(_said(function), function.__name__, None, description, READ_ONLY)

    def get_context() -> Context:
        return service.get_context()

    def advise(
        model: str | None = None, hw: str | None = None, hardware: dict[str, Any] | None = None,
        situation: dict[str, Any] | None = None, question: str | None = None, variant: str | None = None, as_of: str | None = None,
    ) -> Advice:  # fmt: skip
        return service.advise(model, hw, hardware, situation, question, variant, as_of)

    def predict(
        model: str, hw: str, variant: str | None = None, cache_bytes: float | None = None, context: float = 8192
    ) -> Prediction:  # fmt: skip
        return service.predict(model, hw, variant, cache_bytes, context)

    def compute_law(law: str, inputs: dict[str, dict[str, Any]]) -> LawResult:
        return service.compute_law(law, inputs)

    def explain_law(law: str) -> Document:
        return service.explain_law(law)

    def list_entities(
        kind: str,
        filter: str | None = None,  # noqa: A002
        limit: int = 20,
        cursor: int = 0,
    ) -> Rows:
        return service.list_entities(kind, filter, limit, cursor)

    def get_entity(name: str) -> Document:
        return service.get_entity(name)

    def check_answer(
        answer: str, last_user_message: str = "", searched_web: bool = False, conversation_id: str | None = None
    ) -> CheckResult:  # fmt: skip
        return service.check_answer(answer, last_user_message, searched_web, conversation_id)

    for function in (
        get_context, advise, predict, compute_law, explain_law, list_entities, get_entity, check_answer,
    ):  # fmt: skip
        function.__doc__ = getattr(Service, function.__name__).__doc__
        tool(function)


def _resources(server: MCPServer, service: Service) -> None:
    def read(kind: str, name: str) -> str:
        documents = service.kb.documents[kind]
        if name not in documents:
            raise ValueError(f"there is no {kind} {name!r}")
        return json.dumps(documents[name], ensure_ascii=False, indent=1)

    @server.resource("advisor://law/{name}", mime_type="application/json")
    def law_document(name: str) -> str:
        return read("law", name)

    @server.resource("advisor://path/{name}", mime_type="application/json")
    def path_document(name: str) -> str:
        return read("path", name)

    @server.resource("advisor://run/{name}", mime_type="application/json")
    def run_document(name: str) -> str:
        return read("run", name)


# ---- plain HTTP ------------------------------------------------------------------------------------------------------

Handler = Callable[[dict[str, Any]], BaseModel | dict[str, Any] | str]


def _twins(server: MCPServer, service: Service) -> None:
    def route(path: str, methods: list[str], handle: Handler) -> None:
        async def endpoint(request: Request) -> Response:
            return await _answer(request, handle)

        server.custom_route(path, methods)(endpoint)

    route("/api/context", ["GET"], lambda _a: service.get_context())
    route(
        "/api/advise",
        ["GET", "POST"],
        lambda a: service.advise(
            **_named(a, "model", "hw", "hardware", "situation", "question", "variant", "as_of")
        ),
    )
    route(
        "/api/predict",
        ["GET"],
        lambda a: service.predict(
            **_named(
                a, "model", "hw", "variant", "cache_bytes", "context", required=("model", "hw")
            )
        ),
    )
    route(
        "/api/compute",
        ["GET", "POST"],
        lambda a: service.compute_law(**_named(a, "law", "inputs", required=("law", "inputs"))),
    )
    route("/api/law/{law}", ["GET"], lambda a: service.explain_law(**_named(a, "law")))
    route(
        "/api/entities",
        ["GET"],
        lambda a: service.list_entities(
            **_named(a, "kind", "filter", "limit", "cursor", required=("kind",))
        ),
    )
    route("/api/entity/{name}", ["GET"], lambda a: service.get_entity(**_named(a, "name")))

    def check(a: dict[str, Any]) -> BaseModel:
        given = _named(a, "answer", "draft", "last_user_message", "searched_web", "conversation_id")
        if "draft" in given:
            given["answer"] = service.whole(str(given.pop("draft")))
        if "answer" not in given:
            raise ServiceError(400, "answer is missing", "answer")
        return service.check_answer(**given)

    def part(a: dict[str, Any]) -> dict[str, Any]:
        given = _named(a, "draft", "n", "text", required=("draft", "n", "text"))
        return {"parts": service.take_part(str(given["draft"]), given["n"], str(given["text"]))}

    def schema(a: dict[str, Any]) -> dict[str, Any]:
        kind = str(a["type"]).removesuffix(".json")
        if kind not in service.kb.schemas:
            raise ServiceError(404, f"there is no schema {kind!r}", "type")
        return dict(service.kb.schemas[kind])

    route("/api/check", ["GET", "POST"], check)
    route("/api/part", ["GET"], part)
    route("/schema/{type}", ["GET"], schema)
    route(
        "/health",
        ["GET"],
        lambda _a: {
            "status": "ok",
            "kb_version": service.kb.version,
            "documents": service.kb.counts(),
        },
    )
    route("/llms.txt", ["GET"], lambda _a: LLMS_TXT)
    route("/setup.md", ["GET"], lambda _a: SETUP_MD)


_JSON_FIELDS = frozenset({"hardware", "situation", "inputs"})
_NUMBER_FIELDS = {"cache_bytes": float, "context": float, "limit": int, "cursor": int, "n": int}


def _named(given: dict[str, Any], *known: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the arguments that are known, texts of a query turned into what they stand for."""
    odd = sorted(given.keys() - set(known))
    if odd:
        raise ServiceError(
            400, f"unknown argument {', '.join(odd)}; known: {', '.join(known)}", odd[0]
        )
    for name in required:
        if name not in given:
            raise ServiceError(400, f"{name} is missing", name)
    found = {}
    for name, value in given.items():
        try:
            if name in _JSON_FIELDS:
                value = json.loads(value) if isinstance(value, str) else value
                if not isinstance(value, dict):
                    raise ValueError("an object is wanted")
            elif name in _NUMBER_FIELDS:
                value = _NUMBER_FIELDS[name](value)
            elif name == "searched_web":
                value = value is True or str(value).lower() == "true"
            elif not isinstance(value, str):
                raise ValueError("a text is wanted")
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ServiceError(400, f"{name} cannot be read: {error}", name) from error
        found[name] = value
    return found


async def _answer(request: Request, handle: Handler) -> Response:
    try:
        arguments: dict[str, Any] = dict(request.query_params) | dict(request.path_params)
        if request.method == "POST":
            arguments |= await _body(request)
        found = handle(arguments)
    except ServiceError as error:
        return _error(error.status, error.message, error.field)
    except KnowledgeError:
        log.exception("the knowledge base cannot be used")
        return _error(500, "internal error", None)
    except Exception:
        log.exception("a request failed")
        return _error(500, "internal error", None)
    if isinstance(found, str):
        return PlainTextResponse(found)
    return JSONResponse(found.model_dump(mode="json") if isinstance(found, BaseModel) else found)


async def _body(request: Request) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > 2 * MAX_NBYTES:  # JSON may double a text's bytes
            raise ServiceError(413, f"an answer has at most {MAX_NBYTES // 1024} KiB", "body")
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise ServiceError(400, f"the body is no JSON: {error}", "body") from error
    if not isinstance(body, dict):
        raise ServiceError(400, "the body must be a JSON object", "body")
    return body


def _error(status: int, message: str, field: str | None) -> Response:
    return JSONResponse({"error": {"message": message, "field": field}}, status)


class Limiter:
    """At most `PER_MINUTE` requests of a client in any minute; clients are known by a salted hash."""

    def __init__(
        self,
        app: ASGIApp,
        per_minute: int = PER_MINUTE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._per_minute, self._clock = app, per_minute, clock
        self._salt = secrets.token_bytes(16)
        self._seen: dict[bytes, deque[float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may(scope):
            await _error(429, "too many requests; wait a minute", None)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        host = (scope.get("client") or ("", 0))[0]
        key = hashlib.sha256(self._salt + host.encode()).digest()
        now = self._clock()
        if len(self._seen) > 10_000:
            self._seen.clear()
        times = self._seen.setdefault(key, deque())
        while times and now - times[0] >= 60:
            times.popleft()
        if len(times) >= self._per_minute:
            return False
        times.append(now)
        return True


def build_app(service: Service, host: str = "127.0.0.1", port: int = 8010) -> ASGIApp:
    """Return the HTTP application: MCP at /mcp, its twins, limits around both."""
    names = sorted({host, "127.0.0.1", "localhost"})
    security = TransportSecuritySettings(
        allowed_hosts=[h for n in names for h in (n, f"{n}:{port}")],
        allowed_origins=[f"http://{n}:{port}" for n in names],
    )
    app: Starlette = build_server(service).streamable_http_app(
        stateless_http=True, json_response=True, max_request_body_size=2 * MAX_NBYTES, transport_security=security, host=host,
    )  # fmt: skip
    return Limiter(
        _guarded(app, frozenset(security.allowed_hosts), frozenset(security.allowed_origins))
    )


def _guarded(app: ASGIApp, hosts: frozenset[str], origins: frozenset[str]) -> ASGIApp:
    """Refuse other hosts and origins on the twins as the MCP transport does: a page elsewhere must not ask."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            if headers.get("host", "") not in hosts:
                await _error(400, "this host name is not served", "host")(scope, receive, send)
                return
            if headers.get("origin") not in (None, *origins):
                await _error(403, "requests of other pages are refused", "origin")(
                    scope, receive, send
                )
                return
        await app(scope, receive, send)

    return call


Serve = Callable[[], Awaitable[None]]

LLMS_TXT = """# NVMoE hardware advisor

> Answers which computer runs a language model, or whether to keep, upgrade, buy used or rent: twelve ways, each with yes,
> no or maybe and one number with its unit. Every number is computed by laws that can be recomputed, every price has a day.
> Deterministic; no language model inside; nothing is fetched.

## Links

- [Set-up](/setup.md): how to connect by MCP or by plain HTTP
- [Context](/api/context): order of work, paths, situation keys, laws, rules, schema of an answer
- [Advise](/api/advise?model=deepseek&hw=rtx5060): all paths for a model on a machine
- [Predict](/api/predict?model=qwen&hw=rtx5060): tokens a second as a band, ceilings, milliseconds
- [Entities](/api/entities?kind=model): models, cards, machines, runs, prices; one at /api/entity/{id}
- [Compute](/api/compute): a law with inputs, POST {"law": "L12", "inputs": {"disk_bw": {"value": 8.2, "unit": "GiB/s"}, ...}}
- [Law](/api/law/L14): formula, variables, validity, examples, properties
- [Check by POST](/api/check): POST {"answer": "...", "last_user_message": "..."}
- [Check by parts](/api/part): GET /api/part?draft=NAME&n=1&text=..., then GET /api/check?draft=NAME
- [MCP](/mcp): the same as tools
"""

SETUP_MD = """# Set-up

MCP over HTTP: point a client at `/mcp` of this server. MCP over stdio: let the client start

    python run.py stages=[advise_serve] advise.transport=stdio

Without MCP: every tool has a plain HTTP twin, see /llms.txt. Arguments of GET are query parameters; `situation`,
`hardware` and `inputs` are JSON.
"""
