"""Bounded replay of DeepSeek-V4.1: of a long prompt the later layers see the last window alone. An approximation.

The layers before the last source of compressed entries see every token, and so does that source's compressor: all
compressed entries, all index keys and the earlier layers' windows are those of an exact prompt. The rest of the source
layer and the layers behind it run for the last `window` tokens of a piece, and none of these sees a window entry from
before the first of them; angles and the visibility of compressed entries go by absolute positions, as always. So the
later layers' windows, and what is decoded after, are close to exact and not equal. Pieces of at most `window` tokens
are exact continuations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels import reference_deepseek as ops
from runtime.models.deepseek_model import Block, Choice, DeepseekModel
from runtime.models.deepseek_state import DeepseekState
from runtime.models.deepseek_weights import DeepseekSpec


def describe(spec: DeepseekSpec) -> str:
    """Return the sentence that says what is approximate."""
    return (
        f"deepseek.replay=bounded: prompts are approximate, layers {first_bounded_layer(spec)} to "
        f"{spec.num_layers - 1} see the last {spec.window} tokens of a piece of the prompt alone"
    )


def first_bounded_layer(spec: DeepseekSpec) -> int:
    """Return the first layer that does not see every token: the last source of compressed entries."""
    return spec.kv_sources[-1]


class BoundedModel(DeepseekModel):
    """A model whose prompts are approximate; decoding is the same."""

    def prefill(
        self,
        tokens: Sequence[int],
        state: DeepseekState,
        all_logits: bool = False,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """As `DeepseekModel.prefill`. With all_logits, and for at most `window` tokens, exact."""
        if all_logits or len(tokens) <= self.spec.window:
            return super().prefill(tokens, state, all_logits, after_layer)
        return self._replay(tokens, state, after_layer)

    @torch.inference_mode()
    def _replay(
        self, tokens: Sequence[int], state: DeepseekState, after_layer: Callable[[], None]
    ) -> Tensor:
        spec, start = self.spec, state.position
        bounded, kept = first_bounded_layer(spec), spec.window
        streams, pre, ids_of = self.enter(tokens, state)
        parts = self._parts(len(tokens))
        choices = [Choice() for _ in parts]
        for block in self.blocks:
            self._recall(block, streams, ids_of, parts)
            if block.layer == bounded:
                self._compress(block, streams[:-kept], pre[:-kept], start, state)
                streams, pre = streams[-kept:], pre[-kept:]
                start = state.position + len(tokens) - kept
                state.forget_windows(range(bounded, spec.num_layers), start)
                parts = self._parts(kept)
                choices = [Choice() for _ in parts]
            streams, pre = self._run(block, streams, pre, start, parts, choices, state)
            after_layer()
        return self._leave(tokens, state, streams[-1:], pre[-1:])

    def _compress(
        self, block: Block, streams: Tensor, pre: Tensor, start: int, state: DeepseekState
    ) -> None:
        """Append the source's entries of tokens that go no further: streams [T, S, d] from position `start`."""
        assert block.attention.compressor is not None
        cos, sin = self.tables[1]  # of layers with compressed entries
        for part in self._parts(len(streams)):
            read = ops.hyper_read(streams[part], pre[part])
            u = ops.rms_norm(read, block.attn_norm, self.spec.eps)
            block.attention.compressor.extend(u, start + part.start, state, cos, sin)
