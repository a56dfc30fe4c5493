"""Synthetic checkpoints of Qwen3.8-Flash-Next: which tensors are made, where each lies and what stands in it.

Owns the cut of layers and experts and the n-gram table's constants.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from blake3 import blake3

from conf.schema import RunConfig, SyntheticConfig
from kernels.formats import E2M1_VALUES
from runtime.experts.layout import CHECKSUM_NBYTES, SCALARS_PER_EXPERT, Nvfp4Shape
from runtime.models.qwen_weights import FP8_ROW_TAILS, PREFIX, PROJECTIONS, QwenSpec
from stages import synthetic_parts as parts
from stages.download import PROJECT
from stages.synthetic_parts import GAIN_STD, Noise, Tensor, generator, normal, uniform

RELEASED = PROJECT / "runtime" / "bundled" / "qwen38-flash-next"
TOKENIZER = PROJECT / "runtime" / "bundled" / "tiny-qwen"  # the release's own is not bundled
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
TABLE_SHARD = "model-fp8-ple.safetensors"
METADATA = {"format": "pt"}  # of every shard
ALIGN_NBYTES = 64  # of a shard's data

# upper bounds of the budget, for what is small
ENTRY_NBYTES = 400  # a tensor's entries in header, index and residents file
RECORDS_NBYTES = 2**17  # config, journals, records, table description

SCALE_BASE, SCALE_MASK = 0x30, 0x0F  # block scales: E4M3 from 0.5 to 1.875
TABLE_MASK = 0xFE  # rows of the n-gram table: clears the last bit, and with it both NaN


# ---- sizes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class NgramTable:
    """The constants of the n-gram hash and the size of the table that they reach."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]  # of each head, distinct primes
    offsets: tuple[int, ...]  # running sums of `sizes`
    rows_per_part: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the bytes, but for the seed and the skew."""

    spec: QwenSpec
    table: NgramTable
    config: str  # text of the checkpoint's config.json


def make_plan(cfg: RunConfig) -> Plan:
    """Return the sizes that fit the budget.

    Raises UserError for sizes that do not fit `model.synthetic.disk_gib`, or that the model cannot have.
    """
    text, wanted = parts.read_release(cfg, RELEASED), cfg.model.synthetic
    return _cached_plan(text, wanted.layers, wanted.experts, wanted.disk_gib, wanted.ngram_rows)


@functools.lru_cache(maxsize=16)
def _cached_plan(
    text: str, layers: int | None, experts: int | None, disk_gib: float, ngram_rows: int
) -> Plan:
    """The runner asks for a stage's key many times."""
    config = json.loads(text)
    released = QwenSpec.from_config(config)
    tokenizer = json.loads((TOKENIZER / "config.json").read_text())
    parts.check_vocabulary(released.vocab_size, tokenizer["text_config"]["vocab_size"])
    wanted = SyntheticConfig(experts, layers, disk_gib, ngram_rows)
    num_layers = _choose_layers(released, layers)
    base = max(2, ngram_rows // ((released.ngram_size - 1) * released.heads_per_ngram))
    spec = dataclasses.replace(
        released, num_layers=num_layers, is_attention=released.is_attention[:num_layers]
    )
    table = make_table(spec, base, config["text_config"])
    num_experts = _choose_experts(spec, table, wanted)
    cut = _cut_config(config, num_layers, num_experts, base)
    return Plan(QwenSpec.from_config(cut), table, json.dumps(cut, indent=1) + "\n")


def _choose_layers(released: QwenSpec, wanted: int | None) -> int:
    why = f"the n-gram table belongs to layer {released.ple_layer}"
    return parts.check_layers(wanted, released.ple_layer + 1, released.num_layers, why)


def _choose_experts(spec: QwenSpec, table: NgramTable, wanted: SyntheticConfig) -> int:
    """spec: with the released number of experts.  Returns how many a layer gets."""
    fixed = table_setup_nbytes(dataclasses.replace(spec, num_experts=0), table)
    each = table_setup_nbytes(dataclasses.replace(spec, num_experts=1), table) - fixed
    return parts.choose_experts(
        wanted, spec.num_layers, spec.top_k, spec.num_experts, fixed, each,
        "checkpoint, pack and residents",
    )  # fmt: skip


def setup_nbytes(plan: Plan) -> int:
    """Return what checkpoint, pack and residents (DeltaNet matrices in FP8 rows) take on the disk, at most."""
    return table_setup_nbytes(plan.spec, plan.table)


def table_setup_nbytes(spec: QwenSpec, table: NgramTable) -> int:
    """Return `setup_nbytes` of a spec and its table."""
    residents = [_resident(name, shape) for name, shape in spec.resident_shapes().items()]
    kept = sum(_kept_nbytes(tensor) for tensor in residents)
    expert_nbytes = 4 * SCALARS_PER_EXPERT
    shape = Nvfp4Shape(spec.hidden, spec.intermediate)
    snapshot = shape.payload_nbytes + expert_nbytes + len(PROJECTIONS) * 4 * ENTRY_NBYTES
    packed = shape.record_nbytes + expert_nbytes + CHECKSUM_NBYTES
    small = sum((TOKENIZER / name).stat().st_size for name in TOKENIZER_FILES) + RECORDS_NBYTES
    return (
        sum(tensor.nbytes for tensor in residents) + kept + len(residents) * ENTRY_NBYTES
        + spec.num_layers * spec.num_experts * (snapshot + packed)
        + spec.table_parts * (table.rows_per_part * spec.table_row_nbytes + ENTRY_NBYTES)
        + (spec.num_layers + 3) * ALIGN_NBYTES + small
    )  # fmt: skip


def _kept_nbytes(tensor: Tensor) -> int:
    """Return the bytes of a resident in the residents file."""
    if tensor.name.endswith(FP8_ROW_TAILS):
        return math.prod(tensor.shape) + 4 * tensor.shape[0]
    return tensor.nbytes


def _cut_config(
    config: Mapping[str, Any], num_layers: int, num_experts: int, ngram_base: int
) -> dict[str, Any]:
    """Return a release's config.json for fewer layers and experts, without vision, for the bundled tokenizer."""
    generation = json.loads((TOKENIZER / "generation_config.json").read_text())
    text = config["text_config"]
    experts = {
        f"{PREFIX}layers.{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}
        for layer in range(num_layers)
    }
    table = f"{PREFIX}layers.{text['ple_layer_ids'][0] - 1}.ple.ple_embedding.ngram_embedding"
    return {
        **{key: value for key, value in config.items() if key != "vision_config"},
        "language_model_only": True,
        "text_config": text | {
            "num_hidden_layers": num_layers,
            "layer_types": text["layer_types"][:num_layers],
            "num_experts": num_experts,
            "ngram_vocab_size_base": ngram_base,
            "bos_token_id": None,
            "eos_token_id": generation["eos_token_id"],
            "pad_token_id": generation["pad_token_id"],
        },
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": experts | {table: {"quant_algo": "FP8"}},
        },
    }  # fmt: skip


# ---- the n-gram table ----------------------------------------------------------------------------------------------


def make_table(spec: QwenSpec, base: int, text_config: Mapping[str, Any]) -> NgramTable:
    """Return a table whose heads have the first primes from `base` on as their sizes: the release's own rule."""
    heads = (spec.ngram_size - 1) * spec.heads_per_ngram
    sizes: list[int] = []
    while len(sizes) < heads:
        sizes.append(_prime_from(sizes[-1] + 1 if sizes else base))
    unit = math.lcm(text_config["make_ngram_vocab_size_divisible_by"], spec.table_parts)
    return NgramTable(
        multipliers=_multipliers(spec.vocab_size, text_config.get("seed", 1234), spec.ngram_size),
        sizes=tuple(sizes),
        offsets=tuple(sum(sizes[:head]) for head in range(heads)),
        rows_per_part=-(-sum(sizes) // unit) * unit // spec.table_parts,
    )


def _prime_from(n: int) -> int:
    while any(n % divisor == 0 for divisor in range(2, math.isqrt(n) + 1)):
        n += 1
    return n


def _multipliers(vocab_size: int, seed: int, count: int) -> tuple[int, ...]:
    """Return odd factors whose products with a token id stay below 2**63."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    half = max(1, (2**63 - 1) // vocab_size // 2)
    found = []
    for i in range(1, count + 1):  # splitmix64
        x = (seed + golden * i + golden) & mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        found.append(2 * ((x ^ (x >> 31)) % half) + 1)
    return tuple(found)


# ---- places --------------------------------------------------------------------------------------------------------


def _resident(name: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, "I64" if "ple_embedding." in name else "BF16", shape)


def shard_names(plan: Plan) -> list[str]:
    """Return the weight files in the order in which they are made: what is in no layer, the layers, the table."""
    count = plan.spec.num_layers + 1
    return [*(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)), TABLE_SHARD]


def residents_of(plan: Plan, layer: int | None) -> list[Tensor]:
    """Return the tensors of a layer (None: of no layer) that are neither experts nor the table."""
    start = "" if layer is None else f"{PREFIX}layers.{layer}."
    return [
        _resident(name, shape)
        for name, shape in plan.spec.resident_shapes().items()
        if (name.startswith(start) if start else f"{PREFIX}layers." not in name)
    ]


def expert_tensors(spec: QwenSpec, layer: int, expert: int) -> list[Tensor]:
    """Return an expert's twelve tensors in file order: codes, block scales, global scales, input scales."""
    name = f"{PREFIX}layers.{layer}.mlp.experts.{expert}."
    inner, hidden = spec.intermediate, spec.hidden
    sizes = [
        (part, *((hidden, inner) if part == "down_proj" else (inner, hidden)))
        for part in PROJECTIONS
    ]
    return [
        *(Tensor(f"{name}{p}.weight", "U8", (rows, cols // 2)) for p, rows, cols in sizes),
        *(
            Tensor(f"{name}{p}.weight_scale", "F8_E4M3", (rows, cols // 16))
            for p, rows, cols in sizes
        ),
        *(Tensor(f"{name}{p}.weight_scale_2", "F32", ()) for p in PROJECTIONS),
        *(Tensor(f"{name}{p}.input_scale", "F32", ()) for p in PROJECTIONS),
    ]


def table_tensors(plan: Plan) -> list[Tensor]:
    """Return the table's scale and its parts."""
    spec = plan.spec
    name = f"{PREFIX}layers.{spec.ple_layer}.ple.ple_embedding.ngram_embedding."
    shape = (plan.table.rows_per_part, spec.table_row_nbytes)
    rows = [Tensor(f"{name}shard_{i}.weight", "F8_E4M3", shape) for i in range(spec.table_parts)]
    return [Tensor(f"{name}weight_scale", "BF16", (1,)), *rows]


def shard_tensors(plan: Plan, number: int) -> list[Tensor]:
    """Return the tensors of weight file `number` (its place in `shard_names`), in file order."""
    if number == 0:
        return residents_of(plan, None)
    if number > plan.spec.num_layers:
        return table_tensors(plan)
    tensors = residents_of(plan, number - 1)
    for expert in range(plan.spec.num_experts):
        tensors += expert_tensors(plan.spec, number - 1, expert)
    return tensors


class Writer:
    """What stands in the tensors of one plan and seed."""

    def __init__(self, plan: Plan, seed: int, skew: float) -> None:
        self.plan, self.seed, self.skew = plan, seed, skew
        self.noise = Noise(seed)

    def shard(self, number: int) -> Iterator[bytes | memoryview]:
        """Yield the data of weight file `number`, in the order of `shard_tensors`."""
        spec = self.plan.spec
        if number > spec.num_layers:
            yield from self._table()
            return
        layer = number - 1 if number else None
        for tensor in residents_of(self.plan, layer):
            yield from self._resident(tensor)
        if layer is not None:
            for expert in range(spec.num_experts):
                yield from self._expert(layer, expert)

    def _resident(self, tensor: Tensor) -> Iterator[bytes | memoryview]:
        name, _, shape = tensor
        source, count = generator(self.seed, name), math.prod(shape)
        if "ple_embedding." in name:
            yield np.array(self._constants(name), dtype=np.int64).tobytes()
        elif name.endswith("A_log"):  # from a state that lasts to one that fades quickly
            yield parts.bf16_bytes(uniform(source, count, 0.0, 2.75))
        elif name.endswith("dt_bias"):
            yield parts.bf16_bytes(uniform(source, count, -4.0, -1.0))
        elif name.endswith("mlp.gate.weight"):
            yield parts.router_rows(source, shape, self.skew)
        elif len(shape) == 1:  # gains: of the DeltaNet norm as they are, of others less one
            mean = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
            yield parts.bf16_bytes(mean + GAIN_STD * normal(source, count).astype(np.float64))
        else:
            std = 1.0 if name.endswith("embed_tokens.weight") else 1 / math.sqrt(shape[-1])
            yield from self.noise.bf16(source, count, std)

    def _constants(self, name: str) -> tuple[int, ...]:
        table = self.plan.table
        return {
            "layer_multipliers": table.multipliers,
            "ngram_heads_vocab_sizes": table.sizes,
            "ngram_heads_offsets": table.offsets,
        }[name.rpartition(".")[2]]

    def _expert(self, layer: int, expert: int) -> Iterator[bytes | memoryview]:
        spec = self.plan.spec
        shape = Nvfp4Shape(spec.hidden, spec.intermediate)
        source = generator(self.seed, f"layers.{layer}.experts.{expert}")
        yield from self.noise.masked(source, 3 * shape.codes_nbytes)
        yield from self.noise.masked(source, 3 * shape.scales_nbytes, SCALE_MASK, SCALE_BASE)
        columns = np.array([spec.hidden, spec.hidden, spec.intermediate])
        steps = uniform(source, 3, 0.9, 1.1) / (nvfp4_rms() * np.sqrt(columns))
        scalars = np.concatenate([steps, uniform(source, 3, 0.01, 0.02)])
        yield scalars.astype(np.float32).tobytes()

    def _table(self) -> Iterator[bytes | memoryview]:
        scale, *rows = table_tensors(self.plan)
        assert scale.dtype == "BF16"
        yield parts.bf16_bytes(np.array([1 / table_rms()]))
        for part in rows:
            source = generator(self.seed, part.name)
            yield from self.noise.masked(source, part.nbytes, TABLE_MASK)


def nvfp4_rms() -> float:
    """Return the root mean square of code times block scale, as they are drawn here."""
    return parts.rms(E2M1_VALUES) * parts.rms(
        [parts.e4m3_value(SCALE_BASE + i) for i in range(SCALE_MASK + 1)]
    )


def table_rms() -> float:
    """Return the root mean square of the table's E4M3 values, as they are drawn here."""
    return parts.rms([parts.e4m3_value(byte & TABLE_MASK) for byte in range(128)])


# ---- what the stage asks of a family -------------------------------------------------------------------------------


def params(plan: Plan) -> dict[str, Any]:
    """Return what decides the bytes, but for seed and skew."""
    return {
        "config": blake3(plan.config.encode()).hexdigest(length=8),
        "layers": plan.spec.num_layers,
        "experts": plan.spec.num_experts,
        "table_rows": plan.table.rows_per_part * plan.spec.table_parts,
    }


def small_files(plan: Plan) -> dict[str, str]:
    """Return the files besides weights and index: name -> text."""
    files = {name: (TOKENIZER / name).read_text() for name in TOKENIZER_FILES}
    return {"config.json": plan.config, **files}
