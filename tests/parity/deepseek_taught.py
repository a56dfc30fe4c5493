"""One run of a DeepSeek model recorded, operation by operation, and another run that is corrected after each of them.

Whole models part wherever one bf16 result is rounded otherwise (EXPERIMENTS.md, "where DeepSeek's two arithmetics
part"), so two devices are compared from the same inputs: the second run computes every operation along its own path,
what it made is compared with the record, and then the record takes its place, in the states too. Nothing that was
rounded otherwise goes on, and a mistake shows in the very operation that made it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference_deepseek as ops
from runtime.models import deepseek_model as native
from runtime.models.deepseek_moe import Moe
from runtime.models.deepseek_reference import ReferenceModel

STEP = 2.0**-8  # no row is further aside than with all its numbers a bf16 step aside


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """What two devices may differ in, given the same inputs."""

    share: float  # of all results of a kind that may be unequal: fp64 in place of fp32 makes up to 6e-5
    row: float  # norm of a row's difference, relative: for each row


FP32 = 1.0  # nearly every fp32 sum differs in its last bit
BOUNDS = {
    # integers, and roundings of equal numbers
    "best_places": Bound(0, 0),
    "candidate_mask": Bound(0, 0),
    "act_rounded": Bound(0, 0),
    "fp4_rounded": Bound(0, 0),
    # sums of four streams, products with a cosine: fp32, then bf16
    "rotate": Bound(1e-3, STEP),
    "hyper_read": Bound(1e-3, STEP),
    "hyper_write": Bound(1e-3, STEP),
    # fp32 results: sums in another order, an exponential, 20 iterations
    "hyper_mixes": Bound(FP32, 2e-5),
    "steady_linear": Bound(FP32, 2e-6),
    "route ids": Bound(1e-3, 1.0),
    "route weights": Bound(FP32, 2e-5),
    "read_out": Bound(FP32, 2e-5),
    # products of blocks in their order, behind bf16
    "quantized_linear": Bound(1e-3, STEP),
    # behind a sum of squares
    "rms_norm": Bound(2e-3, STEP),
    "Engram": Bound(2e-3, STEP),
    # products summed in the library's own order
    "fp32 product": Bound(FP32, 2e-5),
    "fp32 mixes": Bound(FP32, 1e-4),
    "input of quantized_linear": Bound(0.02, STEP),
    # which may keep its partial sums in bf16
    "bf16 product": Bound(0.1, 4 * STEP),
    "input of rms_norm": Bound(0.1, 4 * STEP),
    "index weights": Bound(0.1, 4 * STEP),
    "index_scores": Bound(0.01, 2 * STEP),
    "slots": Bound(0, 0),
    # shares on the other side of a bf16 rounding, behind an exponential
    "sparse_attention": Bound(0.01, STEP),
    # one inner number rounded otherwise changes an E4M3 code now and then: 12 % at most, of one number of one expert
    "Moe": Bound(0.01, 0.1),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """One result and what the recorded run had in its place."""

    kind: str
    layer: int
    unequal: int
    numel: int
    row: float  # the worst row's relative difference


def compare(kind: str, layer: int, found: Tensor, wanted: Tensor) -> Compared:
    """Compare a result with the recorded one.  Places that are infinite in both are equal."""
    assert found.shape == wanted.shape, f"layer {layer}, {kind}: {found.shape}, {wanted.shape}"
    assert found.dtype == wanted.dtype, f"layer {layer}, {kind}: {found.dtype}, {wanted.dtype}"
    if not found.numel():
        return Compared(kind, layer, 0, 0, 0.0)
    a, b = (x.detach().cpu().double().reshape(-1, x.shape[-1]) for x in (found, wanted))
    is_same = a == b
    if bool(is_same.all()):
        return Compared(kind, layer, 0, a.numel(), 0.0)
    size = b.nan_to_num(posinf=0.0, neginf=0.0).norm(dim=1)
    aside = (a - b).masked_fill(is_same, 0).norm(dim=1)  # nan where one of them is not a number
    row = (aside / size).masked_fill(aside == 0, 0).nan_to_num(nan=float("inf")).max()
    return Compared(kind, layer, int((~is_same).sum()), a.numel(), float(row))


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """All results of one kind."""

    name: str
    bound: Bound
    results: list[Compared]

    @property
    def share(self) -> float:
        return sum(r.unequal for r in self.results) / max(1, sum(r.numel for r in self.results))

    @property
    def worst(self) -> Compared:
        return max(self.results, key=lambda r: r.row)

    @property
    def faults(self) -> list[str]:
        """Say what is over its bound."""
        found = []
        if self.share > self.bound.share:
            found.append(f"{self.name}: {self.share:.1e} unequal, at most {self.bound.share:.0e}")
        found += [
            f"layer {r.layer}, {r.kind}: a row {r.row:.1e} aside, at most {self.bound.row:.1e}"
            for r in self.results
            if r.row > self.bound.row
        ]
        return found


def kinds_of(results: list[Compared], bounds: dict[str, Bound]) -> list[Kind]:
    names = dict.fromkeys(r.kind for r in results)
    return [Kind(name, bounds[name], [r for r in results if r.kind == name]) for name in names]


def faults_of(results: list[Compared], bounds: dict[str, Bound] = BOUNDS) -> list[str]:
    """Return what is over its bound, in the order of kinds; print what each kind came to."""
    kinds = kinds_of(results, bounds)
    for kind in kinds:
        worst = kind.worst
        print(
            f"{kind.name:27} {len(kind.results):6} results, {kind.share:.1e} unequal (at most {kind.bound.share:.0e}), "
            f"worst row {worst.row:.1e} in layer {worst.layer} (at most {kind.bound.row:.1e})"
        )
    return [fault for kind in kinds for fault in kind.faults]


Kinds = str | tuple[str, ...] | Callable[..., str]


class Tape:
    """The results of one run in their order; a second run is compared with them and given them."""

    def __init__(self) -> None:
        self.results: list[tuple[str, int, Tensor]] = []
        self.compared: list[Compared] = []
        self.layer = -1
        self._at: int | None = None  # of the second run; None: the first
        self._is_inside = False

    def rewind(self) -> None:
        """From here on: a second run."""
        self._at, self.compared, self.layer = 0, [], -1

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self.results)

    def take(self, kind: str, result: Tensor) -> None:
        """Record a result, or compare it and overwrite it with the recorded one."""
        if self._at is None:
            self.results.append((kind, self.layer, result.detach().to("cpu", copy=True)))
            return
        wanted_kind, layer, wanted = self.results[self._at]
        assert (kind, self.layer) == (wanted_kind, layer), "the two runs go different ways"
        self._at += 1
        self.compared.append(compare(kind, self.layer, result, wanted))
        if self.compared[-1].unequal:
            result.copy_(wanted)

    def whole(
        self, function: Callable[..., Any], kinds: Kinds, inputs: dict[int, str], always: bool = False
    ) -> Callable[..., Any]:  # fmt: skip
        """Return the function, its results and some inputs taken; what it calls is part of it.

        kinds: of its results, or of each, or a function of its arguments.  always: also where it is called from inside
        another one.
        """

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside and not always:
                return function(*args, **kwargs)
            was_inside = self._is_inside
            for place, kind in inputs.items():
                self.take(kind, args[place])
            self._is_inside = True
            try:
                out = function(*args, **kwargs)
            finally:
                self._is_inside = was_inside
            parts = out if isinstance(out, tuple) else (out,)
            names = kinds(*args) if callable(kinds) else kinds
            names = (names,) * len(parts) if isinstance(names, str) else names
            for part, kind in zip(parts, names, strict=True):
                self.take(kind, part)
            return out

        return run

    def noted(self, function: Callable[..., Any], layer_of: Callable[..., int]) -> Callable[..., Any]:  # fmt: skip
        """Return the function; which layer it is called for is remembered."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.layer = layer_of(*args)
            return function(*args, **kwargs)

        return run


# ---- which operations ------------------------------------------------------------------------------------------------

NATIVE_OPS = {
    "quantized_linear": {0: "input of quantized_linear"},
    "rms_norm": {0: "input of rms_norm"},
    "hyper_mixes": {},
    "hyper_read": {},
    "hyper_write": {},
    "rotate": {},
    "act_rounded": {},
    "fp4_rounded": {},
    "steady_linear": {},
    "index_scores": {2: "index weights"},
    "best_places": {},
    "candidate_mask": {},
    "sparse_attention": {3: "slots"},
}


@contextmanager
def native_taught(tape: Tape) -> Iterator[None]:
    """Take what the native layers compute, on any device; a decoder of fixed shapes does not pass here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, inputs in NATIVE_OPS.items():
            patch.setattr(ops, name, tape.whole(getattr(ops, name), name, inputs))
        model = native.DeepseekModel
        patch.setattr(native.Engram, "__call__", tape.whole(native.Engram.__call__, "Engram", {}))
        patch.setattr(Moe, "__call__", tape.whole(Moe.__call__, "Moe", {}))
        kinds = "route ids", "route weights"
        patch.setattr(Moe, "route", tape.whole(Moe.route, kinds, {}, always=True))
        for name in ("attend", "_recall"):
            method = tape.noted(getattr(model, name), lambda _model, block, *_: block.layer)
            patch.setattr(model, name, method)

        def read_out(self: Any, *args: Any) -> Tensor:
            tape.layer = self.spec.num_layers  # behind the last one
            logits = plain_read_out(self, *args)
            tape.take("read_out", logits)
            return logits

        plain_read_out = model.read_out
        patch.setattr(model, "read_out", read_out)
        yield


def _linear_kind(_x: Tensor, weight: Tensor, *_: Any) -> str:
    plain = {torch.float32: "fp32 product", torch.bfloat16: "bf16 product"}
    return plain.get(weight.dtype, "quantized_linear")


@contextmanager
def reference_taught(tape: Tape, model: ReferenceModel) -> Iterator[None]:
    """Take what the published code computes, on any device."""
    published = model.parts.package.model
    functions: dict[str, tuple[Kinds, dict[int, str]]] = {
        "linear": (_linear_kind, {0: "input of quantized_linear"}),
        "apply_rotary_emb": ("rotate", {}),
        "act_quant": ("act_rounded", {}),
        "fp4_act_quant": ("fp4_rounded", {}),
        "sparse_attn": ("sparse_attention", {3: "slots"}),
        "best": ("best_places", {0: "index_scores"}),
    }
    methods: dict[tuple[type, str], tuple[Kinds, dict[int, str]]] = {
        (published.RMSNorm, "forward"): ("rms_norm", {1: "input of rms_norm"}),
        (published.Block, "hc_mixes"): ("fp32 mixes", {}),
        (published.Block, "hc_pre"): ("hyper_read", {}),
        (published.Block, "hc_post"): ("hyper_write", {}),
        (published.Engram, "forward"): ("Engram", {}),
        (type(model.transformer.layers[0].ffn), "forward"): ("Moe", {}),
    }
    handles = []
    for layer, block in enumerate(model.transformer.layers):

        def note(_module: Any, _args: Any, layer: int = layer) -> None:
            tape.layer = layer

        handles.append(block.register_forward_pre_hook(note))
        if block.engram is not None:
            handles.append(block.engram.register_forward_pre_hook(note))
    with pytest.MonkeyPatch.context() as patch:
        for name, (kinds, inputs) in functions.items():
            patch.setattr(published, name, tape.whole(getattr(published, name), kinds, inputs))
        for (owner, name), (kinds, inputs) in methods.items():
            patch.setattr(owner, name, tape.whole(getattr(owner, name), kinds, inputs))
        gate = ("route weights", "route ids"), {}
        patch.setattr(
            published.Gate, "forward", tape.whole(published.Gate.forward, *gate, always=True)
        )
        head = type(model.transformer.head)
        plain_head = head.forward

        def read_out(module: Any, *args: Any, **kwargs: Any) -> Tensor:
            out = plain_head(module, *args, **kwargs)
            tape.take("read_out", model.parts.logits)
            return out

        patch.setattr(head, "forward", read_out)
        yield
    for handle in handles:
        handle.remove()


# ---- two runs --------------------------------------------------------------------------------------------------------


def teach_prompt(first: Any, second: Any, tokens: list[int]) -> tuple[Tape, Any, Any]:
    """Take a prompt into two native models, the second corrected.  Returns what was compared, and both states."""
    tape, states = Tape(), (first.new_state(), second.new_state())
    chunk, first.chunk_tokens = first.chunk_tokens, second.chunk_tokens  # as many calls
    with native_taught(tape):
        first.prefill(tokens, states[0], all_logits=True)
        tape.rewind()
        second.prefill(tokens, states[1], all_logits=True)
    first.chunk_tokens = chunk
    assert tape.is_at_end
    return tape, *states


def run_reference(
    tape: Tape, model: ReferenceModel, tokens: list[int], prompt: int
) -> dict[str, Tensor]:
    """Take in a prompt, then token by token.  Returns the state behind them.

    A process holds one model of the published code: record, close, open the other, `rewind`, run again.
    """
    state = model.new_state()
    with reference_taught(tape, model):
        model.prefill(tokens[:prompt], state, all_logits=True)
        for token in tokens[prompt:]:
            model.decode(token, state)
    return state.tensors()


def record_token(model: Any, token: int, state: Any) -> Tape:
    """Take a token in along the layers' own path."""
    tape = Tape()
    with native_taught(tape):
        model.decode(token, state)
    return tape


def others_of(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return which tensors of a corrected state are not the recorded ones, to the bit."""
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


# ---- whole models ----------------------------------------------------------------------------------------------------

# one bf16 step of one number ends at a median of 3e-2 and 0.6 at most (test_deepseek_taught.py)
MEDIAN_DRIFT = 0.1
MARGIN = 4  # rms differences of a row: a choice that is further ahead stays; of those that changed 1.1 at most


def drift_of(found: Tensor, wanted: Tensor) -> Tensor:
    """Return each row's rms difference of logits, in standard deviations of the row."""
    return (found - wanted).square().mean(1).sqrt() / wanted.std(1)


def drift_faults(found: Tensor, wanted: Tensor, clear: float = 0.5) -> list[str]:
    """Return what cannot be two correct devices: logits [T, vocab] of the same tokens.

    clear: least share of rows whose choice no drift can change.
    """
    drift = drift_of(found, wanted)
    best = wanted.topk(2, dim=1)
    is_clear = best.values[:, 0] - best.values[:, 1] > MARGIN * drift * wanted.std(1)
    is_other = found.argmax(1) != best.indices[:, 0]
    print(
        f"drift: median {drift.median():.1e}, largest {drift.max():.1e}; another choice in {int(is_other.sum())} of "
        f"{len(drift)}, clear ones {int(is_clear.sum())}, of these {int((is_clear & is_other).sum())}"
    )
    faults = []
    if drift.median() >= MEDIAN_DRIFT:
        faults.append(f"median drift {drift.median():.1e}")
    if bool((is_clear & is_other).any()):
        faults.append("a clear choice is another one")
    if is_clear.float().mean() < clear:
        faults.append("few choices are clear")
    return faults


def perplexity(logits: Tensor, tokens: list[int]) -> float:
    """Return the perplexity of tokens[1:]: logits [T, vocab] behind each token."""
    wanted = torch.tensor(tokens[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), wanted).exp())
