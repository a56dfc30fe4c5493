"""Answers as bodies and frames: the shapes that clients' libraries rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.answers import BrokenCall, Content, Reasoning, ToolCall
from runtime.server.replies import (
    Alternative,
    ChatAnswer,
    CompletionAnswer,
    ReplyOptions,
    TokenLogprobs,
    Usage,
)

USAGE = Usage(3, 1, 2, 1)
CALLS = [ToolCall("f", {}), ToolCall("g", {"x": "ё"})]


def options(**more: Any) -> ReplyOptions:
    return ReplyOptions("tiny", "fp", **more)


def frames(raw: bytes) -> list[Any]:
    parts = raw.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


@pytest.mark.parametrize("wants_usage", [False, True])
def test_stream_frames(wants_usage: bool):
    answer = ChatAnswer(options(wants_usage=wants_usage))
    raw = answer.first() + answer.parts([Content('a\n\n"б')]) + answer.last("stop", USAGE, {"x": 1})
    got = frames(raw)
    assert got.pop() == "[DONE]"
    if wants_usage:
        usage = got.pop()
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 5
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
        assert all(chunk["usage"] is None for chunk in got)
    else:
        assert all("usage" not in chunk for chunk in got)
    assert [chunk["choices"][0]["delta"] for chunk in got] == [
        {"role": "assistant", "content": ""},
        {"content": 'a\n\n"б'},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None, None, "stop"]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in got}) == 1


def test_reasoning_has_a_field_of_its_own():
    answer = ChatAnswer(options(reasoning_alias=True))
    one, two = frames(answer.parts([Reasoning("r"), Content("c")]))
    assert one["choices"][0]["delta"] == {"reasoning_content": "r", "reasoning": "r"}
    assert two["choices"][0]["delta"] == {"content": "c"}
    body = ChatAnswer(options()).whole([Reasoning("r")], None, "length", USAGE, {})
    message = body["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "r")
    assert body["choices"][0]["finish_reason"] == "length"


def test_calls_in_a_stream():
    answer = ChatAnswer(options(offers_tools=True))
    got = [c["choices"][0]["delta"] for c in frames(answer.parts([Content("a"), *CALLS]))]
    calls = [delta["tool_calls"][0] for delta in got[1:]]
    assert [call["index"] for call in calls] == [0, 0, 1, 1]
    assert [set(call) for call in calls[::2]] == [{"index", "id", "type", "function"}] * 2
    assert [set(call) for call in calls[1::2]] == [{"index", "function"}] * 2
    assert [call["function"]["name"] for call in calls[::2]] == ["f", "g"]
    assert [call["function"]["arguments"] for call in calls] == ["", "{}", "", '{"x": "ё"}']
    assert calls[0]["id"] != calls[2]["id"]
    assert frames(answer.last("stop", USAGE, {}))[0]["choices"][0]["finish_reason"] == "tool_calls"
    assert frames(answer.last("length", USAGE, {}))[0]["choices"][0]["finish_reason"] == "length"


def test_calls_in_a_whole_answer():
    body = ChatAnswer(options(offers_tools=True)).whole(CALLS, None, "stop", USAGE, {})
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [set(call) for call in choice["message"]["tool_calls"]] == [
        {"id", "type", "function"}
    ] * 2
    cut = ChatAnswer(options(offers_tools=True)).whole(
        [Content("a"), BrokenCall("<function=f")], None, "length", USAGE, {}
    )
    assert cut["choices"][0]["message"] == {"role": "assistant", "content": "a"}
    assert cut["choices"][0]["finish_reason"] == "length"


def test_calls_that_nobody_offered_do_not_leave():
    answer = ChatAnswer(options())
    assert answer.parts([*CALLS, BrokenCall("x")]) == b""
    assert frames(answer.last("stop", USAGE, {}))[0]["choices"][0]["finish_reason"] == "stop"
    body = ChatAnswer(options()).whole(CALLS, None, "stop", USAGE, {})
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ""}


def token(text: str, logprob: float) -> TokenLogprobs:
    drawn = Alternative(text, logprob, text.encode())
    return TokenLogprobs(drawn, (drawn, Alternative("z", -9.0, b"z")))


def test_log_probabilities():
    found = [token("а", -0.5), token("b", -1.0)]
    chunk = frames(ChatAnswer(options()).parts([Content("аb")], found))[0]
    first, second = chunk["choices"][0]["logprobs"]["content"]
    assert first["bytes"] == [0xD0, 0xB0]
    assert (second["token"], second["logprob"]) == ("b", -1.0)
    assert [t["token"] for t in second["top_logprobs"]] == ["b", "z"]
    # a token whose text is held back is told all the same
    assert len(frames(ChatAnswer(options()).parts([], found))) == 1
    legacy = CompletionAnswer(options(), echo="12").whole([Content("аb")], found, "stop", USAGE, {})
    assert legacy["object"] == "text_completion"
    assert legacy["choices"][0]["text"] == "12аb"
    told = legacy["choices"][0]["logprobs"]
    assert told["tokens"] == ["а", "b"]
    assert told["text_offset"] == [2, 3]
    assert told["top_logprobs"][1] == {"b": -1.0, "z": -9.0}


def test_text_completion_frames():
    answer = CompletionAnswer(options(), echo="pre")
    got = frames(answer.first() + answer.parts([Content("x")]) + answer.last("length", USAGE, {}))
    assert [c["choices"][0]["text"] for c in got[:-1]] == ["pre", "x", ""]
    assert got[-2]["choices"][0]["finish_reason"] == "length"
    assert CompletionAnswer(options()).first() == b""
