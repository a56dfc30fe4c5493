"""Answers of the Qwen3.8 family as strings: reasoning, content and tool calls. Prompts are made by the template.

Owns the markers and the tool markup. Knows no tokenizer, no file and no tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from runtime.answers import BrokenCall, Content, Event, Reasoning, ToolCall, overlap

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

EFFORTS = ("low", "medium", "xhigh")
"""What the template knows; xhigh is its default."""

_CALL_FORM = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

_ENDS: dict[str, tuple[str, ...]] = {
    # the newline before the end belongs to the format, as do those before a call
    "reasoning": (f"\n{THINK_END}", THINK_END),
    "content": (f"\n\n{CALL}", f"\n{CALL}", CALL, f"{THINK}\n", THINK, THINK_END),
}


class QwenParser:
    """An answer in pieces, its parts as events: each as soon as no later piece can change it.

    The answer is what the model writes behind the template's header: with thinking, reasoning up to `</think>`, blank
    lines, and the content; then perhaps calls. Reasoning that begins in the content, though it was off, is reasoning.
    """

    markers = (THINK, THINK_END, CALL, CALL_END)

    def __init__(self, thinking: bool, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """tools: in OpenAI's form; their schemas say which arguments are text, which the markup does not."""
        self._state: Literal["reasoning", "content", "call", "broken"] = (
            "reasoning" if thinking else "content"
        )
        self._held = ""
        self._skips_newlines = False  # between sections
        self._schemas = _schemas(tools)

    def push(self, text: str) -> list[Event]:
        """Return the events that have become certain."""
        events: list[Event] = []
        self._held += text
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Return what was held back: the answer has ended, with its stop token or at a limit."""
        held, self._held = self._held, ""
        if self._state in ("call", "broken"):
            return [BrokenCall(held)]
        return [self._as_text(held)] if held else []

    def _advance(self, events: list[Event]) -> bool:
        """Use up one piece of the answer; false when it takes more text to go on."""
        if self._state == "broken":
            return False
        if self._state == "call":
            end = self._held.find(CALL_END)
            if end < 0:
                return False
            call = self._parse_call(self._held[:end])
            if call is None:
                self._state = "broken"
                return False
            events.append(call)
            self._go("content", end + len(CALL_END))
            return True
        return self._advance_text(events)

    def _advance_text(self, events: list[Event]) -> bool:
        if self._skips_newlines:
            self._held = self._held.lstrip("\n")
            self._skips_newlines = not self._held
        ends = _ENDS[self._state]
        found = [(at, -len(end), end) for end in ends if (at := self._held.find(end)) >= 0]
        if found:
            cut, _, marker = min(found)
        else:
            cut, marker = len(self._held) - max(overlap(self._held, end) for end in ends), ""
        if cut:
            events.append(self._as_text(self._held[:cut]))
        if not marker:
            self._held = self._held[cut:]
            return False
        used = cut + len(marker)
        if marker.endswith(CALL):
            self._go("call", used)
        elif marker.startswith(THINK):
            self._go("reasoning", used)
        else:
            self._go("content", used)
        return True

    def _go(self, state: Literal["reasoning", "content", "call"], used: int) -> None:
        self._state, self._held = state, self._held[used:]
        self._skips_newlines = state != "call"

    def _as_text(self, text: str) -> Reasoning | Content:
        return Reasoning(text) if self._state == "reasoning" else Content(text)

    def _parse_call(self, markup: str) -> ToolCall | None:
        """Return the call between its tags, None if it is not in the model's form."""
        form = _CALL_FORM.fullmatch(markup)
        if form is None:
            return None
        name, body = form.groups()
        schema = self._schemas.get(name, {})
        arguments: dict[str, Any] = {}
        at = len(body) - len(body.lstrip())
        while at < len(body):
            parameter = _PARAMETER.match(body, at)
            if parameter is None or parameter[1] in arguments:
                return None
            arguments[parameter[1]] = _value(parameter[2], schema.get(parameter[1]))
            at = parameter.end()
        return ToolCall(name, arguments)


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return each tool's schemas of its parameters, by their names."""
    found = {}
    for tool in tools:
        function = tool.get("function", {})
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[function.get("name")] = properties if isinstance(properties, Mapping) else {}
    return found


def _value(text: str, schema: Any) -> Any:
    """Return a parameter's value: text where its schema says so, else JSON, else the text all the same."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")
