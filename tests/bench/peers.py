"""NVMoE beside transformers + accelerate and llama-cpp-python: one random-weight MoE, one memory cap, one run.

    python tests/bench/peers.py --layers 6 --experts 32 --cap-gib 1.5 --set vocab_size=16384 \
        --transformers-python VENV/bin/python --llama-python VENV/bin/python

Makes a checkpoint of random bytes in the shape of Qwen3-30B-A3B (`model=qwen3_moe_synthetic`), writes the same values
as GGUF, and compares every engine's logits with those of transformers in fp32 before anything is timed, on the GPU
where there is one (`--only-compare` ends there, `--compared` goes on from there). Then each engine runs in a process
of its own, in turns, `--repeats` times: prompts of given ids, each once cold and once warm, and forced tokens behind
the first. Bytes are those that the kernel read for the process (/proc/self/io).

The cap is a memory cgroup below this process's own (v1 or v2), page cache included; it needs the right to make one.
Where there is none, `--fill-ram` fills the rest of the machine's RAM; without, the table says that nothing but the
engines' own settings held them. Cold: what an engine keeps of the experts is forgotten, the group's page cache
reclaimed, the files' dropped (posix_fadvise). Warm: the same again.

Peers are not dependencies: `pip install '.[peers]'`, or environments of their own, named as above. One that is missing
has a row that says so. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from conf.schema import DriveConfig
from runtime.hardware import measure_drive_gib_s
from runtime.models.qwen3_moe_weights import expert_layout
from runtime.units import align_up
from stages.bench_report import format_table
from stages.synthetic_qwen3_moe import RELEASED

HERE = Path(__file__).parent
GIB, MIB = 2**30, 2**20
ENGINES = ("ours", "ours fp32", "transformers", "llama.cpp")  # the others compute in BF16
LEAST_COSINE = 0.98  # of logits: bf16 rounding flips a few experts of random weights, a wrong tensor leaves nothing
PEAKS = {"peak_rss_nbytes": "peak RSS GiB", "vram_nbytes": "VRAM GiB"}
CHECK_GIB = 2.5  # of fp32 weights in RAM while the reference is computed


class WorkerError(Exception):
    """An engine that did not come to its end."""


def main() -> None:
    args = parse()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = make_snapshot(args, folder)
    config = json.loads((snapshot / "config.json").read_text())
    interpreters = {
        "ours": sys.executable,
        "ours fp32": sys.executable,
        "transformers": args.transformers_python,
        "llama.cpp": args.llama_python,
    }
    gguf = folder / f"{snapshot.name}.gguf"
    absent = find_absent(interpreters, args.engines, snapshot, gguf)
    job = make_job(args, config, snapshot, gguf, folder)
    engines = [name for name in args.engines if name not in absent]
    with memory_group(args) as group:
        job["cgroup"] = None if group is None else str(group)
        kept = folder / f"{snapshot.name}.closeness.json"
        if args.compared:
            known = json.loads(kept.read_text()) if kept.exists() else {}
            if left := sorted({*engines} - known.keys()):
                raise SystemExit(f"error: {', '.join(left)}: not compared yet, use --only-compare")
            closeness = {name: known[name] for name in engines}
        else:
            closeness = compare_numbers(engines, interpreters, job) if engines else {}
            kept.write_text(json.dumps(closeness, indent=1) + "\n")
        if args.only_compare:
            return
        absent |= {
            name: f"not timed: {words}"
            for name, (words, is_close) in closeness.items()
            if not is_close
        }
        with filled_ram(args, group) as ballast:
            rows, versions = time_engines(args, snapshot, interpreters, absent, job, group, ballast)
    print(describe(args, config, group, ballast))
    for name in args.engines:
        words, _ = closeness.get(name, ("not compared", True))
        print(f"{name}: {f'{versions[name]}; {words}' if name in versions else absent[name]}")
    print(report(rows, args.engines, absent))


def time_engines(
    args: argparse.Namespace, snapshot: Path, interpreters: dict[str, str], absent: dict[str, str],
    job: dict[str, Any], group: Path | None, ballast: Ballast | None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:  # fmt: skip
    """Run the engines in turns; return the rows, and each engine's version. `absent` gains those that fail."""
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    engines = [name for name in args.engines if name not in absent]
    for repeat in range(args.repeats):
        ceiling = drive_gib_s(snapshot)
        left = [name for name in engines if name not in absent]
        turn = repeat % max(1, len(left))
        for name in left[turn:] + left[:turn]:
            if ballast is not None:
                ballast.hold()
            try:
                found = run_worker(interpreters[name], job | {"engine": name}, group)
                if ballast is not None and not ballast.is_held:
                    raise WorkerError("failed: it took more than the cap")
            except WorkerError as error:
                absent[name] = str(error)
                print(f"{repeat} {name}: {error}", file=sys.stderr, flush=True)
                continue
            versions[name] = found["version"]
            print(
                f"{repeat} {name}: opened in {found['open_s']:.1f} s",
                file=sys.stderr,
                flush=True,
            )
            for row in found["rows"]:
                line = {"repeat": repeat, "engine": name, **row, "drive_gib_s": ceiling}
                rows.append(line | {key: found[key] for key in PEAKS if key in found})
            if args.record is not None:
                save(args.record, rows)
        print(report(rows, args.engines, absent), file=sys.stderr, flush=True)
    return rows, versions


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--folder", type=Path, default=ROOT / "outputs" / "peers")
    add("--config", type=Path, help="folder with another config.json of this family")
    add("--layers", type=int)
    add("--experts", type=int)
    add("--set", nargs="+", default=[], metavar="KEY=N", help="other numbers in config.json")
    add(
        "--disk-gib",
        type=float,
        default=20.0,
        help="for the checkpoint; GGUF and offloaded layers come on top",
    )
    add("--cap-gib", type=float, default=1.5, help="of RAM; 0: none")
    add(
        "--fill-ram",
        action="store_true",
        help="where no cgroup may be made: fill all RAM but the cap meanwhile",
    )
    add("--overhead-gib", type=float, default=0.5, help="of it, for interpreter and libraries")
    add("--vram-gib", type=float, help="of the GPU that may be used")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--threads", type=int, default=1)
    add("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[32, 512, 2048])
    add("--tokens", type=int, default=16)
    add("--repeats", type=int, default=3)
    add("--engines", type=lambda text: text.split(","), default=list(ENGINES), help=str(ENGINES))
    add("--engine-seconds", type=float, default=1800, help="that one turn of an engine may take")
    add("--only-compare", action="store_true", help="make the files, compare the logits, and end")
    add("--compared", action="store_true", help="logits as compared by a run before")
    add("--transformers-python", default=sys.executable)
    add("--llama-python", default=sys.executable)
    add("--record", type=Path, help="CSV for every measured row")
    add("--ours", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of our config")
    add("--llama", nargs="+", default=[], metavar="KEY=N", help="other numbers for llama.cpp")
    return parser.parse_args()


def numbers(words: Sequence[str]) -> dict[str, int]:
    """Return the numbers of KEY=N."""
    return {key: int(n) for key, n in (word.split("=") for word in words)}


def make_snapshot(args: argparse.Namespace, folder: Path) -> Path:
    """Return the checkpoint's folder, made by the synthetic stage if it is not there."""
    config = json.loads(((args.config or RELEASED) / "config.json").read_text())
    config |= numbers(args.set)
    cuts = {"layers": args.layers, "experts": args.experts, "disk_gib": args.disk_gib}
    wanted = json.dumps([config, cuts], sort_keys=True).encode()
    made = folder / hashlib.sha256(wanted).hexdigest()[:12]  # one checkpoint is in it
    (made / "config").mkdir(parents=True, exist_ok=True)
    (made / "config" / "config.json").write_text(json.dumps(config))
    words = [f"paths.outputs={made}", f"model.path={made / 'config'}"]
    words += [f"model.synthetic.{key}={n}" for key, n in cuts.items() if n is not None]
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        "model=qwen3_moe_synthetic",
        "stages=[synthetic]",
    ]
    subprocess.run([*command, "hw=cpu", *words], check=True, cwd=ROOT, stdout=sys.stderr)
    (record,) = (made / "artifacts" / "qwen3_moe_synthetic").glob("synthetic-*/record.json")
    return record.parent


def find_absent(
    interpreters: dict[str, str], engines: Sequence[str], snapshot: Path, gguf: Path
) -> dict[str, str]:
    """Return engine -> why it cannot be measured. Makes the GGUF, which needs llama.cpp's environment."""
    modules = {
        "ours": "torch",
        "ours fp32": "torch",
        "transformers": "torch, transformers, accelerate",
        "llama.cpp": "llama_cpp, gguf, numpy",
    }
    absent = {}
    for name in engines:
        try:
            subprocess.run(
                [interpreters[name], "-c", f"import {modules[name]}"],
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError):
            absent[name] = f"not installed: {interpreters[name]} cannot import {modules[name]}"
    if "llama.cpp" in engines and "llama.cpp" not in absent and not gguf.exists():
        command = [interpreters["llama.cpp"], str(HERE / "peers_gguf.py"), str(snapshot), str(gguf)]
        done = subprocess.run(command, stderr=subprocess.PIPE, stdout=sys.stderr, text=True)
        if done.returncode:
            absent["llama.cpp"] = f"no GGUF: {done.stderr.splitlines()[-1]}"
    return absent


def make_job(
    args: argparse.Namespace, config: dict[str, Any], snapshot: Path, gguf: Path, folder: Path
) -> dict[str, Any]:
    """Return what every worker is told; ids are the same for all."""
    drawn = random.Random(1)
    prompts = [[drawn.randrange(config["vocab_size"]) for _ in range(n)] for n in args.prompts]
    forced = [drawn.randrange(config["vocab_size"]) for _ in range(args.tokens)]
    return {
        "snapshot": str(snapshot), "gguf": str(gguf), "offload": str(folder / "offload"),
        "num_layers": config["num_hidden_layers"], "prompts": prompts, "forced": forced,
        "context": max(args.prompts) + args.tokens + 8, "threads": args.threads, "device": args.device,
        "dtype": "bfloat16", "cap_gib": args.cap_gib, "overhead_gib": args.overhead_gib, "vram_gib": args.vram_gib,
        "ours": args.ours, "llama": numbers(args.llama), "check": False, "engine_seconds": args.engine_seconds,
    }  # fmt: skip


@contextlib.contextmanager
def memory_group(args: argparse.Namespace) -> Iterator[Path | None]:
    """Make a memory cgroup below this process's own, with the cap; None where that is not allowed."""
    if not args.cap_gib:
        yield None
        return
    limit = str(align_up(int(args.cap_gib * GIB)))  # of whole pages
    group = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, own = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        root = Path("/sys/fs/cgroup") / ("" if is_v2 else "memory")
        file = "memory.max" if is_v2 else "memory.limit_in_bytes"
        if not is_v2 and controllers != "memory":
            continue
        wanted = root / own.strip("/") / f"nvmoe-peers-{os.getpid()}"
        try:
            wanted.mkdir()
            (wanted / file).write_text(limit)
        except OSError as error:
            print(f"no cap by {wanted}: {error.strerror}", file=sys.stderr)
            with contextlib.suppress(OSError):
                wanted.rmdir()
            continue
        group = wanted
        break
    try:
        yield group
    finally:
        if group is not None:
            group.rmdir()


class Ballast:
    """A process that holds all RAM but the cap; the kernel ends it first when that is not enough."""

    def __init__(self, cap_nbytes: int) -> None:
        self._command = [sys.executable, str(HERE / "peers_ballast.py"), str(cap_nbytes)]
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_held(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def hold(self) -> None:
        """Fill the RAM if it is not filled; ends the run where that cannot be done."""
        if self.is_held:
            return
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        words = self._process.stdout.readline().strip()
        if not words.startswith("held"):
            raise SystemExit("error: the RAM could not be filled")
        print(words, file=sys.stderr, flush=True)

    def release(self) -> None:
        if self._process is not None:
            self._process.communicate()  # its stdin ends, and so does it


@contextlib.contextmanager
def filled_ram(args: argparse.Namespace, group: Path | None) -> Iterator[Ballast | None]:
    """Where there is a cap and no group for it: leave only the cap to everybody, page cache included."""
    if group is not None or not args.cap_gib or not args.fill_ram:
        yield None
        return
    ballast = Ballast(int(args.cap_gib * GIB))
    try:
        yield ballast
    finally:
        ballast.release()


def run_worker(interpreter: str, job: dict[str, Any], group: Path | None) -> dict[str, Any]:
    """Run one engine in a process of its own, inside the group."""
    files = [job["gguf"], *map(str, Path(job["snapshot"]).glob("*.safetensors"))]
    files += map(str, Path(job["offload"]).glob("*"))
    job = job | {"files": [file for file in files if os.path.exists(file)]}
    enter = None
    if group is not None:

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    environment = os.environ | {
        "OMP_NUM_THREADS": str(job["threads"]),
        "TOKENIZERS_PARALLELISM": "0",
    }
    try:
        done = subprocess.run(
            [interpreter, str(HERE / "peers_worker.py")], input=json.dumps(job), stdout=subprocess.PIPE, text=True,
            preexec_fn=enter, env=environment, timeout=job["engine_seconds"],
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise WorkerError(f"failed: not through in {error.timeout:.0f} s") from error
    if done.returncode:
        why = (
            "killed, the cap was too small" if done.returncode == -9 else f"exit {done.returncode}"
        )
        raise WorkerError(f"failed: {why}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare_numbers(
    engines: Sequence[str], interpreters: dict[str, str], job: dict[str, Any]
) -> dict[str, tuple[str, bool]]:
    """Return engine -> (how close its logits are to transformers' in fp32, whether that will do)."""
    import torch

    if "transformers" not in engines:
        return dict.fromkeys(engines, ("logits not compared: no transformers", True))
    check = job | {"check": True, "cap_gib": 0, "cgroup": None, "vram_gib": None}

    def logits(name: str, **more: Any) -> torch.Tensor:
        found = run_worker(interpreters[name], check | {"engine": name, **more}, None)
        return torch.tensor(found["logits"], dtype=torch.float64)

    # a GPU holds all weights; without one they need not be in RAM at once
    held = {} if job["device"] == "cuda" else {"cap_gib": CHECK_GIB + job["overhead_gib"]}
    wanted = logits("transformers", dtype="float32", **held, offload=f"{job['offload']}-fp32")
    closeness = {}
    for name in engines:
        try:
            found = logits(name, **held)
        except WorkerError as error:
            closeness[name] = (str(error), False)
            continue
        cosine = torch.nn.functional.cosine_similarity(found, wanted).min().item()
        same = int((found.argmax(-1) == wanted.argmax(-1)).sum())
        words = f"cosine of logits with fp32 {cosine:.6f}, {same} of {len(wanted)} choices the same"
        print(f"{name}: {words}", file=sys.stderr)
        closeness[name] = (words, cosine >= LEAST_COSINE)
    return closeness


def drive_gib_s(snapshot: Path) -> float:
    """Return the drive's ceiling: whole experts in random order, many asked for at once, around the page cache."""
    from runtime.checkpoint import Checkpoint
    from runtime.models.qwen3_moe import read_spec

    layout = expert_layout(Checkpoint.open(snapshot), read_spec(snapshot))
    return measure_drive_gib_s(layout, DriveConfig(), 3.0)


def describe(
    args: argparse.Namespace, config: dict[str, Any], group: Path | None, ballast: Ballast | None
) -> str:
    held = "no cap" if not args.cap_gib else f"cap {args.cap_gib:g} GiB "
    if group is not None:
        held += "by a memory cgroup, page cache included"
    elif ballast is not None:
        held += "by filling the rest of RAM, page cache included"
    elif args.cap_gib:
        held += "by the engines' own settings alone"
    expert = 6 * config["hidden_size"] * config["moe_intermediate_size"]
    experts = config["num_hidden_layers"] * config["num_experts"]
    layers, top_k = config["num_hidden_layers"], config["num_experts_per_tok"]
    return (
        f"{layers} layers of {config['num_experts']} experts, top-{top_k}, {expert / MIB:.1f} MiB each: "
        f"{experts * expert / GIB:.2f} GiB of experts, a token uses {layers * top_k * expert / MIB:.0f} MiB; {held}; "
        f"{args.device}, {args.threads} thread(s); {args.repeats} turns, load {os.getloadavg()[0]:.1f} at the end"
    )


def report(rows: list[dict[str, Any]], engines: Sequence[str], absent: dict[str, str]) -> str:
    """Return the table: medians, and the spread behind those that differ from turn to turn."""
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    header = ["engine", "state", "tok/s", "times ours", "MiB a token", "of the drive"]
    peaks = [key for key in PEAKS if any(key in row for row in rows)]
    header += [f"first token {n}, s" for n in prompts] + [PEAKS[key] for key in peaks]
    lines = []
    for state in ("cold", "warm"):
        ours = rates(rows, "ours", state)
        for name in engines:
            if name in absent:
                lines.append([name, state, absent[name].split(":")[0], *["-"] * (len(header) - 3)])
                continue
            mine = [row for row in rows if row["engine"] == name and row["state"] == state]
            decoded = [row for row in mine if "tok_s" in row]
            speed = rates(rows, name, state)
            times = "" if name == "ours" or not ours else ratio(name, speed, ours)
            read = [row["token_nbytes"] / MIB for row in decoded]
            share = [
                row["tok_s"] * row["token_nbytes"] / GIB / row["drive_gib_s"] for row in decoded
            ]
            cells = [name, state, spread(speed), times, f"{statistics.median(read):.0f}"]
            cells.append(f"{statistics.median(share):.0%}")
            cells += [first_token(rows, name, state, n) for n in prompts]
            cells += [f"{max(row[key] for row in mine) / GIB:.2f}" for key in peaks]
            lines.append(cells)
    return format_table(header, lines) + "\n* a peer's median ahead of ours"


def first_token(rows: list[dict[str, Any]], engine: str, state: str, prompt: int) -> str:
    """Return seconds to the first token, marked where a peer has fewer than we have."""

    def seconds(name: str) -> list[float]:
        key = (name, state, prompt)
        return [r["ttft_s"] for r in rows if (r["engine"], r["state"], r["prompt"]) == key]

    mine, ours = seconds(engine), seconds("ours")
    is_ahead = is_peer(engine) and ours and statistics.median(mine) < statistics.median(ours)
    return spread(mine) + ("*" if is_ahead else "")


def rates(rows: list[dict[str, Any]], engine: str, state: str) -> list[float]:
    """Return the tok/s of each turn."""
    return [
        r["tok_s"] for r in rows if (r["engine"], r["state"]) == (engine, state) and "tok_s" in r
    ]


def is_peer(engine: str) -> bool:
    return not engine.startswith("ours")


def ratio(engine: str, theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Return how much of our speed an engine has, turn by turn, and who is ahead in how many."""
    each = [a / b for a, b in zip(theirs, ours, strict=True)]
    wins = sum(r > 1 for r in each)
    middle = statistics.median(each)
    mark = "*" if middle > 1 and is_peer(engine) else ""
    return f"{middle:.2f}{mark}" + (f" (ahead in {wins} of {len(each)})" if wins else "")


def spread(values: Sequence[float]) -> str:
    """Return median (least..most)."""
    digits = 2 if max(values) < 100 else 0
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write every row as CSV."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all", file=sys.stderr)
