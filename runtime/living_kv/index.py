"""Index vectors: sentences as means of hidden states, projected, centred, without their main directions.

Raw projections are stored; the mean and the directions to remove are those of the first 64, 128, 256, ... sentences, so
that adding text never changes what is stored, and every process computes the same. Knows no store and no torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from blake3 import blake3

Array = np.ndarray[Any, Any]
FIRST_STATISTICS = 64
CHUNK = 1024  # sentences that are normalised at once


def layer_numbers(fractions: tuple[float, ...] | list[float], depth: int) -> tuple[int, ...]:
    """Return the layers that stand at these fractions of a model's depth, each once."""
    return tuple(sorted({min(depth - 1, max(0, round(f * depth) - 1)) for f in fractions}))


def projection(hidden: int, dim: int, seed: int) -> Array:
    """Return a fixed orthonormal projection [hidden, min(dim, hidden)] fp32."""
    if dim >= hidden:
        return np.eye(hidden, dtype=np.float32)
    gauss = np.random.Generator(np.random.PCG64(seed)).standard_normal((hidden, dim))
    q, r = np.linalg.qr(gauss)
    return (q * np.sign(np.diag(r))).astype(np.float32)


def projection_digest(matrix: Array) -> str:
    """Return what the header keeps of a projection, rounded so that every BLAS gives the same."""
    return blake3(np.round(matrix * 2**12).astype("<i2").tobytes()).hexdigest(length=16)


class Statistics:
    """The mean and the removed directions of one layer's vectors."""

    def __init__(self, vectors: Array, remove: int) -> None:
        """vectors: [n, dim] fp32, what they are computed from."""
        self.mean = vectors.mean(0) if len(vectors) else np.zeros(vectors.shape[1], np.float32)
        self.directions = np.zeros((0, vectors.shape[1]), np.float32)
        if len(vectors) >= FIRST_STATISTICS and remove:
            centred = (vectors - self.mean).astype(np.float64)
            _, basis = np.linalg.eigh(centred.T @ centred)
            self.directions = basis[:, -remove:].T.astype(np.float32)

    def normalised(self, vectors: Array) -> Array:
        """Return vectors [n, dim] centred, without the directions, of length one (or zero)."""
        x = vectors.astype(np.float32) - self.mean
        x = x - (x @ self.directions.T) @ self.directions
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        out: Array = x / np.maximum(norms, 1e-9)
        return out


def statistics_count(sentences: int) -> int:
    """Return how many of the first sentences the statistics are of."""
    count = FIRST_STATISTICS
    while 2 * count <= sentences:
        count *= 2
    return min(count, sentences)


class VectorIndex:
    """All sentences' vectors of a store, ready to be compared with a question's."""

    def __init__(self, raw: Array, layers: int, remove: int) -> None:
        """raw: [sentences, layers * dim] fp16 as stored."""
        self.layers, self._remove = layers, remove
        self.version = self.count = 0
        dim = raw.shape[1] // layers
        self._statistics: list[Statistics] = []
        self._unit = [np.empty((len(raw), dim), np.float32) for _ in range(layers)]
        self.update(raw)

    def update(self, raw: Array) -> None:
        """Take in the sentences that were added.  raw: all of them, what is known already among them, as before.

        The numbers are those of an index made anew: what is normalised together is the same either way.
        """
        parts = raw.reshape(len(raw), self.layers, raw.shape[1] // self.layers)
        version, start = statistics_count(len(raw)), self.count // CHUNK * CHUNK
        if version != self.version:
            self.version, start = version, 0
            self._statistics = [
                Statistics(parts[:version, i].astype(np.float32), self._remove)
                for i in range(self.layers)
            ]
        for i, unit in enumerate(self._unit):
            if len(unit) < len(raw):
                self._unit[i] = np.empty((len(raw) + len(raw) // 8, unit.shape[1]), np.float32)
                self._unit[i][:start] = unit[:start]
        # what is read may be a mapped file: little of it at once
        for at in range(start, len(raw), CHUNK):
            rows = slice(at, min(at + CHUNK, len(raw)))
            for i, (unit, found) in enumerate(zip(self._unit, self._statistics, strict=True)):
                unit[rows] = found.normalised(parts[rows, i])
        self.count = len(raw)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM: 4 for each number of each sentence's vectors, so that a question is one product a layer, and
        some room for more sentences.
        """
        return sum(unit.nbytes for unit in self._unit)

    def scores(self, question: Array) -> Array:
        """question: [layers * dim], a raw projection.  Returns the mean cosine with each sentence: [n] fp32."""
        parts = question.astype(np.float32).reshape(self.layers, -1)
        cosines = [
            unit[: self.count] @ s.normalised(part[None])[0]
            for unit, s, part in zip(self._unit, self._statistics, parts, strict=True)
        ]
        out: Array = np.mean(cosines, axis=0).astype(np.float32)
        return out
