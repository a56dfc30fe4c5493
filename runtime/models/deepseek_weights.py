"""The DeepSeek-V4.1-Flash checkpoint: its configuration, its tensors by name, and what becomes of each.

Every tensor of a release is a resident, a part of an expert, a part of an Engram table, a part of the drafts, or left
out for a stated reason; one that is none of these stops the stage that meets it. Knows no arithmetic of the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.checkpoint import Checkpoint
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.shard_layout import Fp4Shape, ShardLayout, expert_tensors
from runtime.models.release_config import keys_named, require

# rows and columns of an FP8 matrix that share an E8M0 scale; columns of an Engram row
QUANT_BLOCK = 32

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name in the checkpoint -> (dtype, shape)

# what a text engine does not use: pattern -> why
_LEFT_OUT = (
    (re.compile(r"(vision|aligner)\."), "vision tower"),
    (re.compile(r"image_(start|end|newline)$"), "image delimiters"),
    (re.compile(r"(layers|mtp)\.\d+\.ffn\.gate\.bias_vl$"), "routing bias of image tokens"),
)
_DRAFTS_LEFT_OUT = (re.compile(r"mtp\."), "drafts (DSpark)")


@dataclasses.dataclass(frozen=True, slots=True)
class Yarn:
    """How the angles of compressed layers are stretched."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeepseekSpec:
    """The configuration of one checkpoint, checked: what this engine does not support is refused here."""

    vocab_size: int
    hidden: int
    num_layers: int
    heads: int
    head_dim: int
    rope_dim: int  # the last values of a head
    q_rank: int
    o_rank: int
    o_groups: int
    intermediate: int
    num_experts: int
    top_k: int
    route_scale: float
    swiglu_limit: float
    eps: float
    window: int
    # per backbone layer: tokens of an entry that it reads, 0 for none
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_block_size: int  # entries
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn
    max_positions: int
    streams: int
    sinkhorn_iters: int
    hc_eps: float
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]  # per Engram layer
    engram_max_ngram: int
    engram_vocab_size: int  # no table column has fewer rows
    engram_heads: int  # per n-gram length
    engram_head_dim: int
    engram_pad_id: int
    engram_classes: int
    num_drafts: int
    dspark_block: int
    noise_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    draft_experts: int
    draft_top_k: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DeepseekSpec:
        """Read a release's config.json. Raises UserError naming the key and value that are not supported."""
        if config.get("model_type") != "deepseek_v41":
            raise _unsupported("model_type", config.get("model_type"), "deepseek_v41")
        with keys_named():
            _require_storage(config["quantization_config"])
            if config.get("tie_word_embeddings", False):
                raise _unsupported("tie_word_embeddings", True, False)
            return cls._from_text_config(config["text_config"])

    @classmethod
    def _from_text_config(cls, c: Mapping[str, Any]) -> DeepseekSpec:
        rope = c["rope_scaling"]
        require(
            {
                "hidden_act": (c.get("hidden_act"), "silu"),
                "scoring_func": (c.get("scoring_func"), "sqrtsoftplus"),
                "topk_method": (c.get("topk_method"), "noaux_tc"),
                "norm_topk_prob": (c.get("norm_topk_prob", True), True),
                "gate_temp": (c.get("gate_temp", 1.0), 1.0),
                "attention_bias": (c.get("attention_bias", False), False),
                "tie_word_embeddings": (c.get("tie_word_embeddings", False), False),
                "num_key_value_heads": (c.get("num_key_value_heads"), 1),
                "n_shared_experts": (c.get("n_shared_experts"), 1),
                "rope_scaling.rope_type": (rope.get("rope_type"), "yarn"),
            },
            _unsupported,
        )
        num_layers, num_drafts = c["num_hidden_layers"], c["num_nextn_predict_layers"]
        ratios = tuple(c["compress_ratios"])
        if len(ratios) != num_layers + num_drafts:
            raise _unsupported(
                "compress_ratios (their number)", len(ratios), num_layers + num_drafts
            )
        if any(ratios[num_layers:]):
            raise _unsupported("compress_ratios (of drafts)", ratios[num_layers:], 0)
        spec = cls(
            vocab_size=c["vocab_size"],
            hidden=c["hidden_size"],
            num_layers=num_layers,
            heads=c["num_attention_heads"],
            head_dim=c["head_dim"],
            rope_dim=c["qk_rope_head_dim"],
            q_rank=c["q_lora_rank"],
            o_rank=c["o_lora_rank"],
            o_groups=c["o_groups"],
            intermediate=c["moe_intermediate_size"],
            num_experts=c["n_routed_experts"],
            top_k=c["num_experts_per_tok"],
            route_scale=float(c["routed_scaling_factor"]),
            swiglu_limit=float(c["swiglu_limit"]),
            eps=float(c["rms_norm_eps"]),
            window=c["sliding_window"],
            compress_ratios=ratios[:num_layers],
            kv_sources=tuple(c["kv_source_layer_ids"]),
            index_sources=tuple(c["index_source_layer_ids"]),
            index_heads=c["index_n_heads"],
            index_dim=c["index_head_dim"],
            index_topk=c["index_topk"],
            candidate_source=c["candidate_source_layer_id"],
            candidate_blocks=c["candidate_topk_blocks"],
            candidate_block_size=c["candidate_block_size"],
            rope_theta=float(c["rope_theta"]),
            compress_rope_theta=float(c["compress_rope_theta"]),
            yarn=Yarn(
                factor=float(rope["factor"]),
                beta_fast=float(rope["beta_fast"]),
                beta_slow=float(rope["beta_slow"]),
                original_positions=rope["original_max_position_embeddings"],
            ),
            max_positions=c["max_position_embeddings"],
            streams=c["hc_mult"],
            sinkhorn_iters=c["hc_sinkhorn_iters"],
            hc_eps=float(c["hc_eps"]),
            engram_layers=tuple(c["engram_layer_ids"]),
            engram_rows=tuple(c["engram_num_embeddings"]),
            engram_max_ngram=c["engram_max_ngram_size"],
            engram_vocab_size=c["engram_vocab_size"],
            engram_heads=c["engram_n_heads"],
            engram_head_dim=c["engram_head_dim"],
            engram_pad_id=c["engram_pad_token_id"],
            engram_classes=c["engram_compressed_vocab_size"],
            num_drafts=num_drafts,
            dspark_block=c["dspark_block_size"],
            noise_id=c["dspark_noise_token_id"],
            target_layers=tuple(c["dspark_target_layer_ids"]),
            markov_rank=c["dspark_markov_rank"],
            draft_experts=c["dspark_n_routed_experts"],
            draft_top_k=c["dspark_num_experts_per_tok"],
        )
        spec._check_sizes()
        spec._check_sources()
        spec._check_engram_and_drafts()
        return spec

    def _check_sizes(self) -> None:
        """Refuse sizes that quantisation blocks, groups or halves do not divide."""
        for key, found, unit in (
            ("hidden_size", self.hidden, QUANT_BLOCK),
            ("moe_intermediate_size", self.intermediate, QUANT_BLOCK),
            ("head_dim", self.head_dim, QUANT_BLOCK),
            ("index_head_dim", self.index_dim, QUANT_BLOCK),
            ("engram_head_dim", self.engram_head_dim, QUANT_BLOCK),
            ("num_attention_heads", self.heads, self.o_groups),
            ("qk_rope_head_dim", self.rope_dim, 2),
        ):
            if found < 1 or found % unit:
                raise _unsupported(key, found, f"a multiple of {unit}")
        for key, found, limit in (
            ("qk_rope_head_dim", self.rope_dim, min(self.head_dim, self.index_dim)),
            ("num_experts_per_tok", self.top_k, self.num_experts),
        ):
            if not 1 <= found <= limit:
                raise _unsupported(key, found, f"1 to {limit}")

    def _check_sources(self) -> None:
        """Refuse roles of layers that do not fit each other."""
        for ratio in self.compress_ratios:
            if ratio not in (0, 1, 2):
                raise _unsupported("compress_ratios", ratio, "0, 1 or 2")
        for key, sources in (
            ("kv_source_layer_ids", self.kv_sources),
            ("index_source_layer_ids", self.index_sources),
        ):
            self._check_layers(key, sources)
            for layer in sources:
                if not self.compress_ratios[layer]:
                    raise _unsupported(key, layer, "layers with a compress ratio")
        missing = sorted(set(self.kv_sources) - set(self.index_sources))
        if missing:
            raise _unsupported(
                "index_source_layer_ids", self.index_sources, f"with KV sources {missing}"
            )
        for layer, ratio in enumerate(self.compress_ratios):
            source = self.kv_source_of(layer)
            found = 0 if source is None else self.compress_ratios[source]
            if ratio != found:
                raise _unsupported(
                    "kv_source_layer_ids",
                    self.kv_sources,
                    f"a source of ratio {ratio} for layer {layer}",
                )
        if self.candidate_source not in self.kv_sources:
            raise _unsupported(
                "candidate_source_layer_id", self.candidate_source, f"one of {self.kv_sources}"
            )

    def _check_engram_and_drafts(self) -> None:
        self._check_layers("engram_layer_ids", self.engram_layers)
        if len(self.engram_rows) != len(self.engram_layers):
            raise _unsupported(
                "engram_num_embeddings (their number)",
                len(self.engram_rows),
                len(self.engram_layers),
            )
        if self.engram_max_ngram < 2:
            raise _unsupported("engram_max_ngram_size", self.engram_max_ngram, "2 or more")
        if not 0 <= self.engram_pad_id < self.vocab_size:
            raise _unsupported(
                "engram_pad_token_id", self.engram_pad_id, f"0 to {self.vocab_size - 1}"
            )
        if not self.num_drafts:
            return
        self._check_layers("dspark_target_layer_ids", self.target_layers)
        if not 1 <= self.draft_top_k <= self.draft_experts:
            raise _unsupported(
                "dspark_num_experts_per_tok", self.draft_top_k, f"1 to {self.draft_experts}"
            )
        if self.dspark_block < 1:
            raise _unsupported("dspark_block_size", self.dspark_block, "1 or more")

    def _check_layers(self, key: str, layers: Sequence[int]) -> None:
        if list(layers) != sorted({i for i in layers if 0 <= i < self.num_layers}):
            raise _unsupported(key, layers, f"ascending layers below {self.num_layers}")

    def is_kv_source(self, layer: int) -> bool:
        """Say whether a layer writes compressed entries and index keys."""
        return layer in self.kv_sources

    def is_index_source(self, layer: int) -> bool:
        """Say whether a layer makes a top-k list of its own."""
        return layer in self.index_sources

    def kv_source_of(self, layer: int) -> int | None:
        """Return the layer whose compressed entries a layer reads; None for the window alone."""
        return self._latest(self.kv_sources, layer)

    def index_source_of(self, layer: int) -> int | None:
        """Return the layer whose top-k list a layer reads; None for the window alone."""
        return self._latest(self.index_sources, layer)

    def _latest(self, sources: Sequence[int], layer: int) -> int | None:
        if not self.compress_ratios[layer]:
            return None
        return max((source for source in sources if source <= layer), default=None)

    @property
    def expert_shape(self) -> Fp4Shape:
        """Sizes of a routed expert, of the drafts too."""
        return Fp4Shape(self.hidden, self.intermediate)

    @property
    def engram_columns(self) -> int:
        """Table rows that one token looks up in one Engram layer."""
        return (self.engram_max_ngram - 1) * self.engram_heads

    @property
    def engram_dim(self) -> int:
        """Width of the rows of one token, joined."""
        return self.engram_columns * self.engram_head_dim


def _unsupported(key: str, found: Any, wanted: Any) -> UserError:
    return UserError(
        f"this engine does not support {key}={found!r} of the checkpoint's config.json (only {wanted!r})",
        "use a release of DeepSeek-V4.1-Flash, or another model.family",
    )


def _require_storage(quantization: Mapping[str, Any]) -> None:
    wanted: dict[str, Any] = {
        "quant_method": "fp8",
        "expert_dtype": "fp4",
        "activation_scheme": "dynamic",
        "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK],
        "scale_fmt": "ue8m0",
    }
    found = {f"quantization_config.{k}": (quantization.get(k), v) for k, v in wanted.items()}
    require(found, _unsupported)


def _fp8(name: str, rows: int, cols: int) -> Shapes:
    """Return an FP8 matrix and its scales, one per block; the last blocks may be partial."""
    return {
        f"{name}.weight": ("F8_E4M3", (rows, cols)),
        f"{name}.scale": ("F8_E8M0", (-(-rows // QUANT_BLOCK), -(-cols // QUANT_BLOCK))),
    }


def _block_shapes(spec: DeepseekSpec, num_experts: int) -> Shapes:
    """Return what every layer and every draft has, less its experts and `gate.bias_vl`; names without the layer."""
    d, f, width = spec.hidden, spec.intermediate, spec.heads * spec.head_dim
    mixes = (2 + spec.streams) * spec.streams
    shapes: Shapes = {
        **_fp8("attn.wq_a", spec.q_rank, d),
        "attn.q_norm.weight": ("BF16", (spec.q_rank,)),
        **_fp8("attn.wq_b", width, spec.q_rank),
        **_fp8("attn.wkv", spec.head_dim, d),
        "attn.kv_norm.weight": ("BF16", (spec.head_dim,)),
        **_fp8("attn.wo_a", spec.o_groups * spec.o_rank, width // spec.o_groups),
        **_fp8("attn.wo_b", d, spec.o_groups * spec.o_rank),
        "attn.attn_sink": ("F32", (spec.heads,)),
        "ffn.gate.weight": ("BF16", (num_experts, d)),
        "ffn.gate.bias": ("F32", (num_experts,)),
        **_fp8("ffn.shared_experts.w1", f, d),
        **_fp8("ffn.shared_experts.w2", d, f),
        **_fp8("ffn.shared_experts.w3", f, d),
    }
    for part in ("attn", "ffn"):
        shapes[f"{part}_norm.weight"] = ("BF16", (d,))
        shapes[f"hc_{part}_fn"] = ("F32", (mixes, spec.streams * d))
        shapes[f"hc_{part}_base"] = ("F32", (mixes,))
        shapes[f"hc_{part}_scale"] = ("F32", (3,))
    return shapes


def _source_shapes(spec: DeepseekSpec, layer: int) -> Shapes:
    """Return what KV sources, index sources and Engram layers have besides."""
    shapes: Shapes = {}
    if spec.is_kv_source(layer):
        shapes["attn.compressor.wkv.weight"] = ("BF16", (spec.head_dim, spec.hidden))
        if spec.compress_ratios[layer] == 2:
            shapes["attn.compressor.wgate.weight"] = ("BF16", (spec.head_dim, spec.hidden))
        shapes["attn.compressor.norm.weight"] = ("BF16", (spec.head_dim,))
        shapes["attn.indexer.wk.weight"] = ("BF16", (spec.index_dim, spec.head_dim))
        shapes["attn.indexer.k_norm.weight"] = ("BF16", (spec.index_dim,))
    if spec.is_index_source(layer):
        shapes |= _fp8("attn.indexer.wq_b", spec.index_heads * spec.index_dim, spec.q_rank)
        shapes["attn.indexer.weights_proj.weight"] = ("BF16", (spec.index_heads, spec.hidden))
    if layer in spec.engram_layers:
        shapes |= _fp8("engram.wkv", (spec.streams + 1) * spec.hidden, spec.engram_dim)
        shapes["engram.q_weight"] = ("BF16", (spec.streams, spec.hidden))
        shapes["engram.k_weight"] = ("BF16", (spec.streams, spec.hidden))
    return shapes


def resident_shapes(spec: DeepseekSpec) -> Shapes:
    """Return every tensor of the text model outside experts, Engram tables and drafts: name -> (dtype, shape)."""
    shapes: Shapes = {
        "embed.weight": ("BF16", (spec.vocab_size, spec.hidden)),
        "head.weight": ("BF16", (spec.vocab_size, spec.hidden)),
        "norm.weight": ("BF16", (spec.hidden,)),
    }
    for layer in range(spec.num_layers):
        block = _block_shapes(spec, spec.num_experts) | _source_shapes(spec, layer)
        shapes |= {f"layers.{layer}.{name}": entry for name, entry in block.items()}
    return shapes


def draft_shapes(spec: DeepseekSpec) -> Shapes:
    """Return every tensor of the drafts outside their experts: name -> (dtype, shape)."""
    shapes: Shapes = {}
    d = spec.hidden
    for draft in range(spec.num_drafts):
        block = _block_shapes(spec, spec.draft_experts)
        if draft == 0:
            block |= _fp8("main_proj", d, len(spec.target_layers) * d)
            block["main_norm.weight"] = ("BF16", (d,))
        if draft == spec.num_drafts - 1:
            block["norm.weight"] = ("BF16", (d,))
            for part in ("embed", "head"):
                block[f"markov_head.{part}.weight"] = ("BF16", (spec.vocab_size, spec.markov_rank))
            block["confidence_head.proj.weight"] = ("BF16", (1, d + spec.markov_rank))
        shapes |= {f"mtp.{draft}.{name}": entry for name, entry in block.items()}
    return shapes


def engram_table_shapes(spec: DeepseekSpec) -> Shapes:
    """Return the Engram tables: name -> (dtype, shape), values and scales of one layer after the other."""
    shapes: Shapes = {}
    for layer, rows in zip(spec.engram_layers, spec.engram_rows, strict=True):
        name, width = f"layers.{layer}.engram.embed", spec.engram_head_dim
        shapes[f"{name}.weight"] = ("F8_E4M3", (rows, width))
        shapes[f"{name}.scale"] = ("F8_E8M0", (rows, width // QUANT_BLOCK))
    return shapes


def expert_prefix(key: ExpertKey) -> str:
    """Return the prefix of a backbone expert's tensor names."""
    return f"layers.{key.layer}.ffn.experts.{key.expert}."


def draft_expert_prefix(key: ExpertKey) -> str:
    """Return the prefix of a draft expert's tensor names; `key.layer` counts the drafts from 0."""
    return f"mtp.{key.layer}.ffn.experts.{key.expert}."


def expert_layout(checkpoint: Checkpoint, spec: DeepseekSpec) -> ShardLayout:
    """Return where the backbone's experts lie in the released files. Raises CheckpointError."""
    return ShardLayout(
        checkpoint, spec.expert_shape, spec.num_layers, spec.num_experts, expert_prefix
    )


def draft_expert_layout(checkpoint: Checkpoint, spec: DeepseekSpec) -> ShardLayout:
    """Return where the drafts' experts lie; layers count the drafts from 0. Raises CheckpointError."""
    return ShardLayout(
        checkpoint, spec.expert_shape, spec.num_drafts, spec.draft_experts, draft_expert_prefix
    )


def account(checkpoint: Checkpoint, spec: DeepseekSpec, has_drafts: bool = False) -> dict[str, int]:
    """Return how many tensors go where; raise CheckpointError when one has no place.

    Checks the presence, dtype and shape of every tensor that the engine uses, from the headers alone.
    has_drafts: the drafts are used, else left out.
    """
    used = {"residents": resident_shapes(spec), "Engram tables": engram_table_shapes(spec)}
    experts = [
        ("experts", expert_prefix(ExpertKey(layer, expert)))
        for layer in range(spec.num_layers)
        for expert in range(spec.num_experts)
    ]
    if has_drafts:
        used["drafts"] = draft_shapes(spec)
        experts += [
            ("draft experts", draft_expert_prefix(ExpertKey(draft, expert)))
            for draft in range(spec.num_drafts)
            for expert in range(spec.draft_experts)
        ]
    places = {}
    for place, shapes in used.items():
        for name, (dtype, shape) in shapes.items():
            places[checkpoint.info(name, dtype, shape).name] = place
    for place, prefix in experts:
        weights, scales = expert_tensors(checkpoint, spec.expert_shape, prefix)
        places |= {info.name: place for info in (*weights, *scales)}
    left_out = _LEFT_OUT if has_drafts else (_DRAFTS_LEFT_OUT, *_LEFT_OUT)
    return checkpoint.account(places, left_out)
