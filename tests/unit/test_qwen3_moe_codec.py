"""How Qwen3-MoE snapshots talk: templates that open the reasoning or leave it to the model; both markups."""

from __future__ import annotations

import json
import shutil

import pytest

from runtime.answers import BrokenCall, Content, Reasoning, ToolCall
from runtime.errors import UserError
from runtime.models.qwen3_moe_codec import Qwen3MoeCodec, open_codec
from runtime.text import ChatOptions

# the turns and the ends of four releases' templates, and how each says what a call looks like
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
JSON_CALLS = '{% if tools %}{{ tools | tojson }}<tool_call>\n{"name": n, "arguments": a}{% endif %}'
TAG_CALLS = "{% if tools %}{{ tools | tojson }}<tool_call>\n<function=n>{% endif %}"
TEMPLATES = {
    "hybrid": JSON_CALLS + TURNS
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "instruct": JSON_CALLS + TURNS,
    "thinking": JSON_CALLS + TURNS + "<think>\n",
    "coder": TAG_CALLS + TURNS,
}  # fmt: skip
QUESTION = [{"role": "user", "content": "q"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}}}}}


@pytest.fixture
def make_codec(tiny_qwen, tmp_path):
    """Return a function: a template's name -> the codec of a snapshot with it."""

    def codec(name):
        for file in ("tokenizer.json", "generation_config.json", "config.json"):
            shutil.copy(tiny_qwen / file, tmp_path)
        raw = json.loads((tmp_path / "tokenizer.json").read_text())
        for i, marker in enumerate(("<tool_call>", "</tool_call>")):
            token = dict(raw["added_tokens"][0], id=4600 + i, content=marker, special=False)
            raw["added_tokens"].append(token)
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
        (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
        return open_codec(tmp_path)

    return codec


PLAIN, WITH_TOOL = ChatOptions(), ChatOptions(tools=(TOOL,))


def parsed(codec, text, options=PLAIN):
    """Return the events of an answer that comes in single characters, joined where they are of one kind."""
    parser = codec.parser(options)
    events = [event for letter in text for event in parser.push(letter)] + parser.finish()
    out = []
    for event in events:
        if out and type(out[-1]) is type(event) and isinstance(event, Content | Reasoning):
            out[-1] = type(event)(out[-1].text + event.text)
        else:
            out.append(event)
    return out


@pytest.mark.parametrize(
    ("name", "thinking", "answer"),
    [
        ("hybrid", True, "<think>\nwhy\n</think>\n\nbecause"),
        ("thinking", True, "why\n</think>\n\nbecause"),
        ("thinking", False, "why\n</think>\n\nbecause"),  # it cannot be told not to
    ],
)
def test_reasoning_is_told_from_content(make_codec, name, thinking, answer):
    codec = make_codec(name)
    assert codec.can_think
    found = parsed(codec, answer, ChatOptions(thinking=thinking))
    assert found == [Reasoning("why"), Content("because")]


def test_a_model_that_is_told_not_to_think_answers_at_once(make_codec):
    codec = make_codec("hybrid")
    assert codec.decode(
        codec.encode_chat(QUESTION, ChatOptions()), {"<think>", "</think>"}
    ).endswith("<think>\n\n</think>\n\n")
    assert parsed(codec, "because") == [Content("because")]


def test_an_instruct_model_has_no_thinking(make_codec):
    codec = make_codec("instruct")
    assert not codec.can_think
    with pytest.raises(UserError, match="no thinking"):
        codec.encode_chat(QUESTION, ChatOptions(thinking=True))


@pytest.mark.parametrize(
    ("name", "markup"),
    [
        ("instruct", '{"name": "f", "arguments": {"x": 1}}'),
        ("coder", "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>"),
    ],
)
def test_calls_in_the_releases_markup(make_codec, name, markup):
    codec, options = make_codec(name), WITH_TOOL
    answer = f"so\n<tool_call>\n{markup}\n</tool_call>"
    assert parsed(codec, answer, options) == [Content("so"), ToolCall("f", {"x": 1})]
    opening = "".join(codec.call_opening("f"))
    assert f"<tool_call>\n{markup}".startswith(opening)


@pytest.mark.parametrize("markup", ["no json", "[1]", '{"name": 1}', '{"name": "f", "arguments": 2}'])  # fmt: skip
def test_what_is_no_call_is_given_as_it_came(make_codec, markup):
    found = parsed(make_codec("hybrid"), f"<tool_call>\n{markup}\n</tool_call>", WITH_TOOL)
    assert [type(event) for event in found] == [BrokenCall]
    assert markup in found[0].markup


def test_a_base_model_takes_plain_text(make_codec, tmp_path):
    make_codec("instruct")
    (tmp_path / "chat_template.jinja").unlink()
    codec = open_codec(tmp_path)
    assert not isinstance(codec, Qwen3MoeCodec)
    assert codec.encode("text")
    with pytest.raises(UserError, match="no chat template"):
        codec.encode_chat(QUESTION)
