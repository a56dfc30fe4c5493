"""Answers of the Qwen3.8 family, cut into pieces everywhere, and what a parser makes of damage."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.answers import BrokenCall, Content, Reasoning, ToolCall
from runtime.qwen_text import QwenParser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
]
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
CALLED = ToolCall("weather", {"city": "12", "days": 3})
EMPTY = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


def parsed(pieces, thinking=False):
    """Return the events of an answer in pieces, neighbours of text joined."""
    parser, events = QwenParser(thinking, TOOLS), []
    for piece in pieces:
        events += parser.push(piece)
    joined = []
    for event in events + parser.finish():
        kind = type(event)
        if joined and kind in (Reasoning, Content) and isinstance(joined[-1], kind):
            joined[-1] = kind(joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


CASES = [
    pytest.param("Hi.\n\nYou", False, [Content("Hi.\n\nYou")], id="plain"),
    pytest.param("why\n</think>\n\nHi", True, [Reasoning("why"), Content("Hi")], id="thinking"),
    pytest.param("cut off in the mid", True, [Reasoning("cut off in the mid")], id="cut thinking"),
    pytest.param("a\n\nb</think>", True, [Reasoning("a\n\nb")], id="no answer"),
    pytest.param("\n</think>\n\nHi\n", True, [Content("Hi\n")], id="empty reasoning"),
    pytest.param("Look:\n\n" + CALL, False, [Content("Look:"), CALLED], id="text and a call"),
    pytest.param(
        f"r\n</think>\n\n{CALL}\n{EMPTY}", True,
        [Reasoning("r"), CALLED, ToolCall("now", {})], id="two calls",
    ),
    pytest.param(f"{EMPTY}\nDone", False, [ToolCall("now", {}), Content("Done")], id="text after"),
    pytest.param(CALL[:-5], False, [BrokenCall(CALL[11:-5])], id="cut call"),
    pytest.param("x<tool_call>junk</tool_call>", False,
                 [Content("x"), BrokenCall("junk</tool_call>")], id="no call"),
    pytest.param("<think>\nr\n</think>\n\na", False, [Reasoning("r"), Content("a")], id="unasked"),
    pytest.param("</think>\n\na", False, [Content("a")], id="stray end"),
    pytest.param("a < b <tool", False, [Content("a < b <tool")], id="not yet a marker"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "thinking", "events"), CASES)
def test_an_answer_in_two_pieces_at_every_place(text, thinking, events):
    assert parsed([text], thinking) == events
    assert parsed(text, thinking) == events
    for cut in range(len(text)):
        assert parsed([text[:cut], text[cut:]], thinking) == events


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, EMPTY, "\n"])
        | st.text("<>/tolcahink_ \n", max_size=6),
        max_size=8,
    ),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    thinking=st.booleans(),
)
def test_cuts_never_show_and_markup_never_leaves(parts, cuts, thinking):
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    found = parsed([text[a:b] for a, b in pairwise(places)], thinking)
    assert found == parsed([text], thinking)
    for event in found:
        if isinstance(event, Content):
            assert not any(m in event.text for m in ("<think>", "</think>", "<tool_call>"))


def test_values_follow_the_schema_and_are_json_otherwise():
    body = '<parameter=a>\n{"x": [1]}\n</parameter>\n<parameter=b>\nNaN\n</parameter>\n'
    call = f"<tool_call>\n<function=other>\n{body}</function>\n</tool_call>"
    assert parsed([call]) == [ToolCall("other", {"a": {"x": [1]}, "b": "NaN"})]
    json.dumps(parsed([call])[0].arguments, allow_nan=False)
