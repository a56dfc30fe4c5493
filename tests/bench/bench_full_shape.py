"""Decode at the full shape of Qwen3.8-Flash-Next from random weights, all experts in pinned RAM: time against floors.

    python tests/bench/bench_full_shape.py --experts 96 --tokens 50

48 layers, hidden 2560, top-10, DeltaNet matrices as FP8 rows; `--experts` per layer instead of 512, as RAM allows (the
bytes that a token pulls in do not depend on it). The numbers mean nothing, their cost does. Prints the milliseconds of
a token and of its parts, and the PCIe floor from the copy rate measured in the same run. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from kernels.formats import fp8_rows_quantize
from runtime.experts.arena import HostArena
from runtime.experts.copies import CudaCopier
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.experts.streamer import ResidentExperts
from runtime.models.qwen import QwenModel
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_weights import FP8_ROW_TAILS, PREFIX, QwenSpec
from runtime.stats import ExpertCounters

RECORD_NBYTES = 2_764_800


class RandomExperts(ResidentExperts):
    """Records of random codes and small block scales in pinned RAM; every look-up is a hit."""

    def __init__(self, layers: int, experts: int) -> None:
        self.counters, self._num_experts = ExpertCounters(), experts
        self._arena = HostArena(layers * experts, RECORD_NBYTES)
        self._arena.pin()
        for row in self._arena.rows:
            noise = torch.randint(0, 256, (RECORD_NBYTES,), dtype=torch.uint8, device="cuda")
            noise[2_457_600:] = 0x20 + noise[2_457_600:] % 0x10
            row.copy_(noise)


class RandomRows:
    """Sixteen random n-gram rows, at once."""

    read_nbytes = wait_ns = 0

    def __init__(self, nbytes: int) -> None:
        self.rows = torch.randint(0, 0x40, (nbytes,), dtype=torch.uint8)

    def request(self, ids):
        return None

    def collect(self, request):
        return self.rows


def full_spec(experts: int) -> QwenSpec:
    text = json.loads((ROOT / "runtime/bundled/tiny-qwen/config.json").read_text())["text_config"] | {
        "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640,
        "num_experts_per_tok": 10, "num_experts": experts, "hc_lowrank": 320, "ple_embed_dim": 2560,
        "heads_per_ngram": 8, "split_ngram_parts": 128, "indexer_n_heads": 4, "indexer_head_dim": 128,
        "indexer_budget": 2048, "indexer_compress_ratio": 4, "eos_token_id": 248044,
    }  # fmt: skip
    text["rope_parameters"] = text["rope_parameters"] | {"rope_theta": 1e7}
    return QwenSpec.from_config({"model_type": "qwen4_exp", "text_config": text})


def random_weights(spec: QwenSpec) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weights = {}
    for full, shape in spec.resident_shapes().items():
        name = full.removeprefix(PREFIX)
        if "ple_embedding" in name:
            weights[name] = (
                torch.ones(shape, dtype=torch.int64)
                + torch.arange(math.prod(shape)).view(shape) * 2
            )
            continue
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * scale
        if name.endswith(FP8_ROW_TAILS):
            weights[name], weights[f"{name}_scale"] = fp8_rows_quantize(weight)
        else:
            weights[name] = weight
    return weights


def copy_rate_gb_s(arena: HostArena) -> float:
    target = torch.empty(64, RECORD_NBYTES, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(arena.rows[64 * i : 64 * i + 64], non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return target.numel() / min(times) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument(
        "--profile", action="store_true", help="count kernels and their time in one eager step"
    )
    parser.add_argument("--copy", type=int, default=0, help="guesses copied to VRAM early")
    parser.add_argument("--kept", type=int, default=0, help="VRAM slots that keep experts")
    args = parser.parse_args()
    spec = full_spec(args.experts)
    experts = RandomExperts(spec.num_layers, args.experts)
    rate = copy_rate_gb_s(experts._arena)
    weights = random_weights(spec)
    scales = torch.full((spec.num_layers, args.experts, 3), 2e-2, device="cuda")
    copier = CudaCopier(passing_slots(args.copy) + args.kept, RECORD_NBYTES, torch.device("cuda"))
    slots = SlotExperts(experts, copier, spec.num_layers, spec.top_k, args.copy)
    guesses = max(spec.top_k, args.copy)
    model = QwenModel(spec, weights, scales, slots, RandomRows(spec.ple_dim), 1e-3, guesses)
    weights["embed_tokens.weight"] = model.embedding = model.embedding.cpu()
    result: dict[str, object] = {"copy_gb_s": rate}
    outputs = {}
    for has_graphs in (False, True):
        decoder = Decoder(model, args.context, has_graphs)
        state = model.new_state()
        times, logits = [], []
        host = 0.0
        before = slots.counters.copy()
        for i in range(args.tokens):
            started = time.perf_counter()
            row = decoder.step(1000 + i, state)
            logits.append(row[0, ::997].clone())
            row.argmax().item()
            times.append((time.perf_counter() - started) * 1e3)
        outputs[has_graphs] = torch.stack(logits)
        if args.profile and not has_graphs:
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                decoder.step(7, state)
                torch.cuda.synchronize()
            table = profile.key_averages().table(
                sort_by="cuda_time_total", row_limit=40, max_name_column_width=60
            )
            print(table, file=sys.stderr)
        spent = slots.counters.since(before)
        floor_ms = spent.copied_nbytes / args.tokens / rate / 1e6
        steady = sorted(times[5:])
        waits = decoder.wait_ns / 1e6 / args.tokens
        median = steady[len(steady) // 2]
        host = sum(times[5:]) / len(times[5:]) - waits
        key = "graphs" if has_graphs else "eager"
        result[key] = {
            "ms": median,
            "p95_ms": steady[int(len(steady) * 0.95)],
            "host_ms": host,
            "pcie_floor_ms": floor_ms,
            "x_floor": median / floor_ms,
            "vram_hits": spent.vram_hits / spent.lookups,
            "early_used": spent.early_used / max(1, spent.early_issued),
        }
        print(f"{key:7} {median:.2f} ms a token, host {host:.2f} ms, {median / floor_ms:.2f} x the PCIe floor "
              f"of {floor_ms:.2f} ms at {rate:.1f} GB/s", file=sys.stderr)  # fmt: skip
    result["same_bits"] = bool(torch.equal(outputs[False], outputs[True]))
    result["is_finite"] = bool(outputs[True].isfinite().all())
    result["peak_vram_gib"] = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(result))


if __name__ == "__main__":
    main()
