"""Write a checkpoint of random bytes: the released names, dtypes and shapes, fewer layers and experts, any disk budget.

Owns which sizes are made, where every tensor lies and what stands in it. Knows no engine: the stages behind it take its
folder for a snapshot. Its numbers mean nothing, the bytes and operations of a token are the release's. Routing is
only as uneven as the skew makes it: the release's locality from token to token is not imitated, nor how well its next
layer can be guessed, so hit rates measured here are not the release's.

The bytes follow from sizes and seed alone, on every machine: generators whose raw words numpy guarantees, integer sums
for the normal distribution, and no function of the C library that may round in its own way. They are quick rather than
independent: `Noise` says what is shared.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from conf.schema import RunConfig, Source, SyntheticConfig
from kernels.formats import E2M1_VALUES
from runtime.checkpoint import DTYPE_NBYTES, INDEX_NAME
from runtime.errors import UserError
from runtime.experts.layout import CHECKSUM_NBYTES, SCALARS_PER_EXPERT, Nvfp4Shape
from runtime.models.qwen_weights import FP8_ROW_TAILS, PREFIX, PROJECTIONS, QwenSpec
from runtime.units import GIB, format_nbytes
from stages.core import Output, Stage, StageContext
from stages.download import PROJECT, absolute
from stages.files import write_atomically

RELEASED = PROJECT / "runtime" / "bundled" / "qwen38-flash-next"
TOKENIZER = PROJECT / "runtime" / "bundled" / "tiny-qwen"  # the release's own is not bundled
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
TABLE_SHARD = "model-fp8-ple.safetensors"
ALIGN_NBYTES = 64

# upper bounds of the budget, for what is small
ENTRY_NBYTES = 400  # a tensor's entries in header, index and residents file
RECORDS_NBYTES = 2**17  # config, journals, records, table description

BANK_WORDS = 2**19  # 4 MiB each: in the CPU's cache
CHUNK_WORDS = 2**15
SCALE_BASE, SCALE_MASK = 0x30, 0x0F  # block scales: E4M3 from 0.5 to 1.875
TABLE_MASK = 0xFE  # rows of the n-gram table: clears the last bit, and with it both NaN
GAIN_STD = 0.05

Words = NDArray[np.uint64]
Floats = NDArray[np.float32]


class Tensor(NamedTuple):
    """One tensor to be written. `dtype` is the name in a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


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
    if cfg.model.source is not Source.synthetic:
        raise UserError(
            f"model={cfg.model.name} is not synthetic: its source is {cfg.model.source.value}",
            "python run.py model=qwen_synthetic stages=[synthetic]",
        )
    path = (RELEASED if cfg.model.path is None else absolute(cfg.model.path)) / "config.json"
    try:
        text = path.read_text()
        config = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path}: {error}",
            "set model.path to a folder with a release's config.json, or model.path=null",
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object", "set model.path=null")
    wanted = cfg.model.synthetic
    return _cached_plan(text, wanted.layers, wanted.experts, wanted.disk_gib, wanted.ngram_rows)


@functools.lru_cache(maxsize=16)
def _cached_plan(
    text: str, layers: int | None, experts: int | None, disk_gib: float, ngram_rows: int
) -> Plan:
    """The runner asks for a stage's key many times."""
    config = json.loads(text)
    released = QwenSpec.from_config(config)
    _check_vocabulary(released)
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


def _check_vocabulary(spec: QwenSpec) -> None:
    config = json.loads((TOKENIZER / "config.json").read_text())
    needed = config["text_config"]["vocab_size"]
    if spec.vocab_size < needed:
        raise UserError(
            f"the config has vocab_size {spec.vocab_size}, the bundled tokenizer has {needed} tokens",
            "set model.path to a config.json with a larger vocabulary",
        )


def _choose_layers(released: QwenSpec, wanted: int | None) -> int:
    fewest = released.ple_layer + 1
    layers = released.num_layers if wanted is None else wanted
    if not fewest <= layers <= released.num_layers:
        raise UserError(
            f"model.synthetic.layers is {layers}: at least {fewest} (the n-gram table belongs to "
            f"layer {released.ple_layer}), at most {released.num_layers}",
            f"set model.synthetic.layers={min(max(layers, fewest), released.num_layers)}",
        )
    return layers


def _choose_experts(spec: QwenSpec, table: NgramTable, wanted: SyntheticConfig) -> int:
    """spec: with the released number of experts.  Returns how many a layer gets."""
    most, budget = spec.num_experts, int(wanted.disk_gib * GIB)
    if wanted.experts is not None and not spec.top_k <= wanted.experts <= most:
        raise UserError(
            f"model.synthetic.experts is {wanted.experts}: at least {spec.top_k} (a token takes that "
            f"many), at most {most}",
            f"set model.synthetic.experts={min(max(wanted.experts, spec.top_k), most)}",
        )
    fixed = setup_nbytes(dataclasses.replace(spec, num_experts=0), table)
    each = setup_nbytes(dataclasses.replace(spec, num_experts=1), table) - fixed
    fitting = min((budget - fixed) // each, most)
    experts = wanted.experts if wanted.experts is not None else max(fitting, spec.top_k)
    needed = fixed + experts * each
    if needed <= budget:
        return experts
    enough = math.ceil(needed / GIB * 1000) / 1000
    fewest = "" if wanted.experts is not None else " (the fewest: a token takes that many)"
    hint = f"set model.synthetic.disk_gib={enough:g} or more, or fewer model.synthetic.layers"
    if fitting >= spec.top_k:
        hint += f", or model.synthetic.experts={fitting}"
    raise UserError(
        f"{spec.num_layers} layers of {experts} experts{fewest} need {format_nbytes(needed)} for checkpoint, "
        f"pack and residents, model.synthetic.disk_gib={wanted.disk_gib:g} allows {format_nbytes(budget)}",
        hint,
    )


def setup_nbytes(spec: QwenSpec, table: NgramTable) -> int:
    """Return what checkpoint, pack and residents (DeltaNet matrices in FP8 rows) take on the disk, at most."""
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
    parts = [Tensor(f"{name}shard_{i}.weight", "F8_E4M3", shape) for i in range(spec.table_parts)]
    return [Tensor(f"{name}weight_scale", "BF16", (1,)), *parts]


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


def make_header(tensors: Sequence[Tensor]) -> bytes:
    """Return a safetensors header, its length in front."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_NBYTES)
    return struct.pack("<Q", len(text)) + text


# ---- bytes ---------------------------------------------------------------------------------------------------------


def generator(seed: int, name: str) -> np.random.SFC64:
    """Return the source of raw words that belongs to a name: the same wherever making starts."""
    return np.random.SFC64(int.from_bytes(blake3(f"{seed}/{name}".encode()).digest(length=16)))


def uniform(source: np.random.SFC64, count: int, low: float, high: float) -> NDArray[np.float64]:
    """Return `count` numbers of [low, high)."""
    raw = source.random_raw(count) >> np.uint64(11)
    return low + raw.astype(np.float64) * 2.0**-53 * (high - low)


def normal(source: np.random.SFC64, count: int) -> Floats:
    """Return `count` numbers of mean 0 and deviation 1, none beyond 6: sums of twelve 16-bit integers, exact."""
    parts = source.random_raw(3 * count).view(np.uint16).reshape(count, 12)
    doubled = 2 * parts.sum(axis=1, dtype=np.int32) - 12 * 65535
    values: Floats = doubled.astype(np.float32) * np.float32(2.0**-17)
    return values


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Round finite fp32 to the bits of BF16, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


class Noise:
    """Random bytes and normal BF16 values faster than a generator makes them.

    A seed has two banks of 4 MiB of words and a million normal numbers, made once. A chunk of 256 KiB is the
    exclusive or of one stretch of each bank; of BF16 values, a stretch of the normal numbers with such words as signs.
    Where stretches begin is drawn from the tensor's own generator. Chunks hardly ever repeat and signs are as good as
    independent, but magnitudes of BF16 values come back: sums over rows behave as those of independent numbers do, a
    test for randomness over many chunks would fail.
    """

    def __init__(self, seed: int) -> None:
        self._banks = [
            generator(seed, f"bank {i}").random_raw(BANK_WORDS + CHUNK_WORDS) for i in range(2)
        ]
        self._normals = normal(generator(seed, "normals"), 4 * BANK_WORDS // 2)
        self._scaled: dict[float, Words] = {}

    def words(self, source: np.random.SFC64, nbytes: int) -> Iterator[Words]:
        """Yield random words chunk by chunk, at least nbytes in all and less than a word more. Each may be changed."""
        left = -(-nbytes // 8)
        while left:
            n = min(left, CHUNK_WORDS)
            a, b = (int(word) % BANK_WORDS for word in source.random_raw(2))
            yield self._banks[0][a : a + n] ^ self._banks[1][b : b + n]
            left -= n

    def masked(
        self, source: np.random.SFC64, nbytes: int, mask: int = 0xFF, base: int = 0
    ) -> Iterator[memoryview]:
        """Yield nbytes of `base + (random & mask)`, byte by byte."""
        byte = np.uint64(0x0101010101010101)
        for words in self.words(source, nbytes):
            if mask != 0xFF:
                words &= np.uint64(mask) * byte
            if base:
                words |= np.uint64(base) * byte
            piece = words.view(np.uint8).data[:nbytes]
            nbytes -= len(piece)
            yield piece

    def bf16(self, source: np.random.SFC64, count: int, std: float) -> Iterator[memoryview]:
        """Yield the bytes of `count` BF16 values of this deviation."""
        bank = self._bank(std)
        signs = np.uint64(0x8000800080008000)
        nbytes = 2 * count
        for words in self.words(source, nbytes):
            start = int(source.random_raw()) % (len(bank) - CHUNK_WORDS)
            words &= signs
            words ^= bank[start : start + len(words)]
            piece = words.view(np.uint8).data[:nbytes]
            nbytes -= len(piece)
            yield piece

    def _bank(self, std: float) -> Words:
        if std not in self._scaled:
            self._scaled[std] = to_bf16(self._normals * np.float32(std)).view(np.uint64)
        return self._scaled[std]


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
            yield _bf16_bytes(uniform(source, count, 0.0, 2.75))
        elif name.endswith("dt_bias"):
            yield _bf16_bytes(uniform(source, count, -4.0, -1.0))
        elif name.endswith("mlp.gate.weight"):
            yield self._router(source, shape)
        elif len(shape) == 1:  # gains: of the DeltaNet norm as they are, of others less one
            mean = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
            yield _bf16_bytes(mean + GAIN_STD * normal(source, count).astype(np.float64))
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

    def _router(self, source: np.random.SFC64, shape: tuple[int, ...]) -> bytes:
        """Return the rows of a router: those of a larger norm are chosen more often."""
        rows, columns = shape
        logs = [Decimal(self.skew) * Decimal(float(n)) for n in normal(source, rows)]
        norms = np.array([float(log.exp()) for log in logs])  # math.exp rounds as the machine likes
        values = normal(source, rows * columns).reshape(shape)
        return _bf16_bytes(values * (norms / math.sqrt(columns))[:, None])

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
        scale, *parts = table_tensors(self.plan)
        assert scale.dtype == "BF16"
        yield _bf16_bytes(np.array([1 / table_rms()]))
        for part in parts:
            source = generator(self.seed, part.name)
            yield from self.noise.masked(source, part.nbytes, TABLE_MASK)


def _bf16_bytes(values: NDArray[np.float64]) -> bytes:
    return to_bf16(values.astype(np.float32)).tobytes()


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values) / len(values))


def nvfp4_rms() -> float:
    """Return the root mean square of code times block scale, as they are drawn here."""
    return _rms(E2M1_VALUES) * _rms([_e4m3(SCALE_BASE + i) for i in range(SCALE_MASK + 1)])


def table_rms() -> float:
    """Return the root mean square of the table's E4M3 values, as they are drawn here."""
    return _rms([_e4m3(byte & TABLE_MASK) for byte in range(128)])


# ---- the stage -----------------------------------------------------------------------------------------------------


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides the bytes: sizes that are chosen already, not the budget that they were chosen by."""
    plan, wanted = make_plan(cfg), cfg.model.synthetic
    return {
        "config": blake3(plan.config.encode()).hexdigest(length=8),
        "layers": plan.spec.num_layers,
        "experts": plan.spec.num_experts,
        "table_rows": plan.table.rows_per_part * plan.spec.table_parts,
        "skew": wanted.skew,
        "seed": wanted.seed,
    }


def disk_nbytes(cfg: RunConfig, _inputs: Mapping[str, Output]) -> int:
    """Return what the whole set-up will take: repack and residents cannot say it before this stage has run."""
    plan = make_plan(cfg)
    return setup_nbytes(plan.spec, plan.table)


def run(ctx: StageContext) -> None:
    """Write one weight file after the other; one is journalled when its bytes are on the disk."""
    plan, wanted = make_plan(ctx.cfg), ctx.cfg.model.synthetic
    names = shard_names(plan)
    writer = Writer(plan, wanted.seed, wanted.skew)
    layer_nbytes = sum(tensor.nbytes for tensor in shard_tensors(plan, 1))
    for name in ctx.todo(names, "weight files", layer_nbytes):
        number = names.index(name)
        tensors = shard_tensors(plan, number)
        ctx.done(name, blake3=_write_shard(ctx.out / name, tensors, writer.shard(number)))
    ctx.digests |= {name: ctx.units[name]["blake3"] for name in names}
    index = json.dumps(_index(plan), separators=(",", ":"))
    write_atomically(ctx.out / INDEX_NAME, index + "\n")
    write_atomically(ctx.out / "config.json", plan.config)
    for name in TOKENIZER_FILES:
        write_atomically(ctx.out / name, (TOKENIZER / name).read_text())
    ctx.facts = {
        "layers": plan.spec.num_layers,
        "experts": plan.spec.num_experts,
        "nbytes": sum((ctx.out / name).stat().st_size for name in names),
    }


def _index(plan: Plan) -> dict[str, Any]:
    """Return what the checkpoint's index file says: which tensor is in which file."""
    total, places = 0, {}
    for number, name in enumerate(shard_names(plan)):
        for tensor in shard_tensors(plan, number):
            total += tensor.nbytes
            places[tensor.name] = name
    return {"metadata": {"total_size": total}, "weight_map": places}


def _write_shard(
    path: Path, tensors: Sequence[Tensor], pieces: Iterator[bytes | memoryview]
) -> str:
    """Write a weight file from its first byte and wait for the disk. Returns its hash."""
    header = make_header(tensors)
    nbytes = len(header) + sum(tensor.nbytes for tensor in tensors)
    hasher = blake3()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a full disk shows now, not at the last expert
        at = _pwrite_all(fd, header, 0)
        hasher.update(header)
        for piece in pieces:
            hasher.update(piece)
            at = _pwrite_all(fd, piece, at)
        assert at == nbytes, f"{path.name}: {at} bytes of {nbytes} were made"
        os.fsync(fd)
    finally:
        os.close(fd)
    return hasher.hexdigest(length=16)


def _pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write all of `data`; return the offset behind it."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    return offset


STAGE = Stage(name="synthetic", run=run, params=params, disk_nbytes=disk_nbytes)
