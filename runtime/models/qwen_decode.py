"""Decode steps of fixed shapes, so that a GPU can replay them as graphs.

The step is cut where the host must look: after each layer's router. Segment l sums up the experts of layer l - 1 and
goes on to layer l's router; the last ends with the head. Between two segments the host reads the route, and the
routed experts run in waves: what is there at once, the rest as it arrives, each wave from its own table of addresses.
Everything that a segment reads or writes lies at a fixed address: inputs in pinned memory, the state of one
conversation in buffers of the whole window.

Runs as well without graphs and on a CPU: the same functions, started one by one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference as ops
from kernels import reference_attention
from kernels.attention_token import scratch_shapes
from kernels.fp8_matvec import linear, linear_pair
from runtime.models.decoded_rows import RowDecoder
from runtime.models.graphs import Graphs
from runtime.models.qwen_state import AttentionState, QwenState

if TYPE_CHECKING:
    from runtime.experts.cpu_share import CpuShare
    from runtime.models.cpu_experts import Nvfp4Compute
    from runtime.models.qwen_model import Attention, DeltaNet, QwenModel


class Decoder(RowDecoder):
    """Runs decode steps of one model; holds the state of the conversation that decoded last."""

    CONTEXT_TOKENS = 2

    def __init__(
        self,
        model: QwenModel,
        context_tokens: int,
        has_graphs: bool,
        graphs: Graphs | None = None,
        cpu: tuple[CpuShare, Nvfp4Compute] | None = None,
        beside: Decoder | None = None,
    ) -> None:
        """context_tokens: keys, values and masks have room for this many.  has_graphs: capture and replay (CUDA).

        graphs: of another decoder of this model.  cpu: who computes a share of the experts, and with what input.
        beside: another decoder, whose conversation's next tokens this one takes in with `feed`, so that they can be
        taken back.
        """
        self._share: CpuShare | None = None
        self._cpu: Nvfp4Compute | None = None
        if cpu is not None:
            self._share, self._cpu = cpu
        spec, like = model.spec, model.head
        self.model, self.spec = model, spec
        size = spec.block_tokens
        self.num_blocks = -(-context_tokens // size)
        capacity = self.num_blocks * size
        device, dtype = like.device, like.dtype
        self.device = device
        self._read: Any = ops
        self._delta: Any = ops
        self._moe: Any = ops
        self._attention: Any = reference_attention
        if device.type == "cuda":  # the Triton twins
            from kernels import attention_token, delta_rule, hyper_connection, moe_token

            self._read, self._delta, self._moe = hyper_connection, delta_rule, moe_token
            self._attention = attention_token

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def pinned(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            host = torch.zeros(shape, dtype=dtype)
            return host.pin_memory() if device.type == "cuda" else host

        if beside is None:
            positions = torch.arange(capacity, device=device)
            self.cos, self.sin = ops.rope_tables(positions, spec.rotary_dim, spec.rope_theta)
        else:
            self.cos, self.sin = beside.cos, beside.sin
        # inputs: token and position, its embedding, n-gram rows, addresses of experts; output: routes and guesses
        self.host_in, self.dev_in = pinned(2), buffer(2, dtype=torch.int64)
        self.host_hidden = pinned(1, spec.hidden, dtype=dtype)
        row_nbytes = spec.ple_dim
        self.host_rows, self.dev_rows = (
            pinned(row_nbytes, dtype=torch.uint8),
            buffer(row_nbytes, dtype=torch.uint8),
        )
        # of a layer's waves, each in its own row: a launch may still read one when the next is written
        self.tables = pinned(spec.top_k, spec.top_k)
        self.host_route = pinned(spec.num_layers, spec.top_k + model.num_guesses)
        # numpy views of the same memory: reading and writing a few numbers through torch costs more than the look-ups
        self._tables_view, self._route_view = self.tables.numpy(), self.host_route.numpy()
        # what crosses from one segment to the next, and from one half of a layer to the other
        self.residual, self.moved = (buffer(1, spec.streams, spec.hidden) for _ in range(2))
        self.block_x, self.x, self.y = (buffer(1, spec.hidden) for _ in range(3))
        self.block_amount, self.amount = (buffer(1, spec.streams, 1) for _ in range(2))
        self.router_logits, self.guess_logits = (buffer(1, spec.num_experts) for _ in range(2))
        self.shared_inner, self.shared_gate = buffer(1, spec.shared_intermediate), buffer(1, 1)
        self.shared = buffer(1, spec.hidden)
        self.weights = buffer(1, spec.top_k, dtype=torch.float32)
        self.scales = buffer(spec.top_k, 3, dtype=torch.float32)
        self.inner = buffer(spec.top_k, spec.intermediate, dtype=torch.float32)
        self.rows = buffer(spec.top_k, spec.hidden, dtype=torch.float32)
        self.logits = buffer(1, spec.vocab_size, dtype=torch.float32)
        self.tapped = buffer(1, spec.streams, spec.hidden) if model.keeps_streams else None
        # of the attention layers
        self.q, self.index_q = (
            buffer(spec.heads, spec.head_dim),
            buffer(spec.index_heads, spec.index_dim),
        )
        self.block_scores = buffer(self.num_blocks, dtype=torch.float32)
        self.chosen = buffer(self.num_blocks, dtype=torch.int8)
        shapes = scratch_shapes(spec.heads, spec.head_dim, capacity)
        self.partials = [buffer(*shape, dtype=torch.float32) for shape in shapes.values()]
        self.attended = buffer(1, spec.heads * spec.head_dim)
        # the state of one conversation, and what a token changes of it, as it was before
        self._before: QwenState | None = None
        if beside is None:
            self.static = QwenState(spec, dtype, device)
            for layer in self.static.attention:
                self.static.attention[layer] = AttentionState(
                    buffer(capacity, spec.kv_heads, spec.head_dim),
                    buffer(capacity, spec.kv_heads, spec.head_dim),
                    buffer(self.num_blocks, spec.index_dim),
                    buffer(size, spec.index_dim),
                )
        else:
            self.static, self._before = beside.static, QwenState(spec, dtype, device)
            for kept in self._before.attention.values():
                kept.open_block = buffer(size, spec.index_dim)
        self._bound: weakref.ref[QwenState] | None = None
        self._bound_version = -1
        self.graphs = Graphs(has_graphs, graphs)
        self._steps = 0
        self.wait_ns = 0  # the host, for routes
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        # looked up once: torch takes 10 us for it
        self._stream = torch.cuda.current_stream() if device.type == "cuda" else None

    # ---- the host's part ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, token: int, state: QwenState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab], overwritten by the next step."""
        self._compute_layers(self._begin(token, state))
        return self._end(token, state)

    def bring_in(self, state: QwenState) -> None:
        self.bind(state)

    def context_of(self, state: QwenState) -> list[int]:
        return state.ngram_context

    def take_back(self) -> None:
        """Make the state what it was before the last token that was fed; the position says where keys end."""
        before, static = self._before, self.static
        assert before is not None, "opened beside another decoder"
        for layer in before.delta:
            static.delta[layer].copy_(before.delta[layer])
            static.conv[layer].copy_(before.conv[layer])
        for layer, kept in before.attention.items():
            static.attention[layer].open_block.copy_(kept.open_block)
        static.ple_conv.copy_(before.ple_conv)

    def _compute_layers(self, request: Any) -> None:
        """Run all layers and the head.  request: of the token's n-gram rows."""
        spec = self.spec
        for layer in range(spec.num_layers):
            if layer == spec.ple_layer:
                self._collect(request)
            self._run(layer, partial(self._segment, layer))
            if self._event is not None:
                started = time.perf_counter_ns()
                self._event.record(self._stream)
                self._event.synchronize()
                self.wait_ns += time.perf_counter_ns() - started
            self._run_experts(layer)
        self._run(spec.num_layers, self._last)

    def _begin(self, token: int, state: QwenState) -> Any:
        """Bring the state in, and fill in the step's inputs; return the request of `_enter`."""
        self.bind(state)
        return self._enter(token, state.position, state.ngram_context)

    def _enter(self, token: int, position: int, context: Sequence[int]) -> Any:
        """Fill in the step's inputs; ask for the token's n-gram rows, and return that request."""
        model = self.model
        self.host_in[0], self.host_in[1] = token, position
        self.host_hidden[0] = model.embedding[token]
        return model.rows.request(model.ple.row_ids([token], context))

    def _collect(self, request: Any) -> None:
        self.host_rows.copy_(self.model.rows.collect(request).flatten())

    def _end(self, token: int, state: QwenState) -> Tensor:
        self._steps += 1
        self.move(state, state.position + 1, [*state.ngram_context, token][-2:])
        return self.logits

    def move(self, state: QwenState, position: int, context: list[int]) -> None:
        """Let a state whose tensors are in the buffers be at a position.  context: the two tokens before it."""
        state.position, state.ngram_context = position, context
        for layer, cache in state.attention.items():
            cache.open_block = self.static.attention[layer].open_block[
                : position % self.spec.block_tokens
            ]

    def _run_experts(self, layer: int) -> None:
        """Run a layer's experts in the waves in which they arrive."""
        if self._share is not None and self._steps:  # the first step compiles what graphs replay
            self._share.arm()
        ids = self._route_view[layer].tolist()
        route, guesses = ids[: self.spec.top_k], ids[self.spec.top_k :]
        row_of = {expert: row for row, expert in enumerate(sorted(route))}
        waves = self.model.experts.waves(layer, route, guesses)
        if self.device.type == "cpu":
            for expert, record in (item for wave in waves for item in wave):
                row = row_of[expert]
                self.rows[row] = ops.nvfp4_swiglu_expert(
                    self.x, record, self.scales[row], self.spec.intermediate
                )[0]
            self._put_cpu_rows()
            return
        number = 0
        for wave in waves:
            if not wave:
                continue
            table = self._tables_view[number]
            table[:] = 0
            for expert, record in wave:
                table[row_of[expert]] = record.data_ptr()
            self._run(("wave", number), partial(self._wave, number))
            number += 1
        self._put_cpu_rows()

    def _put_cpu_rows(self) -> None:
        if self._share is not None and self._share.has_rows:
            self._run("cpu", partial(self._share.put, self.rows))

    def _run(self, name: Hashable, launch: Callable[[], None]) -> None:
        self.graphs.run(name, launch, is_first=self._steps == 0)

    # ---- the device's part: fixed shapes, fixed addresses ---------------------------------------------------------

    def _segment(self, layer: int) -> None:
        """From the experts of the layer before, or the token, to a layer's route."""
        model, spec, read = self.model, self.spec, self._read
        if self._before is not None:
            self._keep(self._before, layer)
        amount: Tensor | None = self.amount
        y: Tensor | None = self.y
        if layer == 0:
            self.dev_in.copy_(self.host_in, non_blocking=True)
            self.y.copy_(self.host_hidden, non_blocking=True)
            self.residual.copy_(self.y.unsqueeze(1).expand_as(self.residual))
            y = amount = None
        else:
            self._moe.combine_token(self.weights, self.rows, self.shared, self.y)
        if layer == spec.ple_layer:
            self._await_rows(layer)
            if y is not None:
                self.residual += self.amount * y.unsqueeze(1)
            self._add_ple()
            y = amount = None
        mixer, eps = model.attention_mixers[layer], spec.eps
        read.read_token(
            self.residual, amount, y, mixer.gain, mixer.down_inject, mixer.up, self.moved, self.block_x,
            self.block_amount, eps,
        )  # fmt: skip
        block = model.blocks[layer]
        if spec.is_attention[layer]:
            y = self._attend(cast("Attention", block), layer, self.block_x)
        else:
            y = self._recall(cast("DeltaNet", block), layer, self.block_x)
        mixer = model.mlp_mixers[layer]
        read.read_token(
            self.moved, self.block_amount, y, mixer.gain, mixer.down_inject, mixer.up, self.residual, self.x,
            self.amount, eps,
        )  # fmt: skip
        moe = model.moes[layer]
        has_guesses = model.num_guesses > 0 and moe.next_router is not None
        ratio, next_router = (moe.next_ratio, moe.next_router) if has_guesses else (None, None)
        gate, up, down = moe.shared
        self._moe.mlp_in_token(
            self.x, moe.router, ratio, next_router, gate, up, moe.shared_gate, self.router_logits,
            self.guess_logits, self.shared_inner, self.shared_gate,
        )  # fmt: skip
        self._moe.route_token(
            self.router_logits, self.guess_logits, moe.scales, self._route_of(layer), self.weights, self.scales,
            model.num_guesses,
        )  # fmt: skip
        self._routed(layer)
        self._moe.shared_down_token(self.shared_inner, self.shared_gate, down, self.shared)
        if self._cpu is not None:
            self._cpu.receive(self.x)

    def _keep(self, before: QwenState, layer: int) -> None:
        """Copy what the token will change of a layer's state."""
        if self.spec.is_attention[layer]:
            before.attention[layer].open_block.copy_(self.static.attention[layer].open_block)
        else:
            before.delta[layer].copy_(self.static.delta[layer])
            before.conv[layer].copy_(self.static.conv[layer])
        if layer == self.spec.ple_layer:
            before.ple_conv.copy_(self.static.ple_conv)

    def _route_of(self, layer: int) -> Tensor:
        """Return where a layer's route and guesses go: [k + guesses] int64."""
        return self.host_route[layer]

    def _routed(self, layer: int) -> None:
        """Launch what follows a layer's route before its shared expert."""

    def _await_rows(self, layer: int) -> None:
        """Launch what precedes the use of the n-gram rows."""

    def _wave(self, number: int) -> None:
        from kernels.nvfp4_expert import nvfp4_experts

        nvfp4_experts(self.x, self.tables[number], self.scales, self.inner, self.rows)

    def _last(self) -> None:
        self._moe.combine_token(self.weights, self.rows, self.shared, self.y)
        residual = self.residual + self.amount * self.y.unsqueeze(1)
        if self.tapped is not None:
            self.tapped.copy_(residual)
        x, _ = self.model.final_mixer.mix(residual)
        self.logits.copy_(F.linear(x, self.model.head))

    def _add_ple(self) -> None:
        ple, history = self.model.ple, self.static.ple_conv
        self.dev_rows.copy_(self.host_rows, non_blocking=True)
        embedding = ple.embed(self.dev_rows, self.residual)
        self.residual += ple(self.residual, embedding, self.static)
        history.copy_(self.static.ple_conv)
        self.static.ple_conv = history

    def _recall(self, block: DeltaNet, layer: int, x: Tensor) -> Tensor:
        projected, beta_decay = linear_pair(x, *block.in_proj, block.beta_decay)
        qkv, z = projected.split([self.spec.conv_width, self.spec.value_width], dim=1)
        qkv = self._delta.conv_silu_token(qkv, self.static.conv[layer], block.taps)
        memory = self.static.delta[layer]
        out = self._delta.delta_token(
            qkv, z, beta_decay, block.rate, block.dt_bias, block.norm, memory, self.spec.eps
        )
        return linear(out, *block.out)

    def _attend(self, block: Attention, layer: int, x: Tensor) -> Tensor:
        spec, position, cache = self.spec, self.dev_in[1:], self.static.attention[layer]
        projected = F.linear(x, block.in_proj)
        self._attention.prepare_token(
            projected, position, self.cos, self.sin, block.gain_q, block.gain_k, block.gain_index_q,
            block.gain_index_k, cache.keys, cache.values, cache.open_block, cache.pooled, self.q, self.index_q,
            spec.eps,
        )  # fmt: skip
        budget, size = spec.index_blocks, spec.block_tokens
        self._attention.choose_blocks(
            self.index_q, cache.pooled, position, self.block_scores, self.chosen, budget, size
        )
        self._attention.attend_token(
            self.q, projected, cache.keys, cache.values, self.chosen, position, *self.partials, self.attended,
            budget, size,
        )  # fmt: skip
        return F.linear(self.attended, block.out)

    # ---- whose state is in the buffers ----------------------------------------------------------------------------

    @property
    def bound(self) -> QwenState | None:
        """The state in the buffers; None: none that is still in use."""
        return self._bound() if self._bound is not None else None

    def bind(self, state: QwenState) -> None:
        """Bring a conversation's state into the buffers; the conversation before gets its own copy back."""
        bound = self.bound
        if bound is state and self._bound_version == state.version:
            return
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
                cache.open_block = target.open_block[: len(cache.open_block)]
        self._bound, self._bound_version = weakref.ref(state), state.version


def _moved(source: Tensor, fixed: Tensor) -> Tensor:
    if source is not fixed:
        fixed.copy_(source)
    return fixed
