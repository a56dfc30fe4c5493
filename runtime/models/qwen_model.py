"""Qwen3.8-Flash-Next (`qwen4_exp`), text: every layer, from resident weights and streamed experts.

Owns the arithmetic. Its classes know no file: experts come from an ExpertSource, n-gram rows from a RowReader, all
other weights from a dict by their checkpoint names less `model.language_model.`.

Letters: T tokens of this call, H hidden, S streams (hyper-connections), D = S * H, E experts.
The residual R is [T, S, H]; each block reads it through a hyper-connection and adds its output to every stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference as ops
from kernels.fp8_matvec import linear, linear_pair
from runtime.experts.layout import Nvfp4Shape
from runtime.experts.routes import Guesses
from runtime.experts.slots import BatchedSource
from runtime.experts.source import ExpertSource, fetch_union
from runtime.models.buffers import appended
from runtime.models.lanes import Lanes
from runtime.models.qwen_attempt import QwenAttempt
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_state import AttentionState, QwenState
from runtime.models.qwen_weights import (
    QwenSpec,
)
from runtime.rows import RowReader

if TYPE_CHECKING:
    pass


CHUNK_TOKENS = 512  # of a prompt, through everything but the experts at once
ATTENTION_NBYTES = 2**26  # of scores that a chunk's attention may hold at once
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

    def __call__(
        self, x: Tensor, cache: AttentionState, start: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """x: [T, H], from position `start`.  cos, sin: [T, rotary_dim / 2] of these positions.  Returns [T, H]."""
        tokens = x.shape[0]
        q, gate, index_q = self.enter(x, cache, start, cos, sin)
        out = torch.empty_like(q)
        # scores of all queries at once would be the largest thing in memory
        rows = max(1, ATTENTION_NBYTES // (10 * self.spec.heads * (start + tokens)))
        for first in range(0, tokens, rows):
            part = slice(first, min(first + rows, tokens))
            out[part] = self._attend(q[part], index_q[part], cache, start + first)
        return F.linear((out * torch.sigmoid(gate)).flatten(1), self.out)

    def enter(
        self, x: Tensor, cache: AttentionState, start: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take in keys and values as for `__call__`.  Returns queries, output gates and the indexer's queries."""
        q, k, v, gate, index_q, raw = self.project(x, cos, sin)
        cache.keys = appended(cache.keys, start, k)
        cache.values = appended(cache.values, start, v)
        self._update_index(raw, cache, start)
        return q, gate, index_q

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
        if x.shape[0] == 1:
            return self.rows([x], experts, num_guesses)[0]
        routed = self._prefill(x, *self.route(x), experts)
        return routed.add_(self.share(x)).to(x.dtype)

    def rows(self, xs: Sequence[Tensor], experts: ExpertSource, num_guesses: int) -> list[Tensor]:
        """As `__call__` for each of several tokens [1, H] alone, to the bit; each expert is fetched once for all."""
        # the sum runs by ascending expert id, as in a prompt, whatever arrives first
        chosen = [self.route(x) for x in xs]
        routes = [ids[0].tolist() for ids, _ in chosen]  # the host waits here
        orders = [ids[0].argsort() for ids, _ in chosen]
        places = [{expert: row for row, expert in enumerate(sorted(route))} for route in routes]
        parts = [
            torch.empty(len(r), x.shape[1], dtype=torch.float32, device=x.device)
            for r, x in zip(routes, xs, strict=True)
        ]
        for expert, record in fetch_union(
            experts, self.layer, routes, self._guesses(xs, num_guesses)
        ):
            gate_up, down = self.matrices(expert, record.to(xs[0].device))
            for x, place, part in zip(xs, places, parts, strict=True):
                if expert in place:
                    part[place[expert]] = ops.scaled_swiglu_expert(
                        x, gate_up, down, self.scales[expert]
                    )[0]
        sums = [
            weights[0][order].unsqueeze(0) @ part
            for (_, weights), order, part in zip(chosen, orders, parts, strict=True)
        ]
        return [total.add_(self.share(x)).to(x.dtype) for total, x in zip(sums, xs, strict=True)]

    def matrices(self, expert: int, record: Tensor) -> tuple[Tensor, Tensor]:
        """Return an expert's gate and up [2 I, H] and down [H, I] in fp32, without their global scales."""
        del expert  # all records are alike
        return ops.nvfp4_expert_matrices(record, self.spec.hidden, self.spec.intermediate)

    def _guesses(self, xs: Sequence[Tensor], count: int) -> list[int]:
        """Return likely experts of the next layer: of one token best first, of several each one's best first."""
        ranked = [
            found for found in (self._rank(x, count) for x in xs if count) if found is not None
        ]
        if len(ranked) == 1:
            return Guesses(ranked[0][1].tolist(), ranked[0][0])
        by_rank = zip(*(ids.tolist() for _, ids in ranked), strict=True)
        return list(dict.fromkeys(expert for same_rank in by_rank for expert in same_rank))

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
        self.keeps_streams = False  # whether `taps` is asked for after each forward
        self.streams: Tensor | None = None

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

    def taps(self) -> Tensor:
        """Return the last forward's streams before the final mixer [T, S, H], once: they are not kept."""
        assert self.streams is not None, "keeps_streams was not set before the forward"
        streams, self.streams = self.streams, None
        return streams

    def attempt(self, tokens: Sequence[int], state: QwenState) -> QwenAttempt:
        """Take in a few tokens that may be taken back; on a CPU, each as `decode` would, to the bit."""
        return QwenAttempt(self, tokens, state)

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
                    y = block(block_x, state.attention[layer], start, cos[part], sin[part])
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
        if self.keeps_streams:
            self.streams = residual
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


EMBEDDING = "embed_tokens.weight"
