"""Decode steps of Qwen as one graph per token; the arithmetic is `qwen_decode`'s, launch for launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_state import QwenState
from runtime.models.token_graph import WAVES, Placed, TokenGraph, paced_copier

if TYPE_CHECKING:
    from runtime.models.qwen_model import QwenModel


class TokenDecoder(Decoder):
    """As `Decoder`. The first step, which compiles kernels, runs as its steps do."""

    def __init__(
        self, model: QwenModel, context_tokens: int, limit_s: float, has_graphs: bool = True
    ) -> None:
        """context_tokens: as for `Decoder`.  limit_s: that host and GPU wait for each other.

        A VRAM tier before the model's experts must have a `PacedCopier`.
        """
        super().__init__(model, context_tokens, has_graphs)
        spec = self.spec
        words = self.host_route.shape[1]
        self._token = TokenGraph(
            self.device, spec.num_layers, spec.top_k, 1, words, limit_s, *paced_copier(model.experts)
        )
        self._is_warm = False
        self._is_whole = False  # the launches are those of a whole token, not of segments

    @torch.inference_mode()
    def step(self, token: int, state: QwenState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab], overwritten by the next step.

        Raises DeviceError when the experts do not come in time. After any error the state is neither the old nor a new
        one; the decoder is ready for another.
        """
        if self._steps == 0:
            return super().step(token, state)
        if not self._is_warm:
            self._token.warm_up()
            self._synchronize()
            self._is_warm = True
        request = self._begin(token, state)
        before = self._token.wait_ns
        self._is_whole = True
        try:
            inputs = {self.spec.ple_layer: lambda: self._collect(request)}
            self._token.run(self._launch, self._synchronize, self._placed, inputs)
        finally:
            self._is_whole = False
            self.wait_ns += self._token.wait_ns - before
        return self._end(token, state)

    def _launch(self) -> None:
        self.graphs.run("token", self._whole, is_first=False)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _placed(self, layer: int, ids: list[int]) -> Iterator[Placed]:
        """Yield where a layer's experts are, as they arrive: (row, address)."""
        route, guesses = ids[: self.spec.top_k], ids[self.spec.top_k :]
        row_of = {expert: row for row, expert in enumerate(sorted(route))}
        for wave in self.model.experts.waves(layer, route, guesses):
            yield [(row_of[expert], record.data_ptr()) for expert, record in wave]

    # ---- the device's part ----------------------------------------------------------------------------------------

    def _whole(self) -> None:
        """Everything from the token to its logits."""
        graph = self._token
        graph.start()
        for layer in range(self.spec.num_layers):
            self._segment(layer)
            for wave in range(WAVES):
                graph.await_wave(layer, wave)
                self._experts(graph.table[: self.spec.top_k])
            graph.note_computed(layer)
        graph.publish_end()
        self._last()

    def _experts(self, table: Tensor) -> None:
        from kernels.nvfp4_expert import nvfp4_experts

        nvfp4_experts(self.x, table, self.scales, self.inner, self.rows)

    def _route_of(self, layer: int) -> Tensor:
        if not self._is_whole:
            return super()._route_of(layer)
        return self._token.route[: self.host_route.shape[1]]

    def _routed(self, layer: int) -> None:
        if self._is_whole:
            self._token.publish_route(layer)

    def _await_rows(self, layer: int) -> None:
        if self._is_whole:
            self._token.await_inputs(layer)
