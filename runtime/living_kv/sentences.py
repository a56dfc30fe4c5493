"""Text -> sentences, and sentences -> spans of tokens. Deterministic, contiguous; knows no tokenizer and no torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SPLITTER_VERSION = 1
MIN_TOKENS, MAX_TOKENS = 4, 128
CODE_LINES = 12  # of a code block in one sentence
_ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "fig",
        "no",
        "vol",
        "inc",
        "ltd",
        "co",
        "jr",
        "sr",
        "al",
        "approx",
        "dept",
        "z.b",
        "d.h",
        "bzw",
        "usw",
        "ca",
        "nr",
        "т.д",
        "т.п",
        "т.е",
        "г",
        "ул",
        "рис",
        "см",
    ]
)
_END = re.compile(
    r"[.!?…]+[\"'”’)\]]*(?=\s)\s*"  # a full stop and what follows it up to the next word
    r"|[。！？][”’」』）]*\s*"
    r"|\n[ \t]*\n\s*"  # an empty line
    r"|\n(?=[ \t]*(?:[-*•+]|\d+[.)]|\|)[ \t]?)"  # before a list item or a table row
    r"|(?<=\|)[ \t]*\n"  # after a table row
)


class Sentence(NamedTuple):
    """Tokens [lo, hi) of a piece, and its characters [start, end)."""

    lo: int
    hi: int
    start: int
    end: int


def split_text(text: str) -> list[int]:
    """Return where sentences end, the end of the text last; every character is in exactly one."""
    ends: list[int] = []
    at = 0
    for block in re.split(
        r"(^```[^\n]*\n.*?^```[ \t]*(?:\n|\Z))", text, flags=re.MULTILINE | re.DOTALL
    ):
        if block.startswith("```"):
            lines = block.splitlines(keepends=True)
            cuts = range(CODE_LINES, len(lines) + CODE_LINES, CODE_LINES)
            ends += [at + sum(map(len, lines[:cut])) for cut in cuts]
        else:
            ends += [at + m.end() for m in _END.finditer(block) if not _is_abbreviation(block, m)]
            ends.append(at + len(block))
        at += len(block)
    return sorted({end for end in ends if end})


def _is_abbreviation(text: str, found: re.Match[str]) -> bool:
    if not found[0].startswith(".") or "\n" in found[0]:
        return False
    word = re.search(r"[\w.]*$", text[max(0, found.start() - 12) : found.start()])
    before = word[0].casefold() if word else ""
    return before in _ABBREVIATIONS or (len(before) == 1 and before.isalpha())


def to_token_spans(ends: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[Sentence]:
    """Map sentence ends in characters to tokens; short ones go to the next, long ones are cut at a late word.

    offsets: (first character, one behind the last) of each token, in order.  A token belongs to the sentence that holds
    its last character. Returns contiguous spans that cover all tokens and all characters.
    """
    count = len(offsets)
    last_characters = np.array([max(a, b - 1) for a, b in offsets])
    borders = [int(b) for b in np.searchsorted(last_characters, np.array(ends[:-1], int), "left")]
    cuts: list[tuple[int, int]] = [(0, 0)]  # (token, character) where a sentence starts
    for token, character in zip(borders, ends[:-1], strict=True):
        if token - cuts[-1][0] >= MIN_TOKENS and count - token >= MIN_TOKENS:
            _cut_long(cuts, token, offsets)
            cuts.append((token, character))
    _cut_long(cuts, count, offsets)
    cuts.append((count, ends[-1]))
    return [Sentence(a[0], b[0], a[1], b[1]) for a, b in itertools.pairwise(cuts)]


def _cut_long(cuts: list[tuple[int, int]], end: int, offsets: Sequence[tuple[int, int]]) -> None:
    """Add cuts until the last sentence has at most MAX_TOKENS tokens before token `end`."""
    while end - cuts[-1][0] > MAX_TOKENS:
        lo = cuts[-1][0]
        at = min(lo + MAX_TOKENS, end - MIN_TOKENS)
        while at > lo + MAX_TOKENS // 2 and not _is_clean(at, offsets):
            at -= 1
        cuts.append((at, max(cuts[-1][1], offsets[at][0])))


def _is_clean(at: int, offsets: Sequence[tuple[int, int]]) -> bool:
    """Whether a token starts where the one before has ended, and not in the middle of a character."""
    return offsets[at][0] >= offsets[at - 1][1] and offsets[at][0] > offsets[at - 1][0]


def byte_offsets(text: str) -> np.ndarray:
    """Return the byte of each character, and the length last.  text: decoded with `surrogateescape`."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    sizes = np.where(codes < 0x80, 1, np.where(codes < 0x800, 2, np.where(codes < 0x10000, 3, 4)))
    sizes[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1  # a byte that was no UTF-8
    return np.concatenate([[0], np.cumsum(sizes)])


def readable(text: str) -> str:
    """Return the same characters with U+FFFD for bytes that were no UTF-8: what a tokenizer can take."""
    return (
        "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in text)
        if not text.isascii()
        else text
    )


def cut_pieces(data: bytes, characters: int) -> Iterator[bytes]:
    """Cut text into pieces of at most `characters`, at a line's end where there is one, else at a blank."""
    text = data.decode("utf-8", "surrogateescape")
    at = 0
    while len(text) - at > characters:
        end = max(text.rfind("\n", at + characters // 2, at + characters), -1) + 1
        if end <= 0:
            end = text.rfind(" ", at + characters // 2, at + characters) + 1
        end = end if end > at else at + characters
        yield text[at:end].encode("utf-8", "surrogateescape")
        at = end
    if at < len(text):
        yield text[at:].encode("utf-8", "surrogateescape")
