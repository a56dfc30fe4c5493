"""How the Qwen3.8 family talks: the snapshot's template, and the parser of its answers."""

from __future__ import annotations

from typing import Any

from runtime.answers import Parser, PlainParser
from runtime.errors import UserError
from runtime.qwen_text import CALL, EFFORTS, QwenParser
from runtime.text import ChatOptions, TemplateCodec

# words of other models for what this one has
_SAME = {"minimal": "low", "high": "xhigh", "max": "xhigh"}


class QwenCodec(TemplateCodec):
    """A Qwen snapshot's text."""

    def template_options(self, options: ChatOptions) -> dict[str, Any]:
        """Return what the template is told. Raises UserError for an effort that it does not know."""
        found = super().template_options(options)
        if "reasoning_effort" in found:
            effort = str(options.effort)
            found["reasoning_effort"] = word = _SAME.get(effort, effort)
            if word not in EFFORTS:
                raise UserError(
                    f"reasoning effort {effort!r:.40} is unknown", f"use {', '.join(EFFORTS)}"
                )
        return found

    def call_opening(self, name: str) -> tuple[str, str, str]:
        """Return the opening tags of a call."""
        return f"{CALL}\n<function=", name, ">\n" if name else ""

    def parser(self, options: ChatOptions) -> Parser:
        """Return what takes an answer apart: nothing to do for a template without thinking and tools."""
        if not (self.can_think or self.can_call):
            return PlainParser()
        return QwenParser(options.thinking, options.tools)
