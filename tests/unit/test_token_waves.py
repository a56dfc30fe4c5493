"""How a token's graph is answered: what goes with which wave, and where one graph per token is refused."""

from __future__ import annotations

import platform

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine import _check_graphs, load_family
from runtime.errors import UserError
from runtime.models.token_graph import WAVES, TokenGraph, check_token_graph

TOP_K = 6


def answers(sizes: list[int], words: int = 1) -> list[tuple[int, list[int], bool]]:
    """Serve a layer whose experts arrive in lists of these sizes: (wave, places in order, whether it is the last)."""
    graph = TokenGraph(torch.device("cpu"), 3, TOP_K, words, TOP_K, limit_s=1.0)
    graph._next()
    found, place = [], 0
    answer = graph._answer

    def note(layer, wave, placed, is_last):
        found.append((wave, [place for place, _ in placed], is_last))
        answer(layer, wave, placed, is_last)
        row = graph._gates[layer, wave]
        table = row[16 : 16 + TOP_K * words].tolist()
        assert [at for at, value in enumerate(table) if value] == [at for at, _ in placed]
        assert row[0] == graph._number + is_last

    graph._answer = note
    waves = []
    for size in sizes:
        waves.append([(place + i, 1000 + place + i) for i in range(size * words)])
        place += size * words
    graph._serve(1, waves)
    return found


def test_what_is_there_at_once_is_the_only_wave():
    assert answers([TOP_K]) == [(0, [0, 1, 2, 3, 4, 5], True)]
    assert answers([0, 6, 0]) == [(0, [0, 1, 2, 3, 4, 5], True)]


def test_the_wave_before_the_last_waits_until_one_expert_is_missing():
    """So that behind the last arrival one expert is left to compute, however many came one by one."""
    assert answers([2, 1, 1, 1, 1]) == [(0, [0, 1], False), (1, [2, 3, 4], False), (2, [5], True)]
    assert answers([2, 0, 2, 2]) == [(0, [0, 1], False), (1, [2, 3, 4, 5], True)]
    assert answers([1] * 6) == [(0, [0], False), (1, [1, 2, 3, 4], False), (2, [5], True)]
    two = answers([5, 1], words=2)
    assert two == [(0, list(range(10)), False), (1, [10, 11], True)]


@given(st.lists(st.integers(0, TOP_K), max_size=12), st.sampled_from([1, 2]))
def test_every_expert_goes_once_and_the_last_wave_says_so(cuts, words):
    sizes = []
    for size in [*cuts, TOP_K]:
        sizes.append(min(size, TOP_K - sum(sizes)))
    found = answers(sizes, words)
    assert [wave for wave, _, _ in found] == list(range(len(found)))
    assert len(found) <= WAVES
    assert [p for _, places, _ in found for p in places] == list(range(TOP_K * words))
    assert [is_last for _, _, is_last in found] == [False] * (len(found) - 1) + [True]


def test_several_conversations_are_refused():
    check_token_graph(max_batch=1)
    with pytest.raises(UserError, match=r"one conversation at a time.*serve\.max_batch=3"):
        check_token_graph(max_batch=3)


def test_processors_that_may_reorder_writes_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UserError, match=r"x86-64.*aarch64"):
        check_token_graph(max_batch=1)


@pytest.mark.parametrize("model", ["qwen25_7b_1m", "qwen3_30b_a3b"])
def test_families_without_such_a_graph_refuse_it(make_config, model):
    config = make_config(model, **{"hw.graphs": "token"})
    family = load_family(config.model.family)
    _check_graphs(config, family, torch.device("cpu"))  # where there are no graphs at all
    with pytest.raises(UserError, match=f"not made for models of the family {config.model.family}"):
        _check_graphs(config, family, torch.device("cuda"))


def test_families_with_such_a_graph_take_it(make_config):
    for model in ("tiny", "tiny_deepseek"):
        config = make_config(model, **{"hw.graphs": "token"})
        _check_graphs(config, load_family(config.model.family), torch.device("cuda"))
