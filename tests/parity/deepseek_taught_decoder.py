"""The decoder of fixed shapes, corrected after each kernel by what the layers' own path recorded for the same token.

Its kernels do several operations at once, so bounds are wider than the operations' own; roles say which result of a
layer is which. Nothing may be captured as a graph: add hw.graphs=false.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.models.deepseek_decode import Decoder
from runtime.models.deepseek_state import DeepseekState
from tests.parity.deepseek_taught import BOUNDS, FP32, STEP, Bound, Compared, Tape, compare

DECODER_BOUNDS = {
    "streams": Bound(1e-3, STEP),
    "input": Bound(0.01, STEP),  # a norm's
    "mixes": Bound(FP32, 2e-5),
    "Engram": Bound(0.01, STEP),
    "low-rank query": Bound(0.01, STEP),
    "query": BOUNDS["quantized_linear"],
    # one norm's result rounded otherwise changes an E4M3 code now and then: 12 % of one number at most
    "window": Bound(0.02, 0.1),
    # the same with E2M1: a third of one number, or a block of 16 with another scale
    "entries": Bound(0.02, 0.3),
    "index keys": Bound(0.02, 0.3),
    "tail": Bound(FP32, 2e-6),
    "chosen": Bound(0.02, 1.0),  # of the visible entries: what other FP4 codes of a query choose
    "attended": Bound(0.02, STEP),
    "low-rank output": BOUNDS["input of quantized_linear"],
    "attention": BOUNDS["quantized_linear"],
    "route ids": BOUNDS["route ids"],
    "route weights": BOUNDS["route weights"],
    "experts": Bound(0.02, 0.1),
    "logits": Bound(FP32, 1e-3),  # behind a norm that is not corrected
}


class Wanted:
    """One recorded token's results by their role in a layer."""

    def __init__(self, tape: Tape, num_layers: int) -> None:
        """tape: of one token through the layers' own path."""
        self.results: dict[int, dict[str, list[Tensor]]] = {}
        for kind, layer, result in tape.results:
            self.results.setdefault(layer, {}).setdefault(kind, []).append(result)
        self.num_layers = num_layers

    def of(self, layer: int, kind: str, number: int) -> Tensor:
        return self.results[layer][kind][number]

    def mixes(self, layer: int, half: int) -> list[Tensor]:
        """pre, post, comb of attention (0) or the experts (1)."""
        return self.results[layer]["hyper_mixes"][3 * half : 3 * half + 3]

    def route(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return (ids, best first, weights by ascending id)."""
        ids, weights = (self.of(layer, f"route {what}", 0)[0] for what in ("ids", "weights"))
        return ids, weights[ids.argsort()]


class Corrected:
    """Compares and corrects one decoder's buffers."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.compared: list[Compared] = []
        self._layer, self._half, self._written = 0, 0, 0
        self._wanted: Wanted | None = None
        self._state: DeepseekState | None = None

    def step(self, token: int, state: DeepseekState, tape: Tape, after: DeepseekState) -> Tensor:
        """Decode a token.  tape: what the layers' own path made of it; after: its state, then.  Returns logits."""
        self._wanted = Wanted(tape, self.decoder.spec.num_layers)
        self._state, self._half, self._written = after, 0, 0
        logits = self.decoder.step(token, state)
        self._take("logits", logits, self._wanted.of(self.decoder.spec.num_layers, "read_out", 0))
        return logits

    @property
    def wanted(self) -> Wanted:
        assert self._wanted is not None
        return self._wanted

    def _take(self, kind: str, found: Tensor, wanted: Tensor, layer: int | None = None) -> bool:
        """Compare and correct; say whether it was equal."""
        wanted = wanted.to(found.dtype).view(found.shape)
        self.compared.append(compare(kind, self._layer if layer is None else layer, found, wanted))
        if self.compared[-1].unequal:
            found.copy_(wanted)
        return self.compared[-1].unequal == 0

    # ---- one method for each place where a buffer is full ----------------------------------------------------------

    def read(self, plain: Callable[..., None], *args: Any) -> None:
        u, after = args[3], args[5]
        plain(*args)
        layer, half = self._layer, self._half
        # a layer's first norm is its input's, its last that of the experts' input
        self._take("input", u, self.wanted.of(layer, "rms_norm", -half))
        wanted = self.wanted.mixes(layer, half)
        for found, mix in zip((after, self.decoder.post, self.decoder.comb), wanted, strict=True):
            self._take("mixes", found, mix[0])

    def segment(self, plain: Callable[[int], None], layer: int) -> None:
        self._layer, self._half = layer, 0
        plain(layer)

    def attend(self, plain: Callable[..., None], block: Any, layer: int) -> None:
        plain(block, layer)
        self._take("attention", self.decoder.y, self.wanted.of(layer, "quantized_linear", -1)[0])
        self._half = 1

    def fp8(
        self, plain: Callable[..., None], x: Tensor, weight: Any, out: Tensor, *groups: int
    ) -> None:
        plain(x, weight, out, *groups)
        attention = self.decoder.model.blocks[self._layer].attention
        if weight is attention.wq_b:
            self._take("query", out, self.wanted.of(self._layer, "quantized_linear", 1)[0])
        elif weight is attention.wo_a:
            low = self.wanted.of(self._layer, "input of quantized_linear", -1)[0]
            self._take("low-rank output", out, low)

    def prepare_token(self, plain: Callable[..., None], *args: Any) -> None:
        plain(*args)
        ring, query, layer = args[7], args[8], self._layer
        position = int(self.decoder.host_position[0])
        row = ring[position % len(ring)]
        self._take("low-rank query", query, self.wanted.of(layer, "rms_norm", 1)[0])
        self._take("window", row, self.wanted.of(layer, "act_rounded", 0)[0])

    def extend_entries(self, plain: Callable[..., None], *args: Any) -> None:
        plain(*args)
        tail, entries, keys = args[2], args[9], args[10]
        assert self._state is not None
        cache, layer = self._state.compressed[self._layer], self._layer
        ratio = self.decoder.spec.compress_ratios[layer]
        position = int(self.decoder.host_position[0])
        if tail is not None and position % 2 == 0:
            self._take("tail", tail, self._state.tails[layer][0])
        if (position + 1) % ratio == 0:
            row = position // ratio
            self._take("entries", entries[row], cache.entries[row])
            self._take("index keys", keys[row], cache.keys[row])

    def list_best(self, plain: Callable[..., None], *args: Any) -> None:
        plain(*args)
        chosen, ratio = args[2], args[3]
        visible = (int(self.decoder.host_position[0]) + 1) // ratio
        best = self.wanted.of(self._layer, "best_places", 0)[0].sort().values
        if not visible:
            return
        found = chosen[chosen >= 0].long().cpu()
        assert bool((found.diff() > 0).all()), "places do not ascend"
        masks = [torch.zeros(visible).index_fill_(0, places, 1.0) for places in (found, best)]
        if not self._take("chosen", *masks):
            chosen.fill_(-1)
            chosen[: len(best)] = best.to(chosen)

    def attend_token(self, plain: Callable[..., None], *args: Any) -> None:
        plain(*args)
        self._take("attended", args[-1], self.wanted.of(self._layer, "rotate", -1)[0])

    def gate_engram(self, plain: Callable[..., None], *args: Any) -> None:
        plain(*args)
        self._take("Engram", args[3], self.wanted.of(self._layer, "Engram", 0)[0])

    def write_streams(self, plain: Callable[..., None], y: Tensor, *args: Any) -> None:
        plain(y, *args)
        layer, half = divmod(self._written, 2)
        self._written += 1
        out, mixing = args[3], args[4:]
        is_equal = self._take("streams", out, self.wanted.of(layer, "hyper_write", half)[0], layer)
        if not is_equal and mixing and mixing[0] is not None:
            self.decoder._token.mix_streams(out, *mixing)  # of the corrected ones

    def route(self, plain: Callable[..., None], block: Any, layer: int) -> None:
        plain(block, layer)
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize()  # the route lies in the host's memory
        ids, weights = self.wanted.route(layer)
        self._take("route ids", self.decoder.host_route[layer, : len(ids)], ids)
        self._take("route weights", self.decoder.weights, weights)

    def combine_token(
        self, plain: Callable[..., None], rows: Tensor, shared: Tensor, out: Tensor
    ) -> None:
        plain(rows, shared, out)
        layer = self._written // 2
        self._take("experts", out, self.wanted.of(layer, "Moe", 0)[0], layer)


@contextmanager
def corrected(decoder: Decoder) -> Iterator[Corrected]:
    """Let a decoder be corrected, from a state that equals the recorded one's."""
    assert not decoder.graphs.is_on, "a captured graph cannot be corrected: add hw.graphs=false"
    right = Corrected(decoder)
    modules = {
        "_token": ("prepare_token", "gate_engram", "write_streams"),
        "_compress": ("extend_entries",),
        "_index": ("list_best",),
        "_attention": ("attend_token",),
        "_moe": ("combine_token",),
    }
    with pytest.MonkeyPatch.context() as patch:
        for where, names in modules.items():
            module = getattr(decoder, where)
            functions = {name: value for name, value in vars(module).items() if callable(value)}
            for name in names:
                functions[name] = functools.partial(getattr(right, name), functions[name])
            patch.setattr(decoder, where, SimpleNamespace(**functions))
        for name in ("segment", "read", "attend", "fp8", "route"):
            method = getattr(decoder, f"_{name}")
            patch.setattr(decoder, f"_{name}", functools.partial(getattr(right, name), method))
        yield right
