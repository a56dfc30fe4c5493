"""How many tokens to guess: learnt from what passes of each depth took and gave. No torch and no clock of its own.

More rows in a pass give more tokens where the guesses are right, and cost more everywhere: on a machine that waits for
its drive each row brings experts of its own. So a depth is judged by its measured time per token. Depth changes no
token, only the speed; so the gate may learn from a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.units import MIB

TRIALS = 3  # passes of each depth before any is preferred
PROBE_EVERY = 32  # passes of the preferred depth between two of another one
MEMORY = 32  # passes: what is older than about so many has faded
FRESH = 0.25  # share of the newest value at most, however old the others are
CLOSE = 0.02  # of the best time per token: within it, fewer bytes win


@dataclass(slots=True)
class _Mean:
    """A mean of what was seen, the last `MEMORY` passes in the main."""

    count: int = 0
    value: float = 0.0
    last: int = -1  # number of the pass that was seen last

    def see(self, value: float, number: int) -> None:
        """number: of the pass."""
        self.count += 1
        age = number - self.last
        share = max(1 / self.count, min(age / MEMORY, FRESH))
        self.value += (value - self.value) * share
        self.last = number


@dataclass(slots=True)
class _Depth:
    """What passes with so many guesses took."""

    ms: _Mean
    nbytes: _Mean


class DepthGate:
    """Chooses the number of guesses for each pass, 0 (no drafts) to `depth`, by measured time per token."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._depths = [_Depth(_Mean(), _Mean()) for _ in range(depth + 1)]
        # share of guesses i that were right, if those before were
        self._accepted = [_Mean() for _ in range(depth)]
        self._passes = 0
        self._wanted = depth  # by the last choice
        self._since_probe = 0

    @property
    def is_learning(self) -> bool:
        """Whether a depth has not been tried often enough for a preference."""
        return any(found.ms.count < TRIALS for found in self._depths)

    @property
    def best(self) -> int:
        """The depth with the least time per token; among those close to it, the one with the fewest bytes."""
        tried = [d for d, found in enumerate(self._depths) if found.ms.count]
        if not tried:
            return self.depth
        limit = (1 + CLOSE) * min(self._ms_per_token(d) for d in tried)
        close = [d for d in tried if self._ms_per_token(d) <= limit]
        return min(close, key=lambda d: (self._depths[d].nbytes.value / self.tokens(d), d))

    def choose(self) -> int:
        """Return how many guesses the next pass shall have."""
        depths = range(self.depth + 1)
        if self.is_learning:
            self._wanted = min(depths, key=lambda d: (self._depths[d].ms.count, d))
        elif self._since_probe < PROBE_EVERY:
            self._wanted = self.best
        else:
            best = self.best
            self._wanted = min(
                (d for d in depths if d != best), key=lambda d: self._depths[d].ms.last
            )
        return self._wanted

    def record(self, guesses: int, accepted: int, duration_ns: int, read_nbytes: int) -> None:
        """Take in what a pass gave and took, proposing included.  guesses: perhaps fewer than were asked for."""
        is_probe = guesses == self._wanted != self.best
        self._since_probe = 0 if is_probe else self._since_probe + 1
        found = self._depths[guesses]
        found.ms.see(duration_ns / 1e6, self._passes)
        found.nbytes.see(read_nbytes, self._passes)
        for at in range(min(accepted + 1, guesses)):
            self._accepted[at].see(float(at < accepted), self._passes)
        self._passes += 1

    def tokens(self, depth: int) -> float:
        """Return how many tokens a pass of this depth is expected to give."""
        total = share = 1.0
        rate = 1.0  # of a guess that was never reached: that of the one before
        for found in self._accepted[:depth]:
            rate = found.value if found.count else rate
            share *= rate
            total += share
        return total

    def _ms_per_token(self, depth: int) -> float:
        return self._depths[depth].ms.value / self.tokens(depth)

    def report(self) -> dict[str, Any]:
        """Return what was learnt, for people and programs."""
        return {
            "depth": self.best,
            "is_learning": self.is_learning,
            "is_off": not self.is_learning and self.best == 0,
            "depths": [
                {
                    "guesses": depth,
                    "passes": found.ms.count,
                    "ms_per_pass": round(found.ms.value, 3),
                    "mib_per_pass": round(found.nbytes.value / MIB, 3),
                    "tokens_per_pass": round(self.tokens(depth), 3),
                }
                for depth, found in enumerate(self._depths)
            ],
        }
