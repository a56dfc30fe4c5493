"""Text and tokens: chat templates, encoding, and decoding a stream piece by piece."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from runtime.errors import UserError

REPLACEMENT = "\ufffd"


class TextCodec:
    """One model's tokenizer and chat template, from its snapshot folder."""

    def __init__(self, root: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(_required(root / "tokenizer.json")))
        config = _read_json(root / "tokenizer_config.json")
        template_file = root / "chat_template.jinja"
        template = (
            template_file.read_text() if template_file.exists() else config.get("chat_template")
        )
        if not template:
            raise UserError(
                f"{root} has no chat template",
                "the snapshot is incomplete: run the download stage again",
            )
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(template)
        self._special = {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.generation = _read_json(root / "generation_config.json")
        eos = self.generation.get(
            "eos_token_id", _read_json(root / "config.json").get("eos_token_id")
        )
        if eos is None:
            raise UserError(
                f"{root / 'generation_config.json'} names no eos_token_id",
                "run the download stage again",
            )
        self.stop_ids = frozenset(eos if isinstance(eos, list) else [eos])

    def encode(self, text: str) -> list[int]:
        """Encode text that holds the model's own markers, such as `<|endoftext|>`."""
        self._tokenizer.encode_special_tokens = False
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which nothing is a marker."""
        self._tokenizer.encode_special_tokens = True
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Render the template and encode it; a marker typed inside a message stays plain text.

        options: the template's own (`enable_thinking`, `tools`, ...). Raises UserError with the template's message.
        """
        # each marker in a message becomes a word that nobody typed, and plain text again after rendering
        nonce = secrets.token_hex(8)
        words = {marker: f"\ue000{nonce}.{i}\ue001" for i, marker in enumerate(self._special)}
        try:
            rendered = self._template.render(
                messages=_replace(list(messages), words),
                add_generation_prompt=True,
                **_replace(options, words),
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:  # the template's own code
            raise UserError(
                f"the chat template refuses these messages: {error}", "change the messages"
            ) from error
        ids: list[int] = []
        for piece, marker in self._split_markers(rendered):
            for marker_text, word in words.items():
                piece = piece.replace(word, marker_text)
            ids += self.encode_plain(piece) if piece else []
            ids += [] if marker is None else [self._special[marker]]
        return ids

    def _split_markers(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield (text before a marker, the marker), last (the rest, None)."""
        start = 0
        while True:
            found = [(at, -len(m), m) for m in self._special if (at := text.find(m, start)) >= 0]
            if not found:
                yield text[start:], None
                return
            at, _, marker = min(found)
            yield text[start:at], marker
            start = at + len(marker)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without markers."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _required(path: Path) -> Path:
    if not path.is_file():
        raise UserError(
            f"{path} is missing", "the snapshot is incomplete: run the download stage again"
        )
    return path


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _replace(value: Any, words: Mapping[str, str]) -> Any:
    """Replace `words` in every string inside lists and dicts."""
    if isinstance(value, str):
        for old, new in words.items():
            value = value.replace(old, new)
        return value
    if isinstance(value, Mapping):
        return {key: _replace(item, words) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace(item, words) for item in value]
    return value


class StreamDecoder:
    """Tokens in, text out, as soon as no later token can change it."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._start = (
            0  # decoding starts here: one piece back, since a tokenizer may look at its neighbour
        )
        self._sent = 0

    def push(self, token: int) -> str:
        """Return the text that has become certain; empty inside an unfinished character."""
        self._ids.append(token)
        return self._take(is_last=False)

    def flush(self) -> str:
        """Return what is left, an unfinished character as U+FFFD."""
        return self._take(is_last=True)

    def _take(self, is_last: bool) -> str:
        before = self._codec.decode(self._ids[self._start : self._sent])
        text = self._codec.decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT) and not is_last:
            return ""
        self._start, self._sent = self._sent, len(self._ids)
        return text[len(before) :]


class StopFilter:
    """Hold back text that may be the beginning of a stop string; end at the first that is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """Return the text that may leave. Nothing of a stop string ever does."""
        if self.is_stopped:
            return ""
        self._held += text
        # the match that ends first: the answer must not depend on how tokens cut the text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """Return what was held back: the text ended before a stop string was complete."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
