"""DeepSeek-V4.1-Flash, text, in its native arithmetic: every layer, from resident weights and streamed experts.

Owns the arithmetic (plain torch, rounded where the released code rounds). Its classes know no file: experts come from
an ExpertSource, Engram rows from a function, all other weights from a dict by their checkpoint names.

Letters: T tokens of this call, d hidden, S streams, D head size (one vector is key and value), E experts.
The residual X is [T, S, d] bf16; a sublayer reads it with the `pre` that the sublayer before has made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference_deepseek as ops
from runtime.experts.arena import HostArena
from runtime.experts.source import ExpertSource
from runtime.models.buffers import appended
from runtime.models.decoded_rows import DecodedRows, RowsAttempt
from runtime.models.deepseek_attempt import DeepseekAttempt
from runtime.models.deepseek_matrices import fp8_matrix
from runtime.models.deepseek_moe import CHUNK_TOKENS, Moe, OpenExpert
from runtime.models.deepseek_rows import EngramReader
from runtime.models.deepseek_state import DeepseekState
from runtime.models.deepseek_weights import DeepseekSpec
from runtime.models.head_split import HeadSplit
from runtime.models.lanes import Lanes

if TYPE_CHECKING:
    from runtime.models.deepseek_decode import Decoder

# (Engram layer, its row ids, token-major) -> rows, bf16 [T, rows per token * row width]
EngramRows = Callable[[int, Sequence[int]], Tensor]
# (tokens, up to three before) -> row ids for each Engram layer
RowIds = Callable[[Sequence[int], Sequence[int]], Sequence[Sequence[int]]]


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
        places = torch.arange(first, first + len(latent), device=u.device) * self.ratio
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


SCORES_AT_ONCE = 2**23  # of one token, head and entry each


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
        visible = (torch.arange(start, start + tokens, device=u.device) + 1) // self.ratio
        length = (start + tokens) // self.ratio  # the cache may hold those of later tokens, too
        scores = self.scores(u, qr, cache.keys[:length], cos, sin)
        places = torch.arange(length, device=u.device)
        scores = scores.masked_fill(places >= visible.unsqueeze(1), float("-inf"))
        if self.layer == spec.candidate_source:
            choice.candidates = ops.candidate_mask(
                scores, visible, spec.candidate_blocks, spec.candidate_block_size
            )
        elif choice.candidates is not None:
            scores = scores.masked_fill(~choice.candidates, float("-inf"))
        best = ops.best_places(scores, min(spec.index_topk, length))
        best = best.sort(dim=1).values
        choice.slots = best.masked_fill(best >= visible.unsqueeze(1), -1)
        choice.scores = scores

    def scores(self, u: Tensor, qr: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return how much each token wants each entry: [T, entries] bf16."""
        spec = self.spec
        q = ops.quantized_linear(qr, self.wq_b).view(len(u), spec.index_heads, spec.index_dim)
        q = ops.fp4_rounded(ops.rotate(q, cos, sin))
        weights = F.linear(u, self.weights_proj) * (spec.index_dim**-0.5 * spec.index_heads**-0.5)
        rows = max(1, SCORES_AT_ONCE // (spec.index_heads * max(1, len(keys))))
        parts = zip(q.split(rows), weights.split(rows), strict=True)
        return torch.cat([ops.index_scores(part, keys, w) for part, w in parts])


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
        self.wo_a = fp8_matrix(weights, f"{name}.wo_a")
        # expanded from FP8 exactly: a product with a power of two
        if isinstance(self.wo_a, Tensor):
            self.wo_a = self.wo_a.to(torch.bfloat16).view(spec.o_groups, spec.o_rank, -1)
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
        o = ops.rotate(o, c, s, inverse=True)
        if isinstance(self.wo_a, Tensor):
            groups = o.reshape(tokens, spec.o_groups, -1)
            lowrank = torch.einsum("tgk,grk->tgr", groups, self.wo_a).flatten(1)
        else:
            lowrank = self.wo_a.product(o.flatten(1), spec.o_groups)
        return ops.quantized_linear(lowrank, self.wo_b)

    def _visible(
        self, kv: Tensor, start: int, choice: Choice, state: DeepseekState
    ) -> tuple[Tensor, Tensor]:
        """Return all entries that these tokens may see [n, D], and each token's list of them [T, m], -1 for none."""
        spec, tokens = self.spec, len(kv)
        old = state.window(self.layer, start)
        entries = torch.cat([old, kv])
        state.remember(self.layer, start, kv)
        ends = torch.arange(tokens, device=kv.device) + len(old)  # a token's own place in `entries`
        reach = torch.arange(-min(spec.window, len(entries)) + 1, 1, device=kv.device)
        slots = ends.unsqueeze(1) + reach
        slots = slots.masked_fill(slots < 0, -1)
        source = spec.kv_source_of(self.layer)
        if source is None:
            return entries, _together(slots)
        cache = state.compressed[source]
        chosen = choice.slots + torch.where(choice.slots < 0, 0, len(entries))
        length = (start + tokens) // spec.compress_ratios[self.layer]
        slots = _together(torch.cat([slots, chosen], dim=1))
        return torch.cat([entries, cache.entries[:length]]), slots


def _together(slots: Tensor) -> Tensor:
    """Return lists [T, n] with their holes (-1) behind the rest, as many as make the length one of whole steps.

    Which entries share a step of the softmax may not depend on what other tokens of the call see.
    """
    order = (slots < 0).int().sort(dim=1, stable=True).indices
    longest = int((slots >= 0).sum(1).max())
    slots = slots.gather(1, order)[:, :longest]
    return F.pad(slots, (0, -longest % ops.SLOTS_BLOCK), value=-1)


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
        self.pinned: HostArena | None = None  # the head's memory, with a GPU
        self.head_split: HeadSplit | None = None  # with a GPU: the CPU's part; None: it has none
        # on a GPU: decodes instead of the layers' own path
        self.decoder: Decoder | Lanes | None = None
        self.decoded_rows: DecodedRows | None = None  # beside it, where tokens may be taken back
        # of a prompt, through everything but the experts; None: all
        self.chunk_tokens: int | None = None
        self.engram_rows, self.row_ids, self.max_positions = engram_rows, row_ids, max_positions
        self.embedding = weights["embed.weight"]
        self.head, self.norm = weights["head.weight"], weights["norm.weight"]
        self.device = self.norm.device  # embedding and head stay in RAM
        if self.device.type == "cpu":
            self.head = self.head.float()
        else:
            self.chunk_tokens = CHUNK_TOKENS
        self.blocks = [Block(weights, layer, spec) for layer in range(spec.num_layers)]
        self.num_guesses = num_guesses
        if num_guesses and self.device.type == "cpu":
            for block, after in itertools.pairwise(self.blocks):
                block.moe.expect(after.moe, block.ffn_norm, after.ffn_norm, num_guesses)
        shape = spec.expert_shape
        resident_nbytes = sum(
            weight.nbytes for weight in weights.values() if weight.device == self.device
        )
        self.dense_nbytes = resident_nbytes
        if self.device.type == "cpu":  # a GPU gets experts and head over PCIe
            self.dense_nbytes += (
                spec.num_layers * spec.top_k * shape.payload_nbytes - self.embedding.nbytes
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
        self.tables = [
            (angle.cos().to(self.device), angle.sin().to(self.device)) for angle in angles
        ]

    @property
    def device_wait_ns(self) -> int:
        """Nanoseconds that the host has waited for the GPU's routes so far."""
        waiting = self.decoded_rows or self.decoder
        return waiting.wait_ns if waiting is not None else 0

    def new_state(self) -> DeepseekState:
        """Return the state of an empty conversation."""
        return DeepseekState(self.spec, self.device)

    def close(self) -> None:
        """Close the tables' files, and give pinned memory back."""
        if self.rows is not None:
            self.rows.close()
        if self.head_split is not None:
            self.head_split.close()
        if self.pinned is not None:
            self.pinned.close()

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
        if self.decoder is not None:
            return self.decoder.step(token, state).clone()  # the next step overwrites its buffer
        return self._forward([token], state, all_logits=False, after_layer=lambda: None)

    def attempt(self, tokens: Sequence[int], state: DeepseekState) -> DeepseekAttempt | RowsAttempt:
        """Take in a few tokens that may be taken back, at most a window of them, each as `decode` would, to the bit."""
        if self.decoded_rows is None:
            return DeepseekAttempt(self, tokens, state)
        return RowsAttempt(self.decoded_rows, tokens, state)

    def is_settled(self, count: int) -> bool:
        """Whether a pass of `count` tokens takes as long as those after it."""
        return self.decoded_rows is None or self.decoded_rows.is_settled(count)

    @torch.inference_mode()
    def _forward(
        self,
        tokens: Sequence[int],
        state: DeepseekState,
        all_logits: bool,
        after_layer: Callable[[], None],
    ) -> Tensor:
        start = state.position
        streams, pre, ids_of = self.enter(tokens, state)
        parts = self._parts(len(tokens))
        choices = [Choice() for _ in parts]
        for block in self.blocks:
            self._recall(block, streams, ids_of, parts)
            streams, pre = self._run(block, streams, pre, start, parts, choices, state)
            after_layer()
        if not all_logits:
            streams, pre = streams[-1:], pre[-1:]
        return self._leave(tokens, state, streams, pre)

    def enter(
        self, tokens: Sequence[int], state: DeepseekState
    ) -> tuple[Tensor, Tensor, dict[int, Sequence[int]]]:
        """Ask for the Engram rows.  Returns (streams [T, S, d], pre [T, S], Engram layer -> its row ids)."""
        spec = self.spec
        if self.decoder is not None:
            self.decoder.bind(state)
        ids = self.row_ids(tokens, state.context)
        if self.rows is not None:
            self.rows.request(ids)
        entry = self.embedding[torch.tensor(tokens)].to(self.device)
        streams = entry.unsqueeze(1).repeat(1, spec.streams, 1)
        pre = torch.zeros(len(tokens), spec.streams, device=self.device)
        pre[:, 0] = 1.0
        return streams, pre, dict(zip(spec.engram_layers, ids, strict=True))

    def _parts(self, num_tokens: int) -> list[slice]:
        """Return the chunks in which a call's tokens go through all but the experts."""
        size = self.chunk_tokens or num_tokens
        return [slice(at, at + size) for at in range(0, num_tokens, size)]

    def _recall(
        self, block: Block, streams: Tensor, ids_of: Mapping[int, Sequence[int]], parts: Sequence[slice]
    ) -> None:  # fmt: skip
        """Add a layer's Engram to the streams of a call's last tokens [T, S, d], in place."""
        if block.engram is None:
            return
        rows = self.engram_rows(block.layer, ids_of[block.layer])[-len(streams) :]
        for part in parts:
            streams[part] = block.engram(streams[part], rows[part].to(self.device))

    def _run(
        self, block: Block, streams: Tensor, pre: Tensor, start: int, parts: Sequence[slice],
        choices: Sequence[Choice], state: DeepseekState,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `run_block`, in as many parts as there are; may write streams in place."""
        if len(parts) == 1:
            return self.run_block(block, streams, pre, start, choices[0], state)
        return streams, self._run_parts(block, streams, pre, start, parts, choices, state)

    def _leave(
        self, tokens: Sequence[int], state: DeepseekState, streams: Tensor, pre: Tensor
    ) -> Tensor:
        """Move the state behind `tokens`.  Returns the logits of the rows that are given: [rows, vocab] fp32."""
        state.context = [*state.context, *tokens][-3:]
        state.position += len(tokens)
        return self.read_out(streams, pre)

    def read_out(self, streams: Tensor, pre: Tensor) -> Tensor:
        """Return the logits of streams [T, S, d] and pre [T, S] behind the last layer: [T, vocab] fp32."""
        x = ops.rms_norm(ops.hyper_read(streams, pre), self.norm, self.spec.eps).float()
        if self.device.type == "cpu":
            return F.linear(x, self.head)
        # in RAM: it passes through the GPU in pieces
        return torch.cat(
            [F.linear(x, rows.to(self.device).float()) for rows in self.head.split(HEAD_ROWS)],
            dim=1,
        )

    def run_block(
        self, block: Block, streams: Tensor, pre: Tensor, start: int, choice: Choice, state: DeepseekState
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run one layer: streams [T, S, d] after Engram, pre [T, S] of the sublayer before.  Returns both, after it."""
        streams, u, last_pre, post, comb = self.attend(block, streams, pre, start, choice, state)
        y = block.moe(u, self.experts, self.open_expert)
        return ops.hyper_write(y, streams, post, comb), last_pre

    def attend(
        self, block: Block, streams: Tensor, pre: Tensor, start: int, choice: Choice, state: DeepseekState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Run a layer up to its experts: (streams, their input u [T, d], and pre, post, comb of the second half)."""
        eps = self.spec.eps
        is_compressed = self.spec.compress_ratios[block.layer] > 0
        cos, sin = self.tables[int(is_compressed)]
        next_pre, post, comb = block.hc_attn.mixes(streams)
        u = ops.rms_norm(ops.hyper_read(streams, pre), block.attn_norm, eps)
        y = block.attention(u, start, choice, state, cos, sin)
        streams = ops.hyper_write(y, streams, post, comb)
        last_pre, post, comb = block.hc_ffn.mixes(streams)
        u = ops.rms_norm(ops.hyper_read(streams, next_pre), block.ffn_norm, eps)
        return streams, u, last_pre, post, comb

    def _run_parts(
        self, block: Block, streams: Tensor, pre: Tensor, start: int, parts: Sequence[slice],
        choices: Sequence[Choice], state: DeepseekState,
    ) -> Tensor:  # fmt: skip
        """As `run_block`, in parts but for the experts: writes streams in place, returns pre."""
        u = streams.new_empty(len(streams), self.spec.hidden)
        later = []
        for part, choice in zip(parts, choices, strict=True):
            done = self.attend(block, streams[part], pre[part], start + part.start, choice, state)
            streams[part], u[part] = done[:2]
            later.append(done[2:])
        y = block.moe(u, self.experts, self.open_expert)
        for part, (_, post, comb) in zip(parts, later, strict=True):
            streams[part] = ops.hyper_write(y[part], streams[part], post, comb)
        return torch.cat([last_pre for last_pre, _, _ in later])


HEAD_ROWS = 8192  # of the head in VRAM at once, when a prompt's logits are computed
