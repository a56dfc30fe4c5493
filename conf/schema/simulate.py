"""What is replayed, and the machine that is imagined: `simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Policy(Enum):
    """Who leaves a full expert cache in the simulator: what cache.policy can be, and what it is compared with."""

    auto = "auto"
    lru = "lru"
    lfu = "lfu"
    slru = "slru"  # segmented LRU
    per_layer = "per_layer"  # an LRU for each layer
    belady = "belady"  # who is wanted again last: knows the future, the bound


@dataclass
class SimulateConfig:
    """What `simulate` replays, and the machine it imagines.

    The drive is hw.drive.simulate_gib_s and simulate_latency_us, how it is read is hw.drive.window and pieces; how many
    tokens are counted, and decoded before, is bench.tokens and bench.warmup_tokens.
    """

    routes: str | None = None  # a recording (record=true); null: routes are generated as below
    policy: Policy | None = None  # null: cache.policy
    # the model, where routes are generated; a recording tells its own
    num_layers: int = 8
    num_experts: int = 64
    top_k: int = 6
    record_nbytes: int = 24576  # of one expert
    skew: float = 1.0  # standard deviation of the log of an expert's popularity; 0 is even
    persistence: float = 0.2  # share of experts kept from the token before
    recall: float = 0.68  # share of the next layer's experts that are guessed
    best_two: float = 0.87  # share of right ones among the first two guesses
    # the machine
    drive_depth: int = 32  # reads that the drive has in work at once
    is_shared: bool = False  # reads in work share the drive's rate; false: one after the other
    link_gib_s: float = 0.0  # from RAM to the GPU; 0: there is none, the CPU computes
    in_place_gib_s: float = 0.0  # the link, when kernels read RAM in place; 0: as fast as copies
    reads_in_place: bool = True  # experts in RAM are read where they are; false: copied first
    vram_gib_s: float = 0.0  # how fast a kernel reads an expert from VRAM; 0: in no time
    expert_us: float = 0.0  # at least this long computes one expert
    layer_us: float = 0.0  # computing of a layer beside its routed experts
    host_us: float = 0.0  # the host's own work for a layer, before its experts are launched
    host_after_us: float = 0.0  # the same behind the launch, while a GPU computes
    token_us: float = 0.0  # what a token needs once
    cpu_gib_s: float = 0.0  # at which the CPU computes experts in RAM beside a GPU; 0: it does not
    cpu_us: float = 0.0  # to start it for a layer
    ram_gib_s: float = 0.0  # of the RAM, for link, drives and CPU together; 0: enough for all
    head_nbytes: int = 0  # of a head in RAM that a GPU reads for every token; 0: it is in token_us
    head_cpu_gib_s: float = 0.0  # at which the CPU computes a part of it; 0: it does not


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "simulate.num_layers": (1, 2**15),
    "simulate.num_experts": (1, 2**16),
    "simulate.top_k": (1, 2**10),
    "simulate.record_nbytes": (1, 2**40),
    "simulate.skew": (0, 10),
    "simulate.persistence": (0, 1),
    "simulate.recall": (0, 1),
    "simulate.best_two": (0, 1),
    "simulate.drive_depth": (1, 2**20),
    "simulate.link_gib_s": (0, 1e5),
    "simulate.in_place_gib_s": (0, 1e5),
    "simulate.vram_gib_s": (0, 1e5),
    "simulate.expert_us": (0, 1e9),
    "simulate.layer_us": (0, 1e9),
    "simulate.host_us": (0, 1e9),
    "simulate.host_after_us": (0, 1e9),
    "simulate.token_us": (0, 1e9),
    "simulate.cpu_gib_s": (0, 1e5),
    "simulate.cpu_us": (0, 1e9),
    "simulate.ram_gib_s": (0, 1e5),
    "simulate.head_nbytes": (0, 2**50),
    "simulate.head_cpu_gib_s": (0, 1e5),
}
