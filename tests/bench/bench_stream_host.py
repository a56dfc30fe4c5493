"""What streaming costs the host: processor time and context switches of a token whose experts all come from the drive.

    python tests/bench/bench_stream_host.py --window 2,4,8 --pieces 1,4
    python tests/bench/bench_stream_host.py --window 7 --pieces 1 --process --lend 10

Records are so small, and the simulated drive so slow, that a read takes as long as one of a released expert at
8.2 GiB/s, and that copying bytes takes no time: what is left is the interpreter's and the kernel's own work. Not
collected by pytest.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.schema import DirectIo, DriveConfig
from runtime.experts.child_reader import ChildReader
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


LIBC = ctypes.CDLL(None)  # lets the interpreter's lock go for each call
LENT_NBYTES = 2**18  # cleared by a call: some 2 us


class Lent:
    """Gives the interpreter's lock away for a moment and takes it back, as a launch on a GPU does."""

    def __init__(self, calls: int) -> None:
        self._range = range(calls)  # for each record
        self._bytes = ctypes.create_string_buffer(LENT_NBYTES)
        self.took_us: list[float] = []

    def lend(self) -> None:
        clock, clear, target = time.perf_counter_ns, LIBC.memset, self._bytes
        for _ in self._range:
            started = clock()
            clear(target, 0, LENT_NBYTES)
            self.took_us.append((clock() - started) / 1e3)

    def quantile(self, share: float) -> float:
        return sorted(self.took_us)[int(share * len(self.took_us))]


class Spent(NamedTuple):
    """Processor seconds and context switches of a process, so far."""

    seconds: float
    switches: int

    @classmethod
    def of(cls, pid: int) -> Spent:
        seconds, switches = 0.0, 0
        for thread in Path(f"/proc/{pid}/task").iterdir():
            seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
            status = (thread / "status").read_text()
            switches += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        return cls(seconds, switches)


def measure(file: Path, window: int, pieces: int, tokens: int, is_process: bool, calls: int) -> str:
    """Return a row: milliseconds of a token, of the drive, of processors, and context switches.

    is_process: read by a process of its own; its part of the processors and switches is counted, and shown.  calls:
    that lend the interpreter's lock, after each record.
    """
    config = DriveConfig(
        DirectIo.buffered, window, pieces, PAGE_NBYTES // 1024,
        simulate_gib_s=GIB_S * RECORD_NBYTES / EXPERT_NBYTES,
    )  # fmt: skip
    layout = Layout(file)
    reader: DirectReader | ChildReader
    pids = [os.getpid()]
    if is_process:
        reader = ChildReader(layout.files, config)
        pids.append(reader.pid)
    else:
        reader = DirectReader(layout.files, config)
    streamer = ExpertStreamer(layout, reader, TOP_K + 2, 1, 0)  # type: ignore[arg-type]
    rng, lent = random.Random(0), Lent(calls)
    try:
        for number in range(tokens + 2):
            if number == 2:
                lent.took_us.clear()
                before = [Spent.of(pid) for pid in pids]
                started, decoding = time.perf_counter(), time.thread_time()
            for layer in range(LAYERS):
                for wave in streamer.waves(layer, rng.sample(range(EXPERTS), TOP_K)):
                    for _ in wave:
                        lent.lend()
        wall, decoding = time.perf_counter() - started, time.thread_time() - decoding
        after = [Spent.of(pid) for pid in pids]
    finally:
        streamer.close()
    spent = [
        (now.seconds - then.seconds, now.switches - then.switches)
        for now, then in zip(after, before, strict=True)
    ]
    drive_ms = LAYERS * TOP_K * EXPERT_NBYTES / (GIB_S * GIB) * 1e3
    row = (
        f"{window} x {pieces}, {'process' if is_process else 'threads'}: {wall / tokens * 1e3:.0f} ms a token, drive "
        f"{drive_ms:.0f}, processors {' + '.join(f'{s / tokens * 1e3:.0f}' for s, _ in spent)}, decoding thread "
        f"{decoding / tokens * 1e3:.1f}, switches {' + '.join(f'{n / tokens:,.0f}' for _, n in spent)}"
    )
    if calls:
        in_all = sum(lent.took_us) / 1e3 / tokens
        row += (
            f", a lent lock is back after {lent.quantile(0.5):.1f} us, {lent.quantile(0.99):.1f} (99 %), "
            f"{in_all:.1f} ms a token"
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--window", default="2,4,8")
    parser.add_argument("--pieces", default="1,4")
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--process", action="store_true", help="with threads and with a process")
    parser.add_argument("--lend", type=int, default=0, help="lends of the lock after each record")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "experts"
        with open(file, "wb") as out:
            out.truncate(LAYERS * EXPERTS * RECORD_NBYTES)
        for window in map(int, args.window.split(",")):
            for pieces in map(int, args.pieces.split(",")):
                for is_process in [False, True] if args.process else [False]:
                    row = measure(file, window, pieces, args.tokens, is_process, args.lend)
                    print(row, flush=True)


if __name__ == "__main__":
    main()
