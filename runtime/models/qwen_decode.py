"""Decode steps of fixed shapes, so that a GPU can replay them as graphs.

The step is cut where the host must look: after each layer's router. Segment l holds the experts of layer l - 1 and
layer l up to its router; the last holds the experts of the last layer and the head. Everything that a segment reads
or writes lies at a fixed address: inputs in pinned memory, the state of one conversation in buffers of the whole
window. The host waits for a layer's route, writes a table of addresses, starts the next segment, and nothing else.

Runs as well without graphs and on a CPU: the same functions, started one by one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference as ops
from kernels.fp8_matvec import linear
from runtime.models.qwen_state import AttentionState, QwenState

if TYPE_CHECKING:
    from runtime.models.qwen import Attention, DeltaNet, QwenModel


class Decoder:
    """Runs decode steps of one model; holds the state of the conversation that decoded last."""

    def __init__(self, model: QwenModel, context_tokens: int, has_graphs: bool) -> None:
        """context_tokens: keys, values and masks have room for this many.  has_graphs: capture and replay (CUDA)."""
        spec, like = model.spec, model.embedding
        self.model, self.spec, self.has_graphs = model, spec, has_graphs
        size = spec.block_tokens
        self.num_blocks = -(-context_tokens // size)
        capacity = self.num_blocks * size
        device, dtype = like.device, like.dtype
        self.device = device
        self._read: Any = ops
        self._delta: Any = ops
        self._moe: Any = ops
        if device.type == "cuda":  # the Triton twins
            from kernels import delta_rule, hyper_connection, moe_token

            self._read, self._delta, self._moe = hyper_connection, delta_rule, moe_token

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def pinned(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            host = torch.zeros(shape, dtype=dtype)
            return host.pin_memory() if device.type == "cuda" else host

        positions = torch.arange(capacity, device=device)
        self.positions = positions
        self.cos, self.sin = ops.rope_tables(positions, spec.rotary_dim, spec.rope_theta)
        # inputs: token and position, n-gram rows, addresses of experts; output: routes and guesses
        self.host_in, self.dev_in = pinned(2), buffer(2, dtype=torch.int64)
        row_nbytes = spec.ple_dim
        self.host_rows, self.dev_rows = (
            pinned(row_nbytes, dtype=torch.uint8),
            buffer(row_nbytes, dtype=torch.uint8),
        )
        self.table = pinned(spec.top_k)
        self.host_route = pinned(spec.num_layers, 2 * spec.top_k)
        # numpy views of the same memory: reading and writing a few numbers through torch costs more than the look-ups
        self._table_view, self._route_view = self.table.numpy(), self.host_route.numpy()
        # what crosses from one segment to the next
        self.residual = buffer(1, spec.streams, spec.hidden)
        self.x, self.shared = buffer(1, spec.hidden), buffer(1, spec.hidden)
        self.amount = buffer(1, spec.streams, 1)
        self.weights = buffer(1, spec.top_k, dtype=torch.float32)
        self.scales = buffer(spec.top_k, 3, dtype=torch.float32)
        self.inner = buffer(spec.top_k, spec.intermediate, dtype=torch.float32)
        self.rows = buffer(spec.top_k, spec.hidden, dtype=torch.float32)
        self.logits = buffer(1, spec.vocab_size, dtype=torch.float32)
        self.records: Mapping[int, Tensor] = {}  # row -> record, of the layer in work
        # the state of one conversation
        self.static = QwenState(spec, dtype, device)
        for layer in self.static.attention:
            self.static.attention[layer] = AttentionState(
                buffer(capacity, spec.kv_heads, spec.head_dim),
                buffer(capacity, spec.kv_heads, spec.head_dim),
                buffer(self.num_blocks, spec.index_dim),
                buffer(size, spec.index_dim),
            )
        self._bound: weakref.ref[QwenState] | None = None
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._steps = 0
        self.wait_ns = 0  # the host, for routes
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    # ---- the host's part ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, token: int, state: QwenState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab], overwritten by the next step."""
        model, spec = self.model, self.spec
        self._bind(state)
        self.host_in[0], self.host_in[1] = token, state.position
        request = model.rows.request(model.ple.row_ids([token], state.ngram_context))
        for layer in range(spec.num_layers):
            if layer == spec.ple_layer:
                self.host_rows.copy_(model.rows.collect(request).flatten())
            self._run(layer)
            if self._event is not None:
                started = time.perf_counter_ns()
                self._event.record()
                self._event.synchronize()
                self.wait_ns += time.perf_counter_ns() - started
            self._fetch(layer)
        self._run(spec.num_layers)
        self._steps += 1
        state.ngram_context = [*state.ngram_context, token][-2:]
        state.position += 1
        for layer, cache in state.attention.items():
            cache.open_block = self.static.attention[layer].open_block[
                : state.position % spec.block_tokens
            ]
        return self.logits

    def _fetch(self, layer: int) -> None:
        """Bring a layer's experts where the next segment finds them."""
        ids = self._route_view[layer].tolist()
        route = ids[: self.spec.top_k]
        guesses = ids[self.spec.top_k :] if self.model.num_guesses else ()
        fetched = dict(self.model.experts.fetch(layer, route, guesses))
        records = [fetched[expert] for expert in sorted(route)]
        self._table_view[:] = [record.data_ptr() for record in records]
        if self.device.type == "cpu":
            self.records = dict(enumerate(records))

    def _run(self, segment: int) -> None:
        run = self._segment(segment)
        # the first step runs as it is: it compiles kernels and sets up libraries, which a capture must not meet
        if not self.has_graphs or self._steps == 0:
            run()
            return
        graph = self._graphs.get(segment)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                run()
            self._graphs[segment] = graph
        graph.replay()

    def _segment(self, segment: int) -> Callable[[], None]:
        if segment == 0:
            return self._first
        if segment == self.spec.num_layers:
            return self._last
        return lambda: self._middle(segment)

    # ---- the device's part: fixed shapes, fixed addresses ---------------------------------------------------------

    def _first(self) -> None:
        self.dev_in.copy_(self.host_in, non_blocking=True)
        hidden = self.model.embedding.index_select(0, self.dev_in[:1])
        self.residual.copy_(hidden.unsqueeze(1).expand_as(self.residual))
        self._to_router(0, None)

    def _middle(self, layer: int) -> None:
        self._to_router(layer, self._experts())

    def _last(self) -> None:
        residual = self.residual + self.amount * self._experts().unsqueeze(1)
        x, _ = self.model.final_mixer.mix(residual)
        self.logits.copy_(F.linear(x, self.model.head))

    def _experts(self) -> Tensor:
        """Return the output of the expert block whose route the host has answered: [1, H]."""
        if self.device.type == "cuda":
            from kernels.nvfp4_expert import nvfp4_experts

            nvfp4_experts(self.x, self.table, self.scales, self.inner, self.rows)
        else:
            for row, record in self.records.items():
                self.rows[row] = ops.nvfp4_swiglu_expert(
                    self.x, record, self.scales[row], self.spec.intermediate
                )[0]
        out: Tensor = self._moe.combine_token(self.weights, self.rows, self.shared)
        return out

    def _to_router(self, layer: int, y: Tensor | None) -> None:
        """y: output of the expert block before, not yet added to the streams (their shares are in `amount`)."""
        model, spec, read = self.model, self.spec, self._read
        amount: Tensor | None = self.amount
        if layer == spec.ple_layer:
            if y is not None:
                self.residual += self.amount * y.unsqueeze(1)
            self._add_ple()
            y = None
        if y is None:
            amount = None
        mixer = model.attention_mixers[layer]
        normed = read.add_norm(self.residual, amount, y, mixer.gain, spec.eps)
        x, amount = read.mix_streams(normed, mixer.down_inject, mixer.up)
        block = model.blocks[layer]
        if spec.is_attention[layer]:
            y = self._attend(cast("Attention", block), layer, x)
        else:
            y = self._recall(cast("DeltaNet", block), layer, x)
        mixer = model.mlp_mixers[layer]
        normed = read.add_norm(self.residual, amount, y, mixer.gain, spec.eps)
        x, amount = read.mix_streams(normed, mixer.down_inject, mixer.up)
        moe = model.moes[layer]
        logits, guess_logits = F.linear(x, moe.router), None
        if model.num_guesses and moe.next_router is not None:
            guess_logits = F.linear(x * moe.next_ratio, moe.next_router)
        self._moe.route_token(
            logits, guess_logits, moe.scales, self.host_route[layer], self.weights, self.scales
        )
        self._moe.shared_token(x, *moe.shared, moe.shared_gate, self.shared)
        self.x.copy_(x)
        self.amount.copy_(amount)

    def _add_ple(self) -> None:
        ple, history = self.model.ple, self.static.ple_conv
        self.dev_rows.copy_(self.host_rows, non_blocking=True)
        embedding = ple.embed(self.dev_rows, self.residual)
        self.residual += ple(self.residual, embedding, self.static)
        history.copy_(self.static.ple_conv)
        self.static.ple_conv = history

    def _recall(self, block: DeltaNet, layer: int, x: Tensor) -> Tensor:
        qkv = self._delta.conv_silu_token(
            linear(x, *block.qkv), self.static.conv[layer], block.taps
        )
        z, beta_decay = linear(x, *block.z), F.linear(x, block.beta_decay)
        memory = self.static.delta[layer]
        out = self._delta.delta_token(
            qkv, z, beta_decay, block.rate, block.dt_bias, block.norm, memory, self.spec.eps
        )
        return linear(out, *block.out)

    def _attend(self, block: Attention, layer: int, x: Tensor) -> Tensor:
        spec, size, position = self.spec, self.spec.block_tokens, self.dev_in[1:]
        cache = self.static.attention[layer]
        cos, sin = self.cos.index_select(0, position), self.sin.index_select(0, position)
        q, k, v, gate = block.project(x, cos, sin)
        cache.keys.index_copy_(0, position, k)
        cache.values.index_copy_(0, position, v)
        index_q, raw = block.project_index(x, cos, sin)
        cache.open_block.index_copy_(0, position % size, raw)
        # the key of the open block is written each time and right when the block is complete; only then it is used
        number = position // size
        start = number * size
        pooled = block.pool(
            cache.open_block.unsqueeze(0),
            self.cos.index_select(0, start),
            self.sin.index_select(0, start),
        )
        cache.pooled.index_copy_(0, number, pooled)
        num_complete = (position + 1) // size
        complete = (self.positions[: self.num_blocks] < num_complete).unsqueeze(0)
        chosen = ops.top_blocks(block.score(index_q, cache.pooled), complete, spec.index_blocks)
        chosen = chosen.unsqueeze(-1).expand(-1, -1, size).reshape(1, -1)
        is_open = (self.positions >= num_complete * size) & (self.positions <= position)
        out = ops.attention(q, cache.keys, cache.values, chosen | is_open)
        return F.linear((out * torch.sigmoid(gate)).flatten(1), block.out)

    # ---- whose state is in the buffers ----------------------------------------------------------------------------

    def _bind(self, state: QwenState) -> None:
        """Bring a conversation's state into the buffers; the conversation before gets its own copy back."""
        bound = self._bound() if self._bound is not None else None
        if bound is not None and bound is not state:
            bound.restore(bound.tensors())
        static, length, blocks = (
            self.static,
            state.position,
            state.position // self.spec.block_tokens,
        )
        for layer, memory in state.delta.items():
            state.delta[layer] = _moved(memory, static.delta[layer])
            state.conv[layer] = _moved(state.conv[layer], static.conv[layer])
        state.ple_conv = _moved(state.ple_conv, static.ple_conv)
        for layer, cache in state.attention.items():
            target = static.attention[layer]
            for part, used in (("keys", length), ("values", length), ("pooled", blocks)):
                source, fixed = getattr(cache, part), getattr(target, part)
                if source is not fixed:
                    fixed[:used].copy_(source[:used])
                    setattr(cache, part, fixed)
            if cache.open_block.data_ptr() != target.open_block.data_ptr():
                target.open_block[: len(cache.open_block)].copy_(cache.open_block)
        self._bound = weakref.ref(state)


def _moved(source: Tensor, fixed: Tensor) -> Tensor:
    if source is not fixed:
        fixed.copy_(source)
    return fixed
