"""Dense models: Llama, Mistral, Qwen2, Qwen3. Grouped-query attention with rotary positions, SwiGLU, layers streamed.

Owns the arithmetic. A layer's weights are one record of the streamer, as they are stored: in RAM (on a GPU in VRAM),
read ahead from the drive where they do not fit. Plain ones are widened to the dtype of the hidden states when they are
used, quantised ones multiply in fp32 sums and are scaled behind: neither changes a value. What attention sees is the
state's business.

Letters: T tokens of this call, H hidden.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import RunConfig, Weights
from kernels import dense_ops, fp8_matvec, nvfp4_matvec
from runtime import hardware
from runtime.budget import ModelSizes
from runtime.checkpoint import Checkpoint, torch_dtype
from runtime.drafts.opening import check_device, has_heads
from runtime.errors import UserError
from runtime.experts.source import ExpertSource
from runtime.living_kv.hot import buffer_tokens
from runtime.models.buffers import NoRows, check_context, open_part, sendable
from runtime.models.dense_codec import open_codec as open_codec
from runtime.models.dense_state import SCORES_NBYTES, DenseState, KvState
from runtime.models.dense_step import DenseStep, FixedState
from runtime.models.dense_weights import (
    EMBEDDING,
    FLOATS,
    HEAD,
    NORM,
    DenseSpec,
    LayerLayout,
    head_entries,
    layer_entries,
)
from runtime.models.rope import rope_tables, rotate
from runtime.units import align_up

if TYPE_CHECKING:
    from runtime.engine import EngineFiles

HEAD_ROWS = 16384  # of the head that are widened at once
STAGED_LAYERS = 3  # read ahead at most: the one in use and two on their way
PASSING_LAYERS = 2  # slots in VRAM for layers that do not stay there: one in use, one on its way


class DenseModel:
    """All layers, and what is around them."""

    def __init__(
        self,
        spec: DenseSpec,
        weights: Mapping[str, Tensor],
        layout: LayerLayout,
        experts: ExpertSource,
        dtype: torch.dtype,
        has_graphs: bool = True,
    ) -> None:
        """weights: the residents by their checkpoint names; a head that is not there is the embedding table.

        All but the table lie where hidden states are computed; a quantised head is codes and scales.  dtype: of the
        hidden states.  has_graphs: single tokens of states that never move are replayed (CUDA).
        """
        self.spec, self.layout, self.experts, self.dtype = spec, layout, experts, dtype
        self.embedding = weights[EMBEDDING]
        self.head = weights.get(HEAD, self.embedding)
        self.head_scale = weights.get(f"{HEAD}_scale")
        self.norm = weights[NORM].float()
        self.device = self.norm.device
        self.rows = NoRows()
        # fixed addresses cost a CPU more than they save: nothing is launched there
        self.step = DenseStep(self, has_graphs) if self.device.type == "cuda" else None
        self.dense_nbytes = sum(
            part.nbytes for i in range(spec.depth) for part in layout.layer_parts(i)
        )
        self.dense_nbytes += self.head.nbytes

    @property
    def device_wait_ns(self) -> int:
        return 0

    def new_state(self) -> DenseState:
        """Return the state of an empty conversation with full attention."""
        return DenseState(self.spec, self.dtype, self.device)

    def close(self) -> None:
        """No file of its own is open."""

    def prefill(
        self,
        tokens: Sequence[int],
        state: KvState,
        all_logits: bool = False,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Take in several tokens: fp32 logits [1, vocab] of the last, or [T, vocab] of all."""
        hidden = self.run(tokens, state, after_layer)
        return self.logits(hidden if all_logits else hidden[-1:])

    def decode(self, token: int, state: KvState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab]."""
        return self.logits(self.run([token], state))

    @torch.inference_mode()
    def run(
        self,
        tokens: Sequence[int],
        state: KvState,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Take tokens in, layer by layer, each layer's weights read ahead. Returns the last residual stream [T, H]."""
        spec = self.spec
        if (
            self.step is not None
            and len(tokens) == 1
            and isinstance(state, FixedState)
            and state.begin_step()
        ):
            return self.step.run(tokens[0], state, after_layer)
        positions = torch.arange(state.position, state.position + len(tokens))
        tables = torch.stack(rope_tables(positions, spec.head_dim, spec.rope_theta))
        cos, sin = sendable(tables, self.device).to(self.device, non_blocking=True)
        rows = sendable(self.embedding[torch.tensor(tokens)], self.device)
        hidden = rows.to(self.device, non_blocking=True).to(self.dtype)
        state.begin(len(tokens))
        for layer, record in self.experts.sweep(0, range(spec.depth)):
            hidden = self.block(layer, self.open_layer(layer, record), hidden, state, cos, sin)
            state.observe(layer, hidden)
            after_layer()
        state.end()
        return hidden

    def attempt(self, tokens: Sequence[int], state: DenseState) -> DenseAttempt:
        """Take in a few tokens that may be taken back, each as `decode` would, to the bit."""
        return DenseAttempt(self, tokens, state)

    def open_layer(self, layer: int, record: Tensor) -> dict[str, Tensor]:
        """Cut a record into its tensors: gains in fp32, codes and scales as they are, others in the hidden dtype."""
        out = {}
        for part in self.layout.layer_parts(layer):
            tensor = open_part(record, part)
            if part.dtype in FLOATS and not part.name.endswith(("_scale", "_global")):
                is_gain = part.name.endswith("norm.weight")
                tensor = tensor.to(torch.float32 if is_gain else self.dtype)
            out[part.name] = tensor
        return out

    def block(
        self, layer: int, w: Mapping[str, Tensor], hidden: Tensor, state: KvState, cos: Tensor, sin: Tensor
    ) -> Tensor:  # fmt: skip
        """Run one layer.  hidden: [T, H].  Returns [T, H]."""
        spec, tokens = self.spec, hidden.shape[0]
        x = dense_ops.rms_norm(hidden, w["input_layernorm.weight"], spec.eps)
        q, k, v = (
            project(x, w, f"self_attn.{p}_proj").view(tokens, -1, spec.head_dim) for p in "qkv"
        )
        if spec.has_qk_norm:
            q = dense_ops.rms_norm(q, w["self_attn.q_norm.weight"], spec.eps)
            k = dense_ops.rms_norm(k, w["self_attn.k_norm.weight"], spec.eps)
        out = state.attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(1)
        hidden = hidden + project(out, w, "self_attn.o_proj")
        x = dense_ops.rms_norm(hidden, w["post_attention_layernorm.weight"], spec.eps)
        inner = dense_ops.silu_product(project(x, w, "mlp.gate_proj"), project(x, w, "mlp.up_proj"))
        return hidden + project(inner, w, "mlp.down_proj")

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [T, H], the last residual stream.  Returns [T, vocab] fp32."""
        x = dense_ops.rms_norm(hidden, self.norm, self.spec.eps)
        parts = []
        # one token's product on a GPU widens nothing
        is_whole = hidden.is_cuda and len(hidden) == 1 and self.head_scale is not None
        step = len(self.head) if is_whole else HEAD_ROWS
        for at in range(0, len(self.head), step):
            rows = self.head[at : at + step]
            if self.head_scale is None:
                parts.append(F.linear(x, rows.to(self.dtype)).float())
            else:
                scale = self.head_scale[at : at + step]
                parts.append(fp8_matvec.linear(x, rows, scale).float())
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def project(x: Tensor, w: Mapping[str, Tensor], name: str) -> Tensor:
    """Return x W^T + b for one matrix of a layer, whatever form it is kept in.  x: [T, K].  Returns [T, N]."""
    weight, scale, bias = w[f"{name}.weight"], w.get(f"{name}.weight_scale"), w.get(f"{name}.bias")
    if scale is None:
        return F.linear(x, weight, bias)
    if weight.dtype is torch.int8:
        out = fp8_matvec.linear(x, weight, scale)
    else:
        out = nvfp4_matvec.linear(x, weight, scale, w[f"{name}.weight_global"])
    return out if bias is None else out + bias


class DenseAttempt:
    """Tokens that were taken in and may be taken back, before the next forward of the same conversation.

    Every token goes through a layer alone, in the shapes of a single step, so that the bits are those of single steps;
    each layer is read once for all. Full attention has no other state than its length.
    """

    def __init__(self, model: DenseModel, tokens: Sequence[int], state: DenseState) -> None:
        self.tokens = list(tokens)
        self._state, self._start = state, state.position
        self.logits = self._run(model)  # [T, vocab] fp32

    @torch.inference_mode()
    def _run(self, model: DenseModel) -> Tensor:
        spec, state = model.spec, self._state
        places = range(self._start, self._start + len(self.tokens))
        tables = [
            [
                t.to(model.device)
                for t in rope_tables(torch.tensor([place]), spec.head_dim, spec.rope_theta)
            ]
            for place in places
        ]
        rows = [
            model.embedding[torch.tensor([token])].to(model.device, model.dtype)
            for token in self.tokens
        ]
        for layer, record in model.experts.sweep(0, range(spec.depth)):
            weights = model.open_layer(layer, record)
            for i, place in enumerate(places):
                state.position = place
                state.begin(1)
                rows[i] = model.block(layer, weights, rows[i], state, *tables[i])
                state.observe(layer, rows[i])
        self.keep(len(self.tokens))
        return torch.cat([model.logits(row) for row in rows])

    def keep(self, count: int) -> None:
        """Leave the state as if only the first `count` tokens had been fed."""
        self._state.position = self._start + count


# ---- what Engine.open asks of a family -----------------------------------------------------------------------------

READS_IN_PLACE = False
IS_DENSE = True  # every layer comes by for every token
HAS_TOKEN_GRAPH = False  # hw.graphs=token
HEADS_ON_GPU = False  # a checkpoint's draft heads


def read_spec(snapshot: Path) -> DenseSpec:
    """Read and check a snapshot's config.json."""
    return DenseSpec.from_config(json.loads((snapshot / "config.json").read_text()))


def check_support(spec: DenseSpec, config: RunConfig, device: torch.device) -> None:
    """Refuse what this engine cannot do for the model."""
    check_device(config.drafts, device)
    has_heads(config.drafts, 0)
    if config.serve.max_batch > 1:
        raise UserError(
            "serve.max_batch is for models with experts, this one decodes one conversation at a time",
            "leave it out",
        )
    check_context(config.model.context_tokens, spec.max_positions)


def expert_layout(spec: DenseSpec, files: EngineFiles) -> LayerLayout:
    """Return where the layers are: in the released shards as they are, or in the quantised copy."""
    return LayerLayout(Checkpoint.open(files.layers or files.snapshot), spec)


def model_sizes(
    spec: DenseSpec, files: EngineFiles, layout: LayerLayout, config: RunConfig, dtype: torch.dtype
) -> ModelSizes:
    """Return what the memory plan needs to know: residents, buffers of conversations, what computing holds."""
    table = Checkpoint.open(files.snapshot).info(
        EMBEDDING, FLOATS, spec.resident_shapes()[EMBEDDING]
    )
    stored = torch_dtype(table.dtype).itemsize
    has_gpu = hardware.resolve_device(config.hw.device).type == "cuda"
    return _sizes(spec, config, layout.weights, layout.record_nbytes, stored, dtype, has_gpu)


def planned_sizes(
    spec: DenseSpec, config: RunConfig, dtype: torch.dtype, has_gpu: bool
) -> ModelSizes:
    """Return the same from the configuration alone, before any file is made: BF16 as released."""
    nbytes = {"BF16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F32": 4}
    record_nbytes = sum(
        math.prod(entry.shape) * nbytes[entry.dtypes[0]]
        for entry in layer_entries(spec, config.model.weights).values()
    )
    return _sizes(spec, config, config.model.weights, align_up(record_nbytes), 2, dtype, has_gpu)


def _sizes(
    spec: DenseSpec, config: RunConfig, weights: Weights, record_nbytes: int, stored: int, dtype: torch.dtype,
    has_gpu: bool,
) -> ModelSizes:  # fmt: skip
    """stored: bytes of a number in the release."""
    table = spec.vocab_size * spec.hidden
    if weights is not Weights.stored:
        head = table + 4 * spec.vocab_size  # int8 rows
    else:
        head = 0 if spec.is_tied and not has_gpu else stored * table
    timeline, answering = buffer_tokens(config.memory)
    may_remember = any(n == "serve" or n.startswith("memory_") for n in config.stages)
    tokens = config.model.context_tokens + (timeline + answering if may_remember else 0)
    scratch = _scratch(spec, weights, dtype)
    return ModelSizes(
        # a CPU's plan knows no scratch: what is widened stands among the residents there
        residents_nbytes=head + stored * spec.hidden + (0 if has_gpu else scratch.widened),
        embedding_nbytes=stored * table,
        state_nbytes=tokens * spec.kv_token_values * dtype.itemsize,
        record_nbytes=record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        staged_experts=STAGED_LAYERS,
        passing_slots=PASSING_LAYERS,
        scratch=((scratch.widened + scratch.scores, scratch.token),),
        smaller="model.weights=int8_rows or nvfp4, or lower memory.window",
    )


class _Scratch(NamedTuple):
    """What computing holds at most beside weights and state, in bytes."""

    widened: int  # weights in another form than they are kept in
    scores: int  # of attention
    token: int  # for each token of a piece


def _scratch(spec: DenseSpec, weights: Weights, dtype: torch.dtype) -> _Scratch:
    widest = max(spec.hidden, spec.intermediate)
    head_rows = min(HEAD_ROWS, spec.vocab_size)
    if weights is Weights.stored:
        layer = sum(math.prod(shape) for shape in spec.layer_shapes().values())
        widened = dtype.itemsize * max(layer, head_rows * spec.hidden)
    elif weights is Weights.int8_rows:
        widened = dtype.itemsize * max(spec.hidden * spec.intermediate, head_rows * spec.hidden)
    else:  # a GPU's narrow copy of a matrix; wide, it is look-ups and values; the head is 8-bit rows
        number = dtype.itemsize if dtype.itemsize == 2 else 12
        widened = max(number * spec.hidden * widest, dtype.itemsize * head_rows * spec.hidden)
    scores = 3 * SCORES_NBYTES  # fp32, masked, and as probabilities
    return _Scratch(widened, scores, 16 * spec.intermediate + 32 * spec.hidden)


def open_model(
    spec: DenseSpec,
    files: EngineFiles,
    layout: LayerLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> DenseModel:
    """Load the residents, as they are stored; the embedding table stays in RAM."""
    checkpoint = Checkpoint.open(files.snapshot)
    embedding = checkpoint.load(EMBEDDING)
    weights = {EMBEDDING: embedding, NORM: checkpoint.load(NORM).to(device)}
    if layout.weights is not Weights.stored:
        assert files.layers is not None, "a quantised layout has a file of its own"
        copy = Checkpoint.open(files.layers)
        weights |= {n: copy.load(n).to(device) for n in head_entries(spec, layout.weights)}
    elif not spec.is_tied:
        weights[HEAD] = checkpoint.load(HEAD).to(device)
    elif device.type != "cpu":
        weights[HEAD] = embedding.to(device)
    return DenseModel(spec, weights, layout, experts, dtype, config.hw.has_graphs)
