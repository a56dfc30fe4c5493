"""Decoding with guesses that a pass of the model checks: `drafts`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class DraftSource(Enum):
    """Who guesses the next tokens."""

    auto = "auto"  # the checkpoint's draft heads where it has them (DeepSeek's: on a CPU), else look-up
    heads = "heads"  # the checkpoint's draft heads; DeepSeek's on a CPU only
    lookup = "lookup"  # what followed the conversation's last tokens when they stood there before; any model


@dataclass
class DraftsConfig:
    """Decoding with guesses that a pass of the model checks, greedy and sampled: the same tokens."""

    enabled: bool = False
    source: DraftSource = DraftSource.auto
    # guesses per pass at most; null: as many as the heads give, 4 of a look-up
    depth: int | None = None
    # learn which depth is fastest, 0 (off) among them; false: always drafts.depth
    gate: bool = True
    # tokens of the conversation's ending that are looked for in it, the largest number first
    ngrams: list[int] = field(default_factory=lambda: [4, 3, 2])
    ram_gib: float = 0.0  # of the heads' experts kept in RAM; 0: only those of the layer in use


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "drafts.depth": (1, 64),
    "drafts.ram_gib": (0, 2**20),
}


def faults(drafts: DraftsConfig) -> Iterable[str]:
    """Yield what no range says."""
    if not drafts.ngrams or not all(1 <= length <= 64 for length in drafts.ngrams):
        yield f"drafts.ngrams are numbers of tokens, 1 to 64 each, at least one, got {drafts.ngrams}"
