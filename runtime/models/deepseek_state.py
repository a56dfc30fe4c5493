"""The state of one DeepSeek conversation: windows, compressed entries, index keys, and what copies of them hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from runtime.models.deepseek_weights import DeepseekSpec


@dataclasses.dataclass(slots=True)
class Compressed:
    """Entries of one source layer. Buffers grow; the first `length` rows are valid."""

    entries: Tensor  # [capacity, head_dim] bf16, rotated and rounded to FP4
    keys: Tensor  # [capacity, index_dim] bf16, of the indexers
    length: int = 0


class DeepseekState:
    """One conversation. Cannot be rolled back: windows overwrite."""

    def __init__(self, spec: DeepseekSpec, device: torch.device | None = None) -> None:
        """device: of everything but position and context; None is the CPU."""
        self.spec, self.device = spec, torch.device("cpu") if device is None else device
        self.position = 0
        self.context: list[int] = []  # up to three tokens before, oldest first
        bf16 = torch.bfloat16
        # position p lies in row p mod window
        self.windows = {
            layer: torch.zeros(spec.window, spec.head_dim, dtype=bf16, device=device)
            for layer in range(spec.num_layers)
        }
        self._windows_start = dict.fromkeys(self.windows, 0)  # nothing older was entered
        self.compressed = {
            layer: Compressed(
                torch.zeros(0, spec.head_dim, dtype=bf16, device=device),
                torch.zeros(0, spec.index_dim, dtype=bf16, device=device),
            )
            for layer in spec.kv_sources
        }
        # fp32 [0 or 1, 2, head_dim]: values and gates of a token whose partner has not come
        self.tails = {
            layer: torch.zeros(0, 2, spec.head_dim, device=device)
            for layer in spec.kv_sources
            if spec.compress_ratios[layer] == 2
        }

    def window(self, layer: int, start: int) -> Tensor:
        """Return the entries of the positions before `start` that a token there may see, oldest first: [n, D]."""
        size = self.spec.window
        device = self.windows[layer].device
        places = (
            torch.arange(max(self._windows_start[layer], start - size + 1), start, device=device)
            % size
        )
        return self.windows[layer][places]

    def forget_windows(self, layers: Iterable[int], position: int) -> None:
        """Let these layers' windows start anew at `position`; at least `window` tokens must be entered next.

        So much must follow because copies of the state do not hold where windows start.
        """
        self._windows_start |= dict.fromkeys(layers, position)

    def remember(self, layer: int, start: int, kv: Tensor) -> None:
        """Enter tokens kv [T, D] from position `start` into a layer's window."""
        size = self.spec.window
        kept = kv[-size:]
        first = start + len(kv) - len(kept)
        places = torch.arange(first, first + len(kept), device=kv.device) % size
        self.windows[layer][places] = kept

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of everything that decides the next tokens, as flat tensors in RAM."""
        out = {"position": torch.tensor([self.position]), "context": torch.tensor(self.context)}
        out |= {f"window.{layer}": window for layer, window in self.windows.items()}
        out |= {f"tail.{layer}": tail for layer, tail in self.tails.items()}
        for layer, cache in self.compressed.items():
            out[f"entries.{layer}"] = cache.entries[: cache.length]
            out[f"keys.{layer}"] = cache.keys[: cache.length]
        return {name: tensor.to("cpu", copy=True) for name, tensor in out.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the conversation that `tensors` was copied from."""

        def own(name: str) -> Tensor:
            return tensors[name].to(self.device, copy=True)

        self.position = int(tensors["position"])
        self._windows_start = dict.fromkeys(self.windows, 0)
        self.context = [int(token) for token in tensors["context"]]
        for layer in self.windows:
            self.windows[layer] = own(f"window.{layer}")
        for layer in self.tails:
            self.tails[layer] = own(f"tail.{layer}")
        for layer in self.compressed:
            entries, keys = own(f"entries.{layer}"), own(f"keys.{layer}")
            self.compressed[layer] = Compressed(entries, keys, len(entries))
