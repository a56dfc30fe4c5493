"""The draft heads of DeepSeek-V4.1-Flash (DSpark).

Owns the drafts' arithmetic, the taps that they read from the main model, and their own way back from rejected rows. The
stages are layers of the main model's kind: they run as a small model of their own. Only `with_drafts` knows files.

Letters: T rows of this call, d hidden, S streams, D head size, V vocabulary, B rows of a draft block.
A draft's position is the number of main positions it has been seeded with: its block starts there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import DraftsConfig, RunConfig
from kernels import reference_deepseek as ops
from runtime.checkpoint import Checkpoint
from runtime.drafts.heads import HeadedModel, Proposal
from runtime.experts.reader import DirectReader
from runtime.experts.shard_layout import ShardLayout
from runtime.experts.source import ExpertSource
from runtime.experts.streamer import ExpertStreamer
from runtime.models.deepseek_attempt import DeepseekAttempt
from runtime.models.deepseek_matrices import fp8_matrix
from runtime.models.deepseek_model import Attention, Block, Choice, DeepseekModel
from runtime.models.deepseek_moe import OpenExpert
from runtime.models.deepseek_state import DeepseekState
from runtime.models.deepseek_weights import DeepseekSpec, draft_expert_layout, draft_shapes
from runtime.units import GIB

# ---- the main model, tapped -----------------------------------------------------------------------------------------


class TappedAttempt(DeepseekAttempt):
    """Tokens that may be taken back, and what the drafts read of them."""

    def __init__(self, model: TappedModel, tokens: Sequence[int], state: DeepseekState) -> None:
        super().__init__(model, tokens, state)
        self.taps = model.taps()  # [T, target layers * d] bf16


class TappedModel(DeepseekModel):
    """The text model, which also tells what its target layers were given."""

    def __init__(self, spec: DeepseekSpec, weights: Mapping[str, Tensor], *rest: Any) -> None:
        """As DeepseekModel."""
        super().__init__(spec, weights, *rest)
        self._taps: dict[int, list[Tensor]] = {}

    def enter(
        self, tokens: Sequence[int], state: DeepseekState
    ) -> tuple[Tensor, Tensor, dict[int, Sequence[int]]]:
        self._taps = {layer: [] for layer in self.spec.target_layers}
        return super().enter(tokens, state)

    def attend(
        self, block: Block, streams: Tensor, pre: Tensor, start: int, choice: Choice, state: DeepseekState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        if block.layer in self.spec.target_layers:
            self._taps[block.layer].append(streams.float().mean(1).to(torch.bfloat16))
        return super().attend(block, streams, pre, start, choice, state)

    def taps(self) -> Tensor:
        """Return what the drafts read of the last call: [T, target layers * d] bf16."""
        return torch.cat([torch.cat(self._taps[layer]) for layer in self.spec.target_layers], dim=1)

    def attempt(self, tokens: Sequence[int], state: DeepseekState) -> TappedAttempt:
        return TappedAttempt(self, tokens, state)


# ---- the drafts ----------------------------------------------------------------------------------------------------


def stage_spec(spec: DeepseekSpec) -> DeepseekSpec:
    """Return the configuration of the stages as a model of their own: window attention alone, fewer experts."""
    return dataclasses.replace(
        spec,
        num_layers=spec.num_drafts,
        num_experts=spec.draft_experts,
        top_k=spec.draft_top_k,
        compress_ratios=(0,) * spec.num_drafts,
        kv_sources=(),
        index_sources=(),
        engram_layers=(),
        engram_rows=(),
    )


class DraftState(DeepseekState):
    """Rings of projected taps, one per stage, with room to take back a block and the token before it."""

    def __init__(self, spec: DeepseekSpec) -> None:
        """spec: of the stages."""
        self.reach = spec.window
        # the base class keeps position p in row p mod window
        super().__init__(dataclasses.replace(spec, window=spec.window + spec.dspark_block + 1))
        self.oldest = 0  # position still in the rings

    def window(self, layer: int, start: int) -> Tensor:
        """Return the entries of the main positions that a block from `start` sees: [n, D].

        In the order of a ring of `reach` slots, as released: attention sums in parts, so order shows in the last bit.
        """
        places = torch.arange(max(0, start - self.reach), start)
        order = (places % self.reach).argsort()
        return self.windows[layer][places[order] % self.spec.window]

    def advance(self, count: int) -> None:
        """Count positions whose entries all stages have."""
        self.position += count
        self.oldest = max(self.oldest, self.position - self.spec.window)

    def take_back(self, position: int) -> None:
        """Forget the main positions from `position` on. Raises ValueError when older ones were overwritten."""
        if max(0, position - self.reach) < self.oldest or position > self.position:
            raise ValueError(
                f"drafts at position {self.position} cannot go back to {position}: "
                f"the rings start at {self.oldest}"
            )
        self.position = position

    def tensors(self) -> dict[str, Tensor]:
        rings = {f"window.{layer}": self.window(layer, self.position) for layer in self.windows}
        return {"position": torch.tensor([self.position]), **rings}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        self.position = int(tensors["position"])
        self.oldest = max(0, self.position - self.reach)
        places = torch.arange(self.oldest, self.position)
        order = (places % self.reach).argsort()
        for layer, ring in self.windows.items():
            ring[places[order] % self.spec.window] = tensors[f"window.{layer}"]


class DraftAttention(Attention):
    """Attention of a stage: every row of a block sees all seeded positions in reach and the whole block."""

    def seed(self, main: Tensor, start: int, state: DraftState, cos: Tensor, sin: Tensor) -> None:
        """Enter projected taps main [T, d] of the positions from `start` into the ring.  cos, sin: of these."""
        kv = ops.rms_norm(ops.quantized_linear(main, self.wkv), self.kv_norm, self.spec.eps)
        kv = ops.act_rounded(ops.rotate(kv, cos, sin)).to(torch.bfloat16)
        state.remember(self.layer, start, kv)

    def _visible(
        self, kv: Tensor, start: int, choice: Choice, state: DeepseekState
    ) -> tuple[Tensor, Tensor]:
        del choice
        entries = torch.cat([state.window(self.layer, start), kv])
        return entries, torch.arange(len(entries)).expand(len(kv), -1)


class Drafts:
    """The draft heads. `seed` follows the main model; `propose` guesses what comes after a token."""

    def __init__(
        self,
        main: DeepseekModel,
        weights: Mapping[str, Tensor],
        experts: ExpertSource,
        open_expert: OpenExpert,
    ) -> None:
        """main: lends embedding and head.  weights: of `draft_shapes`.  experts: layers count the stages from 0."""
        spec = main.spec
        self.block, self.noise_id = spec.dspark_block, spec.noise_id
        first, last = "mtp.0", f"mtp.{spec.num_drafts - 1}"
        self.main_proj = fp8_matrix(weights, f"{first}.main_proj")
        self.main_norm = weights[f"{first}.main_norm.weight"]
        self.markov_embedding = weights[f"{last}.markov_head.embed.weight"]
        self.markov_head = weights[f"{last}.markov_head.head.weight"].float()
        self.confidence = weights[f"{last}.confidence_head.proj.weight"].float()
        stages = {
            name.replace("mtp.", "layers.", 1): weights[name] for name in draft_shapes(spec)
        } | {
            "embed.weight": main.embedding,
            "head.weight": main.head,
            "norm.weight": weights[f"{last}.norm.weight"],
        }
        self.spec = stage_spec(spec)
        self.stages = DeepseekModel(
            self.spec,
            stages,
            experts,
            open_expert,
            main.engram_rows,
            main.row_ids,
            main.max_positions + self.block,
        )
        self.attention = [
            DraftAttention(stages, stage, self.spec) for stage in range(spec.num_drafts)
        ]
        for block, attention in zip(self.stages.blocks, self.attention, strict=True):
            block.attention = attention

    def new_state(self) -> DraftState:
        """Return the state of an empty conversation."""
        return DraftState(self.spec)

    @torch.inference_mode()
    def seed(self, tokens: Sequence[int], taps: Tensor, state: DraftState) -> None:
        """Take in the taps [T, target layers * d] bf16 of the main positions that follow those known so far."""
        del tokens  # the taps tell all
        kept = taps[-state.spec.window :]
        start = state.position + len(taps) - len(kept)
        main = ops.rms_norm(
            ops.quantized_linear(kept, self.main_proj), self.main_norm, self.spec.eps
        )
        cos, sin = (table[start : start + len(kept)] for table in self.stages.tables[0])
        for attention in self.attention:
            attention.seed(main, start, state, cos, sin)
        state.advance(len(taps))

    @torch.inference_mode()
    def propose(self, token: int, state: DraftState, depth: int) -> Proposal:
        """Guess `depth` tokens, 1 to B, after `token`, the one that follows the seeded positions.

        All B rows are computed whatever the depth: they see each other. The state stays as it is.
        """
        rows = self._rows(token, state)[:depth]
        normed = ops.rms_norm(rows, self.stages.norm, self.spec.eps)
        base = F.linear(normed.float(), self.stages.head)
        tokens, logits, confidence = [], [], []
        for row, of_row in zip(rows, base, strict=True):
            before = self.markov_embedding[token].float()
            logits.append(of_row + F.linear(before, self.markov_head))
            confidence.append(F.linear(torch.cat([row.float(), before]), self.confidence))
            token = int(logits[-1].argmax())
            tokens.append(token)
        return Proposal(tokens, torch.stack(logits), torch.cat(confidence))

    def _rows(self, token: int, state: DraftState) -> Tensor:
        """Run the stages over `token` and noise: [B, d] bf16, before the last norm."""
        ids = torch.tensor([token] + [self.noise_id] * (self.block - 1))
        streams = self.stages.embedding[ids].unsqueeze(1).repeat(1, self.spec.streams, 1)
        pre = torch.zeros(self.block, self.spec.streams)
        pre[:, 0] = 1.0
        choice = Choice()
        for block in self.stages.blocks:
            streams, pre = self.stages.run_block(block, streams, pre, state.position, choice, state)
        return ops.hyper_read(streams, pre)


# ---- opening --------------------------------------------------------------------------------------------------------


def _rows(spec: DeepseekSpec, config: DraftsConfig, record_nbytes: int) -> tuple[int, int]:
    """Return how many draft experts are kept in RAM, and how many are read ahead of a block."""
    kept = max(spec.draft_top_k, int(config.ram_gib * GIB) // record_nbytes)
    touched = min(spec.draft_experts, spec.draft_top_k * spec.dspark_block)
    return min(kept, spec.num_drafts * spec.draft_experts), touched


def drafts_nbytes(checkpoint: Checkpoint, spec: DeepseekSpec, config: DraftsConfig) -> int:
    """Return what the drafts take of the RAM: their weights widened to fp32, and rows for their experts."""
    record_nbytes = draft_expert_layout(checkpoint, spec).record_nbytes
    weights = sum(4 * math.prod(shape) for _, shape in draft_shapes(spec).values())
    return weights + sum(_rows(spec, config, record_nbytes)) * record_nbytes


def with_drafts(
    model: TappedModel, checkpoint: Checkpoint, config: RunConfig, opener: Callable[[ShardLayout], OpenExpert]
) -> HeadedModel:  # fmt: skip
    """Load the drafts beside the model that they read.  opener: makes what dequantises records of a layout."""
    spec = model.spec
    layout = draft_expert_layout(checkpoint, spec)
    weights = {name: checkpoint.load(name) for name in draft_shapes(spec)}
    kept, touched = _rows(spec, config.drafts, layout.record_nbytes)
    reader = DirectReader(layout.files, config.hw.drive, record_nbytes=layout.record_nbytes)
    experts = ExpertStreamer(layout, reader, kept, touched, 0)
    drafts = Drafts(model, weights, experts, opener(layout))
    return HeadedModel(model, drafts, experts)
