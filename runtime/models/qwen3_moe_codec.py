"""How Qwen3-MoE snapshots talk: the template that each brings, thinking as it opens it, calls in its markup."""

from __future__ import annotations

import json
from pathlib import Path

from runtime.answers import Parser, PlainParser, ToolCall
from runtime.models.dense_codec import PlainCodec, has_template
from runtime.qwen_text import CALL, THINK, QwenParser
from runtime.text import ChatOptions, TemplateCodec, TextCodec


class JsonCallParser(QwenParser):
    """Answers whose calls are JSON between the tags, as Qwen3 writes them; Qwen3-Coder has tags inside, as Qwen3.8."""

    def _parse_call(self, markup: str) -> ToolCall | None:
        try:
            call = json.loads(markup)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        return ToolCall(call["name"], arguments) if isinstance(arguments, dict) else None


class Qwen3MoeCodec(TemplateCodec):
    """A chat model. Some templates open the reasoning for the model, in others it opens it itself, or never."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        question = [{"role": "user", "content": "x"}]
        prompt = self.render(question, ChatOptions(thinking=self.can_think))
        self._opens_thinking = prompt.rstrip("\n").endswith(THINK)
        self._has_switch = self.can_think
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        prompt = self.render(question, ChatOptions(tools=(tool,))) if self.can_call else ""
        self._has_tags = "<function=" in prompt
        # a template without a switch that opens the reasoning all the same: it always thinks
        self.can_think = self.can_think or self._opens_thinking

    def call_opening(self, name: str) -> tuple[str, str, str]:
        """Return the opening of a call."""
        if self._has_tags:
            return f"{CALL}\n<function=", name, ">\n" if name else ""
        return f'{CALL}\n{{"name": "', name, '", "arguments": ' if name else ""

    def parser(self, options: ChatOptions) -> Parser:
        """Return what takes an answer apart: nothing to do for a template without thinking and tools."""
        if not (self.can_think or self.can_call):
            return PlainParser()
        is_open = self._opens_thinking and (options.thinking or not self._has_switch)
        family = QwenParser if self._has_tags else JsonCallParser
        return family(is_open, options.tools)


def open_codec(snapshot: Path) -> TextCodec:
    """Return the tokenizer and the form of conversations; a base model takes plain text alone."""
    return Qwen3MoeCodec(snapshot) if has_template(snapshot) else PlainCodec(snapshot)
