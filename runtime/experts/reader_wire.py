"""What the decoding process and its reader process tell each other: records in pipes, claims in shared memory.

A job has a number. To the reader process goes `JOB` with its spans, then perhaps `PROMOTE` or `CANCEL`; back comes one
answer for each job and each cancel. A number is free again when its answer was read.

Whether a job is read or taken back is decided by who gets its claim, a POSIX semaphore of value 1: the reader process
asks for it before the first byte, the decoding process to cancel, and `sem_trywait` gives it to one of them. That is an
atomic operation with the barriers that any processor needs, where two flags, each set before the other one is read,
would need a barrier that Python does not have: x86 and ARM let a load overtake the store before it.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from typing import NamedTuple

from runtime.experts.layout import CHECKSUM_NBYTES, Span
from runtime.units import PAGE_NBYTES, align_up

LENGTH = struct.Struct("<I")  # before the JSON with which both begin

COMMAND = struct.Struct("<BBHHxxIII")  # command, kind of job, spans, hashes, number, key
PLACE = struct.Struct("<QQ")  # of a job's buffer: where in the arena, bytes
SPAN = struct.Struct("<5Q")
HASH = struct.Struct(f"<QQ{CHECKSUM_NBYTES}s")
ARENA, JOB, PROMOTE, CANCEL, CLOSE = range(5)
REQUIRED, GUESSED, IDLE = range(3)

ANSWER = struct.Struct("<IHH")  # number, what became of it, bytes of text behind
READ, HASHED, CANCELLED, FAILED = range(4)  # HASHED: read, and all the hashes are right
MOST_TEXT_NBYTES = 4000  # a write of at most PIPE_BUF, 4096, is whole

CLAIM_NBYTES = 64  # a sem_t has 32; each has a cache line of its own
HEADER_NBYTES = PAGE_NBYTES  # of the shared memory: a counter of answers

_LIBC = ctypes.PyDLL(None)  # keeps the interpreter's lock: none of these waits
_LIBC.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_LIBC.sem_trywait.argtypes = _LIBC.sem_post.argtypes = [ctypes.c_void_p]


class Hash(NamedTuple):
    """What bytes of a record must hash to."""

    dest: int
    nbytes: int
    digest: bytes


def job_record(
    number: int,
    kind: int,
    key: tuple[int, int],
    place: tuple[int, int],
    spans: Sequence[Span],
    hashes: Sequence[Hash],
) -> bytes:
    """Return a `JOB`.  kind: REQUIRED, GUESSED or IDLE.  place: of its buffer in the arena, and its bytes."""
    parts = [COMMAND.pack(JOB, kind, len(spans), len(hashes), number, *key), PLACE.pack(*place)]
    parts += [SPAN.pack(*span) for span in spans]
    parts += [HASH.pack(*item) for item in hashes]
    return b"".join(parts)


def control_nbytes(num_claims: int) -> int:
    """Return the size of the shared memory beside the arena."""
    return HEADER_NBYTES + align_up(num_claims * CLAIM_NBYTES)


class Control:
    """The shared memory beside the arena: a claim for each number, and how many answers were written.

    The counter is a hint that saves asking the pipe: whoever misses it by a moment finds the answer a moment later.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._bytes = (ctypes.c_char * len(memory)).from_buffer(memory)  # keeps the mapping
        self._claims = ctypes.addressof(self._bytes) + HEADER_NBYTES
        self.counter = memoryview(memory)[:8].cast("Q")

    def offer(self, number: int) -> None:
        """Make a claim that nobody has taken yet, before the number is used for the first time."""
        _LIBC.sem_init(self._claims + number * CLAIM_NBYTES, 1, 1)

    def take(self, number: int) -> bool:
        """Take a claim; False when it was taken."""
        return bool(_LIBC.sem_trywait(self._claims + number * CLAIM_NBYTES) == 0)

    def give_back(self, number: int) -> None:
        """Let a claim that was taken be taken again."""
        _LIBC.sem_post(self._claims + number * CLAIM_NBYTES)
