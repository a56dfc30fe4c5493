"""From logits to a token: penalties; greedy, or temperature, top-k, top-p and min-p, with a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is drawn: penalties change the logits, then temperature, top-k, top-p and min-p apply in order."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0  # taken off a token's logit for each time that the answer has it
    presence_penalty: float = 0.0  # taken off once, if the answer has it
    # logits of tokens in prompt or answer are divided by it (negative: multiplied)
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # likeliest tokens to tell with each; None: no log-probabilities
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None  # None: up to the window

    @property
    def has_penalties(self) -> bool:
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A drawn token's log-probability before temperature and filters, and (id, log-probability) of the likeliest."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Draw tokens below `num_tokens` (rows of the head above it are padding and never drawn)."""

    def __init__(self, params: SamplingParams, num_tokens: int, prompt: Sequence[int] = ()) -> None:
        """prompt: what the repetition penalty counts beside the answer."""
        self.params = params
        self.num_tokens = num_tokens
        self._counts: Counter[int] = Counter()  # of the answer
        self._seen = set(prompt) if params.repetition_penalty != 1 else set()
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**63)

    def __call__(self, logits: Tensor) -> int:
        """logits: [1, vocab] fp32.  Returns a token id."""
        row = logits[0, : self.num_tokens]
        if self.params.has_penalties:
            row = self.penalized(row.cpu())
        if self.params.temperature == 0:
            token = int(row.argmax())
        else:
            probabilities = self.probabilities(row.cpu())
            token = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if self.params.has_penalties:
            self._counts[token] += 1
            self._seen.add(token)
        return token

    def penalized(self, row: Tensor) -> Tensor:
        """Return logits [num_tokens] fp32 less the penalties for what was said."""
        p, row = self.params, row.clone()
        seen = torch.tensor([t for t in self._seen if t < len(row)], dtype=torch.int64)
        if p.repetition_penalty != 1:
            said = row[seen]
            row[seen] = torch.where(
                said > 0, said / p.repetition_penalty, said * p.repetition_penalty
            )
        if self._counts:
            tokens = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            row[tokens] -= p.frequency_penalty * times + p.presence_penalty
        return row

    def logprob(self, logits: Tensor, token: int) -> TokenLogprob | None:
        """Return a drawn token's log-probability where they were asked for.  logits: what it was drawn from."""
        if self.params.logprobs is None:
            return None
        row = logits[0, : self.num_tokens].cpu().log_softmax(-1)
        best = row.topk(min(self.params.logprobs, len(row)))
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprob(token, float(row[token]), tuple(top))

    def probabilities(self, row: Tensor) -> Tensor:
        """Return what tokens are drawn with: [num_tokens] fp32, sums to one."""
        p = self.params
        # the largest logit first becomes 0: a tiny temperature must not overflow
        probabilities = ((row - row.max()) / p.temperature).softmax(-1)
        if 0 < p.top_k < len(row):
            probabilities = _keep(
                probabilities, probabilities >= probabilities.topk(p.top_k).values[-1]
            )
        if p.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            # a token stays while the mass before it is below top_p
            before = ordered.cumsum(-1) - ordered
            keep = torch.zeros_like(order, dtype=torch.bool).scatter(0, order, before < p.top_p)
            probabilities = _keep(probabilities, keep)
        if p.min_p > 0:
            probabilities = _keep(probabilities, probabilities >= p.min_p * probabilities.max())
        return probabilities


def _keep(probabilities: Tensor, keep: Tensor) -> Tensor:
    kept = probabilities * keep
    return kept / kept.sum()
