"""Guesses of a chosen acceptance, without an engine."""

from types import SimpleNamespace

import pytest

from stages.bench_acceptance import KnownAnswer

ANSWER = [(7 * i) % 50 for i in range(2000)]


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_as_many_are_right_as_asked_for_and_who_guessed_before_is_asked(acceptance):
    asked = []
    before = SimpleNamespace(propose=lambda *words: asked.append(words) or [1, 2])
    drafting = SimpleNamespace(source=before, source_name="lookup")
    known = KnownAnswer(drafting, acceptance, vocab_size=50, seed=3)
    assert drafting.source is known
    assert drafting.source_name == f"the answer, {acceptance:.0%} right"
    prompt, found = [3, 1, 4], []
    for _ in range(2):  # an answer that is begun anew gets the same guesses
        known.start(prompt, ANSWER)
        guesses = []
        for at in range(0, len(ANSWER) - 4, 4):
            guesses += known.propose(prompt + ANSWER[:at], ANSWER[at], None, 4)
        found.append(guesses)
    assert found[0] == found[1]
    right = [guess == wanted for guess, wanted in zip(found[0], ANSWER[1:], strict=False)]
    assert sum(right) / len(right) == pytest.approx(acceptance, abs=0.05)
    assert asked[1] == (prompt + ANSWER[:4], ANSWER[4], None, 4)
    assert len(asked) == 2 * len(range(0, len(ANSWER) - 4, 4))
    assert all(0 <= guess < 50 for guess in found[0])


def test_the_answer_ends():
    drafting = SimpleNamespace(source=SimpleNamespace(propose=lambda *_: []), source_name="lookup")
    known = KnownAnswer(drafting, 1.0, vocab_size=50, seed=0)
    known.start([9], [5, 6, 7])
    assert known.propose([9, 5], 6, None, 4) == [7]
    assert known.propose([9, 5, 6], 7, None, 4) == []
