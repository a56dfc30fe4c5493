"""Decode steps of DeepSeek-V4.1 on a GPU, of fixed shapes, so that they can be replayed as graphs.

As for Qwen, the step is cut where the host must look: after each layer's router. Segment l sums up the experts of
layer l - 1 and goes on to layer l's route; the last ends with the head, which is read in place over PCIe, or in part
computed by the CPU (`head_split`). What a
token's position decides is read from the device, so that one graph serves all tokens.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.shard_layout import ShardLayout
from runtime.models.decoded_rows import RowDecoder
from runtime.models.deepseek_state import Compressed, DeepseekState
from runtime.models.graphs import Graphs
from runtime.models.head_split import HeadLane

if TYPE_CHECKING:
    from runtime.experts.cpu_share import CpuShare
    from runtime.models.cpu_experts import Mxfp4Compute
    from runtime.models.deepseek_model import Attention, Block, DeepseekModel, HyperConnection


class Decoder(RowDecoder):
    """Runs decode steps of one model; holds the state of the conversation that computed last."""

    CONTEXT_TOKENS = 3

    def __init__(
        self,
        model: DeepseekModel,
        layout: ShardLayout,
        has_graphs: bool,
        graphs: Graphs | None = None,
        cpu: tuple[CpuShare, Mxfp4Compute] | None = None,
        beside: Decoder | None = None,
    ) -> None:
        """has_graphs: capture and replay (CUDA).  graphs: of another decoder of this model.

        cpu: who computes a share of the experts, and with what input.  beside: another decoder, whose conversation's
        next tokens this one takes in with `feed`, so that they can be taken back.
        """
        from kernels import (
            deepseek_attention,
            deepseek_compress,
            deepseek_index,
            deepseek_linear,
            deepseek_moe,
            deepseek_token,
            mxfp4_expert,
        )

        self._token, self._compress, self._index = deepseek_token, deepseek_compress, deepseek_index
        self._attention, self._linear, self._moe = deepseek_attention, deepseek_linear, deepseek_moe
        self._experts = mxfp4_expert
        self._share: CpuShare | None = None
        self._cpu: Mxfp4Compute | None = None
        if cpu is not None:
            self._share, self._cpu = cpu
        spec = model.spec
        self.model, self.spec, self.layout = model, spec, layout
        self.device = model.device
        capacity = model.max_positions
        on_gpu = self.device.type == "cuda"
        bf16, fp32 = torch.bfloat16, torch.float32

        def buffer(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        def pinned(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            host = torch.zeros(shape, dtype=dtype)
            return host.pin_memory() if on_gpu else host

        # inputs: position, the token's embedding, Engram rows, addresses of experts; output: routes and guesses
        self.host_position, self.position = pinned(1), buffer(1, dtype=torch.int64)
        self.host_entry = pinned(spec.hidden, dtype=bf16)
        self.host_rows = {
            layer: pinned(spec.engram_dim, dtype=bf16) for layer in spec.engram_layers
        }
        self.tables = pinned(spec.top_k, spec.top_k, 2)  # of a layer's waves, each in its own row
        self.host_route = pinned(spec.num_layers, spec.top_k + model.num_guesses)
        self._tables_view, self._route_view = self.tables.numpy(), self.host_route.numpy()
        # what crosses from one segment to the next, and from one half of a layer to the other
        streams = spec.streams
        self.streams, self.middle = buffer(streams, spec.hidden), buffer(streams, spec.hidden)
        self.pre, self.pre_after = buffer(streams, dtype=fp32), buffer(streams, dtype=fp32)
        self.post, self.comb = buffer(streams, dtype=fp32), buffer(streams, streams, dtype=fp32)
        self.partials = buffer(
            *deepseek_token.partials_shape(streams, spec.hidden), dtype=torch.float64
        )
        self.first_pre = torch.tensor([1.0] + [0.0] * (streams - 1), device=self.device)
        self.u, self.rounded, self.y = (buffer(spec.hidden) for _ in range(3))
        # of attention
        width = spec.heads * spec.head_dim
        self.raw_query, self.query, self.rounded_query = (buffer(spec.q_rank) for _ in range(3))
        self.raw_kv = buffer(spec.head_dim)
        self.q, self.attended = buffer(spec.heads, spec.head_dim), buffer(spec.heads, spec.head_dim)
        self.low, self.rounded_low = (buffer(spec.o_groups * spec.o_rank) for _ in range(2))
        assert width == self.q.numel()
        self.scores = {
            has_entries: buffer(
                *deepseek_attention.scores_shape(
                    spec.heads, spec.window, spec.index_topk if has_entries else 0
                ),
                dtype=fp32,
            )
            for has_entries in (False, True)
        }
        self.values, self.gates = (
            buffer(spec.head_dim, dtype=fp32),
            buffer(spec.head_dim, dtype=fp32),
        )
        self.latent = buffer(spec.head_dim)
        self.raw_index, self.index_query = (
            buffer(spec.index_heads, spec.index_dim) for _ in range(2)
        )
        self.raw_weights, self.index_weights = buffer(spec.index_heads), buffer(spec.index_heads)
        self.chosen = buffer(spec.index_topk, dtype=torch.int32)
        self.index_scores = {
            ratio: buffer(capacity // ratio)
            for ratio in {spec.compress_ratios[i] for i in spec.kv_sources}
        }
        self.candidates = buffer(-(-capacity // spec.candidate_block_size), dtype=torch.int8)
        # of Engram and the experts
        self.engram_rows, self.engram_rounded = buffer(spec.engram_dim), buffer(spec.engram_dim)
        self.engram_kv = buffer((streams + 1) * spec.hidden)
        self.router_logits, self.guess_logits = (
            buffer(spec.num_experts, dtype=fp32) for _ in range(2)
        )
        self.weights = buffer(spec.top_k, dtype=fp32)
        self.inner, self.rows = (
            buffer(spec.top_k, spec.intermediate),
            buffer(spec.top_k, spec.hidden),
        )
        self.shared_inner, self.shared = buffer(spec.intermediate), buffer(spec.hidden)
        self.logits = buffer(1, spec.vocab_size, dtype=fp32)
        self.head = None  # None: the GPU alone computes it
        if model.head_split is not None:
            self.head = HeadLane(model.head_split, self.u, self.logits.view(-1))
        blocks = model.blocks
        self.ratios = [
            after.ffn_norm.float() / block.ffn_norm.float()
            for block, after in itertools.pairwise(blocks)
        ]
        # the state of one conversation; of what the last token overwrote, the window's row and the tail of each layer
        self._before: tuple[dict[int, Tensor], dict[int, Tensor]] | None = None
        if beside is None:
            self.static = DeepseekState(spec, self.device)
            for layer in self.static.compressed:
                rows = capacity // spec.compress_ratios[layer]
                self.static.compressed[layer] = Compressed(
                    buffer(rows, spec.head_dim), buffer(rows, spec.index_dim)
                )
            self.tails = {
                layer: buffer(2, spec.head_dim, dtype=fp32) for layer in self.static.tails
            }
        else:
            self.static, self.tails = beside.static, beside.tails
            self._before = (
                {layer: buffer(1, spec.head_dim) for layer in self.static.windows},
                {layer: torch.zeros_like(tail) for layer, tail in self.tails.items()},
            )
        self._bound: weakref.ref[DeepseekState] | None = None
        self.graphs = Graphs(has_graphs, graphs)
        self._steps = 0
        self.wait_ns = 0  # the host, for routes
        self._event = torch.cuda.Event() if on_gpu else None
        self._stream = torch.cuda.current_stream() if on_gpu else None
        self._offsets = [
            [layout.payload_offsets(ExpertKey(layer, e)) for e in range(spec.num_experts)]
            for layer in range(spec.num_layers)
        ]
        places = [codes_at for offsets in self._offsets for codes_at, _ in offsets]
        self._align = 8 if all(at % 8 == 0 for at in places) else 4
        if any(at % 4 for at in places):
            raise UserError(
                "some experts do not start at a multiple of 4 bytes in their file, which the GPU's kernels need",
                "add hw.device=cpu",
            )

    # ---- the host's part ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, token: int, state: DeepseekState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab], overwritten by the next step."""
        self._compute_layers(self._begin(token, state))
        return self._end(token, state)

    def context_of(self, state: DeepseekState) -> list[int]:
        return state.context

    def take_back(self) -> None:
        """Make the state what it was before the last token that was fed. Entries end where the position says."""
        assert self._before is not None, "opened beside another decoder"
        rows, tails = self._before
        place = self.position % self.spec.window
        for layer, row in rows.items():
            self.static.windows[layer].index_copy_(0, place, row)
        for layer, tail in tails.items():
            self.tails[layer].copy_(tail)

    def _compute_layers(self, ids: Any) -> None:
        """Run all layers and the head.  ids: of the token's Engram rows."""
        for layer in range(self.spec.num_layers):
            if layer in self.host_rows:
                self._collect(layer, ids)
            self._run(layer, partial(self._segment, layer))
            if self._event is not None:
                started = time.perf_counter_ns()
                self._event.record(self._stream)
                self._event.synchronize()
                self.wait_ns += time.perf_counter_ns() - started
            self._run_experts(layer)
        self._run(self.spec.num_layers, self._last)
        self._share_head()

    def _begin(self, token: int, state: DeepseekState) -> Any:
        """Bring the state in, and fill in the step's inputs; return the ids of `_enter`."""
        self.bring_in(state)
        return self._enter(token, state.position, state.context)

    def bring_in(self, state: DeepseekState) -> None:
        """Bind a state, with what its compressors wait with."""
        self.bind(state)
        for layer, tail in self.tails.items():
            kept = state.tails[layer]
            if len(kept) and kept.data_ptr() != tail.data_ptr():
                tail.copy_(kept[0])

    def _enter(self, token: int, position: int, context: Sequence[int]) -> Any:
        """Fill in the step's inputs; ask for the token's Engram rows, and return their ids."""
        model = self.model
        ids = model.row_ids([token], context)
        if model.rows is not None:
            model.rows.request(ids)
        self.host_position[0] = position
        self.host_entry.copy_(model.embedding[token])
        return ids

    def _collect(self, layer: int, ids: Any) -> None:
        rows = self.model.engram_rows(layer, ids[self.spec.engram_layers.index(layer)])
        self.host_rows[layer].copy_(rows[0])

    def _end(self, token: int, state: DeepseekState) -> Tensor:
        self._steps += 1
        self.move(state, state.position + 1, [*state.context, token][-3:])
        return self.logits

    def move(self, state: DeepseekState, position: int, context: list[int]) -> None:
        """Let a state whose tensors are in the buffers be at a position.  context: up to three tokens before it."""
        state.position, state.context = position, context
        for layer, cache in state.compressed.items():
            cache.length = position // self.spec.compress_ratios[layer]
        for layer, tail in self.tails.items():
            state.tails[layer] = tail.unsqueeze(0)[: position % 2]

    def _share_head(self) -> None:
        """Let CPU and GPU compute the head behind the last segment, where they share it."""
        if self.head is None:
            return
        self.head.sent()
        if self.head.has_launch:
            self._run("head", self.head.launch)
        self.wait_ns += self.head.finish()

    def _run_experts(self, layer: int) -> None:
        """Run a layer's experts in the waves in which they arrive."""
        if self._share is not None and self._steps:  # the first step compiles what graphs replay
            self._share.arm()
        ids = self._route_view[layer].tolist()
        route, guesses = ids[: self.spec.top_k], ids[self.spec.top_k :]
        row_of = {expert: row for row, expert in enumerate(sorted(route))}
        offsets = self._offsets[layer]
        number = 0
        for wave in self.model.experts.waves(layer, route, guesses):
            if not wave:
                continue
            table = self._tables_view[number]
            table[:] = 0
            for expert, record in wave:
                address, (codes_at, scales_at) = record.data_ptr(), offsets[expert]
                row = table[row_of[expert]]
                row[0], row[1] = address + codes_at, address + scales_at
            self._run(("wave", number), partial(self._wave, number))
            number += 1
        if self._share is not None and self._share.has_rows:
            self._run("cpu", partial(self._share.put, self.rows))

    def _run(self, name: Hashable, launch: Callable[[], None]) -> None:
        self.graphs.run(name, launch, is_first=self._steps == 0)

    # ---- the device's part: fixed shapes, fixed addresses ---------------------------------------------------------

    def _segment(self, layer: int) -> None:
        """From the experts of the layer before, or the token, to a layer's route."""
        spec, block = self.spec, self.model.blocks[layer]
        connection = block.hc_attn
        if layer == 0:
            self.position.copy_(self.host_position, non_blocking=True)
            self.y.copy_(self.host_entry, non_blocking=True)
            self.streams.copy_(self.y.expand_as(self.streams))
            self.pre.copy_(self.first_pre)
        else:
            self._moe.combine_token(self.rows, self.shared, self.y)
            has_mixes = block.engram is None
            fn = connection.fn if has_mixes else None
            self._token.write_streams(
                self.y, self.middle, self.post, self.comb, self.streams, fn, self.partials
            )
        if block.engram is not None:
            self._await_rows(layer)
            self.engram_rows.copy_(self.host_rows[layer], non_blocking=True)
            self._linear.act_round(self.engram_rows, self.engram_rounded)
            self._fp8(self.engram_rounded, block.engram.wkv, self.engram_kv)
            self._token.gate_engram(
                self.streams, self.engram_kv, block.engram.gate, self.streams, spec.eps
            )
        if layer == 0 or block.engram is not None:
            self._token.mix_streams(self.streams, connection.fn, self.partials)
        self._read(self.streams, self.pre, block.attn_norm, self.u, connection, self.pre_after)
        if self._before is not None:
            self._keep(*self._before, layer)
        self._attend(block.attention, layer)
        connection = block.hc_ffn
        self._token.write_streams(
            self.y, self.streams, self.post, self.comb, self.middle, connection.fn, self.partials
        )
        self._read(self.middle, self.pre_after, block.ffn_norm, self.u, connection, self.pre)
        self._route(block, layer)

    def _read(
        self,
        streams: Tensor,
        pre: Tensor,
        norm: Tensor,
        u: Tensor,
        connection: HyperConnection,
        after: Tensor,
    ) -> None:
        spec = self.spec
        self._token.read_streams(
            streams, pre, norm, u, spec.eps, self.partials, connection.scale, connection.base, after, self.post,
            self.comb, spec.sinkhorn_iters, spec.hc_eps,
        )  # fmt: skip

    def _fp8(self, x: Tensor, weight: Any, out: Tensor, groups: int = 1) -> None:
        self._linear.fp8_linear(x, weight.values, weight.scale, out, groups)

    def _attend(self, block: Attention, layer: int) -> None:
        """Fill y with attention's output for u; enter the token into the layer's window and entries."""
        spec, linear, position = self.spec, self._linear, self.position
        source = spec.kv_source_of(layer)
        cos, sin = self.model.tables[int(source is not None)]
        linear.act_round(self.u, self.rounded)
        self._fp8(self.rounded, block.wq_a, self.raw_query)
        self._fp8(self.rounded, block.wkv, self.raw_kv)
        ring = self.static.windows[layer]
        self._token.prepare_token(
            self.raw_kv,
            self.raw_query,
            block.kv_norm,
            block.q_norm,
            position,
            cos,
            sin,
            ring,
            self.query,
            spec.eps,
        )
        linear.act_round(self.query, self.rounded_query)
        self._fp8(self.rounded_query, block.wq_b, self.q)
        if block.compressor is not None:
            part, cache = block.compressor, self.static.compressed[layer]
            if part.wgate is None:
                values, gates = self.latent, None
            else:
                values, gates = self.values, self.gates
                linear.steady_linear(self.u, part.wgate, gates)
            linear.steady_linear(self.u, part.wkv, values)
            self._compress.extend_entries(
                values, gates, self.tails.get(layer), part.norm, part.wk, part.k_norm, position, cos, sin,
                cache.entries, cache.keys, spec.eps,
            )  # fmt: skip
        if block.indexer is not None:
            self._choose(block, layer, cos, sin)
        entries = None if source is None else self.static.compressed[source].entries
        self._attention.attend_token(
            self.q, ring, entries, None if source is None else self.chosen, block.sink, position, cos, sin,
            self.scores[source is not None], self.attended,
        )  # fmt: skip
        self._fp8(self.attended, block.wo_a, self.low, spec.o_groups)
        linear.act_round(self.low, self.rounded_low)
        self._fp8(self.rounded_low, block.wo_b, self.y)

    def _choose(self, block: Attention, layer: int, cos: Tensor, sin: Tensor) -> None:
        """Fill `chosen` with the entries that this layer and those after it may see."""
        spec, indexer, index, position = self.spec, block.indexer, self._index, self.position
        source = spec.kv_source_of(layer)
        assert indexer is not None
        assert source is not None
        ratio, keys = spec.compress_ratios[layer], self.static.compressed[source].keys
        scores, size, blocks = (
            self.index_scores[ratio],
            spec.candidate_block_size,
            spec.candidate_blocks,
        )
        self._fp8(self.rounded_query, indexer.wq_b, self.raw_index)
        self._linear.steady_linear(self.u, indexer.weights_proj, self.raw_weights)
        index.prepare_query(
            self.raw_index,
            self.raw_weights,
            position,
            cos,
            sin,
            self.index_query,
            self.index_weights,
        )
        index.score_entries(
            self.index_query, keys, self.index_weights, position, scores, ratio, spec.index_topk
        )
        if layer == spec.candidate_source:
            index.mark_candidates(scores, position, self.candidates, ratio, blocks, size)
            index.list_best(scores, position, self.chosen, ratio)
        elif source == spec.kv_source_of(spec.candidate_source):
            index.list_best(scores, position, self.chosen, ratio, self.candidates, blocks, size)
        else:
            index.list_best(scores, position, self.chosen, ratio)

    def _route(self, block: Block, layer: int) -> None:
        """Fill the layer's row of `host_route` and the routing weights for u; run the shared expert."""
        spec, linear, moe = self.spec, self._linear, block.moe
        linear.act_round(self.u, self.rounded)
        linear.steady_linear(self.u, moe.router, self.router_logits)
        guess_bias, guesses = moe.bias, 0
        if self.model.num_guesses and layer + 1 < spec.num_layers:
            after = self.model.blocks[layer + 1].moe
            linear.steady_linear(
                self.u, after.router, self.guess_logits, self.ratios[layer], is_double=False
            )
            guess_bias, guesses = after.bias, self.model.num_guesses
        self._moe.route_token(
            self.router_logits, moe.bias, self.guess_logits, guess_bias, self._route_of(layer), self.weights,
            spec.route_scale, guesses,
        )  # fmt: skip
        self._routed(layer)
        gate, up, down = moe.shared
        linear.fp8_swiglu(
            self.rounded,
            (gate.values, gate.scale),
            (up.values, up.scale),
            self.shared_inner,
            spec.swiglu_limit,
        )
        self._fp8(self.shared_inner, down, self.shared)
        if self._cpu is not None:
            self._cpu.receive(self.rounded, self.weights)

    def _keep(self, rows: dict[int, Tensor], tails: dict[int, Tensor], layer: int) -> None:
        """Copy what the token will overwrite of a layer's state."""
        place = self.position % self.spec.window
        torch.index_select(self.static.windows[layer], 0, place, out=rows[layer])
        if layer in tails:
            tails[layer].copy_(self.tails[layer])

    def _route_of(self, layer: int) -> Tensor:
        """Return where a layer's route and guesses go: [k + guesses] int64."""
        return self.host_route[layer]

    def _routed(self, layer: int) -> None:
        """Launch what follows a layer's route before its shared expert."""

    def _await_rows(self, layer: int) -> None:
        """Launch what precedes the use of a layer's Engram rows."""

    def _wave(self, number: int) -> None:
        self._run_table(self.tables[number])

    def _run_table(self, table: Tensor) -> None:
        """table: [k, 2] int64, where codes and scales of each expert start; zero leaves its row as it is."""
        self._experts.mxfp4_experts(
            self.rounded,
            table,
            self.weights,
            self.inner,
            self.rows,
            self.spec.swiglu_limit,
            self._align,
        )

    def _last(self) -> None:
        model, spec = self.model, self.spec
        self._moe.combine_token(self.rows, self.shared, self.y)
        self._token.write_streams(self.y, self.middle, self.post, self.comb, self.streams)
        self._token.read_streams(self.streams, self.pre, model.norm, self.u, spec.eps)
        if self.head is not None:
            self.head.send()
            return
        self._linear.steady_linear(self.u, model.head, self.logits.view(-1), is_double=False)

    # ---- whose state is in the buffers ----------------------------------------------------------------------------

    @property
    def bound(self) -> DeepseekState | None:
        """The state in the buffers; None: none that is still in use."""
        return self._bound() if self._bound is not None else None

    def bind(self, state: DeepseekState) -> None:
        """Bring a conversation's state into the buffers; the conversation before gets its own copy back."""
        bound = self.bound
        if bound is state and all(
            state.windows[layer].data_ptr() == window.data_ptr()
            for layer, window in self.static.windows.items()
        ):
            return
        if bound is not None and bound is not state:
            bound.restore(bound.tensors())
        for layer, window in self.static.windows.items():
            window.copy_(state.windows[layer])
            state.windows[layer] = window
        for layer, cache in self.static.compressed.items():
            old = state.compressed[layer]
            cache.entries[: old.length] = old.entries[: old.length]
            cache.keys[: old.length] = old.keys[: old.length]
            state.compressed[layer] = Compressed(cache.entries, cache.keys, old.length)
        self._bound = weakref.ref(state)
