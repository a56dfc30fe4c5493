"""Doctor's drive figure beside that of `fio` (Debian's package): the same file, block size and depth, in turns.

    python tests/bench/compare_fio.py FILE [RECORD_NBYTES] [TURNS] [SECONDS]

FILE: at least 1 GiB on the drive in question. Eight whole records are in flight for both, and neither counts the time
in which its queue fills. A drive that others use wanders: the two take turns, short ones, and each turn is compared
with its neighbour. Prints the medians, their ratio, and the spread of the neighbours' ratios. Not collected by pytest.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conf.schema import DriveConfig
from runtime.drives import RAMP_S, measure_rate
from runtime.units import GIB, align_up

DEPTH = 8


def fio(path: Path, nbytes: int, seconds: float) -> float:
    """Return fio's GiB/s for random direct reads by as many threads as are in flight."""
    command = [
        "fio", "--name=x", f"--filename={path}", "--rw=randread", f"--bs={nbytes}", f"--blockalign={nbytes}",
        "--direct=1", "--ioengine=psync", "--thread", f"--numjobs={DEPTH}", "--group_reporting", "--time_based",
        f"--ramp_time={int(RAMP_S * 1000)}ms", f"--runtime={int(seconds * 1000)}ms",
        "--output-format=json", "--readonly",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rate: float = json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"] / GIB
    return rate


def doctor(path: Path, nbytes: int, seconds: float) -> float:
    """Return doctor's GiB/s for the same."""
    return measure_rate([path], nbytes, DriveConfig(window=DEPTH, pieces=1), seconds).gib_s


def main() -> None:
    path = Path(sys.argv[1])
    given = [*sys.argv[2:], *("2764800", "24", "2")[len(sys.argv) - 2 :]]
    nbytes, turns, seconds = (float(number) for number in given)
    record_nbytes = align_up(int(nbytes))
    found: dict[str, list[float]] = {"fio": [], "doctor": []}
    both = {"fio": fio, "doctor": doctor}
    for turn in range(int(turns)):
        for name in sorted(both, reverse=bool(turn % 2)):
            found[name].append(both[name](path, record_nbytes, seconds))
            print(f"{name:7} {found[name][-1]:.3f} GiB/s", file=sys.stderr)
    medians = {name: round(statistics.median(rates), 4) for name, rates in found.items()}
    pairs = [ours / theirs for ours, theirs in zip(found["doctor"], found["fio"], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    print(
        json.dumps(
            {
                **medians,
                "ratio": round(medians["doctor"] / medians["fio"], 4),
                "ratio_of_neighbours": round(middle, 4),
                "half_of_them_within": [round(low, 4), round(high, 4)],
                "record_nbytes": record_nbytes,
                "turns": len(pairs),
            }
        )
    )


if __name__ == "__main__":
    main()
