"""How sure the memory is, from what was retrieved: a rule for small stores, for others a fit to their own sentences.

The model's own certainty plays no part: of questions about a near miss it is as certain as of known facts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.living_kv import files
from runtime.living_kv.lexical import terms
from runtime.living_kv.select import Selection

Array = np.ndarray[Any, Any]
RULE_LEXICAL, RULE_MARGIN = 0.75, 0.1  # what a store of few sentences must reach
MIN_SENTENCES = 64
NAME = "calibration.json"
UNKNOWN_NAME = "Qzyxvath"
MIN_SUPPORT = 0.5  # of an answer's words that stand in what was retrieved


@dataclass(frozen=True, slots=True)
class Verdict:
    """How sure, from 0 to 1, whether that is too little, and why: a word, empty where it is enough."""

    confidence: float
    is_low: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Estimator:
    """A logistic fit to features of known and unknown questions."""

    sentences: int  # of the store when it was fitted
    weights: tuple[float, ...]
    bias: float
    means: tuple[float, ...]
    scales: tuple[float, ...]
    threshold: float
    held_out_false: float  # share of held-out absent questions above the threshold
    held_out_missed: float  # share of held-out present questions below it

    def probability(self, x: Array) -> float:
        """x: as `features` returns it."""
        scaled = (x - np.array(self.means)) / np.array(self.scales)
        return float(_sigmoid(scaled @ np.array(self.weights) + self.bias))


def features(found: Selection) -> Array:
    """Return what the fit sees of a selection: [4] fp64."""
    return np.array([found.lexical, found.z, found.margin, found.dense])


def judge(found: Selection | None, estimator: Estimator | None) -> Verdict:
    """Return the verdict on a selection; None is an empty store or scope."""
    if found is None:
        return Verdict(0.0, True, "empty_store")
    if estimator is None:
        share = min(1.0, found.lexical / RULE_LEXICAL, max(0.0, found.margin) / RULE_MARGIN)
        confidence, is_low = 0.9 * share, share < 1
        if found.lexical == 0:
            confidence = min(confidence, 0.5)
    else:
        confidence = estimator.probability(features(found))
        is_low = confidence < estimator.threshold
    return Verdict(round(confidence, 4), is_low, _reason(found) if is_low else "")


def _reason(found: Selection) -> str:
    if found.lexical < 1 / 3:
        return "no_rare_term"
    return "ambiguous" if found.margin < RULE_MARGIN else "weak"


def support(answer: str, retrieved: str) -> float:
    """Return the share of an answer's words that stand in the retrieved text; 1 for an answer without words."""
    words = terms(answer)
    known = set(terms(retrieved))
    return sum(word in known for word in words) / len(words) if words else 1.0


def cloze(text: str) -> str | None:
    """Return a sentence without its last content word and what follows it; None for one that has too few words."""
    words = terms(text)
    if len(words) < 3:
        return None
    at = text.casefold().rfind(words[-1])
    return text[:at].strip() if at > 0 else None


def with_unknown_name(question: str, rarest: str | None) -> str | None:
    """Return a question about something that no text names: its rarest word replaced; None if it is not found."""
    at = -1 if rarest is None else question.casefold().find(rarest)
    return None if at < 0 else f"{question[:at]}{UNKNOWN_NAME}{question[at + len(rarest or '') :]}"


def calibrate(
    texts: Sequence[str],
    ask: Callable[[str, int | None], Selection | None],
    rarest: Callable[[str], str | None],
    count: int,
    target: float,
    seed: int = 0,
) -> Estimator | None:
    """Fit to cloze questions from a store's sentences: as they are, with their sentence hidden, and about another name.

    The third kind is the near miss: every word but the one that matters is in the store, many times perhaps.
    ask: (question, sentence to hide or None) -> selection.  rarest: a question -> its rarest word.  target: share of
    absent questions that may pass.  A third is held out, for the two rates.  None: too few usable sentences.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    rows: list[Array] = []
    labels: list[float] = []
    for sentence in rng.permutation(len(texts)).tolist():
        if len(rows) >= 3 * count:
            break
        question = cloze(texts[sentence])
        other = None if question is None else with_unknown_name(question, rarest(question))
        if question is None or other is None:
            continue
        answer = terms(texts[sentence])[-1]
        for asked, hidden, is_present in (
            (question, None, True),
            (question, sentence, False),
            (other, None, False),
        ):
            found = ask(asked, hidden)
            if found is None:
                continue
            if hidden is not None and answer in terms(texts[found.ranked[0]]):
                continue  # another sentence says the same: it is not absent
            rows.append(features(found))
            labels.append(float(is_present))
    if len(rows) < 60:
        return None
    x, y = np.array(rows), np.array(labels)
    cut = len(x) * 2 // 3
    means, scales = x[:cut].mean(0), x[:cut].std(0) + 1e-6
    weights, bias = _fit((x[:cut] - means) / scales, y[:cut])
    p = _sigmoid(((x - means) / scales) @ weights + bias)
    absent_p = np.sort(p[:cut][y[:cut] == 0])
    threshold = max(
        0.5, float(absent_p[min(len(absent_p) - 1, int((1 - target) * len(absent_p)))]) + 1e-6
    )
    held, is_present = p[cut:], y[cut:] == 1
    return Estimator(
        len(texts), tuple(weights), float(bias), tuple(means), tuple(scales), threshold,
        float((held[~is_present] >= threshold).mean()), float((held[is_present] < threshold).mean()),
    )  # fmt: skip


def load_estimator(root: Path) -> Estimator | None:
    """Return a store's fit; None if there is none, or it cannot be read: it is made anew."""
    try:
        data = json.loads((root / NAME).read_text())
        lists = {k: tuple(v) for k, v in data.items() if isinstance(v, list)}
        return Estimator(**{**data, **lists})
    except (OSError, ValueError, TypeError):
        return None


def save_estimator(root: Path, found: Estimator) -> None:
    """Keep a fit beside its store."""
    files.replace(root / NAME, (json.dumps(asdict(found)) + "\n").encode())


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))


def _fit(x: Array, y: Array, l2: float = 0.1) -> tuple[Array, float]:
    """Newton steps of a logistic regression; the penalty keeps it finite where the classes part cleanly."""
    design = np.column_stack([x, np.ones(len(x))])
    w = np.zeros(design.shape[1])
    penalty = l2 * np.eye(len(w))
    penalty[-1, -1] = 1e-6
    for _ in range(50):
        p = _sigmoid(design @ w)
        gradient = design.T @ (p - y) + penalty @ w
        hessian = (design * (p * (1 - p))[:, None]).T @ design + penalty
        w = w - np.linalg.solve(hessian, gradient)
    return w[:-1], float(w[-1])
