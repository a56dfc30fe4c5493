"""One decoded token of a dense model with everything at fixed addresses: on a GPU a graph for each layer.

A layer's graph reads the record where the layer lies; where layers pass through slots, each slot has its own. The state
brings buffers that never move, and says by numbers in VRAM which of their rows a token sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from runtime.models.buffers import sendable
from runtime.models.dense_state import KvState
from runtime.models.graphs import Graphs
from runtime.models.rope import rope_tables

if TYPE_CHECKING:
    from runtime.models.dense import DenseModel


class StepGraphs:
    """What a state keeps of its steps: its graphs, and which kinds of step were run once as they are."""

    def __init__(self, is_on: bool) -> None:
        """is_on: capture graphs (CUDA); else launches run one by one."""
        self.graphs = Graphs(is_on)
        self.seen: set[str] = set()


@runtime_checkable
class FixedState(KvState, Protocol):
    """A conversation whose keys and values lie at fixed addresses."""

    def begin_step(self) -> bool:
        """Do what `begin` does for one token; True: `attend` is the same launches as for the token before."""

    def step_kind(self) -> str:
        """Return what the launches of `attend` depend on, beside the layer."""

    @property
    def steps(self) -> StepGraphs:
        """Its graphs, which end with its buffers."""


class DenseStep:
    """The token's residual stream and rotation, and the launches of a layer on them."""

    def __init__(self, model: DenseModel, has_graphs: bool = True) -> None:
        """has_graphs: replay a layer from its second time on, on a GPU; else launch it again: the same numbers."""
        spec = model.spec
        self._model, self._has_graphs = model, has_graphs
        self._hidden = torch.zeros(1, spec.hidden, dtype=model.dtype, device=model.device)
        self._tables = torch.zeros(2, 1, spec.head_dim // 2, device=model.device)

    def run(self, token: int, state: FixedState, after_layer: Callable[[], None]) -> Tensor:
        """Take one token in, after `state.begin_step`. Returns the last residual stream [1, H]."""
        model, spec, kept = self._model, self._model.spec, state.steps
        place = torch.tensor([state.position])
        tables = torch.stack(rope_tables(place, spec.head_dim, spec.rope_theta))
        row = model.embedding[token : token + 1]
        self._tables.copy_(sendable(tables, model.device), non_blocking=True)
        self._hidden.copy_(sendable(row, model.device), non_blocking=True)
        kind = state.step_kind()
        is_launched = kind not in kept.seen or not self._has_graphs
        for layer, record in model.experts.sweep(0, range(spec.depth)):

            def launch(layer: int = layer, record: Tensor = record) -> None:
                weights = model.open_layer(layer, record)
                out = model.block(layer, weights, self._hidden, state, *self._tables)
                self._hidden.copy_(out)

            kept.graphs.run((kind, layer, record.data_ptr()), launch, is_launched)
            state.observe(layer, self._hidden)
            after_layer()
        kept.seen.add(kind)
        state.end()
        return self._hidden.clone()
