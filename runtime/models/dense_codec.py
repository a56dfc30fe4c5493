"""How dense models talk: the snapshot's template where it has one; base models take plain text alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.text import ChatOptions, TemplateCodec, TextCodec


class PlainCodec(TextCodec):
    """A base model: text goes on, nobody answers."""

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """Raise UserError: there is no form of conversations."""
        del messages, options
        raise UserError(
            "this snapshot has no chat template: it continues text, it does not chat",
            "use an instruct model, or memory.template=none with the stages of the memory",
        )


def has_template(snapshot: Path) -> bool:
    """Say whether a snapshot brings a chat template."""
    if (snapshot / "chat_template.jinja").exists():
        return True
    config = snapshot / "tokenizer_config.json"
    return config.exists() and bool(json.loads(config.read_text()).get("chat_template"))


def open_codec(snapshot: Path) -> TextCodec:
    """Return the tokenizer and the form of conversations."""
    return TemplateCodec(snapshot) if has_template(snapshot) else PlainCodec(snapshot)
