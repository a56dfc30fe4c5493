"""DeepSeek-V4.1-Flash as a family: what `Engine.open` asks of it, and `plan` before any file is there.

Owns what is refused, the sizes that the memory plan needs, and how a model is put together from a snapshot's files. Who
computes is `deepseek_model` (native) or `deepseek_reference` (the release's own code).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conf.schema import Arithmetic, Head, Replay, RunConfig
from kernels.formats import MX_GROUP
from runtime import cores, hardware
from runtime.budget import ModelSizes
from runtime.checkpoint import Checkpoint, torch_dtype
from runtime.drafts.opening import ROW_NBYTES, check_decoders, has_heads, most_rows, open_rows
from runtime.errors import UserError
from runtime.experts.arena import HostArena
from runtime.experts.cpu_share import CpuShare, Workers, open_share
from runtime.experts.layout import ExpertKey
from runtime.experts.shard_layout import ShardLayout
from runtime.experts.slots import SlotExperts
from runtime.experts.source import ExpertSource
from runtime.models.buffers import check_context
from runtime.models.cpu_experts import Mxfp4Compute, compiled_kernels
from runtime.models.deepseek_backends import resolve_arithmetic
from runtime.models.deepseek_codec import open_codec as open_codec  # the family's
from runtime.models.deepseek_engram import EngramHash, build_token_map, read_engram_tables
from runtime.models.deepseek_matrices import Matrices, expert_matrices
from runtime.models.deepseek_model import HEAD_ROWS, SCORES_AT_ONCE, DeepseekModel
from runtime.models.deepseek_moe import CHUNK_TOKENS
from runtime.models.deepseek_rows import EngramReader
from runtime.models.deepseek_weights import DeepseekSpec, resident_shapes
from runtime.models.deepseek_weights import expert_layout as find_experts
from runtime.models.head_split import HeadSplit
from runtime.models.lanes import open_lanes
from runtime.units import PAGE_NBYTES, align_up

if TYPE_CHECKING:
    from runtime.drafts.heads import HeadedModel
    from runtime.engine import EngineFiles
    from runtime.models.deepseek_reference import ReferenceModel

log = logging.getLogger(__name__)


# ---- what Engine.open asks of a family -----------------------------------------------------------------------------

# experts in RAM are copied to VRAM first: 51 GB/s on an H200, where reading them off any alignment gives 29
READS_IN_PLACE = False
IS_DENSE = False
HAS_TOKEN_GRAPH = True  # hw.graphs=token
HEADS_ON_GPU = False  # a checkpoint's draft heads


def read_spec(snapshot: Path) -> DeepseekSpec:
    """Read and check a snapshot's config.json."""
    return DeepseekSpec.from_config(json.loads((snapshot / "config.json").read_text()))


def check_support(spec: DeepseekSpec, config: RunConfig, device: torch.device) -> None:
    """Refuse what this engine cannot do for the model."""
    check_decoders(config, device, HEADS_ON_GPU)
    if device.type != "cpu" and config.deepseek.replay is not Replay.exact:
        raise UserError(
            "deepseek.replay=bounded runs on the CPU only so far", "leave out deepseek.replay"
        )
    if device.type == "cpu" and config.deepseek.head is not Head.gpu:
        raise UserError(
            f"deepseek.head={config.deepseek.head.value} relieves a GPU of the head, and none is in use",
            "leave out deepseek.head",
        )
    check_context(config.model.context_tokens, spec.max_positions)
    if config.drafts.enabled and (config.drafts.depth or 0) >= spec.window:
        raise UserError(
            f"drafts.depth is {config.drafts.depth}, rows can be taken back from this model's windows of "
            f"{spec.window} positions only",
            f"set drafts.depth={spec.window - 1} or less",
        )
    if uses_heads(spec, config) and config.deepseek.replay is not Replay.exact:
        raise UserError(
            "draft heads are seeded from every token of a prompt, with deepseek.replay=bounded most are not there",
            "leave out deepseek.replay, or set drafts.source=lookup",
        )


def uses_heads(spec: DeepseekSpec, config: RunConfig) -> bool:
    """Return whether the checkpoint's draft heads are used. Raises UserError for heads that are not there."""
    return has_heads(config.drafts, spec.dspark_block if spec.num_drafts else 0)


def expert_layout(spec: DeepseekSpec, files: EngineFiles) -> ShardLayout:
    """Return where the experts are: in the released shards, as they are."""
    return find_experts(Checkpoint.open(files.snapshot), spec)


def model_sizes(
    spec: DeepseekSpec,
    files: EngineFiles,
    layout: ShardLayout,
    config: RunConfig,
    dtype: torch.dtype,
) -> ModelSizes:
    """Return what the memory plan needs to know: weights are widened to fp32 for a CPU, experts one at a time.

    A GPU has them as they are stored.
    """
    del dtype  # the arithmetic has its own
    if resolve_arithmetic(config, files.published is not None) is Arithmetic.reference:
        from runtime.models import deepseek_reference

        if config.serve.max_batch > 1:
            raise UserError(
                "deepseek.arithmetic=reference decodes one conversation at a time",
                "leave out serve.max_batch, or set deepseek.arithmetic=native",
            )
        return deepseek_reference.model_sizes(spec, layout, config)
    drafts = 0
    if uses_heads(spec, config):
        from runtime.models.deepseek_drafts import drafts_nbytes

        drafts = drafts_nbytes(Checkpoint.open(files.snapshot), spec, config.drafts)
    has_gpu = hardware.resolve_device(config.hw.device).type == "cuda"
    return _sizes(spec, layout.record_nbytes, config, has_gpu, drafts)


def planned_sizes(
    spec: DeepseekSpec, config: RunConfig, dtype: torch.dtype, has_gpu: bool
) -> ModelSizes:
    """Return the same from the configuration alone, without drafts: each run of an expert takes a page more."""
    del dtype
    shape = spec.expert_shape
    runs = (3 * shape.codes_nbytes, 3 * shape.scales_nbytes)
    record_nbytes = sum(align_up(nbytes) + PAGE_NBYTES for nbytes in runs)
    return _sizes(spec, record_nbytes, config, has_gpu, 0)


def _sizes(
    spec: DeepseekSpec, record_nbytes: int, config: RunConfig, has_gpu: bool, drafts: int
) -> ModelSizes:
    nbytes = {
        name: math.prod(shape) * (torch_dtype(dtype).itemsize if has_gpu else 4)
        for name, (dtype, shape) in resident_shapes(spec).items()
    }
    tokens = config.model.context_tokens
    entries = sum(tokens // spec.compress_ratios[layer] for layer in spec.kv_sources)
    state = 2 * spec.num_layers * spec.window * spec.head_dim
    state += 2 * entries * (spec.head_dim + spec.index_dim)
    if has_gpu and config.drafts.enabled:
        state += most_rows(config.drafts, 0) * ROW_NBYTES
    embedding = nbytes.pop("embed.weight") // (1 if has_gpu else 2)
    head = nbytes.pop("head.weight") if has_gpu else 0  # read in place
    return ModelSizes(
        residents_nbytes=sum(nbytes.values()) + drafts,
        embedding_nbytes=embedding + head,
        host_read_nbytes=head,
        state_nbytes=state,
        scratch=_scratch(spec, tokens),
        record_nbytes=record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
    )


# of libraries and captured graphs, and what the allocator cannot hand out again
WORKSPACE_NBYTES = 160 * 2**20


def _scratch(spec: DeepseekSpec, context: int) -> tuple[tuple[int, int], ...]:
    """Return what computing on a GPU holds beside weights and state, as `ModelSizes.scratch` wants it.

    One line for a chunk in attention, with its index scores, and one for the experts' sums of all tokens.
    """
    d, streams = spec.hidden, spec.streams
    always = WORKSPACE_NBYTES + 16 * context * spec.rope_dim
    every = 2 * streams * d + 2 * d + 4 * (2 * streams + streams**2) + 12 * spec.index_topk
    mixing = CHUNK_TOKENS * 8 * (streams + 1) * streams * d
    heads = CHUNK_TOKENS * spec.heads * spec.head_dim
    attention = 18 * heads + CHUNK_TOKENS * 64 * 6 * spec.head_dim + 14 * SCORES_AT_ONCE
    attention += CHUNK_TOKENS * 30 * context
    return (
        (always + max(mixing, attention), every),
        (always + 2 * HEAD_ROWS * 3 * d, every + 4 * d + 8 * d + 4 * spec.intermediate),
    )


def _model_class(spec: DeepseekSpec, config: RunConfig) -> type[DeepseekModel]:
    """Return what takes prompts in as the config says; say once when that is not exact."""
    if config.deepseek.replay is Replay.exact:
        return DeepseekModel
    from runtime.models import deepseek_replay

    log.warning("%s", deepseek_replay.describe(spec))
    return deepseek_replay.BoundedModel


def open_model(
    spec: DeepseekSpec,
    files: EngineFiles,
    layout: ShardLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
    dtype: torch.dtype,
) -> DeepseekModel | HeadedModel | ReferenceModel:
    """Load the residents from the released shards and open the Engram tables."""
    del dtype
    if resolve_arithmetic(config, files.published is not None) is Arithmetic.reference:
        from runtime.models import deepseek_reference

        if config.hw.token_limit_s is not None and device.type == "cuda":
            raise UserError(
                "hw.graphs=token is not made for deepseek.arithmetic=reference, whose steps are no graphs",
                "leave out hw.graphs",
            )
        return deepseek_reference.open_model(spec, files, layout, experts, config, device)
    checkpoint = Checkpoint.open(files.snapshot)
    weights = {
        name: checkpoint.load(name).to("cpu" if name in IN_RAM else device)
        for name in resident_shapes(spec)
    }
    arena = None
    if device.type == "cuda":
        weights["head.weight"], arena = _in_pinned_memory(weights["head.weight"])
    hashes = EngramHash(spec, build_token_map(files.snapshot / "tokenizer.json"))
    tables = read_engram_tables(checkpoint, spec)
    limit_s = config.hw.token_limit_s if device.type == "cuda" else None
    rows = EngramReader(
        spec.engram_layers,
        tables,
        config.hw.drive,
        config.cache.table_rows,
        max(config.serve.max_batch, most_rows(config.drafts, 0) if config.drafts.enabled else 1),
        limit_s,
    )

    def engram_rows(layer: int, ids: Sequence[int]) -> Tensor:
        return rows.collect(layer, len(ids) // spec.engram_columns, ids)

    prefetch = config.prefetch
    has_guesses = prefetch.experts or (prefetch.copy and device.type == "cuda")
    guesses = max(spec.top_k, prefetch.copy) if has_guesses else 0
    tokens = config.model.context_tokens
    open_expert = partial(open_record, layout)
    parts = (spec, weights, experts, open_expert, engram_rows, hashes.row_ids, tokens, guesses)
    if uses_heads(spec, config):
        from runtime.models.deepseek_drafts import TappedModel, with_drafts

        tapped = TappedModel(*parts)
        tapped.rows = rows
        return with_drafts(tapped, checkpoint, config, lambda drafts: partial(open_record, drafts))
    model = _model_class(spec, config)(*parts)
    model.rows, model.pinned = rows, arena
    if device.type == "cuda":
        from runtime.models.deepseek_decode import Decoder
        from runtime.models.deepseek_whole import TokenDecoder

        cpu = _open_cpu(spec, config.hw.cpu_experts, experts, layout, device)
        workers = experts.workers if isinstance(experts, SlotExperts) else None
        model.head_split = _open_head(model, config, workers)
        if limit_s is not None:
            model.decoder = TokenDecoder(model, layout, limit_s)
        else:
            make = partial(Decoder, model, layout, config.hw.has_graphs)
            model.decoder = open_lanes(partial(make, cpu=cpu), config.serve.max_batch)
            if config.drafts.enabled:
                model.decoded_rows = open_rows(make, model.decoder, config.drafts, experts)
    return model


def _open_head(
    model: DeepseekModel, config: RunConfig, workers: Workers | None
) -> HeadSplit | None:
    """Return who computes the head beside the GPU, None for nobody.  workers: who computes experts, where they do."""
    wanted = config.deepseek
    if wanted.head is Head.gpu:
        return None
    from kernels.deepseek_linear import steady_linear

    def product(x: Tensor, rows: Tensor, out: Tensor) -> None:
        steady_linear(x, rows, out, is_double=False)

    threads = hardware.compute_threads(config.hw.compute_threads)
    with cores.pinned(workers.cpus) if workers and workers.cpus else nullcontext():
        return HeadSplit.open(
            model.head, product, model.device, wanted.head, wanted.head_share, threads
        )


def _open_cpu(
    spec: DeepseekSpec,
    wanted: str,
    experts: ExpertSource,
    layout: ShardLayout,
    device: torch.device,
) -> tuple[CpuShare, Mxfp4Compute] | None:
    """Let the CPU compute a share of the experts in RAM, where that was asked for and helps."""
    if not isinstance(experts, SlotExperts) or experts.workers is None:
        return None
    compute = Mxfp4Compute(
        spec.top_k, spec.hidden, spec.intermediate, spec.swiglu_limit, device, layout.payload_offsets,
        partial(open_record, layout), compiled_kernels(),
    )  # fmt: skip
    rows = torch.zeros(spec.top_k, spec.hidden, dtype=torch.bfloat16, device=device)
    share = open_share(wanted, experts, compute, rows, experts.rehearse)
    return None if share is None else (share, compute)


def _in_pinned_memory(weight: Tensor) -> tuple[Tensor, HostArena]:
    """Return a copy that the GPU can read in place, and the memory that it lies in."""
    arena = HostArena(1, weight.nbytes)
    arena.pin()
    copy = arena.records[0][: weight.nbytes].view(weight.dtype).view(weight.shape)
    return copy.copy_(weight), arena


IN_RAM = ("embed.weight", "head.weight")  # also with a GPU


def open_record(layout: ShardLayout, key: ExpertKey, record: Tensor) -> Matrices:
    """Cut a record of released shards into its tensors; dequantise them on a CPU."""
    weights_at, scales_at = layout.payload_offsets(key)
    codes, scales = [], []
    for height, width in layout.shape.matrices().values():
        code_nbytes, scale_nbytes = height * width // 2, height * width // MX_GROUP
        codes.append(record[weights_at : weights_at + code_nbytes].view(height, -1))
        scales.append(record[scales_at : scales_at + scale_nbytes].view(height, -1))
        weights_at, scales_at = weights_at + code_nbytes, scales_at + scale_nbytes
    if record.is_cuda:
        from kernels.deepseek_prompt import Fp4Weight

        gate, down, up = (Fp4Weight(c, s) for c, s in zip(codes, scales, strict=True))
        return gate, up, down
    return expert_matrices(codes, scales)
