"""Classes that DeepSeek's published Transformer is built of instead of its own; only where weights come from differs.

Experts come from an ExpertSource, Engram rows from the drive, embedding and head from RAM, and `wo_a` stays in FP8: so
nothing large is allocated. And how attention and mixing are called in parts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import Kernels
from kernels.formats import fp8_blocks_dequantize
from runtime.experts.layout import ExpertKey
from runtime.experts.shard_layout import ShardLayout
from runtime.experts.slots import BatchedSource
from runtime.experts.source import ExpertSource
from runtime.models import deepseek_backends as backends
from runtime.models.deepseek_package import Package
from runtime.models.deepseek_rows import EngramReader

HEAD_ROWS = 8192  # of the head in VRAM at once


@contextmanager
def torch_as(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Give torch another default dtype and device for a while."""
    before = torch.get_default_dtype()
    # the mode costs every call of torch a microsecond or two: not for what is so already
    is_so = torch.get_default_device().type == torch.device(device).type
    torch.set_default_dtype(dtype)
    try:
        with nullcontext() if is_so else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def plain_torch() -> Any:
    """Return torch as this project knows it, to enter inside the published code."""
    return torch_as(torch.float32, "cpu")


@dataclass(slots=True)
class Parts:
    """What the replaced classes share."""

    package: Package
    device: torch.device
    layout: ShardLayout
    experts: ExpertSource
    rows: EngramReader
    kernels: Kernels
    every_logits: bool = False  # of all tokens of a call, not only the last
    logits: Tensor | None = None  # of the last call: [b, rows, vocab]
    wait_ns: int = 0  # the host, for routes

    def request_rows(self, ids: Tensor) -> None:
        """Start reading: ids [1, s, Engram layers, columns]."""
        per_layer = ids[0].transpose(0, 1).flatten(1).tolist()
        with plain_torch():
            self.rows.request(per_layer)


class StreamedMoE(nn.Module):
    """Router and shared expert as published; the routed ones through the expert source, added by ascending id."""

    def __init__(self, parts: Parts, layer_id: int, args: Any) -> None:
        super().__init__()
        model = parts.package.model
        sizes, limit = (args.dim, args.moe_inter_dim), args.swiglu_limit
        self.parts, self.layer = parts, layer_id
        self.gate = model.Gate(layer_id, args)
        self.shared_experts = model.Expert(*sizes, swiglu_limit=limit)
        with torch.device("meta"):  # its weights are views of records
            expert = model.Expert(*sizes, dtype=torch.float4_e2m1fn_x2, swiglu_limit=limit)
        self._expert = (expert,)  # in a tuple: no part of the model
        self._next: tuple[Any, Tensor] | None = None  # (router after this one, ratio of norm gains)

    def expect(self, after: StreamedMoE, norm: Tensor, next_norm: Tensor) -> None:
        """Guess the next layer's experts from this layer's input."""
        self._next = (after.gate, next_norm.float() / norm.float())

    def forward(self, x: Tensor, image_mask: Tensor | None = None) -> Tensor:
        """x: [b, s, d] bf16.  Returns the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        weights, indices = self.gate(rows, image_mask)
        started = time.perf_counter_ns()
        ids = indices.tolist()  # the one trip to the host
        self.parts.wait_ns += time.perf_counter_ns() - started
        y = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        if len(rows) == 1:
            self._token(rows, weights, ids[0], y)
        else:
            self._prompt(rows, weights, indices, y)
        y += self.shared_experts(rows)
        return y.to(x.dtype).view(x.shape)

    def _token(self, rows: Tensor, weights: Tensor, ids: list[int], y: Tensor) -> None:
        found: dict[int, Tensor] = {}
        with plain_torch():
            waves = self.parts.experts.waves(self.layer, ids, self._guesses(rows))
        while (wave := _next_wave(waves)) is not None:
            for expert, record in wave:
                place = ids.index(expert)
                found[expert] = self.run_expert(expert, record, rows, weights[:, place : place + 1])
        for expert in sorted(found):
            y += found[expert]

    def _prompt(self, rows: Tensor, weights: Tensor, indices: Tensor, y: Tensor) -> None:
        flat = indices.flatten()
        order = flat.argsort(stable=True)
        tokens, shares = order // indices.shape[1], weights.flatten()[order].unsqueeze(1)
        touched, counts = (part.tolist() for part in flat.unique(return_counts=True))
        pairs = zip(tokens.split(counts), shares.split(counts), strict=True)
        with plain_torch():
            waves = _prompt_waves(self.parts.experts, self.layer, touched)
        while (wave := _next_wave(waves)) is not None:
            for expert, record in wave:
                at, share = next(pairs)
                # no token is twice in `at`
                y[at] += self.run_expert(expert, record, rows[at], share)

    def _guesses(self, rows: Tensor) -> Iterator[int]:
        """Yield likely experts of the next layer, best first; computed when they are asked for."""
        if self._next is None:
            return
        gate, ratio = self._next
        with torch_as(torch.bfloat16, self.parts.device):
            _, ids = gate((rows.float() * ratio).to(rows.dtype), None)
        yield from ids[0].tolist()

    def run_expert(self, expert: int, record: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the published Expert's output with the weights of a record: [n, d] bf16."""
        parts, (module,) = self.parts, self._expert
        # off an aligned address: TileLang's kernels load 16 bytes at once
        is_moved = record.device != parts.device or parts.kernels is Kernels.tilelang
        key, to = ExpertKey(self.layer, expert), parts.device if is_moved else None
        matrices = expert_views(parts.layout, key, record, to)
        for name, (weight, scale) in matrices.items():
            weight.scale = scale  # type: ignore[attr-defined]
            tensors = getattr(module, name)._parameters
            tensors["weight"], tensors["scale"] = weight, scale
        out: Tensor = module(rows, weights)
        return out


def _next_wave(waves: Iterator[list[tuple[int, Tensor]]]) -> list[tuple[int, Tensor]] | None:
    with plain_torch():
        return next(waves, None)


def _prompt_waves(
    experts: ExpertSource, layer: int, touched: Sequence[int]
) -> Iterator[list[tuple[int, Tensor]]]:
    if isinstance(experts, BatchedSource):
        yield from experts.batches(layer, touched)
    else:
        for pair in experts.sweep(layer, touched):
            yield [pair]


def expert_views(
    layout: ShardLayout, key: ExpertKey, record: Tensor, to: torch.device | None = None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Cut a record [bytes] uint8: w1, w2, w3 -> (weight [N, K / 2] E2M1 pairs, scale [N, K / 32] E8M0).

    to: where copies are made, each at an address of its own; None: views of the record.
    """
    at, scales_at = layout.payload_offsets(key)
    nbytes, scales_nbytes = layout.shape.codes_nbytes, layout.shape.scales_nbytes
    matrices = {}
    for name, (rows, _) in layout.shape.matrices().items():
        parts = [record[at : at + nbytes], record[scales_at : scales_at + scales_nbytes]]
        if to is not None:
            parts = [part.to(to, copy=True) for part in parts]
        weight, scale = (part.view(rows, -1) for part in parts)
        matrices[name] = (weight.view(torch.float4_e2m1fn_x2), scale.view(torch.float8_e8m0fnu))
        at, scales_at = at + nbytes, scales_at + scales_nbytes
    return matrices


class RowsFromDrive(nn.Module):
    """An Engram table: rows that were asked for when the token was known."""

    def __init__(self, parts: Parts, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.parts, self.num_embeddings, self.dim = parts, num_embeddings, dim
        self.layer = -1  # set when the model is built

    def forward(self, indices: Tensor) -> Tensor:
        """indices: [..., columns].  Returns [..., columns, dim] bf16."""
        with plain_torch():
            rows = self.parts.rows.collect(self.layer, indices.numel() // indices.shape[-1])
        return rows.view(*indices.shape, self.dim).to(self.parts.device)


class EmbeddingInRam(nn.Module):
    """The embedding; `weight` [vocab, d] bf16 is given later."""

    weight: Tensor

    def __init__(self, parts: Parts, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.parts, self.shape = parts, (vocab_size, dim)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...].  Returns [..., d] on the device."""
        return F.embedding(ids.cpu(), self.weight).to(self.parts.device)


class HeadInRam(nn.Module):
    """The head; `weight` [vocab, d] is given later: fp32 for a CPU, bf16 in pinned memory for a GPU."""

    weight: Tensor

    def __init__(self, parts: Parts, vocab_size: int, dim: int, *_eps: float) -> None:
        super().__init__()
        self.parts, self.shape = parts, (vocab_size, dim)

    def forward(self, x: Tensor, full_logits: bool = False) -> Tensor:
        """x: [b, s, d].  Returns fp32 logits [b, vocab] of the last position, or [b, s, vocab].

        All that were computed stay in `parts.logits`.
        """
        x = x.unsqueeze(1) if x.dim() == 2 else x
        rows = x if full_logits or self.parts.every_logits else x[:, -1:]
        device = self.parts.device
        if device.type == "cpu":
            logits = F.linear(rows.float(), self.weight)
        else:  # it passes through the GPU in pieces
            pieces = self.weight.split(HEAD_ROWS)
            products = [F.linear(rows.float(), part.to(device).float()) for part in pieces]
            logits = torch.cat(products, dim=-1)
        self.parts.logits = logits
        return logits if full_logits else logits[:, -1]


class KeptWeight(nn.Module):
    """`wo_a`: kept in FP8, expanded by the converter's formula when it is read."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        blocks = (-(-rows // 32), -(-columns // 32))
        self.scale = torch.empty(blocks, dtype=torch.float8_e8m0fnu)

    @property
    def weight(self) -> Tensor:
        """[rows, columns] bf16: fp32(value) times its block's scale, rounded once."""
        return fp8_blocks_dequantize(self.values, self.scale).to(torch.bfloat16)


def with_kept_weight(attention: Any) -> type:
    """Return the published Attention with its `wo_a` in FP8."""

    class KeptAttention(attention):  # type: ignore[misc]
        def __init__(self, layer_id: int, args: Any) -> None:
            super().__init__(layer_id, args)
            rows, columns = self.wo_a.weight.shape
            self.wo_a: Any = KeptWeight(rows, columns)

    return KeptAttention


def replace_classes(parts: Parts, kernels: Kernels) -> None:
    """Let the published model be built of these classes, and call attention and mixing in parts."""
    model = parts.package.model
    model.MoE = partial(StreamedMoE, parts)
    model.ParallelEngramEmbedding = partial(RowsFromDrive, parts)
    model.ParallelEmbedding = partial(EmbeddingInRam, parts)
    model.ParallelHead = partial(HeadInRam, parts)
    model.Attention = with_kept_weight(model.Attention)
    heads = backends.attention_heads(kernels, parts.device)
    model.sparse_attn = backends.attention_in_parts(model.sparse_attn, heads)
    model.Block.hc_post = backends.mixing_in_parts(model.Block.hc_post)
