"""Mistakes to plant into a DeepSeek model and its decoder, in whose tests they must show; each takes a MonkeyPatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def late_positions(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Every rotation by the angle of the position behind it."""
    tables = [tuple(table.roll(-1, 0) for table in pair) for pair in model.tables]
    patch.setattr(model, "tables", tables)


def _stale_ring(decoder: Any, patch: pytest.MonkeyPatch) -> None:
    """A token's own row of the window stays as it was."""
    plain = decoder._token.prepare_token

    def late(*args: Any) -> None:
        ring, before = args[7], args[7].clone()
        plain(*args)
        ring.copy_(before)

    patch.setattr(decoder._token, "prepare_token", late)


def _moved_experts(decoder: Any, patch: pytest.MonkeyPatch) -> None:
    """One layer's experts read from a row of codes further on."""
    offsets = [list(layer) for layer in decoder._offsets]
    offsets[2] = [(codes + decoder.spec.hidden // 2, scales) for codes, scales in offsets[2]]
    patch.setattr(decoder, "_offsets", offsets)


def _swapped_weights(decoder: Any, patch: pytest.MonkeyPatch) -> None:
    """The experts' outputs by ascending id, their weights by rank."""
    plain = decoder._moe.route_token

    def swapped(*args: Any) -> None:
        plain(*args)
        args[5].copy_(args[5].flip(0))

    patch.setattr(decoder._moe, "route_token", swapped)


# name -> what plants it, and the kind of result in which it shows
DECODER_MISTAKES: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None], str]] = {
    "stale_ring": (_stale_ring, "window"),
    "late_positions": (lambda decoder, patch: late_positions(decoder.model, patch), "window"),
    "moved_experts": (_moved_experts, "experts"),
    "swapped_weights": (_swapped_weights, "route weights"),
}
