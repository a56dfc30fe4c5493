"""Compressed entries and index keys of one DeepSeek token: interpreted against their definition."""

from __future__ import annotations

import pytest

from tests.unit import deepseek_checks as checks
from tests.unit.deepseek_checks import SMALL, Sizes

SHAPES = pytest.mark.parametrize("s", SMALL.values(), ids=SMALL)


@SHAPES
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "random"])
def test_entries_and_keys_are_the_definition(s: Sizes, ratio: int, is_exact: bool):
    """Token by token from the start, then at the end of the window's memory."""
    places = [*range(12), s.capacity // 2 + 1, s.capacity - 1]
    checks.check_compressor(s, ratio, is_exact, places)


@SHAPES
def test_a_first_token_alone_changes_no_entry(s: Sizes):
    checks.check_compressor(s, 2, False, [0, 2, 4])
