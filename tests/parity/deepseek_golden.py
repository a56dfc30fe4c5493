"""DeepSeek checkpoints of this tree with their experts in memory, and the recorded vectors of the golden one."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file

from runtime.experts.layout import ExpertKey
from runtime.models import deepseek_matrices
from runtime.models.deepseek_engram import EngramHash, build_token_map, dequantize_rows
from runtime.models.deepseek_model import Choice, DeepseekModel
from runtime.models.deepseek_weights import DeepseekSpec, expert_prefix
from runtime.stats import ExpertCounters

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "deepseek_golden"
TINY = ROOT / "runtime" / "bundled" / "tiny-deepseek"
MAX_POSITIONS = 192
PROMPTS = ["p1", "p7", "p40", "p100"]
PARTS = ("w1", "w2", "w3")

# README of the golden vectors: a layer from golden inputs, and logits fed with golden tokens
LAYER_BOUND = 3e-4
MEDIAN_BOUND = 0.01


@functools.cache
def golden(name):
    """The tensors of one golden file."""
    return load_file(GOLDEN / f"{name}.safetensors")


@functools.cache
def weights_of(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


@functools.cache
def spec_of(folder):
    return DeepseekSpec.from_config(json.loads((folder / "config.json").read_text()))


@functools.cache
def hash_of(folder):
    return EngramHash(spec_of(folder), build_token_map(folder / "tokenizer.json"))


class MemoryExperts:
    """An ExpertSource whose records are copies in memory; each is spoilt when the next is asked for.

    seed: of the order of arrival; None for the order asked for.
    """

    max_route = 10**6

    def __init__(self, weights, seed=None):
        self.weights, self.counters = weights, ExpertCounters()
        self.random = None if seed is None else random.Random(seed)
        self.arrived = []  # of the last call

    def fetch(self, layer, ids, guesses=()):
        order = list(ids)
        if self.random is not None:
            self.random.shuffle(order)
        self.arrived = order
        for expert in order:
            record = self.record(ExpertKey(layer, expert))
            yield expert, record
            record.fill_(0xFF)

    def sweep(self, layer, ids, hold=1):
        return self.fetch(layer, ids)

    def record(self, key):
        tensors = [
            self.weights[f"{expert_prefix(key)}{part}.{what}"]
            for what in ("weight", "scale")
            for part in PARTS
        ]
        return torch.cat([t.view(torch.uint8).flatten() for t in tensors])


def open_record(spec, key, record):
    """Cut a record of MemoryExperts into its tensors and dequantise them."""
    d, f = spec.hidden, spec.intermediate
    shapes = [(f, d), (d, f), (f, d)]
    sizes = [(n, k // 2) for n, k in shapes] + [(n, k // 32) for n, k in shapes]
    pieces = record.split([n * k for n, k in sizes])
    tensors = [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]
    return deepseek_matrices.expert_matrices(tensors[:3], tensors[3:])


def make_model(folder=GOLDEN / "checkpoint", seed=None, spec=None):
    """Build a model; nothing of an earlier one is kept, so that what is patched in between counts."""
    weights, spec = weights_of(folder), spec or spec_of(folder)

    def engram_rows(layer, ids):
        name, places = f"layers.{layer}.engram.embed", torch.tensor(list(ids))
        values, scales = (
            weights[f"{name}.{w}"].view(torch.uint8)[places] for w in ("weight", "scale")
        )
        return dequantize_rows(values, scales).view(-1, spec.engram_dim)

    return DeepseekModel(
        spec,
        weights,
        MemoryExperts(weights, seed),
        functools.partial(open_record, spec),
        engram_rows,
        hash_of(folder).row_ids,
        MAX_POSITIONS,
    )


def fed_tokens(prompt):
    """A prompt and the 24 tokens that the reference was fed with."""
    model = golden(f"model_{prompt}")
    return model["input_ids"].tolist() + model["decode.tokens"][:-1].tolist()


def wanted_logits(prompt):
    """The reference's logits after each of `fed_tokens`."""
    model = golden(f"model_{prompt}")
    return torch.cat([model["prefill.logits"], model["decode.logits"]])


def in_pieces(model, tokens, sizes):
    """Return the logits after every token; the last size is repeated to the end."""
    state, at, out = model.new_state(), 0, []
    sizes = list(sizes)
    while at < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        out.append(model.prefill(tokens[at : at + size], state, all_logits=True))
        at += size
    return torch.cat(out)


def row_errors(found, wanted):
    """Root mean square error of each row of logits."""
    return (found - wanted).square().mean(1).sqrt()


class Layers:
    """The layers of the 40-token prompt, each from golden inputs; the state carries over to the decoded steps."""

    def __init__(self, model):
        self.model, self.state = model, model.new_state()
        self.records = golden("layers_p40")
        self.routes = {}  # layer -> (ids, weights) of the last step
        for block in model.blocks:
            block.moe.route = functools.partial(self._route, block.layer, block.moe.route)

    def _route(self, layer, route, u):
        self.routes[layer] = route(u)
        return self.routes[layer]

    @torch.inference_mode()
    def step(self, part):
        """part: prefill, decode0 or decode1, in this order.  Yields (layer, streams, pre after it, choice)."""
        start, choice = {"prefill": 0, "decode0": 40, "decode1": 41}[part], Choice()
        for block in self.model.blocks:
            streams, pre = (
                self.records[f"{part}.{block.layer}.{name}"] for name in ("h_in", "pre_mix_in")
            )
            out, after = self.model.run_block(block, streams, pre, start, choice, self.state)
            yield block.layer, out, after, choice

    def wanted(self, part, layer):
        """Return the recorded (streams, pre after the layer)."""
        name = f"{part}.{layer}.h_out"
        streams = self.records[name if name in self.records else f"{part}.{layer + 1}.h_in"]
        return streams, self.records[f"{part}.{layer}.pre_mix_out"]


def relative_error(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def padded_to(slots, width):
    """Chosen places, ascending, with -1 behind them, as the golden files have them."""
    last = slots.max() + 1
    slots = torch.where(slots < 0, last, slots).sort(dim=1).values
    slots = torch.where(slots == last, -1, slots)
    return torch.nn.functional.pad(slots, (0, width - slots.shape[1]), value=-1)
