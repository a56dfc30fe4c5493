"""Hold RAM until stdin ends, so that everybody else has only the rest: `peers.py --fill-ram`, without a cgroup.

    python tests/bench/peers_ballast.py NBYTES

Without swap, which is checked, memory that was written to stays. When memory runs out the kernel ends this process
first. Prints `held` when all of it is there. Not collected by pytest.
"""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

PART_NBYTES = 2**28
THREADS = 8


def main() -> None:
    nbytes = int(sys.argv[1])
    _, *swaps = Path("/proc/swaps").read_text().splitlines()
    if swaps:
        sys.exit(f"error: this machine has swap ({swaps[0].split()[0]}): nothing would be held")
    Path("/proc/self/oom_score_adj").write_text("1000")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(memory, dtype=torch.uint8)
    torch.set_num_threads(1)
    with ThreadPoolExecutor(THREADS) as pool:
        parts = (held[at : at + PART_NBYTES] for at in range(0, nbytes, PART_NBYTES))
        list(pool.map(lambda part: part.fill_(1), parts))
    print("held", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
