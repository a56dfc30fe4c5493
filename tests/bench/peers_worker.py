"""One engine under the cap, for `peers.py`: opens a model, feeds given token ids, says what it cost, as JSON lines.

Started by `peers.py`; imports nothing before it knows which engine it is, so that each runs in an environment of its
own. Not collected by pytest.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


class Engine(Protocol):
    """What is measured."""

    version: str

    def reset(self) -> None:
        """Begin an empty conversation."""

    def forget(self) -> None:
        """Drop what the engine itself keeps of the experts; the page cache is the caller's business."""

    def feed(self, ids: Sequence[int]) -> Any:
        """Take in tokens; return the logits after the last, on the host."""


class Ours:
    """NVMoE: experts by direct reads through its own cache."""

    def __init__(self, job: dict[str, Any]) -> None:
        sys.path.insert(0, str(ROOT))
        import torch
        from hydra import compose, initialize_config_dir
        from hydra.core.config_store import ConfigStore

        from conf.schema import RunConfig, load
        from runtime.engine import Engine as Opened
        from runtime.engine import EngineFiles

        ConfigStore.instance().store(name="schema", node=RunConfig)
        words = [
            "model=qwen3_moe_synthetic", f"hw.compute_threads={job['threads']}", f"hw.device={job['device']}",
            f"model.context_tokens={job['context']}", f"hw.reserve_gib={job['overhead_gib']}",
            f"hw.dtype={'float32' if job['engine'] == 'ours fp32' else job['dtype']}", *job["ours"],
        ]  # fmt: skip
        if job["cap_gib"]:
            words.append(f"hw.ram_gib={job['cap_gib']}")
        if job["vram_gib"]:
            words.append(f"hw.vram_gib={job['vram_gib']}")
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = load(compose("config", words))
        self.engine = Opened.open(cfg, EngineFiles(Path(job["snapshot"])))
        print(self.engine.format_plan(), file=sys.stderr)
        self._state, self.version = self.engine.new_state(), f"torch {torch.__version__}"

    def reset(self) -> None:
        self._state = self.engine.new_state()

    def forget(self) -> None:
        self.engine.forget_experts()

    def feed(self, ids: Sequence[int]) -> Any:
        model, size = self.engine.model, self.engine.prefill_tokens
        if len(ids) == 1:
            logits = model.decode(ids[0], self._state)
        else:
            for at in range(0, len(ids), size):
                logits = model.prefill(list(ids[at : at + size]), self._state)
        return logits[-1].cpu().numpy()


class Transformers:
    """transformers with accelerate: what does not fit under the cap is loaded from the drive layer by layer."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        import transformers
        from transformers import DynamicCache, Qwen3MoeForCausalLM

        torch.set_num_threads(job["threads"])
        self._torch, self._new_cache = torch, DynamicCache
        memory: dict[int | str, int] = {}
        if job["cap_gib"]:
            memory["cpu"] = int((job["cap_gib"] - job["overhead_gib"]) * GIB)
        if job["device"] == "cuda":
            memory[0] = int((job["vram_gib"] or 1e3) * 0.9 * GIB)
        options: dict[str, Any] = {}
        if memory:
            options = {"device_map": "auto", "max_memory": memory, "offload_folder": job["offload"]}
        self.model = Qwen3MoeForCausalLM.from_pretrained(
            job["snapshot"], dtype=getattr(torch, job["dtype"]), **options
        ).eval()
        placed = getattr(self.model, "hf_device_map", {})
        print({str(v): sum(v == w for w in placed.values()) for v in placed.values()}, file=sys.stderr)  # fmt: skip
        self.device = job["device"]
        accelerate = importlib.metadata.version("accelerate") if memory else "none"
        self.version = f"transformers {transformers.__version__}, accelerate {accelerate}"
        names = inspect.signature(self.model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed in 5.24
        self.reset()

    def reset(self) -> None:
        self._cache = {self._cache_name: self._new_cache()}

    def forget(self) -> None:
        """Nothing is kept."""

    def feed(self, ids: Sequence[int]) -> Any:
        torch = self._torch
        with torch.inference_mode():
            out = self.model(
                torch.tensor([list(ids)], device=self.device),
                use_cache=True,
                logits_to_keep=1,
                **self._cache,
            )
        return out.logits[0, -1].float().cpu().numpy()


class LlamaCpp:
    """llama.cpp: the file is mapped, the kernel keeps what it likes of it."""

    def __init__(self, job: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self._numpy, self._lib = numpy, llama_cpp
        layers = 0
        if job["device"] == "cuda":
            share = (job["vram_gib"] or 1e3) * GIB / os.path.getsize(job["gguf"])
            layers = int(job["num_layers"] * min(1.0, share))
        options = {"n_batch": 512, "n_gpu_layers": layers} | job["llama"]
        self._llama = llama_cpp.Llama(
            job["gguf"], n_ctx=job["context"], n_threads=job["threads"], verbose=False,
            n_threads_batch=job["threads"], use_mmap=True, **options,
        )  # fmt: skip
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def reset(self) -> None:
        self._llama.reset()

    def forget(self) -> None:
        """Nothing is kept outside the page cache."""

    def feed(self, ids: Sequence[int]) -> Any:
        self._llama.eval(list(ids))
        pointer = self._lib.llama_get_logits_ith(self._llama.ctx, -1)
        return self._numpy.ctypeslib.as_array(pointer, (self._llama.n_vocab(),)).copy()


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {
    "ours": Ours,
    "ours fp32": Ours,
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
}


def read_nbytes() -> int:
    """Return what this process and those that it started have had read from drives so far.

    Page faults and read-ahead count.
    """
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    total = 0
    for pid in ["self", *(pid for pids in children for pid in pids)]:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return total


def used_vram_nbytes() -> int:
    """Return what all programs have of the first GPU's memory: contexts and allocators' pools count."""
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    return int(done.stdout) * 2**20


def drop_caches(job: dict[str, Any]) -> None:
    """Let the page cache go: all of the cap's group, then the files of all engines."""
    for name, value in (("memory.force_empty", "0"), ("memory.reclaim", str(1 << 40))):
        control = Path(job["cgroup"] or "/nonexistent") / name
        if control.exists():
            try:
                control.write_text(value)
            except OSError as error:  # it has given up what it can
                print(f"{name}: {error.strerror}", file=sys.stderr)
    for file in job["files"]:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(engine: Engine, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Feed the prompts, each cold and then warm; behind the first of each, decode the forced tokens.

    Before, all of them once without a clock: kernels are compiled, libraries set up.
    """
    for prompt in job["prompts"]:
        engine.reset()
        engine.feed(prompt)
        engine.feed(job["forced"][:1])
    rows = []
    for prompt in job["prompts"]:
        for state in ("cold", "warm"):
            if state == "cold":
                engine.forget()
                drop_caches(job)
            engine.reset()
            read, started = read_nbytes(), time.perf_counter()
            engine.feed(prompt)
            row = {"state": state, "prompt": len(prompt), "ttft_s": time.perf_counter() - started}
            row["prompt_read_nbytes"] = read_nbytes() - read
            if prompt is job["prompts"][0]:
                read, started = read_nbytes(), time.perf_counter()
                for token in job["forced"]:
                    engine.feed([token])
                row["tok_s"] = len(job["forced"]) / (time.perf_counter() - started)
                row["token_nbytes"] = (read_nbytes() - read) / len(job["forced"])
            rows.append(row)
    return rows


def main() -> None:
    """Read the job from stdin; write one JSON object to stdout."""
    job = json.load(sys.stdin)
    drop_caches(job)
    used_before = used_vram_nbytes() if job["device"] == "cuda" else 0
    started = time.perf_counter()
    engine = ENGINES[job["engine"]](job)
    found: dict[str, Any] = {"open_s": time.perf_counter() - started, "version": engine.version}
    if job["check"]:
        found["logits"] = [engine.feed(job["prompts"][0]).tolist()]
        found["logits"] += [engine.feed([token]).tolist() for token in job["forced"][:3]]
    else:
        found["rows"] = measure(engine, job)
    if job["device"] == "cuda":
        found["vram_nbytes"] = used_vram_nbytes() - used_before
    found["peak_rss_nbytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
