"""Decode at the full shape of Qwen3.8-Flash-Next from random weights, all experts in pinned RAM: time against floors.

    python tests/bench/bench_full_shape.py --experts 96 --tokens 50 --copy 0,2,4,10,16

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
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from kernels.formats import fp8_rows_quantize
from runtime import cores
from runtime.experts.arena import HostArena
from runtime.experts.copies import CudaCopier
from runtime.experts.paced import PacedCopier
from runtime.experts.resident import ResidentExperts
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_model import QwenModel
from runtime.models.qwen_token import TokenDecoder
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
        return len(ids) // 16

    def collect(self, request):
        return self.rows.repeat(request)


def full_spec(experts: int, num_layers: int = 48, vocab_size: int = 248320) -> QwenSpec:
    text = json.loads((ROOT / "runtime/bundled/tiny-qwen/config.json").read_text())["text_config"] | {
        "vocab_size": vocab_size, "hidden_size": 2560, "num_hidden_layers": num_layers, "num_attention_heads": 24,
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (num_layers // 4),
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


def measure_prompts(model: QwenModel, context: int) -> None:
    """Print what prompts of several lengths hold beside weights, state and slots, and how long they take."""
    model.decoder = Decoder(model, context, has_graphs=True)
    for tokens in (64, 512, 1024, 2048, 4096, 8000):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        model.prefill([7 * i % 4000 for i in range(tokens)], model.new_state())
        torch.cuda.synchronize()
        spent_s = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() - before
        print(f"prompt of {tokens} tokens: {peak / 2**20:.1f} MiB, {spent_s:.2f} s", flush=True)


def decode(
    decoder: Decoder, slots: SlotExperts, tokens: int
) -> tuple[dict[str, float], torch.Tensor]:
    """Decode some tokens: milliseconds and bytes of one, and a sample of every token's logits."""
    state, before = decoder.model.new_state(), slots.counters.copy()
    times, hosts, logits = [], [], []
    reserved = 0
    for i in range(tokens):
        started, waited = time.perf_counter(), decoder.wait_ns
        row = decoder.step(1000 + i, state)
        hosts.append((time.perf_counter() - started) * 1e3 - (decoder.wait_ns - waited) / 1e6)
        logits.append(row[0, ::997].clone())
        row.argmax().item()
        times.append((time.perf_counter() - started) * 1e3)
        if i == 0:  # the first step captures nothing
            reserved = torch.cuda.memory_reserved()
    spent, steady = slots.counters.since(before), sorted(times[5:])
    found = {
        "ms": steady[len(steady) // 2],
        "p95_ms": steady[int(len(steady) * 0.95)],
        "host_ms": sorted(hosts[5:])[len(hosts[5:]) // 2],
        "pool_mib": (torch.cuda.memory_reserved() - reserved) / 2**20,
        "copied_nbytes": spent.copied_nbytes / tokens,
        "vram_hits": spent.vram_hits / spent.lookups,
        "early_used": spent.early_used / max(1, spent.early_issued),
    }
    return found, torch.stack(logits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument(
        "--copy", default="0,4", help="guesses copied to VRAM early, several with commas"
    )
    parser.add_argument(
        "--kept", default="0", help="VRAM slots that keep experts, several with commas"
    )
    parser.add_argument("--eager", action="store_true", help="also without graphs")
    parser.add_argument("--token", action="store_true", help="also with one graph for each token")
    parser.add_argument("--pin", action="store_true", help="pin this thread as an engine does")
    parser.add_argument("--prompts", action="store_true", help="memory and time of prompts instead")
    args = parser.parse_args()
    core_plan = cores.assign(cores.read_topology())
    if args.pin and core_plan is not None:
        cores.pin_current_thread({core_plan.decode_cpu})
    spec = full_spec(args.experts)
    experts = RandomExperts(spec.num_layers, args.experts)
    rate = copy_rate_gb_s(experts._arena)
    weights = random_weights(spec)
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"].cpu()
    scales = torch.full((spec.num_layers, args.experts, 3), 2e-2, device="cuda")
    copies, kept = ([int(n) for n in text.split(",")] for text in (args.copy, args.kept))
    guesses = max(spec.top_k, *copies)
    model = QwenModel(spec, weights, scales, experts, RandomRows(spec.ple_dim), 1e-3, guesses)
    results, wanted = [], None
    modes = [*(["eager"] if args.eager else []), "graphs", *(["token"] if args.token else [])]
    for copy, slots_kept, mode in product(copies, kept, modes):
        num_slots = passing_slots(copy) + slots_kept
        copier = CudaCopier(num_slots, RECORD_NBYTES, torch.device("cuda"))
        paced = PacedCopier(copier) if mode == "token" else copier
        slots = SlotExperts(experts, paced, spec.num_layers, spec.top_k, copy)
        model.experts = slots
        if args.prompts:
            measure_prompts(model, args.context)
            return
        if mode == "token":
            decoder = TokenDecoder(model, args.context, limit_s=20.0)
        else:
            decoder = Decoder(model, args.context, has_graphs=mode == "graphs")
        found, logits = decode(decoder, slots, args.tokens)
        wanted = logits if wanted is None else wanted
        found |= {"copy": copy, "kept": slots_kept, "mode": mode}
        found["floor_ms"] = floor_ms = found["copied_nbytes"] / rate / 1e6
        found["same_bits"] = bool(torch.equal(logits, wanted))
        found["is_finite"] = bool(logits.isfinite().all())
        results.append(found)
        print(f"copy {copy:2} kept {slots_kept:4} {mode:6} {found['ms']:.2f} ms (p95 "
              f"{found['p95_ms']:.2f}), host {found['host_ms']:.2f} ms, {found['ms'] / floor_ms:.2f} x its PCIe floor "
              f"of {floor_ms:.2f} ms, VRAM hits {found['vram_hits']:.1%}, early copies used "
              f"{found['early_used']:.1%}, same bits {found['same_bits']}, graphs hold {found['pool_mib']:.1f} MiB",
              file=sys.stderr, flush=True)  # fmt: skip
    print(json.dumps({"copy_gb_s": rate, "results": results}))


if __name__ == "__main__":
    main()
