"""How fast ten full-size experts are computed from pinned RAM and from VRAM, beside the copy's rate.

    python tests/bench/bench_expert_kernel.py

Each layer of a token is one call; 24 sets of records, so that no cache holds them. Not collected by pytest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kernels import nvfp4_expert
from runtime.experts.arena import HostArena

HIDDEN, INTERMEDIATE, EXPERTS, RECORD_NBYTES, SETS = 2560, 640, 10, 2_764_800, 24


def time_ms(run, repeats: int = 5) -> float:
    """Return the median milliseconds of one call over `repeats` rounds of all sets."""
    for i in range(SETS):
        run(i)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for i in range(SETS):
            run(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / SETS)
    return sorted(times)[repeats // 2]


def main() -> None:
    arena = HostArena(SETS * EXPERTS, RECORD_NBYTES)
    arena.rows.random_(0, 0x7F)
    arena.pin()
    slots = arena.rows.cuda()
    x = torch.randn(1, HIDDEN, device="cuda").bfloat16()
    scales = torch.rand(EXPERTS, 3, device="cuda") * 1e-4
    inner = torch.empty(EXPERTS, INTERMEDIATE, device="cuda")
    out = torch.empty(EXPERTS, HIDDEN, device="cuda")
    staging = torch.empty(EXPERTS, RECORD_NBYTES, dtype=torch.uint8, device="cuda")

    def tables(rows: torch.Tensor) -> list[torch.Tensor]:
        starts = [[rows[s * EXPERTS + e].data_ptr() for e in range(EXPERTS)] for s in range(SETS)]
        return [torch.tensor(start, device="cuda") for start in starts]

    def copy(i: int) -> None:
        for e in range(EXPERTS):
            staging[e].copy_(arena.rows[i * EXPERTS + e], non_blocking=True)

    nbytes = EXPERTS * RECORD_NBYTES
    copy_ms = time_ms(copy)
    result: dict[str, float] = {"copy_gb_s": nbytes / copy_ms / 1e6}
    ram, vram = tables(arena.rows), tables(slots)
    for rows in (4, 8, 16, 32):
        for groups in (32, 64, 128, 256):
            nvfp4_expert.BLOCK_ROWS, nvfp4_expert.BLOCK_GROUPS = rows, groups

            def run(i: int, table=ram) -> None:
                nvfp4_expert.nvfp4_experts(x, table[i], scales, inner, out)

            in_ram, in_vram = time_ms(run), time_ms(lambda i: run(i, vram))
            name = f"rows {rows} groups {groups}"
            result[f"{name} ram_gb_s"] = nbytes / in_ram / 1e6
            result[f"{name} vram_gb_s"] = nbytes / in_vram / 1e6
            print(f"{name:22} pinned RAM {in_ram:.3f} ms {nbytes / in_ram / 1e6:6.1f} GB/s   "
                  f"VRAM {in_vram:.3f} ms {nbytes / in_vram / 1e6:7.1f} GB/s", file=sys.stderr)  # fmt: skip
    print(f"copies {copy_ms:.3f} ms {nbytes / copy_ms / 1e6:.1f} GB/s", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
