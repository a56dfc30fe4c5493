"""Which piece of which expert is read next. Pure logic: no thread, no file, no clock.

The rules, in this order:
- required experts are read one after the other in router order, at most `window` of them in flight, each cut
  into `pieces` that may run in parallel (all at once is slower: they share the drive and end together);
- a guess starts only in the gap: when every piece of every required expert has been handed out;
- pieces of a guess that have not been handed out wait whenever a required expert comes;
- an idle job (an expert that may be wanted some day) goes a piece at a time, and only while nothing else is in work: it
  holds up what comes by at most that piece.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import NamedTuple

from conf.schema import DriveConfig
from runtime.experts.layout import Span
from runtime.units import MIB, PAGE_NBYTES, align_up

FLIGHT_NBYTES, MOST_IN_FLIGHT = 16 * MIB, 8  # keeps a fast drive busy while one record is taken in
PIECE_NBYTES, MOST_PIECES = 2 * MIB, 4  # the kernel cuts a read further itself


class Depth(NamedTuple):
    """How much is asked of a drive at once."""

    window: int  # records in flight
    pieces: int  # parallel reads of each
    min_piece_nbytes: int

    @property
    def num_threads(self) -> int:
        return self.window * self.pieces


def depth_of(config: DriveConfig, record_nbytes: int, num_drives: int = 1) -> Depth:
    """Return what a config leaves to the size of a record.

    Each piece costs the interpreter some 50 us, whatever its size, and takes them from the decoding thread: small
    records are read whole, several at a time. Large ones are cut, so that the first is there before the others; so are
    all that lie on several drives, which are kept equally busy by pieces.
    """
    window, pieces = config.window, config.pieces
    if window is None:
        window = min(max(2, -(-FLIGHT_NBYTES // max(1, record_nbytes))), MOST_IN_FLIGHT)
        window = 2 if num_drives > 1 else window
    if pieces is None and num_drives > 1:
        pieces = MOST_PIECES
    if pieces is None:
        pieces = min(max(1, record_nbytes // PIECE_NBYTES), MOST_PIECES)
    return Depth(window, pieces, config.piece_kib * 1024)


def cut_spans(spans: Sequence[Span], pieces: int, min_nbytes: int = PAGE_NBYTES) -> list[Span]:
    """Cut aligned spans into about `pieces` parts of whole pages, at least one per span.

    A part is not cut smaller than `min_nbytes`.
    """
    size = align_up(max(-(-sum(span.nbytes for span in spans) // pieces), min_nbytes))
    return [
        Span(
            span.file_idx,
            span.offset + at,
            min(size, span.nbytes - at),
            max(0, min(size, span.need_nbytes - at)),
            span.dest + at,
        )
        for span in spans
        for at in range(0, span.nbytes, size)
    ]


class Orphans:
    """Reads into a buffer that were given up and may still end at any time: until `count` is 0 it is theirs.

    `restart` reads the job once more, into other memory.
    """

    __slots__ = ("count", "restart")

    def __init__(self) -> None:
        self.count = 0
        self.restart: Callable[[memoryview], None] | None = None


class ReadJob:
    """One record to be read into `buffer`. `error` is set, and `on_done` called, when its last piece is back.

    `orphans` is set, and `on_done` called, when a drive with another copy keeps some of it for too long: it is not
    done, and has to be restarted with another buffer.
    """

    __slots__ = (
        "buffer",
        "error",
        "is_done",
        "is_idle",
        "is_required",
        "key",
        "next_piece",
        "num_unfinished",
        "on_done",
        "orphans",
        "pieces",
    )

    def __init__(
        self,
        key: Hashable,
        pieces: Sequence[Span],
        buffer: memoryview,
        is_required: bool,
        on_done: Callable[[ReadJob], None] | None = None,
        is_idle: bool = False,
    ) -> None:
        """is_idle: neither required nor guessed, until it is promoted."""
        self.key = key
        self.pieces = pieces
        self.buffer = buffer
        self.is_required, self.is_idle = is_required, is_idle
        self.on_done = on_done
        self.next_piece = 0
        self.num_unfinished = len(pieces)
        self.is_done = False
        self.error: Exception | None = None
        self.orphans: Orphans | None = None

    @property
    def is_started(self) -> bool:
        return self.next_piece > 0

    @property
    def is_issued(self) -> bool:
        return self.next_piece == len(self.pieces)

    @property
    def is_flying(self) -> bool:
        """Whether a piece is handed out and not back."""
        return self.next_piece > len(self.pieces) - self.num_unfinished


class ReadQueue:
    """The order of reads. The caller serialises access."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1, got {window}")
        self.window = window
        self._required: deque[ReadJob] = deque()
        self._guesses: deque[ReadJob] = deque()
        self._idle: OrderedDict[ReadJob, None] = OrderedDict()  # thousands: each is found at once
        self._active: list[ReadJob] = []  # started, not done, in starting order; idle ones apart
        self._active_idle: ReadJob | None = None

    def push(self, job: ReadJob) -> None:
        """Add a job behind those of its kind."""
        if job.is_idle:
            self._idle[job] = None
        else:
            (self._required if job.is_required else self._guesses).append(job)

    def promote(self, job: ReadJob) -> None:
        """Make a guess or an idle job required: it was right."""
        if job.is_required or job.is_done:
            return
        job.is_required = True
        if job.is_idle:
            job.is_idle = False
            if job is self._active_idle:
                self._active_idle = None
                self._active.append(job)
            else:
                del self._idle[job]
                self._required.append(job)
        elif job in self._guesses:
            self._guesses.remove(job)
            self._required.append(job)

    def cancel(self, job: ReadJob) -> bool:
        """Take back a job of which no piece was handed out; False when it is too late."""
        if job in self._idle:
            del self._idle[job]
            return True
        for waiting in (self._guesses, self._required):
            if job in waiting:
                waiting.remove(job)
                return True
        return False

    def unissued(self) -> list[ReadJob]:
        """Return the jobs with pieces that were not handed out, required ones first; idle ones are not among them."""
        started = [job for job in self._active if not job.is_issued]
        required = [job for job in started if job.is_required]
        guesses = [job for job in started if not job.is_required]
        return [*required, *self._required, *guesses, *self._guesses]

    def unissued_idle(self) -> list[ReadJob]:
        """Return the idle jobs with pieces that were not handed out."""
        active = self._active_idle
        return [*([] if active is None or active.is_issued else [active]), *self._idle]

    def withdraw(self, job: ReadJob, most: int | None = None) -> list[Span]:
        """Take back the last pieces of a job that were not handed out, at most `most`; a job without pieces is over."""
        count = len(job.pieces) - job.next_piece
        count = count if most is None else min(most, count)
        kept = len(job.pieces) - count
        back, job.pieces = list(job.pieces[kept:]), job.pieces[:kept]
        job.num_unfinished -= count
        if not job.num_unfinished:
            job.is_done = True
            self._idle.pop(job, None)
            if job is self._active_idle:
                self._active_idle = None
            for jobs in (self._guesses, self._required, self._active):
                if job in jobs:
                    jobs.remove(job)
        return back

    def take(self) -> tuple[ReadJob, Span] | None:
        """Hand out the next piece, or None while nothing may start."""
        required = [job for job in self._active if job.is_required]
        for job in required:
            if not job.is_issued:
                return self._hand_out(job)
        if self._required:
            return self._start(self._required) if len(required) < self.window else None
        for job in self._active:
            if not job.is_issued:
                return self._hand_out(job)
        if self._guesses and len(self._active) < self.window:
            return self._start(self._guesses)
        if self.has_idle_piece:
            if self._active_idle is None:
                self._active_idle, _ = self._idle.popitem(last=False)
            return self._hand_out(self._active_idle)
        return None

    @property
    def has_idle_piece(self) -> bool:
        """Whether `take` would go on with an idle job: nothing else is in work or waits."""
        if self._active or self._required or self._guesses:
            return False
        if self._active_idle is None:
            return bool(self._idle)
        return not self._active_idle.is_issued and not self._active_idle.is_flying

    @property
    def num_ready(self) -> int:
        """How many pieces `take` would hand out now, one after the other."""
        if self.has_idle_piece:
            return 1
        required: list[ReadJob] = []
        guesses: list[ReadJob] = []
        for job in self._active:
            (required if job.is_required else guesses).append(job)
        room = self.window - len(required)
        required += islice(self._required, max(0, room))
        if len(self._required) <= max(0, room):  # then the gap is reached
            room = self.window - len(self._active) - len(self._required)
            required += [*guesses, *islice(self._guesses, max(0, room))]
        return sum(len(job.pieces) - job.next_piece for job in required)

    def finish(self, job: ReadJob) -> bool:
        """Note that one piece is back; True when it was the job's last."""
        job.num_unfinished -= 1
        if job.num_unfinished:
            return False
        job.is_done = True
        if job is self._active_idle:
            self._active_idle = None
        else:
            self._active.remove(job)
        return True

    def drain(self) -> list[ReadJob]:
        """Forget and return every job of which no piece was handed out."""
        waiting = [*self._required, *self._guesses, *self._idle]
        self._required.clear()
        self._guesses.clear()
        self._idle.clear()
        return waiting

    def _start(self, waiting: deque[ReadJob]) -> tuple[ReadJob, Span]:
        job = waiting.popleft()
        self._active.append(job)
        return self._hand_out(job)

    @staticmethod
    def _hand_out(job: ReadJob) -> tuple[ReadJob, Span]:
        piece = job.pieces[job.next_piece]
        job.next_piece += 1
        return job, piece
