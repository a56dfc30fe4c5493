"""Decode steps of DeepSeek-V4.1 as one graph per token; the arithmetic is `deepseek_decode`'s, launch for launch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.experts.shard_layout import ShardLayout
from runtime.models.deepseek_decode import Decoder
from runtime.models.deepseek_state import DeepseekState
from runtime.models.token_graph import Placed, WholeToken

if TYPE_CHECKING:
    from runtime.models.deepseek_model import DeepseekModel

WORDS = 2  # of an expert in a table: where its codes and its scales start


class TokenDecoder(WholeToken, Decoder):
    """As `Decoder`. The first step, which compiles kernels, runs as its steps do."""

    def __init__(
        self, model: DeepseekModel, layout: ShardLayout, limit_s: float, has_graphs: bool = True
    ) -> None:
        """limit_s: that host and GPU wait for each other."""
        super().__init__(model, layout, has_graphs)
        self._open(model.experts, self.spec.top_k, WORDS, limit_s)

    @torch.inference_mode()
    def step(self, token: int, state: DeepseekState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab], overwritten by the next step.

        Raises DeviceError when the experts do not come in time. After any error the state is neither the old nor a new
        one; the decoder is ready for another.
        """
        if self._steps == 0:
            return super().step(token, state)
        self._warm_up()
        ids = self._begin(token, state)
        self._compute({layer: partial(self._collect, layer, ids) for layer in self.host_rows})
        self._share_head()
        return self._end(token, state)

    def _placed(self, layer: int, ids: list[int]) -> Iterator[Placed]:
        """Yield where a layer's experts are, as they arrive: two words for each row."""
        route, guesses = ids[: self.spec.top_k], ids[self.spec.top_k :]
        row_of = {expert: row for row, expert in enumerate(sorted(route))}
        offsets = self._offsets[layer]
        for wave in self.model.experts.waves(layer, route, guesses):
            placed: Placed = []
            for expert, record in wave:
                address, (codes_at, scales_at) = record.data_ptr(), offsets[expert]
                place = WORDS * row_of[expert]
                placed += [(place, address + codes_at), (place + 1, address + scales_at)]
            yield placed

    def _whole(self) -> None:
        self._layers(self._segment, self._table)
        self._last()

    def _table(self, table: Tensor) -> None:
        self._run_table(table[: WORDS * self.spec.top_k].view(-1, WORDS))
