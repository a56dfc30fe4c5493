"""The hot tier's exact bytes: what a commit keeps of them, and a state filled again from them, or from cold blocks."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from runtime.living_kv.cold import ColdBlocks
from runtime.living_kv.hot import HotState
from runtime.living_kv.store import Store

SNAPSHOT = struct.Struct("<QQQ")  # sinks, first hot position, position


def to_bytes(keys: Tensor, values: Tensor) -> bytes:
    """Return keys and values [L, n, H, D] as they are."""
    # on a GPU no copy of them is made there: its memory is planned to the last buffer
    parts = (part.cpu().contiguous().view(torch.uint8) for part in (keys, values))
    return b"".join(part.numpy().tobytes() for part in parts)


def snapshot(state: HotState) -> bytes:
    """Return the exact bytes of sinks and window."""
    first = max(state.hot_start, state.position - state.window)
    sinks = state.num_sinks
    keys, values = (part.cpu() for part in state.hot(first, state.position))
    if sinks or first > 0:
        k, v = (part.cpu() for part in state.sink_rows())
        sinks = k.shape[1]
        keys, values = torch.cat([k, keys], 1), torch.cat([v, values], 1)
    return SNAPSHOT.pack(sinks, first, state.position) + to_bytes(keys, values)


def restore(state: HotState, window: int, store: Store, cold: ColdBlocks) -> bool:
    """Fill an empty state with the sinks and the last tokens, at most `window`, of the committed timeline.

    Returns False where they had to come from cold blocks.
    """
    end = store.commit.tokens
    state.clear()
    if not end:
        return True
    raw = store.read_hot()
    if raw is not None:
        sinks, start, position = SNAPSHOT.unpack_from(raw)
        rows = sinks + position - start
        keys, values = _from_bytes(raw[SNAPSHOT.size :], rows, store)
        first = max(start, end - window)
        cut = sinks + first - start
        state.put_hot(keys[:, cut:], values[:, cut:], first)
        if first:
            have = keys[:, :sinks] if sinks else keys[:, : state.sinks]
            n = min(have.shape[1], first, state.sinks)
            state.put_sinks(keys[:, :n], values[:, :n])
        return True
    keys, values, first = _last_tokens(end, window, store, cold)
    state.put_hot(keys, values, first)
    if first:
        found = cold.fetch([(0, min(state.sinks, first))])
        state.put_sinks(found[0], found[1])
    return False


def _last_tokens(
    end: int, window: int, store: Store, cold: ColdBlocks
) -> tuple[Tensor, Tensor, int]:
    """Return keys, values of the last tokens from cold blocks and the exact tail, and the first position."""
    tail_at = store.commit.blocks * store.header.block
    keys, values, places = cold.fetch([(max(0, end - window), tail_at)])
    holes = (places[1:] - places[:-1] != 1).nonzero()
    skip = int(holes[-1]) + 1 if len(holes) else 0
    if len(places) and int(places[-1]) != tail_at - 1:  # the last block is damaged
        skip = len(places)
    keys, values, places = keys[:, skip:], values[:, skip:], places[skip:]
    tail = store.tail
    if end > tail_at and tail:
        k, v = (part.to(keys.device) for part in _from_bytes(tail, end - tail_at, store))
        keys, values = (
            torch.cat([keys.to(k.dtype), k], 1),
            torch.cat([values.to(v.dtype), v], 1),
        )
    return keys, values, end - keys.shape[1]


def _from_bytes(raw: bytes, tokens: int, store: Store) -> tuple[Tensor, Tensor]:
    h = store.header
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, h.dtype))
    keys, values = flat.view(2, h.layers, tokens, h.kv_heads, h.head_dim)
    return keys, values
