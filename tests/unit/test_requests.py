"""Bodies of requests without HTTP: what is accepted, what is refused and by which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ContextLengthError
from runtime.server.errors import ApiError
from runtime.server.messages import parse_messages
from runtime.server.requests import (
    ModelIds,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)

HELLO = [{"role": "user", "content": "Hello"}]
MODELS = ModelIds("tiny", can_think=True)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parse(models=MODELS, **fields: Any):
    return parse_chat(json.dumps({"messages": HELLO, **fields}).encode(), models)


def complete(**fields: Any):
    return parse_completion(json.dumps({"prompt": "Once", **fields}).encode(), MODELS)


def test_null_is_the_same_as_leaving_out():
    fields = ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "tools", "n")
    assert parse(**dict.fromkeys(fields)) == parse()


def test_unknown_fields_are_ignored():
    assert parse(metadata={"a": 1}, user="me", store=True, service_tier="auto") == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": "true"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": "x"}, "seed"),
        ({"stop": 7}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "reasoning_effort": "low"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs"),
        ({"stop": "\ud800"}, "stop"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages"),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1"}]}, *HELLO]},
            "messages[1].tool_calls[0]",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["param"] == param


def test_neutral_values_of_unsupported_fields_pass():
    assert (
        parse(
            n=1,
            tools=[],
            logprobs=False,
            response_format={"type": "text"},
            logit_bias={},
            tool_choice="none",
        )
        == parse()
    )


def test_another_model_is_404_unless_any_name_is_welcome():
    with pytest.raises(ApiError, match="known: tiny, tiny-thinking") as caught:
        parse(model="gpt-4o")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    welcome = ModelIds("tiny", can_think=True, is_strict=False)
    assert parse(welcome, model="gpt-4o").model == "gpt-4o"
    assert parse(welcome, model="tiny-thinking").options.thinking


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"7", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"a":' * 99 + b"1" + b"}" * 99],
)
def test_bodies_that_are_no_object_are_400(raw: bytes):
    with pytest.raises(ApiError) as caught:
        parse_chat(raw, MODELS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "model",
                "messages",
                "stop",
                "stream",
                "stream_options",
                "max_tokens",
                "top_p",
                "n",
                "tools",
                "tool_choice",
                "logprobs",
                "thinking",
                "chat_template_kwargs",
                "reasoning_effort",
            ]
        ),
        json_values | st.just(HELLO),
    )
)
def test_no_body_ends_in_anything_but_an_api_error(body: dict[str, Any]):
    error: ApiError | None = None
    try:
        parse_chat(json.dumps(body).encode(), MODELS)
    except ApiError as caught:
        error = caught
    assert error is None or (400 <= error.status < 500 and json.dumps(error.body()))


def test_the_new_name_of_the_limit_wins_and_minus_one_is_no_limit():
    assert parse(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert parse(max_tokens=-1).max_tokens is None


def test_system_messages_are_merged_to_the_front_in_order():
    merged = parse_messages(
        [
            {"role": "system", "content": "A"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": None},
            {
                "role": "developer",
                "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}],
            },
            {"role": "user", "content": []},
        ]
    )
    assert merged == [
        {"role": "system", "content": "A\n\nBC"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_a_prompt_over_the_window_says_so_in_the_words_that_clients_look_for():
    error = ApiError.of(ContextLengthError(5000, 4096)).body()["error"]
    assert error["message"].startswith(
        "This model's maximum context length is 4096 tokens. However, "
    )
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == (
        "context_length_exceeded",
        5000,
        4096,
    )


def test_an_unexpected_error_gives_no_details_away():
    error = ApiError.of(RuntimeError("/secret/path"))
    assert error.headers == {"x-should-retry": "false"}
    assert error.status == 500
    assert "/secret" not in json.dumps(error.body())


# ---- thinking --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "fields", "thinking", "effort"),
    [
        ("tiny", {}, False, None),
        ("tiny-thinking", {}, True, None),
        ("tiny", {"reasoning_effort": "low"}, True, "low"),
        ("tiny-thinking", {"reasoning_effort": "none"}, False, None),
        ("tiny-thinking", {"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ("tiny", {"chat_template_kwargs": {"thinking": True}}, True, None),
        ("tiny", {"thinking": {"type": "enabled"}}, True, None),
        ("tiny-thinking", {"thinking": {"type": "disabled"}}, False, None),
        ("tiny-thinking", {"thinking": {"type": "auto"}}, True, None),
        ("tiny-thinking", {"reasoning_effort": "high"}, True, "high"),
        ("tiny-thinking", {"chat_template_kwargs": {"reasoning_effort": "max"}}, True, "max"),
    ],
)
def test_the_model_id_says_whether_to_think_and_the_request_overrules_it(
    model: str, fields: dict[str, Any], thinking: bool, effort: str | None
):
    options = parse(model=model, **fields).options
    assert (options.thinking, options.effort) == (thinking, effort)


def test_a_model_without_thinking_has_one_id_and_says_so():
    plain = ModelIds("tiny", can_think=False)
    assert plain.all == ("tiny",)
    assert not parse(plain, reasoning_effort="none").options.thinking
    for fields in ({"reasoning_effort": "low"}, {"thinking": {"type": "enabled"}}):
        with pytest.raises(ApiError, match="no thinking mode"):
            parse(plain, **fields)
    with pytest.raises(ApiError) as caught:
        parse(plain, model="tiny-thinking")
    assert caught.value.status == 404


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_tools_are_offered_unless_the_choice_is_none():
    assert parse(tools=[TOOL]).options.tools == (TOOL,)
    assert parse(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True).options.tools == (
        TOOL,
    )
    assert parse(tools=[TOOL], tool_choice="none").options.tools == ()
    assert parse(tools=[TOOL]).forced is None
    assert parse(tools=[TOOL], tool_choice="required").forced == ""
    named = {"type": "function", "function": {"name": "f"}}
    assert parse(tools=[TOOL], tool_choice=named).forced == "f"


def called(call_id: str, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_calls_and_their_results_in_the_conversation():
    messages = parse_messages(
        [
            *HELLO,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [called("a", '{"x": 1}'), called("b")],
            },
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "B"}]},
            {"role": "tool", "tool_call_id": "unknown", "content": "A"},
        ]
    )
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert messages[1]["content"] == ""
    assert [m["tool_call_id"] for m in messages[2:]] == ["b", "a"]
    assert [m["content"] for m in messages[2:]] == ["B", "A"]


@pytest.mark.parametrize("arguments", ["{", "[]", "7", 7, '"x"'])
def test_arguments_that_are_no_object_are_refused_by_place(arguments: Any):
    messages = [*HELLO, {"role": "assistant", "tool_calls": [called("a", arguments)]}, *HELLO]
    with pytest.raises(ApiError, match=r"messages\[1\]\.tool_calls\[0\]"):
        parse_messages(messages)


def test_a_think_block_in_the_content_is_reasoning_again():
    answer = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nbecause"}
    found = parse_messages([*HELLO, answer, *HELLO])[1]
    assert (found["content"], found["reasoning_content"]) == ("because", "why")
    given = {"role": "assistant", "content": "because", "reasoning_content": "why"}
    assert parse_messages([*HELLO, given, *HELLO])[1] == found


# ---- text completions and tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "found"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ("", "")],
)
def test_prompts(prompt: Any, found: Any):
    assert complete(prompt=prompt).prompt == found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_completions_that_cannot_be_done_are_refused_by_name(fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as caught:
        complete(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_what_is_to_be_counted():
    asked = parse_tokenize(
        json.dumps({"prompt": "x", "add_special_tokens": False}).encode(), MODELS
    )
    assert (asked.prompt, asked.messages, asked.adds_start) == ("x", None, False)
    body = {"messages": HELLO, "model": "tiny-thinking", "tools": [TOOL]}
    asked = parse_tokenize(json.dumps(body).encode(), MODELS)
    assert (asked.messages, asked.options.thinking, asked.options.tools) == (HELLO, True, (TOOL,))
    for body in ({}, {"prompt": "x", "messages": HELLO}, {"prompt": 7}):
        with pytest.raises(ApiError):
            parse_tokenize(json.dumps(body).encode(), MODELS)
    assert parse_detokenize(b'{"tokens": [0, 4]}', MODELS, 5) == [0, 4]
    with pytest.raises(ApiError, match=r"tokens\[0\] is no token id"):
        parse_detokenize(b'{"tokens": [5]}', MODELS, 5)
