"""Where keys stand for the queries that see them: as they are, in chunks as the model reads far ones, or moved near.

All rotations are differences of integer positions, in float64: composing them loses nothing that fp32 shows.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from runtime.models.buffers import sendable
from runtime.models.dense_weights import ChunkedPositions, DenseSpec
from runtime.models.rope import rope_tables, rotate


class Mode(Enum):
    """How far keys are presented to attention."""

    absolute = "absolute"  # at their positions
    dca = "dca"  # dual chunk attention: distances beyond a chunk are cut to the chunk's size
    near = "near"  # packed just before the tail: every distance was trained on


def choose_mode(
    wanted: str, spec: DenseSpec, largest_distance: int, near_beyond: int | None = None
) -> Mode:
    """Return the mode that `auto` means: absolute while the distance was trained on, then dca if the model has it.

    near_beyond: a distance from which the model was seen to read worse than near by: near then; None: not known.
    """
    if wanted != "auto":
        return Mode(wanted)
    if near_beyond is not None and largest_distance > near_beyond:
        return Mode.near
    trained = spec.chunked.trained if spec.chunked else spec.max_positions
    if largest_distance <= 0.95 * trained:
        return Mode.absolute
    return Mode.dca if spec.chunked else Mode.near


def move(keys: Tensor, steps: Tensor, theta: float) -> Tensor:
    """Rotate keys that are rotated already by `steps` more positions.  keys: [..., n, H, D].  steps: [n] int64."""
    return rotate(
        keys, *(t.to(keys.device) for t in rope_tables(steps.cpu(), keys.shape[-1], theta))
    )


def near_steps(places: Tensor, end: int) -> Tensor:
    """Return by how much sorted `places` [n] move to stand in a row just before position `end`."""
    return torch.arange(end - len(places), end, device=places.device) - places


class ChunkedForward:
    """What dual chunk positions come to for the tokens of one forward: the same for all layers, made once.

    A key stands at its position mod L (L = chunk - local). A query sees keys of its own chunk from its position mod L,
    of the chunk before from min(that + L, chunk), of earlier ones from `chunk`.
    """

    def __init__(
        self, q_at: Tensor, k_at: Tensor, chunked: ChunkedPositions, dim: int, theta: float
    ) -> None:
        """q_at: [T] in RAM.  k_at: [S] where attention is."""
        q_at, device = q_at.cpu(), k_at.device
        length = chunk_length(chunked)
        own = q_at % length
        targets = (
            own,
            (own + length).clamp(max=chunked.chunk_size),
            torch.full_like(own, chunked.chunk_size),
        )
        steps = torch.stack([*(target - q_at for target in targets), own - q_at])
        cos, sin = rope_tables(steps.flatten(), dim, theta)
        self.tables = torch.stack([cos, sin]).view(2, 4, len(q_at), -1)
        sent, chunks = (sendable(part, device) for part in (self.tables, q_at // length))
        *self._turns, self._key_turn = sent.to(device, non_blocking=True).unbind(1)
        q_chunk = chunks.to(device, non_blocking=True)
        apart = q_chunk.unsqueeze(1) - (k_at // length).unsqueeze(0)
        self._chosen = (apart == 0, apart == 1, apart >= 2)

    def moved_keys(self, k: Tensor) -> Tensor:
        """Move the forward's own keys to where they stand.  k: [T, kv_heads, D], rotated at their positions."""
        return rotate(k, *self._key_turn)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """q: [T, heads, D], rotated at their positions.  k, v: [S, kv_heads, D], k where they stand.  visible: [T, S].

        Returns [T, heads, D].
        """
        repeat = q.shape[1] // k.shape[1]
        # [heads, S, D]
        k, v = (x.repeat_interleave(repeat, dim=1).transpose(0, 1).float() for x in (k, v))
        scores = torch.empty(q.shape[1], q.shape[0], k.shape[1], device=q.device)
        for turn, chosen in zip(self._turns, self._chosen, strict=True):
            turned = rotate(q, *turn).transpose(0, 1).float()
            scores = torch.where(chosen, turned @ k.transpose(1, 2), scores)
        scores *= q.shape[-1] ** -0.5
        if visible is not None:
            scores.masked_fill_(~visible, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)


def chunk_length(chunked: ChunkedPositions) -> int:
    """Return after how many positions keys stand where they stood before."""
    return chunked.chunk_size - chunked.local_size


def chunk_steps(places: Tensor, chunked: ChunkedPositions) -> Tensor:
    """Return by how much keys at `places` [n] move to stand in their chunk."""
    length = chunk_length(chunked)
    return -length * (places // length)


def dca_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, q_at: Tensor, k_at: Tensor,
    chunked: ChunkedPositions, theta: float,
) -> Tensor:  # fmt: skip
    """Attend with dual chunk positions, from keys that are rotated at their positions.

    q: [T, heads, D] at positions q_at [T]; k, v: [S, kv_heads, D], k at k_at [S].  visible: [T, S].  Returns
    [T, heads, D].
    """
    forward = ChunkedForward(q_at, k_at, chunked, q.shape[-1], theta)
    return forward.attend(q, move(k, chunk_steps(k_at, chunked), theta), v, visible)
