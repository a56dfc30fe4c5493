"""Qwen3-MoE checkpoints in the Hugging Face layout: their configuration, their tensors by name, experts in the shards.

Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder and what else has `model_type` qwen3_moe, with plain (not quantised)
weights. Every tensor is a resident, a part of an expert, or left out for a stated reason; one that is none of these is
refused. Knows no arithmetic of the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from runtime.checkpoint import Checkpoint, CheckpointError
from runtime.errors import UserError
from runtime.experts.tensor_layout import TensorLayout
from runtime.models.release_config import keys_named, require

FLOATS = ("BF16", "F16", "F32")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_LEFT_OUT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # computed here


@dataclasses.dataclass(frozen=True, slots=True)
class Qwen3MoeSpec:
    """The configuration of one checkpoint, checked: what is not supported is refused here."""

    vocab_size: int
    hidden: int
    depth: int  # transformer layers
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the layers without experts
    expert_intermediate: int
    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]  # the layers with experts, ascending
    is_normed: bool  # the chosen experts' weights sum to one
    eps: float
    rope_theta: float
    max_positions: int
    has_attention_bias: bool
    is_tied: bool

    # the engine and the streamer count the layers with experts alone
    @property
    def num_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def kv_token_values(self) -> int:
        """Key and value numbers that one token leaves, over all layers."""
        return 2 * self.depth * self.kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Qwen3MoeSpec:
        """Read a release's config.json. Raises UserError naming the key and value that are not supported."""
        with keys_named():
            return cls._from_config(config)

    @classmethod
    def _from_config(cls, c: Mapping[str, Any]) -> Qwen3MoeSpec:
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        required: dict[str, tuple[Any, Any]] = {
            "model_type": (c.get("model_type"), "qwen3_moe"),
            "quantization_config": (c.get("quantization_config"), None),
            "hidden_act": (c.get("hidden_act", "silu"), "silu"),
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
            "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
            "use_sliding_window": (c.get("use_sliding_window", False), False),
        }
        require(required, _unsupported)
        depth, heads = c["num_hidden_layers"], c["num_attention_heads"]
        experts = c["num_experts"] if "num_experts" in c else c["num_local_experts"]
        step, without = c.get("decoder_sparse_step", 1), c.get("mlp_only_layers") or []
        spec = cls(
            vocab_size=c["vocab_size"],
            hidden=c["hidden_size"],
            depth=depth,
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or c["hidden_size"] // heads,
            intermediate=c["intermediate_size"],
            expert_intermediate=c["moe_intermediate_size"],
            num_experts=experts,
            top_k=c["num_experts_per_tok"],
            moe_layers=tuple(i for i in range(depth) if i not in without and (i + 1) % step == 0),
            is_normed=bool(c.get("norm_topk_prob", False)),
            eps=c["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
            max_positions=c["max_position_embeddings"],
            has_attention_bias=bool(c.get("attention_bias", False)),
            is_tied=bool(c.get("tie_word_embeddings", False)),
        )
        if not spec.moe_layers or not experts:
            raise _unsupported("num_experts", experts, "experts in one layer at least")
        if not 1 <= spec.top_k <= experts:
            raise _unsupported("num_experts_per_tok", spec.top_k, f"1 to {experts}")
        if heads % spec.kv_heads or spec.head_dim % 2:
            raise _unsupported("num_key_value_heads", spec.kv_heads, f"a divisor of {heads}")
        return spec

    def layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return a layer's residents: name within the layer -> shape."""
        d, h = self.hidden, self.head_dim
        q, kv = self.heads * h, self.kv_heads * h
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "self_attn.q_norm.weight": (h,),
            "self_attn.k_norm.weight": (h,),
            "post_attention_layernorm.weight": (d,),
        }
        for part, rows, columns in (("q", q, d), ("k", kv, d), ("v", kv, d), ("o", d, q)):
            shapes[f"self_attn.{part}_proj.weight"] = (rows, columns)
            if self.has_attention_bias:
                shapes[f"self_attn.{part}_proj.bias"] = (rows,)
        if layer in self.moe_layers:
            return shapes | {"mlp.gate.weight": (self.num_experts, d)}
        wide = mlp_shapes(d, self.intermediate)
        return shapes | {f"mlp.{name}.weight": shape for name, shape in wide.items()}

    def resident_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return everything outside the experts: name -> shape. A tied head is the embedding."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden)}
        for layer in range(self.depth):
            parts = self.layer_shapes(layer)
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
        shapes[NORM] = (self.hidden,)
        if not self.is_tied:
            shapes[HEAD] = (self.vocab_size, self.hidden)
        return shapes

    def expert_shapes(self) -> dict[str, tuple[int, int]]:
        """Return an expert's matrices, in the order of use: name -> (rows, columns)."""
        return mlp_shapes(self.hidden, self.expert_intermediate)


def mlp_shapes(hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    """Return the three matrices of a gated MLP: name -> (rows, columns)."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return dict(zip(PROJECTIONS, shapes, strict=True))


def expert_tensor(layer: int, expert: int, projection: str) -> str:
    """Return a tensor's name.  layer: of the transformer."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"


def _unsupported(key: str, found: Any, wanted: Any) -> UserError:
    return UserError(
        f"config.json has {key}={found!r}, this engine's qwen3_moe family supports {wanted!r}",
        "use a Qwen3-MoE release in BF16, F16 or F32 with plain rotary positions, or another model.family",
    )


def expert_layout(checkpoint: Checkpoint, spec: Qwen3MoeSpec) -> TensorLayout:
    """Return where the experts lie in the released shards; a layer is counted among those with experts.

    Raises CheckpointError for a tensor that is missing, of another dtype or shape, or without a place here.
    """
    fused = f"model.layers.{spec.moe_layers[0]}.mlp.experts.gate_up_proj"
    if fused in checkpoint.tensors:
        raise CheckpointError(
            f"this checkpoint has all experts of a layer in one tensor ({fused}), here each has its own",
            "save it with transformers' save_pretrained, which writes the released names, or use the release",
        )
    records = [
        {
            projection: checkpoint.info(expert_tensor(layer, expert, projection), FLOATS, shape)
            for projection, shape in spec.expert_shapes().items()
        }
        for layer in spec.moe_layers
        for expert in range(spec.num_experts)
    ]
    _account(checkpoint, spec, {info.name for record in records for info in record.values()})
    return TensorLayout(records, spec.num_layers)


def _account(checkpoint: Checkpoint, spec: Qwen3MoeSpec, in_experts: set[str]) -> None:
    known = in_experts | spec.resident_shapes().keys() | ({HEAD} if spec.is_tied else set())
    odd = [n for n in checkpoint.tensors if n not in known and not _LEFT_OUT.fullmatch(n)]
    if odd:
        raise CheckpointError(
            f"the checkpoint has {len(odd)} tensors that the qwen3_moe family does not know, first {odd[0]}",
            "check model.family: this is another architecture, or one with quantised weights",
        )
