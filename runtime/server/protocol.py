"""The OpenAI chat protocol as values: requests checked into parameters, answers built as JSON. No HTTP, no torch.

Unknown fields are ignored; fields that would change the answer and are not supported are refused by name.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.errors import ContextLengthError, DeviceError, UserError, VerificationError

MAX_STOPS = 16
ROLES = ("system", "developer", "user", "assistant")


class ApiError(Exception):
    """An answer with a status and a body in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        **extra: Any,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.extra = (
            status,
            message,
            code,
            param,
            extra,
        )

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
            **self.extra,
        }
        return {"error": error}

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """Return the answer to an error of the engine; what nobody expected is a 500 without details."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ContextLengthError):
            sizes = {"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens}
            message = f"{error.message} Please reduce the length of the messages."
            return cls(400, message, "context_length_exceeded", "messages", **sizes)
        if isinstance(error, (DeviceError, VerificationError)):  # the request is not to blame
            return cls(500, error.message, "device_error")
        if isinstance(error, UserError):
            return cls(400, error.message, "invalid_request")
        return cls(
            500,
            f"this request failed inside the server ({type(error).__name__}); see its log",
            "internal_error",
        )


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _ChatBody(BaseModel):
    """The fields that are used. Strict: the string "true" is no boolean."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. None means the model's default."""

    model: str
    messages: list[dict[str, str]]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    is_stream: bool
    wants_usage: bool


def parse_chat(raw: bytes, served_name: str, is_strict_model: bool) -> ChatRequest:
    """Check a request body. Raises ApiError naming the field and what was expected."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}", "invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the request body must be a JSON object", "invalid_json")
    _refuse_unsupported(data)
    try:
        body = _ChatBody.model_validate(
            {key: value for key, value in data.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        raise ApiError(400, f"{field}: {first['msg']}", "invalid_value", field) from error
    model = body.model or served_name
    if model != served_name and is_strict_model:
        raise ApiError(
            404, f"there is no model {model!r}; known: {served_name}", "model_not_found", "model"
        )
    _check_range("temperature", body.temperature, 0, 2)
    _check_range("top_p", body.top_p, 0, 1)
    if body.top_p == 0:
        raise ApiError(400, "top_p must be above 0", "invalid_value", "top_p")
    _check_range("min_p", body.min_p, 0, 1)
    _check_range("top_k", body.top_k, -1, 2**31)
    limit = (
        body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    )
    if limit is not None and limit < 1 and limit != -1:
        raise ApiError(
            400,
            f"max_tokens must be at least 1 (or -1 for no limit), got {limit}",
            "invalid_value",
            "max_tokens",
        )
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise ApiError(
            400, f"at most {MAX_STOPS} stop strings, got {len(stops)}", "invalid_value", "stop"
        )
    return ChatRequest(
        model=model,
        messages=parse_messages(body.messages),
        max_tokens=None if limit == -1 else limit,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(0, body.top_k),
        min_p=body.min_p,
        seed=body.seed,
        stop=tuple(stop for stop in stops if stop),
        is_stream=bool(body.stream),
        wants_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Refuse fields that would change the answer; their neutral values pass."""
    neutral: dict[str, tuple[Any, ...]] = {
        "n": (1,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "modalities": (["text"],),
        "audio": (),
    }
    for field, allowed in neutral.items():
        value = data.get(field)
        if value is not None and value not in allowed:
            raise ApiError(
                400,
                f"{field} is not supported by this server (got {value!r:.80})",
                "unsupported",
                field,
            )


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise ApiError(
            400,
            f"{field} must be between {low:g} and {high:g}, got {value:g}",
            "invalid_value",
            field,
        )


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return messages as role and text; system and developer messages are merged to the front, in order."""
    if not messages:
        raise ApiError(400, "messages is empty: send at least one", "invalid_value", "messages")
    system: list[dict[str, str]] = []
    rest: list[dict[str, str]] = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise ApiError(
                400,
                f"messages[{i}].role must be one of {', '.join(ROLES)}, got {role!r:.40}",
                "invalid_value",
                f"messages[{i}].role",
            )
        text = _text_of(message.get("content"), i)
        (system if role in ("system", "developer") else rest).append(
            {"role": role, "content": text}
        )
    if not any(message["role"] == "user" for message in rest):
        raise ApiError(400, "messages has no user message", "invalid_value", "messages")
    merged = "\n\n".join(message["content"] for message in system)
    return [{"role": "system", "content": merged}, *rest] if system else rest


def _text_of(content: Any, i: int) -> str:
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise ApiError(
            400,
            f"messages[{i}].content must be text or a list of parts",
            "invalid_value",
            f"messages[{i}].content",
        )
    texts = []
    for j, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(
                400,
                f"messages[{i}].content[{j}] is {kind!r:.40}: only text parts are supported",
                "unsupported",
                f"messages[{i}].content[{j}]",
            )
        texts.append(text)
    joined = "".join(texts)
    try:
        joined.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400,
            f"messages[{i}].content holds half a surrogate pair",
            "invalid_value",
            f"messages[{i}].content",
        ) from error
    return joined


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Real token counts of one answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class ChatAnswer:
    """One answer's frame: the id, time and model that all its bodies share."""

    def __init__(self, model: str, wants_usage: bool = False) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model
        self.wants_usage = wants_usage

    def whole(
        self, text: str, finish_reason: str, usage: Usage, timings: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
        return {
            **self._frame("chat.completion"),
            "choices": [choice],
            "usage": usage.body(),
            "timings": dict(timings),
        }

    def first(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def last(self, finish_reason: str, usage: Usage) -> bytes:
        """Return the finishing frames: reason, usage if it was asked for, end mark."""
        frames = self._chunk({}, finish_reason)
        if self.wants_usage:
            frames += frame(
                {**self._frame("chat.completion.chunk"), "choices": [], "usage": usage.body()}
            )
        return frames + DONE

    def _chunk(self, delta: Mapping[str, str], finish_reason: str | None = None) -> bytes:
        choice = {
            "index": 0,
            "delta": dict(delta),
            "finish_reason": finish_reason,
            "logprobs": None,
        }
        usage = {"usage": None} if self.wants_usage else {}
        return frame({**self._frame("chat.completion.chunk"), "choices": [choice], **usage})

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def frame(body: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def model_body(served_name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """Return one entry of /v1/models."""
    return {
        "id": served_name,
        "object": "model",
        "created": created,
        "owned_by": "nvmoe",
        "max_model_len": context_tokens,
    }
