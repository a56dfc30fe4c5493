"""Snapshots with inference code: the stand-in package beside the golden or the bundled checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from stages import patch

ROOT = Path(__file__).resolve().parents[1]
STANDIN = ROOT / "tests" / "data" / "deepseek_standin"
GOLDEN = ROOT / "tests" / "data" / "deepseek_golden" / "checkpoint"
TINY = ROOT / "runtime" / "bundled" / "tiny-deepseek"


def make_snapshot(folder: Path, checkpoint: Path = GOLDEN) -> Path:
    """Link a checkpoint's files into `folder` and copy the stand-in's code beside them."""
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.is_file():
            (folder / path.name).symlink_to(path)
    code = folder / "inference"
    shutil.copytree(checkpoint / "inference", code)
    for path in STANDIN.glob("*.py"):
        shutil.copy(path, code)
    return folder


FLAT = {
    "vocab_size": "vocab_size", "hidden_size": "dim", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "head_dim": "head_dim", "qk_rope_head_dim": "rope_head_dim",
    "q_lora_rank": "q_lora_rank", "o_lora_rank": "o_lora_rank", "o_groups": "o_groups",
    "moe_intermediate_size": "moe_inter_dim", "n_routed_experts": "n_routed_experts",
    "num_experts_per_tok": "n_activated_experts", "routed_scaling_factor": "route_scale",
    "swiglu_limit": "swiglu_limit", "rms_norm_eps": "norm_eps", "sliding_window": "window_size",
    "compress_ratios": "compress_ratios", "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers", "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim", "index_topk": "index_topk",
    "candidate_source_layer_id": "candidate_source_layer", "candidate_topk_blocks": "candidate_topk_blocks",
    "candidate_block_size": "candidate_block_size", "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta", "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters", "hc_eps": "hc_eps", "engram_layer_ids": "engram_layer_ids",
    "engram_num_embeddings": "engram_num_embeddings", "engram_max_ngram_size": "engram_max_ngram_size",
    "engram_vocab_size": "engram_vocab_size", "engram_n_heads": "engram_n_heads",
    "engram_head_dim": "engram_head_dim", "engram_pad_token_id": "engram_pad_id",
    "engram_compressed_vocab_size": "engram_compressed_vocab_size",
}  # fmt: skip


def flat_config(config: dict) -> dict:
    """Return what inference/config.json says, from a release's config.json."""
    text = config["text_config"]
    scaling = text["rope_scaling"]
    return {flat: text[name] for name, flat in FLAT.items()} | {
        "rope_factor": scaling["factor"],
        "beta_fast": scaling["beta_fast"],
        "beta_slow": scaling["beta_slow"],
        "original_seq_len": scaling["original_max_position_embeddings"],
    }


def make_published(source: Path, folder: Path) -> Path:
    """Return the stand-in's code, patched, for a checkpoint that came without any; made below `folder`."""
    code = make_snapshot(folder / "code") / "inference"
    flat = flat_config(json.loads((source / "config.json").read_text()))
    (code / "config.json").write_text(json.dumps(flat))
    return make_patched(code.parent, folder / "patched")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def know_the_standin(monkeypatch, snapshot: Path) -> None:
    """Take the stand-in's files for the known ones."""
    known = {name: sha256(snapshot / "inference" / name) for name in patch.KNOWN_SHA256}
    monkeypatch.setattr(patch, "KNOWN_SHA256", known)


def make_patched(snapshot: Path, folder: Path) -> Path:
    """Return a copy of a snapshot's code as the patch stage makes it, without its bookkeeping."""
    shutil.copytree(snapshot / "inference", folder)
    kernel = folder / patch.KERNEL
    kernel.write_bytes(patch.patched(kernel, kernel.read_bytes()))
    return folder
