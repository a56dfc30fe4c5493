"""Which experts VRAM keeps, against counts that are aged all at once, each time."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runtime.experts import frequency
from runtime.experts.frequency import HALF_LIFE_TOKENS, MARGIN, KeptExperts

LAYERS = 2
routes_of_few = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), min_size=1, max_size=60
)


def nearly(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-9 * max(a, b)


@given(routes=routes_of_few, num_slots=st.integers(0, 5), largest=st.sampled_from([1.5, 2.0**100]))
def test_by_counting(routes, num_slots, largest):
    """largest: so small that scores are brought down all the time."""
    before, frequency.LARGEST_UNIT = frequency.LARGEST_UNIT, largest
    try:
        check(routes, num_slots)
    finally:
        frequency.LARGEST_UNIT = before


def check(routes, num_slots):
    kept = KeptExperts(range(100, 100 + num_slots), LAYERS)
    counts: dict[int, float] = {}
    ageing = 2 ** (-1 / (HALF_LIFE_TOKENS * LAYERS))
    slots = {}  # key -> slot, as this test believes
    passing = iter(range(1000, 10**6))  # where a newcomer is
    for route in routes:
        worth = {key: kept.is_worth_keeping(key) for key in route}
        kept.count(route)
        for key in counts:
            counts[key] *= ageing
        for key in route:
            counts[key] = counts.get(key, 0.0) + 1.0
        for key in route:
            if key in slots:
                continue
            slot = next(passing)
            least = min((counts[k] for k in slots), default=0.0)
            near = any(nearly(counts[key], MARGIN * counts[k]) for k in slots)
            freed = kept.keep(key, slot)
            if num_slots == 0:
                assert freed is None
                assert not worth[key]
            elif len(slots) < num_slots:
                assert freed in range(100, 100 + num_slots)
                slots[key] = slot
            elif freed is None:
                assert near or counts[key] <= MARGIN * least
            else:
                (victim,) = [k for k, s in slots.items() if s == freed]
                assert nearly(counts[victim], least)
                assert near or counts[key] > MARGIN * least
                del slots[victim]
                slots[key] = slot
        assert {key: kept.slot_of(key) for key in kept.in_order()} == slots
        order = [counts[key] for key in kept.in_order()]
        assert all(a <= b or nearly(a, b) for a, b in pairwise(order))


def test_what_is_used_now_counts():
    """A newcomer is judged with the use that brings it."""
    kept = KeptExperts([5], 1)
    kept.count([1])
    assert kept.is_worth_keeping(2), "a slot is free"
    assert kept.keep(1, 7) == 5
    assert not kept.is_worth_keeping(2), "used as often as the coldest"
    kept.count([2])
    assert kept.keep(2, 5) is None
    assert kept.is_worth_keeping(2)
    kept.count([2])
    assert kept.keep(2, 5) == 7
    assert kept.in_order() == [2]
