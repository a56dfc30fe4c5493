"""Synthetic checkpoints of DeepSeek-V4.1-Flash: which tensors are made, where each lies and what stands in it.

Owns the choice of layers, the size of the Engram tables, the tokenizer, and the order of bytes inside a shard, which is
the release's: by dtype, then by name as a string, the experts' codes last and up to the file's end. No vision tower and
no drafts.

A cut keeps whole layers of the release and numbers them anew. First come those that no cut can do without: the first
layer, the first Engram layer, the first source of compressed entries of each ratio. Then one layer of every other kind
(kinds differ in ratio, in the lists and entries that a layer makes, in Engram), then the rest, spread over the depth.
Of the release, 4 layers are 0, 1, 2, 20; with 3, 14, 21, 24 all eight kinds are there. config.json says which
(`synthetic.released_layers`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from conf.schema import RunConfig, SyntheticConfig
from kernels.formats import E2M1_VALUES
from runtime.experts.layout import ExpertKey
from runtime.models.deepseek_engram import build_token_map, table_primes
from runtime.models.deepseek_weights import (
    DeepseekSpec,
    engram_table_shapes,
    expert_prefix,
    resident_shapes,
)
from stages import synthetic_parts as parts
from stages.download import PROJECT
from stages.synthetic_parts import GAIN_STD, Noise, Tensor, generator, normal, uniform

RELEASED = PROJECT / "runtime" / "bundled" / "deepseek-v41-flash"
TOKENIZER = PROJECT / "runtime" / "bundled" / "tiny-deepseek"  # the release's own is not bundled
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
METADATA: dict[str, str] = {}  # as released: none
ALIGN_NBYTES = 8  # of a shard's data
ORDER = ("F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")  # of dtypes in a shard
IMAGE_TENSORS = ("image_end", "image_newline", "image_start")

# upper bounds of the budget, for what is small
ENTRY_NBYTES = 260  # a tensor's entries in header and index
RECORDS_NBYTES = 2**17  # config, journals, records
TOKEN_NBYTES = 40  # a made token's entry in tokenizer.json

FP8_BASE, FP8_MASK = 0x20, 0x9F  # E4M3 of both signs from 1/8 to 15/8: no NaN, no zero
STEP_MASK = 1  # E8M0 scales: two neighbouring powers of two
BIAS_STD = 0.01  # of the routers: too small to change which experts are popular
SINK_STD = 1.0
# an average over a window is much the same for all tokens: at 2.0 they all take the same experts after 20 layers
ATTENTION_GAIN = 0.5
OWN_SHARE = 4.0  # what a stream keeps of itself, as a logit against the others


# ---- sizes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """All that decides the bytes, but for the seed and the skew."""

    spec: DeepseekSpec
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
    released = DeepseekSpec.from_config(config)
    parts.check_vocabulary(released.vocab_size, _num_tokens())
    config = _cut_layers(config, choose_layers(released, layers))
    config = _cut_tables(config, ngram_rows)
    wanted = SyntheticConfig(experts, layers, disk_gib, ngram_rows)
    config["text_config"]["n_routed_experts"] = _choose_experts(
        DeepseekSpec.from_config(config), wanted
    )
    return Plan(DeepseekSpec.from_config(config), json.dumps(config, indent=1) + "\n")


def choose_layers(released: DeepseekSpec, wanted: int | None) -> list[int]:
    """Return which layers of the release are kept, ascending; None: all.  Raises UserError for too few or too many."""
    everything = list(range(released.num_layers))
    first: dict[tuple[int, bool, bool, bool], int] = {}  # of each kind
    for layer in everything:
        kind = (
            released.compress_ratios[layer],
            released.is_kv_source(layer),
            released.is_index_source(layer),
            layer in released.engram_layers,
        )
        first.setdefault(kind, layer)
    needed = {0, released.candidate_source, *released.engram_layers[:1]}
    for ratio in set(released.compress_ratios) - {0}:
        sources = (s for s in released.kv_sources if released.compress_ratios[s] == ratio)
        needed.add(min(sources))
    why = f"one of each compress ratio and one with Engram: {sorted(needed)} of the release"
    count = parts.check_layers(wanted, len(needed), released.num_layers, why)
    kinds = sorted(set(first.values()) - needed)
    rest = [layer for layer in everything if layer not in needed and layer not in kinds]
    spread = [layer for start in range(4) for layer in rest[start::4]]
    return sorted([*sorted(needed), *kinds, *spread][:count])


def _cut_layers(config: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return a release's config.json for some of its layers, without vision and drafts, for the bundled tokenizer."""
    text, tokens = config["text_config"], json.loads((TOKENIZER / "config.json").read_text())
    number = {layer: i for i, layer in enumerate(kept)}
    tables = zip(text["engram_layer_ids"], text["engram_num_embeddings"], strict=True)
    cut = text | {
        "num_hidden_layers": len(kept),
        "compress_ratios": [text["compress_ratios"][layer] for layer in kept],
        "candidate_source_layer_id": number[text["candidate_source_layer_id"]],
        "engram_num_embeddings": [rows for layer, rows in tables if layer in number],
        "engram_compressed_vocab_size": _num_classes() + text["vocab_size"] - _num_tokens(),
        "engram_pad_token_id": tokens["text_config"]["engram_pad_token_id"],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        cut[key] = [number[layer] for layer in text[key] if layer in number]
    return {
        **{key: value for key, value in config.items() if key != "vision_config"},
        **{key: tokens[key] for key in TOKEN_IDS},
        "text_config": cut,
        "synthetic": {"released_layers": list(kept)},
    }


def _cut_tables(config: Mapping[str, Any], ngram_rows: int) -> dict[str, Any]:
    """Return a config.json with Engram tables of about `ngram_rows` rows each, and at least two in a column."""
    text = config["text_config"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    fewest = max(2, ngram_rows // columns)
    primes = table_primes(fewest, columns, len(text["engram_layer_ids"]))
    sizes = {
        "engram_vocab_size": fewest,
        "engram_num_embeddings": [sum(column_rows) for column_rows in primes],
    }
    return {**config, "text_config": text | sizes}


def _choose_experts(spec: DeepseekSpec, wanted: SyntheticConfig) -> int:
    """spec: with the released number of experts.  Returns how many a layer gets."""
    fixed = _nbytes(dataclasses.replace(spec, num_experts=0))
    each = _nbytes(dataclasses.replace(spec, num_experts=1)) - fixed
    return parts.choose_experts(
        wanted, spec.num_layers, spec.top_k, spec.num_experts, fixed, each, "the checkpoint"
    )


def _nbytes(spec: DeepseekSpec) -> int:
    """Return what a checkpoint takes on the disk, at most."""
    tensors = [tensor for number in range(_num_shards(spec)) for tensor in _tensors(spec, number)]
    small = sum((TOKENIZER / name).stat().st_size for name in ("tokenizer.json", *TEMPLATE_FILES))
    made_tokens = spec.vocab_size - _num_tokens()
    return (
        sum(tensor.nbytes + ENTRY_NBYTES for tensor in tensors)
        + small + TOKEN_NBYTES * made_tokens + RECORDS_NBYTES
    )  # fmt: skip


# ---- the tokenizer -------------------------------------------------------------------------------------------------


@functools.cache
def _num_classes() -> int:
    return max(build_token_map(TOKENIZER / "tokenizer.json")) + 1


@functools.cache
def _num_tokens() -> int:
    return len(build_token_map(TOKENIZER / "tokenizer.json"))


def make_tokenizer(vocab_size: int) -> str:
    """Return the text of a tokenizer.json: the bundled one, made up to the vocabulary with words that no merge reaches.

    Text is encoded as with the bundled one; a made word has a class of its own, since no token mixes letter and digit.
    """
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    made = {f"\u0120w{i}": i for i in range(_num_tokens(), vocab_size)}  # a space, w, the number
    assert not made.keys() & vocabulary.keys(), "a made word is a token already"
    vocabulary |= made
    return json.dumps(tokenizer, ensure_ascii=False)


# ---- places --------------------------------------------------------------------------------------------------------


def _num_shards(spec: DeepseekSpec) -> int:
    return spec.num_layers + 2 + len(spec.engram_layers)


def shard_names(plan: Plan) -> list[str]:
    """Return the weight files in the order in which they are made: embedding, layers, head, Engram."""
    count = _num_shards(plan.spec)
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def shard_tensors(plan: Plan, number: int) -> list[Tensor]:
    """Return the tensors of weight file `number` (its place in `shard_names`), in file order."""
    return _tensors(plan.spec, number)


def _tensors(spec: DeepseekSpec, number: int) -> list[Tensor]:
    layers = spec.num_layers
    if number == 0:
        images = [Tensor(name, "BF16", (spec.hidden,)) for name in IMAGE_TENSORS]
        return [*_residents(spec, "embed."), *images]
    if number <= layers:
        return _layer_tensors(spec, number - 1)
    if number == layers + 1:
        return [*_residents(spec, "head."), *_residents(spec, "norm.")]
    return _engram_tensors(spec, spec.engram_layers[number - layers - 2])


def _residents(spec: DeepseekSpec, start: str) -> list[Tensor]:
    """Return the residents whose names begin like this, by name."""
    shapes = resident_shapes(spec)
    return [Tensor(name, *shapes[name]) for name in sorted(shapes) if name.startswith(start)]


def _layer_tensors(spec: DeepseekSpec, layer: int) -> list[Tensor]:
    """Return a layer's tensors, without Engram, in the release's order: by dtype, then by name as a string."""
    engram = f"layers.{layer}.engram."
    tensors = [t for t in _residents(spec, f"layers.{layer}.") if not t.name.startswith(engram)]
    tensors.append(Tensor(f"layers.{layer}.ffn.gate.bias_vl", "F32", (spec.num_experts,)))
    for expert in range(spec.num_experts):
        prefix = expert_prefix(ExpertKey(layer, expert))
        for name, (rows, columns) in spec.expert_shape.matrices().items():
            tensors.append(Tensor(f"{prefix}{name}.weight", "I8", (rows, columns // 2)))
            tensors.append(Tensor(f"{prefix}{name}.scale", "F8_E8M0", (rows, columns // 32)))
    return sorted(tensors, key=lambda tensor: (ORDER.index(tensor.dtype), tensor.name))


def _engram_tensors(spec: DeepseekSpec, layer: int) -> list[Tensor]:
    """Return a layer's Engram in the release's order: table, its scales, gates, projection."""
    name = f"layers.{layer}.engram."
    table = [
        Tensor(key, *entry)
        for key, entry in engram_table_shapes(spec).items()
        if key.startswith(name)
    ]
    gates, projection = _residents(spec, f"{name}k_"), _residents(spec, f"{name}wkv.")
    return [*table, *gates, *_residents(spec, f"{name}q_"), *reversed(projection)]


# ---- bytes ---------------------------------------------------------------------------------------------------------


class Writer:
    """What stands in the tensors of one plan and seed. A tensor's bytes follow from its name, whatever is beside it."""

    def __init__(self, plan: Plan, seed: int, skew: float) -> None:
        self.plan, self.seed, self.skew = plan, seed, skew
        self.noise = Noise(seed)

    def shard(self, number: int) -> Iterator[bytes | memoryview]:
        """Yield the data of weight file `number`, in the order of `shard_tensors`."""
        for tensor in shard_tensors(self.plan, number):
            source = generator(self.seed, tensor.name)
            if tensor.dtype == "I8":
                yield from self.noise.masked(source, tensor.nbytes)
            elif tensor.dtype == "F8_E4M3":
                yield from self.noise.masked(source, tensor.nbytes, FP8_MASK, FP8_BASE)
            elif tensor.dtype == "F8_E8M0":
                base = _step_base(tensor)
                yield from self.noise.masked(source, tensor.nbytes, STEP_MASK, base)
            elif tensor.dtype == "BF16":
                yield from self._bf16(source, tensor)
            else:
                yield self._f32(source, tensor)

    def _bf16(self, source: np.random.SFC64, tensor: Tensor) -> Iterator[bytes | memoryview]:
        name, _, shape = tensor
        count = math.prod(shape)
        is_gain = len(shape) == 1 or name.endswith(("engram.q_weight", "engram.k_weight"))
        if name.endswith("ffn.gate.weight"):
            yield parts.router_rows(source, shape, self.skew)
        elif is_gain:
            yield parts.bf16_bytes(1.0 + GAIN_STD * normal(source, count).astype(np.float64))
        else:
            std = 1.0 if name == "embed.weight" else 1 / math.sqrt(shape[-1])
            yield from self.noise.bf16(source, count, std)

    def _f32(self, source: np.random.SFC64, tensor: Tensor) -> bytes:
        name, _, shape = tensor
        count = math.prod(shape)
        if name.endswith("_scale"):  # of a hyper-connection's three mixes
            return uniform(source, count, 0.5, 1.0).astype(np.float32).tobytes()
        values = normal(source, count)
        if name.endswith("_fn"):
            values *= np.float32(1 / math.sqrt(shape[-1]))
        elif name.endswith("_base"):
            values = np.float32(0.5) * values + self._mix_base()
        elif "gate.bias" in name:
            values *= np.float32(BIAS_STD)
        else:
            assert name.endswith("attn_sink"), name
            values *= np.float32(SINK_STD)
        return values.tobytes()

    def _mix_base(self) -> parts.Floats:
        """Return what is added to a hyper-connection's base: a stream keeps more of itself than of the others."""
        streams = self.plan.spec.streams
        own = np.float32(OWN_SHARE) * np.eye(streams, dtype=np.float32).reshape(-1)
        return np.concatenate([np.zeros(2 * streams, dtype=np.float32), own])


def _step_base(scales: Tensor) -> int:
    """Return the smaller E8M0 byte of a tensor's scales: values get the order 1 / sqrt(columns), a table's order 1."""
    name, _, shape = scales
    if name.endswith("engram.embed.scale"):
        wanted = 1.0
    else:
        columns = 32 * shape[-1]
        gain = ATTENTION_GAIN if name.endswith("wo_a.scale") else 1.0
        wanted = gain / math.sqrt(columns)
    codes = fp4_rms() if ".experts." in name else fp8_rms()
    # of the two steps the larger counts more; no size is near the middle between two powers
    return 127 + round(math.log2(wanted / (codes * parts.rms([1.0, 2.0]))))


def fp4_rms() -> float:
    """Return the root mean square of an expert's codes, as they are drawn here."""
    return parts.rms(E2M1_VALUES)


def fp8_rms() -> float:
    """Return the root mean square of E4M3 values, as they are drawn here."""
    return parts.rms([parts.e4m3_value(FP8_BASE + i) for i in range((FP8_MASK & 0x7F) + 1)])


# ---- what the stage asks of a family -------------------------------------------------------------------------------


def params(plan: Plan) -> dict[str, Any]:
    """Return what decides the bytes, but for seed and skew."""
    spec = plan.spec
    return {
        "config": blake3(plan.config.encode()).hexdigest(length=8),
        "layers": spec.num_layers,
        "experts": spec.num_experts,
        "table_rows": list(spec.engram_rows),
    }


def setup_nbytes(plan: Plan) -> int:
    """Return what the checkpoint takes on the disk, at most; nothing is made of it besides."""
    return _nbytes(plan.spec)


def small_files(plan: Plan) -> dict[str, str]:
    """Return the files besides weights and index: name -> text."""
    files = {name: (TOKENIZER / name).read_text() for name in TEMPLATE_FILES}
    tokenizer = make_tokenizer(plan.spec.vocab_size)
    return {"config.json": plan.config, "tokenizer.json": tokenizer, **files}
