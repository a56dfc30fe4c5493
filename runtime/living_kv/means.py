"""A sentence's vector while its text goes through the model: the mean of its tokens' hidden states, projected."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.living_kv.to_host import ToHost


class SentenceMeans:
    """Sums up hidden states of index layers by sentence while a piece goes through the model.

    They are projected where they are, and added up in RAM once their copies are there: the model does not wait.
    """

    def __init__(
        self, layers: Sequence[int], matrix: Tensor, owners: Sequence[int], count: int
    ) -> None:
        """owners: the sentence of each token of the piece.  matrix: [hidden, dim], where hidden states are."""
        self._layers = {layer: i for i, layer in enumerate(layers)}
        self._matrix, self._owners = matrix, torch.tensor(owners)
        self._sums = torch.zeros(len(layers), count, matrix.shape[1], dtype=torch.float64)
        self._counts = torch.bincount(self._owners, minlength=count).double()
        self._coming: deque[tuple[int, int, ToHost]] = deque()  # number of layer, first token
        self.at = 0  # token of the piece where the present forward starts

    def __call__(self, layer: int, hidden: Tensor) -> None:
        i = self._layers.get(layer)
        if i is not None:
            self._coming.append((i, self.at, ToHost(hidden.float() @ self._matrix)))
            if len(self._coming) > len(self._layers):  # of the forward before: it is there
                self._add()

    def _add(self) -> None:
        i, at, part = self._coming.popleft()
        projected = part.wait()
        self._sums[i].index_add_(0, self._owners[at : at + len(projected)], projected.double())

    def vectors(self) -> np.ndarray[Any, Any]:
        """Return [count, layers * dim] fp16."""
        while self._coming:
            self._add()
        means = self._sums / self._counts.clamp_min(1).unsqueeze(1)
        out: np.ndarray[Any, Any] = means.transpose(0, 1).flatten(1).half().numpy()
        return out
