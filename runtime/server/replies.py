"""Answers as JSON bodies and as frames of a stream, in the shapes of OpenAI's API. No HTTP, no torch."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.answers import BrokenCall, Content, Event, Reasoning, ToolCall

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Real token counts of one answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have been drawn. Its bytes may be a part of a character."""

    text: str
    logprob: float
    raw: bytes

    def body(self) -> dict[str, Any]:
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.raw)}


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token that was drawn, and the likeliest ones."""

    drawn: Alternative
    top: tuple[Alternative, ...]

    def body(self) -> dict[str, Any]:
        return {**self.drawn.body(), "top_logprobs": [t.body() for t in self.top]}


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What decides the form of an answer beside its parts."""

    model: str
    fingerprint: str
    wants_usage: bool = False
    offers_tools: bool = False  # else calls are dropped: nobody asked for any
    reasoning_alias: bool = False  # `reasoning` beside `reasoning_content`


def frame(body: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    # text of a model may hold half a surrogate pair only by a broken tokenizer: it must not end a stream
    return b"data: " + text.encode(errors="replace") + b"\n\n"


class _Answer(ABC):
    """One answer's frame: the id, time and model that all its bodies share."""

    prefix, whole_kind, chunk_kind = "", "", ""

    def __init__(self, options: ReplyOptions) -> None:
        self.options = options
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def first(self) -> bytes:
        """Return what goes out before the prompt is read."""
        return b""

    @abstractmethod
    def parts(
        self,
        events: Iterable[Event],
        logprobs: Sequence[TokenLogprobs] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return the frames of some parts; `extra` fields go with the first of them."""

    def last(
        self,
        reason: str,
        usage: Usage,
        timings: Mapping[str, Any],
        memory: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return the finishing frames: reason, usage if it was asked for, end mark."""
        extra = {"timings": timings} | _memory(memory)
        frames = self._chunk(self._last_choice(self.finish_reason(reason)), extra)
        if self.options.wants_usage:
            frames += frame({**self._head(self.chunk_kind), "choices": [], "usage": usage.body()})
        return frames + DONE

    def note(self, extra: Mapping[str, Any]) -> bytes:
        """Return a frame that carries no part of the answer."""
        return self.parts([Content("")], None, extra)

    def whole(
        self,
        events: Iterable[Event],
        logprobs: Sequence[TokenLogprobs] | None,
        reason: str,
        usage: Usage,
        timings: Mapping[str, Any],
        memory: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {
            **self._head(self.whole_kind),
            "choices": [self._whole_choice(list(events), logprobs, reason)],
            "usage": usage.body(),
            "timings": dict(timings),
            **_memory(memory),
        }

    def finish_reason(self, reason: str) -> str:
        """Return the reason as clients know it."""
        return reason

    @abstractmethod
    def _whole_choice(
        self, events: list[Event], logprobs: Sequence[TokenLogprobs] | None, reason: str
    ) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""

    @abstractmethod
    def _last_choice(self, reason: str) -> dict[str, Any]:
        """Return the choice that finishes a stream."""

    def _chunk(self, choice: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        usage = {"usage": None} if self.options.wants_usage else {}
        body = {**self._head(self.chunk_kind), "choices": [{"index": 0, **choice}], **usage}
        return frame({**body, **(extra or {})})

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.options.model,
            "system_fingerprint": self.options.fingerprint,
        }


class ChatAnswer(_Answer):
    """An answer of /v1/chat/completions."""

    prefix, whole_kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, options: ReplyOptions) -> None:
        super().__init__(options)
        self._calls = 0

    def first(self) -> bytes:
        return self._delta({"role": "assistant", "content": ""})

    def parts(
        self,
        events: Iterable[Event],
        logprobs: Sequence[TokenLogprobs] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        frames = b""
        for event in events:
            for delta in self._deltas(event):
                frames += self._delta(delta, logprobs, extra)
                logprobs = extra = None
        if logprobs or extra:  # a part is held back, or markup: its token is told all the same
            frames += self._delta({}, logprobs, extra)
        return frames

    def finish_reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _deltas(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Content):
            return [{"content": event.text}]
        if isinstance(event, Reasoning):
            return [self._reasoning(event.text)]
        if isinstance(event, BrokenCall) or not self.options.offers_tools:
            return []
        call = self._call(event)
        index, name = call["index"], call["function"]["name"]
        begin = {**call, "function": {"name": name, "arguments": ""}}
        rest = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
        return [{"tool_calls": [begin]}, {"tool_calls": [rest]}]

    def _call(self, call: ToolCall) -> dict[str, Any]:
        index, self._calls = self._calls, self._calls + 1
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return {
            "index": index,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _reasoning(self, text: str) -> dict[str, Any]:
        alias = {"reasoning": text} if self.options.reasoning_alias else {}
        return {"reasoning_content": text, **alias}

    def _whole_choice(
        self, events: list[Event], logprobs: Sequence[TokenLogprobs] | None, reason: str
    ) -> dict[str, Any]:
        content = "".join(e.text for e in events if isinstance(e, Content))
        reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
        calls = [e for e in events if isinstance(e, ToolCall) and self.options.offers_tools]
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message |= self._reasoning(reasoning)
        if calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {key: value for key, value in self._call(call).items() if key != "index"}
                for call in calls
            ]
        return {
            "index": 0,
            "message": message,
            "finish_reason": self.finish_reason(reason),
            "logprobs": _chat_logprobs(logprobs),
        }

    def _last_choice(self, reason: str) -> dict[str, Any]:
        return {"delta": {}, "finish_reason": reason, "logprobs": None}

    def _delta(
        self,
        delta: Mapping[str, Any],
        logprobs: Sequence[TokenLogprobs] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        choice = {"delta": dict(delta), "finish_reason": None, "logprobs": _chat_logprobs(logprobs)}
        return self._chunk(choice, extra)


def _memory(found: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if found is None else {"memory": dict(found)}


def _chat_logprobs(logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
    return None if logprobs is None else {"content": [token.body() for token in logprobs]}


class CompletionAnswer(_Answer):
    """An answer of /v1/completions."""

    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, options: ReplyOptions, echo: str = "") -> None:
        super().__init__(options)
        self._echo = echo
        self._offset = len(echo)  # where the next token's text begins

    def first(self) -> bytes:
        return self._text(self._echo, None, None) if self._echo else b""

    def parts(
        self,
        events: Iterable[Event],
        logprobs: Sequence[TokenLogprobs] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        text = "".join(e.text for e in events if isinstance(e, Content))
        if not text and not logprobs and not extra:
            return b""
        return self._text(text, logprobs, extra)

    def _whole_choice(
        self, events: list[Event], logprobs: Sequence[TokenLogprobs] | None, reason: str
    ) -> dict[str, Any]:
        text = self._echo + "".join(e.text for e in events if isinstance(e, Content))
        found = self._logprobs(logprobs)
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": found}

    def _last_choice(self, reason: str) -> dict[str, Any]:
        return {"text": "", "finish_reason": reason, "logprobs": None}

    def _text(
        self,
        text: str,
        logprobs: Sequence[TokenLogprobs] | None,
        extra: Mapping[str, Any] | None,
    ) -> bytes:
        found = self._logprobs(logprobs)
        return self._chunk({"text": text, "finish_reason": None, "logprobs": found}, extra)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        offsets = []
        for token in logprobs:
            offsets.append(self._offset)
            self._offset += len(token.drawn.text)
        return {
            "tokens": [token.drawn.text for token in logprobs],
            "token_logprobs": [token.drawn.logprob for token in logprobs],
            "top_logprobs": [{t.text: t.logprob for t in token.top} for token in logprobs],
            "text_offset": offsets,
        }


def model_body(name: str, created: int, context_tokens: int) -> dict[str, Any]:
    """Return one entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "nvmoe",
        "max_model_len": context_tokens,
    }
