"""A random draft head for the bundled Qwen model: a snapshot that links to its files and adds one shard."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.models.qwen_weights import QwenSpec

SHARD = "model-mtp.safetensors"


def make_mtp_snapshot(source: Path, target: Path) -> Path:
    """Fill the folder `target`: matrices that keep sizes, experts as block FP8."""
    for file in source.iterdir():
        if not file.name.endswith("index.json"):
            (target / file.name).symlink_to(file)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    spec = QwenSpec.from_config(json.loads((source / "config.json").read_text()))
    random = torch.Generator().manual_seed(11)
    tensors = {}
    for name, shape in spec.mtp_shapes().items():
        size = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        values = torch.randn(shape, generator=random) * size
        tensors[f"mtp.{name}"] = values.to(torch.bfloat16)
    for expert in range(spec.num_experts):
        for part in ("gate", "up", "down"):
            name = f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            shape = (spec.intermediate, spec.hidden)
            shape = shape[::-1] if part == "down" else shape
            tiles = [-(-n // 128) for n in shape]
            values = torch.randn(shape, generator=random) * 64
            tensors[name] = values.to(torch.float8_e4m3fn)
            scale = torch.rand(tiles, generator=random) + 0.5
            tensors[f"{name}_scale_inv"] = (scale / 64 * shape[1] ** -0.5).to(torch.bfloat16)
    save_file(tensors, target / SHARD)
    index["weight_map"] |= dict.fromkeys(tensors, SHARD)
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target
