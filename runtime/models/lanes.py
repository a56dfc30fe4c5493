"""Several decoders of one model, each with buffers for one conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from runtime.models.graphs import Graphs

DecoderT = TypeVar("DecoderT", bound="Decoder")


class Decoder(Protocol):
    """Decode steps of fixed shapes, with buffers for the state of one conversation."""

    wait_ns: int
    graphs: Graphs

    @property
    def bound(self) -> Any | None:
        """The state in the buffers; None: none that is still in use."""

    def bind(self, state: Any) -> None: ...

    def step(self, token: int, state: Any) -> Tensor: ...


def open_lanes(make: Callable[[Graphs | None], DecoderT], count: int) -> DecoderT | Lanes:
    """Return one decoder, or several as one.  make: called with the graphs of the first."""
    first = make(None)
    if count == 1:
        return first
    return Lanes([first, *(make(first.graphs) for _ in range(count - 1))])


class Lanes:
    """As one decoder: each state keeps the buffers that it was given, as long as there are enough."""

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        """decoders: as many as conversations go on at the same time."""
        self._decoders = list(decoders)  # the one used longest ago first

    @property
    def wait_ns(self) -> int:
        """Nanoseconds that the host has waited for routes."""
        return sum(decoder.wait_ns for decoder in self._decoders)

    def bind(self, state: Any) -> None:
        self._of(state).bind(state)

    def step(self, token: int, state: Any) -> Tensor:
        return self._of(state).step(token, state)

    def _of(self, state: Any) -> Decoder:
        holding = [decoder for decoder in self._decoders if decoder.bound is state]
        unused = [decoder for decoder in self._decoders if decoder.bound is None]
        found = (holding or unused or self._decoders)[0]
        self._decoders.remove(found)
        self._decoders.append(found)
        return found
