"""The published code and the native arithmetic, sublayer by sublayer, each from the published one's inputs.

Whole models tell nothing about a mistake: one bf16 result on the other side of a rounding changes an FP8 code, that
changes a row by 1e-3, attention hands it on to all rows behind, and after a few layers both are 1e-2 apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels import reference_deepseek as ops
from runtime.models.deepseek_model import Block, Choice
from runtime.models.deepseek_reference import ReferenceModel
from runtime.models.deepseek_replaced import plain_torch
from runtime.models.deepseek_state import DeepseekState
from runtime.models.deepseek_weights import DeepseekSpec

# ---- the published code, made to compute three things as we do -----------------------------------------------------


def our_sums(model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    """fp32 products of streams, router and gated compressors: summed in fp64, as `steady_linear` says why."""
    published = model.parts.package.model

    def mixes(block, x, fn, scale, base):
        args = block.args
        rounds = args.hc_sinkhorn_iters, args.norm_eps, args.hc_eps
        with plain_torch():
            found = ops.hyper_mixes(x.flatten(0, 1), fn, scale, base, *rounds)
        return tuple(part.unflatten(0, x.shape[:2]) for part in found)

    def gate(router, x, image_mask=None):
        with plain_torch():
            logits = ops.steady_linear(x, router.weight)
            ids, weights = ops.route(logits, router.bias, router.topk, router.route_scale)
        return weights, ids

    linear = published.linear

    def compress(x, weight, bias=None):
        if weight.dtype != torch.float32:
            return linear(x, weight, bias)
        return ops.steady_linear(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])

    patch.setattr(published.Block, "hc_mixes", mixes)
    patch.setattr(published.Gate, "forward", gate)
    patch.setattr(published, "linear", compress)


def our_angles(model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    """Cosine and sine instead of a complex exponential: a table's fp32 numbers differ in the last bit."""
    published = model.parts.package.model

    def rotate(x, freqs, inverse=False):
        turned = ops.rotate(x.flatten(0, 1), freqs.real, freqs.imag, inverse)
        return x.copy_(turned.view(x.shape))

    patch.setattr(published, "apply_rotary_emb", rotate)
    tables = layer_tables(model.spec, model._max_seq_len)
    for block, (cos, sin) in zip(model.transformer.layers, tables, strict=True):
        patch.setitem(block.attn._buffers, "freqs_cis", torch.complex(cos, sin))
        if block.attn.indexer is not None:
            patch.setattr(block.attn.indexer, "freqs_cis", None)  # it takes its layer's


def our_lists(model: ReferenceModel, patch: pytest.MonkeyPatch) -> None:
    """Lists without holes. Released ones have the window's empty places between window and chosen entries."""
    published = model.parts.package.model
    attend = published.sparse_attn

    def together(q, kv, sink, places, scale):
        rows = [[place for place in row if place >= 0] for row in places[0].tolist()]
        width = -(-max(map(len, rows)) // ops.SLOTS_BLOCK) * ops.SLOTS_BLOCK
        listed = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
        return attend(q, kv, sink, listed[None], scale)

    patch.setattr(published, "sparse_attn", together)


OURS: dict[str, Callable[[ReferenceModel, pytest.MonkeyPatch], None]] = {
    "sums": our_sums,
    "angles": our_angles,
    "lists": our_lists,
}


def layer_tables(spec: DeepseekSpec, positions: int) -> list[tuple[Tensor, Tensor]]:
    """Each layer's (cos, sin), [positions, R / 2] fp32."""
    bases = [(spec.rope_theta, None), (spec.compress_rope_theta, dataclasses.astuple(spec.yarn))]
    places = torch.arange(positions).float().unsqueeze(1)
    angles = [places * ops.rotation_rates(spec.rope_dim, *base) for base in bases]
    tables = [(angle.cos(), angle.sin()) for angle in angles]
    return [tables[int(ratio > 0)] for ratio in spec.compress_ratios[: spec.num_layers]]


# ---- what one prompt's sublayers were given and made ---------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Layer:
    """Of one published layer, without the dimension of the batch; lists: for attention, for the experts."""

    streams: list[Tensor] = dataclasses.field(default_factory=list)  # that mixes are made of
    mixes: list[tuple[Tensor, ...]] = dataclasses.field(default_factory=list)  # pre, post, comb
    # the last layer's third is the head's
    pre: list[Tensor] = dataclasses.field(default_factory=list)
    inputs: list[Tensor] = dataclasses.field(default_factory=list)  # read and normed
    written: list[tuple[Tensor, Tensor]] = dataclasses.field(default_factory=list)  # (y, streams)
    attention: tuple[Tensor, ...] = ()  # q, entries, o
    route: tuple[Tensor, Tensor] | None = None  # weights, ids
    engram: tuple[Tensor, Tensor, Tensor] | None = None  # streams, rows, streams


@contextmanager
def recording(model: ReferenceModel) -> Iterator[list[Layer]]:
    """Record the next prompt from position 0."""
    published, blocks = model.parts.package.model, list(model.transformer.layers)
    layers = [Layer() for _ in blocks]
    now: list[Layer] = []
    handles = []

    def noted(function, note):
        def run(*args, **kwargs):
            given = [a.clone() if isinstance(a, Tensor) else a for a in args]
            out = function(*args, **kwargs)
            note(now[-1], given, out)
            return out

        return run

    def note_mixes(layer, given, out):
        layer.streams.append(given[1][0])
        layer.mixes.append(tuple(part[0].clone() for part in out))

    def note_written(layer, given, out):
        layer.written.append((given[1][0], out[0].clone()))

    def note_read(layer, given, _out):
        layer.pre.append(given[2][0])

    def note_attention(layer, given, out):
        layer.attention = given[0][0], given[1][0], out[0].clone()

    def note_input(_module, _given, out):
        now[-1].inputs.append(out[0].clone())

    def note_route(layer, _given, out):
        layer.route = out

    def note_engram(layer, engram):
        rows = []

        def before(_module, given):
            rows.append(given[0][0].clone())

        def after(_module, given, out):
            layer.engram = given[0][0].clone(), rows[-1], out[0].clone()

        return (
            engram.wkv.register_forward_pre_hook(before),
            engram.register_forward_hook(after),
        )

    for layer, block in zip(layers, blocks, strict=True):
        handles += (
            block.register_forward_pre_hook(lambda _m, _a, layer=layer: now.append(layer)),
            block.attn_norm.register_forward_hook(note_input),
            block.ffn_norm.register_forward_hook(note_input),
        )
        if block.engram is not None:
            handles += note_engram(layer, block.engram)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, note in (
            (published.Block, "hc_mixes", note_mixes),
            (published.Block, "hc_post", note_written),
            (published.Block, "hc_pre", note_read),
            (published.Gate, "forward", note_route),
            (published, "sparse_attn", note_attention),
        ):
            patch.setattr(owner, name, noted(getattr(owner, name), note))
        yield layers
    for handle in handles:
        handle.remove()


# ---- the native sublayers, from those inputs -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a native sublayer made of the published one's inputs."""

    layer: int
    name: str
    found: Tensor
    wanted: Tensor

    @property
    def unequal(self) -> float:
        """Share of the places that are not equal."""
        return float((self.found != self.wanted).float().mean())

    @property
    def error(self) -> float:
        """Norm of the difference, relative."""
        return float((self.found.double() - self.wanted).norm() / self.wanted.double().norm())


class Sublayers:
    """Runs native layers in their order on what the published ones were given."""

    def __init__(self, spec: DeepseekSpec, positions: int) -> None:
        self.spec, self.tables = spec, layer_tables(spec, positions)
        self.state, self.choice = DeepseekState(spec), Choice()

    @torch.inference_mode()
    def run(self, block: Block, layer: Layer, experts, open_expert) -> Iterator[Found]:
        """experts, open_expert: as the model has them.  Yields the parts of one layer."""

        def part(name, found, wanted):
            return Found(block.layer, name, found, wanted)

        if layer.engram is not None:
            streams, rows, wanted = layer.engram
            yield part("Engram", block.engram(streams, rows), wanted)
        norms = block.attn_norm, block.ffn_norm
        connections = block.hc_attn, block.hc_ffn
        for name, norm, connection, streams, mixes, pre, u, (y, written) in zip(
            ("attention", "experts"), norms, connections, layer.streams, layer.mixes, layer.pre[:2], layer.inputs,
            layer.written, strict=True,
        ):  # fmt: skip
            made = ops.rms_norm(ops.hyper_read(streams, pre), norm, self.spec.eps)
            yield part(f"input of {name}", made, u)
            found = connection.mixes(streams)
            for which, a, b in zip(("pre", "post", "comb"), found, mixes, strict=True):
                yield part(f"mix of {name}: {which}", a, b)
            yield part(f"{name} written", ops.hyper_write(y, streams, *mixes[1:]), written)
            yield part(f"{name} written, own mix", ops.hyper_write(y, streams, *found[1:]), written)
        yield from self._attention(block, layer, part)
        (weights, ids), u, y = layer.route, layer.inputs[1], layer.written[1][0]
        own_ids, own_weights = block.moe.route(u)
        yield part("route", own_ids, ids)
        yield part("routing weights", own_weights, weights)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block.moe, "route", lambda _u: (ids, weights))
            yield part("experts", block.moe(u, experts, open_expert), y)

    def _attention(self, block: Block, layer: Layer, part) -> Iterator[Found]:
        """Up to the softmax, the softmax, and what follows it; each from the published numbers."""
        u, (y, _) = layer.inputs[0], layer.written[0]
        q, entries, o = layer.attention
        found = []

        def attend(own_q, own_entries, sink, slots, scale):
            found.extend((own_q, own_entries, good(q, entries, sink, slots, scale)))
            return o

        cos, sin = self.tables[block.layer]
        good = ops.sparse_attention
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "sparse_attention", attend)
            own_y = block.attention(u, 0, self.choice, self.state, cos, sin)
        yield part("queries", found[0], q)
        yield part("window and entries", found[1], entries)
        yield part("softmax", found[2], o)
        yield part("output projection", own_y, y)
