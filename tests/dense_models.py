"""Random dense models for tests, opened without the stages."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from conf.schema import DriveConfig
from runtime.checkpoint import Checkpoint
from runtime.experts.reader import DirectReader
from runtime.experts.resident import ResidentExperts
from runtime.experts.streamer import ExpertStreamer
from runtime.models.dense import DenseModel
from runtime.models.dense_weights import DenseSpec, LayerLayout, head_entries

SIZES = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1_000_000,
}  # fmt: skip

QWEN25_7B = {  # the release's config.json, as far as this engine reads it
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    "rope_theta": 1e7, "max_position_embeddings": 1010000, "tie_word_embeddings": False,
    "dual_chunk_attention_config": {
        "chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144,
    },
}  # fmt: skip


def open_dense(
    folder: Path, cache_rows: int | None = None, layers: Path | None = None
) -> DenseModel:
    """Open a snapshot in fp32.

    cache_rows: layers kept in memory; None: all, read at once.  layers: what `quantize` made of it; None: as stored.
    """
    spec = DenseSpec.from_config(json.loads((folder / "config.json").read_text()))
    checkpoint = Checkpoint.open(folder)
    copy = Checkpoint.open(layers or folder)
    layout = LayerLayout(copy, spec)
    reader = DirectReader(layout.files, DriveConfig())
    experts = (
        ResidentExperts(layout, reader)
        if cache_rows is None
        else ExpertStreamer(layout, reader, cache_rows, 2, 0)
    )
    weights = {name: checkpoint.load(name) for name in spec.resident_shapes()}
    if layers is not None:
        weights |= {name: copy.load(name) for name in head_entries(spec, layout.weights)}
    return DenseModel(spec, weights, layout, experts, torch.float32)
