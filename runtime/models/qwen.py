"""Qwen3.8-Flash-Next (`qwen4_exp`), text: every layer, from resident weights and streamed experts.

Owns the arithmetic. Its classes know no file: experts come from an ExpertSource,
n-gram rows from a RowReader, all other weights from a dict by their checkpoint names less `model.language_model.`.
The functions at the end put a model together from what the stages made.

Letters: T tokens of this call, H hidden, S streams (hyper-connections), D = S * H, E experts.
The residual R is [T, S, H]; each block reads it through a hyper-connection and adds its output to every stream.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import Deltanet, RunConfig
from kernels import reference as ops
from kernels.fp8_matvec import linear, linear_pair
from runtime.budget import ModelSizes
from runtime.checkpoint import bytes_to_tensor, read_extent, read_header, torch_dtype
from runtime.errors import UserError
from runtime.experts.layout import Nvfp4Shape, PackedLayout
from runtime.experts.reader import DirectReader
from runtime.experts.routes import Guesses
from runtime.experts.slots import BatchedSource
from runtime.experts.streamer import ExpertSource
from runtime.models.buffers import appended, check_context
from runtime.models.lanes import Lanes, open_lanes
from runtime.models.qwen_codec import QwenCodec
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_state import AttentionState, QwenState
from runtime.models.qwen_weights import (
    RESIDENTS_NAME,
    TABLES_NAME,
    QwenSpec,
    read_pack_scalars,
    table_from_json,
)
from runtime.rows import RowReader

if TYPE_CHECKING:
    from runtime.engine import EngineFiles


CHUNK_TOKENS = 512  # of a prompt, through everything but the experts at once
ATTENTION_NBYTES = 2**26  # of scores that a chunk's attention may hold at once


# of matrix products and captured graphs, and what the allocator cannot hand out again: 60 and 57 MiB were measured on
# an H200, the second when a prompt of 8,000 tokens met a card filled to the plan's last MiB
WORKSPACE_NBYTES = (64 + 96) * 2**20
MAX_PAIRS = 4096  # (token, expert) pairs of a prompt that are computed in one launch


def _cut_pairs(counts: Sequence[int], limit: int) -> Iterator[list[tuple[int, int]]]:
    """Cut experts with these numbers of pairs into launches of at most `limit` pairs: [(which expert, how many)]."""
    launch: list[tuple[int, int]] = []
    room = limit
    for number, count in enumerate(counts):
        left = count
        while left:
            taken = min(left, room)
            launch.append((number, taken))
            left, room = left - taken, room - taken
            if not room:
                yield launch
                launch, room = [], limit
    if launch:
        yield launch


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return one matrix of the rows of `parts`; no copy where they lie one behind the other."""
    first, end = parts[0], 0
    memory = first.untyped_storage().data_ptr()
    for part in parts:
        is_next = part.untyped_storage().data_ptr() == memory
        if not is_next or part.data_ptr() != first.data_ptr() + end or part.dtype != first.dtype:
            raw = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
            return raw.view(first.dtype).view(-1, *first.shape[1:])
        end += part.nbytes
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


class Mixer:
    """A hyper-connection read: one block input from all streams."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, spec: QwenSpec) -> None:
        self.streams, self.eps = spec.streams, spec.eps
        self.gain = 1.0 + weights[f"{name}.hc_norm.weight"].float().view(spec.streams, spec.hidden)
        self.down = weights[f"{name}.input_mix_weight_down.weight"]
        self.up = weights[f"{name}.input_mix_weight_up.weight"]

    def mix(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual: [T, S, H].  Returns (block input [T, H], the normed streams [T, S * H])."""
        normed = ops.rms_norm(residual, self.gain, self.eps)
        flat = normed.flatten(1)
        lowrank = F.silu(F.linear(flat, self.down) / self.streams)
        gate = torch.sigmoid(F.linear(lowrank, self.up)).view_as(normed)
        return (gate * normed).mean(1), flat


class BlockMixer(Mixer):
    """A read in front of a block: also how much of the block's output each stream takes."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, spec: QwenSpec) -> None:
        super().__init__(weights, name, spec)
        # one matrix, so that a decode step reads both in one product; the parts are views of it
        self.down_inject = joined([self.down, weights[f"{name}.block_inject_weight.weight"]])
        self.down, self.inject = self.down_inject.split([spec.lowrank, spec.streams])

    def read(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual: [T, S, H].  Returns (block input [T, H], scalars [T, S, 1])."""
        mixed, flat = self.mix(residual)
        return mixed, 2 * torch.sigmoid(F.linear(flat, self.inject) / self.streams).unsqueeze(-1)


class Ple:
    """The hashed n-gram embedding that one layer adds to the streams."""

    def __init__(self, weights: Mapping[str, Tensor], spec: QwenSpec, table_scale: float) -> None:
        name = f"layers.{spec.ple_layer}.ple"
        self.spec, self.table_scale = spec, table_scale
        self.multipliers = weights[f"{name}.ple_embedding.layer_multipliers"].cpu()
        self.sizes = weights[f"{name}.ple_embedding.ngram_heads_vocab_sizes"].cpu()
        self.offsets = weights[f"{name}.ple_embedding.ngram_heads_offsets"].cpu()
        self.key, self.value = (
            weights[f"{name}.key_proj.weight"],
            weights[f"{name}.value_proj.weight"],
        )
        shape = (spec.streams, spec.hidden)
        self.gain_key = 1.0 + weights[f"{name}.norm_key.weight"].float().view(shape)
        self.gain_query = 1.0 + weights[f"{name}.norm_query.weight"].float().view(shape)
        self.gain_conv = 1.0 + weights[f"{name}.norm_conv.weight"].float().view(shape)
        self.taps = weights[f"{name}.conv1d.weight"].squeeze(1).t().contiguous()  # [kernel, D]

    def row_ids(self, tokens: Sequence[int], context: Sequence[int]) -> list[int]:
        """Return the table rows of each token, token-major: bigram heads, then trigram heads.

        context: the two tokens before the first. A window that meets the boundary token is cut there; the
        token itself is not looked at.
        """
        eos, heads = self.spec.eos, self.spec.heads_per_ngram
        history = torch.tensor([*context, *tokens])
        current, previous, second = history[2:], history[1:-1], history[:-2]
        second = torch.where(previous == eos, eos, second)
        m = self.multipliers
        two = (current * m[0]) ^ (previous * m[1])
        three = two ^ (second * m[2])
        hashed = torch.cat(
            [two.unsqueeze(1).expand(-1, heads), three.unsqueeze(1).expand(-1, heads)], dim=1
        )
        rows: list[int] = (self.offsets + hashed % self.sizes).flatten().tolist()
        return rows

    def embed(self, raw: Tensor, like: Tensor) -> Tensor:
        """raw: [T * heads, row_nbytes] uint8 (E4M3).  Returns [T, ple_dim] in the dtype and on the device of `like`."""
        values = raw.to(like.device).view(torch.float8_e4m3fn).float() * self.table_scale
        return values.to(torch.bfloat16).to(like.dtype).view(-1, self.spec.ple_dim)

    def __call__(self, residual: Tensor, embedding: Tensor, state: QwenState) -> Tensor:
        """residual: [T, S, H].  embedding: [T, ple_dim].  Returns what is added: [T, S, H]."""
        eps = self.spec.eps
        value = F.linear(embedding, self.value)
        key = ops.rms_norm(F.linear(embedding, self.key).view_as(residual), self.gain_key, eps)
        query = ops.rms_norm(residual, self.gain_query, eps)
        score = (key.float() * query.float()).sum(-1, keepdim=True) * self.spec.hidden**-0.5
        score = score.sign() * score.abs().clamp(min=1e-6).sqrt()
        update = (torch.sigmoid(score) * value.unsqueeze(1).float()).to(residual.dtype)  # [T, S, H]
        normed = ops.rms_norm(update, self.gain_conv, eps).flatten(1)
        convolved, history = ops.causal_conv(
            normed, state.ple_conv, self.taps, dilation=self.spec.ngram_size
        )
        state.ple_conv = history.clone()
        return update + F.silu(convolved).view_as(update)


class DeltaNet:
    """One Gated DeltaNet layer."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: QwenSpec) -> None:
        name = f"layers.{layer}.linear_attn"
        self.spec, self.layer = spec, layer

        def matrix(part: str) -> tuple[Tensor, Tensor | None]:
            return weights[f"{name}.{part}.weight"], weights.get(f"{name}.{part}.weight_scale")

        (qkv, qkv_scale), (z, z_scale) = matrix("in_proj_qkv"), matrix("in_proj_z")
        scale = None
        if qkv_scale is not None and z_scale is not None:
            scale = joined([qkv_scale, z_scale])
        self.in_proj, self.out = (joined([qkv, z]), scale), matrix("out_proj")
        self.beta_decay = joined(
            [weights[f"{name}.in_proj_b.weight"], weights[f"{name}.in_proj_a.weight"]]
        )
        self.taps = (
            weights[f"{name}.conv1d.weight"].squeeze(1).t().contiguous()
        )  # [kernel, conv_width]
        self.rate = -weights[f"{name}.A_log"].float().exp()
        self.dt_bias = weights[f"{name}.dt_bias"].float()
        self.norm = weights[f"{name}.norm.weight"].float()

    def __call__(self, x: Tensor, state: QwenState) -> Tensor:
        """x: [T, H].  Returns [T, H]."""
        spec, tokens = self.spec, x.shape[0]
        projected, beta_decay = linear_pair(x, *self.in_proj, self.beta_decay)
        qkv, z = projected.split([spec.conv_width, spec.value_width], dim=1)
        mixed, history = ops.causal_conv(qkv, state.conv[self.layer], self.taps)
        state.conv[self.layer] = history.clone()  # a view would keep the whole chunk
        q, k, v = (
            F.silu(mixed).float().split([spec.key_width, spec.key_width, spec.value_width], dim=-1)
        )
        repeat = spec.value_heads // spec.key_heads  # value head h uses key head h // repeat

        def heads(part: Tensor, dim: int) -> Tensor:  # [T, heads * dim] -> [heads, T, dim]
            return part.view(tokens, -1, dim).transpose(0, 1)

        q = (
            ops.l2_norm(heads(q, spec.key_dim)).repeat_interleave(repeat, dim=0)
            * spec.key_dim**-0.5
        )
        k = ops.l2_norm(heads(k, spec.key_dim)).repeat_interleave(repeat, dim=0)
        v = heads(v, spec.value_dim)
        b, a = beta_decay.t().split(spec.value_heads)  # [value_heads, T] each
        beta = torch.sigmoid(b).float()
        log_decay = self.rate.unsqueeze(1) * F.softplus(a.float() + self.dt_bias.unsqueeze(1))
        memory = state.delta[self.layer]
        if tokens == 1:
            out = ops.gated_delta_step(
                q[:, 0], k[:, 0], v[:, 0], beta[:, 0], log_decay[:, 0], memory
            ).unsqueeze(1)
        else:
            out = ops.gated_delta_chunks(q, k, v, beta, log_decay, memory)
        out = ops.rms_norm(out.transpose(0, 1).to(x.dtype), self.norm, spec.eps)
        gate = torch.sigmoid(z.float()).view_as(out)
        return linear((out.float() * gate).to(x.dtype).flatten(1), *self.out)


class Attention:
    """One full-attention layer with its block indexer."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, spec: QwenSpec) -> None:
        name = f"layers.{layer}.self_attn"
        self.spec, self.layer = spec, layer
        parts = ("q_proj", "k_proj", "v_proj", "indexer.index_qk_proj")
        self.in_proj = joined([weights[f"{name}.{part}.weight"] for part in parts])
        self.out = weights[f"{name}.o_proj.weight"]
        kv_width = spec.kv_heads * spec.head_dim
        self._sizes = [
            2 * spec.heads * spec.head_dim,
            kv_width,
            kv_width,
            spec.index_heads * spec.index_dim,
            spec.index_dim,
        ]

        def gain(part: str) -> Tensor:
            return 1.0 + weights[f"{name}.{part}.weight"].float()

        self.gain_q, self.gain_k = gain("q_norm"), gain("k_norm")
        self.gain_index_q, self.gain_index_k = (
            gain("indexer.q_layernorm"),
            gain("indexer.k_layernorm"),
        )

    def __call__(self, x: Tensor, state: QwenState, start: int, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [T, H], from position `start`.  cos, sin: [T, rotary_dim / 2] of these positions.  Returns [T, H]."""
        tokens, cache = x.shape[0], state.attention[self.layer]
        q, k, v, gate, index_q, raw = self.project(x, cos, sin)
        cache.keys = appended(cache.keys, start, k)
        cache.values = appended(cache.values, start, v)
        self._update_index(raw, cache, start)
        out = torch.empty_like(q)
        # scores of all queries at once would be the largest thing in memory
        rows = max(1, ATTENTION_NBYTES // (10 * self.spec.heads * (start + tokens)))
        for first in range(0, tokens, rows):
            part = slice(first, min(first + rows, tokens))
            out[part] = self._attend(q[part], index_q[part], cache, start + first)
        return F.linear((out * torch.sigmoid(gate)).flatten(1), self.out)

    def _attend(self, q: Tensor, index_q: Tensor, cache: AttentionState, start: int) -> Tensor:
        """q: [T, heads, head_dim] and index_q of positions from `start`, whose keys are in the cache already."""
        tokens = q.shape[0]
        end = start + tokens
        keys, values = cache.keys[:end], cache.values[:end]
        visible = self._visible(index_q, cache, start, tokens)
        if visible is not None and tokens == 1:  # few of many: gather instead of masking
            chosen = visible[0].nonzero().squeeze(1)
            keys, values, visible = keys[chosen], values[chosen], None
        return ops.attention(q, keys, values, visible)

    def project(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values and output gates: [T, heads or kv_heads, head_dim] each; then the indexer's
        queries [T, index_heads, index_dim] and raw keys [T, index_dim]. All but values, gates and raw keys are normed
        and rotated.
        """
        spec, tokens = self.spec, x.shape[0]
        both, k, v, index_q, raw = F.linear(x, self.in_proj).split(self._sizes, dim=-1)
        q, gate = both.reshape(tokens, spec.heads, 2 * spec.head_dim).chunk(2, dim=-1)
        k = k.reshape(tokens, spec.kv_heads, spec.head_dim)
        v = v.reshape(tokens, spec.kv_heads, spec.head_dim)
        index_q = index_q.reshape(tokens, spec.index_heads, spec.index_dim)
        q = ops.apply_rope(ops.rms_norm(q, self.gain_q, spec.eps), cos, sin)
        k = ops.apply_rope(ops.rms_norm(k, self.gain_k, spec.eps), cos, sin)
        index_q = ops.apply_rope(ops.rms_norm(index_q, self.gain_index_q, spec.eps), cos, sin)
        return q, k, v, gate, index_q, raw

    def pool(self, raw: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """raw: [B, block_tokens, dim] keys of whole blocks.  cos, sin: of their first positions.  Returns [B, dim]."""
        pooled = ops.rms_norm(raw.float().mean(1).to(raw.dtype), self.gain_index_k, self.spec.eps)
        return ops.apply_rope(pooled.unsqueeze(1), cos, sin).squeeze(1)

    def score(self, index_q: Tensor, pooled: Tensor) -> Tensor:
        """index_q: [T, heads, dim].  pooled: [B, dim].  Returns [T, B] fp32."""
        scores = torch.einsum("thd,bd->thb", index_q.float(), pooled.float())
        scaled: Tensor = scores.relu().sum(1) * self.spec.index_dim**-0.5
        return scaled

    def _update_index(self, raw: Tensor, cache: AttentionState, start: int) -> None:
        """Store the keys of blocks that raw keys [T, dim] from position `start` complete."""
        spec, size = self.spec, self.spec.block_tokens
        raw = torch.cat([cache.open_block, raw])
        complete = raw.shape[0] // size
        cache.open_block = raw[complete * size :].clone()
        if complete:
            first = start // size
            starts = torch.arange(first, first + complete, device=raw.device) * size
            tables = ops.rope_tables(starts, spec.rotary_dim, spec.rope_theta)
            pooled = self.pool(raw[: complete * size].view(complete, size, -1), *tables)
            cache.pooled = appended(cache.pooled, first, pooled)

    def _visible(
        self, index_q: Tensor, cache: AttentionState, start: int, tokens: int
    ) -> Tensor | None:
        """Return which positions each query attends to: [T, start + T] bool, or None for all."""
        spec, size, end = self.spec, self.spec.block_tokens, start + tokens
        device = index_q.device
        positions = torch.arange(start, end, device=device)
        blocks = end // size
        if (
            blocks <= spec.index_blocks
        ):  # within the budget every block is chosen: plain causal attention
            if tokens == 1:
                return None
            return positions.unsqueeze(1) >= torch.arange(end, device=device)
        scores = self.score(index_q, cache.pooled[:blocks])
        num_complete = (
            positions + 1
        ) // size  # of each query: only blocks that end at or before it
        complete = torch.arange(blocks, device=device) < num_complete.unsqueeze(1)
        chosen = ops.top_blocks(scores, complete, spec.index_blocks).repeat_interleave(size, dim=1)
        chosen = F.pad(chosen, (0, end - blocks * size))
        keys = torch.arange(end, device=device)
        is_open = (keys >= num_complete.unsqueeze(1) * size) & (keys <= positions.unsqueeze(1))
        return chosen | is_open


class Moe:
    """Router, routed experts and shared expert of one layer."""

    def __init__(
        self, weights: Mapping[str, Tensor], layer: int, spec: QwenSpec, scales: Tensor
    ) -> None:
        """scales: [E, 3] fp32, the global scales (gate, up, down) of this layer's experts."""
        name = f"layers.{layer}.mlp"
        self.spec, self.layer, self.scales = spec, layer, scales
        self.router = weights[f"{name}.gate.weight"]
        self.shared = tuple(
            weights[f"{name}.shared_expert.{p}_proj.weight"] for p in ("gate", "up", "down")
        )
        self.shared_gate = weights[f"{name}.shared_expert_gate.weight"]
        self.next_router: Tensor | None = None
        self.next_ratio: Tensor | None = None

    def expect(self, after: Moe, mixer: Mixer, next_mixer: Mixer) -> None:
        """Guess the next layer's experts from this layer's input.

        The two inputs are read from nearly the same residual by norms of different gains, so the input is
        rescaled by the ratio of the gains (mean over the streams) before the next router sees it.
        """
        self.next_router = after.router
        self.next_ratio = (next_mixer.gain.mean(0) / mixer.gain.mean(0)).to(self.router.dtype)

    def __call__(self, x: Tensor, experts: ExpertSource, num_guesses: int) -> Tensor:
        """x: [T, H].  Returns [T, H]."""
        ids, weights = self.route(x)
        if x.shape[0] == 1:
            ranked = self._rank(x, num_guesses) if num_guesses else None
            ahead = [] if ranked is None else Guesses(ranked[1].tolist(), ranked[0])
            routed = self._decode(x, ids[0], weights[0], experts, ahead)
        else:
            routed = self._prefill(x, ids, weights, experts)
        return routed.add_(self.share(x)).to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, k] int64, best first, and their weights [T, k] fp32, which sum to one."""
        probabilities = F.linear(x, self.router).float().softmax(-1)
        top = probabilities.topk(self.spec.top_k, dim=-1)
        return top.indices, (top.values / top.values.sum(-1, keepdim=True)).to(x.dtype).float()

    def share(self, x: Tensor) -> Tensor:
        """Return the gated shared expert's output: [T, H]."""
        return torch.sigmoid(F.linear(x, self.shared_gate)) * ops.swiglu(x, *self.shared)

    def guess(self, x: Tensor, count: int) -> Tensor | None:
        """x: [1, H].  Returns likely experts of the next layer [count] int64, best first; None behind the last."""
        ranked = self._rank(x, count)
        return None if ranked is None else ranked[1]

    def _rank(self, x: Tensor, count: int) -> tuple[Tensor, Tensor] | None:
        """Return the next router's best logits for this input, and the experts [count] that they are of."""
        if self.next_router is None or self.next_ratio is None:
            return None
        top = F.linear(x * self.next_ratio, self.next_router)[0].topk(count)
        return top.values, top.indices

    def _decode(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: ExpertSource,
        guesses: Sequence[int],
    ) -> Tensor:
        route = ids.tolist()  # the host waits here
        # the sum runs by ascending expert id, as in a prompt, whatever arrives first
        order = ids.argsort()
        place = {expert: row for row, expert in enumerate(sorted(route))}
        fetched = experts.fetch(self.layer, route, guesses)
        rows = torch.empty(len(place), x.shape[1], dtype=torch.float32, device=x.device)
        for expert, record in fetched:
            rows[place[expert]] = self._expert(x, expert, record)[0]
        return weights[order].unsqueeze(0) @ rows

    def _prefill(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertSource) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        # (token, choice) pairs grouped by expert; each touched expert is read once
        order = ids.flatten().argsort(stable=True)
        tokens = order // ids.shape[1]
        touched, counts = ids.flatten()[order].unique_consecutive(return_counts=True)
        split = dict(zip(touched.tolist(), counts.tolist(), strict=True))
        if isinstance(experts, BatchedSource):
            self._prefill_slots(out, x, order, weights, split, experts)
            return out
        pair_weights = weights.flatten()[order].unsqueeze(1)
        sizes = list(split.values())
        pairs = zip(tokens.split(sizes), pair_weights.split(sizes), strict=True)
        groups = dict(zip(split, pairs, strict=True))
        for expert, record in experts.sweep(self.layer, list(groups)):
            chosen, chosen_weights = groups[expert]
            out.index_add_(0, chosen, self._expert(x[chosen], expert, record) * chosen_weights)
        return out

    def _prefill_slots(
        self,
        out: Tensor,
        x: Tensor,
        order: Tensor,
        weights: Tensor,
        split: Mapping[int, int],
        experts: BatchedSource,
    ) -> None:
        """Add the routed experts' outputs to out [T, H] on a GPU, several experts a launch.

        order: [T * k], the pairs by expert.  split: expert -> number of its pairs, ascending.
        """
        from kernels.nvfp4_grouped import add_pairs, grouped_experts

        top_k = weights.shape[1]
        pair_tokens = (order // top_k).int()
        # a token's places in the list of pairs, and its weights in the same order
        where = torch.empty_like(order)
        where[order] = torch.arange(len(order), device=order.device)
        where, by_place = where.view(-1, top_k).sort(dim=1)
        where, by_weight = where.int(), weights.gather(1, by_place)
        limit = min(MAX_PAIRS, len(order))
        inner = out.new_empty(limit, self.spec.intermediate)
        y = out.new_empty(limit, self.spec.hidden)
        first = 0
        for wave in experts.batches(self.layer, list(split)):
            for part in _cut_pairs([split[expert] for expert, _ in wave], limit):
                numbers, counts = zip(*part, strict=True)
                chosen = [wave[number] for number in numbers]
                count = sum(counts)
                starts = torch.tensor([0, *counts]).cumsum(0).int().to(x.device)
                table = torch.tensor([record.data_ptr() for _, record in chosen], device=x.device)
                scales = self.scales[torch.tensor([e for e, _ in chosen], device=x.device)]
                tokens = pair_tokens[first : first + count]
                grouped_experts(
                    x, tokens, starts, table, scales, inner[:count], y[:count], max(counts)
                )
                add_pairs(out, y[:count], where, by_weight, first)
                first += count

    def _expert(self, x: Tensor, expert: int, record: Tensor) -> Tensor:
        return ops.nvfp4_swiglu_expert(
            x, record.to(x.device), self.scales[expert], self.spec.intermediate
        )


class QwenModel:
    """The text model. `prefill` and `decode` advance a state and return logits."""

    def __init__(
        self,
        spec: QwenSpec,
        weights: Mapping[str, Tensor],
        expert_scales: Tensor,
        experts: ExpertSource,
        rows: RowReader,
        table_scale: float,
        num_guesses: int,
    ) -> None:
        """weights: by checkpoint name less the prefix, in the compute dtype (FP8 rows as float8 with a scale).

        expert_scales: [layers, E, 3] fp32.  num_guesses: of the next layer's experts; 0 leaves its router alone.
        """
        self.spec, self.experts, self.rows = spec, experts, rows
        self.num_guesses = min(num_guesses, spec.num_experts)
        self.dense_nbytes = _dense_nbytes(spec, weights)
        self.embedding, self.head = weights["embed_tokens.weight"], weights["lm_head.weight"]
        self.device = self.head.device  # the embedding may stay in RAM: a token needs one row of it
        layers = range(spec.num_layers)
        self.attention_mixers = [
            BlockMixer(weights, f"layers.{i}.attn_hyper_connection", spec) for i in layers
        ]
        self.mlp_mixers = [
            BlockMixer(weights, f"layers.{i}.mlp_hyper_connection", spec) for i in layers
        ]
        self.final_mixer = Mixer(weights, "hyper_connection_mixer", spec)
        self.blocks = [
            Attention(weights, i, spec) if spec.is_attention[i] else DeltaNet(weights, i, spec)
            for i in layers
        ]
        self.moes = [Moe(weights, i, spec, expert_scales[i]) for i in layers]
        for i in layers[:-1]:
            self.moes[i].expect(self.moes[i + 1], self.mlp_mixers[i], self.mlp_mixers[i + 1])
        self.ple = Ple(weights, spec, table_scale)
        self.decoder: Decoder | Lanes | None = (
            None  # decodes instead of the layers' own path, where it is set
        )

    @property
    def device_wait_ns(self) -> int:
        """Nanoseconds that the host has waited for the GPU's routes so far."""
        return self.decoder.wait_ns if self.decoder is not None else 0

    def expert_scales(self, layer: int, expert: int) -> Tensor:
        """Return an expert's global scales (gate, up, down): [3] fp32."""
        return self.moes[layer].scales[expert]

    def new_state(self) -> QwenState:
        """Return the state of an empty conversation."""
        return QwenState(
            self.spec, self.head.dtype, self.device, is_borrowed=self.decoder is not None
        )

    def close(self) -> None:
        """Close the n-gram table's files."""
        self.rows.close()

    def prefill(
        self,
        tokens: Sequence[int],
        state: QwenState,
        all_logits: bool = False,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Take in several tokens, layer by layer: fp32 logits [1, vocab] of the last, or [T, vocab] of all.

        after_layer: called after each layer; what it raises leaves the state half-way.
        """
        return self._forward(tokens, state, all_logits, after_layer)

    def decode(self, token: int, state: QwenState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab]."""
        if self.decoder is not None:
            return self.decoder.step(token, state).clone()  # the next step overwrites its buffer
        return self._forward([token], state, all_logits=False, after_layer=lambda: None)

    @torch.inference_mode()
    def _forward(
        self,
        tokens: Sequence[int],
        state: QwenState,
        all_logits: bool,
        after_layer: Callable[[], None],
    ) -> Tensor:
        """Layer by layer; within a layer all tokens go through the experts at once, through the rest in chunks."""
        spec, ple, device = self.spec, self.ple, self.device
        if self.decoder is not None:
            self.decoder.bind(state)
        state.version += 1
        # the rows are asked for before the first layer and needed after it
        request = self.rows.request(ple.row_ids(tokens, state.ngram_context))
        hidden = self.embedding[torch.tensor(tokens, device=self.embedding.device)].to(device)
        residual = hidden.unsqueeze(1).repeat(1, spec.streams, 1)
        positions = torch.arange(state.position, state.position + len(tokens), device=device)
        cos, sin = ops.rope_tables(positions, spec.rotary_dim, spec.rope_theta)
        del hidden
        chunks = [slice(at, at + CHUNK_TOKENS) for at in range(0, len(tokens), CHUNK_TOKENS)]
        x = residual.new_empty(len(tokens), spec.hidden)
        amounts = residual.new_empty(len(tokens), spec.streams, 1)
        for layer, block in enumerate(self.blocks):
            if layer == spec.ple_layer:
                raw = self.rows.collect(request).view(len(tokens), -1)
                for part in chunks:
                    embedding = ple.embed(raw[part], residual)
                    residual[part] += ple(residual[part], embedding, state)
            for part in chunks:
                block_x, amount = self.attention_mixers[layer].read(residual[part])
                if isinstance(block, Attention):
                    start = state.position + part.start
                    y = block(block_x, state, start, cos[part], sin[part])
                else:
                    y = block(block_x, state)
                residual[part] += amount * y.unsqueeze(1)
                x[part], amounts[part] = self.mlp_mixers[layer].read(residual[part])
            y = self.moes[layer](x, self.experts, self.num_guesses)
            for part in chunks:
                residual[part] += amounts[part] * y[part].unsqueeze(1)
            del y
            after_layer()
        state.ngram_context = [*state.ngram_context, *tokens][-2:]
        state.position += len(tokens)
        last, _ = self.final_mixer.mix(residual if all_logits else residual[-1:])
        return F.linear(last, self.head).float()


def _dense_nbytes(spec: QwenSpec, weights: Mapping[str, Tensor]) -> int:
    """Return the bytes that one token reads at least, where it is computed.

    These are the residents without the embedding table, and on a CPU its experts; a GPU gets those over PCIe.
    """
    residents = sum(w.nbytes for name, w in weights.items() if name != EMBEDDING)
    if weights["lm_head.weight"].is_cuda:
        return residents
    shape = Nvfp4Shape(spec.hidden, spec.intermediate)
    return residents + spec.num_layers * spec.top_k * shape.payload_nbytes


# ---- what Engine.open asks of a family -----------------------------------------------------------------------------

# a GPU reads experts in RAM where they are: 2.8 MB each, copies would cost the host's time
READS_IN_PLACE = True


def read_spec(snapshot: Path) -> QwenSpec:
    """Read and check a snapshot's config.json."""
    return QwenSpec.from_config(json.loads((snapshot / "config.json").read_text()))


def check_support(spec: QwenSpec, config: RunConfig, device: torch.device) -> None:
    """Refuse what this engine cannot do for the model. Both devices will do."""
    del device
    if config.drafts.enabled:
        raise UserError("drafts.enabled=true, but this family has no draft heads", "leave it out")
    check_context(config.model.context_tokens, spec.max_positions)


def open_codec(snapshot: Path) -> QwenCodec:
    """Return the tokenizer and the form of conversations."""
    return QwenCodec(snapshot)


def expert_layout(spec: QwenSpec, files: EngineFiles) -> PackedLayout:
    """Return where the experts are: in the pack."""
    del spec  # the pack has its own header
    assert files.pack is not None, "the repack stage makes it"
    return PackedLayout.open(files.pack)


def model_sizes(
    spec: QwenSpec, files: EngineFiles, layout: PackedLayout, config: RunConfig, dtype: torch.dtype
) -> ModelSizes:
    """Return what the memory plan needs to know."""
    assert files.residents is not None, "the residents stage makes it"
    header = read_header(files.residents / RESIDENTS_NAME)
    kept = {name: (info.dtype, info.shape) for name, info in header.items()}
    return _sizes(spec, kept, layout.record_nbytes, config, dtype)


def planned_sizes(
    spec: QwenSpec, config: RunConfig, dtype: torch.dtype, has_gpu: bool
) -> ModelSizes:
    """Return the same from the configuration alone, before any file is made.  has_gpu: all the same here."""
    del has_gpu
    kept = spec.kept_shapes(config.model.deltanet is Deltanet.fp8_rows)
    record_nbytes = Nvfp4Shape(spec.hidden, spec.intermediate).record_nbytes
    return _sizes(spec, kept, record_nbytes, config, dtype)


def _sizes(
    spec: QwenSpec,
    kept: Mapping[str, tuple[str, tuple[int, ...]]],
    record_nbytes: int,
    config: RunConfig,
    dtype: torch.dtype,
) -> ModelSizes:
    """kept: tensor of the residents file -> (dtype, shape)."""
    size = dtype.itemsize
    nbytes = {
        name: math.prod(shape) * (_kept_dtype(name, kind) or dtype).itemsize
        for name, (kind, shape) in kept.items()
    }
    embedding_nbytes = nbytes.pop(EMBEDDING)
    # what is kept in another form beside the tensors of the file: gains in fp32
    gains_nbytes = 4 * spec.streams * spec.hidden * (2 * spec.num_layers + 4)
    context = -(-config.model.context_tokens // spec.block_tokens) * spec.block_tokens
    num_attention = sum(spec.is_attention)
    token = 2 * spec.kv_heads * spec.head_dim + spec.index_dim / spec.block_tokens
    delta = (
        4 * spec.value_heads * spec.key_dim * spec.value_dim
        + size * (spec.conv_kernel - 1) * spec.conv_width
    )
    state = num_attention * token * size * context + (spec.num_layers - num_attention) * delta
    return ModelSizes(
        residents_nbytes=sum(nbytes.values()) + gains_nbytes,
        embedding_nbytes=embedding_nbytes,
        state_nbytes=int(state),
        scratch=_scratch(spec, context, size),
        record_nbytes=record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
    )


def _scratch(spec: QwenSpec, context: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return what computing holds beside weights and state, as `ModelSizes.scratch` wants it.

    One line for each of a prompt's moments that may be the fullest: a chunk in a DeltaNet layer's first product (its
    matrix widened from FP8, the product in fp32 and rounded), a chunk in attention, the experts' sums of all tokens.
    """
    always = WORKSPACE_NBYTES + 4 * spec.vocab_size + 8 * context * spec.rotary_dim
    every = size * (spec.streams + 1) * (spec.hidden + 1) + 4 * spec.rotary_dim
    width = spec.conv_width + spec.value_width
    read = size * (spec.streams + 2) * spec.hidden  # of the streams, for each token of a chunk
    delta = size * width * spec.hidden + CHUNK_TOKENS * ((4 + size) * width + read)
    heads = 6 * spec.heads * spec.head_dim
    attention = ATTENTION_NBYTES + CHUNK_TOKENS * (size * heads + read)
    chosen = 40 * spec.top_k
    pairs = 4 * MAX_PAIRS * (spec.intermediate + spec.hidden)
    sums = every + 4 * spec.hidden + chosen
    shared = sums + size * (spec.hidden + 2 * spec.shared_intermediate)
    return (
        (always + delta, every),
        (always + attention, every),
        (always + pairs, sums),
        (always, shared),
    )


def open_model(
    spec: QwenSpec,
    files: EngineFiles,
    layout: PackedLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> QwenModel:
    """Load the residents and open the n-gram table."""
    del layout  # a packed record holds its payload from the first byte
    assert files.residents is not None, "the residents stage makes it"
    assert files.pack is not None, "the repack stage makes it"
    weights = load_residents(files.residents / RESIDENTS_NAME, device, dtype)
    tables = json.loads((files.residents / TABLES_NAME).read_text())
    table, table_scale = table_from_json(tables, files.snapshot)
    name = f"layers.{spec.ple_layer}.ple.ple_embedding."
    last_row = int(
        (weights[f"{name}ngram_heads_offsets"] + weights[f"{name}ngram_heads_vocab_sizes"]).max()
    )
    if last_row > table.num_rows:
        raise UserError(
            f"the n-gram table has {table.num_rows:,} rows, the checkpoint's constants reach row {last_row:,}",
            "the snapshot mixes two releases: fetch it again",
        )
    reader = DirectReader(sorted({part.file for part in table.parts}), config.hw.drive)
    rows = RowReader(table, reader, config.cache.table_rows)
    scalars = read_pack_scalars(files.pack, spec)
    scales = torch.tensor(scalars).view(spec.num_layers, spec.num_experts, -1)[..., :3].contiguous()
    prefetch = config.prefetch
    # a few candidates more than are read or copied: some will be there already
    guesses = max(spec.top_k, prefetch.copy) if prefetch.experts or prefetch.copy else 0
    model = QwenModel(spec, weights, scales.to(device), experts, rows, table_scale, guesses)
    if device.type == "cuda":
        model.decoder = open_lanes(
            partial(Decoder, model, config.model.context_tokens, config.hw.graphs),
            config.serve.max_batch,
        )
    return model


EMBEDDING = "embed_tokens.weight"
# tensors of one layer that a decode step reads as one matrix: they are loaded one behind the other
_JOINED = (
    ("attn_hyper_connection.input_mix_weight_down.weight", "attn_hyper_connection.block_inject_weight.weight"),
    ("mlp_hyper_connection.input_mix_weight_down.weight", "mlp_hyper_connection.block_inject_weight.weight"),
    ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    ("linear_attn.in_proj_qkv.weight_scale", "linear_attn.in_proj_z.weight_scale"),
    ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
     "self_attn.indexer.index_qk_proj.weight"),
)  # fmt: skip


def load_residents(file: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load the residents file: floats in the compute dtype, FP8 rows, their scales and integers as they are.

    The embedding table stays in RAM. Tensors that are read together lie one behind the other.
    """
    header = read_header(file)
    weights: dict[str, Tensor] = {}
    for name, info in header.items():
        if name in weights:
            continue
        group = next((g for g in _JOINED if name.endswith(g[0])), None)
        names = [name] if group is None else [name.removesuffix(group[0]) + tail for tail in group]
        rows = [math.prod(header[part].shape[:1]) for part in names]
        memory = torch.empty(
            sum(rows),
            *info.shape[1:],
            dtype=_kept_dtype(name, info.dtype) or dtype,
            device="cpu" if name == EMBEDDING else device,
        )
        for part, target in zip(names, memory.split(rows), strict=True):
            found = header[part]
            raw = read_extent(found.extent)
            weights[part] = target.view(found.shape)
            weights[part].copy_(bytes_to_tensor(raw, found.dtype, found.shape))
    return weights


def _kept_dtype(name: str, dtype: str) -> torch.dtype | None:
    """Return the torch dtype of a tensor that is kept as it is stored; None: it becomes the compute dtype."""
    is_kept = dtype in ("F8_E4M3", "I64") or name.endswith(".weight_scale")
    return torch_dtype(dtype) if is_kept else None
