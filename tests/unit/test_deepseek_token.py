"""Streams, norms, window and Engram of one DeepSeek token: interpreted against their definitions."""

from __future__ import annotations

import pytest

from tests.unit import deepseek_checks as checks
from tests.unit.deepseek_checks import SMALL, Sizes

SHAPES = pytest.mark.parametrize("s", SMALL.values(), ids=SMALL)


@SHAPES
def test_read_and_mixes_are_the_definition(s: Sizes):
    for seed in (0, 50, 100):
        checks.check_read(s, seed)


@SHAPES
def test_read_is_the_definition_to_the_bit_where_its_norm_is_exact(s: Sizes):
    checks.check_read_bits(s)


@SHAPES
def test_write_is_the_definition_to_the_bit(s: Sizes):
    for seed in (20, 60):
        checks.check_write(s, seed)


@SHAPES
def test_engram_is_the_definition(s: Sizes):
    checks.check_engram(s)


@SHAPES
@pytest.mark.parametrize("is_exact", [True, False], ids=["exact", "random"])
def test_window_entry_and_query_are_the_definition(s: Sizes, is_exact: bool):
    for position in checks.positions(s):
        checks.check_prepare(s, position, is_exact)
