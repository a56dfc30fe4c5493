"""The simulator beside real runs of the bundled model on slow simulated drives.

    python tests/bench/bench_simulator.py [--tokens 60] [--repeats 3]

Measured beforehand: with every expert in RAM one expert and a token's CPU time, whose rest is shared out over the
layers; and what one read takes beyond its simulated time, which is added to the latency. With them the simulator
replays the route of each run, recorded while it ran.

What else runs on the machine is kept out: computing is CPU time of the decoding thread, and a token's time is the
wall's less what the kernel says that this thread could have run and was not let (`schedstat`). What is left of other
work, waits that end late among it, can only add: so a token's time is the least of the interleaved repeats. Shown are
medians over the tokens. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from conf.schema import DriveConfig, RunConfig, load
from kernels import reference as ops
from runtime.engine import Engine, EngineFiles
from runtime.experts.arena import HostArena
from runtime.experts.layout import ExpertKey, PackedLayout
from runtime.experts.reader import DirectReader
from runtime.experts.routes import read_routes
from runtime.experts.schedule import ReadJob
from runtime.session import Session
from runtime.simulator import Machine, Setting, Simulation
from stages.bench_report import format_table
from stages.core import Runner
from stages.opening import engine_files

PROMPT_TOKENS = 32
SETTINGS = [  # GiB/s, microseconds, cache.ram_gib, prefetch.experts
    (rate, 100, ram, guesses)
    for rate in (0.02, 0.05)
    for ram in (0.0, 0.003, 0.006)
    for guesses in (0, 2)
]


def config(*words: str) -> RunConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return load(compose("config", ["hw=cpu", "hw.compute_threads=1", *words]))


class Spent(NamedTuple):
    """What a token took, in milliseconds."""

    wall_ms: float
    delayed_ms: float  # of it, ready to run while others did
    cpu_ms: float  # of the decoding thread

    @property
    def own_ms(self) -> float:
        return self.wall_ms - self.delayed_ms


def clocks_ms() -> Spent:
    """Return this thread's clocks. Raises OSError where the kernel keeps no schedstat."""
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    delayed_ns = int(stat.split()[1])
    return Spent(time.perf_counter() * 1e3, delayed_ns / 1e6, time.thread_time() * 1e3)


def run(cfg: RunConfig, files: EngineFiles, text: list[int], routes: Path | None) -> list[Spent]:
    """Decode the text token by token; returns what each took."""
    engine = Engine.open(cfg, files)
    if routes is not None:
        engine.record_routes(routes)
    session = Session(engine)
    session.sync(text[:PROMPT_TOKENS])
    times = []
    for count in range(PROMPT_TOKENS + 1, len(text) + 1):
        before = clocks_ms()
        session.sync(text[:count])
        after = clocks_ms()
        times.append(Spent(*(b - a for a, b in zip(before, after, strict=True))))
    engine.close()
    return times


def expert_ms(files: EngineFiles) -> float:
    """Return the time of one expert, undisturbed."""
    engine = Engine.open(config("cache.ram_gib=1"), files)
    model = engine.model
    moe = model.moes[0]
    (_, record), *_ = model.experts.fetch(0, [0])
    x = torch.randn(1, model.spec.hidden)
    times = []
    for _ in range(400):
        started = time.perf_counter()
        ops.nvfp4_swiglu_expert(x, record, moe.scales[0], model.spec.intermediate)
        times.append((time.perf_counter() - started) * 1e3)
    engine.close()
    return min(times)


def read_extra_us(files: EngineFiles) -> float:
    """Return what one read takes beyond its simulated time: the real read, threads waking up, the way back."""
    layout = PackedLayout.open(files.pack)
    rate, latency_us = 0.05, 100.0
    drive = DriveConfig(simulate_gib_s=rate, simulate_latency_us=latency_us)
    reader, arena = DirectReader(layout.files, drive), HostArena(1, layout.record_nbytes)
    should = layout.record_nbytes / (rate * 2**30) + latency_us / 1e6
    extra = []
    for number in range(300):
        key = ExpertKey(number % layout.num_layers, number * 7 % layout.num_experts)
        arrivals: SimpleQueue[ReadJob] = SimpleQueue()
        started = time.perf_counter()
        reader.submit(key, layout.spans(key), arena.view(0), on_done=arrivals.put)
        arrivals.get()
        extra.append((time.perf_counter() - started - should) * 1e6)
    reader.close()
    return statistics.quantiles(extra, n=4)[0]


def least(repeats: list[list[Spent]], what: Callable[[Spent], float]) -> float:
    """Return the median over the tokens of each token's least time."""
    return statistics.median(min(map(what, token)) for token in zip(*repeats, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    ConfigStore.instance().store(name="schema", node=RunConfig)
    cfg = config()
    runner = Runner(cfg, ROOT / cfg.paths.artifacts)
    runner.run(["residents", "repack"])
    files = engine_files({name: runner.find(name) for name in ("download", "repack", "residents")})
    engine = Engine.open(cfg, files)
    text = engine.codec.encode((files.snapshot / "heldout_en.txt").read_text()[:4000])
    text = text[: PROMPT_TOKENS + args.tokens]
    engine.close()

    one_ms, extra_us = expert_ms(files), read_extra_us(files)
    measured: dict[int, list[list[Spent]]] = {number: [] for number in range(len(SETTINGS))}
    in_ram: list[list[Spent]] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            whole = config("cache.ram_gib=1", "prefetch.experts=0")
            in_ram.append(run(whole, files, text, None)[-args.tokens // 2 :])
            for number, (rate, latency, ram, guesses) in enumerate(SETTINGS):
                words = (
                    f"hw.drive.simulate_gib_s={rate}", f"hw.drive.simulate_latency_us={latency}",
                    f"cache.ram_gib={ram}", f"prefetch.experts={guesses}",
                )  # fmt: skip
                path = Path(folder) / f"{number}.bin"
                measured[number].append(run(config(*words), files, text, None if repeat else path))
        layer_ms = (least(in_ram, lambda spent: spent.cpu_ms) - 48 * one_ms) / 8
        print(
            f"one expert {one_ms * 1e3:.0f} us, the rest of a layer {layer_ms * 1e3:.0f} us, "
            f"a read {extra_us:.0f} us more",
            file=sys.stderr,
        )
        rows = []
        for number, (rate, latency, ram, guesses) in enumerate(SETTINGS):
            trace = read_routes(Path(folder) / f"{number}.bin")
            machine = Machine(
                rate, latency + extra_us, depth=8, expert_ms=one_ms, layer_ms=layer_ms
            )
            record = trace.header.record_nbytes
            cache_rows = max(6 + guesses, int(ram * 2**30) // record)
            stats = Simulation(trace.header, machine, Setting(cache_rows, guesses)).replay(trace)
            real = least(measured[number], lambda spent: spent.own_ms)
            wall = least(measured[number], lambda spent: spent.wall_ms)
            found = statistics.median(one.total_ms for one in stats)
            rows.append(
                [
                    f"{rate:g}",
                    f"{ram:g}",
                    str(guesses),
                    f"{wall:.2f}",
                    f"{real:.2f}",
                    f"{found:.2f}",
                    f"{found / real - 1:+.1%}",
                ]
            )
    header = ["drive GiB/s", "cache.ram_gib", "P", "wall ms", "own ms", "simulated ms", "error"]
    print(format_table(header, rows))
    print(json.dumps([dict(zip(header, row, strict=True)) for row in rows]))


if __name__ == "__main__":
    main()
