"""The cache's book against a list: who is here, in which order, and who goes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.experts.cache import ExpertCache
from runtime.experts.layout import ExpertKey

KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]
any_key = st.sampled_from(KEYS)


class CacheMachine(RuleBasedStateMachine):
    @initialize(num_rows=st.integers(1, 5))
    def start(self, num_rows):
        self.cache = ExpertCache(num_rows)
        self.num_rows = num_rows
        self.order = []  # oldest first
        self.rows = {}
        self.pins = dict.fromkeys(KEYS, 0)
        self.in_flight = set()

    def pick(self, data, keys):
        return data.draw(st.sampled_from(sorted(keys)))

    @rule(key=any_key)
    def admit(self, key):
        if key in self.order:
            with pytest.raises(ValueError, match="already"):
                self.cache.admit(key)
            return
        evictable = [k for k in self.order if not self.pins[k] and k not in self.in_flight]
        row = self.cache.admit(key)
        if len(self.order) < self.num_rows:  # nobody goes while a row is free
            assert row in set(range(self.num_rows)) - set(self.rows.values())
        elif not evictable:
            assert row is None
            return
        else:
            assert row == self.rows.pop(evictable[0])
            self.order.remove(evictable[0])
        self.order.append(key)
        self.rows[key] = row
        self.in_flight.add(key)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def landed(self, data):
        key = self.pick(data, self.in_flight)
        self.cache.landed(key)
        self.in_flight.remove(key)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def drop(self, data):
        key = self.pick(data, self.in_flight)
        self.cache.drop(key)
        self.in_flight.remove(key)
        self.order.remove(key)
        del self.rows[key]
        self.pins[key] = 0

    @precondition(lambda self: self.order)
    @rule(data=st.data(), is_touch=st.booleans())
    def age(self, data, is_touch):
        key = self.pick(data, self.order)
        (self.cache.touch if is_touch else self.cache.demote)(key)
        self.order.remove(key)
        self.order.insert(len(self.order) if is_touch else 0, key)

    @rule(key=any_key)
    def pin(self, key):
        if key not in self.order:
            with pytest.raises(KeyError):
                self.cache.pin(key)
            return
        self.cache.pin(key)
        self.pins[key] += 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data):
        key = self.pick(data, [k for k in KEYS if self.pins[k]])
        self.cache.unpin(key)
        self.pins[key] -= 1

    @invariant()
    def agree(self):
        assert self.cache.keys() == self.order
        assert len(self.cache) == len(self.order)
        assert self.cache.has_free_row == (len(self.order) < self.num_rows)
        for key in KEYS:
            assert self.cache.row_of(key) == self.rows.get(key)
            assert self.cache.is_in_flight(key) == (key in self.in_flight)
        assert len(set(self.rows.values())) == len(self.rows)  # no row serves two experts


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def filled(num_rows, num_keys):
    cache = ExpertCache(num_rows)
    for key in KEYS[:num_keys]:
        cache.admit(key)
        cache.landed(key)
    return cache


def test_the_last_free_row_evicts_nobody():
    """Full - 1: the next admission fits, the one after it does not."""
    cache = filled(4, 3)
    cache.admit(KEYS[3])
    assert cache.keys() == KEYS[:4]
    assert not cache.has_free_row
    cache.admit(KEYS[4])
    assert cache.keys() == KEYS[1:5]


def test_full_of_pins_but_one():
    """Full, everything pinned except the most recent: it goes."""
    cache = filled(4, 4)
    for key in KEYS[:3]:
        cache.pin(key)
    row = cache.row_of(KEYS[3])
    assert cache.admit(KEYS[4]) == row
    assert cache.admit(KEYS[5]) is None  # the newcomer is in flight
    assert cache.keys() == [*KEYS[:3], KEYS[4]]


def test_one_row():
    cache = ExpertCache(1)
    assert cache.admit(KEYS[0]) == 0
    assert cache.admit(KEYS[1]) is None
    cache.landed(KEYS[0])
    cache.pin(KEYS[0])
    cache.pin(KEYS[0])
    cache.unpin(KEYS[0])
    assert cache.admit(KEYS[1]) is None  # pinned twice, unpinned once
    cache.unpin(KEYS[0])
    assert cache.admit(KEYS[1]) == 0
    assert cache.keys() == [KEYS[1]]


def test_a_failed_read_takes_its_pins_along():
    """Admitted again after the failure, the expert may go like any other."""
    cache = ExpertCache(1)
    cache.admit(KEYS[0])
    cache.pin(KEYS[0])
    cache.drop(KEYS[0])
    assert len(cache) == 0
    cache.admit(KEYS[0])
    cache.landed(KEYS[0])
    assert cache.admit(KEYS[1]) == 0


def test_no_rows():
    with pytest.raises(ValueError, match="at least one"):
        ExpertCache(0)
