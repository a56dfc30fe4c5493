"""When the experts of one layer arrive, for several windows and pieces: the first, the middle one, the last.

    python tests/bench/bench_reads.py --folder /fast/drive

Reads ten random records of 2.76 MB at a time from a file of random bytes, as decoding does without a cache, with direct
reads. Prints milliseconds after the request (median over layers) and the rate. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.schema import DriveConfig
from runtime.experts.arena import HostArena
from runtime.experts.layout import Span
from runtime.experts.reader import DirectReader

RECORD_NBYTES, ROUTE, NUM_RECORDS = 2_764_800, 10, 512


def measure(file: Path, window: int, pieces: int, layers: int) -> list[float]:
    """Return median milliseconds until the first, fifth and last record, and the rate in GiB/s."""
    reader = DirectReader([file], DriveConfig(window=window, pieces=pieces))
    arena = HostArena(ROUTE, RECORD_NBYTES)
    rng, times = random.Random(0), []
    for _ in range(layers):
        arrived: SimpleQueue[object] = SimpleQueue()
        started = time.perf_counter()
        for row, record in enumerate(rng.sample(range(NUM_RECORDS), ROUTE)):
            span = Span(0, record * RECORD_NBYTES, RECORD_NBYTES, RECORD_NBYTES, 0)
            reader.submit(row, [span], arena.view(row), on_done=arrived.put)
        moments = []
        for _ in range(ROUTE):
            arrived.get()
            moments.append((time.perf_counter() - started) * 1e3)
        times.append((moments[0], moments[ROUTE // 2 - 1], moments[-1]))
    reader.close()
    medians = [sorted(column)[layers // 2] for column in zip(*times, strict=True)]
    return [*medians, ROUTE * RECORD_NBYTES / medians[-1] * 1e3 / 2**30]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--layers", type=int, default=60)
    args = parser.parse_args()
    file = args.folder / "bench_reads.bin"
    with open(file, "wb") as out:
        for _ in range(NUM_RECORDS):
            out.write(os.urandom(RECORD_NBYTES))
        os.fsync(out.fileno())
    try:
        for window, pieces in (
            (1, 1),
            (1, 4),
            (1, 8),
            (2, 1),
            (2, 4),
            (2, 8),
            (4, 4),
            (10, 1),
            (10, 4),
        ):
            first, middle, last, rate = measure(file, window, pieces, args.layers)
            print(f"window {window:2} pieces {pieces}: first {first:6.1f} ms, fifth {middle:6.1f}, last {last:6.1f}, "
                  f"{rate:.2f} GiB/s", flush=True)  # fmt: skip
    finally:
        file.unlink()


if __name__ == "__main__":
    main()
