"""What a second drive gives, by the simulator: the numbers follow from the drives' rates."""

import pytest

from conf.schema import Spread
from runtime.experts.routes import RouteHeader
from runtime.locality import Locality, generate
from runtime.simulator import Machine, Setting, Simulation
from runtime.units import GIB

HEADER = RouteHeader("imagined", 8, 128, 6, 2764800)
TOKENS = 12


def token_s(drives, spread=Spread.mirror, prefetch=0, cache_rows=8, **more):
    """Return the mean seconds of a token on drives of these rates, and the bytes that it reads."""
    trace = generate(HEADER, Locality(1.0, 0.2, 0.7, 0.9), TOKENS, 0)
    machine = Machine(sum(drives), drives_gib_s=tuple(drives))
    setting = Setting(
        cache_rows=cache_rows, prefetch_experts=prefetch, spread=spread, shares=tuple(drives),
        limits_nbytes=more.pop("limits", (None,) * len(drives)), **more,
    )  # fmt: skip
    tokens = Simulation(HEADER, machine, setting).replay(trace)
    return (
        sum(t.total_ms for t in tokens) / len(tokens) / 1e3,
        sum(t.counters.read_nbytes for t in tokens) / len(tokens),
    )


def test_one_drive_in_a_list_is_one_drive():
    alone, nbytes = token_s([4.1])
    assert alone == pytest.approx(nbytes / (4.1 * GIB), rel=1e-9)


@pytest.mark.parametrize("spread", [Spread.mirror, Spread.split])
@pytest.mark.parametrize(
    ("drives", "share"), [([4.1, 4.1], 0.97), ([4.1, 2.0], 0.95), ([4.1, 2.0, 1.0], 0.9)]
)
def test_mirrors_and_slices_give_nearly_the_sum_of_all_rates(spread, drives, share):
    seconds, nbytes = token_s(drives, spread)
    rate = nbytes / seconds / GIB
    assert share * sum(drives) <= rate <= sum(drives) * (1 + 1e-9)


def test_stripes_are_as_slow_as_the_drive_with_most_of_a_layer():
    """Six experts a layer fall unevenly on two drives: 3.94 of them on the fuller one, on average."""
    one, _ = token_s([4.1])
    two, _ = token_s([4.1, 4.1], Spread.stripe)
    assert one / two == pytest.approx(6 / 3.94, rel=0.05)


@pytest.mark.parametrize("spread", list(Spread))
@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_is_found_does_not_depend_on_the_drives_without_guesses(spread, prefetch):
    """The cache is one: hits and bytes are those of one drive; with guesses the moment decides which are made."""
    _, one = token_s([4.1], prefetch=prefetch, cache_rows=200)
    _, two = token_s([4.1, 2.0], spread, prefetch=prefetch, cache_rows=200)
    assert two == pytest.approx(one, rel=0.15 if prefetch else 1e-12)


def test_a_mirror_with_little_room_still_helps():
    """A second drive that holds half of the experts."""
    whole = 8 * 128 * 2764800
    one, _ = token_s([4.1])
    half, _ = token_s([4.1, 4.1], limits=(None, whole // 2))
    two, _ = token_s([4.1, 4.1])
    assert two * 1.2 < half < one / 1.15


def test_the_same_input_gives_the_same_output():
    assert token_s([4.1, 2.0], prefetch=2) == token_s([4.1, 2.0], prefetch=2)
