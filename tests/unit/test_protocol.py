"""The chat protocol without HTTP: what is accepted, what is refused and by which words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ContextLengthError
from runtime.server.protocol import ApiError, ChatAnswer, Usage, parse_chat, parse_messages

HELLO = [{"role": "user", "content": "Hello"}]


def parse(**fields: Any):
    return parse_chat(
        json.dumps({"messages": HELLO, **fields}).encode(), "tiny", is_strict_model=True
    )


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
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
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
            frequency_penalty=0,
            presence_penalty=0.0,
            tool_choice="none",
        )
        == parse()
    )


def test_another_model_is_404_unless_any_name_is_welcome():
    with pytest.raises(ApiError, match="known: tiny") as caught:
        parse(model="gpt-4o")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    body = json.dumps({"messages": HELLO, "model": "gpt-4o"}).encode()
    assert parse_chat(body, "tiny", is_strict_model=False).model == "gpt-4o"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b"\xff\xfe", b'"x"', b"[" * 100_000])
def test_bodies_that_are_no_object_are_400(raw: bytes):
    with pytest.raises(ApiError) as caught:
        parse_chat(raw, "tiny", is_strict_model=True)
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
            ]
        ),
        json_values | st.just(HELLO),
    )
)
def test_no_body_ends_in_anything_but_an_api_error(body: dict[str, Any]):
    error: ApiError | None = None
    try:
        parse_chat(json.dumps(body).encode(), "tiny", is_strict_model=True)
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
    assert error.status == 500
    assert "/secret" not in json.dumps(error.body())


def frames(raw: bytes) -> list[Any]:
    parts = raw.decode().split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]


@pytest.mark.parametrize("wants_usage", [False, True])
def test_stream_frames(wants_usage: bool):
    answer = ChatAnswer("tiny", wants_usage)
    got = frames(answer.first() + answer.piece('a\n\n"б') + answer.last("stop", Usage(3, 1, 2)))
    assert got.pop() == "[DONE]"
    if wants_usage:
        usage = got.pop()
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 5
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        assert all(chunk["usage"] is None for chunk in got)
    else:
        assert all("usage" not in chunk for chunk in got)
    assert [chunk["choices"][0]["delta"] for chunk in got] == [
        {"role": "assistant", "content": ""},
        {"content": 'a\n\n"б'},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None, None, "stop"]
    assert (
        len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in got})
        == 1
    )
