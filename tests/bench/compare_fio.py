"""Doctor's drive figure beside that of `fio` (Debian's package): the same file, block size and depth, in turns.

    python tests/bench/compare_fio.py FILE [RECORD_NBYTES]

FILE: at least 1 GiB on the drive in question. Eight whole records are in flight for both. Not collected by pytest.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.schema import DriveConfig
from runtime.drives import measure_rate
from runtime.units import GIB, align_up

SECONDS, ROUNDS, DEPTH = 2, 16, 8


def fio(path: Path, nbytes: int) -> float:
    """Return fio's GiB/s for random direct reads by as many threads as are in flight."""
    command = [
        "fio", "--name=x", f"--filename={path}", "--rw=randread", f"--bs={nbytes}", f"--blockalign={nbytes}",
        "--direct=1", "--ioengine=psync", "--thread", f"--numjobs={DEPTH}", "--group_reporting", "--time_based",
        f"--runtime={SECONDS}", "--output-format=json", "--readonly",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rate: float = json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"] / GIB
    return rate


def main() -> None:
    path, nbytes = Path(sys.argv[1]), align_up(int((sys.argv[2:] or ["2764800"])[0]))
    found: dict[str, list[float]] = {"fio": [], "doctor": []}
    for number in range(ROUNDS):
        order = ("fio", "doctor") if number % 2 else ("doctor", "fio")
        for name in order:
            config = DriveConfig(window=DEPTH, pieces=1)
            rate = (
                fio(path, nbytes)
                if name == "fio"
                else measure_rate([path], nbytes, config, SECONDS).gib_s
            )
            found[name].append(rate)
            print(f"{name:7} {rate:.3f} GiB/s", file=sys.stderr)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    print(json.dumps({**medians, "ratio": medians["doctor"] / medians["fio"], "record_nbytes": nbytes}))  # fmt: skip


if __name__ == "__main__":
    main()
