"""Write a Qwen3-MoE checkpoint in BF16 as GGUF, every matrix byte for byte: what `peers.py` gives to llama.cpp.

    python tests/bench/peers_gguf.py SNAPSHOT FILE.gguf

Norms and routers become F32, as llama.cpp wants them. No vocabulary: it is fed with token ids. Needs numpy and gguf
alone. Not collected by pytest.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BF16 = gguf.GGMLQuantizationType.BF16


class Source:
    """The tensors of a checkpoint, mapped."""

    def __init__(self, root: Path) -> None:
        self._places: dict[str, tuple[Path, int, tuple[int, ...]]] = {}
        for file in sorted(root.glob("*.safetensors")):
            with open(file, "rb") as f:
                (size,) = struct.unpack("<Q", f.read(8))
                header = json.loads(f.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}, not BF16"
                start = 8 + size + entry["data_offsets"][0]
                self._places[name] = (file, start, tuple(entry["shape"]))

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name][2]

    def bits(self, name: str) -> np.ndarray:
        """Return the BF16 bits of a tensor: uint16 in its shape."""
        file, start, shape = self._places[name]
        return np.memmap(file, np.uint16, "r", start, shape)

    def floats(self, name: str) -> np.ndarray:
        """Return a tensor widened to F32, exactly."""
        return (self.bits(name).astype(np.uint32) << 16).view(np.float32)


def write(root: Path, target: Path) -> None:
    """Write `target`, whole or not at all."""
    config, source = json.loads((root / "config.json").read_text()), Source(root)
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise SystemExit("llama.cpp's qwen3moe has experts in every layer, this checkpoint has not")
    temporary = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(temporary, "qwen3moe")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    parts = tensors(config, source)
    for name, names in parts.items():
        shape = source.shape(names[0])
        if is_widened(names):
            size = 4 * int(np.prod(shape))
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size)
        else:
            shape = (len(names), *shape) if "_exps" in name else shape
            size = 2 * int(np.prod(shape))
            in_bytes = (*shape[:-1], 2 * shape[-1])
            writer.add_tensor_info(name, in_bytes, np.dtype(np.uint8), size, raw_dtype=BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, names in parts.items():
        if is_widened(names):
            writer.write_tensor_data(source.floats(names[0]))
        else:
            bits = [source.bits(part) for part in names]
            writer.write_tensor_data(np.stack(bits) if "_exps" in name else np.array(bits[0]))
    writer.close()
    os.replace(temporary, target)


def tensors(config: dict, source: Source) -> dict[str, list[str]]:
    """Return name in the GGUF -> the checkpoint's tensors that it is made of."""
    found = {}
    for ours, theirs in NAMES.items():
        if f"{ours}.weight" in source.names():  # a tied head is not there
            found[f"{theirs}.weight"] = [f"{ours}.weight"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for ours, theirs in LAYER_NAMES.items():
            found[f"blk.{layer}.{theirs}.weight"] = [f"{prefix}{ours}.weight"]
        for part in ("gate", "up", "down"):
            found[f"blk.{layer}.ffn_{part}_exps.weight"] = [
                f"{prefix}mlp.experts.{expert}.{part}_proj.weight"
                for expert in range(config["num_experts"])
            ]
    return found


def is_widened(names: list[str]) -> bool:
    """Say whether a tensor is F32 in the GGUF."""
    return "norm" in names[0] or names[0].endswith("mlp.gate.weight")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
