"""Experts read once for several conversations that decode in step.

Each conversation runs the very code that decodes it alone, on a stack of its own (a greenlet); only one runs at a time.
It parks where a decoded token asks for a layer's experts. When all have asked, the source is asked once for all of
them, and each gets its own experts as they arrive. So a conversation computes what it would compute alone, in the same
order, from the same bytes: company cannot change its numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, zip_longest
from typing import Any, cast

from greenlet import getcurrent, greenlet

from runtime.experts.in_front import InFront
from runtime.experts.slots import BatchedSource
from runtime.experts.source import ExpertSource, Wave


@dataclass(frozen=True, slots=True)
class Ask:
    """A layer's experts, wanted by one conversation."""

    layer: int
    ids: Sequence[int]
    guesses: Iterable[int]


class Signal(Enum):
    """What else a conversation parks with."""

    next = "next"  # the list before is launched
    pause = "pause"  # in the middle of a prompt, where others may go on


class Conversation(greenlet):
    """Code of one conversation that can be left in the middle. It belongs to whoever made it."""

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__(run)
        # what it is parked with; None: not started, in a prompt, or over
        self.ask: Ask | None = None

    def go_on(self, wave: Wave | None = None) -> Ask | Signal | None:
        """Run until it parks, and return with what; None when it is over. Raises what it does not catch."""
        reply = self.switch(wave) if self else self.switch()
        return self._note(reply)

    def fail(self, error: BaseException) -> None:
        """Go on with an error where it is parked."""
        self._note(self.throw(error))

    def _note(self, reply: Any) -> Ask | Signal | None:
        if self.dead:
            reply = None
        self.ask = reply if isinstance(reply, Ask) else None
        return cast("Ask | Signal | None", reply)

    def park(self, reason: Ask | Signal) -> Any:
        """From inside: leave until gone on with, and return what is given then."""
        assert self.parent is not None
        return self.parent.switch(reason)


def pause() -> None:
    """Let others go on, if this is one of several conversations."""
    current = getcurrent()
    if isinstance(current, Conversation):
        current.park(Signal.pause)


def take_turns(lists: Iterable[Iterable[int]]) -> Iterator[int]:
    """Yield the firsts of all lists, then the seconds, and so on, each number once."""
    seen: set[int | None] = {None}
    for number in chain.from_iterable(zip_longest(*lists)):
        if number not in seen:
            seen.add(number)
            yield cast("int", number)


class SharedReads(InFront):
    """An expert source whose `waves` are answered for several conversations at once by `serve`."""

    def __init__(self, source: ExpertSource) -> None:
        self.source = source

    def waves(self, layer: int, ids: Sequence[int], guesses: Iterable[int] = ()) -> Iterator[Wave]:
        current = getcurrent()
        if not isinstance(current, Conversation):
            yield from self.source.waves(layer, ids, guesses)
            return
        wave = current.park(Ask(layer, ids, guesses))
        while wave is not None:
            yield wave
            wave = current.park(Signal.next)

    def serve(self, conversations: Sequence[Conversation]) -> None:
        """Give each what it has asked for, all of one layer; each runs on until it parks with something else.

        What is read is read in turns: everybody's likeliest expert first. When a read fails, those that still wait for
        experts fail; a conversation that gives up drops out.
        """
        asks = {c: c.ask for c in conversations if c.ask is not None}
        (layer,) = {ask.layer for ask in asks.values()}
        ids = list(take_turns(ask.ids for ask in asks.values()))
        guesses = take_turns(ask.guesses for ask in asks.values())
        missing = {c: set(ask.ids) for c, ask in asks.items()}
        counts = Counter(chain.from_iterable(missing.values()))
        several = {expert for expert, count in counts.items() if count > 1}
        waves, is_first = self._open(layer, ids, guesses, several), True
        while True:
            try:
                wave = next(waves, None)
            except Exception as error:  # noqa: BLE001 - each that waits raises it
                for conversation in [c for c, left in missing.items() if left]:
                    del missing[conversation]
                    conversation.fail(error)
                break
            if wave is None:
                break
            for conversation, left in list(missing.items()):
                own = [(expert, record) for expert, record in wave if expert in left]
                left.difference_update(expert for expert, _ in own)
                # the first list is waited for, empty or not
                if (own or is_first) and conversation.go_on(own) is not Signal.next:
                    del missing[conversation]
            is_first = False
        for conversation in missing:
            conversation.go_on()

    def _open(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int], several: Collection[int]
    ) -> Iterator[Wave]:
        """Ask the source.  several: experts that more than one conversation wants; in RAM that is all the same."""
        del several
        return self.source.waves(layer, ids, guesses)


class SharedSlots(SharedReads):
    """The same before a VRAM tier, which several conversations' experts reach over the link once."""

    source: BatchedSource

    def _open(
        self, layer: int, ids: Sequence[int], guesses: Iterable[int], several: Collection[int]
    ) -> Iterator[Wave]:
        return self.source.waves(layer, ids, guesses, several)

    def batches(self, layer: int, ids: Sequence[int]) -> Iterator[Wave]:
        return self.source.batches(layer, ids)


def share(source: ExpertSource) -> SharedReads:
    """Return a source with the same abilities, whose decoded experts are shared."""
    return (SharedSlots if isinstance(source, BatchedSource) else SharedReads)(source)
