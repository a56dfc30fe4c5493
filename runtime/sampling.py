"""From logits to a token: greedy, or temperature, top-k, top-p and min-p, with a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is drawn. Filters apply in the order temperature, top-k, top-p, min-p."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None  # None: up to the window


class Sampler:
    """Draw tokens below `num_tokens` (rows of the head above it are padding and never drawn)."""

    def __init__(self, params: SamplingParams, num_tokens: int) -> None:
        self.params = params
        self.num_tokens = num_tokens
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % 2**63)

    def __call__(self, logits: Tensor) -> int:
        """logits: [1, vocab] fp32.  Returns a token id."""
        row = logits[0, : self.num_tokens]
        if self.params.temperature == 0:
            return int(row.argmax())
        probabilities = self.probabilities(row.cpu())
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

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
            before = (
                ordered.cumsum(-1) - ordered
            )  # a token stays while the mass before it is below top_p
            keep = torch.zeros_like(order, dtype=torch.bool).scatter(0, order, before < p.top_p)
            probabilities = _keep(probabilities, keep)
        if p.min_p > 0:
            probabilities = _keep(probabilities, probabilities >= p.min_p * probabilities.max())
        return probabilities


def _keep(probabilities: Tensor, keep: Tensor) -> Tensor:
    kept = probabilities * keep
    return kept / kept.sum()
