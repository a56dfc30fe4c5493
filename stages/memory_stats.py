"""A store in numbers: its kind, counts, bytes per token against what its formats come to, its confidence's fit."""

from __future__ import annotations

import json

import numpy as np

from runtime.living_kv.confidence import load_estimator
from runtime.living_kv.store import Store
from stages.memory_parts import opened_store
from stages.stage import Stage, StageContext


def kv_token_nbytes(store: Store) -> float:
    """Return what one token's keys and values come to in the store's codec, without headers and padding."""
    h = store.header
    values = h.kv_heads * h.head_dim
    per_layer = {
        "k8c_v8t": 2 * values + 2 * values / h.block + 2 * h.kv_heads,
        "k8t_v8t": 2 * values + 4 * h.kv_heads,
        "fp16": 4 * values,
        "fp32": 8 * values,
    }
    return h.layers * per_layer[h.codec] if h.kind == "kv" else 0.0


def angle_error(theta: float, dim: int, position: int) -> float:
    """Return how far an angle computed in fp32, as models do it, is off at a position, in rad."""
    inverse = (1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))).astype(
        np.float32
    )
    exact = inverse.astype(np.float64) * position
    return float(np.abs(inverse * np.float32(position) - exact).max())


def describe(store: Store) -> dict[str, object]:
    """Return the figures."""
    c, h = store.commit, store.header
    kv_nbytes = sum(n for name, n in c.lengths.items() if name.endswith(".kvb"))
    found = load_estimator(store.root)
    out: dict[str, object] = {
        "kind": h.kind, "codec": h.codec, "created": h.created, "commits": c.seq, "tokens": c.tokens,
        "sentences": c.sentences, "pruned": len(store.tombstones), "blocks": c.blocks,
        "nbytes": sum(c.lengths.values()), "sessions": len(store.sessions),
    }  # fmt: skip
    if h.kind == "kv":
        out |= {
            "kv_nbytes_per_token": round(kv_nbytes / max(1, c.blocks * h.block), 1),
            "kv_nbytes_per_token_computed": round(kv_token_nbytes(store), 1),
            "exact_nbytes_per_token": h.exact_nbytes,
            "fp32_angle_error_rad": angle_error(h.rope_theta, h.head_dim, c.tokens),
            "model": dict(h.model),
        }
    if found is not None:
        out |= {
            "calibrated_at_sentences": found.sentences,
            "held_out_false_confidence": found.held_out_false,
            "held_out_missed": found.held_out_missed,
        }
    return out


def run(ctx: StageContext) -> None:
    """Print the figures as JSON."""
    with opened_store(ctx.cfg) as store:
        print(json.dumps(describe(store), indent=1))


STAGE = Stage(name="memory_stats", run=run, is_endpoint=True)
