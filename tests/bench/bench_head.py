"""How fast the CPU computes DeepSeek's head (bf16, summed in fp32), by threads, with and without numba.

`python tests/bench/bench_head.py [--vocab 129280] [--hidden 5120] [--threads 1,2,4,8]`
"""

from __future__ import annotations

import argparse
import statistics

import torch

from kernels.cpu_matvec import has_numba
from runtime.models.head_split import HeadSplit
from runtime.units import GIB

REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=129_280)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--threads", default="1,2")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(64, wanted.hidden, generator=generator).bfloat16()
    weight = row.repeat(-(-wanted.vocab // 64), 1)[: wanted.vocab]
    x, out = torch.randn(wanted.hidden, generator=generator), torch.zeros(wanted.vocab)
    for is_compiled in [False, *([True] if has_numba() else [])]:
        for threads in map(int, wanted.threads.split(",")):
            split = HeadSplit(weight, lambda *_: None, threads)
            split.cpu_rows, split.is_compiled = wanted.vocab, is_compiled
            split.compute(x, out)
            times = [split.compute(x, out) for _ in range(REPEATS)]
            split.close()
            median, least = statistics.median(times), min(times)
            print(
                f"{'numba' if is_compiled else 'torch'}, {threads} threads: {median * 1e3:.1f} ms "
                f"({least * 1e3:.1f} at best), {weight.nbytes / median / GIB:.1f} GiB/s"
            )


if __name__ == "__main__":
    main()
