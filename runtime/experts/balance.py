"""Which drive reads which piece of a record that lies on several. Pure logic: no thread, no file; the time is told.

The rules:
- each drive has a queue of its own, with the rules of `schedule.ReadQueue`;
- where a record has copies, each of its pieces goes to the drive that would end it first: what waits there and is on
  its way, over the rate at which that drive has given bytes lately;
- a drive that runs dry takes over the last piece that waits elsewhere, if it would end it first; idle jobs come after;
- a drive that fails or stalls gets nothing more that another one has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from runtime.experts.layout import Span
from runtime.experts.schedule import Orphans, ReadJob, ReadQueue, cut_spans
from runtime.units import GIB

FADE_S = 0.25  # of a drive's work, in which half of what is known of its rate is forgotten
RECOVER_S = 2.0  # without a read in which a drive that has become slow is believed to be twice as fast again
FIRST_NBYTES = 2**16  # that the first guess of a rate counts as
FIRST_GIB_S = 1.0  # guess of a rate of which nothing is known


class RateMeter:
    """How fast a drive gives bytes while any are asked of it: of bytes and of seconds a sum that fades."""

    def __init__(self, gib_s: float | None = None) -> None:
        """gib_s: what is believed at first; None: nothing is known."""
        self._nbytes = float(FIRST_NBYTES)
        self._seconds = FIRST_NBYTES / ((gib_s or FIRST_GIB_S) * GIB)
        self._best = 0.0  # that was measured
        self.in_flight = 0
        self.since = 0.0  # when it gave something last, or began to be busy

    def begin(self, now: float) -> None:
        """Note that a read begins."""
        if not self.in_flight:
            self.since = now
        self.in_flight += 1

    def end(self, now: float, nbytes: int) -> None:
        """Note that a read has ended; 0 bytes: without giving anything."""
        self.in_flight -= 1
        took = max(0.0, now - self.since)
        self.since = now
        if nbytes:
            kept = 0.5 ** (took / FADE_S)
            self._nbytes = kept * self._nbytes + nbytes
            self._seconds = kept * self._seconds + took
            self._best = max(self._nbytes / self._seconds, self._best)

    def nbytes_s(self, now: float) -> float:
        """Return what to expect: less while it is silent; more when it was left alone, else it would not be asked."""
        waited = max(0.0, now - self.since)
        if self.in_flight:
            return self._nbytes / (self._seconds + waited)
        known = self._nbytes / self._seconds
        return max(known, min(self._best, known * math.exp2(min(64.0, waited / RECOVER_S))))


class Part(ReadJob):
    """What one drive reads of a record."""

    __slots__ = ("lost", "record")

    def __init__(self, record: ReadJob, pieces: Sequence[Span]) -> None:
        super().__init__(
            record.key,
            list(pieces),
            record.buffer,
            record.is_required,
            is_idle=record.is_idle,
        )
        self.record = record
        self.lost: Orphans | None = None  # its record has been given up while this was on its way


def _rank(job: ReadJob) -> int:
    """Return which kind of a drive's bytes a job's are: 0 those of required jobs, 1 of guesses, 2 of idle jobs."""
    return 0 if job.is_required else 2 if job.is_idle else 1


class _Drive:
    """A drive's queue, and what is on its way from it."""

    def __init__(self, window: int, gib_s: float | None) -> None:
        self.queue = ReadQueue(window)
        self.meter = RateMeter(gib_s)
        self.is_out = False  # gets nothing that others have
        self.is_stalled = False  # keeps what it was asked for
        self.nbytes = [0, 0, 0]  # asked for and not back: required, guessed, idle
        self.reading: list[tuple[Part, Span]] = []


class _Record:
    """What is known of a job that is not done."""

    def __init__(self, ways: dict[int, tuple[Span, ...]]) -> None:
        self.ways = ways  # place of a piece in the record -> the reads that would fill it
        self.parts: list[tuple[int, Part]] = []
        self.tried: dict[int, set[int]] = {}  # place of a piece -> drives that could not give it
        self.num_reading = 0  # pieces on their way, those given up not counted


class SpreadQueue:
    """The reads of several drives. The caller serialises access. Drives are numbers from 0; seconds are any clock's."""

    def __init__(
        self,
        drive_of: Sequence[int],
        num_drives: int,
        window: int,
        pieces: int,
        min_nbytes: int,
        gib_s: Sequence[float | None],
    ) -> None:
        """drive_of: the drive of each file.  window, pieces, min_nbytes: as of one drive.  gib_s: what is known."""
        self._drive_of = drive_of
        self._pieces, self._min_nbytes = pieces, min_nbytes
        self._drives = [_Drive(window, gib_s[i]) for i in range(num_drives)]
        self._records: dict[ReadJob, _Record] = {}
        self._has_copies = False

    # ---- what the streamer asks -----------------------------------------------------------------------------------

    def job(
        self,
        key: Hashable,
        copies: Sequence[Sequence[Span]],
        buffer: memoryview,
        is_required: bool,
        on_done: Callable[[ReadJob], None] | None,
        now: float,
        is_idle: bool = False,
    ) -> ReadJob:
        """Queue a record.  copies: the ways to read it whole, each as reads that fill the same bytes.

        is_idle: read only while its drives have nothing else to read.
        """
        drives = {self._drive_of[span.file_idx] for copy in copies for span in copy}
        ways = self._cut(copies, self._pieces * len(drives))
        self._has_copies = self._has_copies or len(copies) > 1
        pieces = [spans[0] for spans in ways.values()]
        job = ReadJob(key, pieces, buffer, is_required, on_done, is_idle)
        self._push(job, _Record(ways), now)
        return job

    def _cut(self, copies: Sequence[Sequence[Span]], pieces: int) -> dict[int, tuple[Span, ...]]:
        cuts = [cut_spans(copy, pieces, self._min_nbytes) for copy in copies]
        return {spans[0].dest: spans for spans in zip(*cuts, strict=True)}

    def restart(self, job: ReadJob, buffer: memoryview, now: float) -> None:
        """Read a record that was given up once more, into other memory."""
        job.buffer, job.orphans, job.error = buffer, None, None
        job.next_piece, job.num_unfinished = 0, len(job.pieces)
        # each piece has the ways it had; those on drives that are out come last
        self._push(job, _Record(self._records.pop(job).ways), now)

    def promote(self, job: ReadJob) -> None:
        """Make a guess or an idle job required: it was right."""
        if job.is_required or job.is_done:
            return
        before = _rank(job)
        job.is_required, job.is_idle = True, False
        record = self._records[job]
        for drive, part in record.parts:
            if not part.is_done:
                left = self._left_nbytes(drive, part)
                self._drives[drive].nbytes[before] -= left
                self._drives[drive].nbytes[0] += left
                self._drives[drive].queue.promote(part)

    def cancel(self, job: ReadJob) -> bool:
        """Take back a record of which no piece was handed out; False when it is too late."""
        if job.is_started or job.orphans is not None or job not in self._records:
            return False
        self._withdraw_all(job)
        del self._records[job]
        return True

    def drain(self) -> None:
        """Forget every piece that was not handed out."""
        for job in list(self._records):
            self._withdraw_all(job)

    # ---- what the drives' threads ask -----------------------------------------------------------------------------

    def take(self, drive: int, now: float) -> tuple[Part, Span] | None:
        """Hand out the next piece that a drive shall read, or None while nothing may start."""
        state = self._drives[drive]
        taken = None if state.queue.has_idle_piece else state.queue.take()
        if taken is None:
            self._take_over(drive, now)
            taken = state.queue.take()
        if taken is None:
            return None
        part, piece = taken
        assert isinstance(part, Part)
        state.meter.begin(now)
        state.reading.append((part, piece))
        part.record.next_piece += 1
        self._records[part.record].num_reading += 1
        return part, piece

    def finish(self, drive: int, part: Part, piece: Span, now: float) -> ReadJob | None:
        """Note that a piece is back, right or with an error in its record; return a job that is to be delivered."""
        if not self._end(drive, part, piece, now, piece.nbytes if part.record.error is None else 0):
            return None
        job = part.record
        job.num_unfinished -= 1
        if job.orphans is not None:
            return job if self._records[job].num_reading == 0 else None
        if job.num_unfinished:
            return None
        job.is_done = True
        del self._records[job]
        return job

    def fail(self, drive: int, part: Part, piece: Span, now: float) -> bool:
        """Have another copy read a piece that a drive could not give; False when there is none left: then `finish`.

        Afterwards the drive gets nothing more that others have (`is_out`).
        """
        record = self._records.get(part.record)
        if part.lost is not None or record is None or part.record.orphans is not None:
            return False
        record.tried.setdefault(piece.dest, set()).add(drive)
        if not self._untried(record, piece.dest):
            return False
        self._end(drive, part, piece, now, 0)
        part.record.next_piece -= 1
        self.take_out(drive, now)
        self._push_pieces(part.record, record, [piece.dest], now)
        return True

    def take_out(self, drive: int, now: float) -> None:
        """Give a drive nothing more that another one has, and what waits there to those."""
        state = self._drives[drive]
        state.is_out = True
        for part in [*state.queue.unissued(), *state.queue.unissued_idle()]:
            assert isinstance(part, Part)
            record = self._records[part.record]
            back = self._withdraw(drive, part)
            self._push_pieces(part.record, record, [piece.dest for piece in back], now)

    def is_out(self, drive: int) -> bool:
        return self._drives[drive].is_out

    def num_ready(self, drive: int) -> int:
        """Return how many pieces `take` would hand out to a drive now, one after the other."""
        return self._drives[drive].queue.num_ready

    @property
    def num_drives(self) -> int:
        return len(self._drives)

    def may_help(self, drive: int) -> list[int]:
        """Return the drives that have nothing to do while required pieces wait at `drive`."""
        waits = self._has_copies and any(
            part.is_required for part in self._drives[drive].queue.unissued()
        )
        return [
            other
            for other, state in enumerate(self._drives)
            if waits and other != drive and not state.is_out and not state.nbytes[0]
        ]

    # ---- a drive that stalls --------------------------------------------------------------------------------------

    def silent(self, drive: int, now: float) -> float:
        """Return for how many seconds a drive has given nothing though something that others have is on its way."""
        state = self._drives[drive]
        waits = any(
            part.lost is None and self._has_other(part, piece, drive)
            for part, piece in state.reading
        )
        return now - state.meter.since if waits else 0.0

    def give_up(self, drive: int, now: float) -> list[ReadJob]:
        """Take a silent drive out, with what is on its way from it; return the jobs that are to be delivered now.

        Their `orphans` are set: they have to be restarted, since the old memory may still be written to.
        """
        self._drives[drive].is_stalled = True
        self.take_out(drive, now)
        touched: dict[ReadJob, None] = {}
        for part, piece in self._drives[drive].reading:
            if part.lost is None and self._has_other(part, piece, drive):
                touched[part.record] = None
        for job in touched:
            record = self._records[job]
            job.orphans = job.orphans or Orphans()
            self._withdraw_all(job)
            stuck = [
                part
                for part, _ in self._drives[drive].reading
                if part.record is job and part.lost is None
            ]
            job.orphans.count += len(stuck)
            record.num_reading -= len(stuck)
            for part in stuck:
                part.lost = job.orphans
        return [job for job in touched if self._records[job].num_reading == 0]

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _push(self, job: ReadJob, record: _Record, now: float) -> None:
        self._records[job] = record
        self._push_pieces(job, record, list(record.ways), now)

    def _push_pieces(self, job: ReadJob, record: _Record, places: list[int], now: float) -> None:
        """Give each piece to the drive that would end it first."""
        of_drive: dict[int, list[Span]] = {}
        for place in places:
            ways = record.ways[place]
            spans = self._untried(record, place)
            if not spans:  # what has failed is tried once more, and what stalls is waited for
                spans = [s for s in ways if not self._state(s).is_stalled] or list(ways)
            drive, span = min(
                ((self._drive_of[span.file_idx], span) for span in spans),
                key=lambda way: self._ends(way[0], _rank(job), way[1].nbytes, now),
            )
            self._drives[drive].nbytes[_rank(job)] += span.nbytes
            of_drive.setdefault(drive, []).append(span)
        for drive, pieces in of_drive.items():
            self._give(drive, job, record, pieces)

    def _give(self, drive: int, job: ReadJob, record: _Record, pieces: list[Span]) -> None:
        """Add pieces to what a drive reads of a record."""
        for home, part in record.parts:
            if home == drive and not part.is_done:
                part.pieces = [*part.pieces, *pieces]
                part.num_unfinished += len(pieces)
                return
        part = Part(job, pieces)
        record.parts.append((drive, part))
        self._drives[drive].queue.push(part)

    def _untried(self, record: _Record, place: int) -> list[Span]:
        """Return the ways to read a piece that may still do; those on drives that are out, if none is left."""
        tried, found = record.tried.get(place, ()), []
        for span in record.ways[place]:
            drive = self._drive_of[span.file_idx]
            if drive not in tried and not self._drives[drive].is_stalled:
                found.append(span)
        return [span for span in found if not self._state(span).is_out] or found

    def _state(self, span: Span) -> _Drive:
        return self._drives[self._drive_of[span.file_idx]]

    def _has_other(self, part: Part, piece: Span, drive: int) -> bool:
        """Say whether a drive that does not stall has a copy of what is on its way from `drive`."""
        ways = self._records[part.record].ways[piece.dest]
        return any(
            self._drive_of[span.file_idx] != drive and not self._state(span).is_stalled
            for span in ways
        )

    def _ends(self, drive: int, rank: int, nbytes: int, now: float) -> float:
        """Return in how many seconds a drive would have read so much more: what has a higher rank stands behind."""
        state = self._drives[drive]
        before = sum(state.nbytes[: rank + 1])
        return (before + nbytes) / state.meter.nbytes_s(now)

    def _take_over(self, drive: int, now: float) -> None:
        """Move the last required piece that waits at the drive with the longest queue, if it would end here first."""
        mine = self._drives[drive]
        if not self._has_copies or mine.is_out:
            return
        if any(part.is_required for part in mine.queue.unissued()):
            return
        longest, other = max(
            (state.nbytes[0] / state.meter.nbytes_s(now), i) for i, state in enumerate(self._drives)
        )
        if other == drive:
            return
        for part in reversed(self._drives[other].queue.unissued()):
            if not part.is_required:
                continue
            assert isinstance(part, Part)
            record, last = self._records[part.record], part.pieces[-1]
            mine_too = [
                span
                for span in self._untried(record, last.dest)
                if self._drive_of[span.file_idx] == drive
            ]
            if not mine_too or self._ends(drive, 0, last.nbytes, now) >= longest:
                continue
            self._withdraw(other, part, 1)
            mine.nbytes[0] += last.nbytes
            self._give(drive, part.record, record, mine_too)
            return

    def _end(self, drive: int, part: Part, piece: Span, now: float, nbytes: int) -> bool:
        """Take a piece off its drive; False: its record does not wait for it any more."""
        state = self._drives[drive]
        state.reading.remove((part, piece))
        state.meter.end(now, nbytes)
        state.nbytes[_rank(part)] -= piece.nbytes
        state.queue.finish(part)
        if part.lost is not None:
            part.lost.count -= 1
            return False
        self._records[part.record].num_reading -= 1
        return True

    def _withdraw(self, drive: int, part: Part, most: int | None = None) -> list[Span]:
        state = self._drives[drive]
        back = state.queue.withdraw(part, most)
        state.nbytes[_rank(part)] -= sum(piece.nbytes for piece in back)
        return back

    def _withdraw_all(self, job: ReadJob) -> None:
        for drive, part in self._records[job].parts:
            if not part.is_done:
                self._withdraw(drive, part)

    def _left_nbytes(self, drive: int, part: Part) -> int:
        """Return the bytes of a part that are not back."""
        reading = sum(piece.nbytes for p, piece in self._drives[drive].reading if p is part)
        return reading + sum(piece.nbytes for piece in part.pieces[part.next_piece :])
