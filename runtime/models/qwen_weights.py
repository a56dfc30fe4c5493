"""The Qwen3.8-Flash-Next checkpoint: its configuration, its tensors by name, and what becomes of each.

Every tensor of a release is a resident, a part of an expert, a part of the n-gram table, or left out for a stated
reason; one that is none of these stops the stage that meets it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.checkpoint import Checkpoint, CheckpointError, Extent, TensorInfo, read_extent
from runtime.errors import UserError
from runtime.experts.layout import PACK_SCALARS, SCALARS_PER_EXPERT, ExpertKey, Nvfp4Shape
from runtime.models.release_config import keys_named, require
from runtime.rows import RowTable

PREFIX = "model.language_model."
RESIDENTS_NAME = "residents.safetensors"
TABLES_NAME = "tables.json"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FP8_ROW_TAILS = (
    "linear_attn.in_proj_qkv.weight",
    "linear_attn.in_proj_z.weight",
    "linear_attn.out_proj.weight",
)

# what a text engine does not use: pattern -> why
_LEFT_OUT = (
    (re.compile(r"model\.visual\."), "vision tower"),
    (re.compile(r"mtp\."), "draft head (MTP)"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class QwenSpec:
    """The configuration of one checkpoint, checked: what this engine does not support is refused here."""

    vocab_size: int
    hidden: int
    num_layers: int
    is_attention: tuple[bool, ...]  # per layer: attention with indexer, else Gated DeltaNet
    eps: float
    max_positions: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    index_heads: int
    index_dim: int
    index_blocks: int  # blocks that attention may see
    block_tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    streams: int
    lowrank: int
    ple_layer: int  # 0-based
    ple_dim: int
    ple_kernel: int
    ngram_size: int
    heads_per_ngram: int
    table_parts: int
    eos: int  # the n-gram boundary, not the chat stop token

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> QwenSpec:
        """Read a release's config.json. Raises UserError naming the key and value that are not supported."""
        if config.get("model_type") != "qwen4_exp":
            raise _unsupported("model_type", config.get("model_type"), "qwen4_exp")
        with keys_named():
            return cls._from_text_config(config["text_config"])

    @classmethod
    def _from_text_config(cls, c: Mapping[str, Any]) -> QwenSpec:
        rope = c["rope_parameters"]
        required: dict[str, tuple[Any, Any]] = {
            "hidden_act": (c.get("hidden_act"), "silu"),
            "output_gate_type": (c.get("output_gate_type"), "sigmoid"),
            "attention_bias": (c.get("attention_bias", False), False),
            "tie_word_embeddings": (c.get("tie_word_embeddings", False), False),
            "norm_topk_prob": (c.get("norm_topk_prob", True), True),
            "rope_type": (rope.get("rope_type"), "default"),
            "indexer_kv_heads": (c.get("indexer_kv_heads"), 1),
            "ngram_size": (c.get("ngram_size"), 3),
            "ple_layer_ids (their number)": (len(c["ple_layer_ids"]), 1),
        }
        require(required, _unsupported)
        kinds = c["layer_types"]
        if len(kinds) != c["num_hidden_layers"]:
            raise _unsupported("layer_types (their number)", len(kinds), c["num_hidden_layers"])
        for kind in kinds:
            if kind not in ("linear_attention", "full_attention", "indexed_attention"):
                raise _unsupported("layer_types", kind, "linear_attention or full_attention")
        eos = c["eos_token_id"]
        return cls(
            vocab_size=c["vocab_size"],
            hidden=c["hidden_size"],
            num_layers=c["num_hidden_layers"],
            is_attention=tuple(kind != "linear_attention" for kind in kinds),
            eps=c["rms_norm_eps"],
            max_positions=c["max_position_embeddings"],
            heads=c["num_attention_heads"],
            kv_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
            rotary_dim=int(c["head_dim"] * rope["partial_rotary_factor"]),
            rope_theta=float(rope["rope_theta"]),
            index_heads=c["indexer_n_heads"],
            index_dim=c["indexer_head_dim"],
            index_blocks=c["indexer_budget"] // c["indexer_compress_ratio"],
            block_tokens=c["indexer_compress_ratio"],
            key_heads=c["linear_num_key_heads"],
            value_heads=c["linear_num_value_heads"],
            key_dim=c["linear_key_head_dim"],
            value_dim=c["linear_value_head_dim"],
            conv_kernel=c["linear_conv_kernel_dim"],
            num_experts=c["num_experts"],
            top_k=c["num_experts_per_tok"],
            intermediate=c["moe_intermediate_size"],
            shared_intermediate=c["shared_expert_intermediate_size"],
            streams=c["hc_count"],
            lowrank=c["hc_lowrank"],
            ple_layer=c["ple_layer_ids"][0] - 1,
            ple_dim=c["ple_embed_dim"],
            ple_kernel=c["ple_conv_kernel_size"],
            ngram_size=c["ngram_size"],
            heads_per_ngram=c["heads_per_ngram"],
            table_parts=c["split_ngram_parts"],
            eos=eos[0] if isinstance(eos, list) else eos,
        )

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def table_row_nbytes(self) -> int:
        """Bytes of one n-gram row: E4M3 values."""
        return self.ple_dim // ((self.ngram_size - 1) * self.heads_per_ngram)

    def resident_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor outside the experts and the n-gram table: name in the checkpoint -> shape."""
        h, d = self.hidden, self.streams * self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "lm_head.weight": (self.vocab_size, h),
            f"{PREFIX}embed_tokens.weight": (self.vocab_size, h),
        }

        def add_mixer(name: str, has_inject: bool = True) -> None:
            shapes[f"{PREFIX}{name}.hc_norm.weight"] = (d,)
            shapes[f"{PREFIX}{name}.input_mix_weight_down.weight"] = (self.lowrank, d)
            shapes[f"{PREFIX}{name}.input_mix_weight_up.weight"] = (d, self.lowrank)
            if has_inject:
                shapes[f"{PREFIX}{name}.block_inject_weight.weight"] = (self.streams, d)

        add_mixer("hyper_connection_mixer", has_inject=False)
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            add_mixer(f"{at}attn_hyper_connection")
            add_mixer(f"{at}mlp_hyper_connection")
            block = self._attention_shapes() if self.is_attention[layer] else self._delta_shapes()
            block |= self._moe_shapes() | (self._ple_shapes() if layer == self.ple_layer else {})
            shapes |= {f"{PREFIX}{at}{name}": shape for name, shape in block.items()}
        return shapes

    def mtp_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor of the draft head (MTP) outside its experts: name less `mtp.` -> shape."""
        h, d = self.hidden, self.streams * self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "fc_embedding.weight": (h, h),
            "fc_hidden.weight": (h, h),
            "pre_fc_norm_embedding.weight": (h,),
            "pre_fc_norm_hidden.weight": (d,),
        }
        for name in ("hyper_connection_mixer", "attn_hyper_connection", "mlp_hyper_connection"):
            is_block = name != "hyper_connection_mixer"
            at = f"layers.0.{name}" if is_block else name
            shapes |= {
                f"{at}.hc_norm.weight": (d,),
                f"{at}.input_mix_weight_down.weight": (self.lowrank, d),
                f"{at}.input_mix_weight_up.weight": (d, self.lowrank),
            }
            if is_block:
                shapes[f"{at}.block_inject_weight.weight"] = (self.streams, d)
        block = self._attention_shapes() | self._moe_shapes()
        return shapes | {f"layers.0.{name}": shape for name, shape in block.items()}

    def kept_shapes(self, has_fp8_rows: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the tensors of the residents file as a release of BF16 gives them: name -> (dtype, shape)."""
        kept: dict[str, tuple[str, tuple[int, ...]]] = {}
        for full, shape in self.resident_shapes().items():
            name = full.removeprefix(PREFIX)
            if has_fp8_rows and name.endswith(FP8_ROW_TAILS):
                kept |= {name: ("F8_E4M3", shape), f"{name}_scale": ("F32", shape[:1])}
            else:
                kept[name] = ("I64" if "ple_embedding." in name else "BF16", shape)
        return kept

    def _ple_shapes(self) -> dict[str, tuple[int, ...]]:
        h, d = self.hidden, self.streams * self.hidden
        ngram_heads = (self.ngram_size - 1) * self.heads_per_ngram
        return {
            "ple.key_proj.weight": (d, self.ple_dim),
            "ple.value_proj.weight": (h, self.ple_dim),
            "ple.norm_key.weight": (d,),
            "ple.norm_query.weight": (d,),
            "ple.norm_conv.weight": (d,),
            "ple.conv1d.weight": (d, 1, self.ple_kernel),
            "ple.ple_embedding.layer_multipliers": (self.ngram_size,),
            "ple.ple_embedding.ngram_heads_vocab_sizes": (ngram_heads,),
            "ple.ple_embedding.ngram_heads_offsets": (ngram_heads,),
        }

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        kv, width = self.kv_heads * self.head_dim, self.heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (2 * width, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, width),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "self_attn.indexer.index_qk_proj.weight": (
                (self.index_heads + 1) * self.index_dim,
                self.hidden,
            ),
            "self_attn.indexer.q_layernorm.weight": (self.index_dim,),
            "self_attn.indexer.k_layernorm.weight": (self.index_dim,),
        }

    def _delta_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "linear_attn.in_proj_qkv.weight": (self.conv_width, self.hidden),
            "linear_attn.in_proj_z.weight": (self.value_width, self.hidden),
            "linear_attn.in_proj_b.weight": (self.value_heads, self.hidden),
            "linear_attn.in_proj_a.weight": (self.value_heads, self.hidden),
            "linear_attn.conv1d.weight": (self.conv_width, 1, self.conv_kernel),
            "linear_attn.A_log": (self.value_heads,),
            "linear_attn.dt_bias": (self.value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (self.hidden, self.value_width),
        }

    def _moe_shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "mlp.gate.weight": (self.num_experts, self.hidden),
            "mlp.shared_expert.gate_proj.weight": (self.shared_intermediate, self.hidden),
            "mlp.shared_expert.up_proj.weight": (self.shared_intermediate, self.hidden),
            "mlp.shared_expert.down_proj.weight": (self.hidden, self.shared_intermediate),
            "mlp.shared_expert_gate.weight": (1, self.hidden),
        }


def _unsupported(key: str, found: Any, wanted: Any) -> UserError:
    return UserError(
        f"this engine does not support {key}={found!r} of the checkpoint's config.json (only {wanted!r})",
        "use a release of Qwen3.8-Flash-Next, or another model.family",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Resident:
    """One tensor of the residents file: where it comes from and in which form it is kept."""

    info: TensorInfo
    name: str  # the checkpoint's, less the prefix
    is_fp8_rows: bool
    unit: str  # tensors of one unit are written together


def read_residents(checkpoint: Checkpoint, spec: QwenSpec, has_fp8_rows: bool) -> list[Resident]:
    """Return all residents in file order, each checked for dtype and shape.

    has_fp8_rows: keep the large DeltaNet matrices as E4M3 rows with a scale, else as released.
    """
    found = []
    for name, shape in spec.resident_shapes().items():
        is_constant = "ple_embedding." in name
        info = checkpoint.info(name, "I64" if is_constant else ("BF16", "F32", "F16"), shape)
        short = name.removeprefix(PREFIX)
        unit = ".".join(short.split(".")[:2]) if short.startswith("layers.") else "model"
        found.append(Resident(info, short, has_fp8_rows and short.endswith(FP8_ROW_TAILS), unit))
    return found


def expert_name(key: ExpertKey) -> str:
    """Return the prefix of an expert's tensor names."""
    return f"{PREFIX}layers.{key.layer}.mlp.experts.{key.expert}."


def expert_parts(checkpoint: Checkpoint, spec: QwenSpec, key: ExpertKey) -> list[TensorInfo]:
    """Return the six tensors of an expert's block, in block order, each checked for dtype and shape."""
    name, hidden, inner = expert_name(key), spec.hidden, spec.intermediate
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    codes = [
        checkpoint.info(f"{name}{p}.weight", "U8", (rows, cols // 2))
        for p, (rows, cols) in sizes.items()
    ]
    scales = [
        checkpoint.info(f"{name}{p}.weight_scale", "F8_E4M3", (rows, cols // 16))
        for p, (rows, cols) in sizes.items()
    ]
    return [*codes, *scales]


def read_expert_block(checkpoint: Checkpoint, spec: QwenSpec, key: ExpertKey) -> bytearray:
    """Return an expert's packed block: six tensors verbatim, then zeros up to the page.

    Raises CheckpointError when a block scale is negative or NaN.
    """
    shape = Nvfp4Shape(spec.hidden, spec.intermediate)
    block = bytearray(shape.record_nbytes)
    for info, (part, (offset, nbytes)) in zip(
        expert_parts(checkpoint, spec, key), shape.parts().items(), strict=True
    ):
        raw = checkpoint.read(info)
        if part.endswith("scales") and max(raw) >= 0x7F:
            raise CheckpointError(
                f"tensor {info.name} has a block scale that is negative or NaN (byte 0x{max(raw):02X})",
                "the checkpoint is damaged, or not NVFP4: download it again",
            )
        block[offset : offset + nbytes] = raw
    return block


def read_expert_scalars(checkpoint: Checkpoint, key: ExpertKey) -> list[float]:
    """Return an expert's six scalars: global scales of gate, up, down, then the input scales (NaN where absent)."""
    name = expert_name(key)
    values = []
    for suffix in ("weight_scale_2", "input_scale"):
        for projection in PROJECTIONS:
            full = f"{name}{projection}.{suffix}"
            if suffix == "input_scale" and full not in checkpoint.tensors:
                values.append(math.nan)  # a weight-only engine does not use it
                continue
            (value,) = struct.unpack("<f", checkpoint.read(_scalar(checkpoint, full)))
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(
                    f"tensor {full} is {value}, expected a positive number", "download it again"
                )
            values.append(value)
    assert len(values) == SCALARS_PER_EXPERT
    return values


def _scalar(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """Return the place of one F32 value, stored with shape [] or [1]."""
    info = checkpoint.info(name, "F32")
    if info.shape not in ((), (1,)):
        raise CheckpointError(
            f"tensor {name} has shape {list(info.shape)}, expected one value", "download it again"
        )
    return info


def read_ngram_table(checkpoint: Checkpoint, spec: QwenSpec) -> tuple[RowTable, float]:
    """Return the n-gram table in place, its parts in numeric order, and the scale of its E4M3 values."""
    name = f"{PREFIX}layers.{spec.ple_layer}.ple.ple_embedding.ngram_embedding."
    infos = [checkpoint.info(f"{name}shard_{i}.weight", "F8_E4M3") for i in range(spec.table_parts)]
    rows, width = (infos[0].shape or (0,))[0], spec.table_row_nbytes
    for info in infos:
        checkpoint.info(info.name, "F8_E4M3", (rows, width))
    (bits,) = struct.unpack(
        "<H", read_extent(checkpoint.info(f"{name}weight_scale", "BF16", (1,)).extent)
    )
    (scale,) = struct.unpack("<f", struct.pack("<I", bits << 16))
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(
            f"tensor {name}weight_scale is {scale}, expected a positive number", "fetch it again"
        )
    return RowTable(tuple(info.extent for info in infos), rows, width), scale


def account(checkpoint: Checkpoint, spec: QwenSpec) -> dict[str, int]:
    """Return how many tensors go where; raise CheckpointError when one has no place.

    Checks the presence, dtype and shape of every tensor that the engine uses, from the headers alone.
    """
    places = {
        info.info.name: "residents" for info in read_residents(checkpoint, spec, has_fp8_rows=False)
    }
    for key in all_experts(spec):
        for info in expert_parts(checkpoint, spec, key):
            places[info.name] = "expert blocks"
        for projection in PROJECTIONS:
            places[_scalar(checkpoint, f"{expert_name(key)}{projection}.weight_scale_2").name] = (
                "expert scalars"
            )
            places[f"{expert_name(key)}{projection}.input_scale"] = "expert scalars"
    table, _ = read_ngram_table(checkpoint, spec)
    name = f"{PREFIX}layers.{spec.ple_layer}.ple.ple_embedding.ngram_embedding."
    places |= {f"{name}shard_{i}.weight": "n-gram table" for i in range(len(table.parts))}
    places[f"{name}weight_scale"] = "n-gram table"
    return checkpoint.account(places, _LEFT_OUT)


def all_experts(spec: QwenSpec) -> Iterator[ExpertKey]:
    """Yield every expert in block order."""
    for layer in range(spec.num_layers):
        for expert in range(spec.num_experts):
            yield ExpertKey(layer, expert)


def table_to_json(table: RowTable, scale: float, root: Path) -> dict[str, Any]:
    """Describe a table by files relative to the snapshot, so that an engine need not read any header again."""
    return {
        "rows_per_part": table.rows_per_part,
        "row_nbytes": table.row_nbytes,
        "scale": scale,
        "parts": [
            [str(part.file.relative_to(root)), part.offset, part.nbytes] for part in table.parts
        ],
    }


def table_from_json(data: Mapping[str, Any], root: Path) -> tuple[RowTable, float]:
    """Undo `table_to_json` for a snapshot at `root`."""
    parts: Sequence[Any] = data["parts"]
    extents = tuple(Extent(root / file, offset, nbytes) for file, offset, nbytes in parts)
    return RowTable(extents, data["rows_per_part"], data["row_nbytes"]), data["scale"]


def read_pack_scalars(pack: Path, spec: QwenSpec) -> array[float]:
    """Return the scalars of every expert, block-major, six each, as repack checked and wrote them."""
    values = array("f", (pack / PACK_SCALARS).read_bytes())
    if len(values) != spec.num_layers * spec.num_experts * SCALARS_PER_EXPERT:
        raise UserError(
            f"{pack / PACK_SCALARS} has {len(values)} values, expected "
            f"{spec.num_layers * spec.num_experts * SCALARS_PER_EXPERT}",
            "run the repack stage again: force=[repack]",
        )
    return values
