"""Random Qwen3-MoE models for tests: made by transformers, opened without the stages."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from conf.schema import RunConfig
from runtime.checkpoint import Checkpoint
from runtime.experts.reader import DirectReader
from runtime.experts.resident import ResidentExperts
from runtime.experts.slots import SlotExperts
from runtime.experts.streamer import ExpertStreamer
from runtime.models import qwen3_moe
from runtime.models.qwen3_moe_weights import expert_layout

SIZES = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 112, "moe_intermediate_size": 40,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 24,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "max_position_embeddings": 4096,
}  # fmt: skip


def save_random(
    folder: Path, dtype: torch.dtype = torch.float32, shard: str = "60KB", **changes: object
) -> Qwen3MoeForCausalLM:
    """Save a random model in many shards; return what transformers reads back, in fp32."""
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # biases and gains that do nothing hide mistakes
                weight.copy_(torch.rand_like(weight) + 0.5 * ("norm" in name))
            else:
                weight.normal_(std=4 * 0.02)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def open_model(
    folder: Path,
    cache_rows: int | None = None,
    num_guesses: int = 0,
    copier: object = None,
    dtype: torch.dtype = torch.float32,
) -> qwen3_moe.Qwen3MoeModel:
    """Open a snapshot.  cache_rows: experts kept in memory; None: all, read at once.

    copier: of slots in front of them, as a GPU has.  dtype: of the hidden states.
    """
    config, spec = RunConfig(), qwen3_moe.read_spec(folder)
    layout = expert_layout(Checkpoint.open(folder), spec)
    reader = DirectReader(layout.files, config.hw.drive)
    experts: object = (
        ResidentExperts(layout, reader)
        if cache_rows is None
        else ExpertStreamer(layout, reader, cache_rows, 3, num_guesses)
    )
    if copier is not None:
        slots = copier(layout.record_nbytes)
        experts = SlotExperts(experts, slots, spec.num_layers, spec.top_k, num_guesses, False)
    weights = {name: Checkpoint.open(folder).load(name) for name in spec.resident_shapes()}
    return qwen3_moe.Qwen3MoeModel(
        spec, weights, experts, qwen3_moe.expert_opener(layout), dtype, num_guesses
    )
