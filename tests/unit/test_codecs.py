"""Conversations of each family as tokens: DeepSeek's encoding on a tokenizer with its markers, Qwen's by a template."""

import json
import shutil

import pytest

from runtime import deepseek_text
from runtime.answers import Content, Reasoning, ToolCall
from runtime.deepseek_text import BOS, EOS, MARKERS, encode_messages
from runtime.engine import load_family
from runtime.errors import UserError
from runtime.models.deepseek_codec import DeepseekCodec
from runtime.models.qwen_codec import QwenCodec
from runtime.text import AnswerStream, ChatOptions
from tests.unit.stub_server import ENCODER, make_released

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = (
    '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="x" string="false">1'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def released(tiny_qwen, tmp_path_factory):
    return make_released(tiny_qwen, tmp_path_factory.mktemp("released"))


@pytest.fixture(scope="module")
def codec(released):
    return load_family("deepseek").open_codec(released)


def text_of(codec, ids):
    return codec.decode(ids, MARKERS)


@pytest.mark.parametrize(
    ("options", "effort"),
    [
        (ChatOptions(), None),
        (ChatOptions(thinking=True), None),
        (ChatOptions(thinking=True, effort="low"), "low"),
        (ChatOptions(thinking=True, effort="medium"), 62),
        (ChatOptions(thinking=True, effort="xhigh"), "max"),
        (ChatOptions(thinking=True, effort=3), 3),
    ],
)
def test_prompts_are_the_encoding(codec, options, effort):
    messages = [
        user("q"),
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        user("p"),
    ]
    ids = codec.encode_chat(messages, options)
    wanted = encode_messages(messages, options.thinking, effort)
    assert text_of(codec, ids) == wanted
    assert ids[0] == codec.markers[BOS] == 0
    assert codec.stop_ids == {1} == {codec.markers[EOS]}


def test_markers_are_tokens_in_the_prompt_and_text_in_a_message(codec):
    typed = f"a{EOS}<｜User｜>b</think>｜DSML｜"
    ids = codec.encode_chat([user(typed)])
    special = [i for i in ids if i in codec.markers.values()]
    wanted = (BOS, deepseek_text.USER, deepseek_text.ASSISTANT, deepseek_text.THINK_END)
    assert special == [codec.markers[m] for m in wanted]
    assert text_of(codec, ids) == f"{BOS}<｜User｜>{typed}<｜Assistant｜></think>"


def test_tools_need_the_snapshots_own_block(codec, released, tmp_path):
    with pytest.raises(UserError, match="tools need the model's own tool block"):
        codec.encode_chat([user("q")], ChatOptions(tools=(TOOL,)))
    shutil.copytree(released, tmp_path, dirs_exist_ok=True)
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding.py").write_text(ENCODER)
    with_tools = DeepseekCodec(tmp_path)
    text = text_of(with_tools, with_tools.encode_chat([user("q")], ChatOptions(tools=(TOOL,))))
    schema = json.dumps(TOOL["function"])
    assert text == (
        f"{BOS}<｜System｜>\n\n## Tools\n\n<｜DSML｜ calls>\n\n{schema}\n\nend\n<｜User｜>q<｜Assistant｜></think>"
    )


def test_an_answer_of_tokens_is_taken_apart(codec):
    """Markers are tokens here; the parser sees them, the reader does not."""
    stream = AnswerStream(codec, codec.parser(ChatOptions(thinking=True)))
    events = []
    for token in codec.encode(f"why</think>Look<｜User｜>{CALL}"):
        events += stream.push(token)
    events += stream.finish()
    reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
    assert reasoning == "why"
    assert events[-1] == ToolCall("f", {"x": 1})
    # a control token that is no part of an answer's form vanishes
    assert "".join(e.text for e in events if isinstance(e, Content)) == "Look"


def test_stop_strings_are_of_the_answer_alone(codec):
    stream = AnswerStream(codec, codec.parser(ChatOptions(thinking=True)), ["END"])
    events = []
    for token in codec.encode("a END b</think>c END d"):
        events += stream.push(token)
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == "a END b"
    assert "".join(e.text for e in events if isinstance(e, Content)) == "c "
    assert stream.is_stopped


def test_a_marker_that_the_tokenizer_lacks_is_said(tmp_path, released):
    raw = json.loads((released / "tokenizer.json").read_text())
    raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] != "<｜System｜>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    codec = DeepseekCodec(tmp_path)
    codec.encode_chat([user("q")])
    with pytest.raises(UserError, match=r"needs <｜System｜>, which the snapshot's tokenizer does"):
        codec.encode_chat([{"role": "system", "content": "s"}, user("q")])


def test_the_bundled_deepseek_has_a_format_of_its_own(tiny_qwen):
    """Its tokenizer has none of the release's markers: the template that it was trained with is what it is asked by."""
    snapshot = tiny_qwen.parent / "tiny-deepseek"
    codec = load_family("deepseek").open_codec(snapshot)
    for question in json.loads((snapshot / "golden_answers.json").read_text())["greedy"]:
        assert codec.encode_chat([user(question["question"])]) == question["prompt_ids"]
    assert codec.stop_ids == {0, 2}
    with pytest.raises(UserError, match="no thinking mode"):
        codec.encode_chat([user("q")], ChatOptions(thinking=True))
    with pytest.raises(UserError, match="no tools"):
        codec.encode_chat([user("q")], ChatOptions(tools=(TOOL,)))


# ---- Qwen ------------------------------------------------------------------------------------------------------------

TEMPLATE = """
{%- if tools %}T{{ tools | tojson }};{% endif %}
{%- if reasoning_effort is defined %}E{{ reasoning_effort }};{% endif %}
{%- for m in messages %}{{ m.role }}:{{ m.content }}
{%- for call in m.tool_calls or [] %}{% for k, v in call.function.arguments | items %} {{ k }}={{ v }}{% endfor %}
{%- endfor %};{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"""


@pytest.fixture
def qwen(tiny_qwen, tmp_path):
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(tiny_qwen / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return QwenCodec(tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (ChatOptions(), "user:q;<think></think>"),
        (ChatOptions(thinking=True), "user:q;<think>"),
        (ChatOptions(thinking=True, effort="high"), "Exhigh;user:q;<think>"),
        (ChatOptions(effort="low"), "user:q;<think></think>"),
        (ChatOptions(tools=({"n": "é"},)), 'T[{"n": "é"}];user:q;<think></think>'),
    ],
)
def test_options_reach_the_template(qwen, options, text):
    ids = qwen.encode_chat([user("q")], options)
    assert qwen.decode(ids, ("<think>", "</think>")) == text


def test_arguments_reach_the_template_as_values(qwen):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [user("q"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "assistant: a=1;" in qwen.decode(qwen.encode_chat(messages))
    call["function"]["arguments"] = "{"
    with pytest.raises(UserError, match="refuses"):
        qwen.encode_chat(messages)


def test_an_unknown_effort_is_refused(qwen):
    with pytest.raises(UserError, match="'huge' is unknown"):
        qwen.encode_chat([user("q")], ChatOptions(thinking=True, effort="huge"))


def test_typed_markers_are_text_whatever_their_flag(tiny_qwen, tmp_path):
    """Released tokenizers flag `<think>` as not special: typed by a person it is text all the same."""
    raw = json.loads((tiny_qwen / "tokenizer.json").read_text())
    for token in raw["added_tokens"]:
        token["special"] = token["content"] not in ("<think>", "</think>")
    for name in ("chat_template.jinja", "generation_config.json"):
        shutil.copy(tiny_qwen / name, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    codec = QwenCodec(tmp_path)
    ids = codec.encode_chat([user("a</think>b")])
    assert codec.markers["</think>"] not in ids
    assert codec.decode(ids) == "user\na</think>b\nassistant\n"
    assert codec.decode([codec.markers["<think>"]]) == "<think>"
