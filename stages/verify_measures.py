"""What `verify` measures: greedy answers, perplexity, and how far two runs' probabilities lie apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.sampling import SamplingParams
from runtime.session import Session
from stages.download import PROJECT


def greedy_answer(session: Session, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the tokens of a greedy answer, stop token included."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [piece.token for piece in session.generate(prompt, params) if piece.token is not None]


def read_documents(snapshot: Path, language: str) -> list[str]:
    """Return the held-out documents shipped with a model, or the bundled ones for a model without."""
    path = snapshot / f"heldout_{language}.txt"
    if not path.exists():
        path = PROJECT / "runtime" / "bundled" / "tiny-qwen" / path.name
    return [text.strip() for text in path.read_text().split("<|endoftext|>") if text.strip()]


def perplexity(engine: Engine, documents: Sequence[str], document_tokens: int) -> tuple[float, int]:
    """Return exp(mean negative log-likelihood) over all predicted tokens, and their number."""
    total, count = 0.0, 0
    for document in documents:
        tokens = document_ids(engine, document, document_tokens)
        for start, logits in _logits(engine, tokens[:-1], engine.prefill_tokens):
            targets = torch.tensor(
                tokens[start + 1 : start + 1 + len(logits)], device=logits.device
            )
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            total, count = total + float(losses), count + len(logits)
    mean = total / count
    return (math.exp(mean) if mean < 700 else math.inf), count


def divergence(
    engine: Engine,
    documents: Sequence[str],
    document_tokens: int,
    change: Callable[[], AbstractContextManager[None]],
    piece_tokens: int | None = None,
) -> float:
    """Return the mean over tokens of KL(undamaged || changed), in nats.

    change: entered for the second run of each document.  piece_tokens: of the prompt in that run; None: as ever.
    """
    total, count = 0.0, 0
    for document in documents:
        tokens = document_ids(engine, document, document_tokens)[:-1]
        right = _log_probabilities(engine, tokens, engine.prefill_tokens)
        with change():
            other = _log_probabilities(engine, tokens, piece_tokens or engine.prefill_tokens)
        total += float((right.exp() * (right - other)).sum())
        count += len(tokens)
    return total / count


def document_ids(engine: Engine, document: str, document_tokens: int) -> list[int]:
    """Return a document's tokens, its end included, cut at `document_tokens`."""
    return engine.codec.encode(f"{document}\n<|endoftext|>")[:document_tokens]


def _log_probabilities(engine: Engine, tokens: list[int], piece_tokens: int) -> Tensor:
    logits = torch.cat([logits for _, logits in _logits(engine, tokens, piece_tokens)])
    return logits.log_softmax(-1)


def _logits(engine: Engine, tokens: list[int], piece_tokens: int) -> Iterator[tuple[int, Tensor]]:
    """Take in the tokens in pieces: (first token's place, logits [T, vocab]) of each."""
    state = engine.new_state()
    for start in range(0, len(tokens), piece_tokens):
        piece = tokens[start : start + piece_tokens]
        yield start, engine.model.prefill(piece, state, all_logits=True)
