"""How DeepSeek-V4.1-Flash talks, bound to its tokenizer; a snapshot of another chat format brings its template."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime import deepseek_text
from runtime.answers import Parser
from runtime.deepseek_text import AnswerParser, ToolsBlock, encode_messages, read_tools_block
from runtime.errors import UserError
from runtime.text import ChatOptions, TemplateCodec, TextCodec

# words of other models for what this one has; efforts are numbers, medium is between low and high
_EFFORTS: dict[str, str | int] = {"minimal": "low", "medium": 62, "xhigh": "max"}


def open_codec(root: Path) -> TextCodec:
    """Return the codec of a snapshot: by its tokenizer, which has DeepSeek's markers or another format's."""
    codec = DeepseekCodec(root)
    return codec if deepseek_text.USER in codec.markers else TemplateCodec(root)


class DeepseekCodec(TextCodec):
    """The released chat encoding."""

    can_think = can_call = True

    def __init__(self, root: Path) -> None:
        """The tool block comes from the snapshot's own encoder; without that file tools are refused."""
        super().__init__(root)
        if deepseek_text.BOS in self.markers:
            self.start_ids = (self.markers[deepseek_text.BOS],)
        self._encoder = root / "encoding" / "encoding.py"

    @functools.cached_property
    def _tools_block(self) -> ToolsBlock | None:
        """Read when tools are first offered. Raises UserError for an encoder that is not the release's."""
        return read_tools_block(self._encoder.read_text()) if self._encoder.is_file() else None

    def _stop_ids(self, root: Path) -> frozenset[int]:
        """The end of sentence alone: the snapshot has no generation config that says so."""
        is_released = deepseek_text.USER in self.markers
        return deepseek_text.STOP_IDS if is_released else super()._stop_ids(root)

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """Encode messages as released. Raises UserError for what this model cannot take."""
        effort = options.effort
        if isinstance(effort, str):
            effort = _EFFORTS.get(effort, effort)
        text = encode_messages(
            messages,
            options.thinking,
            effort,
            options.tools,
            tools_block=self._tools_block if options.tools else None,
        )
        missing = [m for m in deepseek_text.MARKERS if m in text and m not in self.markers]
        if missing:
            raise UserError(
                f"this prompt needs {missing[0]}, which the snapshot's tokenizer does not have",
                "use the tokenizer.json of the release, or leave system text, thinking and tools out",
            )
        return text

    def call_opening(self, name: str) -> tuple[str, str, str]:
        """Return the opening tags of a tool block and of its first call."""
        return deepseek_text.CALL_OPENING, name, '">\n' if name else ""

    def parser(self, options: ChatOptions) -> Parser:
        """Return the parser of the mode that was asked for."""
        return AnswerParser(options.thinking)
