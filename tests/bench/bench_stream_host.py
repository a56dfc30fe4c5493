"""What streaming costs the host: processor time and context switches of a token whose experts all come from the drive.

    python tests/bench/bench_stream_host.py --window 2,4,8 --pieces 1,4

Records are so small, and the simulated drive so slow, that a read takes as long as one of a released expert at
8.2 GiB/s, and that copying bytes takes no time: what is left is the interpreter's and the kernel's own work. Not
collected by pytest.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.schema import DirectIo, DriveConfig
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.reader import DirectReader
from runtime.experts.streamer import ExpertStreamer
from runtime.units import GIB, PAGE_NBYTES

LAYERS, EXPERTS, TOP_K = 48, 64, 10
RECORD_NBYTES = 4 * PAGE_NBYTES
EXPERT_NBYTES, GIB_S = 2_764_800, 8.2  # of the release, and its drive


class Layout:
    """Small records, one after the other in one file."""

    num_layers, num_experts, record_nbytes = LAYERS, EXPERTS, RECORD_NBYTES

    def __init__(self, file: Path) -> None:
        self.files = (file,)

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        at = (key.layer * EXPERTS + key.expert) * RECORD_NBYTES
        return (Span(0, at, RECORD_NBYTES, RECORD_NBYTES, 0),)


def measure(file: Path, window: int, pieces: int, tokens: int) -> str:
    """Return a row: milliseconds of a token, of the drive, of processors, and context switches."""
    config = DriveConfig(
        DirectIo.buffered, window, pieces, PAGE_NBYTES // 1024,
        simulate_gib_s=GIB_S * RECORD_NBYTES / EXPERT_NBYTES,
    )  # fmt: skip
    layout = Layout(file)
    streamer = ExpertStreamer(layout, DirectReader(layout.files, config), TOP_K + 2, 1, 0)  # type: ignore[arg-type]
    rng = random.Random(0)
    try:
        for number in range(tokens + 2):
            if number == 2:
                before = resource.getrusage(resource.RUSAGE_SELF)
                started, decoding = time.perf_counter(), time.thread_time()
            for layer in range(LAYERS):
                for wave in streamer.waves(layer, rng.sample(range(EXPERTS), TOP_K)):
                    del wave
        wall, decoding = time.perf_counter() - started, time.thread_time() - decoding
        after = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        streamer.close()
    processors = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    switches = after.ru_nvcsw - before.ru_nvcsw
    drive_ms = LAYERS * TOP_K * EXPERT_NBYTES / (GIB_S * GIB) * 1e3
    return (
        f"{window} x {pieces}: {wall / tokens * 1e3:.0f} ms a token, drive {drive_ms:.0f}, processors "
        f"{processors / tokens * 1e3:.0f}, decoding thread {decoding / tokens * 1e3:.1f}, "
        f"switches {switches / tokens:,.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--window", default="2,4,8")
    parser.add_argument("--pieces", default="1,4")
    parser.add_argument("--tokens", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experts"
        with open(file, "wb") as out:
            out.truncate(LAYERS * EXPERTS * RECORD_NBYTES)
        for window in map(int, args.window.split(",")):
            for pieces in map(int, args.pieces.split(",")):
                print(measure(file, window, pieces, args.tokens), flush=True)


if __name__ == "__main__":
    main()
