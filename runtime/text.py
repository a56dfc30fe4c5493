"""Text and tokens: chat templates, encoding, and decoding a stream piece by piece."""

from __future__ import annotations

import functools
import json
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from runtime.answers import Content, Event, Parser, PlainParser, overlap
from runtime.errors import UserError

REPLACEMENT = "\ufffd"


def _byte_letters() -> dict[str, int]:
    """Return the letter that byte-level tokenizers write for each byte: printable ones as they are."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What decides a prompt beside its messages."""

    thinking: bool = False
    effort: str | int | None = None  # of the thinking; None is the model's default
    tools: tuple[Mapping[str, Any], ...] = ()  # in OpenAI's form


class TextCodec:
    """One model's tokenizer and the form of its conversations, from its snapshot folder.

    A family has a subclass: how messages become a prompt string (`render`), and what parses its answers (`parser`).
    """

    can_think = False
    can_call = False  # tools
    start_ids: tuple[int, ...] = ()  # of a text that is no chat

    def __init__(self, root: Path) -> None:
        raw = json.loads(_required(root / "tokenizer.json").read_text())
        added = {token["content"]: token for token in raw.get("added_tokens", [])}
        hidden = {name for name, token in added.items() if token["special"]}
        # special ones alone can be told from the same text typed by a person: here all are
        for token in added.values():
            token["special"] = True
        self._tokenizer = Tokenizer.from_str(json.dumps(raw))
        self.markers: dict[str, int] = {name: token["id"] for name, token in added.items()}
        self._shown = frozenset(self.markers[name] for name in self.markers.keys() - hidden)
        self._names = {token_id: name for name, token_id in self.markers.items()}
        self._lock = threading.Lock()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.generation = _read_json(root / "generation_config.json")
        self.stop_ids = self._stop_ids(root)

    def _stop_ids(self, root: Path) -> frozenset[int]:
        eos = self.generation.get(
            "eos_token_id", _read_json(root / "config.json").get("eos_token_id")
        )
        if eos is None:
            raise UserError(
                f"{root / 'generation_config.json'} names no eos_token_id",
                "run the download stage again",
            )
        return frozenset(eos if isinstance(eos, list) else [eos])

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """Return the prompt string; its markers become control tokens. Raises UserError: text alone has no turns."""
        del messages, options
        raise UserError(
            "this model has no chat format", "use a text completion, or an instruct model"
        )

    def parser(self, options: ChatOptions) -> Parser:
        """Return what takes an answer to such a prompt apart."""
        del options
        return PlainParser()

    def call_opening(self, name: str) -> tuple[str, str, str]:
        """Return how a call begins: before the tool's name, the name, after it; up to the name if that is empty."""
        raise UserError(
            f"this model's chat format has no tools: {name!r:.40} cannot be called", "send no tools"
        )

    def force_call(self, name: str, parser: Parser) -> list[int]:
        """Begin an answer with a call for the model; return the tokens that the prompt gets at its end."""
        before, name, after = self.call_opening(name)
        parser.push(before + name + after)
        # a name is a person's text: no marker in it is one
        return self.encode(before) + (self.encode_plain(name) + self.encode(after) if name else [])

    @staticmethod
    def plain_parser() -> Parser:
        """Return the parser of text that is no answer to a chat."""
        return PlainParser()

    def encode(self, text: str) -> list[int]:
        """Encode text that holds the model's own markers, such as `<|endoftext|>`."""
        return self._encode(text, is_plain=False)

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which nothing is a marker."""
        return self._encode(text, is_plain=True)

    def _encode(self, text: str, is_plain: bool) -> list[int]:
        with self._lock:  # the switch is the tokenizer's, and several threads may prepare prompts
            self._tokenizer.encode_special_tokens = is_plain
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str, adds_start: bool = True) -> list[int]:
        """Encode a text completion's prompt: its markers are markers, the start token stands once."""
        ids = self.encode(text)
        start = list(self.start_ids) if adds_start else []
        return ids if ids[: len(start)] == start else start + ids

    def shared_tokens(
        self,
        prompt: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions = ChatOptions(),
    ) -> int:
        """Return how much of `prompt`, which asks `messages`, begins the next turn's prompt too, whatever is answered.

        A header may open the reasoning, which the next turn's history leaves out.
        """
        turn = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]
        try:
            following = self.encode_chat([*messages, *turn], options)
        except UserError:  # a template that minds the order of turns
            return len(prompt)
        pairs = zip(prompt, following, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(prompt))

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode text in which nothing is a marker; also (first character, one behind the last) of each token."""
        self._tokenizer.encode_special_tokens = True
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions = ChatOptions()
    ) -> list[int]:
        """Render messages and encode them; a marker typed inside a message or a tool stays plain text.

        Raises UserError for messages and options that this model cannot take.
        """
        self._check(options)
        # each marker in a message becomes a word that nobody typed, and plain text again after rendering
        nonce = secrets.token_hex(8)

        def hide(text: str) -> str:
            return self._any_marker.sub(lambda m: f"\ue000{nonce}.{self.markers[m[0]]}\ue001", text)

        tools = tuple(_mapped(tool, hide) for tool in options.tools)
        rendered = self.render(_mapped(list(messages), hide), replace(options, tools=tools))
        word = re.compile(rf"\ue000{nonce}\.(\d+)\ue001")
        ids: list[int] = []
        for piece, marker in self._split_markers(rendered):
            piece = word.sub(lambda m: self._names[int(m[1])], piece)
            ids += self.encode_plain(piece) if piece else []
            ids += [] if marker is None else [self.markers[marker]]
        return ids

    def _check(self, options: ChatOptions) -> None:
        if options.thinking and not self.can_think:
            raise UserError("this model has no thinking mode", "leave thinking and its effort out")
        if options.tools and not self.can_call:
            raise UserError("this model's chat format has no tools", "send no tools")

    def _split_markers(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yield (text before a marker, the marker), last (the rest, None)."""
        start = 0
        for found in self._any_marker.finditer(text):
            yield text[start : found.start()], found[0]
            start = found.end()
        yield text[start:], None

    @functools.cached_property
    def _any_marker(self) -> re.Pattern[str]:
        # of two that begin together the longer
        longest_first = sorted(self.markers, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def decode(self, ids: Sequence[int], shown: Collection[str] | None = None) -> str:
        """Return the text of tokens; of the control tokens only those `shown`. None: as the tokenizer flags them."""
        names: Collection[int] = self._shown
        if shown is not None:
            names = {self.markers[name] for name in shown if name in self.markers}
        out: list[str] = []
        run: list[int] = []
        for token in ids:
            if token in names:
                out += [self._text(run), self._names[token]]
                run = []
            else:
                run.append(token)
        return "".join([*out, self._text(run)])

    def token_bytes(self, token: int) -> bytes:
        """Return what one token stands for, a marker's name for a marker; it may be a part of a character."""
        if token in self._names:
            return self._names[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        try:
            return bytes(_BYTES[character] for character in piece)
        except KeyError:  # not a byte-level tokenizer
            return self._text([token]).encode()

    def _text(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class TemplateCodec(TextCodec):
    """A model whose prompts are made by the chat template in its snapshot."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        file = root / "chat_template.jinja"
        config = _read_json(root / "tokenizer_config.json")
        template = file.read_text() if file.exists() else config.get("chat_template")
        if not template:
            raise UserError(
                f"{root} has no chat template",
                "the snapshot is incomplete: run the download stage again",
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(template)
        self._variables = meta.find_undeclared_variables(environment.parse(template))
        self.can_think = "enable_thinking" in self._variables
        self.can_call = "tools" in self._variables

    def template_options(self, options: ChatOptions) -> dict[str, Any]:
        """Return what the template is told beside the messages."""
        found: dict[str, Any] = {"enable_thinking": options.thinking}
        if options.tools:
            found["tools"] = list(options.tools)
        if options.thinking and options.effort is not None:
            found["reasoning_effort"] = options.effort
        return found

    def render(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
        """Run the template. Raises UserError with its message when it refuses."""
        try:
            return self._template.render(
                messages=[_with_parsed_arguments(message) for message in messages],
                add_generation_prompt=True,
                **self.template_options(options),
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


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose tool calls have arguments as values: templates walk through them, clients send text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            function["arguments"] = json.loads(function["arguments"] or "{}")
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


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


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Change every string inside lists and dicts; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


class StreamDecoder:
    """Tokens in, text out, as soon as no later token can change it."""

    def __init__(self, codec: TextCodec, shown: Collection[str] | None = None) -> None:
        """shown: as for `decode`."""
        self._codec, self._shown = codec, shown
        self._ids: list[int] = []
        # decoding starts here: one piece back, since a tokenizer may look at its neighbour
        self._start = 0
        self._sent = 0

    def push(self, token: int) -> str:
        """Return the text that has become certain; empty inside an unfinished character."""
        self._ids.append(token)
        return self._take(is_last=False)

    def flush(self) -> str:
        """Return what is left, an unfinished character as U+FFFD."""
        return self._take(is_last=True)

    def _take(self, is_last: bool) -> str:
        before = self._codec.decode(self._ids[self._start : self._sent], self._shown)
        text = self._codec.decode(self._ids[self._start :], self._shown)
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
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """Return what was held back: the text ended before a stop string was complete."""
        out, self._held = self._held, ""
        return out


class AnswerStream:
    """Tokens of one answer in, its parts out: text of tokens, parts of text, content up to a stop string."""

    def __init__(self, codec: TextCodec, parser: Parser, stops: Sequence[str] = ()) -> None:
        self._decoder = StreamDecoder(codec, parser.markers)
        self._parser, self._stop = parser, StopFilter(stops)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string is complete: nothing comes out any more."""
        return self._stop.is_stopped

    def push(self, token: int) -> list[Event]:
        """Return the parts that have become certain."""
        return self._filtered(self._parser.push(self._decoder.push(token)))

    def finish(self) -> list[Event]:
        """Return what was held back: the answer has ended."""
        events = self._parser.push(self._decoder.flush()) + self._parser.finish()
        out = self._filtered(events)
        left = self._stop.flush()
        # content that was held back comes before what was parsed after it
        return [*out, Content(left)] if left else out

    def _filtered(self, events: Sequence[Event]) -> list[Event]:
        """Stop strings apply to content alone; what is no content lets go of held-back content before it."""
        out: list[Event] = []
        for event in events:
            if self._stop.is_stopped:
                break
            if isinstance(event, Content):
                text = self._stop.push(event.text)
                out += [Content(text)] if text else []
            else:
                left = self._stop.flush()
                out += [Content(left), event] if left else [event]
        return out
