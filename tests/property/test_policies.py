"""Eviction rules: the optimum against trying everything, each rule against its definition written as lists."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import CachePolicy
from runtime.errors import UserError
from runtime.experts.adaptive import HALF_LIVES_STEPS, cache_for
from runtime.experts.cache import ExpertCache
from runtime.experts.layout import ExpertKey
from runtime.experts.policies import (
    STALE_RANKS,
    BeladyCache,
    LfuCache,
    PerLayerCache,
    SlruCache,
    count_hits,
    most_hits,
    uses_of,
)
from runtime.experts.routes import RouteHeader
from runtime.locality import PRESETS, generate

requests_of_few = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=2, unique=True).map(tuple), max_size=9
)
requests_of_many = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(tuple), max_size=60
)


def best_by_trying(requests, num_rows: int) -> int:
    """The most hits of all ways to evict: what is asked for is taken in, and stays while its request is served."""

    @cache
    def best(number: int, here: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        keys = frozenset(requests[number])
        others = here - keys
        room = num_rows - len(keys)
        stays = (
            frozenset(kept)
            for size in range(min(room, len(others)) + 1)
            for kept in combinations(sorted(others), size)
        )
        return len(keys & here) + max(best(number + 1, keys | kept) for kept in stays)

    return best(0, frozenset())


@given(requests=requests_of_few, num_rows=st.integers(2, 4))
def test_the_bound_is_what_trying_everything_finds(requests, num_rows):
    assert most_hits(requests, num_rows) == best_by_trying(requests, num_rows)


@given(requests=requests_of_many, num_rows=st.integers(3, 8))
def test_no_rule_finds_more_than_the_bound(requests, num_rows):
    bound = most_hits(requests, num_rows)
    for make in (ExpertCache, LfuCache, SlruCache):
        assert count_hits(make(num_rows), requests) <= bound
    keyed = [[ExpertKey(0, key) for key in request] for request in requests]
    assert count_hits(PerLayerCache(num_rows, 1, 3), keyed) == count_hits(
        ExpertCache(num_rows), requests
    ), "of one layer, LRU is per-layer LRU"


@given(
    requests=requests_of_many,
    num_rows=st.integers(3, 6),
    step_experts=st.sampled_from([None, 1, 7, 30]),
)
def test_lfu_by_counting(requests, num_rows, step_experts):
    """Against counts that are aged all at once, each time.  step_experts: None: of a cache by itself."""
    cache, half_life = LfuCache(num_rows), num_rows
    if step_experts is not None:
        cache = cache_for(CachePolicy.lfu, 1, step_experts, 10)(num_rows)
        half_life = num_rows if step_experts <= num_rows else HALF_LIVES_STEPS[0] * step_experts
    counts, here, uses, stamp = {}, [], 0, {}
    ageing = 2 ** (-1 / half_life)

    def use(key):
        nonlocal uses
        uses += 1
        for other in counts:
            counts[other] *= ageing
        counts[key] = counts.get(key, 0.0) + 1.0
        stamp[key] = uses

    hits = 0
    for request in requests:
        found = [key for key in request if key in here]
        hits += len(found)
        for key in found:
            use(key)
        for key in request:
            if key in found:
                continue
            if len(here) == num_rows:
                free = [other for other in here if other not in request]
                least = min(counts[other] for other in free)
                # sums of powers of two roots are not exact: what is nearly equal may go in any order
                near = [other for other in free if counts[other] < least * (1 + 1e-9)]
                here.remove(min(near, key=lambda other: stamp[other]))
            here.append(key)
            use(key)
    assert count_hits(cache, requests) == hits


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [12, 24, 40])
def test_a_cache_smaller_than_a_token_keeps_what_comes_often(seed, rows):
    """On a generated route as alike as the published one: an LRU finds next to nothing there."""
    trace = generate(RouteHeader("made up", 8, 64, 6, 4096), PRESETS["qwen"], 120, seed)
    requests = [[ExpertKey(step.layer, expert) for expert in step.experts] for step in trace.steps]
    auto, lru = (
        count_hits(cache_for(policy, 8, 48, 512)(rows), requests) / (48 * 120)
        for policy in (CachePolicy.auto, CachePolicy.lru)
    )
    assert lru < 0.01
    bound = most_hits(requests, rows) / (48 * 120)
    assert auto > 0.35 * bound, f"{auto:.3f} of {bound:.3f}"


def test_ranks_that_no_longer_hold_are_thrown_away_though_nobody_leaves():
    cache = LfuCache(4)
    for _ in range(1000):
        count_hits(cache, [(0, 1, 2)])
    assert len(cache._heap) <= STALE_RANKS * 4
    count_hits(cache, [(3,), (4,), (5,)])
    assert set(cache.keys()) == {0, 1, 2, 5}, "those used once took turns"


def test_slru_by_hand():
    cache = SlruCache(5)  # four rows may be protected
    for key in "abcab":  # a and b are used again
        count_hits(cache, [key])
    count_hits(cache, ["d", "e"])
    assert count_hits(cache, ["f"]) == 0  # c goes, the oldest on trial
    assert count_hits(cache, ["c"]) == 0  # d goes, though a is older
    assert [count_hits(cache, [key]) for key in "abe"] == [1, 1, 1]


def test_layers_keep_to_their_rows():
    cache = PerLayerCache(5, 2, 2)
    first, second = ([ExpertKey(layer, e) for e in range(4)] for layer in (0, 1))
    assert count_hits(cache, [first[:2], second[:2], second[2:], first[:2]]) == 2
    assert sorted(cache.keys()) == first[:2] + second[2:]
    with pytest.raises(UserError, match="has 1 for each of 3 layers, a route needs 2"):
        PerLayerCache(5, 3, 2)


@pytest.mark.parametrize(
    "make",
    [
        LfuCache,
        SlruCache,
        lambda rows: PerLayerCache(rows, 1, 1),
        lambda rows: BeladyCache(rows, uses_of([[ExpertKey(0, 0)]] * 9)),
    ],
)
def test_pins_guesses_and_failed_reads(make):
    a, b, c, d = (ExpertKey(0, e) for e in range(4))
    cache = make(3)
    for key in (a, b, c):
        cache.admit(key)
        cache.landed(key)
    cache.pin(a)
    cache.pin(b)
    cache.pin(c)
    assert cache.admit(d) is None, "everybody is protected"
    cache.unpin(a)
    cache.unpin(b)
    cache.demote(b)  # a wrong guess
    row = cache.row_of(b)
    assert cache.admit(d) == row
    assert cache.is_protected(d), "in flight"
    cache.drop(d)  # its read failed
    assert cache.admit(b) == row
    assert sorted(cache.keys()) == [a, b, c]


def test_a_use_that_another_tier_served_is_seen():
    """Between its uses of `a` the cache is not asked: it must not think that `a` is still wanted."""
    cache = BeladyCache(2, {"a": [0, 1], "b": [0, 5], "c": [3, 6]})
    cache.position = 0
    for key in "ab":
        cache.admit(key)
        cache.landed(key)
    cache.position = 3
    cache.admit("c")
    assert cache.row_of("a") is None
