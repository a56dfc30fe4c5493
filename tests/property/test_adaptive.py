"""The cache that chooses its rule: each rule against its own cache, the choice against the best of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import CachePolicy
from runtime.experts import adaptive
from runtime.experts.adaptive import HALF_LIVES_STEPS, LARGE_STEPS, AdaptiveCache, cache_for
from runtime.experts.cache import ExpertCache
from runtime.experts.layout import ExpertKey
from runtime.experts.policies import LfuCache, count_hits, most_hits
from runtime.experts.routes import RouteHeader
from runtime.locality import PRESETS, generate

LAYERS, EXPERTS, TOP_K = 8, 64, 6
STEP = LAYERS * TOP_K


SMALL = RouteHeader("made up", LAYERS, EXPERTS, TOP_K, 4096)
LARGE = RouteHeader("made up", 48, 512, 10, 4096)  # of which ghosts have a sample


def routes(
    tokens: int, topics: int, header: RouteHeader = SMALL, seed: int = 0
) -> list[list[ExpertKey]]:
    """Generated routes of so many tokens, with another liking of experts for each topic."""
    found = []
    for topic in range(topics):
        trace = generate(header, PRESETS["qwen"], tokens // topics, 100 * seed + topic)
        found += [
            [ExpertKey(step.layer, expert) for expert in step.experts] for step in trace.steps
        ]
    return found


def fixed_rules(rows: int, step: int = STEP) -> list[ExpertCache[ExpertKey]]:
    half_lives = (rows, *(steps * step for steps in HALF_LIVES_STEPS))
    return [ExpertCache(rows), *(LfuCache(rows, half_life) for half_life in half_lives)]


@pytest.mark.parametrize("rows", [30, 48, 77, 150])
@pytest.mark.parametrize("rule", range(4))
def test_each_rule_finds_what_its_own_cache_finds(monkeypatch, rule, rows):
    monkeypatch.setattr(adaptive, "MARGIN", 2.0)  # nobody takes over
    monkeypatch.setattr(adaptive, "GROW_USES", 1)
    cache = AdaptiveCache(rows, LAYERS, STEP)
    cache._change_to(rule)
    requests = routes(90, 3)
    wanted = count_hits(fixed_rules(rows)[rule], requests)
    # counts that are nearly equal may go in any order
    assert count_hits(cache, requests) == pytest.approx(wanted, abs=0.002 * STEP * 90)
    assert cache.rule == rule


@pytest.mark.parametrize("topics", [1, 3, 8])
@pytest.mark.parametrize("rows", [30, 44, 50, 58, 72, 77, 90, 120, 170, 290])
def test_it_finds_nearly_what_the_best_rule_finds(rows, topics):
    requests = routes(160, topics)
    uses = STEP * 160
    found = [count_hits(cache, requests) / uses for cache in fixed_rules(rows)]
    chosen = count_hits(AdaptiveCache(rows, LAYERS, STEP), requests) / uses
    assert chosen > max(found) - 0.03, (chosen, found)
    assert chosen <= most_hits(requests, rows) / uses


@pytest.mark.parametrize("topics", [1, 4])
@pytest.mark.parametrize("rows", [466, 480, 576, 777, 1200])
def test_a_sample_of_the_layers_tells_as_much(rows, topics):
    """Also where an LRU just holds a step, which its ghost does not, or just not, which its ghost may."""
    requests = routes(60, topics, LARGE)
    found = [count_hits(cache, requests) / (480 * 60) for cache in fixed_rules(rows, 480)]
    cache = AdaptiveCache(rows, 48, 480)
    assert cache._ghosts[0].num_rows < rows / 5
    assert count_hits(cache, requests) / (480 * 60) > max(found) - 0.015, (
        cache.rules[cache.rule],
        found,
    )


def test_an_lru_below_a_step_is_no_choice():
    """Whatever its ghost says, whose rows are too few to be sure."""
    for rows, rule in ((STEP - 1, 2), (STEP, 0)):
        cache = AdaptiveCache(rows, LAYERS, STEP)
        cache._found[0] = cache._shown = 100.0
        cache._judge()
        assert cache.rule == rule


def test_what_a_guess_brought_is_not_the_rules_doing():
    cache, key = AdaptiveCache(3, 1, 100), ExpertKey(0, 1)
    cache.admit(key)
    cache.landed(key)
    for found in (0, 1, 2):
        cache.take(key)
        assert cache._found_here == found
    asked_for = ExpertKey(0, 2)
    assert count_hits(cache, [[asked_for], [asked_for]]) == 1
    assert cache._found_here == 3


def test_it_changes_when_the_routes_do(caplog):
    cache = AdaptiveCache(77, LAYERS, STEP)
    assert cache.rules[cache.rule] == "LRU"
    with caplog.at_level("INFO"):
        count_hits(cache, routes(120, 1))
    assert cache.rule > 0
    assert f"the expert cache evicts by {cache.rules[cache.rule]} now: of late" in caplog.text
    cache._change_to(3)  # which is at its worst where topics last for five tokens
    count_hits(cache, routes(200, 40))
    assert cache.rule < 2


@pytest.mark.parametrize("rule", range(4))
def test_a_wrong_guess_goes_first_and_pins_hold(monkeypatch, rule):
    monkeypatch.setattr(adaptive, "MARGIN", 2.0)
    a, b, c, d, e = (ExpertKey(0, expert) for expert in range(5))
    cache = AdaptiveCache(3, 1, 3)
    cache._change_to(rule)
    count_hits(cache, [[c], [c], [c], [b], [c], [a]])
    cache.demote(c)
    cache._change_to(3 if rule else 0)
    assert cache.keys()[0] == c
    row = cache.row_of(c)
    assert cache.admit(d) == row
    assert cache.is_protected(d)
    cache.landed(d)
    for key in (a, b, d):
        cache.pin(key)
    assert cache.admit(e) is None, "everybody is protected"
    cache.unpin(b)
    assert cache.admit(e) is not None
    assert cache.row_of(b) is None
    cache.drop(e)
    assert sorted(cache.keys()) == [a, d]


def test_counts_that_grow_for_ever_keep_their_order(monkeypatch):
    monkeypatch.setattr(adaptive, "MARGIN", 2.0)
    found = []
    for largest in (2.0**100, 8.0):
        monkeypatch.setattr(adaptive, "LARGEST_UNIT", largest)
        cache = AdaptiveCache(60, LAYERS, STEP)
        cache._change_to(1)
        found.append(count_hits(cache, routes(60, 2)))
    assert found[0] == pytest.approx(found[1], abs=0.002 * STEP * 60)


@given(
    requests=st.lists(
        st.lists(st.builds(ExpertKey, st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=3, unique=True),
        max_size=80,
    ),
    rows=st.integers(3, 8),
)  # fmt: skip
def test_never_more_than_the_bound(requests, rows):
    assert count_hits(AdaptiveCache(rows, 3, 3), requests) <= most_hits(requests, rows)


@pytest.mark.parametrize(
    ("policy", "rows", "kind"),
    [
        (CachePolicy.auto, STEP - 1, AdaptiveCache),
        (CachePolicy.auto, LARGE_STEPS * STEP - 1, AdaptiveCache),
        (CachePolicy.auto, LARGE_STEPS * STEP, ExpertCache),
        (CachePolicy.lru, STEP, ExpertCache),
        (CachePolicy.lfu, STEP - 1, LfuCache),
        (CachePolicy.lfu, STEP, LfuCache),
    ],
)
def test_who_gets_which_cache(policy, rows, kind):
    assert type(cache_for(policy, LAYERS, STEP, LAYERS * EXPERTS)(rows)) is kind


def test_a_cache_of_everything_is_an_lru():
    make = cache_for(CachePolicy.auto, LAYERS, STEP, 100)
    assert type(make(99)) is AdaptiveCache
    assert type(make(100)) is ExpertCache
