"""Memory and disk of the living memory while a text grows, and what another process needs to go on.

    python tests/bench/bench_memory_flat.py SNAPSHOT [--tokens 200000]

One JSON line at each length; then a new process answers a question from the store, and says what it read.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from conf.schema import AnswerMode, MemoryConfig, Template
from runtime.living_kv.identity import new_header
from runtime.living_kv.memory import Memory
from runtime.living_kv.store import Store
from runtime.models.dense import open_codec
from runtime.sampling import SamplingParams
from tests.dense_models import open_dense

QUESTION = "code of Banak"


def settings() -> MemoryConfig:
    return MemoryConfig(
        window=256, chunk=128, budget=128, template=Template.none, mode=AnswerMode.kv, ram_gib=0.002, calibration=20,
        commit_tokens=4096,
    )  # fmt: skip


def resident_mib() -> dict[str, float]:
    """Return what is in RAM: anonymous memory, and pages of mapped files, which the kernel takes back as it needs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}


def resume(snapshot: Path, root: Path) -> None:
    model, codec = open_dense(snapshot), open_codec(snapshot)
    started = time.perf_counter()
    memory = Memory(model, codec, Store.open(root), settings())
    ready_s = time.perf_counter() - started
    answer = memory.ask(QUESTION, SamplingParams(temperature=0, max_tokens=1))
    print(
        json.dumps(
            {
                "ready_s": round(ready_s, 3), "first_answer_s": round(time.perf_counter() - started - ready_s, 3),
                "source_tokens_read": memory.read_tokens, "block_bytes_read": answer.read_nbytes,
                "token": answer.tokens, "rebuilt": memory.was_rebuilt,
            }
        )
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--resume", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.resume:
        resume(args.snapshot, args.resume)
        return
    from tests.e2e.test_memory import document, some_facts

    model, codec, config = open_dense(args.snapshot), open_codec(args.snapshot), settings()
    root = Path(tempfile.mkdtemp()) / "flat"
    store = Store.create(root, new_header(model, args.snapshot, config, "now"))
    memory = Memory(model, codec, store, config)
    part = 0
    for target in (10_000, 50_000, 100_000, args.tokens):
        while store.commit.tokens < target:
            facts, _ = some_facts(4, part)
            words = min(20_000, target - store.commit.tokens)
            memory.ingest(document(facts, max(200, words), part).encode(), f"part {part}")
            part += 1
        started = time.perf_counter()
        answer = memory.ask(QUESTION, SamplingParams(temperature=0, max_tokens=1))
        ask_ms = (time.perf_counter() - started) * 1e3
        gc.collect()
        resident = resident_mib()

        blocks = store.commit.lengths["kv/000001.kvb"] / store.commit.blocks / store.header.block
        row = {
            "tokens": store.commit.tokens, "hot_bytes": memory.hot_nbytes, "cold_ram_bytes": memory.cold.nbytes,
            "anonymous_mib": round(resident["RssAnon"], 1), "mapped_mib": round(resident["RssFile"], 1),
            "index_bytes": memory.index.nbytes, "index_computed": len(store.sentences) * store.header.vector_values * 4,
            "sentences": len(store.sentences), "kv_bytes_per_token": round(blocks, 1),
            "computed": memory.codec.payload_nbytes(64) / 64, "ask_ms": round(ask_ms), "token": answer.tokens,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
    memory.close()
    subprocess.run(
        [sys.executable, __file__, str(args.snapshot), "--resume", str(root)], check=True, cwd=ROOT
    )


if __name__ == "__main__":
    main()
