"""Qwen3.8-Flash-Next (`qwen4_exp`), text: every layer, from resident weights and streamed experts.

Owns the arithmetic. Its classes know no file: experts come from an ExpertSource, n-gram rows from a RowReader, all
other weights from a dict by their checkpoint names less `model.language_model.`.

Letters: T tokens of this call, H hidden, S streams (hyper-connections), D = S * H, E experts.
The residual R is [T, S, H]; each block reads it through a hyper-connection and adds its output to every stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference as ops
from kernels.fp8_matvec import linear, linear_pair
from runtime.experts.layout import Nvfp4Shape
from runtime.experts.source import ExpertSource
from runtime.models.buffers import appended
from runtime.models.decoded_rows import DecodedRows, RowDecoder, RowsAttempt
from runtime.models.lanes import Lanes
from runtime.models.qwen_attempt import QwenAttempt
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_moe import Moe
from runtime.models.qwen_state import AttentionState, QwenState
from runtime.models.qwen_weights import (
    QwenSpec,
)
from runtime.rows import RowReader

CHUNK_TOKENS = 512  # of a prompt, through everything but the experts at once
ATTENTION_NBYTES = 2**26  # of scores that a chunk's attention may hold at once


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
        # [kernel, conv_width]
        self.taps = weights[f"{name}.conv1d.weight"].squeeze(1).t().contiguous()
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
        # within the budget every block is chosen: plain causal attention
        if blocks <= spec.index_blocks:
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
        # decodes instead of the layers' own path, where it is set
        self.decoder: Decoder | Lanes | None = None
        self.decoded_rows: DecodedRows | None = None  # beside it, where tokens may be taken back
        # whether `taps` is asked for after each forward; set before decoders are made
        self.keeps_streams = False
        self.streams: Tensor | None = None

    @property
    def device_wait_ns(self) -> int:
        """Nanoseconds that the host has waited for the GPU's routes so far."""
        waiting = self.decoded_rows or self.decoder
        return waiting.wait_ns if waiting is not None else 0

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
            # the next step overwrites its buffers
            logits = self.decoder.step(token, state).clone()
            if isinstance(self.decoder, RowDecoder) and self.decoder.tapped is not None:
                self.streams = self.decoder.tapped.clone()
            return logits
        return self._forward([token], state, all_logits=False, after_layer=lambda: None)

    def taps(self) -> Tensor:
        """Return the last forward's streams before the final mixer [T, S, H], once: they are not kept."""
        assert self.streams is not None, "keeps_streams was not set before the forward"
        streams, self.streams = self.streams, None
        return streams

    def attempt(self, tokens: Sequence[int], state: QwenState) -> QwenAttempt | RowsAttempt:
        """Take in a few tokens that may be taken back, each as `decode` would, to the bit."""
        if self.decoded_rows is None:
            return QwenAttempt(self, tokens, state)
        return RowsAttempt(self.decoded_rows, tokens, state)

    def is_settled(self, count: int) -> bool:
        """Whether a pass of `count` tokens takes as long as those after it."""
        return self.decoded_rows is None or self.decoded_rows.is_settled(count)

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
