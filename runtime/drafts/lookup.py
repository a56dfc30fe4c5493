"""Guesses from the conversation's own tokens: what followed when its last few tokens stood there before. No torch."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

TOKEN_NBYTES = array("I").itemsize


class PromptLookup:
    """Finds the longest ending of a conversation that it has had before, and proposes what came then."""

    def __init__(self, lengths: Collection[int]) -> None:
        """lengths: tokens of the endings that are looked for, the longest first."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"endings of {list(lengths)} tokens cannot be looked for")
        self.lengths = sorted(set(lengths), reverse=True)

    def propose(self, tokens: Sequence[int], token: int, state: object, depth: int) -> list[int]:
        """Return `depth` tokens that may follow `tokens` and `token`, or none where no ending is found.

        Of equal lengths the latest place counts. Where it is so late that its continuation runs into the present, the
        continuation repeats itself.
        """
        del state  # the tokens tell all
        text = array("I", tokens)
        text.append(token)
        for length in self.lengths:
            end = find_latest(text, length) if length < len(text) else None
            if end is not None:
                guesses = text[end:]
                while len(guesses) < depth:
                    guesses += guesses
                return guesses[:depth].tolist()
        return []


def find_latest(text: array[int], length: int) -> int | None:
    """Return where the latest earlier occurrence of the last `length` tokens ends; None where there is none."""
    raw = memoryview(text).cast("B").tobytes()
    ending = raw[-length * TOKEN_NBYTES :]
    stop = len(raw) - TOKEN_NBYTES  # an occurrence ends before the last token does
    while True:
        at = raw.rfind(ending, 0, stop)
        if at < 0:
            return None
        if at % TOKEN_NBYTES == 0:
            return at // TOKEN_NBYTES + length
        stop = at + len(ending) - 1  # between two tokens: look further back
