"""The queue over several drives, driven at random: every record comes once and whole, whatever fails or stalls."""

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from runtime.experts.balance import RateMeter, SpreadQueue
from runtime.experts.layout import ExpertKey, Span
from runtime.units import GIB, PAGE_NBYTES

RECORD = 8 * PAGE_NBYTES


def copies_of(key, drives):
    """A copy on each of `drives`, at a place that tells the expert."""
    return [[Span(drive, key.expert * RECORD, RECORD, RECORD, 0)] for drive in drives]


class World:
    """Drives that read, fail and stall as a random generator says; checks what the queue asks of them."""

    def __init__(self, seed, num_drives, failing, stalling):
        self.random = random.Random(seed)
        self.queue = SpreadQueue(range(num_drives), num_drives, 2, 4, PAGE_NBYTES, [None] * num_drives)  # fmt: skip
        self.failing, self.stalling = failing, stalling
        self.now = 0.0
        self.reading = []  # (drive, part, piece)
        self.stuck = []
        self.homes, self.filled, self.done, self.restarts = {}, {}, {}, 0
        self.lost = {}  # job -> pieces that no copy could give

    def submit(self, key, drives, kind):
        job = self.queue.job(
            key, copies_of(key, drives), memoryview(b""), kind == "required", None, self.now, kind == "idle"
        )  # fmt: skip
        self.homes[job], self.filled[job] = set(drives), set()
        return job

    def take(self, drive):
        taken = self.queue.take(drive, self.now)
        if taken is None:
            return
        part, piece = taken
        job = part.record
        assert piece.file_idx == drive, "a drive reads its own file"
        assert drive in self.homes[job], "and only what it holds"
        assert piece.offset // RECORD == job.key.expert
        mine = [(other, piece) for d, other, piece in self.reading + self.stuck if d == drive]
        assert len(mine) < 64
        if job.is_idle:
            assert not mine, "an idle job goes a piece at a time, while its drive has nothing else"
        self.reading.append((drive, part, piece))

    def back(self):
        """Let a random read end."""
        i = self.random.randrange(len(self.reading))
        drive, part, piece = self.reading.pop(i)
        if drive in self.stalling and self.random.random() < 0.5:
            self.stuck.append((drive, part, piece))
            return
        self.end(drive, part, piece)

    def end(self, drive, part, piece):
        job = part.record
        if drive in self.failing and self.random.random() < 0.3:
            if self.queue.fail(drive, part, piece, self.now):
                return
            if part.lost is None:
                job.error = OSError(drive)
        elif part.lost is None and job.orphans is None:
            pages = range(piece.dest, piece.dest + piece.nbytes, PAGE_NBYTES)
            assert not self.filled[job].intersection(pages), "no page is read twice"
            self.filled[job].update(pages)
        self.deliver(self.queue.finish(drive, part, piece, self.now))

    def deliver(self, job):
        if job is None:
            return
        if job.orphans is not None:
            outstanding = [*self.reading, *self.stuck]
            mine = [part for _, part, _ in outstanding if part.record is job]
            assert all(part.lost is not None for part in mine), "nothing good is on its way"
            assert job.orphans.count == sum(part.lost is job.orphans for part in mine) > 0
            self.restarts += 1
            self.filled[job] = set()
            self.queue.restart(job, memoryview(b""), self.now)
            return
        assert job not in self.done, "delivered once"
        assert job.is_done
        self.done[job] = job.error

    def give_up_the_silent(self):
        for drive in range(self.queue.num_drives):
            if self.queue.silent(drive, self.now) > 5:
                for job in self.queue.give_up(drive, self.now):
                    self.deliver(job)


# a failure is shown as it was found: shrinking it would take minutes
@settings(max_examples=60, phases=[Phase.generate])
@given(
    seed=st.integers(0, 2**32),
    num_drives=st.integers(2, 4),
    failing=st.sets(st.integers(0, 3)),
    stalling=st.sets(st.integers(0, 3), max_size=2),
    is_mirror=st.booleans(),
)
def test_every_record_comes_once_and_whole(seed, num_drives, failing, stalling, is_mirror):
    stalling = {i for i in stalling if i < num_drives - 1} if is_mirror else set()
    failing = failing - {num_drives - 1} if stalling else failing  # something is left that reads
    world = World(seed, num_drives, failing, stalling)
    pick, jobs, cancelled = world.random, [], set()
    for number in range(40):
        count = pick.randint(2, num_drives) if is_mirror else 1
        homes = pick.sample(range(num_drives), count)
        if stalling and num_drives - 1 not in homes:
            homes.append(num_drives - 1)
        job = world.submit(
            ExpertKey(0, number), homes, pick.choice(["required", "required", "guess", "idle"])
        )
        jobs.append(job)
        for _ in range(pick.randrange(12)):
            world.now += pick.random() / 100
            world.take(pick.randrange(num_drives))
            if world.reading and pick.random() < 0.6:
                world.back()
        waiting = [job for job in jobs if job not in world.done and job not in cancelled]
        if waiting and pick.random() < 0.3:
            world.queue.promote(pick.choice(waiting))
        if waiting and pick.random() < 0.2:
            chosen = pick.choice(waiting)
            if world.queue.cancel(chosen):
                cancelled.add(chosen)
                assert not world.filled[chosen]
    for _ in range(300):
        if len(world.done) + len(cancelled) == len(jobs):
            break
        world.now += 1
        for drive in range(num_drives):
            world.take(drive)
        while world.reading and pick.random() < 0.8:
            world.back()
        if not world.reading:
            world.give_up_the_silent()
    assert world.done.keys() | cancelled == set(jobs), "nothing waits for ever"
    for job, error in world.done.items():
        if error is None:
            assert world.filled[job] == set(range(0, RECORD, PAGE_NBYTES))
        else:
            assert world.homes[job] <= failing | stalling, (
                "an error only where every copy may have failed"
            )
    assert not world.restarts or stalling
    for drive, part, piece in world.stuck:  # the stalled drive wakes up at last
        world.end(drive, part, piece)
    assert all(drive.nbytes == [0, 0, 0] for drive in world.queue._drives)
    assert not world.queue._records


def test_two_drives_that_stall_one_after_the_other():
    """The record is delivered when the third has given its share, and its memory is lent to both others."""
    queue, key = SpreadQueue(range(3), 3, 2, 1, PAGE_NBYTES, [None] * 3), ExpertKey(0, 0)
    job = queue.job(key, copies_of(key, range(3)), memoryview(b""), True, None, 0.0)
    taken = [queue.take(drive, 0.0) for drive in range(3)]
    assert queue.silent(0, 9.0) == 9.0
    assert queue.give_up(0, 9.0) == []
    assert queue.give_up(1, 9.0) == []
    assert queue.silent(2, 9.0) == 0.0, "nothing else has what it keeps"
    assert queue.finish(2, *taken[2], 9.0) is job
    first = job.orphans
    assert first.count == 2
    queue.restart(job, memoryview(b"other"), 9.0)
    for _ in range(3):
        part, piece = queue.take(2, 9.0)
        done = queue.finish(2, part, piece, 9.1)
    assert done is job
    assert job.is_done
    for drive in (1, 0):
        assert first.count == drive + 1
        assert queue.finish(drive, *taken[drive], 99.0) is None
    assert first.count == 0


def test_pieces_go_where_they_end_first():
    """Two to one in rate: two thirds of the bytes, whoever is asked first."""
    queue = SpreadQueue([0, 1], 2, 64, 8, PAGE_NBYTES, [1.0, 2.0])
    for number in range(9):
        key = ExpertKey(0, number)
        queue.job(key, copies_of(key, [0, 1]), memoryview(b""), True, None, 0.0)
    slow, fast = (queue._drives[i].nbytes[0] for i in range(2))
    assert slow + fast == 9 * RECORD
    assert abs(fast - 2 * slow) <= 2 * PAGE_NBYTES


def test_a_drive_that_runs_dry_takes_over_what_waits_elsewhere():
    """The fast drive was believed to be slow: it ends up with all that the other has not begun."""
    queue = SpreadQueue([0, 1], 2, 1, 1, PAGE_NBYTES, [100.0, 1.0])
    keys = [ExpertKey(0, number) for number in range(4)]
    for key in keys:
        queue.job(key, copies_of(key, [0, 1]), memoryview(b""), True, None, 0.0)
    assert queue._drives[1].nbytes[0] == 0, "believed to be the slower one"
    first = queue.take(0, 0.0)
    assert queue.take(1, 0.0) is None, "it would not end first as things are"
    assert first is not None
    # half a second later the first drive has still given nothing
    moved = [queue.take(1, 0.5 + i / 1e4) for i in range(1)]
    assert moved[0] is not None
    assert moved[0][0].record.key == keys[3], "the last one"


def test_a_meter_learns_forgets_and_hopes():
    meter, now = RateMeter(1.0), 0.0
    assert meter.nbytes_s(now) == pytest.approx(GIB)

    def read(seconds, gib_s):
        nonlocal now
        nbytes = round(gib_s * GIB / 100)
        for _ in range(round(seconds * 100)):
            meter.begin(now)
            now += 0.01
            meter.end(now, nbytes)

    read(2, 4.0)
    assert meter.nbytes_s(now) == pytest.approx(4 * GIB, rel=0.02)
    now += 100
    assert meter.nbytes_s(now) == pytest.approx(4 * GIB, rel=0.02), "idleness is not slowness"
    read(2, 0.25)
    assert meter.nbytes_s(now) == pytest.approx(GIB / 4, rel=0.1)
    meter.begin(now)
    assert meter.nbytes_s(now + 3) < GIB / 16, "silence is"
    meter.end(now + 0.01, round(GIB / 400))
    assert meter.nbytes_s(now + 60) == pytest.approx(4 * GIB, rel=0.05), "left alone it gets a chance"  # fmt: skip
