"""Bodies of requests checked into values: chat, text completions, tokens. No HTTP, no torch.

Unknown fields are ignored; fields that would change the answer and are not supported are refused by name. Null is the
same as leaving a field out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from runtime.server.errors import ApiError, bad
from runtime.server.messages import check_text, parse_messages
from runtime.text import ChatOptions

MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_DEPTH = 64  # of a body
THINKING_SUFFIX = "-thinking"

Body = TypeVar("Body", bound=BaseModel)


# ---- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelIds:
    """The ids that this server answers to: the plain one, and one that thinks where the model can."""

    name: str
    can_think: bool
    is_strict: bool = True  # false: any other name means the plain id

    @property
    def all(self) -> tuple[str, ...]:
        return (self.name, f"{self.name}{THINKING_SUFFIX}") if self.can_think else (self.name,)

    def resolve(self, asked: str | None) -> tuple[str, bool]:
        """Return (the id to answer with, whether it thinks). Raises ApiError for a name that is not here."""
        if asked is None:
            return self.name, False
        if asked in self.all:
            return asked, asked != self.name
        if self.is_strict:
            raise ApiError(
                404,
                f"there is no model {asked!r:.80}; known: {', '.join(self.all)}",
                "model_not_found",
                "model",
            )
        return asked, False


# ---- bodies ----------------------------------------------------------------------------------------------------------


class StreamOptions(BaseModel):
    """What a stream carries besides."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _Common(BaseModel):
    """The fields of both endpoints. Strict: the string "true" is no boolean."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None


class ChatBody(_Common):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None


class CompletionBody(_Common):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt, or messages that go through the model's chat format."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    tokens: list[int]


# ---- checked values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What both endpoints ask for. None means the model's default."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # alternatives to each token; None: no log-probabilities
    is_stream: bool = False
    wants_usage: bool = False
    wants_progress: bool = False  # of the prompt, in the stream
    wants_timings: bool = False  # of each token, in the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Request):
    """A checked chat."""

    messages: list[dict[str, Any]]
    options: ChatOptions
    # the tool that must be called; "" is any of them; None: the model decides
    forced: str | None = None
    memory: Mapping[str, Any] | None = None  # the store that answers, and how: see `question`

    @property
    def question(self) -> str:
        """What a memory is asked: the user's last message. Earlier turns are no part of it."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Request):
    """A checked text completion."""

    prompt: str | tuple[int, ...]
    is_echo: bool = False


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """What is to be counted: a text, or a chat."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    options: ChatOptions
    adds_start: bool


def parse_chat(raw: bytes, models: ModelIds) -> ChatRequest:
    """Check a chat body. Raises ApiError naming the field and what was expected."""
    data = parse_object(raw)
    _refuse_unsupported(data, _CHAT_NEUTRAL)
    body = _validate(ChatBody, data)
    model, thinks = models.resolve(body.model)
    options = _options(body, thinks, models.can_think)
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    messages = parse_messages(body.messages)
    _check_memory(body, messages, options)
    return ChatRequest(
        messages=messages,
        options=options,
        memory=body.memory,
        forced=_forced(body.tool_choice, options),
        logprobs=_chat_logprobs(body),
        **_common(body, model, limit_name),
    )


def parse_completion(raw: bytes, models: ModelIds) -> CompletionRequest:
    """Check a text completion's body. Raises ApiError."""
    data = parse_object(raw)
    _refuse_unsupported(data, _COMPLETION_NEUTRAL)
    body = _validate(CompletionBody, data)
    model, _ = models.resolve(body.model)
    if body.logprobs is not None:
        _check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    if body.echo and body.logprobs is not None:
        raise bad(
            "echo with logprobs is not supported: leave one of them out", "echo", "unsupported"
        )
    return CompletionRequest(
        prompt=_prompt(body.prompt),
        is_echo=bool(body.echo),
        logprobs=body.logprobs,
        **_common(body, model, "max_tokens"),
    )


def parse_tokenize(raw: bytes, models: ModelIds) -> TokenizeRequest:
    """Check a body of /tokenize. Raises ApiError."""
    body = _validate(TokenizeBody, parse_object(raw))
    _, thinks = models.resolve(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad("send either prompt or messages", "prompt")
    if body.prompt is not None:
        check_text(body.prompt, "prompt")
    messages = None if body.messages is None else parse_messages(body.messages)
    thinking = _asked_thinking(body.chat_template_kwargs, None, None)
    options = ChatOptions(
        thinks if thinking is None else thinking, tools=_tools(body.tools, "auto")
    )
    return TokenizeRequest(body.prompt, messages, options, body.add_special_tokens is not False)


def parse_detokenize(raw: bytes, models: ModelIds, vocab_size: int) -> list[int]:
    """Check a body of /detokenize. Raises ApiError."""
    body = _validate(DetokenizeBody, parse_object(raw))
    models.resolve(body.model)
    _check_tokens(body.tokens, "tokens", vocab_size)
    return body.tokens


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return a body's JSON object. Raises ApiError."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the request body is not JSON: {error}", "invalid_json") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the request body must be a JSON object", "invalid_json")
    if _depth(data) > MAX_DEPTH:
        raise ApiError(
            400, f"the request body is nested deeper than {MAX_DEPTH} levels", "invalid_json"
        )
    return data


def _depth(data: Any) -> int:
    """Return how deeply lists and objects are nested, as far as one level beyond MAX_DEPTH."""
    depth, level = 0, [data]
    while level and depth <= MAX_DEPTH:
        depth += 1
        items = [list(v.values()) if isinstance(v, dict) else v for v in level]
        level = [v for item in items for v in item if isinstance(v, (dict, list))]
    return depth


def _validate(kind: type[Body], data: Mapping[str, Any]) -> Body:
    try:
        return kind.model_validate({key: v for key, v in data.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        where = ".".join(str(part) for part in first["loc"])
        raise bad(f"{where}: {first['msg']}", field) from error


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
_CHAT_NEUTRAL = _NEUTRAL | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
}
_COMPLETION_NEUTRAL = _NEUTRAL | {"suffix": ("",), "memory": ()}
_INSTEAD = {
    "functions": ": send tools",
    "function_call": ": send tool_choice",
    "n": ": send the request several times",
    "memory": ": send messages to /v1/chat/completions",
    "response_format": ": ask for the format in the messages",
}


def _refuse_unsupported(data: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that would change the answer; their neutral values pass."""
    for field, allowed in neutral.items():
        value = data.get(field)
        if value is not None and value not in allowed:
            raise bad(
                f"{field} is not supported by this server (got {value!r:.80}){_INSTEAD.get(field, '')}",
                field,
                "unsupported",
            )


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise bad(f"{field} must be between {low:g} and {high:g}, got {value:g}", field)


def _common(body: _Common, model: str, limit_name: str) -> dict[str, Any]:
    _check_range("temperature", body.temperature, 0, 2)
    _check_range("top_p", body.top_p, 0, 1)
    if body.top_p == 0:
        raise bad("top_p must be above 0", "top_p")
    _check_range("min_p", body.min_p, 0, 1)
    _check_range("top_k", body.top_k, -1, 2**31)
    _check_range("seed", body.seed, -(2**63), 2**64 - 1)
    _check_range("frequency_penalty", body.frequency_penalty, -2, 2)
    _check_range("presence_penalty", body.presence_penalty, -2, 2)
    _check_range("repetition_penalty", body.repetition_penalty, 0.01, 10)
    limit = getattr(body, limit_name)
    if limit is not None and limit < 1 and limit != -1:
        raise bad(f"{limit_name} must be at least 1 (or -1 for no limit), got {limit}", limit_name)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise bad(f"at most {MAX_STOPS} stop strings, got {len(stops)}", "stop")
    for stop in stops:
        check_text(stop, "stop")
    return {
        "model": model,
        "max_tokens": None if limit == -1 else limit,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "seed": body.seed,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
        "stop": tuple(stop for stop in stops if stop),
        "is_stream": bool(body.stream),
        "wants_usage": bool(body.stream_options and body.stream_options.include_usage),
        "wants_progress": bool(body.return_progress),
        "wants_timings": bool(body.timings_per_token),
    }


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs=true", "top_logprobs")
    _check_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    return (body.top_logprobs or 0) if body.logprobs else None


def _options(body: ChatBody, thinks: bool, can_think: bool) -> ChatOptions:
    """The model id says whether to think; a field of the request overrules it."""
    asked = _asked_thinking(body.chat_template_kwargs, body.thinking, body.reasoning_effort)
    if asked and not can_think:
        raise bad(
            "this model has no thinking mode: leave reasoning_effort and thinking out",
            "reasoning_effort",
            "unsupported",
        )
    thinking = thinks if asked is None else asked
    effort = (body.chat_template_kwargs or {}).get("reasoning_effort")
    if body.reasoning_effort not in (None, "none"):
        effort = body.reasoning_effort
    is_word = isinstance(effort, (str, int)) and not isinstance(effort, bool)
    return ChatOptions(
        thinking, effort if thinking and is_word else None, _tools(body.tools, body.tool_choice)
    )


def _asked_thinking(
    kwargs: Mapping[str, Any] | None, thinking: Mapping[str, Any] | None, effort: str | None
) -> bool | None:
    """Return what a request says about thinking, None when it says nothing."""
    if effort is not None:
        return effort != "none"
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "auto"):
            raise bad(f"thinking.type must be enabled or disabled, got {kind!r:.40}", "thinking")
        return None if kind == "auto" else kind == "enabled"
    for name in ("enable_thinking", "thinking"):
        value = (kwargs or {}).get(name)
        if value is not None:
            if not isinstance(value, bool):
                raise bad(
                    f"chat_template_kwargs.{name} must be true or false", "chat_template_kwargs"
                )
            return value
    return None


def _tools(tools: Sequence[Mapping[str, Any]] | None, choice: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the tools to offer: none of them where `tool_choice` is none."""
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad(
            f"tool_choice {choice!r:.40} is unknown: send none, auto, required or a function",
            "tool_choice",
        )
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            raise bad(f"tools[{i}] is no function", f"tools[{i}]", "unsupported")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad(f"tools[{i}].function.name must be a text", f"tools[{i}].function.name")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise bad(
                f"tools[{i}].function.parameters must be an object",
                f"tools[{i}].function.parameters",
            )
        check_text(json.dumps(tool, ensure_ascii=False), f"tools[{i}]")
    return () if choice == "none" else tuple(tools or ())


def _check_memory(
    body: ChatBody, messages: Sequence[Mapping[str, Any]], options: ChatOptions
) -> None:
    """Refuse what an answer out of a store cannot do. What stands in the field is the memory's business."""
    if body.memory is None:
        return
    for name, is_asked in (("tools", bool(options.tools)), ("logprobs", bool(body.logprobs))):
        if is_asked:
            raise bad(f"memory with {name} is not supported: leave one out", name, "unsupported")
    if options.thinking:
        raise bad("memory answers without thinking: leave one out", "memory", "unsupported")
    if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise bad("memory needs a question: end with a user's message that has text", "messages")


def _forced(choice: Any, options: ChatOptions) -> str | None:
    """Return what `tool_choice` demands. The answer is begun for the model, so it cannot think first."""
    if choice in (None, "none", "auto"):
        return None
    names = [tool["function"]["name"] for tool in options.tools]
    name: Any = ""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
        if name not in names:
            raise bad(f"tool_choice names {name!r:.60}, which is none of the tools", "tool_choice")
    if not names:
        raise bad("tool_choice required needs tools", "tool_choice")
    if options.thinking:
        raise bad(
            "a tool cannot be forced while the model thinks: use the plain model id, reasoning_effort none, or "
            "tool_choice auto",
            "tool_choice",
            "unsupported",
        )
    return str(name)


def _prompt(prompt: str | list[Any]) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        return prompt
    if any(isinstance(item, (str, list)) for item in prompt):
        raise bad("one prompt a request: send a text or a list of token ids", "prompt")
    _check_tokens(prompt, "prompt", 2**31)
    return tuple(prompt)


def _check_tokens(tokens: Sequence[Any], param: str, vocab_size: int) -> None:
    for i, token in enumerate(tokens):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise bad(f"{param}[{i}] is no token id of this model: {token!r:.40}", param)
