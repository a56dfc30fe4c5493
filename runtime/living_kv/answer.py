"""What the memory says to a question, and how that is told. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.living_kv.confidence import Verdict


@dataclass(frozen=True, slots=True)
class Answer:
    """What the memory says to a question."""

    text: str
    tokens: list[int]
    finish: str  # stop, length
    verdict: Verdict
    mode: str  # kv, ground, quote
    sentences: list[dict[str, Any]]  # what it rests on, best first, as quotes
    position_mode: str
    largest_distance: int
    support: float
    fetched_tokens: int
    read_nbytes: int  # of blocks, from the drive
    asked_tokens: int  # of question and prompt, read by the model

    @property
    def shown(self) -> str:
        """The answer for people: it says so first where the memory is not sure."""
        if not self.verdict.is_low:
            return self.text
        return f"LOW CONFIDENCE ({self.verdict.reason}, {self.verdict.confidence:.2f})\n{self.text}"

    def to_dict(self) -> dict[str, Any]:
        """Return the `memory` field of a reply, with the answer."""
        return {
            "answer": self.text,
            "mode": self.mode,
            "confidence": self.verdict.confidence,
            "low_confidence": self.verdict.is_low,
            "reason": self.verdict.reason,
            "support": round(self.support, 4),
            "positions": self.position_mode,
            "largest_distance": self.largest_distance,
            "fetched_tokens": self.fetched_tokens,
            "read_nbytes": self.read_nbytes,
            "sentences": self.sentences,
        }
