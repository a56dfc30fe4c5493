"""What plain attention asks of a conversation, and the plain state: every key and value, in growing buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference as ops
from runtime.models.buffers import appended

# of fp32 scores that one call computes at once; a few times that is held
SCORES_NBYTES = 2**26  # on a GPU
CPU_SCORES_NBYTES = 2**24  # of few tokens: a prompt has torch's fused kernel
FUSED_ROWS = 256  # queries of one fused call: the next ones see more keys
LEAST_FUSED = 64  # queries; fewer are faster as products


class HasHeads(Protocol):
    """A configuration with grouped-query attention in every layer."""

    @property
    def depth(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class KvState(Protocol):
    """Keys and values of one conversation. A forward is begin, then attend and observe per layer, then end."""

    position: int  # of the next token

    def begin(self, num_tokens: int) -> None:
        """Make room for the next tokens and decide what they see."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Take keys and values in and attend.

        q: [T, heads, D].  k, v: [T, kv_heads, D]; q and k rotated at their positions.  Returns [T, heads, D].
        """

    def observe(self, layer: int, hidden: Tensor) -> None:
        """See the residual stream [T, H] after a layer."""

    def end(self) -> None:
        """All layers have seen the tokens."""


def attend_rows(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attend in pieces of queries that keep the scores small.

    q: [T, heads, D].  k, v: [S, kv_heads, D].  visible: [T, S] bool, or None: each query sees all.  Returns q's shape.
    """
    if not q.is_cuda and len(q) > LEAST_FUSED:
        return _attend_fused(q, k, v, visible)
    nbytes = SCORES_NBYTES if q.is_cuda else CPU_SCORES_NBYTES
    rows = max(1, nbytes // (4 * q.shape[1] * k.shape[0]))
    if rows >= q.shape[0]:
        return ops.attention(q, k, v, visible)
    out = torch.empty_like(q)
    for at in range(0, q.shape[0], rows):
        part = slice(at, at + rows)
        out[part] = ops.attention(q[part], k, v, None if visible is None else visible[part])
    return out


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """As `attend_rows`, by torch's kernel that keeps no scores; keys that no query of a piece sees are left out."""
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    out = torch.empty_like(q)
    for at in range(0, q.shape[2], FUSED_ROWS):
        part, end, seen = slice(at, at + FUSED_ROWS), k.shape[2], None
        if visible is not None:
            end = int(visible[part].any(0).nonzero()[-1]) + 1
            seen = visible[part, :end]
        out[:, :, part] = F.scaled_dot_product_attention(
            q[:, :, part], k[:, :, :end], v[:, :, :end], attn_mask=seen, enable_gqa=True
        )
    return out.squeeze(0).transpose(0, 1)


class DenseState:
    """All keys and values: full attention."""

    def __init__(
        self, spec: HasHeads, dtype: torch.dtype, device: torch.device, room: int = 0
    ) -> None:
        """room: tokens that the buffers hold at once; they grow beyond."""
        self.position = 0
        self._count = 0
        shape = (room, spec.kv_heads, spec.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.depth)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.depth)]
        self._visible: Tensor | None = None
        self._device = device

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of everything that decides the next tokens, as flat tensors in RAM."""
        out = {"position": torch.tensor([self.position])}
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            out[f"keys.{layer}"] = keys[: self.position].to("cpu", copy=True)
            out[f"values.{layer}"] = values[: self.position].to("cpu", copy=True)
        return out

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the conversation that `tensors` was copied from."""
        self.position = int(tensors["position"])
        for name, buffers in (("keys", self.keys), ("values", self.values)):
            for layer, buffer in enumerate(buffers):
                buffers[layer] = appended(buffer, 0, tensors[f"{name}.{layer}"].to(self._device))

    def begin(self, num_tokens: int) -> None:
        self._count, self._visible = num_tokens, None
        if num_tokens > 1:
            end = self.position + num_tokens
            queries = torch.arange(self.position, end, device=self._device)
            self._visible = queries.unsqueeze(1) >= torch.arange(end, device=self._device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[layer] = appended(self.keys[layer], self.position, k)
        self.values[layer] = appended(self.values[layer], self.position, v)
        end = self.position + self._count
        return attend_rows(q, self.keys[layer][:end], self.values[layer][:end], self._visible)

    def observe(self, layer: int, hidden: Tensor) -> None:
        """Nothing is kept of it."""

    def end(self) -> None:
        self.position += self._count
