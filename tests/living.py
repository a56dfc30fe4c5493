"""What tests of the living memory share: a small dense model with a tokenizer of words, and stores of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from conf.schema import MemoryConfig
from runtime.living_kv.identity import new_header
from runtime.living_kv.memory import Memory
from runtime.living_kv.store import Store
from runtime.models.dense import DenseModel, open_codec
from tests.dense_models import open_dense

WORDS = [f"w{i:03d}" for i in range(296)]
SIZES = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1_000_000,
}  # fmt: skip


def make_snapshot(folder: Path, kind: str = "llama", seed: int = 5) -> Path:
    """Write a random model of words; logits are spread enough that a small error does not change the best."""
    torch.manual_seed(seed)
    config, cls = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]
    model = cls(config(**SIZES, eos_token_id=1))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(4 if weight.ndim == 2 else 1)
            if name.endswith("bias"):
                weight.copy_(torch.randn_like(weight))
    model.save_pretrained(folder)
    vocab = {w: i for i, w in enumerate(["<unk>", "<eos>", ".", "?", *WORDS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def words(count: int, seed: int = 0) -> str:
    """Return sentences of random words, about `count` tokens in all."""
    rng = torch.Generator().manual_seed(seed)
    out, made = [], 0
    while made < count:
        n = 5 + int(torch.randint(12, (1,), generator=rng))
        picks = torch.randint(len(WORDS), (n,), generator=rng).tolist()
        out.append(" ".join(WORDS[i] for i in picks) + ".")
        made += n + 1
    return " ".join(out)


def config(**changes) -> MemoryConfig:
    """Return settings for small models: everything in tens of tokens."""
    found = MemoryConfig(
        window=128, chunk=64, block=64, budget=48, recency_tail=64, index_dim=32, commit_tokens=128, ram_gib=0.01,
    )  # fmt: skip
    for key, value in changes.items():
        setattr(found, key, value)
    return found


def open_memory(
    snapshot: Path,
    root: Path,
    settings: MemoryConfig,
    model: DenseModel | None = None,
    is_writer: bool = True,
) -> Memory:
    """Open a store, made where there is none."""
    model = model or open_dense(snapshot)
    store = (
        Store.open(root, is_writer)
        if (root / "HEADER.json").exists()
        else Store.create(root, new_header(model, snapshot, settings, "2026-01-01T00:00:00Z"))
    )
    return Memory(model, open_codec(snapshot), store, settings, clock=lambda: 1.7e9)
