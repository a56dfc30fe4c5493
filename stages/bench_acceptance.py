"""Guesses of a chosen acceptance, for `bench`: what drafts would give if so many of them were right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from runtime.drafts.passes import Drafting

SOURCE_NAME = "the answer"


class KnownAnswer:
    """Guesses the answer itself, which decoding without drafts has shown, each token right with the same chance.

    Who guessed before is asked all the same, for what that takes; what it says is thrown away.
    """

    def __init__(self, drafting: Drafting, acceptance: float, vocab_size: int, seed: int) -> None:
        """Take the place of a drafting's source.  acceptance: 0 to 1."""
        self._asked, self._acceptance, self._vocab_size = drafting.source, acceptance, vocab_size
        self._seed = seed
        self.start((), ())
        drafting.source, drafting.source_name = self, f"{SOURCE_NAME}, {acceptance:.0%} right"

    def start(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Begin an answer anew: the same guesses are wrong each time."""
        self._first, self._answer = len(prompt), answer
        self._random = random.Random(self._seed)

    def propose(self, tokens: Sequence[int], token: int, state: Any, depth: int) -> list[int]:
        """Return the `depth` tokens that will follow `token`, some of them wrong; fewer where the answer ends."""
        self._asked.propose(tokens, token, state, depth)
        at = len(tokens) - self._first + 1
        return [
            right if self._random.random() < self._acceptance else (right + 1) % self._vocab_size
            for right in self._answer[at : at + depth]
        ]
