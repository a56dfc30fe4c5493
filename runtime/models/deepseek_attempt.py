"""Several tokens through a DeepSeek model as so many single steps, and the way back from those that are not accepted.

Every token goes alone through all that is not an expert, in the shapes of a single step, so that the bits are those of
single steps; a layer's experts are fetched once for all tokens. Windows overwrite, so what they held is kept aside, and
so is each compressor's half pair after each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels import reference_deepseek as ops
from runtime.models.deepseek_state import DeepseekState

if TYPE_CHECKING:
    from runtime.models.deepseek_model import DeepseekModel


class DeepseekAttempt:
    """Tokens that were taken in and may be taken back, before the next forward of the same conversation."""

    def __init__(self, model: DeepseekModel, tokens: Sequence[int], state: DeepseekState) -> None:
        """tokens: at most a window of them."""
        size = model.spec.window
        if len(tokens) > size:
            raise ValueError(
                f"{len(tokens)} rows cannot be taken back from a window of {size} positions"
            )
        self.tokens = list(tokens)
        self._state, self._start, self._context = state, state.position, state.context
        self._slots = torch.arange(self._start, self._start + len(tokens)) % size
        self._overwritten = {layer: ring[self._slots] for layer, ring in state.windows.items()}
        # after none of the tokens, the first, the second ...; a compressor replaces them
        self._tails = {layer: [tail] for layer, tail in state.tails.items()}
        self.logits = self._run(model)  # [T, V] fp32

    @torch.inference_mode()
    def _run(self, model: DeepseekModel) -> Tensor:
        from runtime.models.deepseek_model import Choice

        state, tokens = self._state, self.tokens
        entry, pres, ids_of = model.enter(tokens, state)
        streams, pre = list(entry.split(1)), list(pres.split(1))
        choices = [Choice() for _ in tokens]
        for block in model.blocks:
            if block.engram is not None:
                rows = model.engram_rows(block.layer, ids_of[block.layer]).split(1)
                streams = [block.engram(x, row) for x, row in zip(streams, rows, strict=True)]
            done = []
            for i, choice in enumerate(choices):
                done.append(model.attend(block, streams[i], pre[i], self._start + i, choice, state))
                if block.layer in self._tails:
                    self._tails[block.layer].append(state.tails[block.layer])
            inputs = [u for _, u, *_ in done]
            ys = block.moe.rows(inputs, model.experts, model.open_expert)
            streams = [
                ops.hyper_write(y, x, post, comb)
                for y, (x, _, _, post, comb) in zip(ys, done, strict=True)
            ]
            pre = [last_pre for _, _, last_pre, _, _ in done]
        logits = [model.read_out(x, p) for x, p in zip(streams, pre, strict=True)]
        self._move(len(tokens))
        return torch.cat(logits)

    def _move(self, count: int) -> None:
        self._state.context = [*self._context, *self.tokens[:count]][-3:]
        self._state.position = self._start + count

    @torch.inference_mode()
    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens had been fed."""
        state, end = self._state, self._start + count
        for layer, rows in self._overwritten.items():
            state.windows[layer][self._slots[count:]] = rows[count:]
        for layer, tails in self._tails.items():
            state.tails[layer] = tails[count]
        for layer, cache in state.compressed.items():
            cache.length = end // state.spec.compress_ratios[layer]
        self._move(count)
