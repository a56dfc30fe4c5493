"""What lies between a model that reads and a drive that is written: neither waits for the other where it need not.

Blocks are encoded where they are, and their bytes taken over one forward later; commits are made one by one, in order,
on a thread of their own, while the next piece of text goes through the model.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from runtime.living_kv.codec import Codec
from runtime.living_kv.hot import HotState
from runtime.living_kv.store import Update
from runtime.living_kv.to_host import ToHost

AHEAD_NBYTES = 2**27  # of encoded blocks at most in one piece of the encoder's work


class BlockEncoder:
    """Encodes the blocks of a timeline as they become whole, and puts them into an update."""

    def __init__(self, codec: Codec, block: int, number: int, update: Update) -> None:
        """block: tokens of one.  number: of the next block."""
        self._codec, self._block, self._next, self._update = codec, block, number, update
        self._coming: tuple[int, ToHost] | None = None  # number of the first

    def follow(self, state: HotState) -> None:
        """Begin with the blocks whose last token the state has; finish those of the call before."""
        end = state.position // self._block
        most = max(1, AHEAD_NBYTES // self._codec.payload_nbytes(self._block))
        while self._next < end:
            count = min(end - self._next, most)
            keys, values = state.hot(self._next * self._block, (self._next + count) * self._block)
            raw = ToHost(self._codec.encode_blocks(keys, values, count))
            self.finish()
            self._coming = (self._next, raw)
            self._next += count

    def finish(self) -> None:
        """Put what was begun into the update."""
        if self._coming is None:
            return
        first, raw = self._coming
        for i, payload in enumerate(raw.wait().numpy()):
            self._update.blocks.append(((first + i) * self._block, self._block, payload.tobytes()))
        self._coming = None


class Committer:
    """Commits updates in order, one at a time, on a thread of its own. Used by one thread, in a `with`.

    At most one update waits for the drive while the next one is made. A failure shows at the next call, or when the
    `with` ends without an error of its own; nothing is committed behind it.
    """

    def __init__(self, commit: Callable[[Update], None]) -> None:
        self._commit = commit
        self._pool = ThreadPoolExecutor(1, "memory-commit")
        self._running: tuple[Future[None], Callable[[], None]] | None = None

    def put(self, update: Update, done: Callable[[], None] = lambda: None) -> None:
        """Commit an update behind the ones before.  done: called here, in a later call, once it is committed."""
        self.wait()
        self._running = (self._pool.submit(self._commit, update), done)

    def wait(self) -> None:
        """Wait until everything is committed. Raises what its commit raised."""
        if self._running is not None:
            (future, done), self._running = self._running, None
            future.result()
            done()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown()
