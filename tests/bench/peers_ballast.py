"""Hold all RAM but a part until stdin ends: `peers.py --fill-ram`, where no memory cgroup may be made.

    python tests/bench/peers_ballast.py NBYTES_LEFT

Without swap, which is checked, memory that was written to stays. A virtual machine may be given more RAM when it is
short of it: that is filled, too, whenever it comes. When memory runs out the kernel ends this process first. Prints
`held` and the size when no more has come for a while. Not collected by pytest.
"""

from __future__ import annotations

import mmap
import select
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runtime.hardware import available_ram_nbytes

PART_NBYTES = 2**28
THREADS = 8
LOOK_SECONDS, QUIET_LOOKS = 0.5, 4


def main() -> None:
    left_nbytes = int(sys.argv[1])
    _, *swaps = Path("/proc/swaps").read_text().splitlines()
    if swaps:
        sys.exit(f"error: this machine has swap ({swaps[0].split()[0]}): nothing would be held")
    Path("/proc/self/oom_score_adj").write_text("1000")
    torch.set_num_threads(1)
    held: list[torch.Tensor] = []
    quiet = 0
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            nbytes = available_ram_nbytes()[0] - left_nbytes
            count = min(THREADS, nbytes // PART_NBYTES)
            if count > 0:
                held += pool.map(filled, [PART_NBYTES] * count)
                quiet = 0
                continue
            quiet += 1
            if quiet == QUIET_LOOKS:
                print(f"held {len(held) * PART_NBYTES / 2**30:.2f} GiB", flush=True)
            if select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
                return


def filled(nbytes: int) -> torch.Tensor:
    """Return memory that the kernel had to give."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


if __name__ == "__main__":
    main()
