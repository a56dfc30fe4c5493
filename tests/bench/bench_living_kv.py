"""A 7B of random weights over half a million tokens of its own memory: what a step costs, and what stays flat.

    python tests/bench/bench_living_kv.py [--tokens 500000] [--layers 28] [--weights nvfp4] [--vram-gib 8] [--out DIR]

Random text goes through the model into a store; at growing lengths a question is answered. One row a length: time and
bytes of a decoded token against what must be read at least, bytes of a question from the drive and over the link
against what its tokens are worth, and the memory that was used. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from conf.schema import AnswerMode, MemoryConfig, Template, Weights
from runtime import hardware
from runtime.living_kv.hot import buffer_tokens
from runtime.living_kv.identity import new_header
from runtime.living_kv.memory import Memory
from runtime.living_kv.store import Store
from runtime.models.dense import DenseModel, open_codec
from runtime.sampling import SamplingParams
from runtime.units import GIB, format_nbytes
from tests.data.recall_model.make import NAMES
from tests.random_dense import random_model

RELEASED = ROOT / "runtime" / "bundled" / "qwen25-7b-1m" / "config.json"
TOKENIZER = ROOT / "tests" / "data" / "recall_model"  # words; the shape's own vocabulary is larger
SHARES = (0.02, 0.1, 0.2, 0.5, 1.0)  # of the wanted tokens, where a question is asked
STEPS = 32  # decoded tokens that are timed


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured at one length."""

    tokens: int
    ingest_s: float  # of the tokens since the row before
    step_ms: float  # median of decoded tokens
    step_nbytes: int  # weights, keys and values that one reads
    floor_ms: float  # these at the measured rate of the memory
    ask_ms: float  # question in, first token out
    fetched_tokens: int
    read_nbytes: int  # of blocks, from the drive
    moved_nbytes: int  # of blocks, to where attention is
    worth_nbytes: int  # what the fetched tokens come to in the codec
    peak_nbytes: int  # VRAM at most since the row before; on a CPU the buffers of the memory
    kv_nbytes_per_token: float  # on the drive


def measure(
    model: DenseModel, config: MemoryConfig, root: Path, tokens: int, seed: int = 0
) -> Iterator[Row]:
    """Ingest random text up to `tokens`, and ask at some lengths: a row each."""
    device = model.device
    codec = open_codec(TOKENIZER)
    rate = _memory_rate(device)
    memory = Memory(
        model, codec, Store.create(root, new_header(model, TOKENIZER, config, "now")), config
    )
    rng = torch.Generator().manual_seed(seed)
    try:
        for target in sorted({max(1, int(share * tokens)) for share in SHARES}):
            _reset_peak(device)
            started = time.perf_counter()
            while (done := memory.store.commit.tokens) < target:
                text = _text(min(8 * config.commit_tokens, max(64, target - done)), rng)
                memory.ingest(text.encode(), f"from {done}")
            _wait(device)
            yield _ask(memory, rate, time.perf_counter() - started)
    finally:
        memory.close()


def _text(count: int, rng: torch.Generator) -> str:
    """Return lines of about ten names, `count` words in all."""
    picks = torch.randint(len(NAMES), (count,), generator=rng).tolist()
    words = [NAMES[i] for i in picks]
    return "\n".join(" ".join([*words[at : at + 10], "."]) for at in range(0, count, 10)) + "\n"


def _ask(memory: Memory, rate_gib_s: float, ingest_s: float) -> Row:
    """Ask for a stored sentence, and time tokens behind it."""
    store, model, cold = memory.store, memory.model, memory.cold
    question = store.text_of(len(store.sentences) // 3).decode().rpartition(" ")[0]
    read, moved = store.read_nbytes, cold.moved_nbytes
    _wait(model.device)
    started = time.perf_counter()
    found = memory.find(question)
    assert found is not None
    logits = memory.attend(memory.prompt(question), found)
    _wait(model.device)
    ask_ms = (time.perf_counter() - started) * 1e3
    scratch = memory.scratch
    times: list[float] = []
    steps = memory.generate(logits, SamplingParams(temperature=0, max_tokens=STEPS + 4))
    last = time.perf_counter()
    for _ in steps:
        _wait(model.device)
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
    rows = scratch.num_sinks + scratch.num_retrieved + scratch.position - scratch.hot_start
    token_nbytes = model.spec.kv_token_values * model.dtype.itemsize
    step_nbytes = model.dense_nbytes + rows * token_nbytes
    kv_nbytes = sum(n for name, n in store.commit.lengths.items() if name.endswith(".kvb"))
    worth = scratch.num_retrieved * memory.codec.payload_nbytes(store.header.block)
    return Row(
        store.commit.tokens, ingest_s, statistics.median(times[4:] or times), step_nbytes,
        step_nbytes / (rate_gib_s * GIB) * 1e3, ask_ms, scratch.num_retrieved, store.read_nbytes - read,
        cold.moved_nbytes - moved, round(worth / store.header.block), _peak(memory),
        kv_nbytes / max(1, store.commit.blocks * store.header.block),
    )  # fmt: skip


def _memory_rate(device: torch.device) -> float:
    if device.type == "cuda":
        return hardware.measure_vram_gib_s()
    return hardware.measure_memory_gib_s()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(memory: Memory) -> int:
    if memory.model.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(memory.model.device))
    return memory.hot_nbytes + memory.cold.nbytes


def predicted_nbytes(model: DenseModel, config: MemoryConfig) -> int:
    """Return what weights and buffers come to where attention is, without what computing holds beside."""
    tokens = sum(buffer_tokens(config))
    return model.dense_nbytes + tokens * model.spec.kv_token_values * model.dtype.itemsize


def table(rows: Sequence[Row]) -> str:
    """Return the rows for a terminal."""
    head = ("tokens", "ingest s", "step ms", "floor ms", "step reads", "question ms", "fetched", "from drive",
            "over link", "worth", "memory", "K/V B per token")  # fmt: skip
    lines = [head] + [
        (
            f"{r.tokens:,}", f"{r.ingest_s:.1f}", f"{r.step_ms:.2f}", f"{r.floor_ms:.2f}",
            format_nbytes(r.step_nbytes), f"{r.ask_ms:.0f}",
            str(r.fetched_tokens), format_nbytes(r.read_nbytes), format_nbytes(r.moved_nbytes),
            format_nbytes(r.worth_nbytes), format_nbytes(r.peak_nbytes), f"{r.kv_nbytes_per_token:,.0f}",
        )
        for r in rows
    ]  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines
    )


def read_config(path: Path, layers: int | None) -> Mapping[str, Any]:
    """Return a config.json, cut to some layers."""
    config: dict[str, Any] = json.loads(path.read_text())
    return config if layers is None else config | {"num_hidden_layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=RELEASED, help="config.json of a shape")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=500_000)
    parser.add_argument("--weights", default="nvfp4", choices=["int8_rows", "nvfp4"])
    parser.add_argument("--vram-gib", type=float, default=8.0)
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--ram-gib", type=float, default=2.0, help="of cold blocks")
    parser.add_argument("--plain-steps", action="store_true", help="decode by slices, as on a CPU")
    parser.add_argument("--out", type=Path, help="folder of the store, removed at the end")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.vram_gib * GIB / total))
    model = random_model(
        read_config(args.config, args.layers), Weights(args.weights), device, dtype
    )
    if args.plain_steps:
        model.step = None
    config = MemoryConfig(
        window=args.window, budget=args.budget, chunk=args.chunk, ram_gib=args.ram_gib, calibration=20,
        template=Template.none, mode=AnswerMode.kv,
    )  # fmt: skip
    print(
        f"{model.spec.depth} layers in {args.weights} on {device}: weights {format_nbytes(model.dense_nbytes)}, "
        f"with the memory's buffers {format_nbytes(predicted_nbytes(model, config))}, scratch beside"
    )
    folder = Path(tempfile.mkdtemp(dir=args.out))
    try:
        rows = []
        for row in measure(model, config, folder / "store", args.tokens):
            rows.append(row)
            print(row, file=sys.stderr)
    finally:
        shutil.rmtree(folder)
    print(table(rows))
    peaks = [r.peak_nbytes for r in rows]
    flat = max(peaks) / min(peaks) - 1
    assert math.isfinite(flat)
    print(json.dumps({"rows": [asdict(r) for r in rows], "memory_grew_by": round(flat, 5)}))


if __name__ == "__main__":
    main()
