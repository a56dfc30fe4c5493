"""Which sentences a question gets, and how wide the choice is. Knows scores and lengths; no store, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
RANKED = 8  # best sentences that are told
_WIDE = re.compile(
    r"\b(list|all|every|each|both|which ones|what are|все|какие|перечисли|alle|welche)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen sentences, ascending, and what the choice looked like."""

    sentences: tuple[int, ...]
    ranked: tuple[int, ...]  # the best ones, best first
    scores: tuple[float, ...]  # of these
    is_narrow: bool
    top: float
    margin: float  # over the second
    z: float  # of the top among all
    lexical: float  # of the top sentence
    dense: float  # the best cosine of any


def fuse(dense: Array | None, lexical: Array, how: str) -> Array:
    """Return one score for each sentence: lin (sum), rrf (reciprocal ranks), dense or lex."""
    if how == "lex" or dense is None:
        return lexical.astype(np.float32)
    if how == "dense":
        return dense.astype(np.float32)
    if how == "lin":
        return (dense + lexical).astype(np.float32)
    ranks = [np.argsort(np.argsort(-s, kind="stable"), kind="stable") for s in (dense, lexical)]
    return sum(1 / (60.0 + r) for r in ranks).astype(np.float32)  # type: ignore[union-attr]


def is_wide_question(question: str) -> bool:
    """Whether a question asks for several things."""
    return _WIDE.search(question) is not None


def select(
    dense: Array | None,
    lexical: Array,
    lengths: Array,
    allowed: Array,
    budget: int,
    gap: float,
    min_sentence: int,
    how: str = "lin",
    width: str = "auto",
    question: str = "",
    is_all: bool = False,
) -> Selection | None:
    """Choose by falling score: while it is within `gap` of the best and tokens are left.

    lengths: [n] tokens of each sentence, its retrieval cost.  allowed: [n] bool: in scope and not pruned.
    A clear winner (`gap` ahead of the second) stands alone: similar but wrong neighbours mislead the answer.  A short
    pick takes the sentences behind it along.  is_all: everything that is allowed.  None: nothing is allowed.
    """
    ids = np.flatnonzero(allowed)
    if not len(ids):
        return None
    scores = fuse(dense, lexical, how)[ids]
    order = ids[np.argsort(-scores, kind="stable")]  # equal scores: the earlier sentence
    full = fuse(dense, lexical, how)
    top = float(full[order[0]])
    margin = top - float(full[order[1]]) if len(order) > 1 else top
    spread = float(scores.std())
    z = (top - float(scores.mean())) / spread if spread > 1e-9 else 0.0
    wide = width == "wide" or (width == "auto" and is_wide_question(question))
    is_narrow = not wide and (width == "narrow" or margin >= gap)
    chosen: set[int] = set()
    left = budget
    if is_all:
        chosen = {int(i) for i in ids}
    else:
        for sentence in order.tolist():
            if (is_narrow and chosen) or (not wide and full[sentence] < top - gap) or left <= 0:
                break
            left = _take(sentence, lengths, allowed, chosen, left, min_sentence)
    return Selection(
        sentences=tuple(sorted(chosen)),
        ranked=tuple(order[:RANKED].tolist()),
        scores=tuple(full[order[:RANKED]].tolist()),
        is_narrow=is_narrow,
        top=top,
        margin=margin,
        z=z,
        lexical=float(lexical[order[0]]),
        dense=0.0 if dense is None else float(dense[ids].max()),
    )


def _take(
    sentence: int, lengths: Array, allowed: Array, chosen: set[int], left: int, least: int
) -> int:
    """Add a sentence, and while it is short those behind it; return the tokens that are left. The first always fits."""
    taken = 0
    while sentence < len(lengths) and allowed[sentence]:
        cost = 0 if sentence in chosen else int(lengths[sentence])
        if cost > left and chosen:
            break
        chosen.add(sentence)
        left -= cost
        taken += int(lengths[sentence])
        sentence += 1
        if taken >= least:
            break
    return left
