"""The draft head of Qwen3.8-Flash-Next (MTP): one attention layer of the main model's kind behind its last streams.

Owns the head's arithmetic, its experts' form (block FP8) and its own way back from rejected rows. How its two inputs
are joined was read in public descriptions and has not been run on the released weights; a mistake there would cost
acceptance, never a token.

Plain torch, on a CPU and on a GPU: there its experts are copied to VRAM one by one, where they are widened.

Letters: T tokens of this call, H hidden, S streams. A pair is the model's streams at a position and the token that
follows it; the head knows one pair less than the model knows positions: the last one's token has not come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import DraftsConfig, RunConfig
from kernels import reference as ops
from kernels.formats import fp8_tiles_dequantize
from runtime.checkpoint import Checkpoint
from runtime.drafts.heads import HeadedModel, Proposal, TappedModel
from runtime.experts.layout import ExpertKey, Span
from runtime.experts.reader import DirectReader
from runtime.experts.source import ExpertSource
from runtime.experts.streamer import ExpertStreamer
from runtime.experts.tensor_runs import Part, lay_out
from runtime.models.buffers import open_part
from runtime.models.qwen_model import CHUNK_TOKENS, Attention, BlockMixer, Mixer, QwenModel
from runtime.models.qwen_moe import Moe
from runtime.models.qwen_state import AttentionState
from runtime.models.qwen_weights import PROJECTIONS, QwenSpec
from runtime.units import GIB

PREFIX = "mtp."
MTP_DEPTH = 4  # guesses at most: the head was made for one, further ones go through it again
TILE = 128  # rows and columns of an FP8 weight that share a scale
FLOATS = ("BF16", "F16", "F32")


class MtpLayout:
    """The head's experts inside the released shards, as they are."""

    num_layers = 1

    def __init__(self, checkpoint: Checkpoint, spec: QwenSpec) -> None:
        """Find all tensors, checked for dtype and shape. Raises CheckpointError."""
        self.num_experts = spec.num_experts
        sizes = dict.fromkeys(PROJECTIONS, (spec.intermediate, spec.hidden))
        sizes["down_proj"] = (spec.hidden, spec.intermediate)
        experts = []
        for expert in range(spec.num_experts):
            name = f"{PREFIX}layers.0.mlp.experts.{expert}."
            infos = []
            for part, (rows, columns) in sizes.items():
                tiles = (-(-rows // TILE), -(-columns // TILE))
                infos += [
                    checkpoint.info(f"{name}{part}.weight", "F8_E4M3", (rows, columns)),
                    checkpoint.info(f"{name}{part}.weight_scale_inv", ("BF16", "F32"), tiles),
                ]
            experts.append(infos)
        self._files = tuple(sorted({info.extent.file for infos in experts for info in infos}))
        index = {file: i for i, file in enumerate(self._files)}
        found = [lay_out(infos, index, PREFIX) for infos in experts]
        self._spans = [spans for spans, _ in found]
        self._parts = [parts for _, parts in found]
        self.record_nbytes = max(spans[-1].dest + spans[-1].nbytes for spans in self._spans)

    @property
    def files(self) -> tuple[Path, ...]:
        return self._files

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        """Return the reads that fill a record."""
        return self._spans[key.expert]

    def parts(self, expert: int) -> tuple[Part, ...]:
        """Return where weight and scale of gate, up and down lie in an expert's record."""
        return self._parts[expert]


class MtpMoe(Moe):
    """The head's experts: another form than the main model's, the same arithmetic."""

    def __init__(self, weights: Mapping[str, Tensor], spec: QwenSpec, layout: MtpLayout) -> None:
        device = weights["fc_hidden.weight"].device
        super().__init__(weights, 0, spec, torch.ones(spec.num_experts, 3, device=device))
        self._layout = layout

    def matrices(self, expert: int, record: Tensor) -> tuple[Tensor, Tensor]:
        tensors = [open_part(record, part) for part in self._layout.parts(expert)]
        gate, up, down = (
            fp8_tiles_dequantize(values, scale.float(), TILE)
            for values, scale in zip(tensors[::2], tensors[1::2], strict=True)
        )
        return torch.cat([gate, up]), down


class MtpState:
    """Keys and values of the pairs, the streams whose token has not come, and the way back to recent positions."""

    def __init__(self, spec: QwenSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.device, self.position = spec, device, 0

        def empty(*shape: int) -> Tensor:
            return torch.zeros(0, *shape, dtype=dtype, device=device)

        kv = (spec.kv_heads, spec.head_dim)
        self.cache = AttentionState(empty(*kv), empty(*kv), empty(spec.index_dim), empty(spec.index_dim))  # fmt: skip
        self.waiting = empty(spec.streams, spec.hidden)  # [0 or 1, S, H]
        # position -> (waiting, the indexer's open block), of the last positions that were entered one by one
        self._marks = {0: (self.waiting, self.cache.open_block)}

    @property
    def pairs(self) -> int:
        return max(0, self.position - 1)

    def advance(self, count: int, last: Tensor) -> None:
        """Count positions whose pairs are entered.  last: [1, S, H], the streams of the last of them."""
        self.position += count
        self.waiting = last.clone()
        self._mark()

    def _mark(self) -> None:
        oldest = self.position - MTP_DEPTH - 1
        self._marks = {p: mark for p, mark in self._marks.items() if oldest <= p < self.position}
        self._marks[self.position] = (self.waiting, self.cache.open_block)

    def take_back(self, position: int) -> None:
        """Forget the positions from `position` on. Raises ValueError for one that was not entered lately."""
        if position not in self._marks:
            raise ValueError(
                f"the draft head at position {self.position} cannot go back to {position}: "
                f"it kept {sorted(self._marks)}"
            )
        self.position = position
        self.waiting, self.cache.open_block = self._marks[position]
        self._marks = {p: mark for p, mark in self._marks.items() if p <= position}

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of everything that decides the next guesses, in RAM."""
        cache, blocks = self.cache, self.pairs // self.spec.block_tokens
        out = {
            "position": torch.tensor([self.position]),
            "waiting": self.waiting,
            "keys": cache.keys[: self.pairs],
            "values": cache.values[: self.pairs],
            "pooled": cache.pooled[:blocks],
            "open_block": cache.open_block,
        }
        return {name: tensor.to("cpu", copy=True) for name, tensor in out.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the state that `tensors` was copied from."""
        names = ("waiting", "keys", "values", "pooled", "open_block")
        own = {name: tensors[name].to(self.device, copy=True) for name in names}
        self.position, self.waiting = int(tensors["position"]), own.pop("waiting")
        self.cache = AttentionState(**own)
        self._marks = {}
        self._mark()


class Mtp:
    """The draft head. `seed` follows the main model; `propose` guesses what comes after a token."""

    block = MTP_DEPTH

    def __init__(
        self,
        main: QwenModel,
        weights: Mapping[str, Tensor],
        layout: MtpLayout,
        experts: ExpertSource,
    ) -> None:
        """main: lends embedding and head.  weights: of `spec.mtp_shapes`, in the compute dtype."""
        spec = self.spec = main.spec
        self.device = main.device
        self.embedding, self.head, self.experts = main.embedding, main.head, experts
        self.fc_embedding, self.fc_hidden = (
            weights[f"fc_{part}.weight"] for part in ("embedding", "hidden")
        )
        self.embedding_gain, self.hidden_gain = (
            1.0 + weights[f"pre_fc_norm_{part}.weight"].float() for part in ("embedding", "hidden")
        )
        self.attention_mixer = BlockMixer(weights, "layers.0.attn_hyper_connection", spec)
        self.mlp_mixer = BlockMixer(weights, "layers.0.mlp_hyper_connection", spec)
        self.final_mixer = Mixer(weights, "hyper_connection_mixer", spec)
        self.attention = Attention(weights, 0, spec)
        self.moe = MtpMoe(weights, spec, layout)

    def new_state(self) -> MtpState:
        """Return the state of an empty conversation."""
        return MtpState(self.spec, self.head.dtype, self.device)

    @torch.inference_mode()
    def seed(self, tokens: Sequence[int], taps: Tensor, state: MtpState) -> None:
        """Take in the positions that follow: tokens fed there, and the main model's last streams [T, S, H]."""
        # only keys and values of a pair are kept: nothing behind the attention's input is computed
        at = state.pairs
        waiting = len(state.waiting)
        pairs = [(tokens[:waiting], state.waiting)]
        for first in range(0, len(tokens) - 1, CHUNK_TOKENS):
            end = min(first + CHUNK_TOKENS, len(tokens) - 1)
            pairs.append((tokens[first + 1 : end + 1], taps[first:end]))
        for following, streams in pairs:
            if len(following):
                x, _ = self.attention_mixer.read(self._join(following, streams))
                self.attention.enter(x, state.cache, at, *self._tables(at, len(following)))
                at += len(following)
        state.advance(len(tokens), taps[-1:])

    @torch.inference_mode()
    def propose(self, token: int, state: MtpState, depth: int) -> Proposal:
        """Guess `depth` tokens after `token`, the one that follows the known positions. The state stays as it is."""
        cache, streams, at = state.cache, state.waiting, state.pairs
        open_block = cache.open_block
        tokens: list[int] = []
        logits = [torch.empty(0, len(self.head), device=self.device)]
        if not len(streams):
            return Proposal(tokens, logits[0])
        while len(tokens) < depth:
            streams = self._layer(self._join([token], streams), cache, at + len(tokens))
            mixed, _ = self.final_mixer.mix(streams)
            logits.append(F.linear(mixed, self.head).float())
            token = int(logits[-1].argmax())
            tokens.append(token)
        cache.open_block = open_block  # keys, values and blocks end where the position says
        return Proposal(tokens, torch.cat(logits))

    def _join(self, tokens: Sequence[int], streams: Tensor) -> Tensor:
        """Return the layer's input [T, S, H]: the main model's streams and the tokens that follow."""
        # on a GPU the table may have stayed in RAM
        rows = torch.tensor(tokens, device=self.embedding.device)
        embedded = self.embedding[rows].to(self.device)
        token = F.linear(
            ops.rms_norm(embedded, self.embedding_gain, self.spec.eps), self.fc_embedding
        )
        normed = ops.rms_norm(streams.flatten(1), self.hidden_gain, self.spec.eps)
        return token.unsqueeze(1) + F.linear(normed.view_as(streams), self.fc_hidden)

    def _layer(self, streams: Tensor, cache: AttentionState, at: int) -> Tensor:
        """Run the head's layer on one pair [1, S, H]."""
        x, amount = self.attention_mixer.read(streams)
        streams = streams + amount * self.attention(x, cache, at, *self._tables(at, 1)).unsqueeze(1)
        x, amount = self.mlp_mixer.read(streams)
        return streams + amount * self.moe.rows([x], self.experts, 0)[0].unsqueeze(1)

    def _tables(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + count, device=self.device)
        return ops.rope_tables(positions, self.spec.rotary_dim, self.spec.rope_theta)


# ---- opening --------------------------------------------------------------------------------------------------------


def mtp_depth(checkpoint: Checkpoint) -> int:
    """Return how many guesses the checkpoint's draft head gives; 0: it has none."""
    return MTP_DEPTH if f"{PREFIX}fc_hidden.weight" in checkpoint.tensors else 0


def _kept_rows(spec: QwenSpec, config: DraftsConfig, record_nbytes: int) -> int:
    return min(max(spec.top_k, int(config.ram_gib * GIB) // record_nbytes), spec.num_experts)


class MtpNbytes(NamedTuple):
    """What the head takes, in bytes."""

    weights: int  # where it computes
    expert_rows: int  # in RAM
    state: int  # keys and values of a whole window, where it computes


def mtp_nbytes(
    checkpoint: Checkpoint, spec: QwenSpec, config: RunConfig, dtype: torch.dtype
) -> MtpNbytes:
    """Return what the head takes."""
    record_nbytes = MtpLayout(checkpoint, spec).record_nbytes
    weights = dtype.itemsize * sum(math.prod(shape) for shape in spec.mtp_shapes().values())
    rows = _kept_rows(spec, config.drafts, record_nbytes) + 1
    token = 2 * spec.kv_heads * spec.head_dim + spec.index_dim / spec.block_tokens
    # twice: buffers that grow lie beside what they grow from
    state = 2 * int(dtype.itemsize * token * config.model.context_tokens)
    return MtpNbytes(weights, rows * record_nbytes, state)


def with_mtp(
    model: QwenModel, checkpoint: Checkpoint, config: RunConfig, dtype: torch.dtype
) -> HeadedModel:
    """Load the draft head beside the model that it reads, which keeps its streams; where that computes, it does."""
    spec = model.spec
    weights = {}
    for name, shape in spec.mtp_shapes().items():
        checkpoint.info(f"{PREFIX}{name}", FLOATS, shape)
        weights[name] = checkpoint.load(f"{PREFIX}{name}").to(model.device, dtype)
    layout = MtpLayout(checkpoint, spec)
    rows = _kept_rows(spec, config.drafts, layout.record_nbytes)
    reader = DirectReader(layout.files, config.hw.drive, record_nbytes=layout.record_nbytes)
    experts = ExpertStreamer(layout, reader, rows, 1, 0)
    if model.device.type == "cuda":
        experts.pin()  # what the link copies out of other memory goes through a buffer first
    tapped = cast("TappedModel", model)  # whose attempts have taps
    return HeadedModel(tapped, Mtp(model, weights, layout, experts), experts)
