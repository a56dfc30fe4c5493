"""Random dense models for tests, opened without the stages."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from conf.schema import DriveConfig
from runtime.checkpoint import Checkpoint
from runtime.experts.reader import DirectReader
from runtime.experts.streamer import ExpertStreamer, ResidentExperts
from runtime.models.dense import DenseModel
from runtime.models.dense_weights import DenseSpec, LayerLayout

SIZES = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1_000_000,
}  # fmt: skip


def open_dense(folder: Path, cache_rows: int | None = None) -> DenseModel:
    """Open a snapshot in fp32.  cache_rows: layers kept in memory; None: all, read at once."""
    spec = DenseSpec.from_config(json.loads((folder / "config.json").read_text()))
    checkpoint = Checkpoint.open(folder)
    layout = LayerLayout(checkpoint, spec)
    reader = DirectReader(layout.files, DriveConfig())
    experts = (
        ResidentExperts(layout, reader)
        if cache_rows is None
        else ExpertStreamer(layout, reader, cache_rows, 2, 0)
    )
    weights = {name: checkpoint.load(name) for name in spec.resident_shapes()}
    return DenseModel(spec, weights, layout, experts, torch.float32)
