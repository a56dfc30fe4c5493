"""The model and its files, how its weights are kept, and the defaults of a request: `model`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Source(Enum):
    """Where a model's files come from."""

    bundled = "bundled"  # trained checkpoints inside this project
    local = "local"  # a snapshot folder given by model.path, used in place, never changed
    hub = "hub"  # the Hugging Face hub, at model.revision
    # random bytes in the released names and shapes, made by the synthetic stage
    synthetic = "synthetic"


class Deltanet(Enum):
    """How the large DeltaNet matrices are kept."""

    bf16 = "bf16"  # as released
    # E4M3 with one scale per row: half the bytes, 2.6 % error on Gaussian rows
    fp8_rows = "fp8_rows"


class Weights(Enum):
    """How the matrices of a dense model's layers are kept."""

    stored = "stored"  # as released
    # int8 with one scale per row: 8 bits a weight, 0.9 % error on Gaussian rows
    int8_rows = "int8_rows"
    nvfp4 = "nvfp4"  # E2M1 with an E4M3 scale for each 16: 4.5 bits a weight, 8.7 % error; the head as int8_rows


@dataclass
class SamplingConfig:
    """Defaults of a request; the model's generation_config.json gives what is null here."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None  # keep the likeliest tokens up to this mass, (0, 1]
    top_k: int | None = None  # keep this many tokens; 0 is all
    min_p: float = 0.0  # drop tokens below this share of the likeliest one's probability
    seed: int | None = None  # same seed, same settings, same text


@dataclass
class SyntheticConfig:
    """A checkpoint of random bytes (source=synthetic): released names, dtypes and per-tensor shapes, fewer of them."""

    # per layer; null: as many as disk_gib allows, at most the released number
    experts: int | None = None
    layers: int | None = None  # null: as released
    # for all that the set-up makes of it: checkpoint, pack, residents, a quantised copy
    disk_gib: float = 60.0
    ngram_rows: int = 2**20  # of each n-gram table, about; released: 320 million, 2 x 384 million
    # of the routing: standard deviation of the log of the router's row norms; 0 is even
    skew: float = 0.5
    seed: int = 0  # same seed and sizes, same bytes


@dataclass
class ModelConfig:
    """One model at one revision."""

    name: str = "???"
    family: str = "???"  # the file in runtime/models that computes it
    served_name: str = "???"  # its id over HTTP
    source: Source = Source.bundled
    path: str | None = None  # folder of the snapshot, for source=local and source=bundled
    repo: str | None = None  # hub id
    revision: str = "???"  # 40 hex digits on the hub; any text for a local folder
    # patterns of the files wanted; one with a slash is of a folder inside the snapshot
    files: list[str] = field(default_factory=lambda: ["*"])
    # patterns of tensors that are not needed: from the hub, shards of nothing else are not fetched; [] fetches all
    leave_out: list[str] = field(default_factory=list)
    files_gib: float | None = None  # of all wanted files, for plans before any is here
    released: str | None = None  # folder with this model's config.json, for the same purpose
    # stages that make what an engine opens, in order
    setup: list[str] = field(default_factory=list)
    context_tokens: int = 4096  # window; memory for keys and values grows with it
    prefill_tokens: int = 512  # a prompt goes through the layers in pieces of this many tokens
    deltanet: Deltanet = Deltanet.bf16
    weights: Weights = Weights.stored  # of dense models; written once by stages=[quantize]
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @property
    def makers(self) -> tuple[str, ...]:
        """The stages that make what an engine opens: `setup`, and `quantize` where weights are not as released."""
        return (*self.setup, *(() if self.weights is Weights.stored else ("quantize",)))


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "model.files_gib": (0, 1e9),
    "model.context_tokens": (1, 2**24),
    "model.prefill_tokens": (1, 2**20),
    "model.synthetic.experts": (1, 2**16),
    "model.synthetic.layers": (1, 2**10),
    "model.synthetic.disk_gib": (0.001, 2**20),
    "model.synthetic.ngram_rows": (1, 2**40),
    "model.synthetic.skew": (0, 4),
    "model.sampling.temperature": (0, 2),
    "model.sampling.top_k": (0, 2**20),
    "model.sampling.min_p": (0, 1),
}


def faults(model: ModelConfig) -> Iterable[str]:
    """Yield what no range says."""
    top_p = model.sampling.top_p
    if top_p is not None and not 0 < top_p <= 1:
        yield f"model.sampling.top_p must be above 0 and at most 1, got {top_p:g}"
    if model.source is Source.hub and not model.repo:
        yield "model.source=hub needs model.repo, as ORG/NAME on the hub"
