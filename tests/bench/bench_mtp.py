"""What a guess of Qwen's draft head costs at the released shape, its experts in RAM: random weights, no drive.

`python tests/bench/bench_mtp.py [--device cuda] [--threads 1]`; a guess reads the main model's head, which is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from runtime.experts.tensor_runs import Part
from runtime.models.qwen_drafts import Mtp, MtpLayout
from runtime.models.qwen_weights import QwenSpec
from runtime.units import GIB, MIB

ROOT = Path(__file__).resolve().parents[2]
EXPERTS = 64  # with bytes of their own: more than a cache of the CPU holds
TOKENS = 64
REPEATS = 15


def layout_of(spec: QwenSpec) -> Any:
    """Return where weight and scale of an expert's matrices lie, one behind the other."""
    parts: list[Part] = []
    at = 0
    for name, rows, columns in (
        ("gate", spec.intermediate, spec.hidden),
        ("up", spec.intermediate, spec.hidden),
        ("down", spec.hidden, spec.intermediate),
    ):
        tiles = (-(-rows // 128), -(-columns // 128))
        for kind, dtype, shape, size in (
            ("weight", "F8_E4M3", (rows, columns), 1),
            ("scale", "BF16", tiles, 2),
        ):
            nbytes = shape[0] * shape[1] * size
            parts.append(Part(f"{name}.{kind}", dtype, shape, at, nbytes))
            at += nbytes
    return SimpleNamespace(parts=lambda _: parts, record_nbytes=at)


class InRam:
    """Records of random numbers, as an expert source gives those that it has."""

    def __init__(self, layout: Any, is_pinned: bool) -> None:
        random = torch.Generator().manual_seed(1)
        self.records = torch.empty(EXPERTS, layout.record_nbytes, dtype=torch.uint8)
        for record in self.records:
            for part in layout.parts(0):
                dtype = torch.float8_e4m3fn if part.dtype == "F8_E4M3" else torch.bfloat16
                values = torch.rand(part.shape, generator=random).sub_(0.5).mul_(0.1).to(dtype)
                record[part.offset : part.offset + part.nbytes] = values.view(torch.uint8).flatten()
        if is_pinned:
            self.records = self.records.pin_memory()

    def fetch(self, layer: int, ids: Any, guesses: Any = ()) -> Any:
        return ((expert, self.records[expert % EXPERTS]) for expert in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    device = torch.device(wanted.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    folder = ROOT / "runtime" / "bundled" / "qwen38-flash-next"
    spec = QwenSpec.from_config(json.loads((folder / "config.json").read_text()))

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5

    head, table = made(spec.vocab_size, spec.hidden), torch.zeros(spec.vocab_size, 1)
    embedding = table.to(dtype).expand(spec.vocab_size, spec.hidden)
    weights = {name: made(*shape) for name, shape in spec.mtp_shapes().items()}
    model = SimpleNamespace(spec=spec, device=device, embedding=embedding, head=head)
    layout = layout_of(spec)
    experts = cast("Any", InRam(layout, device.type == "cuda"))
    mtp = Mtp(cast("Any", model), weights, cast("MtpLayout", layout), experts)
    state = mtp.new_state()
    mtp.seed(list(range(TOKENS)), made(TOKENS, spec.streams, spec.hidden), state)
    row = made(1, spec.streams, spec.hidden)

    def timed(work: Any) -> float:
        times = []
        for _ in range(REPEATS):
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times[2:])

    one, four = (timed(lambda depth=depth: mtp.propose(5, state, depth)) for depth in (1, 4))
    told = timed(lambda: mtp.seed([5], row, state))
    experts_mib = spec.top_k * layout.record_nbytes / MIB
    print(
        f"{device.type}: a guess {one:.2f} ms, four {four:.2f} ms ({(four - one) / 3:.2f} each further one), a token "
        f"told {told:.2f} ms; a guess has {experts_mib:.1f} MiB of experts, {head.nbytes / GIB:.2f} GiB of head"
    )


if __name__ == "__main__":
    main()
