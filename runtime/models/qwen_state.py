"""The state of one Qwen conversation: recurrent memories, keys and values, and what copies of them hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.models.qwen_weights import QwenSpec


@dataclasses.dataclass(slots=True)
class AttentionState:
    """Keys and values of one attention layer, and the indexer's keys. Buffers grow; `length` tokens are valid."""

    keys: Tensor  # [capacity, kv_heads, head_dim]
    values: Tensor
    pooled: (
        Tensor  # [capacity / block_tokens, index_dim], normed and rotated keys of complete blocks
    )
    open_block: (
        Tensor  # [0..block_tokens - 1, index_dim], raw keys of the block that is not complete
    )


class QwenState:
    """One conversation. Cannot be rolled back: copy it (`tensors`, `restore`) at the token to return to."""

    def __init__(
        self, spec: QwenSpec, dtype: torch.dtype, device: torch.device, is_borrowed: bool = False
    ) -> None:
        """is_borrowed: buffers are lent by a decoder before the first token; until then one zero stands for all."""

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            if is_borrowed and 0 not in shape:
                return torch.zeros(1, dtype=dtype, device=device).expand(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.spec, self.device = spec, device
        self.version = 0  # counts the changes that a decoder has not made itself
        self.position = 0
        self.ngram_context = [spec.eos, spec.eos]  # the two tokens before, oldest first
        delta_layers = [layer for layer in range(spec.num_layers) if not spec.is_attention[layer]]
        self.delta = {
            layer: zeros(spec.value_heads, spec.key_dim, spec.value_dim, dtype=torch.float32)
            for layer in delta_layers
        }
        self.conv = {layer: zeros(spec.conv_kernel - 1, spec.conv_width) for layer in delta_layers}
        self.ple_conv = zeros((spec.ple_kernel - 1) * spec.ngram_size, spec.streams * spec.hidden)
        self.attention = {
            layer: AttentionState(
                zeros(0, spec.kv_heads, spec.head_dim),
                zeros(0, spec.kv_heads, spec.head_dim),
                zeros(0, spec.index_dim),
                zeros(0, spec.index_dim),
            )
            for layer in range(spec.num_layers)
            if spec.is_attention[layer]
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of everything that decides the next tokens, as flat tensors in RAM."""
        length, blocks = self.position, self.position // self.spec.block_tokens
        out = {
            "position": torch.tensor([self.position]),
            "ngram_context": torch.tensor(self.ngram_context),
            "ple_conv": self.ple_conv,
        }
        out |= {f"delta.{layer}": state for layer, state in self.delta.items()}
        out |= {f"conv.{layer}": state for layer, state in self.conv.items()}
        for layer, state in self.attention.items():
            out[f"keys.{layer}"] = state.keys[:length]
            out[f"values.{layer}"] = state.values[:length]
            out[f"pooled.{layer}"] = state.pooled[:blocks]
            out[f"open_block.{layer}"] = state.open_block
        # without a second copy on a GPU, whose memory is planned to the last slot
        return {name: tensor.to("cpu", copy=True) for name, tensor in out.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the conversation that `tensors` was copied from."""

        def own(name: str) -> Tensor:
            return tensors[name].to(self.device, copy=True)

        self.version += 1
        self.position = int(tensors["position"])
        self.ngram_context = [int(token) for token in tensors["ngram_context"]]
        self.ple_conv = own("ple_conv")
        for layer in self.delta:
            self.delta[layer] = own(f"delta.{layer}")
            self.conv[layer] = own(f"conv.{layer}")
        for layer in self.attention:
            self.attention[layer] = AttentionState(
                *(own(f"{part}.{layer}") for part in ("keys", "values", "pooled", "open_block"))
            )
