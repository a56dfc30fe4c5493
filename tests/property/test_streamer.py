"""The streamer against a plain dict of records: any route, guess, cache and delay; errors; callers that leave."""

import random
import re
import tempfile
import threading
import time
from itertools import filterfalse
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conf.schema import CachePolicy, DirectIo, DriveConfig
from runtime.checkpoint import Extent
from runtime.experts.adaptive import cache_for
from runtime.experts.layout import ExpertKey, aligned_spans
from runtime.experts.reader import DirectReader, ReadError
from runtime.experts.resident import ResidentExperts
from runtime.experts.streamer import ExpertStreamer
from runtime.units import PAGE_NBYTES
from tests.faulty_drives import ChildDrive, Drive
from tests.waiting import PATIENCE_S

LAYERS, EXPERTS, ROUTE = 3, 7, 3
ALL_KEYS = [ExpertKey(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]


class TwoPartLayout:
    """Each expert in two unaligned runs, one per file, in shuffled order: neighbours share pages."""

    num_layers, num_experts = LAYERS, EXPERTS
    sizes = (5000, 700)

    def __init__(self, folder, rng):
        self.keys = ALL_KEYS
        self.files = (Path(folder) / "codes", Path(folder) / "scales")
        self.truth, self.extents = {}, {}
        for file, nbytes in enumerate(self.sizes):
            content = bytearray(rng.randbytes(rng.randint(0, 3000)))
            for key in rng.sample(self.keys, len(self.keys)):
                self.extents[key, file] = Extent(self.files[file], len(content), nbytes)
                self.truth[key, file] = rng.randbytes(nbytes)
                content += self.truth[key, file]
            self.files[file].write_bytes(content)  # the last expert's page is short
        self.record_nbytes = max(s[-1].dest + s[-1].nbytes for s in map(self.spans, self.keys))

    def spans(self, key):
        return aligned_spans([(file, self.extents[key, file]) for file in (0, 1)])

    def pages(self, key):
        return {
            (self.files[s.file_idx].stat().st_ino, page)
            for s in self.spans(key)
            for page in range(s.offset, s.offset + s.nbytes, PAGE_NBYTES)
        }

    def check(self, key, record):
        for file, span in enumerate(self.spans(key)):
            at = span.dest + self.extents[key, file].offset - span.offset
            assert record[at : at + self.sizes[file]].numpy().tobytes() == self.truth[key, file]


routes = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=ROUTE, unique=True)
layers = st.integers(0, LAYERS - 1)
# how a caller that had enough leaves: it closes, raises, or just forgets the iterator
leaving = st.sampled_from(["close", "throw", "forget"])


class StreamerMachine(RuleBasedStateMachine):
    def make_drive(self, rng, delay_s):
        return Drive(rng, delay_s)

    @initialize(
        cache_rows=st.integers(ROUTE, LAYERS * EXPERTS + 1),
        sweep_rows=st.integers(1, 4),
        prefetch=st.integers(0, 4),
        config=st.builds(
            DriveConfig,
            st.sampled_from([DirectIo.auto, DirectIo.buffered]),
            st.integers(1, 4),
            st.integers(1, 8),
            piece_kib=st.just(4),
        ),
        delay_us=st.sampled_from([0, 50, 200]),
        seed=st.integers(0, 2**32),
        policy=st.sampled_from(list(CachePolicy)),
    )
    def start(self, cache_rows, sweep_rows, prefetch, config, delay_us, seed, policy):
        rng = random.Random(seed)
        self.folder = tempfile.TemporaryDirectory()
        self.layout = TwoPartLayout(self.folder.name, rng)
        self.drive = self.make_drive(rng, delay_us * 1e-6)
        reader = self.drive.open_reader(self.layout.files, config)
        self.streamer = ExpertStreamer(
            self.layout,
            reader,
            cache_rows,
            sweep_rows,
            prefetch,
            cache_rows - ROUTE,
            make_cache=cache_for(policy, LAYERS, LAYERS * ROUTE, LAYERS * EXPERTS),
        )
        self.given, self.given_before = [], []  # by `ahead`: since the last call, and before it
        self.cache_rows = cache_rows
        self.lookups = self.warmed = 0
        self.bad = set()  # keys whose reads fail now
        self.suspect = set()  # keys whose reads may have failed before the drive was mended
        self.forgotten = []

    def settled(self):
        book = self.streamer.cache
        return set(filterfalse(book.is_in_flight, book.keys()))

    def failed(self, error, keys):
        """Check that an error names an expert that was asked for and could not be read."""
        named = ExpertKey(*map(int, re.search(r"layer (\d+), expert (\d+)", str(error)).groups()))
        assert named in keys & (self.bad | self.suspect)
        self.suspect.discard(named)

    def leave(self, items, how):
        if how == "close":
            items.close()
        elif how == "throw":
            with pytest.raises(KeyboardInterrupt):
                items.throw(KeyboardInterrupt())
        else:
            self.forgotten.append(items)

    @rule(layer=layers, ids=routes, guesses=st.permutations(range(EXPERTS)))
    def fetch(self, layer, ids, guesses):
        streamer = self.streamer
        keys = {ExpertKey(layer, e) for e in ids}
        settled, here = self.settled(), set(streamer.cache.keys())
        before = streamer.counters.copy()
        seen, error = {}, None
        self.called()
        items = streamer.fetch(layer, ids, guesses)
        try:
            for expert, record in items:
                assert expert not in seen
                seen[expert] = record
                for e, kept in seen.items():  # valid until the iterator ends
                    self.layout.check(ExpertKey(layer, e), kept)
        except ReadError as caught:
            error = caught
            self.failed(error, keys)
        if error is None:
            assert seen.keys() == set(ids)
            assert not keys & self.bad - here
            assert keys <= set(streamer.cache.keys())
            self.suspect -= keys
        self.lookups += len(ids)
        counted = streamer.counters.since(before)
        assert counted.hits + counted.late + counted.misses == len(ids)
        assert counted.hits >= len(keys & settled)  # what was there was not evicted or read again
        assert counted.misses >= len(keys - here)
        self.pinned_are_among(keys)

    @rule(layer=layers, ids=st.permutations(range(EXPERTS)), count=st.integers(0, EXPERTS))
    def ahead(self, layer, ids, count):
        settled = self.settled()
        found = [(ExpertKey(layer, e), r) for e, r in self.streamer.ahead(layer, ids[:count])]
        assert {key for key, _ in found} <= settled
        self.given += found

    @rule(keys=st.permutations(ALL_KEYS), count=st.integers(0, 12), rows=st.integers(0, 25))
    def warm_up(self, keys, count, rows):
        """Keys that are there or on their way already are left alone; nobody is evicted."""
        cache = self.streamer.cache
        before, settled = set(cache.keys()), self.settled()
        found = self.streamer.warm_up(keys[:count], rows)
        here = set(cache.keys())
        assert settled <= here
        new = here - before
        # a read on its way may have failed: its key is gone then, and read again like any other
        again = (before & set(keys[:count])) - settled
        assert len(new) <= found <= len(new | again)
        assert found <= max(0, min(rows, self.cache_rows) - len(here - new - again))
        assert not here - before - set(keys[:count])
        self.warmed += found

    def called(self):
        """A record from `ahead` is valid until the call after the next."""
        self.given_before, self.given = self.given, []

    @invariant()
    def what_was_given_is_still_there(self):
        for key, record in [*self.given, *self.given_before]:
            self.layout.check(key, record)

    @rule(
        layer=layers,
        ids=routes,
        guesses=st.permutations(range(EXPERTS)),
        taken=st.integers(0, ROUTE),
        how=leaving,
    )
    def leave_a_fetch(self, layer, ids, guesses, taken, how):
        items = self.streamer.fetch(layer, ids, guesses)
        self.leave_after(items, layer, ids, taken, how)

    @rule(
        layer=layers,
        ids=st.permutations(range(EXPERTS)),
        taken=st.integers(0, EXPERTS),
        how=leaving,
    )
    def leave_a_sweep(self, layer, ids, taken, how):
        self.leave_after(self.streamer.sweep(layer, ids), layer, ids, taken, how)

    def leave_after(self, items, layer, ids, taken, how):
        seen = set()
        if taken:  # an iterator that never started has done nothing
            self.called()
        try:
            for _ in range(min(taken, len(ids))):
                expert, record = next(items)
                self.layout.check(ExpertKey(layer, expert), record)
                seen.add(expert)
        except ReadError as error:
            self.failed(error, {ExpertKey(layer, e) for e in ids})
            return
        assert len(seen) == min(taken, len(ids))
        assert seen <= set(ids)
        self.leave(items, how)

    @rule(
        layer=layers,
        ids=st.permutations(range(EXPERTS)),
        count=st.integers(0, EXPERTS),
        data=st.data(),
    )
    def sweep(self, layer, ids, count, data):
        hold = data.draw(st.integers(1, self.streamer.max_hold))
        ids = ids[:count]
        keys = {ExpertKey(layer, e) for e in ids}
        settled, here = self.settled(), set(self.streamer.cache.keys())
        judged = set(self.streamer._guesses)  # wrong ones become the first to go
        order = [key for key in self.streamer.cache.keys() if key in settled - judged]  # noqa: SIM118
        before = self.streamer.counters.copy()
        seen = []
        try:
            given = []
            self.called()
            for expert, record in self.streamer.sweep(layer, ids, hold):
                given.append((expert, record))
                for e, kept in given[-hold:]:
                    self.layout.check(ExpertKey(layer, e), kept)
                seen.append(expert)
        except ReadError as error:
            self.failed(error, keys)
        else:
            assert seen == list(ids)  # each once, in the order given
            assert not keys & self.bad - here
            self.suspect -= keys
            counted = self.streamer.counters.since(before)
            assert counted.sweep_hits + counted.sweep_misses == len(ids)
            assert counted.sweep_hits >= len(keys & settled)
        after = self.streamer.cache.keys()
        assert settled <= set(after)  # nobody is evicted
        assert [
            key for key in after if key in settled - judged
        ] == order  # nor any sooner than before
        self.pinned_are_among(set())

    @rule()
    def collect_forgotten(self):
        """The garbage collector closes old iterators whenever it likes."""
        self.forgotten.clear()

    @rule(key=st.builds(ExpertKey, layers, st.integers(0, EXPERTS - 1)))
    def damage(self, key):
        self.mend()
        self.drive.bad = {min(self.layout.pages(key))}
        self.bad = {k for k in self.layout.keys if self.layout.pages(k) & self.drive.bad}

    @precondition(lambda self: self.bad)
    @rule()
    def mend(self):
        # reads that are on their way may have failed already
        self.suspect = (self.suspect | self.bad) & set(self.streamer.cache.keys())
        self.drive.bad, self.bad = set(), set()

    def pinned_are_among(self, keys):
        given = {key for key, _ in [*self.given, *self.given_before]}
        assert self.streamer.cache._pins.keys() <= keys | given

    @invariant()
    def counters_add_up(self):
        c = self.streamer.counters
        assert c.guesses_used + c.guesses_wasted + c.guesses_cancelled <= c.guesses_issued
        assert c.read_nbytes <= self.layout.record_nbytes * (
            c.misses + c.sweep_misses + c.guesses_issued - c.guesses_cancelled + c.late
        )
        assert c.warmed <= self.warmed
        assert len(self.streamer.cache) <= self.cache_rows

    def teardown(self):
        if not hasattr(self, "streamer"):
            return
        self.mend()
        for _ in range(2):  # what `ahead` holds is let go
            list(self.streamer.fetch(0, []))
        for layer in range(LAYERS):  # usable to the last row, whatever happened before
            ids = range(min(EXPERTS, self.cache_rows))
            for _ in range(len(ids) + 1):  # one left-over error each, at most
                try:
                    seen = dict(self.streamer.fetch(layer, ids))
                    break
                except ReadError as error:
                    self.failed(error, {ExpertKey(layer, e) for e in ids})
            assert seen.keys() == set(ids)
        self.streamer.close()
        self.folder.cleanup()


TestStreamerMachine = StreamerMachine.TestCase
TestStreamerMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


class ChildStreamerMachine(StreamerMachine):
    """The same with a reader process."""

    def make_drive(self, rng, delay_s):
        folder = Path(self.folder.name) / "drive"
        folder.mkdir()
        return ChildDrive(folder, delay_s)


TestChildStreamerMachine = ChildStreamerMachine.TestCase
TestChildStreamerMachine.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, phases=[Phase.generate]
)


@pytest.fixture
def layout(tmp_path):
    return TwoPartLayout(tmp_path, random.Random(3))


@pytest.fixture(params=["threads", "process"])
def drive(request, tmp_path):
    """Read by threads, and by a process of its own."""
    if request.param == "threads":
        return Drive(random.Random(0))
    folder = tmp_path / "drive"
    folder.mkdir()
    return ChildDrive(folder)


def open_streamer(layout, drive, cache_rows, prefetch=2, sweep_rows=2, window=1, pieces=4):
    config = DriveConfig(window=window, pieces=pieces, piece_kib=4)
    reader = drive.open_reader(layout.files, config)
    return ExpertStreamer(layout, reader, cache_rows, sweep_rows, prefetch)


def counts(streamer):
    c = streamer.counters
    return (c.guesses_issued, c.guesses_used, c.guesses_wasted, c.guesses_cancelled)


def test_what_becomes_of_guesses(layout, drive):
    """Window 1: the first guess is stuck on the drive, the second waits behind it."""
    streamer = open_streamer(layout, drive, cache_rows=8)
    drive.gated = {min(layout.pages(ExpertKey(1, 0)))}
    # 1 and 2 share no page with 0, or they would be stuck, too
    free = [e for e in range(1, EXPERTS) if not layout.pages(ExpertKey(1, e)) & drive.gated]
    wrong, needed = free[:2]
    list(streamer.fetch(0, [0, 1], guesses=[0, wrong]))
    assert counts(streamer) == (2, 0, 0, 0)
    assert drive.is_waiting.wait(PATIENCE_S)
    read = streamer.counters.read_nbytes
    for expert, record in streamer.fetch(1, [needed]):
        layout.check(ExpertKey(1, expert), record)
    assert counts(streamer) == (2, 0, 1, 1)
    assert streamer.counters.read_nbytes == read  # one taken back, one needed
    assert streamer.cache.row_of(ExpertKey(1, wrong)) is None
    drive.gate.set()
    for expert, record in streamer.fetch(1, [0]):  # it was on its way, or is there by now
        layout.check(ExpertKey(1, expert), record)
    assert streamer.counters.misses == 3
    assert counts(streamer) == (2, 0, 1, 1)
    list(streamer.fetch(0, [0], guesses=[0, needed, 5, 6]))  # what is in RAM does not count
    assert counts(streamer) == (4, 0, 1, 1)
    list(streamer.fetch(1, [5]))
    assert counts(streamer)[1] == 1
    streamer.close()


@pytest.mark.parametrize(
    ("token_experts", "route", "wanted"),
    [(None, 4, 2), (2, 2, 2), (2, 3, 4), (2, 4, 4), (4, 2, 2), (2, 0, 2)],
)
def test_a_route_of_several_tokens_brings_guesses_for_each(
    layout, drive, token_experts, route, wanted
):
    reader = drive.open_reader(layout.files, DriveConfig())
    streamer = ExpertStreamer(layout, reader, 2 * EXPERTS, 2, 2, token_experts=token_experts)
    list(streamer.fetch(0, range(route), [6, 5, 4, 3, 2, 1]))
    guessed = list(filter(lambda key: key.layer == 1, streamer.cache.keys()))
    assert guessed == [ExpertKey(1, expert) for expert in (6, 5, 4, 3)][:wanted]
    assert streamer.counters.guesses_issued == wanted
    streamer.close()


def test_no_guesses_behind_the_last_layer(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=8)
    list(streamer.fetch(LAYERS - 1, [0], guesses=[0, 1]))
    assert counts(streamer) == (0, 0, 0, 0)
    streamer.close()


def test_a_wrong_guess_is_the_first_to_go(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=3, prefetch=1)
    list(streamer.fetch(0, [0, 1], guesses=[4]))
    list(streamer.fetch(0, [1]))  # judged: it goes before the older expert 0
    while streamer.cache.is_in_flight(ExpertKey(1, 4)):
        list(streamer.fetch(0, [1]))
    list(streamer.fetch(0, [2]))
    assert set(streamer.cache.keys()) == {ExpertKey(0, e) for e in (0, 1, 2)}
    streamer.close()


def test_what_was_used_in_front_is_a_right_guess_and_young(layout, drive):
    """A guess that was copied on as soon as it had come: its layer asks for the others only."""
    streamer = open_streamer(layout, drive, cache_rows=3, prefetch=1)
    list(streamer.fetch(0, [0], guesses=[4]))
    while streamer.cache.is_in_flight(ExpertKey(1, 4)):
        streamer._settle()
    streamer.used(0, [0])
    assert streamer.cache.keys() == [ExpertKey(1, 4), ExpertKey(0, 0)]
    streamer.used(1, [4, 6])  # 6 is not here any more
    assert streamer.cache.keys() == [ExpertKey(0, 0), ExpertKey(1, 4)]
    list(streamer.fetch(1, [5]))
    assert counts(streamer) == (1, 1, 0, 0)
    list(streamer.fetch(0, [1]))
    assert set(streamer.cache.keys()) == {ExpertKey(1, 4), ExpertKey(1, 5), ExpertKey(0, 1)}
    streamer.close()


def test_a_hit_makes_an_expert_young(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=3)
    for ids in ([0, 1, 2], [0], [3]):
        list(streamer.fetch(0, ids))
    assert set(streamer.cache.keys()) == {ExpertKey(0, e) for e in (0, 2, 3)}
    streamer.close()


def test_a_miss_does_not_evict_a_hit_of_its_own_layer(layout, drive):
    """The oldest row is in the route: the miss must take another one's place."""
    streamer = open_streamer(layout, drive, cache_rows=3)
    list(streamer.fetch(0, [0]))
    list(streamer.fetch(1, [0, 1]))
    for _, record in streamer.fetch(0, [5, 0]):
        assert record.is_cpu
    assert streamer.counters.hits == 1
    assert {ExpertKey(0, 0), ExpertKey(0, 5)} <= set(streamer.cache.keys())
    streamer.close()


def test_a_sweep_fills_a_cold_cache_and_no_more(layout, drive):
    """Full - 1: one row is free, the first expert of the prompt takes it, the others pass through."""
    streamer = open_streamer(layout, drive, cache_rows=3)
    list(streamer.fetch(0, [0, 1]))
    for expert, record in streamer.sweep(1, range(EXPERTS)):
        layout.check(ExpertKey(1, expert), record)
    assert set(streamer.cache.keys()) == {ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(1, 0)}
    read = streamer.counters.read_nbytes
    assert read == (2 + EXPERTS) * layout.record_nbytes  # each expert once
    streamer.close()


def test_a_row_of_an_abandoned_sweep_is_not_reused_while_it_is_written(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=3, window=2)
    list(streamer.fetch(0, [0, 1, 2]))  # the cache is full: sweeps go through the two staging rows
    late = ExpertKey(1, 4)
    stuck = {min(layout.pages(late))}
    free = [k for k in layout.keys if k.layer and not layout.pages(k) & stuck]
    first = next(k.expert for k in free if k.layer == 1)
    drive.gated = stuck
    items = streamer.sweep(1, [first, late.expert])
    assert next(items)[0] == first
    items.close()  # the second row is being written
    threading.Timer(0.02, drive.gate.set).start()
    for expert, record in streamer.sweep(2, [k.expert for k in free if k.layer == 2][:2]):
        assert drive.is_through.wait(PATIENCE_S)  # the old read has ended, whenever it may
        layout.check(ExpertKey(2, expert), record)
    streamer.close()


def warm(streamer, *experts, layer=2, rows=99):
    return streamer.warm_up([ExpertKey(layer, e) for e in experts], rows)


def settle(streamer, keys):
    """Let reads come back until these have landed."""
    deadline = time.monotonic() + 60
    while any(map(streamer.cache.is_in_flight, keys)):
        assert time.monotonic() < deadline
        list(streamer.fetch(0, []))


def test_a_warm_start_reads_the_hottest_and_leaves_room(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=6)
    assert warm(streamer, 0, 1, 2, 3, 4, rows=4) == 4  # 0, the coldest, is left out
    hot = [ExpertKey(2, e) for e in (1, 2, 3, 4)]
    settle(streamer, hot)
    assert streamer.cache.keys() == hot
    assert (streamer.counters.warmed, streamer.counters.read_nbytes) == (4, 0)
    for expert, record in streamer.fetch(2, [3, 1]):
        layout.check(ExpertKey(2, expert), record)
    assert streamer.counters.hits == 2
    assert warm(streamer, 1, 2, 3, 4, rows=4) == 0
    streamer.close()


def test_required_reads_go_first_and_take_the_coldest_rows(layout, drive):
    """The warm start's first read is stuck on the drive, the others wait behind it; nobody waits for them."""
    streamer = open_streamer(layout, drive, cache_rows=4, window=2)
    stuck = ExpertKey(2, 6)
    drive.gated = {min(layout.pages(stuck))}
    free = [e for e in range(EXPERTS) if not layout.pages(ExpertKey(0, e)) & drive.gated]
    assert warm(streamer, 0, 1, 2, 6) == 4
    for expert, record in streamer.fetch(0, free[:2]):
        layout.check(ExpertKey(0, expert), record)
    left = [ExpertKey(2, 2), stuck, *(ExpertKey(0, e) for e in free[:2])]
    assert streamer.cache.keys() == left, "the coldest two gave up their rows"
    assert streamer.counters.misses == 2
    drive.gate.set()
    for expert, record in streamer.fetch(2, [2, 6]):  # now they are required
        layout.check(ExpertKey(2, expert), record)
    assert streamer.counters.late == 2 - streamer.counters.hits
    streamer.close()


def test_a_row_that_a_warm_start_is_writing_is_not_given_away(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=3, window=2)
    stuck = ExpertKey(2, 6)
    drive.gated = {min(layout.pages(stuck))}
    free = [e for e in range(EXPERTS) if not layout.pages(ExpertKey(0, e)) & drive.gated]
    assert warm(streamer, 0, 1, 6) == 3
    assert drive.is_waiting.wait(PATIENCE_S)
    threading.Timer(0.02, drive.gate.set).start()
    given = list(streamer.fetch(0, free[:3]))  # three rows: the last one when the read has ended
    assert drive.is_through.wait(PATIENCE_S)
    for expert, record in given:
        layout.check(ExpertKey(0, expert), record)
    assert streamer.cache.row_of(stuck) is None
    streamer.close()


def test_a_prompt_and_a_guess_take_what_a_warm_start_has_not_read_yet(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=5, prefetch=1)
    drive.gated = {min(layout.pages(ExpertKey(2, 6)))}
    free = [e for e in range(EXPERTS - 1) if not layout.pages(ExpertKey(2, e)) & drive.gated]
    first, second = free[:2]
    assert warm(streamer, first, second, 6) == 3
    list(streamer.fetch(1, [], guesses=[second]))
    assert streamer.counters.guesses_issued == 1
    for expert, record in streamer.sweep(2, [first, second]):
        layout.check(ExpertKey(2, expert), record)
    c = streamer.counters
    assert c.sweep_hits + c.sweep_misses == 2
    assert c.sweep_misses >= 1, "the guess may have been on its way, the other had to be read"
    drive.gate.set()
    streamer.forget()
    assert streamer.cache.keys() == []
    streamer.close()


def test_a_warm_start_that_cannot_read_is_no_error(layout, drive):
    drive.bad = {min(layout.pages(ExpertKey(2, 3)))}
    streamer = open_streamer(layout, drive, cache_rows=4)
    warm(streamer, 3)
    settle(streamer, [ExpertKey(2, 3)])
    assert streamer.cache.row_of(ExpertKey(2, 3)) is None
    with pytest.raises(ReadError, match="layer 2, expert 3"):
        list(streamer.fetch(2, [3]))
    streamer.close()


def test_an_error_is_raised_until_it_is_gone(layout, drive):
    streamer = open_streamer(layout, drive, cache_rows=3)
    drive.bad = {min(layout.pages(ExpertKey(1, 4)))}
    for attempt in (streamer.fetch, streamer.sweep, streamer.fetch):
        with pytest.raises(ReadError, match="layer 1, expert 4"):
            list(attempt(1, [4]))
    drive.bad = set()
    for attempt in (streamer.fetch, streamer.sweep):
        ((expert, record),) = attempt(1, [4])
        layout.check(ExpertKey(1, expert), record)
    streamer.close()


def test_resident_experts_are_the_same_bytes(layout):
    drive = Drive(random.Random(0))
    resident = ResidentExperts(layout, DirectReader(layout.files, DriveConfig(), drive.preadv))
    for key in layout.keys:
        for source in (resident.fetch(key.layer, [key.expert]), resident.sweep(*key[:1], key[1:])):
            ((expert, record),) = source
            assert expert == key.expert
            layout.check(key, record)
    assert resident.counters.hits == len(layout.keys)
    drive.bad = {min(layout.pages(ExpertKey(2, 6)))}
    with pytest.raises(ReadError):
        ResidentExperts(layout, DirectReader(layout.files, DriveConfig(), drive.preadv))
