"""The stages by name, and which of them a family has no use for. Knows no key."""

from __future__ import annotations

STAGES = (
    "synthetic", "download", "patch", "mirror", "repack", "checksums", "spot_check", "residents", "quantize", "verify",
    "bench", "simulate", "chat", "serve", "plan", "doctor",
    "memory_ingest", "memory_ask", "memory_chat", "memory_list", "memory_stats", "memory_quote", "memory_verify",
    "memory_migrate", "memory_prune",
    "advise", "advise_check", "advise_serve",
)  # fmt: skip


# stages that a family has no use for, or that know nothing of it yet
NOT_FOR_FAMILY = {
    "qwen": {
        "mirror": "repack writes its experts to every drive of hw.drives",
        "checksums": "repack records them, in the pack",
        "quantize": "its experts are quantised as released",
    },
    "deepseek": {
        "quantize": "its weights are quantised as released",
        "repack": "its experts are read in the released shards as they are",
        "residents": "its weights are loaded from the released shards",
    },
    "qwen3_moe": {
        "quantize": "its experts are computed as they are released",
        "repack": "its experts are read in the released shards as they are",
        "residents": "its weights are loaded from the released shards",
        "verify": "no references of it are recorded yet",
    },
    "dense": {
        "repack": "its layers are read in the released shards as they are",
        "residents": "its weights are loaded from the released shards",
        "verify": "no references of it are recorded yet",
    },
}
