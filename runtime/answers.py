"""The parts of an answer as values, and what every model's parser of answers can do. Knows no marker and no token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One finished call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """What stood in a tool block after its last whole call: cut off, or not in the model's form. May be empty."""

    markup: str


Event = Reasoning | Content | ToolCall | BrokenCall


class Parser(Protocol):
    """An answer in pieces, its parts as events: each as soon as no later piece can change it."""

    @property
    def markers(self) -> tuple[str, ...] | None:
        """Control tokens that the parser must be shown as text; all others vanish. None: as the tokenizer has it."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


class PlainParser:
    """For a model whose answers are all content."""

    markers: tuple[str, ...] | None = None

    def push(self, text: str) -> list[Event]:
        """Return the text as it is."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Return nothing: nothing was held back."""
        return []


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
