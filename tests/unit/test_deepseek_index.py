"""The indexer of one DeepSeek token: interpreted against its definitions, at ties and at every edge of the lists."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels import deepseek_index, reference_deepseek
from tests.unit import deepseek_checks as checks
from tests.unit.deepseek_checks import DEVICE, SMALL, Sizes, at

SHAPES = pytest.mark.parametrize("s", SMALL.values(), ids=SMALL)


@SHAPES
def test_queries_are_the_definition_to_the_bit(s: Sizes):
    for position in checks.positions(s):
        checks.check_query(s, position)


@SHAPES
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("kinds", [1, 3, 10_000])
def test_choice_is_the_definition(s: Sizes, ratio: int, kinds: int):
    for position in checks.positions(s):
        if position >= ratio - 1:
            checks.check_choice(s, position, ratio, kinds, is_source=True)


def test_the_largest_and_smallest_scores_are_in_order():
    """Zeros of both signs are equal; negative numbers, infinities of a mask, neighbours in bf16."""
    scores = checks.narrow(700, seed=1)
    scores[::7], scores[1::7], scores[::11] = 0.0, -0.0, 1.0
    scores[5], scores[6], scores[7] = 3e38, -3e38, 1e-39
    scores[300:400] = -scores[300:400].abs()
    for topk in (1, 2, 350, 651, 699):
        chosen = torch.full((topk,), -7, dtype=torch.int32, device=DEVICE)
        deepseek_index.list_best(scores.to(DEVICE), at(699), chosen, 1)
        checks.expect_list(chosen, scores.unsqueeze(0), topk)


def test_a_list_longer_than_the_candidates_takes_the_first_of_the_rest():
    s = dataclasses.replace(checks.GOLDEN, topk=16, num_blocks=2)
    for position in (16, 30, 60, 191):
        checks.check_choice(s, position, 1, 5, is_source=True)


def test_all_65536_scores_are_ordered():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    scores = bits.view(torch.bfloat16)
    scores = scores[scores.isfinite()]
    scores = scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))]
    chosen = torch.full((20_000,), -7, dtype=torch.int32, device=DEVICE)
    deepseek_index.list_best(scores.to(DEVICE), at(len(scores) - 1), chosen, 1)
    best = reference_deepseek.best_places(scores.unsqueeze(0), 20_000)[0].sort().values
    assert torch.equal(chosen.cpu().long(), best)
