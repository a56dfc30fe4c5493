"""The hot tier: sinks, what was retrieved, and the last tokens, in buffers that are made once and never grow.

Rows of a buffer, per layer: [room | sinks | retrieved | hot | free]. The used part is one piece in the order of
positions, so attention reads it without a copy, and with nothing left out it is the full cache, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from conf.schema import MemoryConfig
from kernels import dense_ops
from runtime.living_kv.positions import (
    ChunkedForward,
    Mode,
    chunk_length,
    chunk_steps,
    move,
    near_steps,
)
from runtime.living_kv.sentences import MAX_TOKENS
from runtime.models.buffers import sendable
from runtime.models.dense_state import attend_rows
from runtime.models.dense_step import StepGraphs
from runtime.models.dense_weights import DenseSpec
from runtime.models.rope import rope_tables, rotate

Observer = Callable[[int, Tensor], None]


def buffer_tokens(config: MemoryConfig) -> tuple[int, int]:
    """Return the tokens of a timeline's buffers, and of those in which questions are answered."""
    timeline = config.sinks + config.window + config.chunk
    return timeline, timeline + scratch_budget(config)


def scratch_budget(config: MemoryConfig) -> int:
    """Return the tokens that a question may retrieve: a sentence at least, whole, and what a short one takes along."""
    return max(config.budget, MAX_TOKENS) + MAX_TOKENS


class HotState:
    """A conversation whose attention sees sinks, retrieved tokens and a window. A dense model's `KvState`."""

    def __init__(
        self,
        spec: DenseSpec,
        sinks: int,
        budget: int,
        window: int,
        chunk: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """budget: tokens that may be retrieved.  window: tokens that a query sees, itself among them.
        chunk: tokens of one forward at most.
        """
        self.spec, self.sinks, self.budget, self.window, self.chunk = (
            spec,
            sinks,
            budget,
            window,
            chunk,
        )
        self._device = device
        self._hot_at = sinks + budget  # row of the first hot token
        rows = sinks + budget + window + chunk
        shape = (spec.depth, rows, spec.kv_heads, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.places = torch.zeros(rows, dtype=torch.int64, device=device)
        self.observer: Observer | None = None
        self.mode = Mode.absolute
        # a step's own: its row; the rows that it sees; rotations of its query and key in `Mode.dca`
        self._row = torch.zeros(1, dtype=torch.int64, device=device)
        self._span = torch.zeros(2, dtype=torch.int32, device=device)
        self._turns = torch.zeros(2, 4, 1, spec.head_dim // 2, device=device)
        self._steps = StepGraphs(device.type == "cuda")
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers: the same from the first token to the last."""
        return self.keys.nbytes + self.values.nbytes + self.places.nbytes

    def clear(self, position: int = 0) -> None:
        """Forget everything; the next token stands at `position`."""
        self.position = self.hot_start = position
        self.num_sinks = self.num_retrieved = 0
        # a query sees hot tokens from here on, however far; None: its window
        self.floor: int | None = None
        self.border = 0  # nothing taken in sees hot tokens before it, sinks apart
        self._count = 0
        self._first = self._hot_at
        self._visible: Tensor | None = None
        self._chunks: ChunkedForward | None = None  # of the present forward, in `Mode.dca`
        # the present forward is one token that finds all it needs at fixed addresses
        self._is_step = False

    # ---- filling --------------------------------------------------------------------------------------------------

    def put_sinks(self, keys: Tensor, values: Tensor) -> None:
        """Place the first tokens of the timeline: [L, n, H, D] of positions 0 to n - 1."""
        assert not self.num_retrieved, "sinks come before retrieved tokens"
        self._put_before(keys, values, torch.arange(keys.shape[1]))
        self.num_sinks = keys.shape[1]

    def retrieve(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        """Place cold tokens between sinks and hot ones.  keys, values: [L, n, H, D].  places: [n] sorted.

        What was retrieved before goes. Raises ValueError when they do not fit or stand where a token is already.
        """
        if len(places) > self.budget:
            raise ValueError(f"{len(places)} tokens retrieved, there is room for {self.budget}")
        if len(places) and not (
            self.num_sinks <= int(places[0]) and int(places[-1]) < self.hot_start
        ):
            raise ValueError("a retrieved token is a sink or still hot")
        sinks = slice(self._first, self._first + self.num_sinks)
        kept = (
            self.keys[:, sinks].clone(),
            self.values[:, sinks].clone(),
            self.places[sinks].clone(),
        )
        self._first, self.num_retrieved = self._hot_at, 0
        self._put_before(keys, values, places)
        self.num_retrieved = len(places)
        self._put_before(*kept)

    def put_hot(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Place the last tokens, [L, n, H, D] of positions from `start`, in an empty state."""
        n = keys.shape[1]
        assert n <= self.window, "more than the window"
        self.clear(start)
        rows = slice(self._hot_at, self._hot_at + n)
        self.keys[:, rows], self.values[:, rows] = keys, values
        self.places[rows] = torch.arange(start, start + n, device=self._device)
        self.position = start + n

    def _put_before(self, keys: Tensor, values: Tensor, places: Tensor) -> None:
        first = self._first - keys.shape[1]
        rows = slice(first, self._first)
        self.keys[:, rows], self.values[:, rows] = (
            keys.to(self.keys.dtype),
            values.to(self.values.dtype),
        )
        self.places[rows] = places.to(self._device)
        self._first = first

    def bring_near(self) -> None:
        """Move sinks and retrieved keys to stand in a row just before the hot ones (`Mode.near`)."""
        rows = slice(self._first, self._hot_at)
        steps = near_steps(self.places[rows], self.hot_start)
        self.keys[:, rows] = move(self.keys[:, rows], steps, self.spec.rope_theta)
        self.mode = Mode.near

    def bring_into_chunks(self) -> None:
        """Move all keys to where dual chunk attention wants them; new ones go there as they come (`Mode.dca`)."""
        assert self.spec.chunked is not None, "the model has no dual chunk attention"
        rows = slice(self._first, self._hot_at + self.position - self.hot_start)
        steps = chunk_steps(self.places[rows].cpu(), self.spec.chunked)
        tables = rope_tables(steps, self.spec.head_dim, self.spec.rope_theta)
        cos, sin = (t.to(self._device) for t in tables)
        for keys in self.keys:  # a layer at a time: what is beside it stays small
            keys[rows] = rotate(keys[rows], cos, sin)
        self.mode = Mode.dca

    # ---- reading --------------------------------------------------------------------------------------------------

    def hot(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [L, hi - lo, H, D] of hot positions."""
        assert self.hot_start <= lo <= hi <= self.position, "not hot"
        rows = slice(self._hot_at + lo - self.hot_start, self._hot_at + hi - self.hot_start)
        return self.keys[:, rows], self.values[:, rows]

    def sink_rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values [L, n, H, D] of the first tokens, wherever they lie."""
        n = min(self.sinks, self.position)
        if self.num_sinks:
            rows = slice(self._first, self._first + self.num_sinks)
            return self.keys[:, rows], self.values[:, rows]
        return self.hot(0, n) if self.hot_start == 0 else self.hot(self.position, self.position)

    @property
    def largest_distance(self) -> int:
        """Return the largest distance between a query and a key that is attended to now."""
        return self.position - int(self.places[self._first]) if self.position else 0

    # ---- the model's side -----------------------------------------------------------------------------------------

    def begin(self, num_tokens: int) -> None:
        assert num_tokens <= self.chunk, "more tokens than a chunk"
        if self.position - self.hot_start + num_tokens > self.window + self.chunk:
            self._slide()
        self._count = num_tokens
        end = self._hot_at + self.position - self.hot_start + num_tokens
        queries = torch.arange(self.position, self.position + num_tokens, device=self._device)
        self.places[end - num_tokens : end] = queries
        self._rows = slice(self._first, end)
        self._visible, self._chunks, self._is_step = None, None, False
        if self.mode is Mode.dca:
            self._chunks = self._chunked_forward()
        oldest = self.position - self.window + 1 if self.floor is None else self.floor
        oldest = max(oldest, self.border)
        if num_tokens == 1 and self.hot_start >= oldest:
            return  # all that is there; a token in the loop need not ask the device
        places = self.places[self._rows]
        seen = places <= queries.unsqueeze(1)
        if self.floor is None:
            recent = places > (queries - self.window).unsqueeze(1)
        else:
            recent = (places >= self.floor).unsqueeze(0)
        recent = recent & (places >= self.border)
        kept = places < self.sinks
        kept[: self._hot_at - self._first] = True
        seen &= recent | kept
        self._visible = seen

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `KvState.attend`: one softmax over sinks, retrieved, hot and current tokens."""
        if self._is_step:
            return self._attend_step(layer, q, k, v)
        end = self._rows.stop
        if self._chunks is not None:
            k = self._chunks.moved_keys(k)
        self.keys[layer, end - self._count : end] = k
        self.values[layer, end - self._count : end] = v
        keys, values = self.keys[layer, self._rows], self.values[layer, self._rows]
        if self._chunks is not None:
            return self._chunks.attend(q, keys, values, self._visible)
        return attend_rows(q, keys, values, self._visible)

    def _chunked_forward(self) -> ChunkedForward:
        assert self.spec.chunked is not None, "the model has no dual chunk attention"
        queries = torch.arange(self.position, self.position + self._count)
        at, dim = self.places[self._rows], self.spec.head_dim
        return ChunkedForward(queries, at, self.spec.chunked, dim, self.spec.rope_theta)

    # ---- one token at fixed addresses (`FixedState`) ---------------------------------------------------------------

    @property
    def steps(self) -> StepGraphs:
        return self._steps

    def step_kind(self) -> str:
        return self.mode.value

    def begin_step(self) -> bool:
        """Begin one token: True if it sees all rows that are used."""
        self.begin(1)
        if self._visible is not None:
            return False
        self._is_step = True
        rows = self._rows
        span = torch.tensor([rows.start, rows.stop], dtype=torch.int32)
        self._span.copy_(sendable(span, self._device), non_blocking=True)
        self._row.copy_(self._span[1:] - 1)
        if self._chunks is not None:
            self._turns.copy_(sendable(self._chunks.tables, self._device), non_blocking=True)
        return True

    def _attend_step(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values, length, turned = self.keys[layer], self.values[layer], 1, [q]
        if self.mode is Mode.dca:
            assert self.spec.chunked is not None
            length = chunk_length(self.spec.chunked)
            *turned, k = (
                rotate(x, *turn)
                for x, turn in zip((q, q, q, k), self._turns.unbind(1), strict=True)
            )
        keys.index_copy_(0, self._row, k)
        values.index_copy_(0, self._row, v)
        q = torch.cat(turned) if len(turned) > 1 else q
        return dense_ops.attend_span(q, keys, values, self.places, self._span, length)

    def observe(self, layer: int, hidden: Tensor) -> None:
        if self.observer is not None:
            self.observer(layer, hidden)

    def end(self) -> None:
        self.position += self._count

    def _slide(self) -> None:
        """Keep the window; the first tokens of the timeline become sinks when they leave it."""
        assert self.floor is None, "the answer is longer than its room"
        start = max(self.hot_start, self.position - self.window)
        if self.hot_start == 0 and self.num_sinks == 0 and start > 0:
            assert start >= self.sinks, "the window is shorter than the sinks"
            self.put_sinks(*(part.clone() for part in self.hot(0, min(self.sinks, start))))
        n, shift = self.position - start, start - self.hot_start
        old = slice(self._hot_at + shift, self._hot_at + shift + n)
        new = slice(self._hot_at, self._hot_at + n)
        for buffer in (self.keys, self.values):
            for rows in buffer:  # a layer at a time: the copy beside it stays small
                rows[new] = rows[old].clone()
        self.places[new] = self.places[old].clone()
        self.hot_start = start
