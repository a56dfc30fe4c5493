"""The script for a real snapshot: its check of prompts, with encoders that are right and wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.gpu import check_snapshot

# written anew from the table of strings: chat and thinking, a tool's call and result
ENCODER = '''
import json

BLOCK = """## Tools

<{dsml_token}{tc_block_name}>

{tool_schemas}

end
"""
EFFORT = "Reasoning Effort: %d (range 1-100, the higher the value, the more thorough the reasoning)\\n\\n"


def encode_messages(messages, thinking_mode, reasoning_effort="high"):
    is_thinking, messages = thinking_mode == "thinking", list(messages)
    tools = messages[0].get("tools", [])
    lead = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    if is_thinking:
        lead = EFFORT % {"low": 50, "high": 75, "max": 100}[reasoning_effort] + (lead or "")
    if tools:
        schemas = "\\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        lead += "\\n\\n" + BLOCK.format(dsml_token="｜DSML｜", tc_block_name=" calls", tool_schemas=schemas)
    out = "<｜begin▁of▁sentence｜>" + ("" if lead is None else "<｜System｜>" + lead)
    last = max(i for i, m in enumerate(messages) if m["role"] != "assistant")
    before = None
    for i, message in enumerate(messages):
        role, text = message["role"], message["content"]
        if role == "tool":
            role, text = "user", f"<tool_result>{text}</tool_result>"
        if role == "assistant":
            think = message.get("reasoning_content", "")
            keeps = is_thinking and (i > last or tools)
            out += "<｜Assistant｜>" + (f"<think>{think}</think>" if keeps else "</think>") + text
            for call in message.get("tool_calls", []):
                (name, value), = json.loads(call["function"]["arguments"]).items()
                out += "\\n\\n<｜DSML｜ calls>\\n<｜DSML｜ invoke name=\\"" + call["function"]["name"] + "\\">\\n"
                out += f'<｜DSML｜ parameter name="{name}" string="true">{value}</｜DSML｜ parameter>\\n'
                out += "</｜DSML｜ invoke>\\n</｜DSML｜ calls>"
            out += "<｜end▁of▁sentence｜>"
        elif role == before == "user":
            out += "\\n\\n" + text
        else:
            out += {"user": "<｜User｜>", "system": "<｜System｜>"}[role] + text
        before = role
    return out + "<｜Assistant｜>" + ("<think>" if is_thinking else "</think>")
'''


def rows_of(tmp_path, source, is_release=True):
    if source is not None:
        (tmp_path / "encoding").mkdir()
        (tmp_path / "encoding" / "encoding.py").write_text(source)
    case = SimpleNamespace(files=SimpleNamespace(snapshot=tmp_path))
    return list(check_snapshot.encoder_rows(case, is_release))


def test_prompts_are_those_of_the_encoder(tmp_path):
    rows = rows_of(tmp_path, ENCODER)
    assert len(rows) == 14
    assert [f"{row.name}: {row.found}" for row in rows if not row.is_ok] == []


@pytest.mark.parametrize(
    ("right", "wrong", "red"),
    [
        ("i > last or tools", "True", 2),
        ('"low": 50', '"low": 62', 1),
        ('"<｜User｜>"', '"\\n<｜User｜>"', 14),
        ("<tool_result>", "<result>", 2),
        ("thinking_mode, reasoning_effort", "mode, reasoning_effort", 14),
    ],
)  # fmt: skip
def test_another_encoder_is_red(tmp_path, right, wrong, red):
    rows = rows_of(tmp_path, ENCODER.replace(right, wrong))
    assert sum(not row.is_ok for row in rows) == red


@pytest.mark.parametrize("is_release", [True, False])
def test_only_a_release_must_have_one(tmp_path, is_release):
    (row,) = rows_of(tmp_path, None, is_release)
    assert row.is_ok != is_release
