"""Which rule evicts: as configured, or the one that finds most of what this run asks for. Numbers only.

Which rule that is differs from model to model and from text to text, and in a cache of a few decoding steps it decides
by more than anything else. So each rule has a ghost: the book of a cache that holds no bytes, over some of the layers,
with as small a part of the rows. What the ghosts would have found of late says by which rule the real cache evicts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from conf.schema import CachePolicy
from runtime.experts.cache import ExpertCache
from runtime.experts.layout import ExpertKey
from runtime.experts.policies import LfuCache, RankedCache

log = logging.getLogger(__name__)

HALF_LIVES_STEPS = (4, 16)  # of LFU, beside one of as many uses as there are rows
LARGE_STEPS = 8  # a cache of so many decoding steps is an LRU: the rules are within two points of each other there
GHOST_ROWS, GHOST_LAYERS = 64, 8  # of a ghost, at least
MEMORY_STEPS = 32  # after which what a ghost found counts half
MARGIN = 0.01  # of all uses: so much more must a rule find to take over
GROW_USES = 16  # after which a use counts more than before
LARGEST_UNIT = 2.0**100  # then all counts are brought down, long before they are infinite


class _Counts:
    """How often each expert was used, by three half-lives at once; later uses weigh more, instead of earlier less."""

    def __init__(self, half_lives_uses: tuple[float, float, float]) -> None:
        self._growths = [2 ** (GROW_USES / half_life) for half_life in half_lives_uses]
        self._units = [1.0, 1.0, 1.0]  # what a use counts now
        self._scales = [0.0, 0.0, 0.0]  # log2 of what the counts were brought down by
        self._of: dict[ExpertKey, list[float]] = {}
        self._uses = 0

    def note(self, key: ExpertKey) -> None:
        """Count a use."""
        counts = self._of.get(key)
        if counts is None:
            counts = self._of[key] = [0.0, 0.0, 0.0]
        a, b, c = self._units  # at every use of a decoding step: a loop takes twice as long
        counts[0] += a
        counts[1] += b
        counts[2] += c
        self._uses += 1
        if self._uses % GROW_USES == 0:
            self._grow()

    def _grow(self) -> None:
        for i, growth in enumerate(self._growths):
            unit = self._units[i] = self._units[i] * growth
            if unit > LARGEST_UNIT:
                self._units[i] = 1.0
                self._scales[i] += math.log2(unit)
                for counts in self._of.values():
                    counts[i] /= unit

    def rank(self, key: ExpertKey, i: int) -> float:
        """Return what grows with the count by half-life `i`, and stays as it is while others are used."""
        count = self._of[key][i]
        # brought down often enough, a count is nothing
        return math.log2(count) + self._scales[i] if count else -math.inf


class AdaptiveCache(RankedCache[ExpertKey]):
    """Evicts by LRU or by LFU of one of several half-lives, whichever would have found most of late."""

    def __init__(self, num_rows: int, num_layers: int, step_experts: int) -> None:
        """step_experts: that a decoding step uses at most, of all conversations and layers."""
        super().__init__(num_rows)
        short, long = HALF_LIVES_STEPS
        half_lives = (num_rows, short * step_experts, long * step_experts)
        names = ("a cycle", f"{short} steps", f"{long} steps")
        self.rules = ["LRU", *(f"LFU with a half-life of {name}" for name in names)]
        # an LRU that is smaller than a step finds nothing: what is wanted again has just gone
        self._first_rule = 0 if num_rows >= step_experts else 1
        self.rule = 2 * self._first_rule
        self._counts = _Counts(half_lives)
        wanted = max(GHOST_LAYERS, math.ceil(num_layers * GHOST_ROWS / num_rows))
        stride = max(1, num_layers // wanted)
        self._sample = frozenset(range(stride // 2, num_layers, stride))
        share = len(self._sample) / num_layers
        rows = max(1, int(num_rows * share))
        self._ghosts: list[ExpertCache[ExpertKey]] = [
            ExpertCache(rows),
            *(LfuCache(rows, half_life * share) for half_life in half_lives),
        ]
        self._found = [0.0] * len(self._ghosts)  # of late
        self._shown = 0.0  # as lately
        # by the rule in force, in the sample, what guesses brought not counted
        self._found_here = 0.0
        self._missed: set[ExpertKey] = set()  # of the sample: asked for, not admitted yet
        self._guessed: set[ExpertKey] = set()  # of the sample: admitted, not asked for yet
        self._asked, self._step_experts = 0, step_experts
        self._fading = 2 ** (-1 / MEMORY_STEPS)

    def take(self, key: ExpertKey) -> int | None:
        self._asked += 1
        if self._asked == self._step_experts:
            self._asked = 0
            self._judge()
        row = super().take(key)
        if key.layer in self._sample:
            self._show(key, row is not None)
        return row

    def admit(self, key: ExpertKey) -> int | None:
        row = super().admit(key)
        if row is not None and key.layer in self._sample:
            if key in self._missed:
                self._missed.remove(key)
            else:
                self._guessed.add(key)
        return row

    def _show(self, key: ExpertKey, is_here: bool) -> None:
        """Let the ghosts look for an expert, and take it in."""
        self._shown += 1.0
        if not is_here:
            self._missed.add(key)
        elif key in self._guessed:
            self._guessed.remove(key)
        else:
            self._found_here += 1.0
        for i, ghost in enumerate(self._ghosts):
            if ghost.take(key) is not None:
                self._found[i] += 1.0
                ghost.unpin(key)
            else:
                ghost.admit(key)
                ghost.landed(key)

    def _judge(self) -> None:
        """Change to the rule that found most, if it is ahead by enough; about once a step."""
        rules = range(self._first_rule, len(self._found))
        best = max(rules, key=self._found.__getitem__)
        # a small LRU that just holds a step finds less than a large one does
        found = max(self._found[self.rule], self._found_here)
        ahead = self._found[best] - found
        if ahead > MARGIN * self._shown:
            log.info(
                "the expert cache evicts by %s now: of late that would have found %.1f %%, %s %.1f %%",
                self.rules[best], 100 * self._found[best] / self._shown,
                self.rules[self.rule], 100 * found / self._shown,
            )  # fmt: skip
            self._change_to(best)
        self._found = [found * self._fading for found in self._found]
        self._found_here *= self._fading
        self._shown *= self._fading

    def _change_to(self, rule: int) -> None:
        # the first to go first, so that equals keep their order
        here, before = self.keys(), self.rule
        self.rule = rule
        for key in here if rule else ():
            # a guess that was wrong stays the first to go
            if not before or self._rank_of[key] > -math.inf:
                self._rank(key, self._counts.rank(key, rule - 1))

    # ranks are for LFU: the book itself is in an LRU's order, whichever rule evicts

    def _used(self, key: ExpertKey) -> None:
        self._counts.note(key)
        if self.rule:
            self._rank(key, self._counts.rank(key, self.rule - 1))

    def keys(self) -> list[ExpertKey]:
        return super().keys() if self.rule else list(self._row_of)

    def _victim(self) -> ExpertKey | None:
        return super()._victim() if self.rule else ExpertCache._victim(self)


def cache_for(
    policy: CachePolicy, num_layers: int, step_experts: int, num_experts: int
) -> Callable[[int], ExpertCache[ExpertKey]]:
    """Return what makes a cache of a number of rows.

    step_experts: that a decoding step uses at most, of all conversations and layers.  num_experts: of all layers.
    """

    def make(num_rows: int) -> ExpertCache[ExpertKey]:
        if policy is CachePolicy.lfu:
            is_small = num_rows < step_experts
            return LfuCache(num_rows, HALF_LIVES_STEPS[0] * step_experts if is_small else num_rows)
        if policy is CachePolicy.lru or num_rows >= min(LARGE_STEPS * step_experts, num_experts):
            return ExpertCache(num_rows)
        return AdaptiveCache(num_rows, num_layers, step_experts)

    return make
