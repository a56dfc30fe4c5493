"""How alike the routes of neighbouring tokens are: measured of a recording, published of the models, and generated.

Three properties say what a cache and a prefetcher meet: `skew` (some experts are liked better, all the time),
`persistence` (a token keeps experts of the token before), and how well the next layer is guessed. What a generated
route does not have: topics that come and go, and any likeness between layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UserError
from runtime.experts.routes import Kind, RouteHeader, RouteTrace, Step

FIT_LAYERS, FIT_TOKENS, FIT_STEPS = 6, 160, 14


@dataclass(frozen=True, slots=True)
class Locality:
    """What a generated route is made by. Shares are 0 to 1."""

    skew: float  # standard deviation of the log of an expert's popularity; 0 is even
    persistence: float  # share of a token's experts that are kept on purpose from the token before
    recall: float  # share of the next layer's experts among as many guesses
    best_two: float  # share of right ones among the first two guesses


@dataclass(frozen=True, slots=True)
class Observed:
    """What can be counted in a route, recorded or generated."""

    repeat: float  # share of experts that the token before used in the same layer
    hit_share: float  # capacity of an LRU over all layers, as a share of all experts ...
    hit_rate: float  # ... and how often it finds an expert, after the first tokens
    recall: float
    best_two: float


# Published measurements of the two models; where they are from is in EXPERIMENTS.md ("the simulator ...").
# Qwen: 36 % of uses repeat on the next token, 81 % of them found by an LRU over a quarter of the experts; the router's
# guess has 65 % of the ten, 91 % of two read ahead were used. DeepSeek: 32 %, 49 % with 16 GiB of 269, 71 %, 94 %.
PUBLISHED = {
    "qwen": Observed(0.36, 0.25, 0.81, 0.65, 0.91),
    "deepseek": Observed(0.32, 0.0595, 0.49, 0.71, 0.94),
}

# what `fit` finds for them (400 tokens, mean of four seeds)
PRESETS = {
    "qwen": Locality(1.744, 0.269, 0.65, 0.91),
    "deepseek": Locality(1.763, 0.225, 0.71, 0.94),
}


def generate(
    header: RouteHeader, locality: Locality, num_tokens: int, seed: int = 0, conversation: int = 0
) -> RouteTrace:
    """Return `num_tokens` decoded tokens; the same for the same arguments.

    conversation: others like the same experts and draw other ones.
    """
    check(header, locality)
    layers, experts, top_k = header.num_layers, header.num_experts, header.top_k
    rng = np.random.default_rng(seed)
    liking = locality.skew * rng.standard_normal((layers, experts))
    if conversation:
        rng = np.random.default_rng([seed, conversation])
    right_share = _right_shares(locality, top_k)
    before = np.zeros((layers, experts), dtype=bool)
    rows = np.arange(layers)[:, None]
    steps = []
    for token in range(num_tokens):
        # the best of liking plus Gumbel noise are a draw without putting back; what is kept comes first
        kept = before & (rng.random((layers, experts)) < locality.persistence)
        drawn = liking + rng.gumbel(size=(layers, experts))
        chosen = _best(np.where(kept, np.inf, drawn), top_k)
        # router order says nothing of how an expert was chosen
        route = np.take_along_axis(chosen, np.argsort(rng.random((layers, top_k)), axis=1), axis=1)
        before = np.zeros_like(before)
        before[rows, route] = True
        others = np.where(before, -np.inf, liking + rng.gumbel(size=(layers, experts)))
        wrong = _best(others, min(top_k, experts - top_k)) if experts > top_k else None
        is_right = rng.random((layers, top_k)) < right_share
        shuffled = np.take_along_axis(
            route, np.argsort(rng.random((layers, top_k)), axis=1), axis=1
        )
        for layer in range(layers):
            guesses: tuple[int, ...] = ()
            scores: tuple[float, ...] = ()
            if layer + 1 < layers:
                guesses = _guesses(
                    shuffled[layer + 1],
                    () if wrong is None else wrong[layer + 1],
                    is_right[layer + 1],
                )
                scores = tuple(right_share[: len(guesses)].tolist())
            steps.append(
                Step(Kind.decode, token, layer, tuple(route[layer].tolist()), guesses, scores)
            )
    return RouteTrace(header, steps)


def _best(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Return the columns of each row's `count` largest values, in no order."""
    found: NDArray[np.int64] = np.argpartition(values, -count, axis=1)[:, -count:]
    return found


def _guesses(
    true: Sequence[int], wrong: Sequence[int], is_right: Sequence[bool]
) -> tuple[int, ...]:
    good, bad = iter(true), iter(wrong)
    found = (next(good if right else bad, None) for right in is_right)
    return tuple(int(expert) for expert in found if expert is not None)


def _right_shares(locality: Locality, top_k: int) -> NDArray[np.float64]:
    """Return how likely the guess at each rank is right: a straight line through what is known of it."""
    if top_k <= 2:
        return np.full(top_k, locality.recall)
    slope = 2 * (locality.best_two - locality.recall) / (top_k - 2)
    line: NDArray[np.float64] = np.clip(
        locality.best_two + slope * (0.5 - np.arange(top_k)), 0.0, 1.0
    )
    return line


def check(header: RouteHeader, locality: Locality) -> None:
    """Raise UserError for a locality that no route can have."""
    if not 1 <= header.top_k <= header.num_experts:
        raise UserError(
            f"a token cannot use {header.top_k} of {header.num_experts} experts",
            "lower simulate.top_k, or raise simulate.num_experts",
        )
    for name in ("persistence", "recall", "best_two"):
        value = getattr(locality, name)
        if not 0 <= value <= 1:
            raise UserError(
                f"the locality's {name} is a share of 0 to 1, got {value:g}",
                f"set simulate.{name} to a value from 0 to 1",
            )
    if locality.skew < 0:
        raise UserError(
            f"the locality's skew is {locality.skew:g}", "set simulate.skew to 0 or more"
        )


# ---- counting --------------------------------------------------------------------------------------------------------


def observe(trace: RouteTrace, hit_share: float = 0.25) -> Observed:
    """Count a route's properties over its decoded tokens.

    hit_share: of all experts, what the LRU holds; its first third of the tokens only warms it.
    """
    header = trace.header
    last: dict[int, frozenset[int]] = {}
    repeats = uses = right = asked = right_two = asked_two = 0
    guessed: tuple[int, tuple[int, ...]] | None = None
    for step in trace.steps:
        if step.kind is not Kind.decode:
            guessed = None
            continue
        route = frozenset(step.experts)
        if step.layer in last:
            uses += len(route)
            repeats += len(route & last[step.layer])
        last[step.layer] = route
        if guessed is not None and guessed[0] == step.layer:
            first = guessed[1][: header.top_k]
            right += len(route.intersection(first))
            asked += len(route)
            right_two += len(route.intersection(first[:2]))
            asked_two += len(first[:2])
        guessed = (step.layer + 1, step.guesses) if step.guesses else None
    rows = max(header.top_k, round(hit_share * header.num_layers * header.num_experts))
    return Observed(
        repeats / max(1, uses),
        hit_share,
        lru_hit_rate(trace, rows),
        right / max(1, asked),
        right_two / max(1, asked_two),
    )


def lru_hit_rate(trace: RouteTrace, num_rows: int, warm_share: float = 1 / 3) -> float:
    """Return how often an LRU of `num_rows` over all layers finds a decoded token's expert, after the first tokens.

    A route is pinned as a whole: what it finds is what was there before the layer.
    """
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    first = int(trace.num_tokens * warm_share)
    hits = uses = token = 0
    for forward in trace.forwards():
        if forward[0].kind is not Kind.decode:
            continue
        for step in forward:
            keys = [(step.layer, expert) for expert in step.experts]
            found = [key for key in keys if key in cache]
            if token >= first:
                hits += len(found)
                uses += len(keys)
            for key in found:
                cache.move_to_end(key)
            for key in keys:
                cache[key] = None
            while len(cache) > num_rows:
                cache.popitem(last=False)
        token += 1
    return hits / max(1, uses)


# ---- fitting ---------------------------------------------------------------------------------------------------------


def fit(
    header: RouteHeader, wanted: Observed, num_tokens: int = FIT_TOKENS, seed: int = 0
) -> Locality:
    """Return the locality whose generated routes have the wanted repeats and hit rate; guesses are taken as they are.

    Layers are alike and independent, so a few of them are generated. Where no locality has both, the hit rate is met
    as nearly as a skew from 0 to 4 can.
    """
    few = replace(header, num_layers=min(header.num_layers, FIT_LAYERS))
    guessing = Locality(0.0, 0.0, wanted.recall, wanted.best_two)

    def persistence_for(skew: float) -> Locality:
        def repeat(persistence: float) -> float:
            locality = replace(guessing, skew=skew, persistence=persistence)
            return observe(generate(few, locality, num_tokens // 2, seed)).repeat

        return replace(
            guessing,
            skew=skew,
            persistence=_bisect(repeat, wanted.repeat, 0.0, 1.0, FIT_STEPS // 2),
        )

    def hit_rate(skew: float) -> float:
        trace = generate(few, persistence_for(skew), num_tokens, seed)
        return observe(trace, wanted.hit_share).hit_rate

    return persistence_for(_bisect(hit_rate, wanted.hit_rate, 0.0, 4.0, FIT_STEPS))


def _bisect(
    rising: Callable[[float], float], wanted: float, low: float, high: float, steps: int
) -> float:
    for _ in range(steps):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
