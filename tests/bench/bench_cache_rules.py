"""What each rule for the RAM cache and for the slots in VRAM finds, on generated and on recorded routes.

    python tests/bench/bench_cache_rules.py [routes.bin ...]
    python tests/bench/bench_cache_rules.py --record tiny FILE      # held-out text through a bundled model

Generated routes are those of the two published models, with 16 GB of cache: as they are, and with another liking of
experts every 50 or 20 tokens, as if the topic changed altogether. Recorded ones are given an eighth, a quarter and half
of the experts. The second table has caches of some decoding steps, by the rules that `cache.policy=auto` chooses among.
Not collected by pytest.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

from conf.schema import CachePolicy
from runtime.engine import Engine
from runtime.experts import frequency, policies
from runtime.experts.adaptive import HALF_LIVES_STEPS, AdaptiveCache, cache_for
from runtime.experts.cache import ExpertCache
from runtime.experts.frequency import KeptExperts
from runtime.experts.layout import ExpertKey
from runtime.experts.policies import LfuCache, SlruCache, count_hits, most_hits
from runtime.experts.routes import Kind, RouteHeader, RouteTrace, read_routes
from runtime.locality import PRESETS, Locality, generate
from runtime.session import Session
from stages.bench_report import format_table

MODELS = {
    "qwen": (RouteHeader("qwen", 48, 512, 10, 2_764_800), 5787, 243),
    "deepseek": (RouteHeader("deepseek", 40, 384, 6, 18_800_640), 851, 40),
}
SIZES_STEPS = (0.6, 0.97, 1, 1.2, 1.62, 2, 2.5, 3.55, 6)
Requests = list[list[ExpertKey]]  # a layer's route each


def requests_of(trace: RouteTrace) -> Requests:
    return [
        [ExpertKey(step.layer, expert) for expert in step.experts]
        for step in trace.steps
        if step.kind is Kind.decode
    ]


def lfu(half_life: float) -> Callable[[int], ExpertCache[ExpertKey]]:
    """half_life: in numbers of rows."""
    return lambda rows: LfuCache(rows, half_life * rows)


def slru(share: float) -> Callable[[int], ExpertCache[ExpertKey]]:
    def make(rows: int) -> ExpertCache[ExpertKey]:
        policies.PROTECTED_SHARE = share
        return SlruCache(rows)

    return make


RULES: dict[str, Callable[[int], ExpertCache[ExpertKey]]] = {
    "LRU": ExpertCache,
    "LFU, half after 1 cycle": lfu(1),
    "2": lfu(2),
    "4": lfu(4),
    "SLRU, half protected": slru(0.5),
    "0.8": slru(0.8),
}


def ram_row(
    name: str, requests: Requests, rows: int, header: RouteHeader, step_experts: int
) -> list[str]:
    """step_experts: that a decoding step uses at most."""
    uses, layers = sum(map(len, requests)), header.num_layers
    auto = cache_for(CachePolicy.auto, layers, step_experts, layers * header.num_experts)
    found = [count_hits(make(rows), requests) / uses for make in (*RULES.values(), auto)]
    return [
        name,
        str(rows),
        *(f"{share:.1%}" for share in [*found, most_hits(requests, rows) / uses]),
    ]


def sizes_rows(name: str, requests: Requests, layers: int, step_experts: int) -> list[list[str]]:
    """The same requests with caches of so many decoding steps: each rule that may be chosen, and who chooses."""
    uses = sum(map(len, requests))
    found = []
    for steps in SIZES_STEPS:
        rows = int(steps * step_experts)
        half_lives = (rows, *(life * step_experts for life in HALF_LIVES_STEPS))
        adaptive = AdaptiveCache(rows, layers, step_experts)
        caches = [ExpertCache(rows), *(LfuCache(rows, life) for life in half_lives), adaptive]
        shares = [f"{count_hits(cache, requests) / uses:.1%}" for cache in caches]
        found.append([name, f"{steps:g}", *shares, adaptive.rules[adaptive.rule]])
    return found


def together(header: RouteHeader, locality: Locality, tokens: int, count: int) -> Requests:
    """Return what `count` conversations ask for that are decoded in step: of each layer, every expert once."""
    alone = [requests_of(generate(header, locality, tokens, conversation=n)) for n in range(count)]
    return [
        list(dict.fromkeys(key for route in routes for key in route))
        for routes in zip(*alone, strict=True)
    ]


def lru_of_layers(requests: Requests, header: RouteHeader, slots: int, first: int) -> int:
    """Hits of an LRU over as many of the first layers as it holds two routes of."""
    layers = slots // (2 * header.top_k)
    cache: ExpertCache[ExpertKey] = ExpertCache(max(1, slots))
    hits = 0
    for number, route in enumerate(requests):
        if route[0].layer < layers:
            hits += count_hits(cache, [route]) * (number >= first)
    return hits


def most_used(requests: Requests, header: RouteHeader, slots: int, first: int) -> int:
    kept = KeptExperts(range(slots), header.num_layers)
    hits = 0
    spare = slots
    for number, route in enumerate(requests):
        hits += (number >= first) * sum(kept.slot_of(key) is not None for key in route)
        kept.count(route)
        for key in route:
            if kept.slot_of(key) is None:
                freed = kept.keep(key, spare)
                spare = spare if freed is None else freed
    return hits


def vram_row(name: str, requests: Requests, header: RouteHeader, slots: int) -> list[str]:
    """Hits a token; the first third of the tokens only warms."""
    first = len(requests) // 3
    tokens = (len(requests) - first) / header.num_layers
    cells = [f"{lru_of_layers(requests, header, slots, first) / tokens:.1f}"]
    for half_life in (3, 6, 12, 25):
        frequency.HALF_LIFE_TOKENS = half_life
        cells.append(f"{most_used(requests, header, slots, first) / tokens:.1f}")
    return [name, str(slots), *cells]


def main(paths: Sequence[str]) -> None:
    ram, sizes, vram = [], [], []
    for model, (header, rows, slots) in MODELS.items():
        for tokens, parts in ((150, 1), (50, 3), (20, 7)):
            requests: Requests = []
            for seed in range(parts):
                requests += requests_of(generate(header, PRESETS[model], tokens, seed))
            name = f"{model}, {'one topic' if parts == 1 else f'a new one every {tokens} tokens'}"
            step = header.num_layers * header.top_k
            ram.append(ram_row(name, requests, rows, header, step))
            sizes += sizes_rows(name, requests, header.num_layers, step)
            vram.append(vram_row(name, requests, header, slots))
        for share in (8, 2):  # of what a token uses
            requests = requests_of(generate(header, PRESETS[model], 150))
            ram.append(
                ram_row(f"{model}, 1/{share} of a token", requests, step // share, header, step)
            )
        for count in (2, 4, 8):
            requests = together(header, PRESETS[model], 80, count)
            sizes += sizes_rows(
                f"{model}, {count} together", requests, header.num_layers, count * step
            )
            ram.append(ram_row(f"{model}, {count} together", requests, rows, header, count * step))
            small = f"{model}, {count} together, room for 1.5 tokens"
            ram.append(ram_row(small, requests, 3 * step // 2, header, count * step))
    for path in paths:
        trace = read_routes(Path(path))
        header, requests = trace.header, requests_of(trace)
        experts = header.num_layers * header.num_experts
        step = header.num_layers * header.top_k
        ram += [
            ram_row(
                f"{header.model}, 1/{share} of {experts}", requests, experts // share, header, step
            )
            for share in (8, 4, 2)
        ]
        sizes += sizes_rows(header.model, requests, header.num_layers, step)
        vram += [
            vram_row(header.model, requests, header, routes * header.top_k) for routes in (2, 8)
        ]
    print(format_table(["routes", "rows", *RULES, "auto", "Belady"], ram))
    print()
    lives = ("a cycle", *(f"{life} steps" for life in HALF_LIVES_STEPS))
    names = ["LRU", *(f"LFU, {life}" for life in lives), "auto", "its rule at the end"]
    print(format_table(["routes", "steps", *names], sizes))
    print()
    print(
        format_table(
            ["routes", "slots", "LRU of layers", *(f"used, {n}" for n in (3, 6, 12, 25))], vram
        )
    )


def record(model: str, path: Path) -> None:
    """Feed three held-out passages token by token: two languages, two topics."""
    from tiny_setup import make_runner

    from stages.opening import engine_files, setup_stages

    with tempfile.TemporaryDirectory() as folder:
        words = (f"model={model}", "hw=cpu", "hw.compute_threads=1", "cache.ram_gib=1")
        runner = make_runner(Path(folder), *words)
        names = setup_stages(runner.cfg)
        runner.run(names)
        outputs = {name: output for name in names if (output := runner.find(name)) is not None}
        engine = Engine.open(runner.cfg, engine_files(outputs))
        engine.record_routes(path)
        texts = ROOT / runner.cfg.model.path
        for language, start in (("en", 0), ("ru", 0), ("en", 4000)):
            text = (texts / f"heldout_{language}.txt").read_text()[start : start + 1800]
            tokens = engine.codec.encode_prompt(text)[:220]
            session = Session(engine)
            for count in range(20, len(tokens) + 1):
                session.sync(tokens[:count])
        engine.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1:])
