"""One store, opened with its model: what reading, finding and answering share.

Owns the two hot tiers: the timeline, which text is taken into, and the scratch buffers, in which questions are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from conf.schema import MemoryConfig
from runtime.errors import UserError
from runtime.living_kv import exact
from runtime.living_kv.codec import Codec
from runtime.living_kv.cold import ColdBlocks
from runtime.living_kv.errors import MemoryUsageError, StoreRefusedError
from runtime.living_kv.hot import HotState, scratch_budget
from runtime.living_kv.identity import REREAD
from runtime.living_kv.index import projection, projection_digest
from runtime.living_kv.layout import Header
from runtime.living_kv.positions import Mode
from runtime.living_kv.sentences import readable
from runtime.living_kv.store import Store
from runtime.models.dense import DenseModel
from runtime.text import TextCodec


class Opened:
    """One store with its model, settings, blocks in RAM and hot tiers. Settings may be replaced between calls."""

    def __init__(
        self, model: DenseModel, codec: TextCodec, store: Store, config: MemoryConfig
    ) -> None:
        """The store's identity must have been checked. Raises UserError for settings that cannot work."""
        _check_config(config, store.header)
        self.model, self.text, self.store, self.config = model, codec, store, config
        h = store.header
        self.codec = Codec(h.codec, h.layers, h.kv_heads, h.head_dim)
        self.cold = ColdBlocks(store, self.codec, int(config.ram_gib * 2**30), model.device)
        dim = h.vector_values // len(h.index_layers)
        matrix = projection(model.spec.hidden, dim, h.projection_seed)
        if projection_digest(matrix) != h.projection_digest:
            raise StoreRefusedError(
                "E-EMBED: this machine computes another projection than the store's", REREAD
            )
        self.matrix = torch.from_numpy(matrix).to(model.device)
        self._state: HotState | None = None  # the timeline's hot tier
        self._scratch: HotState | None = None
        self.was_rebuilt = False  # the hot tier came from cold blocks, not from its snapshot
        self.asked_tokens = 0  # of questions and prompts, through the model
        self.after_layer: Callable[[], None] = lambda: None  # called while a question is answered

    def _hot_state(self, budget: int) -> HotState:
        c = self.config
        return HotState(
            self.model.spec, c.sinks, budget, c.window, c.chunk, self.model.dtype, self.model.device
        )

    @property
    def state(self) -> HotState:
        """The timeline: restored exactly from its snapshot, else from cold blocks and the exact tail."""
        if self._state is None:
            self._state = self._restored(self._hot_state(0), self.config.window)
        return self._state

    def drop_state(self) -> None:
        """Let go of the timeline: it holds what is not committed, and is restored when it is asked for."""
        self._state = None

    @property
    def scratch(self) -> HotState:
        """The buffers in which questions are answered; the timeline stays as it is."""
        if self._scratch is None:
            self._scratch = self._hot_state(scratch_budget(self.config))
        return self._scratch

    @property
    def hot_nbytes(self) -> int:
        """Bytes of the hot buffers that are made."""
        return sum(s.nbytes for s in (self._state, self._scratch) if s is not None)

    def _restored(self, state: HotState, window: int) -> HotState:
        self.was_rebuilt |= not exact.restore(state, window, self.store, self.cold)
        return state

    def start_scratch(self) -> HotState:
        """Return the scratch state with sinks and the last tokens in sight, as the timeline stands."""
        scratch, tail = self.scratch, self.config.recency_tail
        scratch.mode = Mode.absolute
        if self._state is None:
            self._restored(scratch, tail)
        else:
            state = self._state
            first = max(state.hot_start, state.position - tail)
            keys, values = state.hot(first, state.position)
            scratch.put_hot(keys, values, first)
            if first:
                k, v = state.sink_rows()
                n = min(k.shape[1], first)
                scratch.put_sinks(k[:, :n], v[:, :n])
        scratch.floor = scratch.hot_start
        return scratch

    def tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a text, and the characters [lo, hi) that each one stands for."""
        return self.text.encode_with_offsets(readable(text))

    @property
    def room(self) -> int:
        """Tokens that still fit behind what the scratch state holds."""
        scratch = self.scratch
        return self.config.window + self.config.chunk - (scratch.position - scratch.hot_start)

    def check_room(self, tokens: int) -> None:
        """Raise UserError where tokens, and one of an answer, do not fit behind what the scratch state holds."""
        if tokens >= self.room:
            raise UserError(
                f"E-RANGE: the question has {tokens} tokens, there is room for {self.room} with its answer",
                "shorten it, or raise memory.window",
            )


def _check_config(config: MemoryConfig, header: Header) -> None:
    faults = []
    if config.window < config.chunk:
        faults.append(f"memory.window={config.window} is below memory.chunk={config.chunk}")
    if config.window < header.block + config.sinks:
        faults.append(
            f"memory.window={config.window} is below a block of {header.block} tokens and the sinks"
        )
    if config.recency_tail < header.block or config.recency_tail > config.window:
        faults.append(
            f"memory.recency_tail={config.recency_tail} must be {header.block} to memory.window"
        )
    if faults:
        raise MemoryUsageError(
            "; ".join(faults), "the defaults fit each other: leave these keys out"
        )
