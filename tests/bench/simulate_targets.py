"""What the CPU's part of experts and head is worth on the published machine, against the rates that are wanted.

    python tests/bench/simulate_targets.py [--quick]

Each row is `python run.py stages=[simulate]` with what stands in it and in COMMON; every other input is in
`conf/simulate/*_nvmoe_rtx5060.yaml`. Takes about three minutes; --quick leaves the sensitivity out. Not collected by
pytest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from conf.schema import RunConfig, load
from runtime.stats import RunSummary
from stages.bench_report import format_table
from stages.simulate import load_trace, plan, simulate

COMMON = (
    "bench.warmup_tokens=300", "bench.tokens=120", "cache.ram_gib=14.9", "cache.policy=lfu",
)  # fmt: skip
QWEN = (
    "simulate=qwen_nvmoe_rtx5060", "cache.vram_gib=0.626", "prefetch.experts=2", "prefetch.copy=5",
    "hw.drive.simulate_gib_s=8.2",
)  # fmt: skip
DEEPSEEK = (
    "simulate=deepseek_nvmoe_rtx5060",
    "prefetch.experts=1",
    "prefetch.copy=2",
    "hw.drive.simulate_gib_s=8.2",
)
TWO = (
    "simulate=deepseek_nvmoe_rtx5060",
    "prefetch.experts=2",
    "prefetch.copy=4",
    "hw.drive.simulate_gib_s=16.4",
)
SEEDS = range(3)


@dataclass(frozen=True)
class Target:
    """A rate that is wanted, and what stands for the machine without the CPU and with it."""

    name: str
    tok_s: float
    settings: tuple[str, ...]
    cpu_gib_s: float  # six cores with AVX2, experts
    has_head: bool = False

    def experts(self, rate: float | None = None) -> list[str]:
        return [f"simulate.cpu_gib_s={self.cpu_gib_s if rate is None else rate}"]


HEAD = ["simulate.head_cpu_gib_s=100"]  # six cores could; the RAM gives less
TARGETS = (
    Target("Qwen, 16 GB", 19.0, QWEN, 20.0),
    Target("DeepSeek, 16 GB", 3.0, DEEPSEEK, 16.0, has_head=True),
    Target("DeepSeek, 16 GB, two drives", 5.0, TWO, 16.0, has_head=True),
)


def run(settings: Sequence[str]) -> RunSummary:
    """Simulate one setting."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = load(compose("config", ["stages=[simulate]", *COMMON, *settings]))
    trace = load_trace(cfg)
    return simulate(cfg, trace, plan(cfg, trace.header))[0]


def variants(target: Target, is_quick: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield names and settings: each mechanism alone, all of them, then all with other rates and other routes."""
    everything = [*target.experts(), *(HEAD if target.has_head else [])]
    yield "without the CPU", []
    yield "CPU experts", target.experts()
    if target.has_head:
        yield "CPU head", HEAD
        yield "both", everything
    if is_quick:
        return
    yield "both, RAM 45 GiB/s", [*everything, "simulate.ram_gib_s=45"]
    yield "both, RAM 67 GiB/s", [*everything, "simulate.ram_gib_s=67"]
    for factor in (0.5, 2.0):
        rate = factor * target.cpu_gib_s
        yield f"both, experts at {rate:g} GiB/s", [*everything, *target.experts(rate)]
    for seed in SEEDS:
        yield f"both, seed {seed}", [*everything, f"bench.seed={seed}"]


def main() -> None:
    is_quick = "--quick" in sys.argv[1:]
    ConfigStore.instance().store("schema", RunConfig)
    rows = []
    for target in TARGETS:
        for name, settings in variants(target, is_quick):
            s = run([*target.settings, *settings])
            rows.append(
                [
                    f"{target.name}: {name}", f"{s.decode_tok_s:.2f}", f"{target.tok_s:g}",
                    f"{s.decode_tok_s / target.tok_s:.1%}", f"{s.drive_wait_ms_per_token:.1f}",
                    f"{s.device_wait_ms_per_token:.1f}", f"{s.cpu_ms_per_token:.1f}", f"{s.cpu_experts_per_token:.1f}",
                ]
            )  # fmt: skip
    header = ["", "tok/s", "wanted", "of it", "drive ms", "device ms", "CPU ms", "its experts"]
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
