"""Which positions a DeepSeek token sees, whatever pieces a conversation comes in: against lists of numbers.

No arithmetic of the model plays a part: entries carry their own position, scores are drawn.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.models.deepseek_model import Attention, Choice, Indexer
from runtime.models.deepseek_state import Compressed, DeepseekState
from tests.parity.deepseek_golden import GOLDEN, spec_of

SPEC = spec_of(GOLDEN / "checkpoint")
# no compressed entries; a source of groups of two; the candidate source
WINDOW_LAYER, PAIRS, LAST = (0, 1, 3)
MAX_POSITION = 8192


def pieces(draw, most):
    """Where a conversation starts in the middle of things, and the pieces that follow."""
    start = draw(st.one_of(st.integers(0, 40), st.integers(MAX_POSITION - 300, MAX_POSITION - 100)))
    return start, draw(st.lists(st.integers(1, most), min_size=1, max_size=6))


def numbered(positions):
    """Entries that say where they are from: [n, head_dim], whole numbers, which fp32 keeps."""
    return torch.tensor(positions, dtype=torch.float32).unsqueeze(1).repeat(1, SPEC.head_dim)


def state_before(start):
    """A state whose windows hold every position before `start`, in fp32 so that the numbers are whole."""
    state = DeepseekState(SPEC)
    state.windows = {layer: window.float() for layer, window in state.windows.items()}
    for layer in state.windows:
        state.windows[layer][:] = float("nan")
        for position in range(max(0, start - SPEC.window), start):
            state.windows[layer][position % SPEC.window] = position
    return state


def visible(layer, start, count, state, choice):
    """What each of `count` tokens from `start` may see, in the order of its list."""
    kv = numbered(range(start, start + count))
    entries, slots = Attention._visible(
        SimpleNamespace(spec=SPEC, layer=layer), kv, start, choice, state
    )
    return [entries[row[row >= 0]][:, 0].tolist() for row in slots]


@given(st.data())
def test_a_window_is_the_last_positions(data):
    """Pieces shorter and longer than the window, across its limits, near position 0 and near 8,192."""
    start, sizes = pieces(data.draw, 3 * SPEC.window)
    state = state_before(start)
    for size in sizes:
        found = visible(WINDOW_LAYER, start, size, state, Choice())
        for i, positions in zip(range(start, start + size), found, strict=True):
            assert positions == list(range(max(0, i - SPEC.window + 1), i + 1))
        start += size


@given(st.data())
def test_compressed_entries_come_behind_the_window(data):
    """A choice's places are those of the source's entries, whatever lies in front of them."""
    start, sizes = pieces(data.draw, 2 * SPEC.window)
    state = state_before(start)
    for size in sizes:
        length = (start + size) // 2
        entries = numbered(range(100_000, 100_000 + length))
        # what a buffer has behind its valid rows must not be seen
        spare = torch.full((7, SPEC.head_dim), float("nan"))
        state.compressed[PAIRS] = Compressed(torch.cat([entries, spare]), entries, length)
        choice = Choice()
        lists = [
            sorted(data.draw(st.sets(st.integers(0, max(0, (i + 1) // 2 - 1)), max_size=8)))
            if (i + 1) // 2
            else []
            for i in range(start, start + size)
        ]
        choice.slots = torch.tensor([one + [-1] * (8 - len(one)) for one in lists])
        found = visible(PAIRS, start, size, state, choice)
        for i, chosen, positions in zip(range(start, start + size), lists, found, strict=True):
            window = list(range(max(0, i - SPEC.window + 1), i + 1))
            assert positions == window + [100_000 + j for j in chosen]
        start += size


def chosen_by_hand(scores, visible_entries, allowed, count):
    """The best of the allowed and visible entries, ascending; of equals the lowest place."""
    places = [j for j in range(visible_entries) if allowed is None or j in allowed]
    best = sorted(places, key=lambda j: (-scores[j], j))[:count]
    return sorted(best)


def candidates_by_hand(scores, visible_entries, num_blocks, block):
    """Entries of the best blocks; the one with the newest visible entry always counts."""
    blocks = range(-(-visible_entries // block))
    newest = (visible_entries - 1) // block

    def rank(b):
        own = scores[b * block : min((b + 1) * block, visible_entries)]
        return (b != newest, -max(own), b)

    best = sorted(blocks, key=rank)[:num_blocks]
    return {j for b in best for j in range(b * block, (b + 1) * block)}


@given(
    st.data(),
    st.sampled_from([PAIRS, LAST]),
    st.one_of(st.integers(0, 60), st.integers(300, 330)),
    st.integers(1, 24),
)
def test_a_choice_is_the_best_of_what_is_visible(data, layer, start, count):
    """Entry j is visible from the token that ends its group on; scores are few numbers, so that ties are many.

    There are never fewer candidates than a list is long, as in the release.
    """
    lengths = [1, 8] if layer == LAST else [1, 8, 512]
    spec = dataclasses.replace(SPEC, index_topk=data.draw(st.sampled_from(lengths)))
    ratio = spec.compress_ratios[layer]
    state = DeepseekState(spec)
    length = (start + count) // ratio
    state.compressed[layer].length = length
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scores = torch.randint(-3, 4, (count, length), generator=generator).to(torch.bfloat16)
    indexer = SimpleNamespace(spec=spec, layer=layer, ratio=ratio, scores=lambda *_: scores.clone())
    u, choice = torch.zeros(count, spec.hidden), Choice()
    Indexer.choose(indexer, u, u, start, choice, state, u, u)
    assert choice.slots.shape == (count, min(spec.index_topk, length))
    follower = SimpleNamespace(**{**vars(indexer), "layer": 5, "scores": lambda *_: -scores})
    source = [list(row[row >= 0].tolist()) for row in choice.slots]
    if layer == LAST:
        Indexer.choose(follower, u, u, start, choice, state, u, u)
        followed = [list(row[row >= 0].tolist()) for row in choice.slots]
    for row, i in enumerate(range(start, start + count)):
        seen = (i + 1) // ratio
        mine = scores[row].tolist()
        allowed = None
        if layer == LAST:
            allowed = candidates_by_hand(
                mine, seen, spec.candidate_blocks, spec.candidate_block_size
            )
            # the layer behind chooses by its own scores among the source's candidates
            others = [-score for score in mine]
            assert set(followed[row]) <= allowed
            assert followed[row] == chosen_by_hand(others, seen, allowed, spec.index_topk)
        assert source[row] == chosen_by_hand(mine, seen, None, spec.index_topk)
