"""Synthetic checkpoints of dense models: which tensors are made, where each lies and what stands in it.

Owns the cut of layers. The bundled config.json has the sizes of Qwen2.5-7B-Instruct-1M, as far as this engine reads
them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from blake3 import blake3

from conf.schema import RunConfig, Weights
from runtime.errors import UserError
from runtime.models.dense_weights import EMBEDDING, DenseSpec
from runtime.units import GIB, format_nbytes
from stages import synthetic_parts as parts
from stages.download import PROJECT
from stages.quantize import file_nbytes
from stages.synthetic_parts import GAIN_STD, Noise, Tensor, generator, normal

RELEASED = PROJECT / "runtime" / "bundled" / "qwen25-7b-1m"
TOKENIZER = PROJECT / "runtime" / "bundled" / "tiny-qwen"  # the release's own is not bundled
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
METADATA = {"format": "pt"}  # of every shard
ALIGN_NBYTES = 64  # of a shard's data
BIAS_STD = 0.5
ENTRY_NBYTES = 400  # a tensor's entries in header and index, at most
RECORDS_NBYTES = 2**17  # config, journals and records, at most


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the bytes, but for the seed."""

    spec: DenseSpec
    config: str  # text of the checkpoint's config.json
    copy_nbytes: int  # of what `quantize` makes of it; decides no byte here


def make_plan(cfg: RunConfig) -> Plan:
    """Return the sizes that fit the budget.

    Raises UserError for layers that do not fit `model.synthetic.disk_gib`, or that the model cannot have.
    """
    text, wanted = parts.read_release(cfg, RELEASED), cfg.model.synthetic
    return _cached_plan(text, wanted.layers, wanted.disk_gib, cfg.model.weights)


@functools.lru_cache(maxsize=16)
def _cached_plan(text: str, layers: int | None, disk_gib: float, weights: Weights) -> Plan:
    """The runner asks for a stage's key many times."""
    config = json.loads(text)
    released = DenseSpec.from_config(config)
    tokenizer = json.loads((TOKENIZER / "config.json").read_text())
    parts.check_vocabulary(released.vocab_size, tokenizer["text_config"]["vocab_size"])
    num_layers = parts.check_layers(layers, 1, released.depth, "a model has one")
    generation = json.loads((TOKENIZER / "generation_config.json").read_text())
    cut = config | {
        "num_hidden_layers": num_layers,
        "bos_token_id": None,
        "eos_token_id": generation["eos_token_id"],
        "pad_token_id": generation["pad_token_id"],
    }
    if cut.get("layer_types"):
        cut["layer_types"] = cut["layer_types"][:num_layers]
    spec = DenseSpec.from_config(cut)
    copy = 0 if weights is Weights.stored else file_nbytes(spec, weights)
    plan = Plan(spec, json.dumps(cut, indent=1) + "\n", copy)
    needed, budget = setup_nbytes(plan), int(disk_gib * GIB)
    if needed > budget:
        enough = math.ceil(needed / GIB * 1000) / 1000
        raise UserError(
            f"{num_layers} layers need {format_nbytes(needed)} for all that the set-up makes, "
            f"model.synthetic.disk_gib={disk_gib:g} allows {format_nbytes(budget)}",
            f"set model.synthetic.disk_gib={enough:g} or more, or fewer model.synthetic.layers",
        )
    return plan


def setup_nbytes(plan: Plan) -> int:
    """Return what checkpoint and quantised copy take on the disk, at most."""
    tensors = [t for number in range(plan.spec.depth + 1) for t in shard_tensors(plan, number)]
    small = sum((TOKENIZER / name).stat().st_size for name in TOKENIZER_FILES) + RECORDS_NBYTES
    return sum(t.nbytes + ENTRY_NBYTES for t in tensors) + plan.copy_nbytes + small


# ---- what the stage asks of a family -------------------------------------------------------------------------------


def params(plan: Plan) -> dict[str, Any]:
    """Return what decides the bytes, but for seed and skew (there is no router here)."""
    return {
        "config": blake3(plan.config.encode()).hexdigest(length=8),
        "layers": plan.spec.depth,
        "experts": 0,
    }


def shard_names(plan: Plan) -> list[str]:
    """Return the weight files in the order in which they are made: what is in no layer, then the layers."""
    count = plan.spec.depth + 1
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def shard_tensors(plan: Plan, number: int) -> list[Tensor]:
    """Return the tensors of weight file `number` (its place in `shard_names`), in file order."""
    spec = plan.spec
    if number == 0:
        return [Tensor(name, "BF16", shape) for name, shape in spec.resident_shapes().items()]
    prefix = f"model.layers.{number - 1}."
    return [Tensor(prefix + name, "BF16", shape) for name, shape in spec.layer_shapes().items()]


def small_files(plan: Plan) -> dict[str, str]:
    """Return the files besides weights and index: name -> text."""
    files = {name: (TOKENIZER / name).read_text() for name in TOKENIZER_FILES}
    return {"config.json": plan.config, **files}


class Writer:
    """What stands in the tensors of one plan and seed."""

    def __init__(self, plan: Plan, seed: int, skew: float) -> None:
        """skew: of a router, which a dense model has not."""
        del skew
        self.plan, self.seed = plan, seed
        self.noise = Noise(seed)

    def shard(self, number: int) -> Iterator[bytes | memoryview]:
        """Yield the data of weight file `number`, in the order of `shard_tensors`."""
        for name, _, shape in shard_tensors(self.plan, number):
            source, count = generator(self.seed, name), math.prod(shape)
            if len(shape) == 1:
                is_bias = name.endswith(".bias")
                mean, std = (0.0, BIAS_STD) if is_bias else (1.0, GAIN_STD)
                yield parts.bf16_bytes(mean + std * normal(source, count).astype(np.float64))
            else:
                std = 1.0 if name == EMBEDDING else 1 / math.sqrt(shape[-1])
                yield from self.noise.bf16(source, count, std)
