"""Qwen3.8-Flash-Next as a family: what `Engine.open` asks of it, and `plan` before any file is there.

Owns what is refused, the sizes that the memory plan needs, and how a model is put together from what the stages made.
The arithmetic is `qwen_model`'s.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conf.schema import Deltanet, RunConfig
from runtime.budget import ModelSizes
from runtime.checkpoint import Checkpoint, bytes_to_tensor, read_extent, read_header, torch_dtype
from runtime.drafts.opening import ROW_NBYTES, check_decoders, has_heads, most_rows, open_rows
from runtime.errors import UserError
from runtime.experts.cpu_share import CpuShare, open_share
from runtime.experts.layout import Nvfp4Shape, PackedLayout
from runtime.experts.reader import DirectReader
from runtime.experts.slots import SlotExperts
from runtime.experts.source import ExpertSource
from runtime.experts.spread import open_pack
from runtime.hardware import resolve_device
from runtime.models.buffers import check_context
from runtime.models.cpu_experts import Nvfp4Compute, compiled_kernels
from runtime.models.lanes import open_lanes
from runtime.models.qwen_codec import QwenCodec
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_model import ATTENTION_NBYTES, CHUNK_TOKENS, EMBEDDING, QwenModel
from runtime.models.qwen_moe import MAX_PAIRS
from runtime.models.qwen_token import TokenDecoder
from runtime.models.qwen_weights import (
    RESIDENTS_NAME,
    TABLES_NAME,
    QwenSpec,
    read_pack_scalars,
    table_from_json,
)
from runtime.rows import RowReader

if TYPE_CHECKING:
    from runtime.drafts.heads import HeadedModel
    from runtime.engine import EngineFiles


# of matrix products and captured graphs, and what the allocator cannot hand out again: 60 and 57 MiB were measured on
# an H200, the second when a prompt of 8,000 tokens met a card filled to the plan's last MiB
WORKSPACE_NBYTES = (64 + 96) * 2**20


# ---- what Engine.open asks of a family -----------------------------------------------------------------------------

# a GPU reads experts in RAM where they are: 2.8 MB each, copies would cost the host's time
READS_IN_PLACE = True
IS_DENSE = False
HAS_TOKEN_GRAPH = True  # hw.graphs=token
HEADS_ON_GPU = True  # a checkpoint's draft heads


def read_spec(snapshot: Path) -> QwenSpec:
    """Read and check a snapshot's config.json."""
    return QwenSpec.from_config(json.loads((snapshot / "config.json").read_text()))


def check_support(spec: QwenSpec, config: RunConfig, device: torch.device) -> None:
    """Refuse what this engine cannot do for the model."""
    check_decoders(config, device, HEADS_ON_GPU)
    check_context(config.model.context_tokens, spec.max_positions)


def open_codec(snapshot: Path) -> QwenCodec:
    """Return the tokenizer and the form of conversations."""
    return QwenCodec(snapshot)


def expert_layout(spec: QwenSpec, files: EngineFiles) -> PackedLayout:
    """Return where the experts are: in the pack."""
    del spec  # the pack has its own header
    assert files.pack is not None, "the repack stage makes it"
    return open_pack(files.pack)


def model_sizes(
    spec: QwenSpec, files: EngineFiles, layout: PackedLayout, config: RunConfig, dtype: torch.dtype
) -> ModelSizes:
    """Return what the memory plan needs to know."""
    assert files.residents is not None, "the residents stage makes it"
    header = read_header(files.residents / RESIDENTS_NAME)
    kept = {name: (info.dtype, info.shape) for name, info in header.items()}
    sizes = _sizes(spec, kept, layout.record_nbytes, config, dtype)
    if not config.drafts.enabled:
        return sizes
    from runtime.models.qwen_drafts import MtpNbytes, mtp_depth, mtp_nbytes

    checkpoint = Checkpoint.open(files.snapshot)
    block = mtp_depth(checkpoint)
    # the recurrent state after each row of a pass
    num_delta = spec.num_layers - sum(spec.is_attention)
    rows = most_rows(config.drafts, block)
    rows_nbytes = rows * num_delta * _delta_nbytes(spec, dtype.itemsize)
    if resolve_device(config.hw.device).type == "cuda":
        rows_nbytes += rows * ROW_NBYTES
    head = MtpNbytes(0, 0, 0)
    if has_heads(config.drafts, block):
        head = mtp_nbytes(checkpoint, spec, config, dtype)
    return dataclasses.replace(
        sizes,
        residents_nbytes=sizes.residents_nbytes + head.weights,
        embedding_nbytes=sizes.embedding_nbytes + head.expert_rows,
        state_nbytes=sizes.state_nbytes + rows_nbytes + head.state,
    )


def planned_sizes(
    spec: QwenSpec, config: RunConfig, dtype: torch.dtype, has_gpu: bool
) -> ModelSizes:
    """Return the same from the configuration alone, before any file is made.  has_gpu: all the same here."""
    del has_gpu
    kept = spec.kept_shapes(config.model.deltanet is Deltanet.fp8_rows)
    record_nbytes = Nvfp4Shape(spec.hidden, spec.intermediate).record_nbytes
    return _sizes(spec, kept, record_nbytes, config, dtype)


def _sizes(
    spec: QwenSpec,
    kept: Mapping[str, tuple[str, tuple[int, ...]]],
    record_nbytes: int,
    config: RunConfig,
    dtype: torch.dtype,
) -> ModelSizes:
    """kept: tensor of the residents file -> (dtype, shape)."""
    size = dtype.itemsize
    nbytes = {
        name: math.prod(shape) * (_kept_dtype(name, kind) or dtype).itemsize
        for name, (kind, shape) in kept.items()
    }
    embedding_nbytes = nbytes.pop(EMBEDDING)
    # what is kept in another form beside the tensors of the file: gains in fp32
    gains_nbytes = 4 * spec.streams * spec.hidden * (2 * spec.num_layers + 4)
    context = -(-config.model.context_tokens // spec.block_tokens) * spec.block_tokens
    num_attention = sum(spec.is_attention)
    token = 2 * spec.kv_heads * spec.head_dim + spec.index_dim / spec.block_tokens
    num_delta = spec.num_layers - num_attention
    state = num_attention * token * size * context + num_delta * _delta_nbytes(spec, size)
    return ModelSizes(
        residents_nbytes=sum(nbytes.values()) + gains_nbytes,
        embedding_nbytes=embedding_nbytes,
        state_nbytes=int(state),
        scratch=_scratch(spec, context, size),
        record_nbytes=record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
    )


def _delta_nbytes(spec: QwenSpec, size: int) -> int:
    """Return the bytes of a DeltaNet layer's memory and window.  size: bytes of a number of the compute dtype."""
    memory = 4 * spec.value_heads * spec.key_dim * spec.value_dim
    return memory + size * (spec.conv_kernel - 1) * spec.conv_width


def _scratch(spec: QwenSpec, context: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return what computing holds beside weights and state, as `ModelSizes.scratch` wants it.

    One line for each of a prompt's moments that may be the fullest: a chunk in a DeltaNet layer's first product (its
    matrix widened from FP8, the product in fp32 and rounded), a chunk in attention, the experts' sums of all tokens.
    """
    always = WORKSPACE_NBYTES + 4 * spec.vocab_size + 8 * context * spec.rotary_dim
    every = size * (spec.streams + 1) * (spec.hidden + 1) + 4 * spec.rotary_dim
    width = spec.conv_width + spec.value_width
    read = size * (spec.streams + 2) * spec.hidden  # of the streams, for each token of a chunk
    delta = size * width * spec.hidden + CHUNK_TOKENS * ((4 + size) * width + read)
    heads = 6 * spec.heads * spec.head_dim
    attention = ATTENTION_NBYTES + CHUNK_TOKENS * (size * heads + read)
    chosen = 40 * spec.top_k
    pairs = 4 * MAX_PAIRS * (spec.intermediate + spec.hidden)
    sums = every + 4 * spec.hidden + chosen
    shared = sums + size * (spec.hidden + 2 * spec.shared_intermediate)
    return (
        (always + delta, every),
        (always + attention, every),
        (always + pairs, sums),
        (always, shared),
    )


def open_model(
    spec: QwenSpec,
    files: EngineFiles,
    layout: PackedLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> QwenModel | HeadedModel:
    """Load the residents and open the n-gram table."""
    del layout  # a packed record holds its payload from the first byte
    assert files.residents is not None, "the residents stage makes it"
    assert files.pack is not None, "the repack stage makes it"
    weights = load_residents(files.residents / RESIDENTS_NAME, device, dtype)
    tables = json.loads((files.residents / TABLES_NAME).read_text())
    table, table_scale = table_from_json(tables, files.snapshot)
    name = f"layers.{spec.ple_layer}.ple.ple_embedding."
    last_row = int(
        (weights[f"{name}ngram_heads_offsets"] + weights[f"{name}ngram_heads_vocab_sizes"]).max()
    )
    if last_row > table.num_rows:
        raise UserError(
            f"the n-gram table has {table.num_rows:,} rows, the checkpoint's constants reach row {last_row:,}",
            "the snapshot mixes two releases: fetch it again",
        )
    reader = DirectReader(sorted({part.file for part in table.parts}), config.hw.drive)
    limit_s = config.hw.token_limit_s if device.type == "cuda" else None
    rows = RowReader(table, reader, config.cache.table_rows, limit_s)
    scalars = read_pack_scalars(files.pack, spec)
    scales = torch.tensor(scalars).view(spec.num_layers, spec.num_experts, -1)[..., :3].contiguous()
    prefetch = config.prefetch
    # a few candidates more than are read or copied: some will be there already
    guesses = max(spec.top_k, prefetch.copy) if prefetch.experts or prefetch.copy else 0
    model = QwenModel(spec, weights, scales.to(device), experts, rows, table_scale, guesses)
    checkpoint = None  # of the draft head
    if config.drafts.enabled:
        from runtime.models.qwen_drafts import mtp_depth, with_mtp

        opened = Checkpoint.open(files.snapshot)
        if has_heads(config.drafts, mtp_depth(opened)):
            checkpoint, model.keeps_streams = opened, True
    if device.type == "cuda":
        context = config.model.context_tokens
        cpu = _open_cpu(spec, config.hw.cpu_experts, experts, scales, device, dtype)
        if limit_s is not None:
            model.decoder = TokenDecoder(model, context, limit_s)
        else:
            make = partial(Decoder, model, context, config.hw.has_graphs)
            model.decoder = open_lanes(partial(make, cpu=cpu), config.serve.max_batch)
            if config.drafts.enabled:
                model.decoded_rows = open_rows(make, model.decoder, config.drafts, experts)
    return model if checkpoint is None else with_mtp(model, checkpoint, config, dtype)


def _open_cpu(
    spec: QwenSpec,
    wanted: str,
    experts: ExpertSource,
    scales: Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[CpuShare, Nvfp4Compute] | None:
    """Let the CPU compute a share of the experts in RAM, where that was asked for and helps.

    scales: [L, E, 3] fp32, in RAM.
    """
    if not isinstance(experts, SlotExperts) or experts.workers is None:
        return None
    from kernels.nvfp4_expert import nvfp4_experts

    compute = Nvfp4Compute(
        scales, spec.top_k, spec.hidden, spec.intermediate, dtype, device, compiled_kernels()
    )
    x = torch.zeros(1, spec.hidden, dtype=dtype, device=device)
    rows, inner, ones = (
        torch.ones(spec.top_k, width, device=device)
        for width in (spec.hidden, spec.intermediate, 3)
    )

    def in_place(records: Sequence[Tensor]) -> None:
        table = torch.tensor([record.data_ptr() for record in records], device=device)
        nvfp4_experts(x, table, ones, inner[: len(table)], rows[: len(table)])

    share = open_share(wanted, experts, compute, rows, in_place)
    return None if share is None else (share, compute)


# tensors of one layer that a decode step reads as one matrix: they are loaded one behind the other
_JOINED = (
    ("attn_hyper_connection.input_mix_weight_down.weight", "attn_hyper_connection.block_inject_weight.weight"),
    ("mlp_hyper_connection.input_mix_weight_down.weight", "mlp_hyper_connection.block_inject_weight.weight"),
    ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    ("linear_attn.in_proj_qkv.weight_scale", "linear_attn.in_proj_z.weight_scale"),
    ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
     "self_attn.indexer.index_qk_proj.weight"),
)  # fmt: skip


def load_residents(file: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Load the residents file: floats in the compute dtype, FP8 rows, their scales and integers as they are.

    The embedding table stays in RAM. Tensors that are read together lie one behind the other.
    """
    header = read_header(file)
    weights: dict[str, Tensor] = {}
    for name, info in header.items():
        if name in weights:
            continue
        group = next((g for g in _JOINED if name.endswith(g[0])), None)
        names = [name] if group is None else [name.removesuffix(group[0]) + tail for tail in group]
        rows = [math.prod(header[part].shape[:1]) for part in names]
        memory = torch.empty(
            sum(rows),
            *info.shape[1:],
            dtype=_kept_dtype(name, info.dtype) or dtype,
            device="cpu" if name == EMBEDDING else device,
        )
        for part, target in zip(names, memory.split(rows), strict=True):
            found = header[part]
            raw = read_extent(found.extent)
            weights[part] = target.view(found.shape)
            weights[part].copy_(bytes_to_tensor(raw, found.dtype, found.shape))
    return weights


def _kept_dtype(name: str, dtype: str) -> torch.dtype | None:
    """Return the torch dtype of a tensor that is kept as it is stored; None: it becomes the compute dtype."""
    is_kept = dtype in ("F8_E4M3", "I64") or name.endswith(".weight_scale")
    return torch_dtype(dtype) if is_kept else None
