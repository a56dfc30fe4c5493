"""How fast a machine would decode that is only described: a recorded or generated route, replayed with a clock."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from typing import Any

from conf.schema import RunConfig
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.policies import count_hits, most_hits
from runtime.experts.routes import Kind, RouteHeader, RouteTrace, read_routes
from runtime.experts.schedule import depth_of
from runtime.experts.spread import drive_configs, weights_of
from runtime.locality import Locality, generate
from runtime.simulator import Machine, Setting, Simulation, cache_maker
from runtime.stats import Rates, RunSummary, TokenStats, summarize
from runtime.units import GIB, MIB, format_nbytes
from stages.bench_report import changed_keys, format_table
from stages.files import absolute, write_atomically
from stages.parts import limits_nbytes
from stages.stage import Stage, StageContext

log = logging.getLogger("stages")

RESULT_NAME = "simulate.json"  # in the folder of the run


def run(ctx: StageContext) -> None:
    """Replay, print the table, and leave every number in the run's folder."""
    cfg = ctx.cfg
    trace = load_trace(cfg)
    setting = plan(cfg, trace.header)
    summary, hits = simulate(cfg, trace, setting)
    print(format_simulation(cfg, trace, setting, summary, hits), flush=True)
    if ctx.runner.run_dir is None:
        return
    path = ctx.runner.run_dir / RESULT_NAME
    document = {
        "summary": summary.to_dict(),
        "decode_tok_s": {"median": summary.decode_tok_s},
        "demand": None if hits is None else asdict(hits),
        "model": asdict(trace.header),
        "setting": asdict(setting) | {"spread": setting.spread.value},
        "machine": asdict(machine_of(cfg)),
        "policy": policy_of(cfg),
        "changed": changed_keys(cfg),
    }
    write_atomically(path, json.dumps(document, indent=1) + "\n")
    print(f"all numbers: {path}", file=sys.stderr)


def load_trace(cfg: RunConfig) -> RouteTrace:
    """Return the recorded or the generated route. Raises UserError when it has no token to count."""
    simulate = cfg.simulate
    if simulate.routes is None:
        header = RouteHeader(
            "generated",
            simulate.num_layers,
            simulate.num_experts,
            simulate.top_k,
            simulate.record_nbytes,
        )
        locality = Locality(simulate.skew, simulate.persistence, simulate.recall, simulate.best_two)
        return generate(
            header, locality, cfg.bench.warmup_tokens + cfg.bench.tokens, cfg.bench.seed
        )
    trace = read_routes(absolute(simulate.routes))
    if trace.num_tokens <= cfg.bench.warmup_tokens:
        raise UserError(
            f"{simulate.routes} has {trace.num_tokens} decoded tokens, bench.warmup_tokens="
            f"{cfg.bench.warmup_tokens} leaves none to count",
            f"set bench.warmup_tokens={max(0, trace.num_tokens // 4)}, or record more tokens",
        )
    return trace


def machine_of(cfg: RunConfig) -> Machine:
    """Return the machine that the config describes. Raises UserError when it has no drive."""
    simulate, drive = cfg.simulate, cfg.hw.drive
    rates = [own.simulate_gib_s for own in drive_configs(cfg.hw)] or [drive.simulate_gib_s]
    if not all(rates):
        raise UserError(
            "a drive of the imagined machine has no rate",
            "set hw.drive.simulate_gib_s=8.2 (GiB/s), or simulate_gib_s of each of hw.drives, and "
            "hw.drive.simulate_latency_us if it matters",
        )
    if (simulate.head_nbytes or simulate.cpu_gib_s) and not simulate.link_gib_s:
        raise UserError(
            "simulate.head_nbytes and simulate.cpu_gib_s are of a machine with a GPU",
            "set simulate.link_gib_s=26.6 (GiB/s from RAM to the GPU), or leave them out",
        )
    return Machine(
        drive_gib_s=sum(rates),
        latency_us=drive.simulate_latency_us,
        depth=simulate.drive_depth,
        is_shared=simulate.is_shared,
        link_gib_s=simulate.link_gib_s,
        in_place_gib_s=simulate.in_place_gib_s,
        vram_gib_s=simulate.vram_gib_s,
        expert_ms=simulate.expert_us / 1e3,
        layer_ms=simulate.layer_us / 1e3,
        host_ms=simulate.host_us / 1e3,
        host_after_ms=simulate.host_after_us / 1e3,
        token_ms=simulate.token_us / 1e3,
        drives_gib_s=tuple(rates) if cfg.hw.drives else (),
        cpu_gib_s=simulate.cpu_gib_s,
        cpu_ms=simulate.cpu_us / 1e3,
        ram_gib_s=simulate.ram_gib_s,
        head_nbytes=simulate.head_nbytes,
        head_cpu_gib_s=simulate.head_cpu_gib_s,
    )


def policy_of(cfg: RunConfig) -> str:
    """Return who leaves the RAM tier."""
    chosen = cfg.simulate.policy
    return cfg.cache.policy.value if chosen is None else chosen.value


def plan(cfg: RunConfig, header: RouteHeader) -> Setting:
    """Return how many experts the imagined machine keeps, and how it reads.

    cache.ram_gib as it is; null: every expert, or what hw.ram_gib less hw.reserve_gib holds. VRAM slots only where
    cache.vram_gib is given.
    """
    experts = header.num_layers * header.num_experts
    ram_gib = cfg.cache.ram_gib
    if ram_gib is None and cfg.hw.ram_gib is not None:
        ram_gib = max(0.0, cfg.hw.ram_gib - cfg.hw.reserve_gib)
    rows = experts if ram_gib is None else int(ram_gib * GIB) // header.record_nbytes
    vram_gib = cfg.cache.vram_gib or 0.0
    depth = depth_of(cfg.hw.drive, header.record_nbytes, len(cfg.hw.drives))
    return Setting(
        cache_rows=min(experts, max(rows, header.top_k + cfg.prefetch.experts)),
        prefetch_experts=cfg.prefetch.experts,
        early_copies=cfg.prefetch.copy,
        kept_slots=min(experts, int(vram_gib * GIB) // header.record_nbytes),
        reads_in_place=cfg.simulate.reads_in_place,
        sweep_rows=cfg.cache.sweep_experts,
        window=depth.window,
        pieces=depth.pieces,
        piece_kib=cfg.hw.drive.piece_kib,
        spread=cfg.hw.spread,
        shares=tuple(simulated_shares(cfg)),
        limits_nbytes=tuple(limits_nbytes(cfg)),
    )


def simulated_shares(cfg: RunConfig) -> list[float]:
    """Return what each of hw.drives is given of stripes and slices: as told, else by the rates that are imagined."""
    if any(drive.share is not None or drive.rate_gib_s is not None for drive in cfg.hw.drives):
        return weights_of(cfg.hw)
    return [drive.simulate_gib_s for drive in drive_configs(cfg.hw)]


@dataclass(frozen=True, slots=True)
class DemandHits:
    """Shares of all decoded tokens' experts that a cache of this size finds, from an empty start, without guesses."""

    policy: float
    bound: float  # of the best that could be done


def simulate(
    cfg: RunConfig, trace: RouteTrace, setting: Setting
) -> tuple[RunSummary, DemandHits | None]:
    """Replay a trace; returns the figures of the counted tokens, and how far the policy is from the optimum.

    The latter is None where VRAM keeps experts too: then the RAM tier does not see every request.
    """
    machine = machine_of(cfg)
    maker = cache_maker(policy_of(cfg), trace)
    tokens = Simulation(trace.header, machine, setting, maker).replay(trace)
    first = cfg.bench.warmup_tokens
    counted: list[TokenStats] = tokens[first : first + cfg.bench.tokens]
    dense_nbytes = 0  # computing is given as times
    rates = Rates(machine.drive_gib_s, 0.0, machine.link_gib_s)
    summary = summarize(None, counted, 0, dense_nbytes, rates)
    if setting.kept_slots:
        return summary, None
    requests = [
        [ExpertKey(step.layer, expert) for expert in step.experts]
        for step in trace.steps
        if step.kind is Kind.decode
    ]
    uses = max(1, sum(map(len, requests)))
    rows = setting.cache_rows
    return summary, DemandHits(
        count_hits(maker(rows), requests) / uses, most_hits(requests, rows) / uses
    )


def format_simulation(
    cfg: RunConfig,
    trace: RouteTrace,
    setting: Setting,
    summary: RunSummary,
    hits: DemandHits | None,
) -> str:
    """Return all that is printed."""
    s, header = summary, trace.header
    tokens = max(1, s.generated_tokens)
    cells: dict[str, Any] = {
        "policy": policy_of(cfg),
        "tok/s": f"{s.decode_tok_s:.2f}",
        "p50 ms": f"{s.inter_token_p50_ms:.2f}",
        "p95 ms": f"{s.inter_token_p95_ms:.2f}",
        "drive ms": f"{s.drive_wait_ms_per_token:.2f}",
        "device ms": f"{s.device_wait_ms_per_token:.2f}",
        "host ms": f"{max(0.0, s.host_ms_per_token):.2f}",
        "MiB read": f"{s.read_nbytes_per_token / MIB:.2f}",
        "wasted": f"{s.counters.wasted_nbytes / tokens / MIB:.2f}",
        "hits": f"{s.hit_rate:.1%}",
        "late": f"{s.counters.late / max(1, s.counters.lookups):.1%}",
        "floor ms": f"{s.floor_ms:.2f}",
        "efficiency": f"{s.efficiency:.1%}",
    }
    source = cfg.simulate.routes or "generated routes"
    lines = [
        format_table(list(cells), [list(cells.values())]),
        f"{source}: {s.generated_tokens} tokens counted of {trace.num_tokens}; {header.num_layers} layers of "
        f"{header.num_experts} experts of {format_nbytes(header.record_nbytes)}, {header.top_k} a token; "
        f"{setting.cache_rows} in RAM, {setting.kept_slots} in VRAM",
    ]
    if hits is not None:
        lines.append(
            f"from an empty start and without guesses {policy_of(cfg)} finds {hits.policy:.1%} of all "
            f"experts, no policy more than {hits.bound:.1%}"
        )
    return "\n".join([*lines, *format_inputs(cfg, setting)])


def format_inputs(cfg: RunConfig, setting: Setting) -> list[str]:
    """Return everything that was assumed of machine, engine and routes, a line each."""
    sim, machine = cfg.simulate, machine_of(cfg)
    serving = "share the rate" if machine.is_shared else "one after the other"
    lines = [
        f"drive: {machine.drive_gib_s:g} GiB/s, {machine.latency_us:g} us latency, {machine.depth} reads at once, "
        f"{serving}; {setting.window} experts in flight, {setting.pieces} pieces each of at least "
        f"{setting.piece_kib} KiB",
        f"guesses of the next layer: {setting.prefetch_experts} read from the drive, {setting.early_copies} copied to "
        "VRAM",
    ]
    if machine.link_gib_s:
        way = "read in place" if setting.reads_in_place else "copied to slots"
        vram = f"{machine.vram_gib_s:g} GiB/s" if machine.vram_gib_s else "in no time"
        lines.append(
            f"link: copies {machine.link_gib_s:g} GiB/s, in place {machine.from_ram_gib_s:g}; experts in RAM are "
            f"{way}; from VRAM {vram}"
        )
        lines += format_cpu_inputs(machine)
    lines.append(
        f"times: a layer beside its experts {sim.layer_us:g} us, an expert at least {sim.expert_us:g}, host "
        f"{sim.host_us:g} before a layer's experts and {sim.host_after_us:g} behind their launch, once a token "
        f"{sim.token_us:g}"
    )
    if cfg.simulate.routes is None:
        lines.append(
            f"routes: skew {sim.skew:g}, persistence {sim.persistence:g}, recall {sim.recall:g}, first two guesses "
            f"{sim.best_two:g}, seed {cfg.bench.seed}"
        )
    lines.append(f"not counted: {cfg.bench.warmup_tokens} tokens that warm the cache")
    return lines


def format_cpu_inputs(machine: Machine) -> list[str]:
    """Return what was assumed of the CPU beside a GPU, and of a head in RAM."""
    ram = f"{machine.ram_gib_s:g} GiB/s for all" if machine.ram_gib_s else "enough for all"
    computes = "computes no expert"
    if machine.cpu_gib_s:
        computes = f"experts in RAM at {machine.cpu_gib_s:g} GiB/s or what link and drive leave"
    lines = [f"CPU: {computes}, {machine.cpu_ms * 1e3:g} us to start for a layer; RAM gives {ram}"]
    if machine.head_nbytes:
        lines.append(
            f"head: {format_nbytes(machine.head_nbytes)} in RAM ({machine.head_nbytes} bytes), over the link at "
            f"{machine.from_ram_gib_s:g} GiB/s, by the CPU at {machine.head_cpu_gib_s:g}: {machine.head_s * 1e3:.1f} ms"
        )
    return lines


STAGE = Stage(name="simulate", run=run, is_endpoint=True)
