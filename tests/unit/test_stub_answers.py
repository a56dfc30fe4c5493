"""The server over a scripted engine: its answers, whole and streamed, with reasoning, calls and kept prefixes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from runtime.drafts.gate import DepthGate
from runtime.drafts.lookup import PromptLookup
from runtime.drafts.passes import Drafting
from runtime.models.deepseek_codec import DeepseekCodec
from tests.unit.stub_server import (
    HELLO,
    StubEngine,
    StubServer,
    frames,
    make_released,
    open_request,
    stream_bytes,
    texts,
)
from tests.waiting import wait_until

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

NAMED = {"type": "function", "function": {"name": "weather"}}

DSML_CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Rome'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def call(city: str) -> str:
    return (
        f"<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n"
        "</tool_call>"
    )


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_a_whole_answer(server, codec):
    answer = server.ask()
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint.startswith("nvmoe-0.1-")
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage.completion_tokens == len(server.engine.script) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.timings["predicted_n"] == usage.completion_tokens


@pytest.mark.parametrize("limit", [None, 3])
def test_joined_deltas_are_the_whole_answer_and_no_character_is_cut(server, engine, codec, limit):
    """Characters over several tokens: whole in both forms; the end inside one is one U+FFFD."""
    text = "naïve 👩🏽‍🚀 家族 ﷽ ok"
    engine.script = codec.encode_plain(text)
    limits = [limit] if limit else [None, *range(1, len(engine.script))]
    for tokens in limits:
        whole = server.ask(max_tokens=tokens).choices[0]
        chunks = list(server.ask(max_tokens=tokens, stream=True))
        assert texts(chunks)[1] == whole.message.content
        assert whole.message.content == codec.decode(engine.script[:tokens])
        assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks[:-3])
        assert whole.finish_reason == ("length" if tokens else "stop")
    assert server.ask().choices[0].message.content == codec.decode(codec.encode_plain(text))


@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [
        (["DEFGHIJ"], "ABC", "stop"),
        (["EFGHX", "HIJ", "FGHIJK", "zz"], "ABCDEFG", "stop"),
        (["B"], "A", "stop"),
        (["GHIX", ""], "ABCDEFGHIJK", "stop"),
        ([], "ABCDEFGHIJK", "stop"),
    ],
)
def test_stop_strings_over_tokens(server, engine, codec, stops, text, reason):
    engine.script = [t for part in ("ABC", "DEF", "G", "HI", "J", "K") for t in codec.encode(part)]
    whole = server.ask(stop=stops).choices[0]
    assert (whole.message.content, whole.finish_reason) == (text, reason)
    chunks = list(server.ask(stop=stops, stream=True))
    assert texts(chunks)[1] == text
    assert chunks[-1].choices[0].finish_reason == reason


@pytest.mark.parametrize(("wants", "extra"), [(None, 0), (False, 0), (True, 1)])
def test_usage_in_a_stream_only_when_it_is_asked_for(server, wants, extra):
    options = {} if wants is None else {"stream_options": {"include_usage": wants}}
    got = frames(stream_bytes(server, **options))
    assert got.pop() == "[DONE]"
    empty = [chunk for chunk in got if not chunk["choices"]]
    assert len(empty) == extra
    if extra:
        assert got[-1] is empty[0]
        assert got[-2]["choices"][0]["finish_reason"] == "stop"
        assert all(chunk["usage"] is None for chunk in got[:-1])
    assert frames(stream_bytes(server, stream_options=None))[-2]["choices"]


def test_log_probabilities(server, engine, codec):
    engine.script = codec.encode_plain("naïve 👩🏽‍🚀")
    whole = server.ask(logprobs=True, top_logprobs=2).choices[0]
    told = whole.logprobs.content
    assert bytes(b for token in told for b in token.bytes).decode() == whole.message.content
    assert all(token.top_logprobs[0].token == token.token for token in told)
    assert all(-0.5 < token.logprob < 0 and len(token.top_logprobs) == 2 for token in told)
    chunks = list(server.ask(logprobs=True, stream=True))
    streamed = [
        token for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content
    ]
    assert [token.bytes for token in streamed] == [token.bytes for token in told]
    assert server.ask().choices[0].logprobs is None


def test_text_completions(server, engine, codec):
    create = server.client().completions.create
    whole = create(model="stub", prompt="Once", max_tokens=4, logprobs=1, stop=["there."])
    assert whole.object == "text_completion"
    assert whole.choices[0].text == codec.decode(engine.script[:4]).partition("there.")[0]
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == len(codec.encode("Once"))
    chunks = list(create(model="stub", prompt=codec.encode("Once"), stream=True, echo=True))
    assert "".join(c.choices[0].text for c in chunks) == "OnceHello there."
    assert chunks[-1].choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="beyond this model's"):
        create(model="stub", prompt=[10**6])
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        create(model="stub", prompt="")


def test_timings_and_progress_in_a_stream_only_on_request(server, engine):
    engine.prefill_s, engine.token_s = 0.8, 0.01
    got = frames(stream_bytes(server, timings_per_token=True, return_progress=True))[:-1]
    timed = [chunk["timings"] for chunk in got[:-1] if "timings" in chunk]
    assert len(timed) == len(engine.script)
    assert all(t["ram_hits"] == 3 and t["misses"] == 1 and t["total_ms"] > 5 for t in timed)
    progress = [chunk["prompt_progress"] for chunk in got if "prompt_progress" in chunk]
    assert progress
    assert progress[-1]["total"] >= progress[-1]["processed"] > 0
    assert "predicted_per_second" in got[-1]["timings"]
    plain = frames(stream_bytes(server))[:-1]
    assert not any("timings" in c or "prompt_progress" in c for c in plain[:-1])


def test_drafts_change_no_answer_and_are_told_in_the_status(codec):
    """Streamed and whole, with a stop string and a limit in the middle of a pass."""
    asked = ({}, {"max_tokens": 7}, {"stop": "six"}, {"stream": True})
    answers = []
    for has_drafts in (False, True):
        engine = StubEngine(codec, "one two three four, one two three four, one two five six seven")
        if has_drafts:
            engine.drafting = Drafting(engine, PromptLookup([2, 1]), "lookup", 3, lambda: 0, DepthGate(3))  # fmt: skip
        with StubServer(engine) as server:
            drafts = server.get("/status").json()["engine"]["drafts"]
            assert (drafts is None) != has_drafts
            answers.append([])
            for fields in asked * 3:
                answer = server.ask(**fields)
                if "stream" in fields:
                    answers[-1].append(texts(answer))
                else:
                    answers[-1].append((answer.choices[0].message.content, answer.usage))
            drafts = server.get("/status").json()["engine"]["drafts"]
    assert answers[0] == answers[1]
    assert (drafts["source"], drafts["depth"]) == ("lookup", 3)
    assert 0 < drafts["accepted"] < drafts["proposed"]
    assert sum(depth["passes"] for depth in drafts["gate"]["depths"]) == drafts["passes"]


# ---- thinking --------------------------------------------------------------------------------------------------------


def test_reasoning_comes_before_the_answer_and_apart_from_it(server, engine):
    engine.script = engine.codec.encode("why not\n</think>\n\nBecause.")
    whole = server.ask(model="stub-thinking", stop=["not"]).choices[0]
    assert whole.message.content == "Because."
    assert whole.message.reasoning_content == "why not"
    chunks = list(server.ask(model="stub-thinking", stream=True))
    assert texts(chunks) == ("why not", "Because.")
    kinds = [
        "r" if getattr(c.choices[0].delta, "reasoning_content", None) else "c" for c in chunks[1:-1]
    ]
    assert kinds == sorted(kinds, reverse=True)
    assert "think" not in "".join(texts(chunks))


def test_a_cut_inside_the_reasoning(server, engine):
    engine.script = engine.codec.encode("a long thought that has no end " * 4)
    answer = server.ask(model="stub-thinking", max_tokens=10)
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].message.reasoning_content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 10


def test_thinking_decides_the_prompt(server):
    def count(**fields: Any) -> int:
        return server.ask(max_tokens=1, **fields).usage.prompt_tokens

    plain = count()
    assert count(model="stub-thinking") == plain - 1  # without the closed block
    assert count(model="stub-thinking", reasoning_effort="none") == plain
    assert count(reasoning_effort="low") == plain - 1
    assert count(extra_body={"chat_template_kwargs": {"enable_thinking": True}}) == plain - 1


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_tool_calls_with_the_official_client(server, engine):
    engine.script = engine.codec.encode(f"Let me look.\n\n{call('Rome')}\n{call('Oslo')}")
    whole = server.ask(tools=[TOOL]).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == "Let me look."
    asked = [json.loads(c.function.arguments) for c in whole.message.tool_calls]
    assert asked == [{"city": "Rome"}, {"city": "Oslo"}]
    assert len({c.id for c in whole.message.tool_calls}) == 2
    with server.client().chat.completions.stream(
        model="stub", messages=HELLO, tools=[TOOL]
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert [c.function.name for c in final.message.tool_calls] == ["weather"] * 2
    assert [json.loads(c.function.arguments) for c in final.message.tool_calls] == asked
    assert final.finish_reason == "tool_calls"
    results = [
        *HELLO,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "sun"},
        {"role": "tool", "tool_call_id": "unknown", "content": [{"type": "text", "text": "rain"}]},
    ]
    engine.script = engine.codec.encode("Sun and rain.")
    assert server.ask(tools=[TOOL], messages=results).choices[0].message.content == "Sun and rain."


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_a_call_can_be_demanded(tiny_qwen, tmp_path, codec, family, choice):
    """The answer is begun for the model, which has only the rest to say."""
    if family == "deepseek":
        codec = DeepseekCodec(make_released(tiny_qwen, tmp_path, True))
        whole = DSML_CALL
    else:
        whole = call("Rome")
    rest = whole.partition("weather")[2]
    if choice == "required":
        rest = "weather" + rest
    elif family == "deepseek":
        rest = rest.removeprefix('">\n')
    else:
        rest = rest.removeprefix(">\n")
    with StubServer(StubEngine(codec, rest)) as server:
        for is_stream in (False, True):
            answer = server.ask(tools=[TOOL], tool_choice=choice, stream=is_stream)
            if is_stream:
                deltas = [c.choices[0].delta for c in answer]
                calls = [d.tool_calls[0].function for d in deltas if d.tool_calls]
                assert calls[0].name == "weather"
                text = "".join(c.arguments for c in calls)
            else:
                assert answer.choices[0].finish_reason == "tool_calls"
                assert answer.choices[0].message.content is None
                text = answer.choices[0].message.tool_calls[0].function.arguments
            assert json.loads(text) == {"city": "Rome"}


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": "none"}, {}])
def test_no_markup_leaves_when_no_tools_are_offered(server, engine, fields):
    engine.script = engine.codec.encode(f"Well.\n\n{call('Rome')}")
    plain = server.ask(max_tokens=1).usage.prompt_tokens
    whole = server.ask(**fields)
    assert whole.usage.prompt_tokens == plain
    assert whole.choices[0].message.content == "Well."
    assert whole.choices[0].message.tool_calls is None
    assert whole.choices[0].finish_reason == "stop"
    assert texts(server.ask(stream=True, **fields))[1] == "Well."


def test_a_call_cut_by_the_limit_is_not_offered(server, engine):
    engine.script = engine.codec.encode(f"{call('Rome')}\n{call('Oslo')}")
    tokens = len(engine.codec.encode(call("Rome"))) + 12
    for is_stream in (False, True):
        answer = server.ask(tools=[TOOL], max_tokens=tokens, stream=is_stream)
        if is_stream:
            deltas = [c.choices[0].delta for c in answer if c.choices[0].delta.tool_calls]
            assert {d.tool_calls[0].index for d in deltas} == {0}
            assert not any(d.content for d in deltas)
        else:
            assert len(answer.choices[0].message.tool_calls) == 1
            assert answer.choices[0].finish_reason == "length"


# ---- the same in DeepSeek's encoding ---------------------------------------------------------------------------------


@pytest.fixture
def deepseek(tiny_qwen, tmp_path):
    with StubServer(StubEngine(DeepseekCodec(make_released(tiny_qwen, tmp_path, True)))) as running:
        yield running


def test_deepseek_reasons_and_calls(deepseek):
    engine, codec = deepseek.engine, deepseek.engine.codec
    engine.script = codec.encode(f"Rome, then.</think>I look.{DSML_CALL}")
    fields = {"model": "stub-thinking", "tools": [TOOL]}
    whole = deepseek.ask(**fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert (whole.message.reasoning_content, whole.message.content) == ("Rome, then.", "I look.")
    called = whole.message.tool_calls[0].function
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Rome"})
    chunks = list(deepseek.ask(stream=True, **fields))
    assert texts(chunks) == ("Rome, then.", "I look.")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    inside = len(codec.encode(f"Rome, then.</think>I look.{DSML_CALL.partition('Rome')[0]}"))
    cut = deepseek.ask(max_tokens=inside, **fields).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert cut.message.content == "I look."
    messages = [
        *HELLO,
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": "whatever", "content": "sun"},
    ]
    engine.script = codec.encode("</think>Sun.")
    assert deepseek.ask(messages=messages, **fields).choices[0].message.content == "Sun."


def test_deepseek_markup_never_leaves(deepseek):
    engine = deepseek.engine
    engine.script = engine.codec.encode(f"Well.{DSML_CALL}")
    plain = deepseek.ask(max_tokens=1).usage.prompt_tokens
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        whole = deepseek.ask(**fields)
        assert whole.usage.prompt_tokens == plain
        assert whole.choices[0].message.content == "Well."
        assert whole.choices[0].finish_reason == "stop"
        assert texts(deepseek.ask(stream=True, **fields))[1] == "Well."


def test_deepseek_tools_without_the_snapshots_encoder_are_a_400(tiny_qwen, tmp_path):
    with StubServer(StubEngine(DeepseekCodec(make_released(tiny_qwen, tmp_path)))) as server:
        with pytest.raises(openai.BadRequestError, match=r"own tool block.*encoding/encoding\.py"):
            server.ask(tools=[TOOL])
        assert server.ask().choices[0].message.content == "Hello there."


def test_deepseek_follow_ups_go_on_before_the_reasoning_that_is_left_out(deepseek):
    engine = deepseek.engine
    engine.script = engine.codec.encode("long reasoning</think>Hi")
    first = deepseek.ask(model="stub-thinking")
    answered = {"role": "assistant", "content": "Hi", "reasoning_content": "long reasoning"}
    followed = deepseek.ask(model="stub-thinking", messages=[*HELLO, answered, *HELLO])
    # up to the assistant's header, which is before the think marker
    assert followed.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    markers = "a<｜User｜>b</think>｜DSML｜<｜end▁of▁sentence｜>"
    body = {"messages": [{"role": "user", "content": markers}]}
    tokens = deepseek.post("/tokenize", body).json()["tokens"]
    control = set(engine.codec.markers.values())
    assert sum(token in control for token in tokens) == 4  # the encoding's own


# ---- prefixes --------------------------------------------------------------------------------------------------------


def test_a_follow_up_and_a_regenerated_answer_read_only_what_is_new(server, engine):
    first = server.ask()
    again = server.ask()
    header = 4  # the closed think block is not in a later turn's history
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - header
    messages = [*HELLO, {"role": "assistant", "content": "Hello there."}, *HELLO]
    server.ask(messages=[{"role": "user", "content": "something else in between"}])
    engine.prompts.clear()
    followed = server.ask(messages=messages)
    cached = followed.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - header
    assert sum(engine.prompts) == followed.usage.prompt_tokens - cached


def test_the_prompt_of_a_cancelled_request_is_kept_as_far_as_it_was_read(codec):
    engine = StubEngine(codec)
    engine.prefill_tokens, engine.prefill_s = 64, 0.2
    long = [{"role": "user", "content": "abcd " * 120}]
    with StubServer(engine) as server:
        total = server.post("/tokenize", {"messages": long}).json()["count"]
        assert total > 200
        sock = open_request(server, False, long[0]["content"])
        wait_until(lambda: sum(engine.prompts) >= 128)
        sock.close()
        wait_until(lambda: server.get("/status").json()["queue"]["running"] is None)
        server.ask()  # another conversation in between
        engine.prefill_s = 0.0
        answer = server.ask(messages=long)
        assert answer.usage.prompt_tokens_details.cached_tokens >= 64
