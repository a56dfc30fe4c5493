"""What stays in RAM and VRAM, and what is read ahead: `cache`, `prefetch`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CachePolicy(Enum):
    """Who leaves a full expert cache in RAM."""

    auto = "auto"  # of lru and three lfu the one that finds most; lru where eight decoding steps' experts fit
    lru = "lru"  # who was used longest ago
    lfu = "lfu"  # who is used least; a use counts half after as many uses as there are rows, or after four such steps


@dataclass
class CacheConfig:
    """The RAM tier."""

    # expert cache; 0: the layer in use and its guesses; null: all that the RAM plan leaves
    ram_gib: float | None = None
    # expert slots in VRAM; 0: none but for copies on their way; null: all that is left
    vram_gib: float | None = None
    sweep_experts: int = 32  # experts read ahead while a prompt goes through a layer
    table_rows: int = 65536  # rows of n-gram tables kept in RAM
    policy: CachePolicy = CachePolicy.auto  # who leaves the RAM tier
    # chat and serve: read in the background what was warm when the last one ended (outputs/warm)
    warm_start: bool = False
    # compare each expert (not the drafts') with its recorded checksum the first time it is read
    verify: bool = False


@dataclass
class PrefetchConfig:
    """Reading ahead."""

    # guesses for the next layer, read from the drive in the gap, for each token that is decoded at once; 0 is none
    experts: int = 2
    # guesses for the next layer that are in RAM, copied to VRAM early (GPU); 0 is none
    copy: int = 0


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "cache.ram_gib": (0, 2**20),
    "cache.vram_gib": (0, 2**20),
    "cache.sweep_experts": (1, 512),
    "cache.table_rows": (0, 2**31),
    "prefetch.experts": (0, 64),
    "prefetch.copy": (0, 64),
}
