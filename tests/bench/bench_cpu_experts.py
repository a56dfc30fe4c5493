"""How fast CPU cores compute FP4 experts of one token: GiB/s of expert bytes by threads, compiled and in plain torch.

    python tests/bench/bench_cpu_experts.py --threads 1,2

Full shapes: Qwen (NVFP4, a record of 2.76 MB, ten a layer) and DeepSeek (MXFP4, 18.8 MB, six). As many records as no
cache holds, taken in turn; the median of several calls and, for a machine that does other work, the best. Not collected
by pytest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kernels.formats import MX_GROUP, NVFP4_GROUP
from runtime.models.cpu_experts import Mxfp4Compute, Nvfp4Compute, compiled_kernels
from runtime.models.deepseek_matrices import expert_matrices
from runtime.units import GIB

SHAPES = {"qwen": (2560, 640, 10, NVFP4_GROUP), "deepseek": (5120, 2304, 6, MX_GROUP)}
RECORDS_NBYTES = 2**29
CPU = torch.device("cpu")


def make_compute(name: str, kernels):
    hidden, intermediate, top_k, _ = SHAPES[name]
    if name == "qwen":
        scales = torch.full((1, 512, 3), 1e-3)
        return Nvfp4Compute(scales, top_k, hidden, intermediate, torch.bfloat16, CPU, kernels)
    codes_nbytes = 3 * hidden * intermediate // 2

    def cut(key, record):
        shapes = (intermediate, hidden), (hidden, intermediate), (intermediate, hidden)
        codes = record[:codes_nbytes].view(3, -1)
        scales = record[codes_nbytes:].view(3, -1)
        return expert_matrices(
            [c.view(rows, -1) for c, (rows, _) in zip(codes, shapes, strict=True)],
            [s.view(rows, -1) for s, (rows, _) in zip(scales, shapes, strict=True)],
        )

    offsets = 0, codes_nbytes
    return Mxfp4Compute(top_k, hidden, intermediate, 7.0, CPU, lambda key: offsets, cut, kernels)


def measure(name: str, kernels, threads: int, count: int, calls: int) -> tuple[float, float]:
    """Return GiB/s of `calls` calls of `count` experts: median and best."""
    hidden, intermediate, top_k, group = SHAPES[name]
    nbytes = 3 * hidden * intermediate // 2 + 3 * hidden * intermediate // group
    records = torch.randint(0, 120, (RECORDS_NBYTES // nbytes, nbytes), dtype=torch.uint8)
    compute = make_compute(name, kernels)
    if kernels is None:
        torch.set_num_threads(threads)
    else:
        assert compute.set_threads(threads) == threads, "fewer cores than threads"
    compute.x.normal_()
    out = torch.empty(top_k, hidden)
    seconds = []
    for number in range(calls + 1):
        some = [records[(number * count + i) % len(records)] for i in range(count)]
        started = time.perf_counter()
        compute.run(0, range(count), some, range(count), out)
        seconds.append(time.perf_counter() - started)
    total_gib = count * nbytes / GIB
    return total_gib / statistics.median(seconds[1:]), total_gib / min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", default="1,2", help="several, with commas between")
    parser.add_argument("--calls", type=int, default=15)
    arguments = parser.parse_args()
    rows = []
    for threads in map(int, arguments.threads.split(",")):
        for name, (_, _, top_k, _) in SHAPES.items():
            for kind, kernels in (("compiled", compiled_kernels()), ("torch", None)):
                if kind == "compiled" and kernels is None:
                    continue
                for count in (1, top_k // 2):
                    calls = arguments.calls if kernels is not None else min(9, arguments.calls)
                    rates = measure(name, kernels, threads, count, calls)
                    rows.append([threads, name, kind, count, *(round(rate, 2) for rate in rates)])
                    median, best = rates
                    print(
                        f"{threads} threads, {name}, {kind}, {count} experts: {median:.2f} GiB/s, best {best:.2f}",
                        flush=True,
                    )
    print(
        json.dumps(
            {
                "columns": ["threads", "model", "kind", "experts", "gib_s", "best_gib_s"],
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
