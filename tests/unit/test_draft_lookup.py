"""Prompt lookup against a search that is written as it is described."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drafts.lookup import PromptLookup

TOKENS = st.lists(st.sampled_from([0, 1, 2, 256, 2**24 + 1]), max_size=40)


def plain_search(text, lengths, depth):
    for length in sorted(lengths, reverse=True):
        for end in range(len(text) - 1, length - 1, -1):
            if len(text) > length and text[end - length : end] == text[-length:]:
                found = list(text[end:])
                while len(found) < depth:
                    found.append(found[len(found) - (len(text) - end)])
                return found[:depth]
    return []


@given(TOKENS, st.sets(st.integers(1, 5), min_size=1), st.integers(1, 7))
def test_the_latest_of_the_longest_endings(text, lengths, depth):
    text = [*text, 1]
    found = PromptLookup(lengths).propose(text[:-1], text[-1], None, depth)
    assert found == plain_search(text, lengths, depth)


def test_bytes_between_two_tokens_are_no_occurrence():
    """256 is 00 01 00 00, and so are the middle bytes of 65536 and 1 beside each other."""
    assert PromptLookup([1]).propose([7, 65536, 1, 9], 256, None, 2) == []
    assert PromptLookup([1]).propose([256, 5, 65536, 1, 9], 256, None, 2) == [5, 65536]


def test_a_loop_goes_on():
    assert PromptLookup([1, 2, 3, 4]).propose([5, 6, 7, 5, 6], 7, None, 5) == [5, 6, 7, 5, 6]
    assert PromptLookup([1, 2, 3, 4]).propose([5, 5], 5, None, 3) == [5, 5, 5]


def test_no_ending_no_guess():
    assert PromptLookup([3, 2]).propose([1, 2, 3, 1], 9, None, 4) == []
    assert PromptLookup([3, 1]).propose([], 9, None, 4) == []
    with pytest.raises(ValueError, match=r"endings of \[2, 0\] tokens"):
        PromptLookup([2, 0])
