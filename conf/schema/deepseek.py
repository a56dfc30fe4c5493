"""What only the deepseek family has: `deepseek`, `patch`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Arithmetic(Enum):
    """Who computes a DeepSeek model."""

    auto = "auto"  # reference where its code, a GPU and TileLang are at hand, else native
    native = "native"  # this project, rounded where the release rounds
    reference = "reference"  # the release's own code, one line of it changed; experts streamed


class Kernels(Enum):
    """Whose kernels the release's own code runs on (arithmetic=reference)."""

    auto = "auto"  # tilelang on a GPU where a version that is not refused is installed, else ours
    tilelang = "tilelang"  # the release's
    ours = "ours"  # this project's: Triton on a GPU, plain torch on a CPU


class Head(Enum):
    """Who computes DeepSeek's logits when a GPU decodes; the weights, 1.3 GB, lie in RAM."""

    gpu = "gpu"  # it reads them over the link
    cpu = "cpu"
    auto = "auto"  # both at once, each as many rows as its measured rate allows


class Replay(Enum):
    """How a DeepSeek prompt goes through the later layers."""

    exact = "exact"  # every token through every layer
    bounded = "bounded"  # the last window of tokens only: approximate, as the official service does


@dataclass
class DeepseekConfig:
    """What only the deepseek family has."""

    arithmetic: Arithmetic = Arithmetic.auto
    replay: Replay = Replay.exact
    kernels: Kernels = Kernels.auto  # of arithmetic=reference
    head: Head = Head.gpu  # cpu and auto are equal to it within fp32 sums, not bit for bit
    # head=auto: share of the head's rows that the CPU takes; null: measured at the start
    head_share: float | None = None
    # arithmetic=reference: at even positions its indexers read stale keys; true: own
    fix_index_keys: bool = False


@dataclass
class PatchConfig:
    """The release's own inference code, with one line changed."""

    # take a file whose hash is not the known one; the line must be there
    allow_unknown: bool = False


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "deepseek.head_share": (0, 1),
}
