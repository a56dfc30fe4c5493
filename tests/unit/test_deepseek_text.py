"""Prompts of DeepSeek-V4.1-Flash as exact strings, answers cut into pieces everywhere, and what is refused."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.deepseek_text import (
    DSML,
    MARKERS,
    STOP_IDS,
    AnswerParser,
    BrokenCall,
    Content,
    Reasoning,
    ToolCall,
    ToolsBlock,
    encode_messages,
    parse_answer,
    read_tools_block,
)
from runtime.errors import UserError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
EFFORT_75 = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
BLOCK = ToolsBlock("## Tools\n\nBefore\n\n", "\n\nAfter\n")
CALLS = """

<｜DSML｜ calls>
<｜DSML｜ invoke name="TOOL">
<｜DSML｜ parameter name="P" string="true">raw text</｜DSML｜ parameter>
<｜DSML｜ parameter name="Q" string="false">{"a": [1, null]}</｜DSML｜ parameter>
</｜DSML｜ invoke>
</｜DSML｜ calls>"""


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, reasoning=None, calls=()):
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning}
    return {**message, "tool_calls": list(calls)}


def call(call_id, name="TOOL", arguments="{}"):
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def result(text, call_id=None):
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, **more}}


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_markers():
    """The characters of the markers: bars are U+FF5C, the line is U+2581; the end of sentence is the only stop."""
    assert BOS == "<\uff5cbegin\u2581of\u2581sentence\uff5c>" == MARKERS[0]
    assert EOS == "<\uff5cend\u2581of\u2581sentence\uff5c>" == MARKERS[1]
    assert MARKERS[2] == "<\uff5c\u2581pad\u2581\uff5c>"
    assert DSML == "\uff5cDSML\uff5c"
    assert len(set(MARKERS)) == 17
    assert {1} == STOP_IDS


@pytest.mark.parametrize(
    ("messages", "thinking", "prompt"),
    [
        pytest.param([user("q")], False, f"{BOS}<｜User｜>q<｜Assistant｜></think>", id="chat"),
        pytest.param(
            [system("sys"), user("q")], False,
            f"{BOS}<｜System｜>sys<｜User｜>q<｜Assistant｜></think>", id="chat, system",
        ),
        pytest.param(
            [user("q")], True,
            f"{BOS}<｜System｜>{EFFORT_75}<｜User｜>q<｜Assistant｜><think>", id="thinking, no system",
        ),
        pytest.param(
            [system("sys"), user("q")], True,
            f"{BOS}<｜System｜>{EFFORT_75}sys<｜User｜>q<｜Assistant｜><think>", id="thinking, system",
        ),
        pytest.param(
            [user("q"), assistant("a", "r")], False,
            f"{BOS}<｜User｜>q<｜Assistant｜></think>a{EOS}", id="finished turn, chat",
        ),
        pytest.param(
            [user("q"), assistant("a", "r")], True,
            f"{BOS}<｜System｜>{EFFORT_75}<｜User｜>q<｜Assistant｜><think>r</think>a{EOS}",
            id="finished turn, kept",
        ),
        pytest.param(
            [user("q"), assistant("a", "r"), user("p")], True,
            f"{BOS}<｜System｜>{EFFORT_75}<｜User｜>q<｜Assistant｜></think>a{EOS}<｜User｜>p<｜Assistant｜><think>",
            id="earlier turn, dropped",
        ),
        pytest.param(
            [user("q"), assistant("a", "r"), system("now")], True,
            f"{BOS}<｜System｜>{EFFORT_75}<｜User｜>q<｜Assistant｜></think>a{EOS}"
            "<｜System｜>now<｜Assistant｜><think>",
            id="later system",
        ),
        pytest.param(
            [user("q"), system("now"), user("p")], False,
            f"{BOS}<｜User｜>q<｜System｜>now<｜User｜>p<｜Assistant｜></think>",
            id="later system before a user",
        ),
        pytest.param(
            [system(""), user("one"), user("two")], False,
            f"{BOS}<｜System｜><｜User｜>one\n\ntwo<｜Assistant｜></think>", id="merged users",
        ),
    ],
)  # fmt: skip
def test_prompt(messages, thinking, prompt):
    assert encode_messages(messages, thinking) == prompt


@pytest.mark.parametrize(
    ("effort", "number"),
    [("low", 50), ("high", 75), ("max", 100), (None, 75), (1, 1), (62, 62), (100, 100)],
)
def test_effort(effort, number):
    expected = f"{BOS}<｜System｜>{EFFORT_75.replace('75', str(number), 1)}s<｜User｜>q<｜Assistant｜><think>"
    assert encode_messages([system("s"), user("q")], True, effort) == expected
    assert "Effort" not in encode_messages([system("s"), user("q")], False, effort)


def test_reasoning_kept_on_request():
    messages = [user("q"), assistant("a", "r"), user("p")]
    kept = encode_messages(messages, True, drop_reasoning=False)
    assert "<｜Assistant｜><think>r</think>a" in kept


def test_reasoning_after_the_last_question_is_kept():
    """An answer without reasoning has empty reasoning, not none; an earlier one has none."""
    messages = [user("q"), assistant("a", "r"), user("p"), assistant("b")]
    assert encode_messages(messages, True).endswith(
        f"<｜Assistant｜></think>a{EOS}<｜User｜>p<｜Assistant｜><think></think>b{EOS}"
    )


@pytest.mark.parametrize("thinking", [False, True])
def test_snapshot_at_the_assistant_header(thinking):
    """The prompts before and after an answer share all up to the header, where a saved state can be used again."""
    before = encode_messages([user("q")], thinking)
    after = encode_messages([user("q"), assistant("a", "r"), user("p")], thinking)
    shared = before[: before.rindex("<｜Assistant｜>") + len("<｜Assistant｜>")]
    assert after.startswith(shared)


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_tool_definitions():
    """One JSON object per line at the end of the system text, letters as they are."""
    tools = [tool("f", description="ищет"), tool("ns::g", parameters={"type": "object"})]
    schemas = (
        '{"name": "f", "description": "ищет"}\n{"name": "ns::g", "parameters": {"type": "object"}}'
    )
    definitions = f"\n\n## Tools\n\nBefore\n\n{schemas}\n\nAfter\n"
    chat = encode_messages([system("sys"), user("q")], False, tools=tools, tools_block=BLOCK)
    assert chat == f"{BOS}<｜System｜>sys{definitions}<｜User｜>q<｜Assistant｜></think>"
    empty = encode_messages([user("q")], False, tools=tools, tools_block=BLOCK)
    assert empty == f"{BOS}<｜System｜>{definitions}<｜User｜>q<｜Assistant｜></think>"
    thinking = encode_messages([user("q")], True, tools=tools, tools_block=BLOCK)
    assert thinking == f"{BOS}<｜System｜>{EFFORT_75}{definitions}<｜User｜>q<｜Assistant｜><think>"


def test_no_tools_is_no_block():
    assert encode_messages([user("q")], False, tools=[]) == encode_messages([user("q")], False)


def test_tools_keep_all_reasoning():
    messages = [user("q"), assistant("a", "r"), user("p")]
    prompt = encode_messages(messages, True, tools=[tool("f")], tools_block=BLOCK)
    assert prompt.endswith(
        f"<｜User｜>q<｜Assistant｜><think>r</think>a{EOS}<｜User｜>p<｜Assistant｜><think>"
    )


@pytest.mark.parametrize("as_text", [False, True])
def test_tool_call_and_result(as_text):
    arguments = {"P": "raw text", "Q": {"a": [1, None]}}
    calls = [call("1", arguments=json.dumps(arguments) if as_text else arguments)]
    messages = [user("q"), assistant("a", None, calls), result("done", "1")]
    assert encode_messages(messages, False) == (
        f"{BOS}<｜User｜>q<｜Assistant｜></think>a{CALLS}{EOS}"
        "<｜User｜><tool_result>done</tool_result><｜Assistant｜></think>"
    )


def test_call_without_text_and_parameters():
    prompt = encode_messages([user("q"), assistant(None, None, [call("1", "ns::f")])], False)
    assert prompt.endswith(
        '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="ns::f">\n\n</｜DSML｜ invoke>\n'
        f"</｜DSML｜ calls>{EOS}"
    )


def test_results_follow_the_calls():
    """Results are ordered like the calls, in the places of the tool messages; the question after them stays last."""
    calls = [call("x"), call("y"), call("z")]
    answers = [result("Z", "z"), result("X", "x"), user("so?"), result("Y", "y")]
    prompt = encode_messages([user("q"), assistant("", None, calls), *answers], False)
    assert prompt.endswith(
        "<｜User｜><tool_result>X</tool_result>\n\n<tool_result>Y</tool_result>\n\nso?\n\n"
        "<tool_result>Z</tool_result><｜Assistant｜></think>"
    )


def test_a_single_call_needs_no_id():
    prompt = encode_messages([user("q"), assistant("", None, [call(None)]), result("R")], False)
    assert prompt.endswith("<｜User｜><tool_result>R</tool_result><｜Assistant｜></think>")


ENCODER = '''
"""A stand-in for the snapshot's file."""
raise RuntimeError("run")
T = """## Tools

Write <{dsml_token}{tc_block_name}> with {{braces}} after {thinking_end_token}.

{tool_schemas}

The end.
"""
'''


def test_tools_block_of_the_encoder():
    assert read_tools_block(ENCODER) == ToolsBlock(
        "## Tools\n\nWrite <｜DSML｜ calls> with {braces} after </think>.\n\n", "\n\nThe end.\n"
    )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "0 tool blocks"),
        (ENCODER + ENCODER, "2 tool blocks"),
        (ENCODER.replace("{tool_schemas}", ""), "0 places"),
        (ENCODER.replace("{tc_block_name}", "{other}"), "unknown field 'other'"),
        (ENCODER.replace("{{braces}}", "{"), "cannot be read"),
        ("def", "cannot be read"),
    ],
)
def test_tools_block_refused(source, says):
    with pytest.raises(UserError, match=says):
        read_tools_block(source)


# ---- refusals --------------------------------------------------------------------------------------------------------

QUESTION = user("q")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "nothing to answer"),
        ([system("s")], "nothing to answer"),
        ([{"role": "developer", "content": "x"}], r"messages\[0\] has the role 'developer'"),
        ([{"content": "x"}], "has the role None"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content is not text"),
        ([QUESTION, assistant("a", 5)], "reasoning_content is not text"),
        ([QUESTION, result("r", "1")], "called no tool"),
        ([QUESTION, assistant("a"), result("r", "1")], "called no tool"),
        ([QUESTION, assistant("", None, [call("1"), call("2")]), result("r")], "None is none of the 2"),
        ([QUESTION, assistant("", None, [call("1")]), result("r", "9")], "'9' is none of the 1"),
        ([QUESTION, assistant("", None, [call("1")]), result("r", "1"), result("r", "1")], "a second time"),
        ([QUESTION, assistant("", None, [call("1", arguments="{")])], "not JSON"),
        ([QUESTION, assistant("", None, [call("1", arguments='{"a": NaN}')])], "not JSON"),
        ([QUESTION, assistant("", None, [call("1", arguments="[]")])], "no JSON object"),
        ([QUESTION, assistant("", None, [call("1", arguments=None)])], "no JSON object"),
        ([QUESTION, assistant("", None, [call("1", 'a"b')])], "cannot be a name"),
        ([QUESTION, assistant("", None, [call("1", "f", {"": 1})])], "cannot be a name"),
        ([QUESTION, assistant("", None, [{"id": "1"}])], "has no function"),
        ([QUESTION, assistant("", None, ["f"])], "has no function"),
        ([QUESTION, {**assistant(""), "tool_calls": 5}], "tool_calls is no list"),
    ],
)  # fmt: skip
def test_messages_refused(messages, says):
    with pytest.raises(UserError, match=says) as refusal:
        encode_messages(messages, True)
    assert refusal.value.hint


@pytest.mark.parametrize("effort", ["medium", "", "75", 0, 101, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_effort_refused(effort, thinking):
    with pytest.raises(UserError, match=r"effort .* is unknown"):
        encode_messages([QUESTION], thinking, effort)


def test_tools_refused():
    with pytest.raises(UserError, match="own tool block"):
        encode_messages([QUESTION], False, tools=[tool("f")])
    for bad in ({}, {"function": {}}, {"function": "f"}):
        with pytest.raises(UserError, match=r"tools\[0\] is not a function"):
            encode_messages([QUESTION], False, tools=[bad], tools_block=BLOCK)


@pytest.mark.parametrize("marker", MARKERS)
def test_typed_markers_refused(marker):
    """Also where JSON hides the marker behind escapes."""
    typed = f"a{marker}b"
    hidden = json.dumps({"x": typed})
    for messages in (
        [system(typed), QUESTION],
        [user(typed)],
        [QUESTION, assistant(typed)],
        [QUESTION, assistant("", typed)],
        [QUESTION, assistant("", None, [call("1")]), result(typed, "1")],
        [QUESTION, assistant("", None, [call("1", arguments=hidden)])],
        [QUESTION, assistant("", None, [call("1", arguments=f'{{"x": [{hidden}]}}')])],
        [QUESTION, assistant("", None, [call("1", typed)])],
    ):
        with pytest.raises(UserError, match="control token"):
            encode_messages(messages, True)
    with pytest.raises(UserError, match="control token"):
        encode_messages([QUESTION], True, tools=[tool("f", description=typed)], tools_block=BLOCK)


# ---- answers ---------------------------------------------------------------------------------------------------------


def parsed(pieces, thinking):
    """Return the events of an answer, neighbouring text joined, and whether the parser saw the end of sentence."""
    parser = AnswerParser(thinking)
    events = [event for piece in pieces for event in parser.push(piece)]
    is_stopped = parser.is_stopped
    joined = []
    for event in [*events, *parser.finish()]:
        if isinstance(event, Reasoning | Content) and joined and type(joined[-1]) is type(event):
            event = type(event)(joined.pop().text + event.text)
        joined.append(event)
    return joined, is_stopped


TOOL = ToolCall("TOOL", {"P": "raw text", "Q": {"a": [1, None]}})
UNCLOSED = CALLS.removesuffix("</｜DSML｜ calls>")
BROKEN_TAG = "<｜DSML｜tool_calls>\n<｜DSML｜invoke"


@pytest.mark.parametrize(
    ("text", "thinking", "events"),
    [
        ("a", False, [Content("a")]),
        ("", False, []),
        ("", True, []),
        (f"a{EOS}", False, [Content("a")]),
        (f"a{EOS}b", False, [Content("a")]),
        ("r</think>a", True, [Reasoning("r"), Content("a")]),
        ("</think>a", True, [Content("a")]),
        ("r", True, [Reasoning("r")]),
        (f"r{EOS}</think>a", True, [Reasoning("r")]),
        ("a < b </thin", True, [Reasoning("a < b </thin")]),
        ("a\n\nb\n\n", False, [Content("a\n\nb\n\n")]),
        (f"a{CALLS}", False, [Content("a"), TOOL]),
        (f"a{CALLS}{EOS}", False, [Content("a"), TOOL]),
        (f"a\n{CALLS}{EOS}", False, [Content("a\n"), TOOL]),
        (f"r</think>{CALLS}{EOS}", True, [Reasoning("r"), TOOL]),
        (CALLS.strip(), False, [TOOL]),
        (CALLS.replace("\n", ""), False, [TOOL]),
        (CALLS + "b" + CALLS, False, [TOOL, Content("b"), TOOL]),
        (f"r{CALLS}</think>a", True, [Reasoning(f"r{CALLS}"), Content("a")]),
        # not in the model's form
        (f"a\n\n{BROKEN_TAG}{EOS}", False, [Content("a"), BrokenCall(BROKEN_TAG)]),
        (CALLS[:-5], False, [TOOL, BrokenCall("</｜DSML｜ c")]),
        (UNCLOSED + EOS, False, [TOOL, BrokenCall("")]),
        (UNCLOSED, False, [TOOL, BrokenCall("")]),
        ("a\n\n<｜DSML｜ ", False, [Content("a"), BrokenCall("<｜DSML｜ ")]),
        ("a</｜DSML｜ calls>", False, [Content("a"), BrokenCall("</｜DSML｜ calls>")]),
        ("<｜DSML｜ calls>no", False, [BrokenCall("no")]),
    ],
)
def test_answer(text, thinking, events):
    expected = events, EOS in text
    assert parsed([text], thinking) == expected
    assert parsed(list(text), thinking) == expected


def invoke(body, name="f"):
    return f'<｜DSML｜ invoke name="{name}">{body}</｜DSML｜ invoke>'


def parameter(value, form="true", name="p"):
    return f'<｜DSML｜ parameter name="{name}" string="{form}">{value}</｜DSML｜ parameter>'


@pytest.mark.parametrize(
    "call_text",
    [
        invoke("text"),
        invoke(parameter("x") + "text"),
        invoke(parameter("{", "false")),
        invoke(parameter("", "false")),
        invoke(parameter("NaN", "false")),
        invoke(parameter("[" * 100_000, "false")),
        invoke(parameter("x", "maybe")),
        invoke(parameter("x") + parameter("y")),
        invoke(parameter("x", name="")),
        invoke("", name=""),
        '<｜DSML｜ invoke name="f" </｜DSML｜ invoke>',
        '<｜DSML｜ invoke name="f"></｜DSML｜ calls>',
    ],
)
def test_broken_call(call_text):
    """The call before it is given out; the broken one and all after it come as they stand."""
    good = invoke(parameter("1", "false"))
    text = f"<｜DSML｜ calls>\n{good}\n{call_text}\n</｜DSML｜ calls>"
    broken = BrokenCall(f"{call_text}\n</｜DSML｜ calls>")
    assert parsed([text, EOS], False) == ([ToolCall("f", {"p": 1}), broken], True)
    with pytest.raises(UserError, match="cut off or not in the model's form"):
        parse_answer(text, False)


def test_text_leaves_at_once():
    """What cannot begin a marker is not held back."""
    parser = AnswerParser(True)
    assert parser.push("so ") == [Reasoning("so ")]
    assert parser.push("a <") == [Reasoning("a ")]
    assert parser.push(" b") == [Reasoning("< b")]
    assert parser.push("</think>yes\n") == [Content("yes")]
    assert parser.push("\n") == []
    assert parser.push("no") == [Content("\n\nno")]
    assert parser.push(UNCLOSED) == [TOOL]
    assert parser.push("</｜DSML｜ calls>") == []
    assert not parser.is_stopped
    assert parser.push(f"{EOS}more") == []
    assert parser.is_stopped
    assert parser.push("more") == parser.finish() == []


def test_parse_answer():
    assert parse_answer(f"r</think>a{CALLS}{EOS}", True) == ("r", "a", [TOOL])
    assert parse_answer("a", False) == ("", "a", [])
    assert parse_answer("r", True) == ("r", "", [])


def cut(text, places):
    at = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(at)]


PIECES = st.sampled_from(
    [
        "a", " ", "\n", "\n\n", "<", "</", EOS, "<think>", "</think>", "<｜", DSML, f"<{DSML}", f"</{DSML}",
        f"<{DSML} calls>", f"</{DSML} calls>", f'<{DSML} invoke name="f">', f"</{DSML} invoke>", CALLS,
        invoke(parameter("x")), parameter("[1]", "false", "q"), parameter("{", "false"),
    ]
)  # fmt: skip


@given(
    parts=st.lists(PIECES, max_size=12),
    places=st.lists(st.integers(0, 2000), max_size=20),
    thinking=st.booleans(),
)
def test_events_do_not_depend_on_the_cuts(parts, places, thinking):
    text = "".join(parts)
    whole = parsed([text], thinking)
    assert parsed(cut(text, places), thinking) == whole
    assert parsed(list(text), thinking) == whole


def is_plain(text):
    return not any(marker in text for marker in MARKERS)


words = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    | st.sampled_from(["\n\n", "a\n", "\n\n\n", "<", "</", "<｜", "a </"])
).filter(is_plain)


@given(text=words, end=st.sampled_from([EOS, "</think>", CALLS]), thinking=st.booleans())
def test_no_beginning_of_a_marker_leaves(text, end, thinking):
    """Wherever the marker after a text is cut, nothing of it has left as text."""
    if end == ("</think>", CALLS)[thinking]:
        return  # no marker in this state
    for n in range(len(end)):
        parser = AnswerParser(thinking)
        events = parser.push(text + end[:n])
        left = "".join(e.text for e in events if isinstance(e, Reasoning | Content))
        assert text.startswith(left)


names = words.filter(lambda text: text and '"' not in text)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
tool_calls = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=3)), max_size=3)


@given(content=words, reasoning=words, calls=tool_calls, thinking=st.booleans())
def test_encode_then_parse(content, reasoning, calls, thinking):
    """What encode_messages writes for an assistant's turn, the parser reads back."""
    header = encode_messages([QUESTION], thinking)
    message = assistant(content, reasoning, [call(str(i), *c) for i, c in enumerate(calls)])
    prompt = encode_messages([QUESTION, message], thinking)
    assert prompt.startswith(header)
    assert parse_answer(prompt[len(header) :], thinking) == (
        reasoning if thinking else "", content, [ToolCall(*c) for c in calls],
    )  # fmt: skip


@given(texts=st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_each_prompt_continues_the_last_with_tools(texts):
    """With tools nothing is dropped, so an answer and the next question only add to what was read."""
    messages, before = [], ""
    for question, answer in texts:
        messages.append(user(question))
        prompt = encode_messages(messages, True, tools=[tool("f")], tools_block=BLOCK)
        assert prompt.startswith(before)
        messages.append(assistant(answer, "r"))
        before = f"{prompt}r</think>{answer}{EOS}"
