"""DeepSeek-V4.1-Flash computed by its own published code; only where weights come from is replaced.

Its Transformer is built with the classes of `deepseek_replaced`, so that nothing large is allocated. Everything else is
loaded into the parameters as the published converter would, and the published `forward` computes. It takes several
tokens at the start of a conversation only; later ones go one by one.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from conf.schema import Kernels, RunConfig
from runtime import hardware
from runtime.budget import ModelSizes
from runtime.checkpoint import Checkpoint, torch_dtype
from runtime.errors import UserError
from runtime.experts.arena import HostArena
from runtime.experts.layout import ExpertKey
from runtime.experts.shard_layout import ShardLayout
from runtime.experts.source import ExpertSource
from runtime.models import deepseek_backends as backends
from runtime.models.deepseek_engram import read_engram_tables
from runtime.models.deepseek_package import Package, load_package
from runtime.models.deepseek_probe import Finding, probe
from runtime.models.deepseek_replaced import (
    HEAD_ROWS,
    KeptWeight,
    Parts,
    StreamedMoE,
    expert_views,
    plain_torch,
    replace_classes,
    torch_as,
)
from runtime.models.deepseek_rows import EngramReader
from runtime.models.deepseek_weights import DeepseekSpec, resident_shapes

if TYPE_CHECKING:
    from runtime.engine import EngineFiles

log = logging.getLogger(__name__)

# last part of a buffer's name -> whether its rows are positions (or groups of them), of which the first count
STATE_BUFFERS = {
    "window_kv_cache": False,
    "kv_state": False,
    "score_state": False,
    "compress_kv_cache": True,
    "k_cache": True,
    "cache": True,
}


# ---- building and loading -------------------------------------------------------------------------------------------


class FastTokenizer:
    """What the published code asks of a tokenizer, for its map of token classes."""

    def __init__(self, file: Path) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(file))

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def convert_ids_to_tokens(self, token: int) -> str:
        """Return a token's name in the vocabulary."""
        return str(self.backend_tokenizer.id_to_token(token))


def model_args(package: Package, config_file: Path, context_tokens: int) -> Any:
    """Return the published ModelArgs of one conversation: text, without drafts, greedy.

    Raises UserError when the file asks for what the published code does not know.
    """
    given: dict[str, Any] = json.loads(config_file.read_text())
    known = {field.name for field in fields(package.model.ModelArgs)}
    given |= {
        "max_batch_size": 1,
        "max_seq_len": context_tokens + context_tokens % 2,
        "temperature": 0,
    }
    left_out = {"dspark_block_size": 0, "vision_n_layers": 0, "dspark_target_layer_ids": ()}
    given |= {name: value for name, value in left_out.items() if name in known}
    strangers = sorted(given.keys() - known)
    if strangers:
        raise UserError(
            f"{config_file} has keys that the published code does not know: {', '.join(strangers)}",
            "fetch the folder inference of one revision, whole",
        )
    return package.model.ModelArgs(**given)


def load_parameters(model: Any, checkpoint: Checkpoint, spec: DeepseekSpec) -> None:
    """Copy the checkpoint into the model as the published converter would.

    Raises UserError when a parameter has no tensor, when shapes differ, or when a tensor of the text model found no
    place.
    """
    loaded = set()

    def load(name: str, target: Tensor) -> None:
        if name not in checkpoint.tensors:
            raise UserError(
                f"the published code has a parameter {name}, and the checkpoint no tensor of that name",
                "code and weights are of different revisions: fetch both again",
            )
        tensor = checkpoint.load(name)
        if tensor.dtype == torch.int8:
            tensor = tensor.view(target.dtype)
        if tensor.shape != target.shape:
            raise UserError(
                f"{name} is {tuple(target.shape)} in the published code and {tuple(tensor.shape)} in the checkpoint",
                "code and weights are of different revisions: fetch both again",
            )
        target.copy_(tensor)
        loaded.add(name)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            load(name, parameter)
        for name, module in model.named_modules():
            if isinstance(module, KeptWeight):
                load(f"{name}.weight", module.values)
                load(f"{name}.scale", module.scale)
    for name, module in model.named_modules():
        weight, scale = getattr(module, "weight", None), getattr(module, "scale", None)
        attached = getattr(weight, "scale", None)
        if scale is not None and not isinstance(module, KeptWeight):
            assert attached is not None, f"{name}: the weight has lost its scale"
            assert attached.data_ptr() == scale.data_ptr(), f"{name}: the weight has another scale"
    left = resident_shapes(spec).keys() - loaded - {"embed.weight", "head.weight"}
    if left:
        raise UserError(
            f"{len(left)} tensors found no parameter in the published code, {sorted(left)[0]} among them",
            "code and weights are of different revisions: fetch both again",
        )


def build(parts: Parts, args: Any, tokenizer: FastTokenizer) -> Any:
    """Build the published Transformer on the device, of the replaced classes; parameters are not loaded yet."""
    with torch_as(torch.bfloat16, parts.device):
        model = parts.package.model.Transformer(args, tokenizer)
    model.eval()
    model.requires_grad_(False)
    for layer, block in enumerate(model.layers):
        if block.engram is not None:
            block.engram.embed.layer = layer
    return model


# ---- one conversation -----------------------------------------------------------------------------------------------


class ReferenceState:
    """One conversation. Its buffers are the model's while it computes, and its own copies otherwise."""

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self.position = 0
        self.kept: dict[str, Tensor] | None = None  # None: empty, or the model has it

    def tensors(self) -> dict[str, Tensor]:
        """Return a copy of everything that decides the next tokens, as flat tensors in RAM."""
        if self._model.has(self):
            return self._model.collect(self.position)
        kept = self.kept if self.kept is not None else self._model.empty()
        return {name: tensor.clone() for name, tensor in kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the conversation that `tensors` was copied from."""
        self._model.release(self)
        self.position = int(tensors["position"])
        self.kept = {name: tensor.clone() for name, tensor in tensors.items()}


class ReferenceModel:
    """The published Transformer behind this project's `prefill` and `decode`. One conversation computes at a time."""

    def __init__(
        self,
        spec: DeepseekSpec,
        parts: Parts,
        transformer: Any,
        max_seq_len: int,
        fix_index_keys: bool,
        num_guesses: int,
    ) -> None:
        """fix_index_keys: indexers read their own source's keys at every position."""
        self.spec, self.parts, self.transformer = spec, parts, transformer
        self.device, self.fix_index_keys = parts.device, fix_index_keys
        self.arena: HostArena | None = None  # the head's memory, with a GPU
        self._after_layer: Callable[[], None] = lambda: None
        self._max_seq_len = max_seq_len
        self._bound: weakref.ref[ReferenceState] | None = None
        self._buffers = {
            name: buffer
            for name, buffer in transformer.named_buffers()
            if name.rpartition(".")[2] in STATE_BUFFERS
        }
        for name, buffer in self._buffers.items():
            if buffer.is_floating_point() and not name.endswith("_state"):
                assert buffer.dtype == torch.bfloat16, f"{name} is {buffer.dtype}"
        self._keys = sorted(name for name in self._buffers if name.endswith(".k_cache"))
        blocks = list(transformer.layers)
        for block in blocks:
            block.register_forward_hook(lambda *_: self._after_layer())
            indexer: Any = getattr(block.attn, "indexer", None)
            if fix_index_keys and hasattr(indexer, "k_cache"):
                indexer.register_forward_pre_hook(self._own_keys, with_kwargs=True)
        for block, after in itertools.pairwise(blocks):
            if num_guesses:
                gains = (block.ffn_norm.weight, after.ffn_norm.weight)
                block.ffn.expect(after.ffn, *gains)
        transformer.engram_hash.register_forward_hook(lambda _m, _a, ids: parts.request_rows(ids))
        weights = (*transformer.parameters(), *_kept_tensors(transformer))
        self.dense_nbytes = sum(weight.nbytes for weight in weights)
        if self.device.type == "cpu":  # a GPU gets experts and head over PCIe
            experts = spec.num_layers * spec.top_k * spec.expert_shape.payload_nbytes
            self.dense_nbytes += transformer.head.weight.nbytes + experts

    @property
    def experts(self) -> ExpertSource:
        return self.parts.experts

    @experts.setter
    def experts(self, source: ExpertSource) -> None:
        self.parts.experts = source

    @property
    def rows(self) -> EngramReader:
        return self.parts.rows

    @property
    def device_wait_ns(self) -> int:
        """Nanoseconds that the host has waited for the GPU's routes so far."""
        return self.parts.wait_ns if self.device.type == "cuda" else 0

    def new_state(self) -> ReferenceState:
        """Return the state of an empty conversation."""
        return ReferenceState(self)

    def prefill(
        self,
        tokens: Sequence[int],
        state: ReferenceState,
        all_logits: bool = False,
        after_layer: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Take in several tokens: fp32 logits [1, vocab] of the last, or [T, vocab] of all.

        At once at the start of a conversation, one by one later: the published code knows nothing else.  after_layer:
        called after each layer; what it raises leaves the state half-way.
        """
        if state.position == 0:
            return self._forward(list(tokens), state, all_logits, after_layer)
        rows = [self._forward([token], state, False, after_layer) for token in tokens]
        return torch.cat(rows) if all_logits else rows[-1]

    def decode(self, token: int, state: ReferenceState) -> Tensor:
        """Take in one token: fp32 logits [1, vocab]."""
        return self._forward([token], state, all_logits=False, after_layer=lambda: None)

    @torch.inference_mode()
    def _forward(
        self,
        tokens: list[int],
        state: ReferenceState,
        all_logits: bool,
        after_layer: Callable[[], None],
    ) -> Tensor:
        self._bind(state)
        self.parts.every_logits, self._after_layer = all_logits, after_layer
        with torch_as(torch.bfloat16, self.device):
            ids = torch.tensor([tokens], dtype=torch.int64)
            self.transformer(ids, state.position)
        logits, self.parts.logits = self.parts.logits, None
        assert logits is not None
        state.position += len(tokens)
        wanted = len(tokens) if all_logits else 1
        assert logits.shape[1] >= wanted, "the published code hands its head the last position only"
        return logits[0, -wanted:]

    def expert_output(self, layer: int, expert: int, rows: Tensor, weights: Tensor) -> Tensor:
        """Return what the published Expert makes of rows [n, d] bf16 and weights [n, 1] fp32: [n, d] bf16."""
        moe: StreamedMoE = self.transformer.layers[layer].ffn
        with torch.inference_mode(), torch_as(torch.bfloat16, self.device):
            with plain_torch():
                ((_, record),) = self.experts.fetch(layer, [expert])
            return moe.run_expert(expert, record, rows.to(self.device), weights.to(self.device))

    def probe_kernels(self, kernel: Any) -> list[Finding]:
        """Compare kernels with plain torch on this checkpoint's weights: an FP8 one of layer 0, and an expert's."""
        first = self.transformer.layers[0]
        wq_a = first.attn.wq_a.weight
        with torch.inference_mode(), torch_as(torch.bfloat16, self.device):
            with plain_torch():
                ((_, record),) = self.experts.fetch(0, [0])
            matrices = expert_views(self.parts.layout, ExpertKey(0, 0), record, self.device)
            return list(probe(kernel, (wq_a, wq_a.scale), matrices["w1"], self.device))

    # ---- who computes -----------------------------------------------------------------------------------------

    def has(self, state: ReferenceState) -> bool:
        """Say whether the buffers hold this conversation."""
        return self._bound is not None and self._bound() is state

    def release(self, state: ReferenceState) -> None:
        """Let go of a conversation without keeping it."""
        if self.has(state):
            self._bound = None

    def _bind(self, state: ReferenceState) -> None:
        if self.has(state):
            return
        last = None if self._bound is None else self._bound()
        if last is not None:
            last.kept = self.collect(last.position)
        tensors = state.kept if state.kept is not None else self.empty()
        for name, buffer in self._buffers.items():
            buffer.zero_()
            kept = tensors[name]
            buffer[:, : kept.shape[1]] = kept.to(self.device)
        shared = self.parts.package.model.shared_attn
        for slot in vars(shared):
            setattr(shared, slot, None)
        which, rows = tensors["index_k"].tolist()
        if which >= 0:
            shared.index_k = self._buffers[self._keys[which]][:, :rows]
        state.kept, self._bound = None, weakref.ref(state)

    def collect(self, position: int) -> dict[str, Tensor]:
        """Return copies in RAM of what the buffers hold after `position` tokens."""
        out = {"position": torch.tensor([position])}
        for name, buffer in self._buffers.items():
            rows = buffer.shape[1]
            if STATE_BUFFERS[name.rpartition(".")[2]]:
                rows = position // (self._max_seq_len // rows)
            out[name] = buffer[:, :rows].to("cpu", copy=True)
        out["index_k"] = torch.tensor(self._published_keys())
        return out

    def empty(self) -> dict[str, Tensor]:
        """Return what `collect` gives of a conversation without tokens."""
        out = {"position": torch.zeros(1, dtype=torch.int64), "index_k": torch.tensor([-1, 0])}
        for name, buffer in self._buffers.items():
            is_list = STATE_BUFFERS[name.rpartition(".")[2]]
            shape = (buffer.shape[0], 0 if is_list else buffer.shape[1], *buffer.shape[2:])
            out[name] = torch.zeros(shape, dtype=buffer.dtype)
        return out

    def _published_keys(self) -> tuple[int, int]:
        """Return whose index keys were published last, and how many: the next step may read them."""
        keys = self.parts.package.model.shared_attn.index_k
        if keys is None:
            return -1, 0
        places = {self._buffers[name].data_ptr(): i for i, name in enumerate(self._keys)}
        return places[keys.data_ptr()], keys.shape[1]

    def _own_keys(self, indexer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a source's indexer runs without new entries: publish its own keys, not what was left over."""
        given = dict(zip(("x", "qr", "latent", "start_pos", "offset"), args, strict=False)) | kwargs
        ratio = self._max_seq_len // indexer.k_cache.shape[1]
        count = (given["start_pos"] + given["x"].shape[1]) // ratio
        if given["latent"] is None and count:
            self.parts.package.model.shared_attn.index_k = indexer.k_cache[:, :count]

    def close(self) -> None:
        """Close the tables' files, give pinned memory back, forget the published modules."""
        self.parts.rows.close()
        if self.arena is not None:
            self.arena.close()
        self.parts.package.close()


def _kept_tensors(transformer: Any) -> list[Tensor]:
    kept = [module for module in transformer.modules() if isinstance(module, KeptWeight)]
    return [tensor for module in kept for tensor in (module.values, module.scale)]


# ---- what `deepseek` asks --------------------------------------------------------------------------------------------


def model_sizes(spec: DeepseekSpec, layout: ShardLayout, config: RunConfig) -> ModelSizes:
    """Return what the memory plan needs to know: weights as they are stored, but for a CPU's fp32 head."""
    has_gpu = hardware.resolve_device(config.hw.device).type == "cuda"
    nbytes = {}
    for name, (dtype, shape) in resident_shapes(spec).items():
        is_wide = ".compressor.w" in name or (name == "head.weight" and not has_gpu)
        nbytes[name] = math.prod(shape) * (4 if is_wide else torch_dtype(dtype).itemsize)
    # expanded for the length of a product
    expanded = (
        4 * spec.heads * spec.head_dim * spec.o_rank + 2 * spec.heads * spec.head_dim * spec.o_rank
    )
    tokens = config.model.context_tokens + config.model.context_tokens % 2
    entries = sum(tokens // spec.compress_ratios[layer] for layer in spec.kv_sources)
    state = 2 * spec.num_layers * spec.window * spec.head_dim + 8 * tokens
    state += 2 * entries * (spec.head_dim + spec.index_dim)
    in_ram = nbytes.pop("embed.weight") + (nbytes.pop("head.weight") if has_gpu else 0)
    return ModelSizes(
        residents_nbytes=sum(nbytes.values()),
        embedding_nbytes=in_ram,
        state_nbytes=state,
        scratch=_scratch(spec, config, expanded),
        record_nbytes=layout.record_nbytes,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
    )


WORKSPACE_NBYTES = 160 * 2**20


def _scratch(spec: DeepseekSpec, config: RunConfig, expanded: int) -> tuple[tuple[int, int], ...]:
    """Return (bytes at any length, bytes a token) of a prompt that goes through the layers at once.  An estimate."""
    d, streams, width = spec.hidden, spec.streams, spec.heads * spec.head_dim
    piece = min(config.model.prefill_tokens, config.model.context_tokens)
    always = WORKSPACE_NBYTES + expanded + 2 * HEAD_ROWS * 3 * d
    always += backends.MIXING_ROWS * 8 * (streams + 1) * streams * d
    always += backends.ATTENTION_ROWS * (64 * 6 * spec.head_dim + 12 * width)
    each = 6 * streams * d + 8 * streams * d + 6 * width + 16 * d
    each += 6 * spec.index_heads * piece // 2 + 12 * spec.index_topk
    return ((always, each),)


def open_model(
    spec: DeepseekSpec,
    files: EngineFiles,
    layout: ShardLayout,
    experts: ExpertSource,
    config: RunConfig,
    device: torch.device,
) -> ReferenceModel:
    """Import the patched code, build its model of the replaced classes, load what is resident."""
    folder = files.published
    if folder is None:
        raise UserError(
            "deepseek.arithmetic=reference needs the release's own code, and no patch stage made it",
            "add patch to model.setup, or set deepseek.arithmetic=native",
        )
    kernels = backends.resolve_kernels(config, device)
    checkpoint = Checkpoint.open(files.snapshot)
    package = load_package(folder, backends.kernel_module(kernels))
    try:
        args = model_args(package, folder / "config.json", config.model.context_tokens)
        tables = read_engram_tables(checkpoint, spec)
        rows = EngramReader(spec.engram_layers, tables, config.hw.drive, config.cache.table_rows)
        parts = Parts(package, device, layout, experts, rows, kernels)
        replace_classes(parts, kernels)
        transformer = build(parts, args, FastTokenizer(files.snapshot / "tokenizer.json"))
        load_parameters(transformer, checkpoint, spec)
        arena = _load_tables(transformer, checkpoint, device)
    except BaseException:
        package.close()
        raise
    prefetch = config.prefetch
    has_guesses = prefetch.experts or (prefetch.copy and device.type == "cuda")
    model = ReferenceModel(
        spec,
        parts,
        transformer,
        args.max_seq_len,
        config.deepseek.fix_index_keys,
        bool(has_guesses),
    )
    model.arena = arena
    log.info("%s", describe(config, kernels))
    return model


def _load_tables(
    transformer: Any, checkpoint: Checkpoint, device: torch.device
) -> HostArena | None:
    """Give embedding and head their weights.  Returns the pinned memory of the head, with a GPU."""
    transformer.embed.weight = checkpoint.load("embed.weight")
    head = checkpoint.load("head.weight")
    if device.type == "cpu":
        transformer.head.weight = head.float()
        return None
    arena = HostArena(1, head.nbytes)
    arena.pin()
    copy = arena.records[0][: head.nbytes].view(head.dtype).view(head.shape)
    transformer.head.weight = copy.copy_(head)
    return arena


def describe(config: RunConfig, kernels: Kernels) -> str:
    """Say who computes, with what, and whose index keys are read."""
    whose = (
        "the release's TileLang kernels"
        if kernels is Kernels.tilelang
        else "this project's kernels"
    )
    keys = (
        "each source's own"
        if config.deepseek.fix_index_keys
        else "stale at even positions, as released"
    )
    return f"DeepSeek's own code computes, on {whose}; index keys: {keys}"
