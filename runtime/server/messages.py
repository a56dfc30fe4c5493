"""A conversation as clients send it, checked into messages of plain text. No HTTP, no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.server.errors import bad

ROLES = ("system", "developer", "user", "assistant", "tool")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with plain text; system and developer messages are merged to the front, in order.

    An assistant's may have `reasoning_content` and `tool_calls`, a tool's has the `tool_call_id` of a call before it.
    """
    if not messages:
        raise bad("messages is empty: send at least one", "messages")
    system: list[str] = []
    rest: list[dict[str, Any]] = []
    open_ids: list[str] = []  # of calls that have no result yet
    for i, message in enumerate(messages):
        role = _role(message, i)
        text = _text_of(message.get("content"), i)
        if role in ("system", "developer"):
            system.append(text)
        elif role == "assistant":
            rest.append(_assistant(message, text, i))
            open_ids = [call["id"] for call in rest[-1].get("tool_calls", ())]
        elif role == "tool":
            call_id = message.get("tool_call_id")
            if call_id not in open_ids and open_ids:
                call_id = open_ids[0]  # results in order, whatever the client calls them
            if call_id in open_ids:
                open_ids.remove(call_id)
            rest.append({"role": role, "content": text, "tool_call_id": call_id})
        else:
            rest.append({"role": role, "content": text})
    if not any(message["role"] == "user" for message in rest):
        raise bad("messages has no user message", "messages")
    if rest[-1]["role"] == "assistant":
        raise bad(
            "the last message is an assistant's, and answers are not continued: end with a user's or a tool's",
            "messages",
            "unsupported",
        )
    merged = "\n\n".join(text for text in system if text)
    return [{"role": "system", "content": merged}, *rest] if system else rest


def _role(message: Mapping[str, Any], i: int) -> str:
    role = message.get("role")
    if role not in ROLES:
        hint = " (send tools and role tool instead)" if role == "function" else ""
        raise bad(
            f"messages[{i}].role must be one of {', '.join(ROLES)}, got {role!r:.40}{hint}",
            f"messages[{i}].role",
        )
    return str(role)


def _assistant(message: Mapping[str, Any], text: str, i: int) -> dict[str, Any]:
    """An assistant's turn; a think block that a client has put back into the content is reasoning again."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise bad(f"messages[{i}].reasoning_content must be text", f"messages[{i}]")
    thought = _THOUGHT.match(text)
    if thought:
        text, reasoning = text[thought.end() :], reasoning or thought[1].strip("\n")
    out: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        check_text(reasoning, f"messages[{i}].reasoning_content")
        out["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise bad(f"messages[{i}].tool_calls must be a list", f"messages[{i}].tool_calls")
        out["tool_calls"] = [
            _call(call, f"messages[{i}].tool_calls[{j}]") for j, call in enumerate(calls)
        ]
    return out


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise bad(f"{where} must have a function with a name", where)
    arguments = function.get("arguments")
    try:
        values = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError) as error:
        raise bad(f"{where}.function.arguments is not JSON: {error}", where) from error
    if not isinstance(values, Mapping):
        raise bad(f"{where}.function.arguments must be a JSON object", where)
    check_text(json.dumps(values, ensure_ascii=False), where)
    check_text(function["name"], where)
    made = {"name": function["name"], "arguments": dict(values)}
    return {"id": str(call.get("id") or where), "type": "function", "function": made}


def _text_of(content: Any, i: int) -> str:
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    where = f"messages[{i}].content"
    if not isinstance(parts, list):
        raise bad(f"{where} must be text or a list of parts", where)
    texts = []
    for j, part in enumerate(parts):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise bad(
                f"{where}[{j}] is {kind!r:.40}: only text parts are supported",
                f"{where}[{j}]",
                "unsupported",
            )
        texts.append(text)
    joined = "".join(texts)
    check_text(joined, where)
    return joined


def check_text(text: str, where: str) -> None:
    """Raise ApiError for a text that no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad(f"{where} holds half a surrogate pair", where) from error
