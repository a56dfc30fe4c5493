"""The state of one DeepSeek conversation: windows, compressed entries, index keys, and what copies of them hold."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from runtime.models.deepseek_weights import DeepseekSpec
from runtime.models.qwen_state import appended

__all__ = ["Compressed", "DeepseekState", "appended"]


@dataclasses.dataclass(slots=True)
class Compressed:
    """Entries of one source layer. Buffers grow; the first `length` rows are valid."""

    entries: Tensor  # [capacity, head_dim] bf16, rotated and rounded to FP4
    keys: Tensor  # [capacity, index_dim] bf16, of the indexers
    length: int = 0


class DeepseekState:
    """One conversation. Cannot be rolled back: windows overwrite."""

    def __init__(self, spec: DeepseekSpec) -> None:
        self.spec = spec
        self.position = 0
        self.context: list[int] = []  # up to three tokens before, oldest first
        bf16 = torch.bfloat16
        # position p lies in row p mod window
        self.windows = {
            layer: torch.zeros(spec.window, spec.head_dim, dtype=bf16)
            for layer in range(spec.num_layers)
        }
        self.compressed = {
            layer: Compressed(
                torch.zeros(0, spec.head_dim, dtype=bf16), torch.zeros(0, spec.index_dim, dtype=bf16)
            )
            for layer in spec.kv_sources
        }
        # fp32 [0 or 1, 2, head_dim]: values and gates of a token whose partner has not come
        self.tails = {
            layer: torch.zeros(0, 2, spec.head_dim)
            for layer in spec.kv_sources
            if spec.compress_ratios[layer] == 2
        }

    def window(self, layer: int, start: int) -> Tensor:
        """Return the entries of the positions before `start` that a token there may see, oldest first: [n, D]."""
        size = self.spec.window
        places = torch.arange(max(0, start - size + 1), start) % size
        return self.windows[layer][places]

    def remember(self, layer: int, start: int, kv: Tensor) -> None:
        """Enter tokens kv [T, D] from position `start` into a layer's window."""
        size = self.spec.window
        kept = kv[-size:]
        first = start + len(kv) - len(kept)
        self.windows[layer][torch.arange(first, first + len(kept)) % size] = kept
