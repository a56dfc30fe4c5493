"""One graph for a whole token: what the host and the running graph tell each other, and the host's side of it.

After a layer's router the graph writes the route into pinned memory, then the step's number behind it. The host polls
that word, asks for the experts, and answers with tables of addresses, at most a fixed number of waves for each layer,
each with the step's number behind it and a word that says which is the last. The graph waits for each before it
launches the wave: on the GPU, by polling too. No CUDA call is made in between, but for copies to VRAM slots.

Neither side waits for ever. When the host meets an error (a read that failed), it gives the step up in the same words;
when an answer does not come in time, the graph does. Either way the rest of the graph runs through without touching an
expert, the host waits for its end and raises what was wrong. What the conversation's state has become then is unknown:
whoever owns it resets it, as after any error in the middle of a token. The next step has another number.
"""

from __future__ import annotations

import platform
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import reference_flags
from kernels.reference_flags import LINE
from runtime.errors import DeviceError, UserError
from runtime.experts.paced import PacedCopier
from runtime.experts.slots import SlotExperts
from runtime.experts.source import ExpertSource
from runtime.models.graphs import Graphs

# A layer's waves: what is there at once; what comes until one expert is missing; the last. A wave that is not needed
# costs three small launches, so there are no more; with two, each expert from the drive would wait for the last one.
WAVES = 3
SPINS = 64  # polls before the host lets other threads go on between two of them
POLLS_PER_LOOK = 1024  # at the clock
NS = 10**9

Placed = list[tuple[int, int]]  # words of a table: (place, value)


def check_token_graph(max_batch: int) -> None:
    """Refuse where one graph per token cannot work. Raises UserError."""
    if max_batch > 1:
        raise UserError(
            "hw.graphs=token decodes one conversation at a time: the graph of one would wait for experts while the "
            f"others, serve.max_batch={max_batch}, wait behind it",
            "set hw.graphs=true, or serve.max_batch=1",
        )
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UserError(
            "hw.graphs=token needs a processor that shows its writes in order (x86-64), this one is "
            f"{platform.machine()}",
            "set hw.graphs=true",
        )


def _paced_copier(experts: ExpertSource) -> tuple[PacedCopier | None, bool]:
    """Return who copies to the VRAM tier of a source of experts, if it has one, and whether some are copied early."""
    if not isinstance(experts, SlotExperts):
        return None, False
    assert isinstance(experts.copier, PacedCopier), "events do not fire within a graph"
    return experts.copier, experts.early_copies > 0


class TokenGraph:
    """Words in pinned memory, kernels around them, and the host's loop over the layers of a token."""

    def __init__(
        self,
        device: torch.device,
        num_layers: int,
        top_k: int,
        expert_words: int,
        route_words: int,
        limit_s: float,
        copier: PacedCopier | None = None,
        has_early_copies: bool = False,
    ) -> None:
        """expert_words: of a table, for each of a layer's top_k experts.  route_words: that the host gets.

        limit_s: that either side waits for the other.  copier: of the VRAM tier, if there is one.  has_early_copies:
        it copies experts of the next layer when those of this one are computed.
        """
        self._flags: Any = reference_flags
        if device.type == "cuda":
            from kernels import flags

            self._flags = flags
        is_cuda = device.type == "cuda"

        def pinned(*shape: int) -> Tensor:
            host = torch.zeros(shape, dtype=torch.int64)
            return host.pin_memory() if is_cuda else host

        def words(count: int) -> int:
            return LINE * -(-count // LINE)

        table_words = top_k * expert_words
        self.num_layers, self.limit_s = num_layers, limit_s
        self._expert_words, self._table_words = expert_words, table_words
        self._route_words = route_words
        self._copier, self._has_early_copies = copier, has_early_copies
        # written by the host: the step's number, and for each layer its waves and one row that says inputs are there
        self._host_ticket = pinned(2)  # and how long the graph waits
        self._host_ticket[1] = int(limit_s * NS)
        self._gates = pinned(num_layers, WAVES + 1, LINE + words(table_words))
        # written by the graph: routes, one flag more for the end, and which layers' experts are computed
        self._routes = pinned(num_layers + 1, LINE + words(route_words))
        self._done = pinned(num_layers, LINE)
        self._ticket_view, self._gates_view = self._host_ticket.numpy(), self._gates.numpy()
        self._routes_view, self._done_view = self._routes.numpy(), self._done.numpy()

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._ticket, self._poison = zeros(2), zeros(1)
        # layers whose last wave has come; the last row is never closed
        self._closed = zeros(num_layers + 1, LINE)
        self.route, self.table = zeros(words(route_words)), zeros(words(table_words))
        self._number = 0  # of the step, even
        self.wait_ns = 0  # the host, for the graph and for copies
        # with 0: lets other threads go on; `time.sleep(0)` may take 70 us
        self._breathe = select.poll().poll

    # ---- the graph's part ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Read which step this is."""
        self._ticket.copy_(self._host_ticket, non_blocking=True)

    def publish_route(self, layer: int) -> None:
        """Give the host what is in `route`."""
        self._publish(self._routes[layer], self._route_words)

    def await_inputs(self, layer: int) -> None:
        """Wait for what the host has to fill in before a layer."""
        self._wait(self._closed[-1, :1], self._gates[layer, WAVES], 0)

    def await_wave(self, layer: int, wave: int) -> None:
        """Wait for a wave, and fill `table` with it."""
        self._wait(self._closed[layer, :1], self._gates[layer, wave], self._table_words)

    def note_computed(self, layer: int) -> None:
        """Tell the host that the layer's experts are computed."""
        if self._has_early_copies:
            self._publish(self._done[layer], 0)

    def publish_end(self) -> None:
        """Tell the host that nothing is waited for any more."""
        self._publish(self._routes[self.num_layers], 0)

    def _publish(self, row: Tensor, count: int) -> None:
        self._flags.publish(self._ticket, self._poison, self.route, row, count)

    def _wait(self, closed: Tensor, row: Tensor, count: int) -> None:
        self._flags.wait(self._ticket, self._poison, closed, row, self.table, count)

    def warm_up(self) -> None:
        """Run every kind of launch once: a capture must not meet a kernel that is compiled or loaded."""
        self._next()
        self._gates_view[0, :, 0] = self._number
        self._gates_view[0, :, LINE:] = 0
        self.start()
        self.publish_route(0)
        self.await_inputs(0)
        self.await_wave(0, 0)
        self.note_computed(0)
        self.publish_end()

    # ---- the host's part -------------------------------------------------------------------------------------------

    def run(
        self,
        launch: Callable[[], None],
        finish: Callable[[], None],
        placed: Callable[[int, list[int]], Iterator[Placed]],
        inputs: Mapping[int, Callable[[], None]],
    ) -> None:
        """Run one token; return when only what follows the last layer's experts is left to compute.

        launch: starts the graph.  finish: waits for its end, after an error.  placed: gives, for a layer and its route,
        the words of its table in the waves in which they arrive, each word once.  inputs: fill in what a layer needs.
        """
        self._next()
        copier = self._copier
        if copier is not None:
            copier.begin(self._has_computed)
        try:
            launch()
            for layer in range(self.num_layers):
                if layer in inputs:
                    inputs[layer]()
                    self._gates_view[layer, WAVES, 0] = self._number
                self._await(layer)
                if copier is not None:
                    copier.reach(layer)
                route = self._routes_view[layer, LINE : LINE + self._route_words].tolist()
                self._serve(layer, placed(layer, route))
            self._await(self.num_layers)
        except BaseException:
            self._gates_view[:, :, 0] = -self._number
            finish()
            raise
        finally:
            if copier is not None:
                copier.end()

    def _next(self) -> None:
        self._number += 2
        self._ticket_view[0] = self._number

    def _serve(self, layer: int, waves: Iterable[Placed]) -> None:
        """Answer a route: the last wave takes all that remains, the one before all but the last expert."""
        wave, left = 0, self._table_words
        held: Placed = []
        for placed in waves:
            if not placed:
                continue
            held += placed
            left -= len(placed)
            if left and (wave == WAVES - 1 or (wave == WAVES - 2 and left > self._expert_words)):
                continue
            self._answer(layer, wave, held, is_last=not left)
            held, wave = [], wave + 1
        assert not left, "a route was not answered"

    def _answer(self, layer: int, wave: int, placed: Placed, is_last: bool) -> None:
        """Let the graph go on to a wave.  is_last: it does not wait for those behind it."""
        if self._copier is not None:
            started = time.perf_counter_ns()
            self._copier.arrive(self.limit_s)
            self.wait_ns += time.perf_counter_ns() - started
        row = self._gates_view[layer, wave]
        row[LINE:] = 0
        for place, value in placed:
            row[LINE + place] = value
        row[0] = self._number + is_last  # behind the table: x86 shows writes in their order

    def _has_computed(self, layer: int) -> bool:
        return bool(abs(self._done_view.item(layer, 0)) == self._number)

    def _await(self, layer: int) -> None:
        """Wait until the graph has reached a layer's route, or its end. Raises DeviceError when it has given up."""
        said, number, copier = self._routes_view[layer].item, self._number, self._copier
        started = time.perf_counter_ns()
        polls = 0
        while (found := said(0)) != number:
            if found == -number:
                raise self._gave_up(layer)
            if copier is not None:
                copier.look()
            polls += 1
            if polls > SPINS:
                self._breathe(0)
            if not polls % POLLS_PER_LOOK and time.perf_counter_ns() - started > self.limit_s * NS:
                raise DeviceError(
                    f"the GPU has not come to layer {layer} within {self.limit_s:g} s",
                    "see the kernel log (dmesg) and `nvidia-smi`; hw.graphs=true does not limit this",
                )
        self.wait_ns += time.perf_counter_ns() - started

    def _gave_up(self, layer: int) -> DeviceError:
        return DeviceError(
            f"the GPU gave a token up: what it needed before layer {layer} of {self.num_layers} did not come within "
            f"{self.limit_s:g} s",
            "see the kernel log (dmesg) for the drive, raise hw.graph_limit_s, or set hw.graphs=true, which waits",
        )


class WholeToken(ABC):
    """What makes a decoder of segments one of whole tokens: its launches in one graph, with the waits in between.

    Comes before the decoder among a class's parents; `_whole` and `_placed` are the family's.
    """

    graphs: Graphs
    device: torch.device
    host_route: Tensor  # [num_layers, words]
    wait_ns: int
    _stream: torch.cuda.Stream | None

    def _open(self, experts: ExpertSource, top_k: int, expert_words: int, limit_s: float) -> None:
        """experts: a VRAM tier before them must have a `PacedCopier`.  The rest is for `TokenGraph`."""
        layers, words = self.host_route.shape
        self._token_graph = TokenGraph(
            self.device, layers, top_k, expert_words, words, limit_s, *_paced_copier(experts)
        )
        self._is_warm = False
        self._is_whole = False  # what is launched now is a whole token, not segments

    def _warm_up(self) -> None:
        if not self._is_warm:
            self._token_graph.warm_up()
            self._synchronize()
            self._is_warm = True

    def _compute(self, inputs: Mapping[int, Callable[[], None]]) -> None:
        """Run a token whose inputs are filled in, but for those that a layer needs.  inputs: fill those in."""
        before = self._token_graph.wait_ns
        self._is_whole = True
        try:
            self._token_graph.run(self._launch, self._synchronize, self._placed, inputs)
        finally:
            self._is_whole = False
            self.wait_ns += self._token_graph.wait_ns - before

    def _launch(self) -> None:
        self.graphs.run("token", self._whole, is_first=False)

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @abstractmethod
    def _whole(self) -> None:
        """Launch everything from the token to its logits."""

    @abstractmethod
    def _placed(self, layer: int, ids: list[int]) -> Iterator[Placed]:
        """Yield where a layer's experts are, as they arrive."""

    def _layers(self, segment: Callable[[int], None], experts: Callable[[Tensor], None]) -> None:
        """Launch all layers.  segment: up to a layer's route.  experts: of a table."""
        graph = self._token_graph
        graph.start()
        for layer in range(graph.num_layers):
            segment(layer)
            for wave in range(WAVES):
                graph.await_wave(layer, wave)
                experts(graph.table)
            graph.note_computed(layer)
        graph.publish_end()

    # ---- what the decoder calls within a segment -------------------------------------------------------------------

    def _route_of(self, layer: int) -> Tensor:
        if self._is_whole:
            return self._token_graph.route[: self.host_route.shape[1]]
        return self.host_route[layer]

    def _routed(self, layer: int) -> None:
        if self._is_whole:
            self._token_graph.publish_route(layer)

    def _await_rows(self, layer: int) -> None:
        if self._is_whole:
            self._token_graph.await_inputs(layer)
