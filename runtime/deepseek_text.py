"""Prompts and answers of DeepSeek-V4.1-Flash as strings: messages into one prompt, an answer into its parts.

Owns the markers, the order of turns, the tool markup and the stop rule. Knows no tokenizer, no file and no tensor.

What the specification says without a second source: a `response_format` joins the system text [single source; its words
are not given, so it is not encoded]; decoding without special tokens leaves all markers but the first three in the text
[unconfirmed; the parser expects them there]; most token ids come from one tokenizer file, of which only the confirmed
id 1 is used here. The effort "medium" (62) is in a later chat template alone and refused, as the encoder does. The role
`latest_reminder`, the short tasks and images have tokens but no prompt string there, so they are not encoded.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

from runtime.answers import BrokenCall, Content, Event, Reasoning, ToolCall, overlap
from runtime.errors import UserError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
SYSTEM = "<｜System｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
MARKERS = (
    BOS, EOS, "<｜▁pad▁｜>", SYSTEM, USER, ASSISTANT, THINK, THINK_END, DSML, "<｜latest_reminder｜>", "<｜action｜>",
    "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>", "<｜read_url｜>", "<｜deepseek_image｜>",
)  # fmt: skip
"""Every string that the tokenizer turns into one control token, also when a person typed it."""

STOP_IDS = frozenset({1})
"""Generation ends at the end of sentence and nowhere else; the snapshot has no generation config that says so."""

EFFORTS = {"low": 50, "high": 75, "max": 100}
DEFAULT_EFFORT = "high"
ROLES = ("system", "user", "assistant", "tool")
USER_ROLES = ("user", "tool")

# the space after the marker belongs to the format: without it the tag is another model's
_CALLS = f"<{DSML} calls>"
_CALLS_END = f"</{DSML} calls>"
_INVOKE = f'<{DSML} invoke name="'
_INVOKE_END = f"</{DSML} invoke>"
CALL_OPENING = f"\n\n{_CALLS}\n{_INVOKE}"
"""What stands before the name of an answer's first call."""
_INVOKE_FORM = re.compile(rf'{_INVOKE}([^"]+)">(.*)', re.DOTALL)
_PARAMETER = re.compile(
    rf'\s*<{DSML} parameter name="([^"]+)" string="(true|false)">(.*?)</{DSML} parameter>\s*',
    re.DOTALL,
)


# ---- messages to a prompt --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolsBlock:
    """The fixed English text around the tool schemas: what stands before the first and after the last."""

    before: str
    after: str


def read_tools_block(encoder_source: str) -> ToolsBlock:
    """Return the block from the text of the snapshot's `encoding/encoding.py`, which is parsed and never run.

    The specification says to take the block from that file and not how it is stored. Expected is one string constant
    that begins with `## Tools`, with named fields [unconfirmed: field names as seen in ports]. Raises UserError.
    """
    fields = {
        "dsml_token": DSML,
        "tc_block_name": " calls",
        "tool_call_tag_name": " invoke",
        "tool_parameter_tag_name": " parameter",
        "thinking_start_token": THINK,
        "thinking_end_token": THINK_END,
    }
    hint = "check that encoding/encoding.py is the snapshot's own file, or send no tools"
    try:
        nodes = list(ast.walk(ast.parse(encoder_source)))
        found = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        blocks = [text for text in found if text.startswith("## Tools")]
        pieces = [piece for text in blocks for piece in Formatter().parse(text)]
    except (SyntaxError, ValueError) as error:
        raise UserError(f"the encoder's tool block cannot be read: {error}", hint) from error
    parts = [""]
    for literal, field, _, _ in pieces:
        parts[-1] += literal
        if field == "tool_schemas":
            parts.append("")
        elif field is not None:
            if field not in fields:
                raise UserError(f"the encoder's tool block has an unknown field {field!r}", hint)
            parts[-1] += fields[field]
    if len(blocks) != 1 or len(parts) != 2:
        raise UserError(
            f"the encoder has {len(blocks)} tool blocks with {len(parts) - 1} places for schemas, expected 1 with 1",
            hint,
        )
    return ToolsBlock(*parts)


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    thinking: bool,
    effort: str | int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    tools_block: ToolsBlock | None = None,
    drop_reasoning: bool = True,
) -> str:
    """Return the prompt, with the header of the next answer unless the last message is an assistant's.

    messages: role and content as text; an assistant's may have `reasoning_content` and `tool_calls`, a tool's has
    `tool_call_id`. Consecutive user and tool messages are one turn. effort: a word of EFFORTS or 1 to 100; chat mode
    writes none. tools: OpenAI's form; names pass as they are, `ns::name` for a namespace. With tools, or without
    drop_reasoning, all reasoning stays; otherwise only that after the last user, tool or later system message does.

    A marker inside a message is refused, since it would become a control token; to pass it as plain text, replace each
    of MARKERS by a word that nobody typed and put it back when encoding the pieces. Raises UserError.
    """
    number = _effort_number(effort)
    roles = _roles(messages)
    has_system = roles[0] == "system"
    lead = _text(messages[0], "messages[0]") if has_system else ""
    if thinking:
        lead = (
            f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
            + lead
        )
    if tools:
        lead += f"\n\n{_tool_definitions(tools, tools_block)}"
    out = [BOS, SYSTEM, lead] if has_system or thinking or tools else [BOS]
    questions = [
        i for i, role in enumerate(roles) if role in USER_ROLES or (role == "system" and i)
    ]
    kept_from = questions[-1] if questions and drop_reasoning and not tools else 0
    call_ids: list[Any] = []
    for turn, kind in _turns(roles, start=int(has_system)):
        where, message = f"messages[{turn.start}]", messages[turn.start]
        if kind == "user":
            out.append(USER + "\n\n".join(_user_parts(messages, turn, call_ids)))
        elif kind == "system":
            out.append(SYSTEM + _text(message, where))
        else:
            calls = _tool_calls(message, where)
            call_ids = [call_id for call_id, _ in calls]
            out.append(ASSISTANT)
            if thinking and turn.start >= kept_from:
                out.append(THINK + _text(message, where, "reasoning_content"))
            out.append(THINK_END + _text(message, where) + _calls_block(calls) + EOS)
    if roles[-1] != "assistant":
        out += [ASSISTANT, THINK if thinking else THINK_END]
    return "".join(out)


def _effort_number(effort: str | int | None) -> int:
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    number = EFFORTS.get(DEFAULT_EFFORT if effort is None else str(effort))
    if number is None:
        raise UserError(
            f"reasoning effort {effort!r:.40} is unknown",
            f"use {', '.join(EFFORTS)}, or a whole number from 1 to 100",
        )
    return number


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    roles = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise UserError(
                f"messages[{i}] has the role {role!r:.40}, which this model does not know",
                f"use {', '.join(ROLES)}",
            )
        roles.append(role)
    if roles in ([], ["system"]):
        raise UserError("messages hold nothing to answer", "add a user message")
    return roles


def _turns(roles: Sequence[str], start: int) -> Iterator[tuple[range, str]]:
    """Yield the messages of each turn and its kind: neighbours with the roles user and tool are one."""
    while start < len(roles):
        end = start + 1
        if roles[start] in USER_ROLES:
            while end < len(roles) and roles[end] in USER_ROLES:
                end += 1
        yield range(start, end), "user" if roles[start] in USER_ROLES else roles[start]
        start = end


def _text(message: Mapping[str, Any], where: str, field: str = "content") -> str:
    value = message.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}.{field} is not text", "send a string: images are not supported")
    return _plain(value, f"{where}.{field}")


def _plain(text: str, where: str) -> str:
    marker = next((marker for marker in MARKERS if marker in text), None)
    if marker is not None:
        raise UserError(
            f"{where} contains {marker}, a control token of this model",
            "remove it from the message, or write it with a space inside",
        )
    return text


def _user_parts(
    messages: Sequence[Mapping[str, Any]], turn: range, call_ids: Sequence[Any]
) -> list[str]:
    """Return the parts of a turn; the results take the places of the tool messages, in the order of the calls."""
    results = {}
    for i in turn:
        if messages[i]["role"] == "tool":
            call = _answered_call(messages[i], f"messages[{i}]", call_ids)
            if call in results:
                raise UserError(
                    f"messages[{i}] answers the tool call {call_ids[call]!r} a second time",
                    "send one tool message for each call",
                )
            results[call] = f"<tool_result>{_text(messages[i], f'messages[{i}]')}</tool_result>"
    ordered = iter([results[call] for call in sorted(results)])
    return [
        next(ordered) if messages[i]["role"] == "tool" else _text(messages[i], f"messages[{i}]")
        for i in turn
    ]


def _answered_call(message: Mapping[str, Any], where: str, call_ids: Sequence[Any]) -> int:
    """Return which of the last assistant's calls a tool message answers; one call alone needs no id."""
    call_id = message.get("tool_call_id")
    if not call_ids:
        raise UserError(
            f"{where} is a tool result, but the assistant before it called no tool",
            "keep the assistant's tool_calls in the conversation",
        )
    if call_id is None and len(call_ids) == 1:
        return 0
    if call_id is None or call_id not in call_ids:
        raise UserError(
            f"{where}.tool_call_id {call_id!r:.60} is none of the {len(call_ids)} calls before it",
            f"use one of {', '.join(map(repr, call_ids))}",
        )
    return call_ids.index(call_id)


def _tool_definitions(tools: Sequence[Mapping[str, Any]], block: ToolsBlock | None) -> str:
    if block is None:
        raise UserError(
            "tools need the model's own tool block, and none was given",
            "use a snapshot with encoding/encoding.py, or send no tools",
        )
    lines = []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(
                f"tools[{i}] is not a function with a name",
                'send {"type": "function", "function": {"name": ..., "parameters": ...}}',
            )
        _name(function["name"], f"tools[{i}].function.name")
        lines.append(_plain(json.dumps(function, ensure_ascii=False), f"tools[{i}]"))
    return block.before + "\n".join(lines) + block.after


def _tool_calls(message: Mapping[str, Any], where: str) -> list[tuple[Any, str]]:
    """Return each call's id and markup.

    A call without parameters has an empty line where they would stand [unconfirmed: ports of the encoder do so].
    """
    given = message.get("tool_calls") or []
    if not isinstance(given, Sequence):
        raise UserError(f"{where}.tool_calls is no list", "send it as the server returned it")
    calls = []
    for i, call in enumerate(given):
        place = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise UserError(f"{place} has no function", "send calls as the server returned them")
        name = _name(function.get("name"), f"{place}.function.name")
        parameters = [
            f'<{DSML} parameter name="{_name(key, place)}" string="{str(isinstance(value, str)).lower()}">'
            f"{_plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), place)}"
            f"</{DSML} parameter>"
            for key, value in _arguments(function.get("arguments"), place).items()
        ]
        body = "\n".join(parameters)
        calls.append((call.get("id"), f'{_INVOKE}{name}">\n{body}\n{_INVOKE_END}'))
    return calls


def _calls_block(calls: Sequence[tuple[Any, str]]) -> str:
    lines = [_CALLS, *(markup for _, markup in calls), _CALLS_END]
    return "\n\n" + "\n".join(lines) if calls else ""


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not name or '"' in name:
        raise UserError(
            f"{where}: {name!r:.60} cannot be a name in this model's tool markup",
            "use a text without quotation marks",
        )
    return _plain(name, where)


def _arguments(value: Any, where: str) -> Mapping[str, Any]:
    try:
        arguments = _from_json(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{where}: the arguments are not JSON: {error}", "send them as the server returned them"
        ) from error
    if not isinstance(arguments, Mapping):
        raise UserError(
            f"{where}: the arguments are no JSON object", "send them as the server returned them"
        )
    return arguments


def _from_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


# ---- an answer to its parts ------------------------------------------------------------------------------------------


_TEXT_ENDS = {
    "reasoning": (THINK_END, EOS),
    # the blank line before a block belongs to the block; a closing tag alone is markup too
    "content": (f"\n\n<{DSML}", f"<{DSML}", f"</{DSML}", EOS),
}
_CALL_ENDS = (_INVOKE_END, _CALLS_END, EOS)


class AnswerParser:
    """An answer in pieces, its parts as events: each as soon as no later piece can change it.

    The answer is what the model writes after the prompt of encode_messages: in thinking mode reasoning, `</think>`, and
    the content; then perhaps a tool block. The specification defines well-formed answers alone. Here, tags may have any
    white space between them and content may go on after a block; what is not in the model's form, such as a tag without
    its space, is one BrokenCall, together with all that follows. No event of push holds the beginning of a marker. At
    the end of the answer a beginning is text: tokens do not cut the part that makes it a marker.
    """

    markers = (THINK, THINK_END, DSML)

    def __init__(self, thinking: bool) -> None:
        self._state: Literal["reasoning", "content", "block", "calls", "broken"] = (
            "reasoning" if thinking else "content"
        )
        self._held = ""
        self._searched = 0  # no marker begins in `_held` before this place
        self.is_stopped = False

    def push(self, text: str) -> list[Event]:
        """Return the events that have become certain; none after the end of sentence."""
        events: list[Event] = []
        if not self.is_stopped:
            self._held += text
            while not self.is_stopped and self._advance(events):
                pass
        return events

    def finish(self) -> list[Event]:
        """Return what was held back: the answer has ended, with its stop token or at a limit."""
        events: list[Event] = []
        if not self.is_stopped:
            if self._state not in _TEXT_ENDS:
                events.append(BrokenCall(self._held))
            elif self._held:
                events.append(self._as_text(self._held))
            self._stop()
        return events

    def _advance(self, events: list[Event]) -> bool:
        """Use up one piece of the answer; false when it takes more text to go on."""
        if self._state in _TEXT_ENDS:
            return self._advance_text(events)
        if self._state == "block":
            return self._advance_block()
        if self._state == "calls":
            return self._advance_calls(events)
        end, _ = self._find((EOS,))
        if end >= 0:
            events.append(BrokenCall(self._held[:end]))
            self._stop()
        return False

    def _advance_text(self, events: list[Event]) -> bool:
        ends = _TEXT_ENDS[self._state]
        # of two that end together the longer: the one with the blank line
        found = [(at + len(end), at, end) for end in ends if (at := self._held.find(end)) >= 0]
        if found:
            _, cut, marker = min(found)
        else:
            cut, marker = len(self._held) - max(overlap(self._held, end) for end in ends), ""
        if cut:
            events.append(self._as_text(self._held[:cut]))
        if marker == EOS:
            self._stop()
        elif marker == THINK_END:
            self._go("content", cut + len(marker))
        elif marker:
            self._go("block", cut + len(marker) - len(marker.lstrip()))
        else:
            self._held = self._held[cut:]
        return bool(found)

    def _advance_block(self) -> bool:
        if self._held.startswith(_CALLS):
            self._go("calls", len(_CALLS))
            return True
        if _CALLS.startswith(self._held):
            return False
        self._go("broken", 0)
        return True

    def _advance_calls(self, events: list[Event]) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(_CALLS_END):
            self._go("content", len(_CALLS_END))
            return True
        if self._held.startswith(_INVOKE):
            end, marker = self._find(_CALL_ENDS)
            if end < 0:
                return False
            call = _parse_call(self._held[:end]) if marker == _INVOKE_END else None
            if call is not None:
                events.append(call)
                self._go("calls", end + len(marker))
                return True
        elif _CALLS_END.startswith(self._held) or _INVOKE.startswith(self._held):
            return False
        self._go("broken", 0)
        return True

    def _find(self, markers: Sequence[str]) -> tuple[int, str]:
        """Return the first of `markers` and its place, or -1; what was searched is not searched again."""
        found = [
            (at, marker)
            for marker in markers
            if (at := self._held.find(marker, self._searched)) >= 0
        ]
        if found:
            return min(found)
        self._searched = max(0, len(self._held) - max(map(len, markers)) + 1)
        return -1, ""

    def _go(self, state: Literal["content", "block", "calls", "broken"], used: int) -> None:
        self._state, self._held, self._searched = state, self._held[used:], 0

    def _stop(self) -> None:
        self._held, self.is_stopped = "", True

    def _as_text(self, text: str) -> Reasoning | Content:
        return Reasoning(text) if self._state == "reasoning" else Content(text)


def _parse_call(markup: str) -> ToolCall | None:
    """Return the call from its opening tag to its last parameter, None if it is not in the model's form."""
    form = _INVOKE_FORM.fullmatch(markup)
    if form is None:
        return None
    name, body = form.groups()
    arguments: dict[str, Any] = {}
    at = len(body) - len(body.lstrip())
    while at < len(body):
        parameter = _PARAMETER.match(body, at)
        if parameter is None or parameter[1] in arguments:
            return None
        try:
            value = parameter[3] if parameter[2] == "true" else _from_json(parameter[3])
        except (ValueError, RecursionError):
            return None
        arguments[parameter[1]] = value
        at = parameter.end()
    return ToolCall(name, arguments)


def parse_answer(text: str, thinking: bool) -> tuple[str, str, list[ToolCall]]:
    """Return (reasoning, content, tool calls) of a whole answer. Raises UserError for a broken tool block."""
    parser = AnswerParser(thinking)
    events = parser.push(text) + parser.finish()
    broken = next((event for event in events if isinstance(event, BrokenCall)), None)
    if broken is not None:
        raise UserError(
            f"the answer's tool block is cut off or not in the model's form at {broken.markup!r:.80}",
            "raise max_tokens, or ask again",
        )
    return (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
        [event for event in events if isinstance(event, ToolCall)],
    )
