"""A model that the knowledge base does not have, from its folder: config.json and the headers of its weights.

Sizes are exact; nothing is guessed. What the config does not say stays unknown.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from runtime.errors import UsageError

_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.")
_TABLE = re.compile(r"(engram|ngram|ple)\S*(embedding|table|weight)", re.IGNORECASE)
_NAMES = {
    "layers": ("num_hidden_layers",),
    "attn_layers": ("num_hidden_layers",),
    "n_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
    "d_model": ("hidden_size",),
    "d_expert": ("moe_intermediate_size",),
    "ctx_max": ("max_position_embeddings",),
}


def model_from_folder(folder: Path, name: str, variant_format: str | None = None) -> dict[str, Any]:
    """Return a model document with one variant `local`. Raises UsageError when the folder has no config or weights."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} has no readable config.json: {error}",
            "give a folder with config.json and weights",
        ) from error
    text = config.get("text_config", config)
    files = sorted(folder.glob("**/*.safetensors"))
    if not files:
        raise UsageError(
            f"{folder} has no safetensors files", "give a folder with config.json and weights"
        )
    document: dict[str, Any] = {
        "id": f"model-local-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}",
        "name": name,
        "aliases": [name],
        "family": str(config.get("model_type", name)),
        "modality": ["text"],
        "sources": ["local files"],
        "status": "checked",
    }
    for field, keys in _NAMES.items():
        value = next((text[k] for k in keys if isinstance(text.get(k), int)), None)
        if value is not None:
            document[field] = value
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        document["attn_layers"] = sum("full" in str(k) or "indexed" in str(k) for k in kinds)
    expert_nbytes = table_nbytes = resident_nbytes = 0
    layers, experts = set(), set()
    for path in files:
        for tensor, nbytes in _tensors(path):
            match = _EXPERT.search(tensor)
            if match and not tensor.startswith("mtp"):
                expert_nbytes += nbytes
                layers.add(int(match[1]))
                experts.add((int(match[1]), int(match[2])))
            elif _TABLE.search(tensor):
                table_nbytes += nbytes
            else:
                resident_nbytes += nbytes
    variant: dict[str, Any] = {
        "id": "local",
        "format": variant_format
        or str(config.get("quantization_config", {}).get("quant_method", "safetensors")),
        "quant": "as in the folder",
        "bits_eff": 16.0,
        "file_bytes": sum(p.stat().st_size for p in files),
        "resident_bytes": resident_nbytes,
        "active_resident_bytes": resident_nbytes,
    }
    if table_nbytes:
        variant["tables_bytes"] = table_nbytes
    document["arch"] = "moe" if experts else "dense"
    if experts:
        document["moe_layers"] = len(layers)
        document.setdefault("experts", len(experts) // max(1, len(layers)))
        variant["expert_bytes"] = expert_nbytes / len(experts)
        if "top_k" not in document:
            raise UsageError(
                f"{folder}/config.json does not say how many experts a token uses",
                "add num_experts_per_tok",
            )
    document["variants"] = [variant]
    return document


def _tensors(path: Path) -> list[tuple[str, int]]:
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > 2**30:
                raise ValueError("the header is too long")
            header = json.loads(file.read(length))
        return [
            (n, t["data_offsets"][1] - t["data_offsets"][0])
            for n, t in header.items()
            if n != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} has no readable safetensors header: {error}", "fetch it again"
        ) from error
