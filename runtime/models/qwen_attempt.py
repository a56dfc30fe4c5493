"""Several tokens through a Qwen model as so many single steps, and the way back from those that are not accepted.

Every token goes alone through all that is not an expert, in the shapes of a single step, so that the bits are those of
single steps: a product over several rows sums in another order. What is shared is the reading: a layer's experts are
fetched once for all tokens. After each token the layer's recurrent memory and convolution window are kept aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference as ops
from runtime.models.qwen_state import QwenState

if TYPE_CHECKING:
    from runtime.models.qwen_model import QwenModel


class QwenAttempt:
    """Tokens that were taken in and may be taken back, before the next forward of the same conversation."""

    def __init__(self, model: QwenModel, tokens: Sequence[int], state: QwenState) -> None:
        self.tokens = list(tokens)
        self._state, self._start, self._context = state, state.position, state.ngram_context
        # after none of the tokens, the first, the second ...; a layer replaces them, but for `delta`
        self._delta = {layer: [memory] for layer, memory in state.delta.items()}
        self._conv = {layer: [window] for layer, window in state.conv.items()}
        self._open_block = {layer: [kv.open_block] for layer, kv in state.attention.items()}
        self._ple_conv = [state.ple_conv]
        self.logits, self.taps = self._run(model)  # [T, vocab] fp32; [T, S, H], the last streams

    @torch.inference_mode()
    def _run(self, model: QwenModel) -> tuple[Tensor, Tensor]:
        from runtime.models.qwen_model import Attention

        spec, state, tokens = model.spec, self._state, self.tokens
        state.version += 1
        request = model.rows.request(model.ple.row_ids(tokens, state.ngram_context))
        streams = [
            model.embedding[torch.tensor([token])].unsqueeze(1).repeat(1, spec.streams, 1)
            for token in tokens
        ]
        places = range(self._start, self._start + len(tokens))
        tables = [
            ops.rope_tables(torch.tensor([place]), spec.rotary_dim, spec.rope_theta)
            for place in places
        ]
        for layer, block in enumerate(model.blocks):
            if layer == spec.ple_layer:
                for residual, raw in zip(
                    streams, model.rows.collect(request).view(len(tokens), 1, -1), strict=True
                ):
                    residual += model.ple(residual, model.ple.embed(raw, residual), state)
                    self._ple_conv.append(state.ple_conv)
            inputs, amounts = [], []
            for residual, place, (cos, sin) in zip(streams, places, tables, strict=True):
                x, amount = model.attention_mixers[layer].read(residual)
                if isinstance(block, Attention):
                    y = block(x, state.attention[layer], place, cos, sin)
                    self._open_block[layer].append(state.attention[layer].open_block)
                else:
                    state.delta[layer] = state.delta[layer].clone()  # it is written in place
                    y = block(x, state)
                    self._delta[layer].append(state.delta[layer])
                    self._conv[layer].append(state.conv[layer])
                residual += amount * y.unsqueeze(1)
                x, amount = model.mlp_mixers[layer].read(residual)
                inputs.append(x)
                amounts.append(amount)
            ys = model.moes[layer].rows(inputs, model.experts, model.num_guesses)
            for residual, amount, y in zip(streams, amounts, ys, strict=True):
                residual += amount * y.unsqueeze(1)
        self._move(len(tokens))
        last = [model.final_mixer.mix(residual)[0] for residual in streams]
        return torch.cat([F.linear(x, model.head).float() for x in last]), torch.cat(streams)

    def _move(self, count: int) -> None:
        self._state.ngram_context = [*self._context, *self.tokens[:count]][-2:]
        self._state.position = self._start + count

    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens had been fed."""
        state = self._state
        for layer in state.delta:
            state.delta[layer] = self._delta[layer][count]
            state.conv[layer] = self._conv[layer][count]
        for (
            layer,
            kv,
        ) in state.attention.items():  # keys, values and blocks end where the position says
            kv.open_block = self._open_block[layer][count]
        state.ple_conv = self._ple_conv[count]
        self._move(count)
