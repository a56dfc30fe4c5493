"""Every silent error that this architecture invites, planted on purpose: a check must see it, which passes without."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from kernels import formats
from kernels import reference_deepseek as ops
from runtime.experts.layout import ExpertKey
from runtime.models import deepseek_matrices, deepseek_model, deepseek_moe, deepseek_state
from tests.parity.deepseek_golden import (
    GOLDEN,
    LAYER_BOUND,
    MEDIAN_BOUND,
    TINY,
    Layers,
    fed_tokens,
    golden,
    in_pieces,
    make_model,
    padded_to,
    relative_error,
    row_errors,
    spec_of,
    wanted_logits,
)

SPEC = spec_of(GOLDEN / "checkpoint")
BF16 = torch.bfloat16
part = functools.partial


# What looks at the model: each returns a number, and a bound that a right model stays below.


def worst_layer(**how):
    """Largest relative error of a layer's output, each layer from golden inputs."""
    run = Layers(make_model(**how))
    return max(
        relative_error(streams, run.wanted(step, layer)[0])
        for step in ("prefill", "decode0", "decode1")
        for layer, streams, _, _ in run.step(step)
    )


def median_of_text(**how):
    """Median error of the logits of 24 decoded tokens, fed with golden tokens."""
    model = make_model(**how)
    found = in_pieces(model, fed_tokens("p40"), (40, 1))
    return float(row_errors(found, wanted_logits("p40"))[40:].median())


def wrong_choices(**how):
    """Share of rows of the prompts where an indexer chooses other entries; the 40 tokens layer by layer."""
    wrong = rows = 0
    run = Layers(make_model(**how))
    found = {layer: choice.slots for layer, _, _, choice in run.step("prefill")}
    model, whole = make_model(**how), {}
    for block in model.blocks:
        if block.attention.indexer is not None:
            block.attention.indexer.choose = part(recorded_choice, block.attention.indexer, whole)
    model.prefill(fed_tokens("p100")[:-24], model.new_state())
    for prompt, slots in (("p40", found), ("p100", whole)):
        for layer in SPEC.index_sources:
            wanted = golden(f"model_{prompt}")[f"prefill.index.{layer}.selected"].long()
            wrong += int((padded_to(slots[layer], wanted.shape[1]) != wanted).any(1).sum())
            rows += len(wanted)
    return wrong / rows


def recorded_choice(indexer, found, u, qr, start, choice, *args):
    type(indexer).choose(indexer, u, qr, start, choice, *args)
    found[indexer.layer] = choice.slots


def decoded_choices(prompt, **how):
    """Layer of an indexer -> its choices [24, n] for the tokens decoded after a prompt, as the golden ones."""
    model, last = make_model(**how), {}
    for block in model.blocks:
        if block.attention.indexer is not None:
            block.attention.indexer.choose = part(recorded_choice, block.attention.indexer, last)
    tokens, state = fed_tokens(prompt), model.new_state()
    model.prefill(tokens[:-24], state)
    found = {layer: [] for layer in SPEC.index_sources}
    for token in tokens[-24:]:
        model.decode(token, state)
        for layer, slots in found.items():
            slots.append(padded_to(last[layer], SPEC.index_topk))
    return {layer: torch.cat(slots) for layer, slots in found.items()}


def wrong_decoded_choices(**how):
    """Share of decoded tokens for which an indexer chooses other entries, at even and odd positions alike."""
    wrong = rows = 0
    for prompt in ("p40", "p100"):
        for layer, slots in decoded_choices(prompt, **how).items():
            wanted = golden(f"model_{prompt}")[f"decode.index.{layer}.selected"].long()
            wrong += int((slots != wanted).any(1).sum())
            rows += len(wanted)
    return wrong / rows


def wrong_dtypes(**how):
    """Number of tensors of another type than the release keeps or returns them in: bf16, but for tails and logits."""
    model = make_model(**how)
    state, run = model.new_state(), Layers(model)
    logits = [model.prefill(fed_tokens("p40")[:41], state), model.decode(1, state)]
    found = {name: tensor.dtype for name, tensor in state.tensors().items()}
    is_wrong = [
        dtype != (torch.float32 if name.startswith("tail.") else BF16)
        for name, dtype in found.items()
        if name not in ("position", "context")
    ]
    is_wrong += [x.dtype != torch.float32 for x in logits]
    is_wrong += [streams.dtype != BF16 for _, streams, _, _ in run.step("prefill")]
    u = run.records["prefill.0.attn_in"]
    is_wrong.append(ops.quantized_linear(u, model.blocks[0].attention.wq_a).dtype != BF16)
    return sum(is_wrong)


def restored_differs(**how):
    """Largest difference of a logit between a conversation and its restored copy, two tokens on."""
    model, tokens = make_model(**how), fed_tokens("p40")
    state, copy = model.new_state(), model.new_state()
    model.prefill(tokens[:41], state)
    copy.restore(state.tensors())
    return max(
        float((model.decode(token, state) - model.decode(token, copy)).abs().max())
        for token in tokens[41:43]
    )


def wrong_entries(**how):
    """Share of values in windows and compressed entries that are not the golden, of layers from golden inputs."""
    run = Layers(make_model(**how))
    for _ in run.step("prefill"):
        pass
    pairs = [
        (run.state.compressed[layer].entries, run.records[f"prefill.{layer}.compress_kv"])
        for layer in SPEC.kv_sources
    ]
    pairs += [
        (run.state.window(layer, 40), run.records[f"prefill.{layer}.sparse_attn.kv"][25:40])
        for layer in range(SPEC.num_layers)
    ]
    wrong = sum(int((found[: len(wanted)] != wanted).sum()) for found, wanted in pairs)
    return wrong / sum(wanted.numel() for _, wanted in pairs)


def wrong_attention(**how):
    """Share of values of the attention kernel that are not the golden."""
    kernels, wrong, count = golden("kernels"), 0, 0
    for case in ("one_block", "three_blocks", "wide"):
        q, kv, sink, slots, wanted = (
            kernels[f"sparse_attn.{case}.{name}"]
            for name in ("q", "kv", "attn_sink", "topk_idxs", "o")
        )
        for i in range(len(q)):
            found = ops.sparse_attention(q[i], kv[i], sink, slots[i], q.shape[-1] ** -0.5)
            wrong += int((found != wanted[i]).sum())
            count += found.numel()
    return wrong / count


def wrong_quantisers(**how):
    """Share of blocks of the FP8 quantiser with another scale than the golden."""
    kernels, wrong, count = golden("kernels"), 0, 0
    for rows in (1, 17, 64, 65, 300):
        _, scale = ops.act_quant(kernels[f"act_quant.r{rows}.x"])
        wanted = kernels[f"act_quant.r{rows}.scale"].float()
        wrong += int((scale != wanted).sum())
        count += scale.numel()
    return wrong / count


def wrong_powers(**how):
    """Share of wrong powers of two at 2^n and one fp32 step either side."""
    exact = 2.0 ** torch.arange(-100, 100).float()
    below, above = (torch.nextafter(exact, torch.tensor(limit)) for limit in (0.0, torch.inf))
    found = ops.power_of_two_above(torch.stack([below, exact, above]))
    return float((found != torch.stack([exact, exact, 2 * exact])).float().mean())


def wrong_scales(**how):
    """Share of the 256 codes of E8M0 with another value."""
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e8m0fnu).float()
    found = formats.e8m0_values(codes)
    return float((~torch.isclose(found, wanted, rtol=0, atol=0, equal_nan=True)).float().mean())


def wrong_mixes(**how):
    """Largest error of what attention sublayers make of golden streams: pre, post and comb."""
    model, records, worst = make_model(**how), golden("layers_p40"), 0.0
    for block in model.blocks:
        found = block.hc_attn.mixes(records[f"prefill.{block.layer}.h_in"])
        for name, tensor in zip(("pre", "post", "comb"), found, strict=True):
            wanted = records[f"prefill.{block.layer}.hc_attn.{name}"]
            worst = max(worst, float((tensor - wanted).abs().max()))
    return worst


def wrong_products(**how):
    """Largest error of the mixes of the trained model, whose matrices need all of fp32, against fp64.

    The golden model's matrices of fp32 hold bf16 numbers: coarser products do not show on them.
    """
    model, spec, worst = make_model(TINY), spec_of(TINY), 0.0
    streams = torch.randn(
        16, spec.streams, spec.hidden, generator=torch.Generator().manual_seed(0)
    ).to(BF16)
    flat = streams.double().flatten(1)
    for block in model.blocks:
        hyper = block.hc_attn
        mixes = flat @ hyper.fn.double().t() / flat.square().mean(1, keepdim=True).sqrt()
        wanted = ops.split_mixes(
            mixes.float(),
            hyper.scale,
            hyper.base,
            spec.streams,
            spec.sinkhorn_iters,
            spec.hc_eps,
        )
        for tensor, right in zip(hyper.mixes(streams), wanted, strict=True):
            worst = max(worst, float((tensor - right).abs().max()))
    return worst


def unequal_rows(**how):
    """Largest share of rows of a layer's output that are not the golden bit for bit, from golden inputs."""
    run = Layers(make_model(**how))
    return max(
        float((streams != run.wanted("prefill", layer)[0]).flatten(1).any(1).float().mean())
        for layer, streams, _, _ in run.step("prefill")
    )


def open_gates(**how):
    """Relative error of an expert whose gates and ups all are far above the limit, against that limit by hand."""
    x, down = torch.ones(1, 32, dtype=BF16), torch.eye(32)
    found = ops.swiglu_expert(x, torch.ones(32, 32), torch.ones(32, 32), down, 10.0)
    return float((found.float() / 100 - 1).abs().max())


def closed_gates(**how):
    """Largest output of an expert whose gates all are far below zero: nothing passes."""
    x, down = torch.ones(1, 32, dtype=BF16), torch.eye(32)
    found = ops.swiglu_expert(x, -torch.ones(32, 32), torch.ones(32, 32), down, 10.0)
    return float(found.abs().max())


def order_counts(**how):
    """Share of a layer's outputs that differ between orders of arrival, where the order of the sum shows.

    Sums of a few bf16 numbers are exact in fp32 unless they differ by 2^16: here two experts all but cancel.
    """
    factors, outputs = (2.0**20, 1.0, -(2.0**20), 1.0), []
    u = golden("layers_p40")["prefill.0.ffn_in"]
    for seed in range(6):
        model = make_model(seed=seed, **how)
        moe = model.blocks[0].moe
        # all scores are equal: the first four experts, with the same weight
        moe.router, moe.bias = torch.zeros_like(moe.router), torch.zeros_like(moe.bias)
        matrices = model.open_expert(ExpertKey(0, 0), model.experts.record(ExpertKey(0, 0)))
        outputs.append(moe(u, model.experts, part(scaled_down, matrices, factors)))
    return max(float((y != outputs[0]).float().mean()) for y in outputs)


def scaled_down(matrices, factors, key, record):
    """Open an expert: the given one, its output times the expert's factor."""
    gate, up, down = matrices
    return gate, up, down * factors[key.expert]


LAYERS = (worst_layer, LAYER_BOUND)
TEXT = (median_of_text, MEDIAN_BOUND)
CHOICES = (wrong_choices, 0.02)
DECODED = (wrong_decoded_choices, 0.02)
DTYPES = (wrong_dtypes, 0)
RESTORED = (restored_differs, 0)
ENTRIES = (wrong_entries, 0.001)
ATTENTION = (wrong_attention, 0)
QUANTISERS = (wrong_quantisers, 0)
POWERS = (wrong_powers, 0)
SCALES = (wrong_scales, 0)
MIXES = (wrong_mixes, 1e-5)
PRODUCTS = (wrong_products, 1e-5)
ROWS = (unequal_rows, 0.1)
OPEN = (open_gates, 0.07)
CLOSED = (closed_gates, 1e-6)
ORDER = (order_counts, 0)
CHECKS = (
    LAYERS, ROWS, TEXT, CHOICES, ENTRIES, MIXES, PRODUCTS, ATTENTION, QUANTISERS, POWERS, SCALES, OPEN, CLOSED, ORDER,
    DECODED, DTYPES, RESTORED,
)  # fmt: skip


# The mistakes: each plants one with monkeypatch.


def mixing_not_transposed(patch):
    def hyper_write(y, streams, post, comb):
        mixed = (comb.unsqueeze(-1) * streams.float().unsqueeze(1)).sum(2)
        return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(BF16)

    patch.setattr(ops, "hyper_write", hyper_write)


def own_pre(patch):
    """Every sublayer reads with the pre that it has made itself."""
    mixes, read, last = ops.hyper_mixes, ops.hyper_read, []

    def hyper_mixes(*args):
        last[:] = [mixes(*args)]
        return last[0]

    patch.setattr(ops, "hyper_mixes", hyper_mixes)
    patch.setattr(ops, "hyper_read", lambda streams, pre: read(streams, last[0][0]))


def norm_eps(patch):
    return {"spec": dataclasses.replace(SPEC, eps=1e-6)}


def sinkhorn_eps(patch):
    return {"spec": dataclasses.replace(SPEC, hc_eps=1e-20)}


def expert(patch, weigh_late=False, is_rounded=True, low=None, high=True):
    """Put a wrong swiglu_expert in place."""

    def rounded(x):
        return x.to(BF16).float() if is_rounded else x

    def swiglu_expert(x, gate, up, down, limit, weight=None):
        g, u = (rounded(ops.block_product(ops.act_rounded(x), m)) for m in (gate, up))
        u = u.clamp(-limit, limit)
        g = g.clamp(min=-limit if low else None, max=limit if high else None) if low or high else g
        h = F.silu(g) * u
        if weight is not None and not weigh_late:
            h = h * weight
        y = ops.block_product(ops.act_rounded(h.to(BF16)), down)
        if weight is not None and weigh_late:
            y = rounded(y) * weight
        return rounded(y)

    patch.setattr(ops, "swiglu_expert", swiglu_expert)


def bias_in_the_weight(patch):
    def route(logits, bias, top_k, scale):
        scores = F.softplus(logits).sqrt() + bias
        ids = ops.best_places(scores, top_k)
        chosen = scores.gather(1, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True) * scale

    patch.setattr(ops, "route", route)


def nibbles_swapped(patch):
    good = deepseek_matrices.mxfp4_dequantize
    patch.setattr(
        deepseek_matrices,
        "mxfp4_dequantize",
        lambda codes, scales: good(codes >> 4 | codes << 4, scales),
    )


def matrices_swapped(patch, a, b):
    """The bytes of two of w1, w2, w3 taken for each other; they are as many."""
    good = deepseek_matrices.expert_matrices

    def swapped(tensors):
        found = list(tensors)
        found[a], found[b] = tensors[b].view(tensors[a].shape), tensors[a].view(tensors[b].shape)
        return found

    patch.setattr(
        deepseek_matrices,
        "expert_matrices",
        lambda codes, scales: good(swapped(codes), swapped(scales)),
    )


def scores_not_rounded(patch):
    def index_scores(q, keys, weights):
        dots = torch.einsum("thd,sd->ths", q.float(), keys.float())
        return (dots.relu() * weights.float().unsqueeze(-1)).sum(1)

    patch.setattr(ops, "index_scores", index_scores)


def highest_place_wins(patch):
    def best_places(scores, count):
        order = scores.float().flip(1).sort(dim=-1, descending=True, stable=True).indices
        return scores.shape[1] - 1 - order[:, :count]

    patch.setattr(ops, "best_places", best_places)


def keys_of_the_last_source(patch):
    """While a group is incomplete, its indexer reads what the last source has published in the step before.

    This is what the released code does when it decodes; the right thing is a source's own keys, as in a prompt.
    """
    good = deepseek_model.Indexer.choose

    def choose(self, u, qr, start, choice, state, *args):
        own = state.compressed[self.spec.kv_source_of(self.layer)]
        kept = own.keys
        if len(u) == 1 and (start + 1) % self.ratio:
            own.keys = state.compressed[self.spec.kv_sources[-1]].keys
        good(self, u, qr, start, choice, state, *args)
        own.keys = kept

    patch.setattr(deepseek_model.Indexer, "choose", choose)


def tables(patch, change):
    """Change the tables of rotation of every model: change((window's, compressed layers')) -> the same."""
    good = deepseek_model.DeepseekModel.__init__

    def init(self, *args):
        good(self, *args)
        self.tables = change(self.tables)

    patch.setattr(deepseek_model.DeepseekModel, "__init__", init)


def halves_rotated(patch):
    def rotate(x, cos, sin, inverse=False):
        width = 2 * cos.shape[-1]
        a, b = x[..., -width:].float().chunk(2, dim=-1)
        c, s = (t.view(len(t), *([1] * (x.dim() - 2)), -1) for t in (cos, -sin if inverse else sin))
        turned = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
        return torch.cat([x[..., :-width], turned.to(x.dtype)], dim=-1)

    patch.setattr(ops, "rotate", rotate)


def no_inverse(patch):
    good = ops.rotate
    patch.setattr(
        ops, "rotate", lambda x, cos, sin, inverse=False: x if inverse else good(x, cos, sin)
    )


def inverse_at_the_key(patch):
    """Each value is turned back by the position of its own key, instead of the sum by the query's."""
    rotate, attend, now = ops.rotate, ops.sparse_attention, {}
    call, visible = deepseek_model.Attention.__call__, deepseek_model.Attention._visible

    def called(self, u, start, choice, state, cos, sin):
        now.update(cos=cos, sin=sin)
        return call(self, u, start, choice, state, cos, sin)

    def seen(self, kv, start, choice, state):
        entries, slots = visible(self, kv, start, choice, state)
        old = min(start, self.spec.window - 1)
        first = torch.arange(start - old, start + len(kv))
        groups = torch.arange(len(entries) - len(first)) * self.spec.compress_ratios[self.layer]
        now["places"] = torch.cat([first, groups])
        return entries, slots

    def sparse_attention(q, kv, sink, slots, scale):
        cos, sin = (now[table][now["places"]] for table in ("cos", "sin"))
        both = torch.cat([kv, rotate(kv, cos, sin, inverse=True)], dim=1)  # keys, values
        padded = F.pad(q, (0, kv.shape[1]))
        return attend(padded, both, sink, slots, scale)[..., kv.shape[1] :]

    patch.setattr(deepseek_model.Attention, "__call__", called)
    patch.setattr(deepseek_model.Attention, "_visible", seen)
    patch.setattr(ops, "sparse_attention", sparse_attention)
    no_inverse(patch)


def sink_in_the_maximum(patch):
    def sparse_attention(q, kv, sink, slots, scale):
        best = sink.expand(q.shape[:2])
        total, out = torch.ones(q.shape[:2]), torch.zeros(q.shape)
        for places in slots.split(ops.SLOTS_BLOCK, dim=1):
            entries = kv[places.clamp(min=0).long()].float()
            scores = torch.einsum("thd,tnd->thn", q.float(), entries) * scale
            scores = scores.masked_fill((places < 0).unsqueeze(1), float("-inf"))
            higher = torch.maximum(best, scores.amax(-1))
            shrink, shares = (best - higher).exp(), (scores - higher.unsqueeze(-1)).exp()
            total = total * shrink + shares.sum(-1)
            shares = shares.to(BF16).float()
            out = out * shrink.unsqueeze(-1) + torch.einsum("thn,tnd->thd", shares, entries)
            best = higher
        return (out / total.unsqueeze(-1)).to(BF16)

    patch.setattr(ops, "sparse_attention", sparse_attention)


def sink(patch, change):
    """change: (sink, scale) -> what the kernel takes for the sink."""
    good = ops.sparse_attention
    patch.setattr(
        ops,
        "sparse_attention",
        lambda q, kv, sink, slots, scale: good(q, kv, change(sink, scale), slots, scale),
    )


def entries_rotated_elsewhere(patch, change):
    """change: a table of rotation -> one that has in row r j what entry j is rotated with."""
    good = deepseek_model.Compressor.extend

    def extend(self, u, start, state, cos, sin):
        good(self, u, start, state, change(cos, self.ratio), change(sin, self.ratio))

    patch.setattr(deepseek_model.Compressor, "extend", extend)


def at_the_last_token(table, ratio):
    return table.roll(1 - ratio, 0)


def at_the_entry(table, ratio):
    return table.repeat_interleave(ratio, 0)


def visible_later(patch, tokens):
    """Entries are visible some tokens too late (early, if negative)."""
    good, mask = deepseek_model.Indexer.choose, ops.candidate_mask

    def choose(self, u, qr, start, choice, *args):
        good(self, u, qr, start - tokens, choice, *args)
        there = (start + len(u)) // self.ratio  # nobody sees what does not exist
        choice.slots = choice.slots.masked_fill(choice.slots >= there, -1)

    def candidate_mask(scores, visible, *args):
        return mask(scores, visible.clamp(max=scores.shape[1]), *args)

    patch.setattr(deepseek_model.Indexer, "choose", choose)
    patch.setattr(ops, "candidate_mask", candidate_mask)


def quantised_before_rotation(patch, is_window):
    rotate, fp4_rounded, act_rounded = ops.rotate, ops.fp4_rounded, ops.act_rounded
    last = []

    def remembered(*args, **kwargs):
        last[:] = [rotate(*args, **kwargs), *args]
        return last[0]

    def fp4(x, is_kv=False):
        if is_kv and not is_window:
            assert x is last[0]
            return rotate(fp4_rounded(last[1], True), *last[2:])
        return fp4_rounded(x, is_kv)

    def act(x):
        if is_window and last and x is last[0]:
            return rotate(act_rounded(last[1]).to(BF16), *last[2:]).float()
        return act_rounded(x)

    patch.setattr(ops, "rotate", remembered)
    patch.setattr(ops, "fp4_rounded", fp4)
    patch.setattr(ops, "act_rounded", act)


def entries_in_blocks_of_32(patch):
    good = ops.fp4_rounded
    patch.setattr(ops, "fp4_rounded", lambda x, is_kv=False: good(x))


def powers_by_logarithm(patch):
    patch.setattr(ops, "power_of_two_above", lambda x: x.log2().ceil().exp2())


def powers_always_above(patch):
    patch.setattr(ops, "power_of_two_above", lambda x: x.log2().floor().exp2() * 2)


def scales_off_by_one(patch):
    good = formats.e8m0_values
    patch.setattr(formats, "e8m0_values", lambda scales: good(scales) * 2)


def scales_read_as_numbers(patch):
    patch.setattr(formats, "e8m0_values", lambda scales: scales.view(torch.uint8).float())


def other_e4m3(patch):
    """The E4M3 of other hardware: bias 8 instead of 7, and no negative zero."""
    good = deepseek_matrices.fp8_blocks_dequantize
    patch.setattr(
        deepseek_matrices,
        "fp8_blocks_dequantize",
        lambda values, scales: good(values.view(torch.uint8).view(torch.float8_e4m3fnuz), scales),
    )


def context_not_restored(patch):
    good = deepseek_state.DeepseekState.restore

    def restore(self, tensors):
        good(self, {**tensors, "context": tensors["context"][:0]})

    patch.setattr(deepseek_state.DeepseekState, "restore", restore)


def products_in_fp32(patch):
    patch.setattr(
        ops, "quantized_linear", lambda x, weight: ops.block_product(ops.act_rounded(x), weight)
    )


def caches_in_fp32(patch):
    """Compressed entries and index keys are kept in fp32. (A window in fp32 would not take bf16 rows: an error.)"""
    good = deepseek_state.DeepseekState.__init__

    def init(self, *args):
        good(self, *args)
        for cache in self.compressed.values():
            cache.entries, cache.keys = cache.entries.float(), cache.keys.float()

    patch.setattr(deepseek_state.DeepseekState, "__init__", init)


def context_not_kept(patch):
    good = deepseek_model.DeepseekModel.__init__

    def init(self, *args):
        good(self, *args)
        row_ids = self.row_ids
        self.row_ids = lambda tokens, context: row_ids(tokens, ())

    patch.setattr(deepseek_model.DeepseekModel, "__init__", init)


def coarse_mixes(patch):
    """Products of fp32 numbers with 10 bits of mantissa."""

    def coarse(x):
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    good = ops.hyper_mixes
    patch.setattr(ops, "hyper_mixes", lambda streams, fn, *args: good(streams, coarse(fn), *args))


def added_in_order_of_arrival(patch):
    good = deepseek_moe.Moe._outputs

    def outputs(self, u, ids, weights, experts, open_expert):
        found = good(self, u, ids, weights, experts, open_expert)
        return sorted(found, key=lambda output: experts.arrived.index(output[0]))

    patch.setattr(deepseek_moe.Moe, "_outputs", outputs)


class Mistake(NamedTuple):
    plant: Callable  # (monkeypatch) -> arguments of make_model, or None
    seen_by: tuple  # (measure, bound)


MISTAKES = {
    "1 mixing matrix not transposed": Mistake(mixing_not_transposed, LAYERS),
    "2 a sublayer's own pre": Mistake(own_pre, LAYERS),
    "3 eps 1e-6 in norms": Mistake(norm_eps, TEXT),
    "3 eps 1e-20 in Sinkhorn": Mistake(sinkhorn_eps, MIXES),
    "4 routing weight after w2": Mistake(part(expert, weigh_late=True), LAYERS),
    "4 bias in the routing weight": Mistake(bias_in_the_weight, LAYERS),
    "5 outputs of w1, w2, w3 not rounded": Mistake(part(expert, is_rounded=False), ROWS),
    "6 gate clamped on both sides": Mistake(part(expert, low=True), TEXT),
    "6 gate clamped on both sides, expert": Mistake(part(expert, low=True), CLOSED),
    "6 gate not clamped": Mistake(part(expert, high=False), LAYERS),
    "6 gate not clamped, expert": Mistake(part(expert, high=False), OPEN),
    "7 nibbles swapped": Mistake(nibbles_swapped, LAYERS),
    "7 w2 and w3 swapped": Mistake(part(matrices_swapped, a=1, b=2), LAYERS),
    "7 w1 and w3 swapped": Mistake(part(matrices_swapped, a=0, b=2), LAYERS),
    "9 index scores in fp32": Mistake(scores_not_rounded, CHOICES),
    "9 highest place wins": Mistake(highest_place_wins, CHOICES),
    "10 keys of the last source": Mistake(keys_of_the_last_source, DECODED),
    "11 window's theta everywhere": Mistake(part(tables, change=lambda t: [t[0], t[0]]), LAYERS),
    "11 compressed theta everywhere": Mistake(part(tables, change=lambda t: [t[1], t[1]]), LAYERS),
    "12 halves instead of pairs": Mistake(halves_rotated, LAYERS),
    "12 no inverse rotation": Mistake(no_inverse, LAYERS),
    "12 inverse at the key's position": Mistake(inverse_at_the_key, LAYERS),
    "13 sink in the running maximum": Mistake(sink_in_the_maximum, ATTENTION),
    "13 sink scaled": Mistake(part(sink, change=lambda sink, scale: sink * scale), LAYERS),
    "13 no sink": Mistake(part(sink, change=lambda sink, _: sink - torch.inf), LAYERS),
    "14 entry rotated at its last token": Mistake(
        part(entries_rotated_elsewhere, change=at_the_last_token), ENTRIES
    ),
    "14 entry rotated at j": Mistake(part(entries_rotated_elsewhere, change=at_the_entry), ENTRIES),
    "15 visible a token too late": Mistake(part(visible_later, tokens=1), CHOICES),
    "15 visible a token too early": Mistake(part(visible_later, tokens=-1), CHOICES),
    "16 entries quantised before rotation": Mistake(
        part(quantised_before_rotation, is_window=False), ENTRIES
    ),
    "16 window quantised before rotation": Mistake(
        part(quantised_before_rotation, is_window=True), ENTRIES
    ),
    "16 entries in blocks of 32": Mistake(entries_in_blocks_of_32, ENTRIES),
    "17 powers by logarithm": Mistake(powers_by_logarithm, POWERS),
    "17 exact powers doubled": Mistake(powers_always_above, QUANTISERS),
    "18 E8M0 off by one": Mistake(scales_off_by_one, LAYERS),
    "18 E8M0 off by one, codes": Mistake(scales_off_by_one, SCALES),
    "18 E8M0 read as numbers": Mistake(scales_read_as_numbers, SCALES),
    "18 E4M3 of other hardware": Mistake(other_e4m3, LAYERS),
    "20 Engram context not restored": Mistake(context_not_restored, RESTORED),
    "20 Engram context not kept": Mistake(context_not_kept, TEXT),
    "22 coarse fp32 products": Mistake(coarse_mixes, PRODUCTS),
    "27 experts added as they arrive": Mistake(added_in_order_of_arrival, ORDER),
    "33 products in fp32": Mistake(products_in_fp32, ROWS),
    "33 products in fp32, type": Mistake(products_in_fp32, DTYPES),
    "33 caches in fp32": Mistake(caches_in_fp32, DTYPES),
}


@pytest.mark.parametrize(("measure", "bound"), CHECKS, ids=[m.__name__ for m, _ in CHECKS])
def test_check_passes_without_a_mistake(measure, bound):
    found = measure()
    print(f"{found:.2g} of {bound}")
    assert found <= bound


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_seen(monkeypatch, mistake):
    measure, bound = mistake.seen_by
    how = mistake.plant(monkeypatch) or {}
    found = measure(**how)
    print(f"{measure.__name__}: {found:.2g}, right: {bound} at most")
    assert not found <= bound  # not a number counts as seen


def test_every_check_sees_something():
    assert {m.seen_by for m in MISTAKES.values()} == set(CHECKS)


def test_keys_of_the_last_source_are_what_is_released(monkeypatch):
    """10: the golden files have both; the planted mistake is the released one, and not what is right."""
    keys_of_the_last_source(monkeypatch)
    records = golden("model_p100")
    fed, released = records["decode.tokens"], records["decode_stale_k.tokens"]
    same = int((fed == released).int().cumprod(0).sum())  # as long as both are fed the same
    assert same > 2
    found = decoded_choices("p100")[1][:same]
    assert torch.equal(found, records["decode_stale_k.index.1.selected"][:same].long())
    assert not torch.equal(found, records["decode.index.1.selected"][:same].long())


def test_dividing_by_the_largest_value_is_no_mistake_for_bf16():
    """17: amax / 448 and amax * (1 / 448) differ in fp32, but no bf16 number shows it."""
    every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(BF16).float()
    amax = every[every.isfinite() & (every >= ops.AMAX_FLOOR)]
    for largest in (formats.E4M3_MAX, formats.E2M1_MAX):
        product = ops.power_of_two_above(amax * (1.0 / largest))
        assert torch.equal(product, ops.power_of_two_above(amax / largest))
