"""The gate on clocks that are known: it prefers what costs least per token, follows a change, and forgets slowly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.drafts.gate import PROBE_EVERY, TRIALS, DepthGate


class Machine:
    """Passes whose time and bytes are told by formulas, and guesses that are right with a probability each."""

    def __init__(self, gate, ms_of, right, mib_of=lambda guesses: 1.0, seed=1):
        self.gate, self.ms_of, self.mib_of, self.right = gate, ms_of, mib_of, right
        self.random = random.Random(seed)
        self.chosen, self.tokens, self.ms = [], 0, 0.0

    def run(self, passes):
        for _ in range(passes):
            guesses = self.gate.choose()
            accepted = 0
            while accepted < guesses and self.random.random() < self.right:
                accepted += 1
            ms = self.ms_of(guesses)
            nbytes = round(self.mib_of(guesses) * 2**20)
            self.gate.record(guesses, accepted, round(ms * 1e6), nbytes)
            self.chosen.append(guesses)
            self.tokens, self.ms = self.tokens + 1 + accepted, self.ms + ms
        return self


def test_every_depth_is_tried_first():
    gate = DepthGate(3)
    machine = Machine(gate, lambda _: 10.0, 0.5)
    assert gate.report()["is_learning"]
    machine.run(4 * TRIALS)
    assert machine.chosen == [0, 1, 2, 3] * TRIALS
    assert not gate.report()["is_learning"]


@pytest.mark.parametrize(
    ("ms_of", "right", "best"),
    [
        # a drive that waits for each row's own experts: a row costs nearly a pass, and one in three is right
        (lambda guesses: 10 + 9 * guesses, 0.33, 0),
        # one reading of the layers for all rows: more rows are nearly free
        (lambda guesses: 10 + 0.3 * guesses, 0.8, 4),
        # 1.5 tokens for 12 ms, 1.75 for 15.5, 1.875 for 19
        (lambda guesses: 10 + 2 * guesses + 1.5 * max(0, guesses - 1), 0.5, 1),
    ],
)
def test_the_cheapest_time_per_token_wins(ms_of, right, best):
    machine = Machine(DepthGate(4), ms_of, right).run(400)
    assert machine.gate.best == best
    assert machine.gate.report()["is_off"] == (best == 0)
    late = machine.chosen[200:]
    assert late.count(best) > 0.9 * len(late)
    fixed = Machine(DepthGate(4), ms_of, right)
    fixed.gate.choose = lambda: best
    fixed.run(400)
    assert machine.ms / machine.tokens < 1.1 * fixed.ms / fixed.tokens


def test_a_machine_that_changes_is_followed():
    """An expert cache that has warmed up: rows that cost a pass each are free now, then dear again."""
    machine = Machine(DepthGate(2), lambda guesses: 10 + 10 * guesses, 0.6).run(100)
    assert machine.gate.best == 0
    machine.ms_of = lambda guesses: 10
    machine.run(24 * PROBE_EVERY)
    assert machine.gate.best == 2
    machine.ms_of = lambda guesses: 10 + 20 * guesses
    machine.run(4 * PROBE_EVERY)
    assert machine.gate.best == 0


def test_of_equal_times_fewer_bytes_win():
    dear = Machine(DepthGate(1), lambda guesses: 10 * (1 + guesses), 1.0, lambda guesses: 5.0).run(
        20
    )
    assert dear.gate.best == 1, "2 tokens for 5 MiB"
    cheap = Machine(DepthGate(1), lambda guesses: 10 * (1 + guesses), 1.0, lambda g: 1 + 3 * g)
    assert cheap.run(20).gate.best == 0, "2 tokens for 4 MiB, where plain takes 2 MiB"


def test_guesses_that_nobody_had_are_no_probe():
    """A look-up finds nothing for a while: the gate asks until it has measured what it wanted to know."""
    gate = DepthGate(2)
    Machine(gate, lambda guesses: 10 + 20 * guesses, 0.1).run(100)
    while (wanted := gate.choose()) == 0:
        gate.record(0, 0, 10**7, 0)
    for _ in range(5):
        gate.record(0, 0, 10**7, 0)
        assert gate.choose() == wanted
    gate.record(wanted, 0, 10**7, 0)
    assert gate.choose() == 0


def test_what_is_reported():
    gate = DepthGate(2)
    for guesses, accepted, ms, mib in ((0, 0, 8, 1), (2, 2, 12, 3), (2, 0, 16, 5), (1, 1, 9, 2)):
        gate.record(guesses, accepted, ms * 10**6, mib * 2**20)
    first, _, third = gate.report()["depths"]
    assert first == {
        "guesses": 0, "passes": 1, "ms_per_pass": 8.0, "mib_per_pass": 1.0, "tokens_per_pass": 1.0,
    }  # fmt: skip
    # of first guesses 2 of 3 were right, of second ones 1 of 1
    assert third == {
        "guesses": 2, "passes": 2, "ms_per_pass": 14.0, "mib_per_pass": 4.0, "tokens_per_pass": 2.333,
    }  # fmt: skip


@given(
    depth=st.integers(0, 6),
    passes=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 6), st.integers(0, 6))),
)
def test_choices_are_in_range_and_the_same_for_the_same_clock(depth, passes):
    gates = DepthGate(depth), DepthGate(depth)
    tried: list[tuple[int, int]] = []
    for duration, cut, accepted in passes:
        choices = [gate.choose() for gate in gates]
        assert choices[0] == choices[1]
        assert 0 <= choices[0] <= depth
        guesses = min(choices[0], cut)
        tried.append((guesses, min(accepted, guesses)))
        for gate in gates:
            gate.record(*tried[-1], duration, duration)
    assert gates[0].report() == gates[1].report()
    tokens = [each["tokens_per_pass"] for each in gates[0].report()["depths"]]
    assert tokens == sorted(tokens), "a further guess takes no token away"
    assert all(1 <= found <= 1 + guesses for guesses, found in enumerate(tokens))
    if all(right == guesses for guesses, right in tried):
        assert tokens == list(range(1, depth + 2))
    elif not any(right for _, right in tried):
        assert tokens == [1] * (depth + 1)
