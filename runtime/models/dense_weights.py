"""Dense checkpoints in the Hugging Face layout: their configuration, their tensors by name, one record a layer.

Knows Llama, Mistral, Qwen2 and Qwen3 with full attention. Every tensor is a resident, a part of a layer, or left out
for a stated reason; one that is none of these is refused. A quantised copy of a checkpoint has the same names, and a
matrix's scales beside it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from conf.schema import Weights
from kernels.formats import NVFP4_GROUP
from runtime.checkpoint import Checkpoint, CheckpointError
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.tensor_layout import TensorLayout
from runtime.experts.tensor_runs import Part
from runtime.models.release_config import keys_named, require

FLOATS = ("BF16", "F16", "F32")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYERS_NAME = "model.safetensors"  # of a quantised copy: its layers, and the head
_LEFT_OUT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # computed here


class ChunkedPositions(NamedTuple):
    """Dual chunk attention: how a model reads positions beyond those of its training."""

    chunk_size: int
    local_size: int
    trained: int  # positions


@dataclasses.dataclass(frozen=True, slots=True)
class DenseSpec:
    """The configuration of one checkpoint, checked: what is not supported is refused here."""

    model_type: str
    vocab_size: int
    hidden: int
    depth: int  # transformer layers
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    max_positions: int
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    chunked: ChunkedPositions | None

    # the engine sees one layer of as many experts as there are layers: it streams them in that order
    @property
    def num_layers(self) -> int:
        return 1

    @property
    def num_experts(self) -> int:
        return self.depth

    @property
    def top_k(self) -> int:
        return 1

    @property
    def kv_token_values(self) -> int:
        """Key and value numbers that one token leaves, over all layers."""
        return 2 * self.depth * self.kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DenseSpec:
        """Read a release's config.json. Raises UserError naming the key and value that are not supported."""
        with keys_named():
            return cls._from_config(config)

    @classmethod
    def _from_config(cls, c: Mapping[str, Any]) -> DenseSpec:
        kind = c.get("model_type")
        if kind not in MODEL_TYPES:
            raise _unsupported("model_type", kind, " or ".join(MODEL_TYPES))
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        kinds = set(c.get("layer_types") or ["full_attention"])
        slides = kind == "mistral" or c.get("use_sliding_window", False)
        window = c.get("sliding_window") if slides else None
        required: dict[str, tuple[Any, Any]] = {
            "hidden_act": (c.get("hidden_act", "silu"), "silu"),
            "rope_type": (rope_type, "default"),
            "layer_types": (sorted(kinds), ["full_attention"]),
            "sliding_window": (window, None),
            "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
        }
        require(required, _unsupported)
        dca = c.get("dual_chunk_attention_config")
        chunked = None
        if dca:
            trained = dca.get("original_max_position_embeddings", dca["chunk_size"])
            chunked = ChunkedPositions(dca["chunk_size"], dca["local_size"], trained)
        theta = rope.get("rope_theta", c.get("rope_theta"))
        heads = c["num_attention_heads"]
        return cls(
            model_type=kind,
            vocab_size=c["vocab_size"],
            hidden=c["hidden_size"],
            depth=c["num_hidden_layers"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            intermediate=c["intermediate_size"],
            eps=c["rms_norm_eps"],
            rope_theta=10000.0 if theta is None else float(theta),
            max_positions=c["max_position_embeddings"],
            has_qkv_bias=kind == "qwen2" or bool(c.get("attention_bias", False)),
            has_out_bias=kind != "qwen2" and bool(c.get("attention_bias", False)),
            has_mlp_bias=bool(c.get("mlp_bias", False)),
            has_qk_norm=kind == "qwen3",
            is_tied=bool(c.get("tie_word_embeddings", False)),
            chunked=chunked,
        )

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name within a layer -> shape, in the order of use."""
        d, h = self.hidden, self.head_dim
        q, kv = self.heads * h, self.kv_heads * h
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (d,)}
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"self_attn.{part}_proj.weight"] = (rows, d)
            if self.has_qkv_bias:
                shapes[f"self_attn.{part}_proj.bias"] = (rows,)
        if self.has_qk_norm:
            shapes |= {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
        shapes["self_attn.o_proj.weight"] = (d, q)
        if self.has_out_bias:
            shapes["self_attn.o_proj.bias"] = (d,)
        shapes["post_attention_layernorm.weight"] = (d,)
        for part in ("gate", "up", "down"):
            rows, columns = (d, self.intermediate) if part == "down" else (self.intermediate, d)
            shapes[f"mlp.{part}_proj.weight"] = (rows, columns)
            if self.has_mlp_bias:
                shapes[f"mlp.{part}_proj.bias"] = (rows,)
        return shapes

    def resident_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of what stays in memory."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden)}
        shapes[NORM] = (self.hidden,)
        if not self.is_tied:
            shapes[HEAD] = (self.vocab_size, self.hidden)
        return shapes


class Entry(NamedTuple):
    """A tensor as a file must have it."""

    dtypes: tuple[str, ...]  # any of them
    shape: tuple[int, ...]


def entries(name: str, shape: tuple[int, ...], weights: Weights) -> dict[str, Entry]:
    """Return the tensors that one tensor of a release becomes: itself, or codes and scales of a matrix [N, K].

    Raises UserError for a matrix that the format cannot hold.
    """
    if weights is Weights.stored or len(shape) == 1:
        return {name: Entry(FLOATS, shape)}
    rows, columns = shape
    if weights is Weights.int8_rows or name == HEAD:
        return {name: Entry(("I8",), shape), f"{name}_scale": Entry(("F32",), (rows,))}
    if columns % NVFP4_GROUP:
        raise UserError(
            f"{name} has rows of {columns} numbers, NVFP4 needs a multiple of {NVFP4_GROUP}",
            "set model.weights=int8_rows",
        )
    return {
        name: Entry(("U8",), (rows, columns // 2)),
        f"{name}_scale": Entry(("F8_E4M3",), (rows, columns // NVFP4_GROUP)),
        f"{name}_global": Entry(("F32",), (1,)),
    }


def layer_entries(spec: DenseSpec, weights: Weights) -> dict[str, Entry]:
    """Return name within a layer -> what its file must have, in the order of use."""
    return {
        part: entry
        for name, shape in spec.layer_shapes().items()
        for part, entry in entries(name, shape, weights).items()
    }


def head_entries(spec: DenseSpec, weights: Weights) -> dict[str, Entry]:
    """Return what a quantised copy holds beside its layers: the head. A tied head has a copy of its own there."""
    return entries(HEAD, (spec.vocab_size, spec.hidden), weights)


def format_of(checkpoint: Checkpoint) -> Weights:
    """Return how a file keeps its matrices, by the first of them."""
    info = checkpoint.info("model.layers.0.self_attn.q_proj.weight")
    return {"I8": Weights.int8_rows, "U8": Weights.nvfp4}.get(info.dtype, Weights.stored)


def _unsupported(key: str, found: Any, wanted: Any) -> UserError:
    return UserError(
        f"config.json has {key}={found!r}, this engine's dense family supports {wanted!r}",
        "use a checkpoint with grouped-query attention over all positions and plain rotary embeddings",
    )


class LayerLayout(TensorLayout):
    """A layer's tensors where the release put them. For the streamer it is one layer of `depth` experts."""

    def __init__(self, checkpoint: Checkpoint, spec: DenseSpec) -> None:
        """Find all tensors, checked for dtype and shape. Raises CheckpointError for one missing or not expected."""
        self.weights = format_of(checkpoint)
        wanted = layer_entries(spec, self.weights)
        layers = [
            {n: checkpoint.info(f"model.layers.{i}.{n}", *entry) for n, entry in wanted.items()}
            for i in range(spec.depth)
        ]
        in_layers = {info.name for layer in layers for info in layer.values()}
        _account(checkpoint, spec, self.weights, in_layers)
        super().__init__(layers, num_layers=1)

    def layer_parts(self, layer: int) -> tuple[Part, ...]:
        """Return where each tensor lies in the layer's record, in the order of use."""
        return self.parts(ExpertKey(0, layer))


def _account(
    checkpoint: Checkpoint, spec: DenseSpec, weights: Weights, in_layers: set[str]
) -> None:
    known = in_layers | spec.resident_shapes().keys() | head_entries(spec, weights).keys()
    odd = [n for n in checkpoint.tensors if n not in known and not _LEFT_OUT.fullmatch(n)]
    if odd:
        raise CheckpointError(
            f"the checkpoint has {len(odd)} tensors that the dense family does not know, first {odd[0]}",
            "check model.family: this is another architecture, or one with quantised weights",
        )
