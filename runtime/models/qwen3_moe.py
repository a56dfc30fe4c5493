"""Qwen3-MoE: grouped-query attention with normed heads, softmax routing, SwiGLU experts streamed from released shards.

Owns the arithmetic. Weights stay in the checkpoint's dtype in RAM and are widened where they are used, which changes
no value and halves what a token reads. On a GPU all but the experts are in the dtype of the hidden states, and plain
torch computes the experts from slots. Classes know no file.

Letters: T tokens of this call, H hidden, k experts of a token.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import RunConfig
from kernels import reference as ops
from runtime import hardware
from runtime.budget import ModelSizes
from runtime.checkpoint import Checkpoint
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.experts.routes import Guesses
from runtime.experts.slots import BatchedSource
from runtime.experts.source import ExpertSource
from runtime.experts.tensor_layout import TensorLayout
from runtime.models.buffers import NoRows, check_context, open_part
from runtime.models.dense_state import CPU_SCORES_NBYTES, SCORES_NBYTES, DenseState
from runtime.models.qwen3_moe_codec import open_codec as open_codec  # the family's
from runtime.models.qwen3_moe_weights import (
    EMBEDDING,
    FLOATS,
    HEAD,
    NORM,
    PROJECTIONS,
    Qwen3MoeSpec,
)
from runtime.models.qwen3_moe_weights import expert_layout as find_experts
from runtime.models.rope import rope_tables, rotate
from runtime.units import PAGE_NBYTES, align_up

if TYPE_CHECKING:
    from runtime.engine import EngineFiles

WIDENED_NBYTES = 2**22  # of a stored weight at once: it is used before it leaves the CPU's cache
# in BF16 on a CPU oneDNN compiles a product for each number of rows that it meets, and keeps it: 200 MiB more, and a
# slower prompt, where each expert has as many rows as the prompt gave it
PRODUCT_ROWS = 32
PRODUCTS_NBYTES = 96 * 2**20  # of those that are left (72 measured)

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x, stored weight, bias
Matrices = tuple[Tensor, Tensor, Tensor]  # gate, up, down
# (layer, counted among those with experts; expert; its record) -> its matrices, as they are stored
OpenExpert = Callable[[int, int, Tensor], Matrices]


def swiglu(linear: Linear, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return down(silu(gate x) * up x) in x's dtype, for weights as they are stored.  x: [T, H]."""
    return linear(F.silu(linear(x, gate, None)) * linear(x, up, None), down, None)


def in_whole_products(x: Tensor) -> Tensor:
    """Return x [T, H] with rows of zeros behind it where oneDNN multiplies: T is a multiple of `PRODUCT_ROWS`."""
    if x.is_cuda or x.dtype is not torch.bfloat16:
        return x
    return F.pad(x, (0, 0, 0, -len(x) % PRODUCT_ROWS))


class Attention:
    """One attention layer; what it attends to is the state's."""

    def __init__(
        self, weights: Mapping[str, Tensor], layer: int, spec: Qwen3MoeSpec, linear: Linear
    ) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.spec, self.layer, self.linear = spec, layer, linear
        self.matrices = {p: weights[f"{name}.{p}_proj.weight"] for p in "qkvo"}
        self.biases = {p: weights.get(f"{name}.{p}_proj.bias") for p in "qkvo"}
        self.q_norm, self.k_norm = (weights[f"{name}.{p}_norm.weight"].float() for p in "qk")

    def __call__(self, x: Tensor, state: DenseState, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [T, H].  cos, sin: [T, head_dim / 2] of these positions.  Returns [T, H]."""
        spec = self.spec
        q, k, v = (self._project(x, p).view(x.shape[0], -1, spec.head_dim) for p in "qkv")
        q = rotate(ops.rms_norm(q, self.q_norm, spec.eps), cos, sin)
        k = rotate(ops.rms_norm(k, self.k_norm, spec.eps), cos, sin)
        return self._project(state.attend(self.layer, q, k, v).flatten(1), "o")

    def _project(self, x: Tensor, part: str) -> Tensor:
        return self.linear(x, self.matrices[part], self.biases[part])


class Mlp:
    """What a layer without experts has."""

    def __init__(self, weights: Mapping[str, Tensor], layer: int, linear: Linear) -> None:
        self.matrices = [weights[f"model.layers.{layer}.mlp.{p}.weight"] for p in PROJECTIONS]
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, H].  Returns [T, H]."""
        return swiglu(self.linear, x, *self.matrices)


class Moe:
    """Router and experts of one layer."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        layer: int,
        number: int,
        spec: Qwen3MoeSpec,
        linear: Linear,
    ) -> None:
        """layer: of the transformer.  number: among the layers with experts, as the source counts."""
        self.spec, self.number, self.linear = spec, number, linear
        self.router = weights[f"model.layers.{layer}.mlp.gate.weight"]
        self.norm = weights[f"model.layers.{layer}.post_attention_layernorm.weight"].float()
        self.next: Moe | None = None
        self.num_guesses = 0

    def expect(self, after: Moe, num_guesses: int) -> None:
        """Guess the next experts from this layer's input, rescaled by the ratio of the two norms' gains."""
        self.next, self.num_guesses = after, num_guesses

    def guess(self, x: Tensor) -> list[int]:
        """x: [1, H].  Returns likely experts of the next layer with experts, best first; none behind the last."""
        if self.next is None:
            return []
        rescaled = (x * (self.next.norm / self.norm)).to(x.dtype)
        top = self.linear(rescaled, self.next.router, None)[0].topk(self.num_guesses)
        return Guesses(top.indices.tolist(), top.values)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, k] int64, best first, and their weights [T, k] fp32."""
        top = self.linear(x, self.router, None).float().softmax(-1).topk(self.spec.top_k)
        weights = top.values
        if self.spec.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return top.indices, weights.to(x.dtype).float()

    def __call__(self, x: Tensor, experts: ExpertSource, open_expert: OpenExpert) -> Tensor:
        """x: [T, H].  Returns [T, H]."""
        ids, weights = self.route(x)
        run = self._token if x.shape[0] == 1 else self._prompt
        return run(x, ids, weights, experts, open_expert).to(x.dtype)

    def _token(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertSource, open_expert: OpenExpert
    ) -> Tensor:  # fmt: skip
        """Run a token's experts as they arrive; the sum runs by ascending expert, whatever came first."""
        route = ids[0].tolist()  # the host waits here
        arriving = _arriving(experts, self.number, route, self.guess(x))
        found = {
            expert: swiglu(self.linear, x, *open_expert(self.number, expert, record)).float()
            for expert, record in arriving
        }
        rows = torch.cat([found[expert] for expert in sorted(found)])
        return weights[:, ids[0].argsort()] @ rows

    def _prompt(
        self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertSource, open_expert: OpenExpert
    ) -> Tensor:  # fmt: skip
        """Run each touched expert once, on the tokens that chose it, by ascending expert."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        order = ids.flatten().argsort(stable=True)
        experts_of_pairs = ids.flatten()[order]
        touched, counts = (
            part.tolist() for part in experts_of_pairs.unique_consecutive(return_counts=True)
        )
        tokens = (order // ids.shape[1]).split(counts)
        shares = weights.flatten()[order].unsqueeze(1).split(counts)
        swept = _swept(experts, self.number, touched)
        for (expert, record), at, share in zip(swept, tokens, shares, strict=True):
            rows = in_whole_products(x[at])
            y = swiglu(self.linear, rows, *open_expert(self.number, expert, record))[: len(at)]
            out.index_add_(0, at, y.float() * share)
        return out


def _arriving(
    experts: ExpertSource, layer: int, route: Sequence[int], guesses: Iterable[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield a token's experts.  From slots, each is launched before the next is asked for."""
    if isinstance(experts, BatchedSource):
        return itertools.chain.from_iterable(experts.waves(layer, route, guesses))
    return experts.fetch(layer, route, guesses)


def _swept(experts: ExpertSource, layer: int, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield a prompt's experts in the order given."""
    if isinstance(experts, BatchedSource):
        return itertools.chain.from_iterable(experts.batches(layer, ids))
    return experts.sweep(layer, ids)


class Block:
    """One layer."""

    def __init__(
        self, weights: Mapping[str, Tensor], layer: int, spec: Qwen3MoeSpec, linear: Linear
    ) -> None:
        name = f"model.layers.{layer}"
        self.norm = weights[f"{name}.input_layernorm.weight"].float()
        self.mlp_norm = weights[f"{name}.post_attention_layernorm.weight"].float()
        self.attention = Attention(weights, layer, spec, linear)
        self.mlp: Mlp | Moe = (
            Moe(weights, layer, spec.moe_layers.index(layer), spec, linear)
            if layer in spec.moe_layers
            else Mlp(weights, layer, linear)
        )


class Qwen3MoeModel:
    """The whole model. `prefill` and `decode` advance a state and return logits."""

    def __init__(
        self,
        spec: Qwen3MoeSpec,
        weights: Mapping[str, Tensor],
        experts: ExpertSource,
        open_expert: OpenExpert,
        dtype: torch.dtype,
        num_guesses: int = 0,
        state_tokens: int = 0,
        expert_nbytes: int = 0,
    ) -> None:
        """weights: the residents by their checkpoint names.  dtype: of the hidden states.

        num_guesses: of the next layer's experts, for the source; 0 leaves its router alone.  state_tokens: that a new
        state has room for at once; it grows beyond.  expert_nbytes: of an expert in the memory where it is computed.
        """
        self.spec, self.experts, self.open_expert, self.dtype = spec, experts, open_expert, dtype
        self.embedding, self.norm = weights[EMBEDDING], weights[NORM].float()  # the first in RAM
        self.head = weights.get(HEAD, self.embedding)
        self.device = self.norm.device
        scratch = torch.empty(WIDENED_NBYTES // dtype.itemsize, dtype=dtype, device=self.device)
        self.linear: Linear = partial(ops.stored_linear, scratch=scratch)
        self.blocks = [Block(weights, layer, spec, self.linear) for layer in range(spec.depth)]
        self.num_guesses, self.state_tokens = num_guesses, state_tokens
        if num_guesses:
            moes = [block.mlp for block in self.blocks if isinstance(block.mlp, Moe)]
            for moe, after in itertools.pairwise(moes):
                moe.expect(after, num_guesses)
        self.rows = NoRows()
        self.device_wait_ns = 0  # the host waits for a route inside torch, which does not tell
        self.dense_nbytes = expert_nbytes * spec.num_layers * spec.top_k + self.head.nbytes
        self.dense_nbytes += sum(
            weight.nbytes for name, weight in weights.items() if name not in (EMBEDDING, HEAD)
        )

    def new_state(self) -> DenseState:
        """Return the state of an empty conversation."""
        return DenseState(self.spec, self.dtype, self.device, self.state_tokens)

    def close(self) -> None:
        """No file of its own is open."""

    def prefill(
        self,
        tokens: Sequence[int],
        state: DenseState,
        all_logits: bool = False,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Take in several tokens, layer by layer: fp32 logits [1, vocab] of the last, or [T, vocab] of all.

        after_layer: called after each layer with experts; what it raises leaves the state half-way.
        """
        return self._forward(tokens, state, all_logits, after_layer)

    def decode(self, token: int, state: DenseState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab]."""
        return self._forward([token], state, all_logits=False, after_layer=lambda: None)

    @torch.inference_mode()
    def _forward(
        self,
        tokens: Sequence[int],
        state: DenseState,
        all_logits: bool,
        after_layer: Callable[[], None],
    ) -> Tensor:
        spec = self.spec
        positions = torch.arange(state.position, state.position + len(tokens))
        tables = rope_tables(positions, spec.head_dim, spec.rope_theta)
        cos, sin = (table.to(self.device) for table in tables)
        hidden = self.embedding[torch.tensor(tokens)].to(self.device, self.dtype)
        state.begin(len(tokens))
        for block in self.blocks:
            x = ops.rms_norm(hidden, block.norm, spec.eps)
            hidden = hidden + block.attention(x, state, cos, sin)
            x = ops.rms_norm(hidden, block.mlp_norm, spec.eps)
            if isinstance(block.mlp, Mlp):
                hidden = hidden + block.mlp(x)
                continue
            hidden = hidden + block.mlp(x, self.experts, self.open_expert)
            after_layer()
        state.end()
        x = ops.rms_norm(hidden if all_logits else hidden[-1:], self.norm, spec.eps)
        return self.linear(x, self.head, None).float()


# ---- what Engine.open asks of a family -----------------------------------------------------------------------------

# experts in RAM are copied to VRAM first: they lie off any alignment, and torch cannot read them in place
READS_IN_PLACE = False
IS_DENSE = False
HAS_TOKEN_GRAPH = False  # hw.graphs=token
HEADS_ON_GPU = False  # a checkpoint's draft heads

# of libraries, and what the allocator cannot hand out again; taken over from the other families, not measured
WORKSPACE_NBYTES = 160 * 2**20


def read_spec(snapshot: Path) -> Qwen3MoeSpec:
    """Read and check a snapshot's config.json."""
    return Qwen3MoeSpec.from_config(json.loads((snapshot / "config.json").read_text()))


def check_support(spec: Qwen3MoeSpec, config: RunConfig, device: torch.device) -> None:
    """Refuse what this engine cannot do for the model. Both devices will do."""
    del device
    if config.drafts.enabled:
        raise UserError(
            "drafts are not decoded by the qwen3_moe family yet", "leave out drafts.enabled"
        )
    check_context(config.model.context_tokens, spec.max_positions)


def expert_layout(spec: Qwen3MoeSpec, files: EngineFiles) -> TensorLayout:
    """Return where the experts are: in the released shards, as they are."""
    return find_experts(Checkpoint.open(files.snapshot), spec)


def model_sizes(
    spec: Qwen3MoeSpec,
    files: EngineFiles,
    layout: TensorLayout,
    config: RunConfig,
    dtype: torch.dtype,
) -> ModelSizes:
    """Return what the memory plan needs to know: in RAM weights are as stored, on a GPU in the compute dtype."""
    checkpoint = Checkpoint.open(files.snapshot)
    nbytes = {
        name: checkpoint.info(name, FLOATS, shape).extent.nbytes
        for name, shape in spec.resident_shapes().items()
    }
    has_gpu = hardware.resolve_device(config.hw.device).type == "cuda"
    return _sizes(spec, nbytes, layout.record_nbytes, config, dtype, has_gpu)


def planned_sizes(
    spec: Qwen3MoeSpec, config: RunConfig, dtype: torch.dtype, has_gpu: bool
) -> ModelSizes:
    """Return the same from the configuration alone: 2 bytes a weight, an expert in one run that takes a page more."""
    nbytes = {name: 2 * math.prod(shape) for name, shape in spec.resident_shapes().items()}
    payload = sum(2 * math.prod(shape) for shape in spec.expert_shapes().values())
    record_nbytes = align_up(payload) + PAGE_NBYTES
    return _sizes(spec, nbytes, record_nbytes, config, dtype, has_gpu)


def _sizes(
    spec: Qwen3MoeSpec,
    nbytes: Mapping[str, int],
    record_nbytes: int,
    config: RunConfig,
    dtype: torch.dtype,
    has_gpu: bool,
) -> ModelSizes:
    """nbytes: of each resident as it is stored; a GPU has all but the embedding in the compute dtype.

    In RAM a prompt piece's scratch is planned with the residents: the expert cache must not take its place.
    """
    embedding = nbytes[EMBEDDING]
    scratch = _scratch(spec, dtype.itemsize, SCORES_NBYTES if has_gpu else CPU_SCORES_NBYTES)
    residents = sum(nbytes.values()) - embedding
    tokens = min(config.model.prefill_tokens, config.model.context_tokens)
    residents += WIDENED_NBYTES + max(fixed + each * tokens for fixed, each in scratch)
    if dtype is torch.bfloat16:
        residents += PRODUCTS_NBYTES
    if has_gpu:
        values = [math.prod(shape) for shape in spec.resident_shapes().values()]
        residents = dtype.itemsize * (sum(values) - (0 if spec.is_tied else values[0]))
    return ModelSizes(
        residents_nbytes=residents,
        embedding_nbytes=embedding,
        state_nbytes=config.model.context_tokens * spec.kv_token_values * dtype.itemsize,
        scratch=tuple((WORKSPACE_NBYTES + fixed, each) for fixed, each in scratch),
        record_nbytes=record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
    )


def _scratch(spec: Qwen3MoeSpec, size: int, scores_nbytes: int) -> tuple[tuple[int, int], ...]:
    """Return what a prompt piece holds beside weights and state: (bytes, bytes for each token) of its fullest moments.

    One line for attention, whose scores stand beside their softmax and both roundings, and one for the experts' sums.
    """
    stream = 2 * size * spec.hidden
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    attention = stream + 3 * (4 + size) * heads
    sums = stream + 3 * (4 + size) * spec.hidden + 32 * spec.top_k
    logits = 4 * spec.vocab_size
    return ((logits + 3 * scores_nbytes, attention), (logits, sums + 12 * spec.expert_intermediate))


def open_model(
    spec: Qwen3MoeSpec,
    files: EngineFiles,
    layout: TensorLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> Qwen3MoeModel:
    """Load the residents: as they are stored in RAM, in `dtype` on a GPU, where the embedding alone stays in RAM."""
    checkpoint = Checkpoint.open(files.snapshot)
    weights = {name: checkpoint.load(name) for name in spec.resident_shapes()}
    state_tokens = 0
    if device.type == "cuda":
        embedding = weights[EMBEDDING]
        weights = {name: weight.to(device, dtype) for name, weight in weights.items()}
        if spec.is_tied:
            weights[HEAD] = weights[EMBEDDING]
        weights[EMBEDDING] = embedding
        state_tokens = config.model.context_tokens  # a buffer that grew would not fit the plan

    prefetch = config.prefetch
    has_guesses = prefetch.experts or (prefetch.copy and device.type == "cuda")
    guesses = min(spec.num_experts, max(spec.top_k, prefetch.copy)) if has_guesses else 0
    expert_nbytes = 0  # a GPU gets them over PCIe
    if device.type == "cpu":
        expert_nbytes = sum(part.nbytes for part in layout.parts(ExpertKey(0, 0)))
    return Qwen3MoeModel(
        spec,
        weights,
        experts,
        expert_opener(layout),
        dtype,
        guesses,
        state_tokens,
        expert_nbytes,
    )


def expert_opener(layout: TensorLayout) -> OpenExpert:
    """Return what cuts a record into its matrices, as they are stored."""

    def open_expert(layer: int, expert: int, record: Tensor) -> Matrices:
        gate, up, down = (
            open_part(record, part) for part in layout.parts(ExpertKey(layer, expert))
        )
        return gate, up, down

    return open_expert
