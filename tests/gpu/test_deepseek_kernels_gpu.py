"""The kernels of one DeepSeek token at the released sizes: against their definitions, twice, and as a graph.

Small sizes of the same checks are in `tests/unit/test_deepseek_*.py`, which run on the GPU too where there is one.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch

from kernels import deepseek_index
from tests.unit import deepseek_checks as checks
from tests.unit.deepseek_checks import DEVICE, FULL

pytestmark = pytest.mark.gpu

# the window's edge, lists that are just full, blocks of 64 that begin elsewhere; the last position
POSITIONS = [0, 1, 62, 127, 128, 511, 512, 1023, 1025, 4999, 8191]
# more entries than the candidate blocks hold: beyond what is planned for, but what the masks are for
LONG = dataclasses.replace(FULL, capacity=33_000)
LONG_POSITIONS = [16_383, 16_384, 16_391, 16_392, 20_001, 32_999]


@pytest.mark.parametrize("seed", [0, 50, 100])
def test_read_and_mixes_are_the_definition(seed: int):
    checks.check_read(FULL, seed)


def test_read_is_the_definition_to_the_bit_where_its_norm_is_exact():
    checks.check_read_bits(FULL)


@pytest.mark.parametrize("seed", [20, 60])
def test_write_is_the_definition_to_the_bit(seed: int):
    checks.check_write(FULL, seed)


def test_engram_is_the_definition():
    checks.check_engram(FULL)


@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "random"])
def test_window_entry_and_query_are_the_definition(is_exact: bool):
    for position in POSITIONS:
        checks.check_prepare(FULL, position, is_exact)


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_attention_is_the_definition(ratio: int):
    others = [checks.check_attention(FULL, position, ratio) for position in POSITIONS]
    assert sum(others) / len(others) <= checks.ATTENTION_SHARE


def test_scores_far_apart_neither_overflow_nor_vanish():
    checks.check_attention(FULL, FULL.capacity - 1, 1, spread=100.0)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "random"])
def test_entries_and_keys_are_the_definition(ratio: int, is_exact: bool):
    checks.check_compressor(FULL, ratio, is_exact, [0, 1, 2, 3, 4095, 8191])


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("kinds", [1, 7, 10_000])
def test_choice_is_the_definition(ratio: int, kinds: int):
    for position in POSITIONS:
        if position >= ratio - 1:
            checks.check_choice(FULL, position, ratio, kinds, is_source=True)


@pytest.mark.parametrize("kinds", [1, 7, 10_000])
def test_choice_among_candidates_is_the_definition(kinds: int):
    for position in LONG_POSITIONS:
        checks.check_choice(LONG, position, 1, kinds, is_source=True)


@pytest.mark.parametrize("capacity", [8192, 8191, 4096, 513])
def test_lists_of_random_scores(capacity: int):
    """Scores of few values and of many, also with less than the capacity visible."""
    for values, visible in [(2, capacity), (40, capacity), (10_000, capacity), (40, capacity - 1)]:
        scores = (checks.random(capacity, seed=values) * values / 4).round().to(torch.bfloat16)
        chosen = torch.full((512,), -7, dtype=torch.int32, device=DEVICE)
        deepseek_index.list_best(scores.to(DEVICE), checks.at(visible - 1), chosen, 1)
        checks.expect_list(chosen, scores[None, :visible], 512)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("position", POSITIONS)
def test_two_runs_and_a_graph_captured_elsewhere_give_the_same_bits(position: int, ratio: int):
    wanted = checks.check_layer(FULL, position, ratio)
    layer = checks.Layer(FULL, position, ratio)
    layer.position.fill_(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captured, not run
        layer.run()
    layer.position.fill_(position)
    allocated = torch.cuda.memory_allocated()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    for found, expected in zip(layer.results(), wanted, strict=True):
        assert torch.equal(found, expected)


def test_nothing_of_a_layer_waits_for_the_device():
    """Beyond the first launches, which compile."""
    layer = checks.Layer(FULL, 5000, 2)
    layer.run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_candidates_of_a_long_context_as_a_layer():
    checks.check_layer(LONG, 20_001, 1)
