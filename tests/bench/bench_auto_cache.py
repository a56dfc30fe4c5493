"""The automatic cache size beside a sweep of sizes, under a memory limit that a wrong one runs into. Needs root.

    python tests/bench/bench_auto_cache.py LIMIT_GIB SIZES_GIB -- OVERRIDES of stages=[bench]

SIZES_GIB: as 0.2,0.4,0.8; `null` is put among them. Every point is a process of its own in a cgroup of LIMIT_GIB.
Sizes that the plan would refuse are taken all the same, with hw.reserve_gib=0 and hw.ram_gib at the limit: that is the
cliff. Prints a line for each: tokens a second, hits, bytes read, major faults, how often the limit was met. Not
collected by pytest.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CGROUPS = Path("/sys/fs/cgroup")
GIB = 2**30


@contextmanager
def memory_group(limit_nbytes: int) -> Iterator[Path]:
    """Make a group with a limit, of whichever version rules memory here."""
    is_v1 = (CGROUPS / "memory/memory.limit_in_bytes").exists()
    group = (CGROUPS / "memory" if is_v1 else CGROUPS) / f"nvmoe-bench-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if is_v1 else "memory.max"
        (group / name).write_text(str(limit_nbytes))
        yield group
    finally:
        group.rmdir()


def times_at_limit(group: Path) -> int:
    """Return how often memory had to be taken back because the limit was met."""
    v1 = group / "memory.failcnt"
    if v1.exists():
        return int(v1.read_text())
    events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    return int(events["max"])


def measure(size: str, limit_gib: float, overrides: list[str], is_forced: bool) -> str:
    """Run one point; return its line."""
    words = ["stages=[bench]", "bench.plot=false", *overrides, f"cache.ram_gib={size}"]
    if is_forced:
        words += ["hw.reserve_gib=0", f"hw.ram_gib={limit_gib - 0.001}"]
    with memory_group(int(limit_gib * GIB)) as group, tempfile.TemporaryDirectory() as folder:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt
        done = subprocess.run(
            [sys.executable, "run.py", *words, f"hydra.run.dir={folder}"],
            cwd=ROOT, preexec_fn=enter, capture_output=True, text=True, check=False,
        )  # fmt: skip
        faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt - before
        met = times_at_limit(group)
        name = f"{size}{' (forced)' if is_forced else ''}"
        if done.returncode:
            said = "killed" if done.returncode < 0 else done.stderr.strip().splitlines()[-2][:90]
            return f"{name:16} {said}; limit met {met} times"
        found = json.loads((Path(folder) / "bench.json").read_text())
    rate, total = found["decode_tok_s"], found["total"]
    rows = next(line for line in found["plan"].splitlines() if "expert cache" in line).split()
    size = " ".join(rows[2:4])
    return (
        f"{name:16} cache {size:>11}  {rate['median']:6.2f} tok/s ({rate['min']:.2f}..{rate['max']:.2f})  "
        f"hits {total['hit_rate']:6.1%}  {total['read_nbytes_per_token'] / 2**20:6.1f} MiB a token  "
        f"{faults} major faults, limit met {met} times"
    )


def main() -> None:
    limit_gib, sizes = float(sys.argv[1]), sys.argv[2].split(",")
    overrides = sys.argv[sys.argv.index("--") + 1 :]
    for size in ("null", *sizes):
        line = measure(size, limit_gib, overrides, is_forced=False)
        if "of RAM may be used" in line:  # refused, with both numbers
            line = measure(size, limit_gib, overrides, is_forced=True)
        print(line, flush=True)


if __name__ == "__main__":
    main()
