"""DeepSeek-V4.1-Flash, text, in its native arithmetic: every layer, from resident weights and streamed experts.

Owns the arithmetic (plain torch, rounded where the released code rounds). Its classes know no file: experts come from
an ExpertSource, Engram rows from a function, all other weights from a dict by their checkpoint names.

Letters: T tokens of this call, d hidden, S streams, D head size (one vector is key and value), E experts.
The residual X is [T, S, d] bf16; a sublayer reads it with the `pre` that the sublayer before has made.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import RunConfig
from kernels import reference_deepseek as ops
from kernels.formats import MX_GROUP, fp8_blocks_dequantize, mxfp4_dequantize
from runtime.budget import ModelSizes
from runtime.checkpoint import Checkpoint
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.shard_layout import ShardLayout
from runtime.experts.streamer import ExpertSource
from runtime.models.buffers import appended, check_context
from runtime.models.deepseek_codec import open_codec as open_codec  # the family's
from runtime.models.deepseek_engram import EngramHash, build_token_map, read_engram_tables
from runtime.models.deepseek_rows import EngramReader
from runtime.models.deepseek_state import DeepseekState
from runtime.models.deepseek_weights import DeepseekSpec, resident_shapes
from runtime.models.deepseek_weights import expert_layout as find_experts

if TYPE_CHECKING:
    from runtime.engine import EngineFiles
    from runtime.models.deepseek_drafts import DraftedModel

Matrices = tuple[Tensor, Tensor, Tensor]
# record of an expert -> its matrices gate, up, down, dequantised
OpenExpert = Callable[[ExpertKey, Tensor], Matrices]
# (Engram layer, its row ids, token-major) -> rows, bf16 [T, rows per token * row width]
EngramRows = Callable[[int, Sequence[int]], Tensor]
# (tokens, up to three before) -> row ids for each Engram layer
RowIds = Callable[[Sequence[int], Sequence[int]], Sequence[Sequence[int]]]


def fp8_matrix(weights: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a weight kept as FP8 blocks, dequantised: [N, K] fp32."""
    return fp8_blocks_dequantize(weights[f"{name}.weight"], weights[f"{name}.scale"])


class HyperConnection:
    """How one sublayer reads and writes the streams."""

    def __init__(
        self, weights: Mapping[str, Tensor], layer: int, part: str, spec: DeepseekSpec
    ) -> None:
        """part: `attn` or `ffn`."""
        self.spec = spec
        self.fn, self.base, self.scale = (
            weights[f"layers.{layer}.hc_{part}_{what}"] for what in ("fn", "base", "scale")
        )

    def mixes(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams: [T, S, d].  Returns (pre [T, S] for the sublayer after this one, post [T, S], comb [T, S, S])."""
        spec = self.spec
        return ops.hyper_mixes(
            streams, self.fn, self.scale, self.base, spec.sinkhorn_iters, spec.eps, spec.hc_eps
        )


class Engram:
    """The hashed n-gram memory that a layer adds to the streams."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: DeepseekSpec) -> None:
        name = f"layers.{layer}.engram"
        self.spec = spec
        self.wkv = fp8_matrix(weights, f"{name}.wkv")
        self.gate = weights[f"{name}.q_weight"].float() * weights[f"{name}.k_weight"].float()

    def __call__(self, streams: Tensor, rows: Tensor) -> Tensor:
        """streams: [T, S, d].  rows: [T, rows * width] bf16.  Returns the streams after the addition."""
        spec = self.spec
        kv = ops.quantized_linear(rows, self.wkv).float()
        keys = kv[:, : spec.streams * spec.hidden].view(-1, spec.streams, spec.hidden)
        value = kv[:, spec.streams * spec.hidden :]
        x = streams.float()
        gate = (x * self.gate * keys).sum(-1)
        for part in (x, keys):
            gate = gate * torch.rsqrt(part.square().mean(-1) + spec.eps)
        gate = gate * spec.hidden**-0.5
        amount = torch.sigmoid(gate.sign() * gate.abs().clamp(min=1e-6).sqrt())
        return (x + amount.unsqueeze(-1) * value.unsqueeze(1)).to(torch.bfloat16)


class Compressor:
    """Makes the compressed entries of a layer that is a source of them."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: DeepseekSpec) -> None:
        name = f"layers.{layer}.attn"
        self.spec, self.layer, self.ratio = spec, layer, spec.compress_ratios[layer]
        self.wkv = weights[f"{name}.compressor.wkv.weight"]
        self.wgate = weights.get(f"{name}.compressor.wgate.weight")
        self.norm = weights[f"{name}.compressor.norm.weight"]
        self.wk = weights[f"{name}.indexer.wk.weight"]
        self.k_norm = weights[f"{name}.indexer.k_norm.weight"]

    def extend(self, u: Tensor, start: int, state: DeepseekState, cos: Tensor, sin: Tensor) -> None:
        """Append the entries that tokens u [T, d] from position `start` complete, and their index keys.

        cos, sin: tables of all positions up to the last of u.
        """
        latent = self._latents(u, state)
        if not len(latent):
            return
        cache, eps = state.compressed[self.layer], self.spec.eps
        first = start // self.ratio
        places = torch.arange(first, first + len(latent)) * self.ratio
        c, s = cos[places], sin[places]
        keys = ops.rms_norm(F.linear(latent, self.wk), self.k_norm, eps)
        cache.keys = appended(cache.keys, first, ops.fp4_rounded(ops.rotate(keys, c, s)))
        entries = ops.fp4_rounded(ops.rotate(latent, c, s), is_kv=True)
        cache.entries = appended(cache.entries, first, entries)
        cache.length = first + len(latent)

    def _latents(self, u: Tensor, state: DeepseekState) -> Tensor:
        """Return the normed latents of the groups that u completes: [groups, D] bf16."""
        eps = self.spec.eps
        if self.wgate is None:
            return ops.rms_norm(F.linear(u, self.wkv), self.norm, eps)
        x = u.float()
        a, z = ops.steady_linear(x, self.wkv), ops.steady_linear(x, self.wgate)
        tail = state.tails[self.layer]  # [0 or 1, 2, D], a token whose partner has not come
        a, z = torch.cat([tail[:, 0], a]), torch.cat([tail[:, 1], z])
        whole = len(a) // 2 * 2
        state.tails[self.layer] = torch.stack([a[whole:], z[whole:]], dim=1).clone()
        pairs, scores = a[:whole].unflatten(0, (-1, 2)), z[:whole].unflatten(0, (-1, 2))
        mixed = (scores.softmax(1) * pairs).sum(1)
        return ops.rms_norm(mixed.to(torch.bfloat16), self.norm, eps)


class Indexer:
    """Chooses which compressed entries the layers that follow it may see."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: DeepseekSpec) -> None:
        name = f"layers.{layer}.attn.indexer"
        self.spec, self.layer = spec, layer
        self.ratio = spec.compress_ratios[layer]
        self.wq_b = fp8_matrix(weights, f"{name}.wq_b")
        self.weights_proj = weights[f"{name}.weights_proj.weight"]

    def choose(
        self, u: Tensor, qr: Tensor, start: int, choice: Choice, state: DeepseekState, cos: Tensor, sin: Tensor
    ) -> None:  # fmt: skip
        """Fill `choice` for tokens u [T, d] from position `start`.  qr: [T, q_rank].  cos, sin: of their positions."""
        spec, source = self.spec, self.spec.kv_source_of(self.layer)
        assert source is not None
        cache, tokens = state.compressed[source], len(u)
        visible = (torch.arange(start, start + tokens) + 1) // self.ratio
        scores = self.scores(u, qr, cache.keys[: cache.length], cos, sin)
        places = torch.arange(cache.length)
        scores = scores.masked_fill(places >= visible.unsqueeze(1), float("-inf"))
        if self.layer == spec.candidate_source:
            choice.candidates = ops.candidate_mask(
                scores, visible, spec.candidate_blocks, spec.candidate_block_size
            )
        elif choice.candidates is not None:
            scores = scores.masked_fill(~choice.candidates, float("-inf"))
        best = ops.best_places(scores, min(spec.index_topk, cache.length))
        best = best.sort(dim=1).values
        choice.slots = best.masked_fill(best >= visible.unsqueeze(1), -1)
        choice.scores = scores

    def scores(self, u: Tensor, qr: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return how much each token wants each entry: [T, entries] bf16."""
        spec = self.spec
        q = ops.quantized_linear(qr, self.wq_b).view(len(u), spec.index_heads, spec.index_dim)
        q = ops.fp4_rounded(ops.rotate(q, cos, sin))
        weights = F.linear(u, self.weights_proj) * (spec.index_dim**-0.5 * spec.index_heads**-0.5)
        return ops.index_scores(q, keys, weights)


class Choice:
    """What indexers have chosen for the tokens in work; later layers read it."""

    def __init__(self) -> None:
        self.slots = torch.empty(0, 0, dtype=torch.int64)  # [T, n], ascending, -1 for none
        self.scores = torch.empty(0, 0)  # the last indexer's
        self.candidates: Tensor | None = None  # [T, entries] bool


class Attention:
    """One attention layer: a window of its own, and compressed entries of its source."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: DeepseekSpec) -> None:
        name = f"layers.{layer}.attn"
        self.spec, self.layer = spec, layer
        self.wq_a, self.wq_b, self.wkv, self.wo_b = (
            fp8_matrix(weights, f"{name}.{part}") for part in ("wq_a", "wq_b", "wkv", "wo_b")
        )
        # expanded from FP8 exactly: a product with a power of two
        self.wo_a = fp8_matrix(weights, f"{name}.wo_a").to(torch.bfloat16)
        self.wo_a = self.wo_a.view(spec.o_groups, spec.o_rank, -1)
        self.q_norm, self.kv_norm = (
            weights[f"{name}.q_norm.weight"],
            weights[f"{name}.kv_norm.weight"],
        )
        self.sink = weights[f"{name}.attn_sink"]
        self.compressor = self.indexer = None
        if layer in spec.kv_sources:
            self.compressor = Compressor(weights, layer, spec)
        if layer in spec.index_sources:
            self.indexer = Indexer(weights, layer, spec)

    def __call__(
        self, u: Tensor, start: int, choice: Choice, state: DeepseekState, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """u: [T, d] from position `start`.  cos, sin: this layer's tables of all positions so far.  Returns [T, d]."""
        spec, tokens = self.spec, len(u)
        c, s = cos[start : start + tokens], sin[start : start + tokens]
        qr = ops.rms_norm(ops.quantized_linear(u, self.wq_a), self.q_norm, spec.eps)
        q = ops.quantized_linear(qr, self.wq_b).view(tokens, spec.heads, spec.head_dim)
        q = ops.rotate(q, c, s)
        kv = ops.rms_norm(ops.quantized_linear(u, self.wkv), self.kv_norm, spec.eps)
        kv = ops.act_rounded(ops.rotate(kv, c, s)).to(torch.bfloat16)
        if self.compressor is not None:
            self.compressor.extend(u, start, state, cos, sin)
        if self.indexer is not None:
            self.indexer.choose(u, qr, start, choice, state, c, s)
        entries, slots = self._visible(kv, start, choice, state)
        o = ops.sparse_attention(q, entries, self.sink, slots, spec.head_dim**-0.5)
        o = ops.rotate(o, c, s, inverse=True).reshape(tokens, spec.o_groups, -1)
        lowrank = torch.einsum("tgk,grk->tgr", o, self.wo_a).flatten(1)
        return ops.quantized_linear(lowrank, self.wo_b)

    def _visible(
        self, kv: Tensor, start: int, choice: Choice, state: DeepseekState
    ) -> tuple[Tensor, Tensor]:
        """Return all entries that these tokens may see [n, D], and each token's list of them [T, m], -1 for none."""
        spec, tokens = self.spec, len(kv)
        old = state.window(self.layer, start)
        entries = torch.cat([old, kv])
        state.remember(self.layer, start, kv)
        ends = torch.arange(tokens) + len(old)  # a token's own place in `entries`
        reach = torch.arange(-min(spec.window, len(entries)) + 1, 1)
        slots = ends.unsqueeze(1) + reach
        slots = slots.masked_fill(slots < 0, -1)
        source = spec.kv_source_of(self.layer)
        if source is None:
            return entries, slots
        cache = state.compressed[source]
        chosen = choice.slots + torch.where(choice.slots < 0, 0, len(entries))
        return torch.cat([entries, cache.entries[: cache.length]]), torch.cat(
            [slots, chosen], dim=1
        )


class Moe:
    """Router, routed experts and shared expert of one layer."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: DeepseekSpec) -> None:
        name = f"layers.{layer}.ffn"
        self.spec, self.layer = spec, layer
        self.router, self.bias = (
            weights[f"{name}.gate.weight"].float(),
            weights[f"{name}.gate.bias"],
        )
        self.shared = tuple(
            fp8_matrix(weights, f"{name}.shared_experts.{w}") for w in ("w1", "w3", "w2")
        )
        self.next_router: Tensor | None = None
        self.next_bias, self.num_guesses = self.bias, 0

    def expect(self, after: Moe, norm: Tensor, next_norm: Tensor, num_guesses: int) -> None:
        """Guess the next layer's experts from this layer's input, rescaled by the ratio of the two norms' weights."""
        ratio = next_norm.float() / norm.float()
        self.next_router, self.next_bias = after.router * ratio, after.bias
        self.num_guesses = num_guesses

    def guess(self, u: Tensor) -> list[int]:
        """u: [1, d].  Returns likely experts of the next layer, best first; none behind the last."""
        if self.next_router is None:
            return []
        scores = F.softplus(F.linear(u.float(), self.next_router)).sqrt() + self.next_bias
        guesses: list[int] = ops.best_places(scores, self.num_guesses)[0].tolist()
        return guesses

    def __call__(self, u: Tensor, experts: ExpertSource, open_expert: OpenExpert) -> Tensor:
        """u: [T, d].  Returns [T, d]."""
        ids, weights = self.route(u)
        out = torch.zeros(u.shape, dtype=torch.float32)
        for expert, y, tokens in self._outputs(u, ids, weights, experts, open_expert):
            del expert
            out[tokens] += y.float()
        gate, up, down = self.shared
        out += ops.swiglu_expert(u, gate, up, down, self.spec.swiglu_limit).float()
        return out.to(torch.bfloat16)

    def route(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, k], best first, and their weights [T, k] fp32."""
        logits = ops.steady_linear(u, self.router)
        return ops.route(logits, self.bias, self.spec.top_k, self.spec.route_scale)

    def _outputs(
        self,
        u: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertSource,
        open_expert: OpenExpert,
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return (expert, outputs [n, d], their tokens [n]) by ascending expert, whatever arrives first."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        is_token = len(u) == 1
        touched = sorted(set(ids.flatten().tolist()))
        for expert, record in (
            experts.fetch(self.layer, ids[0].tolist(), self.guess(u))
            if is_token
            else experts.sweep(self.layer, touched)
        ):
            tokens, place = (ids == expert).nonzero(as_tuple=True)
            matrices = open_expert(ExpertKey(self.layer, expert), record)
            limit, weight = self.spec.swiglu_limit, weights[tokens, place].unsqueeze(1)
            found[expert] = (ops.swiglu_expert(u[tokens], *matrices, limit, weight), tokens)
        return [(expert, *found[expert]) for expert in sorted(found)]


class Block:
    """One layer."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: DeepseekSpec) -> None:
        self.spec, self.layer = spec, layer
        self.hc_attn, self.hc_ffn = (
            HyperConnection(weights, layer, p, spec) for p in ("attn", "ffn")
        )
        self.attn_norm, self.ffn_norm = (
            weights[f"layers.{layer}.{part}_norm.weight"] for part in ("attn", "ffn")
        )
        self.attention, self.moe = Attention(weights, layer, spec), Moe(weights, layer, spec)
        self.engram = Engram(weights, layer, spec) if layer in spec.engram_layers else None


class DeepseekModel:
    """The text model. `prefill` and `decode` advance a state and return logits."""

    def __init__(
        self,
        spec: DeepseekSpec,
        weights: Mapping[str, Tensor],
        experts: ExpertSource,
        open_expert: OpenExpert,
        engram_rows: EngramRows,
        row_ids: RowIds,
        max_positions: int,
        num_guesses: int = 0,
    ) -> None:
        """weights: by checkpoint name, as stored.  max_positions: longest conversation.

        num_guesses: of the next layer's experts, for the source; 0 leaves its router alone.
        """
        self.spec, self.experts, self.open_expert = spec, experts, open_expert
        self.rows: EngramReader | None = None  # set where rows come from the drive
        self.device_wait_ns = 0
        self.engram_rows, self.row_ids, self.max_positions = engram_rows, row_ids, max_positions
        self.embedding = weights["embed.weight"]
        self.head, self.norm = weights["head.weight"].float(), weights["norm.weight"]
        self.blocks = [Block(weights, layer, spec) for layer in range(spec.num_layers)]
        if num_guesses:
            for block, after in itertools.pairwise(self.blocks):
                block.moe.expect(after.moe, block.ffn_norm, after.ffn_norm, num_guesses)
        shape = spec.expert_shape
        resident_nbytes = sum(weight.nbytes for weight in weights.values())
        self.dense_nbytes = (
            resident_nbytes
            + spec.num_layers * spec.top_k * shape.payload_nbytes
            - self.embedding.nbytes
        )
        positions = torch.arange(max_positions).float().unsqueeze(1)
        angles = [
            positions * ops.rotation_rates(spec.rope_dim, base, yarn)
            for base, yarn in (
                (spec.rope_theta, None),
                (spec.compress_rope_theta, dataclasses.astuple(spec.yarn)),
            )
        ]
        # per layer with compressed entries or without: another base
        self.tables = [(angle.cos(), angle.sin()) for angle in angles]

    def new_state(self) -> DeepseekState:
        """Return the state of an empty conversation."""
        return DeepseekState(self.spec)

    def prefill(
        self,
        tokens: Sequence[int],
        state: DeepseekState,
        all_logits: bool = False,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Take in several tokens, layer by layer: fp32 logits [1, vocab] of the last, or [T, vocab] of all.

        after_layer: called after each layer; what it raises leaves the state half-way.
        """
        return self._forward(tokens, state, all_logits, after_layer)

    def decode(self, token: int, state: DeepseekState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab]."""
        return self._forward([token], state, all_logits=False, after_layer=lambda: None)

    @torch.inference_mode()
    def _forward(
        self,
        tokens: Sequence[int],
        state: DeepseekState,
        all_logits: bool,
        after_layer: Callable[[], None],
    ) -> Tensor:
        spec, start = self.spec, state.position
        ids = self.row_ids(tokens, state.context)
        if self.rows is not None:
            self.rows.request(ids)
        ids_of = dict(zip(spec.engram_layers, ids, strict=True))
        streams = self.embedding[torch.tensor(tokens)].unsqueeze(1).repeat(1, spec.streams, 1)
        pre = torch.zeros(len(tokens), spec.streams)
        pre[:, 0] = 1.0
        choice = Choice()
        for block in self.blocks:
            if block.engram is not None:
                rows = self.engram_rows(block.layer, ids_of[block.layer])
                streams = block.engram(streams, rows)
            streams, pre = self.run_block(block, streams, pre, start, choice, state)
            after_layer()
        state.context = [*state.context, *tokens][-3:]
        state.position += len(tokens)
        if not all_logits:
            streams, pre = streams[-1:], pre[-1:]
        x = ops.rms_norm(ops.hyper_read(streams, pre), self.norm, spec.eps)
        return F.linear(x.float(), self.head)

    def run_block(
        self, block: Block, streams: Tensor, pre: Tensor, start: int, choice: Choice, state: DeepseekState
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run one layer: streams [T, S, d] after Engram, pre [T, S] of the sublayer before.  Returns both, after it."""
        eps = self.spec.eps
        is_compressed = self.spec.compress_ratios[block.layer] > 0
        cos, sin = self.tables[int(is_compressed)]
        next_pre, post, comb = block.hc_attn.mixes(streams)
        u = ops.rms_norm(ops.hyper_read(streams, pre), block.attn_norm, eps)
        y = block.attention(u, start, choice, state, cos, sin)
        streams = ops.hyper_write(y, streams, post, comb)
        last_pre, post, comb = block.hc_ffn.mixes(streams)
        u = ops.rms_norm(ops.hyper_read(streams, next_pre), block.ffn_norm, eps)
        y = block.moe(u, self.experts, self.open_expert)
        return ops.hyper_write(y, streams, post, comb), last_pre


def expert_matrices(codes: Sequence[Tensor], scales: Sequence[Tensor]) -> Matrices:
    """Return an expert's gate, up and down, dequantised to fp32.

    codes: w1, w2, w3 as the file has them, [N, K/2] uint8.  scales: the same, [N, K/32].
    """
    gate, down, up = (mxfp4_dequantize(c, s) for c, s in zip(codes, scales, strict=True))
    return gate, up, down


# ---- what Engine.open asks of a family -----------------------------------------------------------------------------


def read_spec(snapshot: Path) -> DeepseekSpec:
    """Read and check a snapshot's config.json."""
    return DeepseekSpec.from_config(json.loads((snapshot / "config.json").read_text()))


def check_support(spec: DeepseekSpec, config: RunConfig, device: torch.device) -> None:
    """Refuse what this engine cannot do for the model."""
    if device.type != "cpu":
        raise UserError("the deepseek family runs on the CPU only so far", "add hw=cpu")
    check_context(config.model.context_tokens, spec.max_positions)
    if config.drafts.enabled:
        from runtime.models.deepseek_drafts import check_drafts

        check_drafts(spec, config.drafts)


def expert_layout(spec: DeepseekSpec, files: EngineFiles) -> ShardLayout:
    """Return where the experts are: in the released shards, as they are."""
    return find_experts(Checkpoint.open(files.snapshot), spec)


def model_sizes(
    spec: DeepseekSpec,
    files: EngineFiles,
    layout: ShardLayout,
    config: RunConfig,
    dtype: torch.dtype,
) -> ModelSizes:
    """Return what the memory plan needs to know: weights are widened to fp32 for a CPU, experts one at a time."""
    del dtype  # the arithmetic has its own
    drafts = 0
    if config.drafts.enabled:
        from runtime.models.deepseek_drafts import drafts_nbytes

        drafts = drafts_nbytes(Checkpoint.open(files.snapshot), spec, config.drafts)
    nbytes = {name: 4 * math.prod(shape) for name, (_, shape) in resident_shapes(spec).items()}
    tokens = config.model.context_tokens
    entries = sum(tokens // spec.compress_ratios[layer] for layer in spec.kv_sources)
    state = 2 * spec.num_layers * spec.window * spec.head_dim
    state += 2 * entries * (spec.head_dim + spec.index_dim)
    return ModelSizes(
        residents_nbytes=sum(nbytes.values()) - nbytes["embed.weight"] + drafts,
        embedding_nbytes=nbytes["embed.weight"] // 2,
        state_nbytes=state,
        record_nbytes=layout.record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
    )


def open_model(
    spec: DeepseekSpec,
    files: EngineFiles,
    layout: ShardLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> DeepseekModel | DraftedModel:
    """Load the residents from the released shards and open the Engram tables."""
    del device, dtype
    checkpoint = Checkpoint.open(files.snapshot)
    weights = {name: checkpoint.load(name) for name in resident_shapes(spec)}
    hashes = EngramHash(spec, build_token_map(files.snapshot / "tokenizer.json"))
    tables = read_engram_tables(checkpoint, spec)
    rows = EngramReader(spec.engram_layers, tables, config.hw.drive, config.cache.table_rows)

    def engram_rows(layer: int, ids: Sequence[int]) -> Tensor:
        return rows.collect(layer, len(ids) // spec.engram_columns)

    guesses = spec.top_k if config.prefetch.experts else 0
    tokens = config.model.context_tokens
    open_expert = partial(open_record, layout)
    parts = (spec, weights, experts, open_expert, engram_rows, hashes.row_ids, tokens, guesses)
    if config.drafts.enabled:
        from runtime.models.deepseek_drafts import TappedModel, with_drafts

        tapped = TappedModel(*parts)
        tapped.rows = rows
        return with_drafts(tapped, checkpoint, config, lambda drafts: partial(open_record, drafts))
    model = DeepseekModel(*parts)
    model.rows = rows
    return model


def open_record(layout: ShardLayout, key: ExpertKey, record: Tensor) -> Matrices:
    """Cut a record of released shards into its tensors and dequantise them."""
    weights_at, scales_at = layout.payload_offsets(key)
    codes, scales = [], []
    for height, width in layout.shape.matrices().values():
        code_nbytes, scale_nbytes = height * width // 2, height * width // MX_GROUP
        codes.append(record[weights_at : weights_at + code_nbytes].view(height, -1))
        scales.append(record[scales_at : scales_at + scale_nbytes].view(height, -1))
        weights_at, scales_at = weights_at + code_nbytes, scales_at + scale_nbytes
    return expert_matrices(codes, scales)
