"""Synthetic checkpoints of the Qwen3-MoE shape: which tensors are made, where each lies and what stands in it.

Owns the cut of layers and experts. A shard has its tensors by name, as the releases have: an expert's three lie one
behind the other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from blake3 import blake3

from conf.schema import RunConfig, SyntheticConfig
from runtime.models.qwen3_moe_weights import EMBEDDING, Qwen3MoeSpec, expert_tensor
from stages import synthetic_parts as parts
from stages.download import PROJECT
from stages.synthetic_parts import GAIN_STD, Noise, Tensor, generator, normal

RELEASED = PROJECT / "runtime" / "bundled" / "qwen3-30b-a3b"
TOKENIZER = PROJECT / "runtime" / "bundled" / "tiny-qwen"  # the release's own is not bundled
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
METADATA = {"format": "pt"}  # of every shard
ALIGN_NBYTES = 8  # of a shard's data, as the format's own library writes it

# upper bounds of the budget, for what is small
ENTRY_NBYTES = 300  # a tensor's entries in header and index
RECORDS_NBYTES = 2**17  # config, journal, records


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the bytes, but for the seed and the skew."""

    spec: Qwen3MoeSpec
    config: str  # text of the checkpoint's config.json


def make_plan(cfg: RunConfig) -> Plan:
    """Return the sizes that fit the budget.

    Raises UserError for sizes that do not fit `model.synthetic.disk_gib`, or that the model cannot have.
    """
    text, wanted = parts.read_release(cfg, RELEASED), cfg.model.synthetic
    return _cached_plan(text, wanted.layers, wanted.experts, wanted.disk_gib)


@functools.lru_cache(maxsize=16)
def _cached_plan(text: str, layers: int | None, experts: int | None, disk_gib: float) -> Plan:
    """The runner asks for a stage's key many times."""
    config = json.loads(text)
    released = Qwen3MoeSpec.from_config(config)
    tokenizer = json.loads((TOKENIZER / "config.json").read_text())
    parts.check_vocabulary(released.vocab_size, tokenizer["text_config"]["vocab_size"])
    fewest = released.moe_layers[0] + 1
    num_layers = parts.check_layers(
        layers, fewest, released.depth, f"layer {fewest - 1} is the first with experts"
    )
    spec = Qwen3MoeSpec.from_config(_cut(config, num_layers, released.num_experts))
    fixed, one = (_nbytes(dataclasses.replace(spec, num_experts=count)) for count in (0, 1))
    num_experts = parts.choose_experts(
        SyntheticConfig(experts, layers, disk_gib), num_layers, spec.top_k, spec.num_experts,
        fixed, one - fixed, "the checkpoint",
    )  # fmt: skip
    cut = _cut(config, num_layers, num_experts)
    return Plan(Qwen3MoeSpec.from_config(cut), json.dumps(cut, indent=1) + "\n")


def _cut(config: Mapping[str, Any], num_layers: int, num_experts: int) -> dict[str, Any]:
    """Return a release's config.json for fewer layers and experts, for the bundled tokenizer."""
    generation = json.loads((TOKENIZER / "generation_config.json").read_text())
    without = [layer for layer in config.get("mlp_only_layers") or [] if layer < num_layers]
    kept = {key: value for key, value in config.items() if key != "num_local_experts"}
    return kept | {
        "num_hidden_layers": num_layers,
        "mlp_only_layers": without,
        "num_experts": num_experts,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": generation["eos_token_id"],
        "pad_token_id": generation["pad_token_id"],
    }


def _nbytes(spec: Qwen3MoeSpec) -> int:
    """Return what a checkpoint of these sizes takes on the disk, at most."""
    tensors = [tensor for layer in (None, *range(spec.depth)) for tensor in tensors_of(spec, layer)]
    small = sum((TOKENIZER / name).stat().st_size for name in TOKENIZER_FILES) + RECORDS_NBYTES
    return sum(tensor.nbytes + ENTRY_NBYTES for tensor in tensors) + small


def tensors_of(spec: Qwen3MoeSpec, layer: int | None) -> list[Tensor]:
    """Return the tensors of a layer (None: of no layer) in file order."""
    start = "" if layer is None else f"model.layers.{layer}."
    shapes = {
        name: shape
        for name, shape in spec.resident_shapes().items()
        if (name.startswith(start) if start else not name.startswith("model.layers."))
    }
    if layer in spec.moe_layers:
        assert layer is not None
        shapes |= {
            expert_tensor(layer, expert, projection): shape
            for expert in range(spec.num_experts)
            for projection, shape in spec.expert_shapes().items()
        }
    return [Tensor(name, "BF16", shape) for name, shape in sorted(shapes.items())]


class Writer:
    """What stands in the tensors of one plan and seed."""

    def __init__(self, plan: Plan, seed: int, skew: float) -> None:
        self.plan, self.seed, self.skew = plan, seed, skew
        self.noise = Noise(seed)

    def shard(self, number: int) -> Iterator[bytes | memoryview]:
        """Yield the data of weight file `number`, in the order of `shard_tensors`."""
        for tensor in shard_tensors(self.plan, number):
            yield from self._tensor(tensor)

    def _tensor(self, tensor: Tensor) -> Iterator[bytes | memoryview]:
        name, _, shape = tensor
        source, count = generator(self.seed, name), math.prod(shape)
        if name.endswith("mlp.gate.weight"):
            yield parts.router_rows(source, shape, self.skew)
        elif len(shape) == 1:  # gains are near one, biases near nothing
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            yield parts.bf16_bytes(mean + GAIN_STD * normal(source, count).astype("float64"))
        else:
            std = 1.0 if name == EMBEDDING else 1 / math.sqrt(shape[-1])
            yield from self.noise.bf16(source, count, std)


# ---- what the stage asks of a family -------------------------------------------------------------------------------


def params(plan: Plan) -> dict[str, Any]:
    """Return what decides the bytes, but for seed and skew."""
    return {
        "config": blake3(plan.config.encode()).hexdigest(length=8),
        "layers": plan.spec.depth,
        "experts": plan.spec.num_experts,
    }


def setup_nbytes(plan: Plan) -> int:
    """Return what the whole set-up takes on the disk, at most: the checkpoint is all of it."""
    return _nbytes(plan.spec)


def shard_names(plan: Plan) -> list[str]:
    """Return the weight files in the order in which they are made: what is in no layer, then the layers."""
    count = plan.spec.depth + 1
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def shard_tensors(plan: Plan, number: int) -> list[Tensor]:
    """Return the tensors of weight file `number` (its place in `shard_names`), in file order."""
    return tensors_of(plan.spec, number - 1 if number else None)


def small_files(plan: Plan) -> dict[str, str]:
    """Return the files besides weights and index: name -> text."""
    files = {name: (TOKENIZER / name).read_text() for name in TOKENIZER_FILES}
    return {"config.json": plan.config, **files}
