"""Time of each kernel of a decoded DeepSeek token at the released shape, and of other tilings of the products.

    python tests/bench/bench_deepseek_kernels.py [--tilings]

Random weights, contents mean nothing. Each time is the median of 30 launches, each behind 64 MiB of other traffic, so
that no weight is found in a cache. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from kernels import deepseek_linear, deepseek_moe, deepseek_token, mxfp4_expert
from runtime.experts.arena import HostArena

HIDDEN, INTERMEDIATE, EXPERTS = 5120, 2304, 6
CODES, SCALES = 3 * HIDDEN * INTERMEDIATE // 2, 3 * HIDDEN * INTERMEDIATE // 32
SHAPES = {
    "wq_a": (1280, 5120, 1), "wq_b": (32768, 1280, 1), "wkv": (512, 5120, 1), "wo_a": (8192, 4096, 8),
    "wo_b": (5120, 8192, 1), "index wq_b": (4096, 1280, 1), "shared w2": (5120, 2304, 1), "engram": (25600, 6144, 1),
}  # fmt: skip


def cuda(*shape, dtype=torch.bfloat16):
    if dtype is torch.uint8:
        return torch.randint(100, 120, shape, dtype=dtype, device="cuda")
    return torch.randn(*shape, device="cuda").to(dtype)


FLUSH = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")


def time_us(run):
    """Microseconds of one launch."""
    run()
    found = []
    for _ in range(30):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        FLUSH.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def show(name, us, nbytes=0):
    rate = f"{nbytes / us / 1e3:8.1f} GB/s" if nbytes else ""
    print(f"{name:44} {us:9.1f} us {rate}", flush=True)


def fp8(name):
    rows, columns, groups = SHAPES[name]
    weight = cuda(rows, columns).to(torch.float8_e4m3fn)
    scale = cuda(rows // 32, columns // 32, dtype=torch.uint8)
    x, out = cuda(groups * columns), cuda(rows)
    return lambda: deepseek_linear.fp8_linear(x, weight, scale, out, groups), rows * columns


def experts(place):
    """Six experts of one layer in VRAM, or in pinned RAM read in place, off by eight bytes."""
    nbytes = CODES + SCALES + 4096
    if place == "vram":
        records = [cuda(nbytes, dtype=torch.uint8) for _ in range(EXPERTS)]
    else:
        arena = HostArena(EXPERTS, nbytes)
        arena.pin()
        for record in arena.records:
            record[:nbytes] = cuda(nbytes, dtype=torch.uint8).cpu()
        records = arena.records
    table = torch.tensor([[r.data_ptr() + 8, r.data_ptr() + 16 + CODES] for r in records]).cuda()
    x, weights = cuda(HIDDEN), cuda(EXPERTS, dtype=torch.float32)
    inner, out = cuda(EXPERTS, INTERMEDIATE), cuda(EXPERTS, HIDDEN)
    return lambda: mxfp4_expert.mxfp4_experts(x, table, weights, inner, out, 10.0, 8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tilings", action="store_true", help="try other tilings of the products")
    args = parser.parse_args()
    for name in SHAPES:
        run, nbytes = fp8(name)
        show(f"fp8 {name}", time_us(run), nbytes)
    x, rounded = cuda(HIDDEN), cuda(HIDDEN)
    show("act_round", time_us(lambda: deepseek_linear.act_round(x, rounded)))
    pair = [
        (
            cuda(INTERMEDIATE, HIDDEN).to(torch.float8_e4m3fn),
            cuda(INTERMEDIATE // 32, HIDDEN // 32, dtype=torch.uint8),
        )
        for _ in range(2)
    ]
    inner = cuda(INTERMEDIATE)
    us = time_us(lambda: deepseek_linear.fp8_swiglu(x, *pair, inner, 10.0))
    show("shared w1, w3", us, 2 * INTERMEDIATE * HIDDEN)
    router, logits = cuda(384, HIDDEN), cuda(384, dtype=torch.float32)
    show(
        "router, fp64",
        time_us(lambda: deepseek_linear.steady_linear(x, router, logits)),
        2 * router.numel(),
    )
    us = time_us(lambda: deepseek_linear.steady_linear(x, router, logits, is_double=False))
    show("router, fp32", us, 2 * router.numel())
    values, wkv = cuda(512, dtype=torch.float32), cuda(512, HIDDEN)
    show(
        "compressor, fp64",
        time_us(lambda: deepseek_linear.steady_linear(x, wkv, values)),
        2 * wkv.numel(),
    )
    head = torch.zeros(32768, HIDDEN, dtype=torch.bfloat16).pin_memory()
    out = cuda(32768, dtype=torch.float32)
    us = time_us(lambda: deepseek_linear.steady_linear(x, head, out, is_double=False))
    show("a quarter of the head, in place", us, 2 * head.numel())
    streams, middle, y = cuda(4, HIDDEN), cuda(4, HIDDEN), cuda(HIDDEN)
    fn = cuda(24, 4 * HIDDEN, dtype=torch.float32)
    partials = cuda(*deepseek_token.partials_shape(4, HIDDEN), dtype=torch.float64)
    fp32 = {
        n: cuda(*s, dtype=torch.float32)
        for n, s in {
            "pre": (4,),
            "after": (4,),
            "post": (4,),
            "comb": (4, 4),
            "scale": (3,),
            "base": (24,),
        }.items()
    }
    us = time_us(
        lambda: deepseek_token.write_streams(
            y, streams, fp32["post"], fp32["comb"], middle, fn, partials
        )
    )
    show("write_streams with mixes", us, 4 * fn.numel())
    us = time_us(
        lambda: deepseek_token.read_streams(
            streams, fp32["pre"], y, x, 1e-20, partials, fp32["scale"], fp32["base"], fp32["after"], fp32["post"],
            fp32["comb"], 20, 1e-6,
        )
    )  # fmt: skip
    show("read_streams with mixes", us)
    weights, route = cuda(6, dtype=torch.float32), torch.zeros(12, dtype=torch.int64, device="cuda")
    us = time_us(
        lambda: deepseek_moe.route_token(logits, logits, logits, logits, route, weights, 1.5, 6)
    )
    show("route", us)
    nbytes = EXPERTS * (CODES + SCALES)
    for place in ("vram", "ram"):
        show(f"six experts, {place}", time_us(experts(place)), nbytes)
    if args.tilings:
        tilings(nbytes)


def tilings(nbytes):
    for rows, blocks, warps in itertools.product((8, 16, 32), (8, 16), (1, 4)):
        deepseek_linear.ROWS, deepseek_linear.TILE_BLOCKS, deepseek_linear.WARPS = (
            rows,
            blocks,
            warps,
        )
        times = {name: time_us(fp8(name)[0]) for name in ("wq_a", "wq_b", "wo_a", "wo_b")}
        print(
            f"rows {rows:2} blocks {blocks:2} warps {warps}: "
            + ", ".join(f"{n} {t:.1f}" for n, t in times.items()),
            flush=True,
        )
    runs = {place: experts(place) for place in ("vram", "ram")}
    for blocks, gate_warps, (down_rows, down_warps) in itertools.product(
        (8, 16, 32), (4, 8), ((16, 4), (8, 2))
    ):
        deepseek_linear.TILE_BLOCKS = blocks
        mxfp4_expert.GATE_WARPS, mxfp4_expert.DOWN_ROWS, mxfp4_expert.DOWN_WARPS = (
            gate_warps,
            down_rows,
            down_warps,
        )
        times = {place: time_us(run) for place, run in runs.items()}
        print(
            f"blocks {blocks:2} gate warps {gate_warps} down {down_rows} x {down_warps}: "
            + ", ".join(f"{p} {t:.0f} us" for p, t in times.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
