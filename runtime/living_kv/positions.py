"""Where keys stand for the queries that see them: as they are, in chunks as the model reads far ones, or moved near.

All rotations are differences of integer positions, in float64: composing them loses nothing that fp32 shows.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

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


def dca_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, q_at: Tensor, k_at: Tensor,
    chunked: ChunkedPositions, theta: float,
) -> Tensor:  # fmt: skip
    """Attend with dual chunk positions.

    q: [T, heads, D] at positions q_at [T]; k, v: [S, kv_heads, D], k at k_at [S]; both rotated there.  visible: [T, S].
    A key stands at k_at mod L (L = chunk - local).  A query sees keys of its own chunk from q_at mod L, of the chunk
    before from min(q_at mod L + L, chunk), of earlier ones from `chunk`.  Returns [T, heads, D].
    """
    length = chunked.chunk_size - chunked.local_size
    q_chunk, k_chunk = q_at // length, k_at // length
    k = move(k, -length * k_chunk, theta)
    own = q_at % length
    targets = (
        own,
        (own + length).clamp(max=chunked.chunk_size),
        torch.full_like(own, chunked.chunk_size),
    )
    apart = q_chunk.unsqueeze(1) - k_chunk.unsqueeze(0)
    repeat = q.shape[1] // k.shape[1]
    k, v = (
        x.repeat_interleave(repeat, dim=1).transpose(0, 1).float() for x in (k, v)
    )  # [heads, S, D]
    scores = torch.empty(q.shape[1], len(q_at), len(k_at), device=q.device)
    for case, target in enumerate(targets):
        turned = move(q, target - q_at, theta).transpose(0, 1).float()
        chosen = apart == case if case < 2 else apart >= 2
        scores = torch.where(chosen, turned @ k.transpose(1, 2), scores)
    scores *= q.shape[-1] ** -0.5
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1).to(q.dtype)
