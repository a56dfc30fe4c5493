"""Dense models: Llama, Mistral, Qwen2, Qwen3. Grouped-query attention with rotary positions, SwiGLU, layers streamed.

Owns the arithmetic. A layer's weights are one record of the streamer, in the checkpoint's dtype: in RAM as they are
stored, read ahead from the drive where they do not fit. They are widened to the dtype of the hidden states when they
are used, which changes no value. What attention sees is the state's business.

Letters: T tokens of this call, H hidden.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import RunConfig
from kernels import reference as ops
from runtime.budget import ModelSizes
from runtime.checkpoint import Checkpoint
from runtime.drafts.opening import has_heads
from runtime.errors import UserError
from runtime.experts.streamer import ExpertSource
from runtime.models.buffers import NoRows, check_context, open_part
from runtime.models.dense_codec import open_codec as open_codec
from runtime.models.dense_state import DenseState, KvState
from runtime.models.dense_weights import (
    EMBEDDING,
    FLOATS,
    HEAD,
    NORM,
    DenseSpec,
    LayerLayout,
)
from runtime.models.rope import rope_tables, rotate
from runtime.units import PAGE_NBYTES, align_up

if TYPE_CHECKING:
    from runtime.engine import EngineFiles

HEAD_ROWS = 16384  # of the head that are widened at once
STAGED_LAYERS = 3  # read ahead at most: the one in use and two on their way


class DenseModel:
    """All layers, and what is around them."""

    def __init__(
        self,
        spec: DenseSpec,
        weights: Mapping[str, Tensor],
        layout: LayerLayout,
        experts: ExpertSource,
        dtype: torch.dtype,
    ) -> None:
        """weights: the residents by their checkpoint names, in any float dtype.  dtype: of the hidden states."""
        self.spec, self.layout, self.experts, self.dtype = spec, layout, experts, dtype
        self.embedding = weights[EMBEDDING]
        self.head = weights[EMBEDDING if spec.is_tied else HEAD]
        self.norm = weights[NORM].float()
        self.device = self.embedding.device
        self.rows = NoRows()
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
        positions = torch.arange(state.position, state.position + len(tokens))
        cos, sin = (
            t.to(self.device) for t in rope_tables(positions, spec.head_dim, spec.rope_theta)
        )
        hidden = self.embedding[torch.tensor(tokens, device=self.device)].to(self.dtype)
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
        """Cut a record into its tensors, widened to the dtype of the hidden states; gains are fp32."""
        out = {}
        for part in self.layout.layer_parts(layer):
            wanted = torch.float32 if part.name.endswith("norm.weight") else self.dtype
            out[part.name] = open_part(record, part).to(wanted)
        return out

    def block(
        self, layer: int, w: Mapping[str, Tensor], hidden: Tensor, state: KvState, cos: Tensor, sin: Tensor
    ) -> Tensor:  # fmt: skip
        """Run one layer.  hidden: [T, H].  Returns [T, H]."""
        spec, tokens = self.spec, hidden.shape[0]
        x = ops.rms_norm(hidden, w["input_layernorm.weight"], spec.eps)
        q, k, v = (
            F.linear(x, w[f"self_attn.{p}_proj.weight"], w.get(f"self_attn.{p}_proj.bias"))
            .view(tokens, -1, spec.head_dim)
            for p in "qkv"
        )  # fmt: skip
        if spec.has_qk_norm:
            q = ops.rms_norm(q, w["self_attn.q_norm.weight"], spec.eps)
            k = ops.rms_norm(k, w["self_attn.k_norm.weight"], spec.eps)
        out = state.attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(1)
        hidden = hidden + F.linear(
            out, w["self_attn.o_proj.weight"], w.get("self_attn.o_proj.bias")
        )
        x = ops.rms_norm(hidden, w["post_attention_layernorm.weight"], spec.eps)
        gate, up = (
            F.linear(x, w[f"mlp.{p}_proj.weight"], w.get(f"mlp.{p}_proj.bias"))
            for p in ("gate", "up")
        )
        inner = F.silu(gate) * up
        return hidden + F.linear(inner, w["mlp.down_proj.weight"], w.get("mlp.down_proj.bias"))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [T, H], the last residual stream.  Returns [T, vocab] fp32."""
        x = ops.rms_norm(hidden, self.norm, self.spec.eps)
        parts = [F.linear(x, rows.to(self.dtype)).float() for rows in self.head.split(HEAD_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


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
            rope_tables(torch.tensor([place]), spec.head_dim, spec.rope_theta) for place in places
        ]
        rows = [model.embedding[torch.tensor([token])].to(model.dtype) for token in self.tokens]
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


def read_spec(snapshot: Path) -> DenseSpec:
    """Read and check a snapshot's config.json."""
    return DenseSpec.from_config(json.loads((snapshot / "config.json").read_text()))


def check_support(spec: DenseSpec, config: RunConfig, device: torch.device) -> None:
    """Refuse what this engine cannot do for the model."""
    if device.type != "cpu":
        raise UserError("dense models run on the CPU only so far", "set hw=cpu")
    has_heads(config.drafts, 0)
    if config.serve.max_batch > 1:
        raise UserError(
            "serve.max_batch is for models with experts, this one decodes one conversation at a time",
            "leave it out",
        )
    check_context(config.model.context_tokens, spec.max_positions)


def expert_layout(spec: DenseSpec, files: EngineFiles) -> LayerLayout:
    """Return where the layers are: in the released shards, as they are."""
    return LayerLayout(Checkpoint.open(files.snapshot), spec)


def model_sizes(
    spec: DenseSpec, files: EngineFiles, layout: LayerLayout, config: RunConfig, dtype: torch.dtype
) -> ModelSizes:
    """Return what the memory plan needs to know: a layer in use is widened, the head in pieces."""
    checkpoint = Checkpoint.open(files.snapshot)
    nbytes = {n: checkpoint.info(n, FLOATS, s).extent.nbytes for n, s in spec.resident_shapes().items()}  # fmt: skip
    return _sizes(spec, nbytes, layout.record_nbytes, config, dtype)


def planned_sizes(
    spec: DenseSpec, config: RunConfig, dtype: torch.dtype, has_gpu: bool
) -> ModelSizes:
    """Return the same from the configuration alone: 2 bytes a weight, a layer in one run that takes a page more."""
    del has_gpu
    nbytes = {name: 2 * math.prod(shape) for name, shape in spec.resident_shapes().items()}
    payload = sum(2 * math.prod(shape) for shape in spec.layer_shapes().values())
    return _sizes(spec, nbytes, align_up(payload) + PAGE_NBYTES, config, dtype)


def _sizes(
    spec: DenseSpec,
    nbytes: Mapping[str, int],
    record_nbytes: int,
    config: RunConfig,
    dtype: torch.dtype,
) -> ModelSizes:
    """nbytes: of each resident as it is stored."""
    widened = dtype.itemsize * sum(math.prod(shape) for shape in spec.layer_shapes().values())
    widened = max(widened, dtype.itemsize * min(HEAD_ROWS, spec.vocab_size) * spec.hidden)
    return ModelSizes(
        residents_nbytes=sum(nbytes.values()) - nbytes[EMBEDDING] + widened,
        embedding_nbytes=nbytes[EMBEDDING],
        state_nbytes=config.model.context_tokens * spec.kv_token_values * dtype.itemsize,
        record_nbytes=record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        staged_experts=STAGED_LAYERS,
    )


def open_model(
    spec: DenseSpec,
    files: EngineFiles,
    layout: LayerLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> DenseModel:
    """Load the residents, as they are stored."""
    del config
    checkpoint = Checkpoint.open(files.snapshot)
    weights = {name: checkpoint.load(name).to(device) for name in spec.resident_shapes()}
    return DenseModel(spec, weights, layout, experts, dtype)
