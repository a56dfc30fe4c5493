"""A model and its draft heads, as one model: prompts and tokens keep the heads informed.

Owns what is the same for all heads: when they are told, and that they go back together with the model. What heads read
of the model (the taps) and what they make of it is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from runtime.experts.source import ExpertSource
from runtime.stats import ExpertCounters


@dataclass(frozen=True, slots=True)
class Proposal:
    """What draft heads expect after a token."""

    tokens: list[int]
    logits: Tensor  # [len(tokens), V] fp32
    # [len(tokens)] fp32, logits of "accepted if those before it are"
    confidence: Tensor | None = None


class HeadsState(Protocol):
    """What draft heads keep of one conversation."""

    position: int  # main positions that the heads know

    def take_back(self, position: int) -> None:
        """Forget the main positions from `position` on."""

    def tensors(self) -> dict[str, Tensor]: ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None: ...


class Heads(Protocol):
    """Draft heads."""

    block: int  # most guesses that they give

    def new_state(self) -> Any: ...

    def seed(self, tokens: Sequence[int], taps: Tensor, state: Any) -> None:
        """Take in the main positions that follow: tokens fed there, and what the model computed: [T, ...]."""

    def propose(self, token: int, state: Any, depth: int) -> Proposal:
        """Guess up to `depth` tokens after `token`, which follows the known positions. The state stays as it is."""


class TappedAttempt(Protocol):
    """Tokens that may be taken back."""

    tokens: list[int]
    logits: Tensor
    taps: Tensor

    def keep(self, count: int) -> None: ...


class TappedModel(Protocol):
    """What heads need of their model."""

    experts: ExpertSource

    @property
    def rows(self) -> Any: ...

    @property
    def dense_nbytes(self) -> int: ...

    @property
    def device_wait_ns(self) -> int: ...

    def new_state(self) -> Any: ...

    def prefill(
        self, tokens: Sequence[int], state: Any, all_logits: bool, after_layer: Callable[[], None]
    ) -> Tensor: ...

    def decode(self, token: int, state: Any) -> Tensor: ...

    def attempt(self, tokens: Sequence[int], state: Any) -> TappedAttempt: ...

    def is_settled(self, count: int) -> bool: ...

    def taps(self) -> Tensor:
        """Return what the heads read of the last `prefill` or `decode`: [T, ...]."""

    def close(self) -> None: ...


class HeadedState:
    """One conversation: what the main model keeps, and the heads' state beside it."""

    def __init__(self, main: Any, heads: HeadsState) -> None:
        self.main, self.heads = main, heads

    @property
    def position(self) -> int:
        position: int = self.main.position
        return position

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of everything that decides the next tokens and guesses, as flat tensors."""
        heads = {f"drafts.{name}": tensor for name, tensor in self.heads.tensors().items()}
        main: dict[str, Tensor] = self.main.tensors()
        return main | heads

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the conversation that `tensors` was copied from."""
        self.main.restore(tensors)
        self.heads.restore(
            {
                name.removeprefix("drafts."): tensor
                for name, tensor in tensors.items()
                if name.startswith("drafts.")
            }
        )


class HeadedAttempt:
    """An attempt of the main model that takes the heads back with it."""

    def __init__(self, main: TappedAttempt, heads: HeadsState) -> None:
        self._main, self._heads, self._start = main, heads, heads.position - len(main.tokens)
        self.tokens, self.logits = main.tokens, main.logits

    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens had been fed."""
        self._main.keep(count)
        self._heads.take_back(self._start + count)


class HeadedModel:
    """A model whose heads follow it. `attempt` gives rows that may be taken back; `propose` asks the heads."""

    def __init__(
        self, model: TappedModel, heads: Heads, heads_experts: ExpertSource | None = None
    ) -> None:
        """heads_experts: to be counted and closed with the model's; None: the heads have none of their own."""
        self.model, self.heads = model, heads
        self.experts: ExpertSource = model.experts
        if heads_experts is not None:
            self.experts = _BothExperts(model.experts, heads_experts)

    @property
    def rows(self) -> Any:
        """The reader of table rows."""
        return self.model.rows

    @property
    def device_wait_ns(self) -> int:
        return self.model.device_wait_ns

    @property
    def dense_nbytes(self) -> int:
        """Bytes that a pass without drafts reads at least."""
        return self.model.dense_nbytes

    def is_settled(self, count: int) -> bool:
        """Whether a pass of `count` tokens takes as long as those after it."""
        return self.model.is_settled(count)

    def close(self) -> None:
        """Close what the model has open."""
        self.model.close()

    def new_state(self) -> HeadedState:
        """Return the state of an empty conversation."""
        return HeadedState(self.model.new_state(), self.heads.new_state())

    def prefill(
        self,
        tokens: Sequence[int],
        state: HeadedState,
        all_logits: bool = False,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """As the model."""
        logits = self.model.prefill(tokens, state.main, all_logits, after_layer)
        self.heads.seed(tokens, self.model.taps(), state.heads)
        return logits

    def decode(self, token: int, state: HeadedState) -> Tensor:
        """As the model."""
        logits = self.model.decode(token, state.main)
        self.heads.seed([token], self.model.taps(), state.heads)
        return logits

    @torch.inference_mode()
    def attempt(self, tokens: Sequence[int], state: HeadedState) -> HeadedAttempt:
        """Take in a few tokens, each as `decode` would."""
        found = self.model.attempt(tokens, state.main)
        for token, taps in zip(tokens, found.taps.split(1), strict=True):
            self.heads.seed([token], taps, state.heads)
        return HeadedAttempt(found, state.heads)

    def propose(
        self, tokens: Sequence[int], token: int, state: HeadedState, depth: int
    ) -> list[int]:
        """Guess up to `depth` tokens after `token`; what was fed before is in the state."""
        del tokens
        return self.heads.propose(token, state.heads, min(depth, self.heads.block)).tokens


class _BothExperts:
    """The main model's experts as an engine sees them, with the heads' counted and closed beside them."""

    def __init__(self, main: ExpertSource, heads: ExpertSource) -> None:
        self._main, self._heads = main, heads
        self.waves, self.used, self.ahead = main.waves, main.used, main.ahead
        self.fetch, self.sweep = main.fetch, main.sweep

    @property
    def counters(self) -> ExpertCounters:
        return self._main.counters.plus(self._heads.counters)

    @property
    def max_hold(self) -> int:
        return self._main.max_hold

    @property
    def max_route(self) -> int:
        return self._main.max_route

    @property
    def record_nbytes(self) -> int:
        return self._main.record_nbytes

    def pin(self) -> None:
        self._main.pin()

    def forget(self) -> None:
        self._main.forget()
        self._heads.forget()

    def close(self) -> None:
        self._main.close()
        self._heads.close()
