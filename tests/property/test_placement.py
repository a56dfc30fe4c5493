"""Every expert lies exactly where its mode says, for any shares and sizes of drives."""

import hashlib
from collections import Counter
from fractions import Fraction

import pytest
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st

from conf.schema import Spread
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.placement import mix, place, quotas
from runtime.units import PAGE_NBYTES

WEIGHTS = st.floats(1e-6, 1e6)
DRIVES = st.integers(2, 5)
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 12))


def limits_of(n, nbytes):
    """Limits of drives for experts of so many bytes in all: none, too small, or more than enough."""
    return st.lists(st.none() | st.integers(0, 2 * nbytes), min_size=n, max_size=n)


def every(num_layers, num_experts):
    return [ExpertKey(layer, e) for layer in range(num_layers) for e in range(num_experts)]


def check_bytes(placement, keys, record_nbytes):
    """Each way to read a record fills all of it once, and no byte of a drive's file is two experts'."""
    taken = Counter()
    for key in keys:
        copies = placement.copies(key)
        assert copies, "every expert lies somewhere"
        for copy in copies:
            at = 0
            for span in copy:
                assert span.dest == at
                assert span.nbytes == span.need_nbytes > 0
                assert span.offset % PAGE_NBYTES == span.nbytes % PAGE_NBYTES == 0
                at += span.nbytes
                taken.update(
                    (span.file_idx, span.offset + p) for p in range(0, span.nbytes, PAGE_NBYTES)
                )
            assert at == record_nbytes
    assert set(taken.values()) <= {1}
    for drive in range(len(placement.slots)):
        pages = sorted(at for d, at in taken if d == drive)
        assert pages == list(range(0, placement.file_nbytes(drive), PAGE_NBYTES)), "no hole"


def brute_quotas(total, weights, rooms):
    """Fill full drives one at a time, then the largest remainders: as the docstring says it."""
    found, left = {}, total
    while True:
        others = [i for i in range(len(weights)) if i not in found]
        whole = sum(Fraction(weights[i]) for i in others)
        full = [i for i in others if Fraction(weights[i]) * left / whole > rooms[i]]
        if not full:
            break
        found |= {i: rooms[i] for i in full}
        left = total - sum(found.values())
    exact = {i: Fraction(weights[i]) * left / whole for i in others}
    return found, exact


@given(st.data(), DRIVES, st.integers(0, 300))
def test_quotas(data, n, total):
    weights = data.draw(st.lists(WEIGHTS, min_size=n, max_size=n))
    rooms = data.draw(st.lists(st.integers(0, 400), min_size=n, max_size=n))
    if sum(rooms) < total:
        with pytest.raises(ValueError, match="room for"):
            quotas(total, weights, rooms)
        return
    found = quotas(total, weights, rooms)
    full, exact = brute_quotas(total, weights, rooms)
    assert sum(found) == total
    assert all(0 <= count <= room for count, room in zip(found, rooms, strict=True))
    assert all(found[i] == count for i, count in full.items())
    assert all(abs(found[i] - want) < 1 for i, want in exact.items()), "by weight, to within one"


@given(st.data(), DRIVES, SHAPES)
def test_stripes(data, n, shape):
    """Each expert on one drive; shares and limits are kept, in each layer as in the whole."""
    num_layers, num_experts, pages = shape
    keys, record = every(num_layers, num_experts), pages * PAGE_NBYTES
    weights = data.draw(st.lists(WEIGHTS, min_size=n, max_size=n))
    limits = data.draw(limits_of(n, len(keys) * record))
    rooms = [len(keys) if x is None else min(len(keys), x // record) for x in limits]
    assume(sum(rooms) >= len(keys))
    placement = place(Spread.stripe, num_layers, num_experts, record, weights, limits)
    check_bytes(placement, keys, record)
    counts = [placement.num_blocks(drive) for drive in range(n)]
    assert counts == quotas(len(keys), weights, rooms)
    assert all(len(placement.homes(key)) == 1 for key in keys)
    for layer in range(num_layers):
        here = Counter(placement.homes(key)[0] for key in keys if key.layer == layer)
        for drive in range(n):
            assert abs(here[drive] - counts[drive] * num_experts / len(keys)) < n


@given(st.data(), DRIVES, SHAPES)
def test_slices(data, n, shape):
    """Each expert cut into whole pages over the drives, by their shares."""
    num_layers, num_experts, pages = shape
    keys, record = every(num_layers, num_experts), pages * PAGE_NBYTES
    weights = data.draw(st.lists(WEIGHTS, min_size=n, max_size=n))
    limits = data.draw(limits_of(n, len(keys) * record))
    rooms = [pages if x is None else min(pages, x // (len(keys) * PAGE_NBYTES)) for x in limits]
    assume(sum(rooms) >= pages)
    placement = place(Spread.split, num_layers, num_experts, record, weights, limits)
    check_bytes(placement, keys, record)
    wanted = [count * PAGE_NBYTES for count in quotas(pages, weights, rooms)]
    for key in keys:
        (copy,) = placement.copies(key)
        found = {span.file_idx: span.nbytes for span in copy}
        assert [found.get(drive, 0) for drive in range(n)] == wanted
    for drive, limit in enumerate(limits):
        assert limit is None or placement.file_nbytes(drive) <= limit


@given(st.data(), DRIVES, SHAPES)
def test_mirrors(data, n, shape):
    """As many copies on each drive as its limit allows, each expert about as often as any other."""
    num_layers, num_experts, pages = shape
    keys, record = every(num_layers, num_experts), pages * PAGE_NBYTES
    limits = data.draw(limits_of(n, len(keys) * record))
    rooms = [len(keys) if x is None else min(len(keys), x // record) for x in limits]
    assume(sum(rooms) >= len(keys))
    placement = place(Spread.mirror, num_layers, num_experts, record, [1.0] * n, limits)
    check_bytes(placement, keys, record)
    assert [placement.num_blocks(drive) for drive in range(n)] == rooms
    copies = [len(placement.homes(key)) for key in keys]
    assert min(copies) == sum(rooms) // len(keys)
    assert max(copies) - min(copies) <= 1


@pytest.mark.parametrize("spread", list(Spread))
def test_limits_that_are_too_small_are_refused_with_numbers(spread):
    with pytest.raises(UserError, match=r"room for .*, the experts are 256\.0 KiB") as caught:
        place(spread, 2, 8, 4 * PAGE_NBYTES, [1.0, 1.0], [25 * PAGE_NBYTES, 30 * PAGE_NBYTES])
    assert "limit_gib" in caught.value.hint


def test_the_hash_is_the_same_everywhere():
    """A pack that was written by another version or machine is found again: recorded values."""
    text = b"".join(mix(key) for key in every(3, 50))
    assert mix(ExpertKey(1, 2)) == blake3(bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest(length=8)
    assert len({text[i : i + 8] for i in range(0, len(text), 8)}) == 150
    placement = place(Spread.stripe, 4, 64, PAGE_NBYTES, [4.1, 2.0], [None, None])
    homes = bytes(placement.homes(key)[0] for key in every(4, 64))
    assert hashlib.sha256(homes).hexdigest()[:16] == "144e5e52267c3c96"
