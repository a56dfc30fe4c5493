"""The order of reads, with completions in any order; and the cutting of spans."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from runtime.checkpoint import Extent
from runtime.experts.layout import Span, aligned_spans
from runtime.experts.schedule import ReadJob, ReadQueue, cut_spans
from runtime.units import PAGE_NBYTES, align_up

ONE_PAGE = Span(0, 0, PAGE_NBYTES, PAGE_NBYTES, 0)


class QueueMachine(RuleBasedStateMachine):
    """A drive that ends pieces in any order; every hand-out is judged by the rules, not by the code."""

    @initialize(window=st.integers(1, 4))
    def start(self, window):
        self.queue, self.window, self.count = ReadQueue(window), window, 0
        # in the order in which they may start
        self.waiting_required, self.waiting_guesses, self.waiting_idle = [], [], []
        self.active = []  # in the order in which they started
        self.active_idle = None
        self.issued, self.flying = {}, []
        self.done = []

    @rule(num_pieces=st.integers(1, 4), kind=st.sampled_from(["required", "guess", "idle"]))
    def push(self, num_pieces, kind):
        self.count += 1
        pieces = [Span(0, PAGE_NBYTES * i, PAGE_NBYTES, PAGE_NBYTES, 0) for i in range(num_pieces)]
        is_idle = kind == "idle"
        job = ReadJob(self.count, pieces, memoryview(b""), kind == "required", is_idle=is_idle)
        self.issued[job] = 0
        self.queue.push(job)
        waiting = (self.waiting_required, self.waiting_guesses, self.waiting_idle)
        waiting[["required", "guess", "idle"].index(kind)].append(job)

    def is_partial(self, job):
        return self.issued[job] < len(job.pieces)

    @rule()
    def take(self):
        required = [job for job in self.active if job.is_required]
        partial = [job for job in required if self.is_partial(job)]
        partial_guesses = [
            job for job in self.active if not job.is_required and self.is_partial(job)
        ]
        ready = self.queue.num_ready
        taken = self.queue.take()
        assert (taken is None) == (ready == 0)
        assert self.queue.num_ready == max(0, ready - 1)  # exactly as many threads are woken
        if taken is None:  # nothing may start: say why
            assert not partial
            if self.waiting_required:
                assert len(required) >= self.window
            else:
                assert not partial_guesses
                assert not self.waiting_guesses or len(self.active) >= self.window
                idle = self.active_idle
                if not self.active and not self.waiting_guesses and idle is None:
                    assert not self.waiting_idle
                elif not self.active and not self.waiting_guesses:
                    assert not self.is_partial(idle) or idle in self.flying
            return
        job, piece = taken
        assert piece is job.pieces[self.issued[job]]  # in order, each once
        if job.is_idle:
            assert not self.active  # nothing else is in work or waits
            assert not self.waiting_required
            assert not self.waiting_guesses
            assert job not in self.flying  # a piece at a time
            if self.active_idle is None:
                assert job is self.waiting_idle.pop(0)
                self.active_idle = job
            assert job is self.active_idle
        elif job.is_required and job in self.active:
            assert job is partial[0]  # one expert after the other
        elif job.is_required:
            assert not partial
            assert job is self.waiting_required.pop(0)  # router order
            assert len(required) < self.window
        else:
            assert not partial  # only in the gap
            assert not self.waiting_required
            if job in self.active:
                assert job is partial_guesses[0]
            else:
                assert not partial_guesses
                assert job is self.waiting_guesses.pop(0)
                assert len(self.active) < self.window
        if job not in self.active and not job.is_idle:
            self.active.append(job)
        self.issued[job] += 1
        assert job.is_started
        assert job.is_issued == (not self.is_partial(job))
        self.flying.append(job)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish(self, data):
        job = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        is_last = not self.is_partial(job) and job not in self.flying
        assert self.queue.finish(job) == is_last
        assert job.is_done == is_last
        if is_last:
            self.end(job)

    def end(self, job):
        if job is self.active_idle:
            self.active_idle = None
        else:
            self.active.remove(job)
        self.done.append(job)

    def any_job(self, data):
        return data.draw(st.sampled_from(self.all_jobs()))

    def all_jobs(self):
        waiting = [*self.waiting_required, *self.waiting_guesses, *self.waiting_idle]
        return waiting + self.active + [job for job in [self.active_idle] if job is not None]

    @precondition(lambda self: self.all_jobs())
    @rule(data=st.data())
    def promote(self, data):
        job = self.any_job(data)
        self.queue.promote(job)
        assert job.is_required
        for waiting in (self.waiting_guesses, self.waiting_idle):
            if job in waiting:
                waiting.remove(job)
                self.waiting_required.append(job)
        if job is self.active_idle:
            self.active_idle = None
            self.active.append(job)

    @precondition(lambda self: self.all_jobs())
    @rule(data=st.data())
    def cancel(self, data):
        job = self.any_job(data)
        has_begun = job in self.active or job is self.active_idle
        assert self.queue.cancel(job) == (not has_begun)
        for waiting in (self.waiting_required, self.waiting_guesses, self.waiting_idle):
            if job in waiting:
                waiting.remove(job)
                del self.issued[job]

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def promote_or_cancel_too_late(self, data):
        job = data.draw(st.sampled_from(self.done))
        self.queue.promote(job)
        assert not self.queue.cancel(job)

    def teardown(self):
        if not hasattr(self, "queue"):
            return
        for _ in range(10_000):  # whatever happened before: everything ends
            self.take()
            if self.flying:
                job = self.flying.pop()
                if self.queue.finish(job):
                    self.end(job)
            elif not self.all_jobs():
                break
        assert {job: len(job.pieces) for job in self.done} == self.issued
        assert self.queue.take() is None


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_window_of_nothing():
    with pytest.raises(ValueError, match="window"):
        ReadQueue(0)


def hand_outs(queue, count):
    return [taken and taken[0].key for taken in (queue.take() for _ in range(count))]


def make_job(key, num_pieces, is_required):
    return ReadJob(key, [ONE_PAGE] * num_pieces, memoryview(b""), is_required)


def test_pieces_of_a_guess_wait_behind_a_full_window():
    """A required expert that may not start yet still holds back the rest of a guess."""
    queue = ReadQueue(1)
    guess, first, second = (make_job(k, 2, k != "guess") for k in ("guess", "first", "second"))
    queue.push(guess)
    assert hand_outs(queue, 1) == ["guess"]
    queue.push(first)
    queue.push(second)
    assert hand_outs(queue, 3) == ["first", "first", None]
    queue.finish(first)
    assert queue.finish(first)
    assert hand_outs(queue, 4) == ["second", "second", "guess", None]


def test_a_promoted_guess_goes_on_first_and_counts():
    """It started first, so its pieces come first; the window is full of it."""
    queue = ReadQueue(2)
    guess, first, second = (make_job(k, 3, k != "guess") for k in ("guess", "first", "second"))
    queue.push(guess)
    assert hand_outs(queue, 1) == ["guess"]
    queue.push(first)
    queue.push(second)
    assert hand_outs(queue, 1) == ["first"]
    queue.promote(guess)
    assert hand_outs(queue, 5) == ["guess", "guess", "first", "first", None]
    for _ in range(3):
        queue.finish(guess)
    assert hand_outs(queue, 4) == ["second"] * 3 + [None]


def test_an_idle_job_goes_a_piece_at_a_time_and_alone():
    queue = ReadQueue(2)
    idle = [ReadJob(f"idle{i}", [ONE_PAGE] * 2, memoryview(b""), False, None, True) for i in (0, 1)]
    for job in idle:
        queue.push(job)
    guess, needed = (make_job(k, 1, k == "needed") for k in ("guess", "needed"))
    assert hand_outs(queue, 2) == ["idle0", None]
    queue.push(guess)
    queue.push(needed)
    queue.finish(idle[0])
    assert hand_outs(queue, 3) == ["needed", "guess", None]
    queue.finish(needed)
    assert hand_outs(queue, 1) == [None]
    queue.finish(guess)
    assert hand_outs(queue, 2) == ["idle0", None]
    assert queue.finish(idle[0])
    queue.promote(idle[1])
    assert hand_outs(queue, 3) == ["idle1", "idle1", None]


def test_drain_returns_what_was_never_started():
    queue = ReadQueue(1)
    jobs = [make_job(i, 1, is_required=i < 2) for i in range(3)]
    for job in jobs:
        queue.push(job)
    assert queue.take() == (jobs[0], ONE_PAGE)
    assert queue.drain() == jobs[1:]
    assert queue.take() is None


extents = st.tuples(
    st.integers(0, 3), st.integers(0, 5 * PAGE_NBYTES), st.integers(1, 9 * PAGE_NBYTES)
)
least = st.sampled_from([1, PAGE_NBYTES, PAGE_NBYTES, 10_000, 2**20])  # of a piece


@given(st.lists(extents, min_size=1, max_size=4), st.integers(1, 9), least)
@settings(max_examples=300, deadline=None)
def test_pieces_are_the_spans_cut_at_pages(raw, num_pieces, least):
    spans = aligned_spans([(file, Extent(Path(), at, nbytes)) for file, at, nbytes in raw])
    pieces = cut_spans(spans, num_pieces, least)
    pages = sum(span.nbytes for span in spans) // PAGE_NBYTES
    assert all(
        n % PAGE_NBYTES == 0 for p in pieces for n in (p.offset, p.nbytes, p.dest) if p.nbytes
    )
    # every page of every span is in one piece, at its place in the file and in the record
    assert [
        (p.file_idx, p.offset + at, p.dest + at)
        for p in pieces
        for at in range(0, p.nbytes, PAGE_NBYTES)
    ] == [
        (s.file_idx, s.offset + at, s.dest + at)
        for s in spans
        for at in range(0, s.nbytes, PAGE_NBYTES)
    ]
    # needed bytes, too: none lost where a file ends early, none asked for beyond
    assert [(p.file_idx, p.offset + p.need_nbytes) for p in pieces] == [
        (p.file_idx, min(p.offset + p.nbytes, end))
        for s in spans
        for end in [s.offset + s.need_nbytes]
        for p in pieces
        if p.file_idx == s.file_idx and s.dest <= p.dest < s.dest + s.nbytes
    ]
    largest = max(-(-pages // num_pieces) * PAGE_NBYTES, align_up(least))
    assert max(p.nbytes for p in pieces) <= largest
    assert max(p.nbytes for p in pieces) == min(largest, max(s.nbytes for s in spans))
    assert len(pieces) < num_pieces + len(spans)


@given(st.lists(extents, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_aligned_spans_hold_their_extents(raw):
    spans = aligned_spans([(file, Extent(Path(), at, nbytes)) for file, at, nbytes in raw])
    end = 0
    for (file, at, nbytes), span in zip(raw, spans, strict=True):
        assert span.file_idx == file
        assert span.offset % PAGE_NBYTES == span.nbytes % PAGE_NBYTES == 0
        assert at - PAGE_NBYTES < span.offset <= at  # no page more than needed
        assert at + nbytes <= span.offset + span.nbytes < at + nbytes + PAGE_NBYTES
        assert span.offset + span.need_nbytes == at + nbytes
        assert span.dest == end  # one after the other in the record
        end += span.nbytes
