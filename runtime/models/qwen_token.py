"""Decode steps of Qwen as one graph per token; the arithmetic is `qwen_decode`'s, launch for launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_state import QwenState
from runtime.models.token_graph import Placed, WholeToken

if TYPE_CHECKING:
    from runtime.models.qwen_model import QwenModel


class TokenDecoder(WholeToken, Decoder):
    """As `Decoder`. The first step, which compiles kernels, runs as its steps do."""

    def __init__(
        self, model: QwenModel, context_tokens: int, limit_s: float, has_graphs: bool = True
    ) -> None:
        """context_tokens: as for `Decoder`.  limit_s: that host and GPU wait for each other."""
        super().__init__(model, context_tokens, has_graphs)
        self._open(model.experts, self.spec.top_k, 1, limit_s)

    @torch.inference_mode()
    def step(self, token: int, state: QwenState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab], overwritten by the next step.

        Raises DeviceError when the experts do not come in time. After any error the state is neither the old nor a new
        one; the decoder is ready for another.
        """
        if self._steps == 0:
            return super().step(token, state)
        self._warm_up()
        request = self._begin(token, state)
        self._compute({self.spec.ple_layer: lambda: self._collect(request)})
        return self._end(token, state)

    def _placed(self, layer: int, ids: list[int]) -> Iterator[Placed]:
        """Yield where a layer's experts are, as they arrive: (row, address)."""
        route, guesses = ids[: self.spec.top_k], ids[self.spec.top_k :]
        row_of = {expert: row for row, expert in enumerate(sorted(route))}
        for wave in self.model.experts.waves(layer, route, guesses):
            yield [(row_of[expert], record.data_ptr()) for expert, record in wave]

    def _whole(self) -> None:
        self._layers(self._segment, self._experts)
        self._last()

    def _experts(self, table: Tensor) -> None:
        from kernels.nvfp4_expert import nvfp4_experts

        nvfp4_experts(self.x, table, self.scales, self.inner, self.rows)
