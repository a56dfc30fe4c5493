"""Decoding with a share of the experts computed aside, as beside a GPU, against decoding without, on the CPU.

The decoders are those of the GPU, started one function after the other; slots are filled at once.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from runtime.experts.cpu_share import CpuShare, fixed_counts
from runtime.experts.layout import ExpertKey
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.experts.streamer import ExpertStreamer
from runtime.models import cpu_experts, qwen_decode
from runtime.models.cpu_experts import Mxfp4Compute, Nvfp4Compute
from runtime.stats import ExpertCounters
from tests.parity import deepseek_golden as golden
from tests.parity.test_deepseek_decoder import SKEW, MemoryWaves, Offsets, packed_model

CPU = torch.device("cpu")


class AtOnce:
    """A copier whose copies are done when they are asked for."""

    def __init__(self, num_slots: int, nbytes: int) -> None:
        self.slots = torch.zeros(num_slots, nbytes, dtype=torch.uint8)

    def copy(self, slot, record):
        self.slots[slot, : len(record)] = record

    def mark(self):
        return None

    def wait(self, mark):
        pass

    launched, follow, synchronize = mark, wait, wait


def in_front(source, layers, top_k, nbytes, kept, early=0, in_place=True):
    passing = passing_slots(early, nbytes, 0 if in_place else top_k)
    return SlotExperts(source, AtOnce(passing + kept, nbytes), layers, top_k, early, in_place)


@pytest.fixture(params=["compiled", "torch"])
def kernels(request):
    if request.param == "torch":
        return None
    pytest.importorskip("numba")
    kernels = cpu_experts.compiled_kernels()
    kernels.set_threads(1)
    return kernels


# ---- Qwen ------------------------------------------------------------------------------------------------------------


def shared_qwen(model, share, kernels, kept, early):
    """Return a decoder of the model with a share on the CPU, and what stands before its experts."""
    spec = model.spec
    scales = torch.stack([moe.scales for moe in model.moes])
    compute = Nvfp4Compute(
        scales, spec.top_k, spec.hidden, spec.intermediate, torch.float32, CPU, kernels
    )
    source = model.experts
    slots = in_front(source, spec.num_layers, spec.top_k, source.record_nbytes, kept, early)
    slots.share = CpuShare(compute, fixed_counts(share, spec.top_k), spec.hidden, CPU)
    return qwen_decode.Decoder(model, 300, has_graphs=False, cpu=(slots.share, compute)), slots


def greedy(model, step, prompt, count, slots=None):
    """Return the logits of a prompt's last token and of `count` greedy ones.

    slots: in front of the experts while decoding; a prompt would be computed by interpreted kernels behind them.
    """
    state, source = model.new_state(), model.experts
    rows = [model.prefill(prompt, state)[-1:]]
    model.experts = slots or source
    try:
        while len(rows) <= count:
            rows.append(step(int(rows[-1].argmax()), state).clone())
    finally:
        model.experts = source
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("share", "ram_gib", "kept", "early", "tokens"),
    [
        (0.5, 1.0, 0, 0, 100),  # all in RAM
        (1.0, 1.0, 0, 2, 40),  # nothing but early copies is left to the GPU
        (0.5, 0.002, 20, 2, 40),  # some in VRAM, some in RAM, some on the drive
        (1.0, 0.0, 0, 0, 20),  # hardly anything in RAM
    ],
)
def test_qwen_chooses_the_same_tokens(
    open_tiny, heldout_tokens, kernels, share, ram_gib, kept, early, tokens
):
    engine = open_tiny(**{"cache.ram_gib": ram_gib})
    model, prompt = engine.model, heldout_tokens[:20]
    assert isinstance(model.experts, ExpertStreamer)
    plain = qwen_decode.Decoder(model, 300, has_graphs=False)
    wanted = greedy(model, plain.step, prompt, tokens)
    decoder, slots = shared_qwen(model, share, kernels, kept, early)
    before = slots.counters.copy()
    found = greedy(model, decoder.step, prompt, tokens, slots)
    assert torch.equal(found.argmax(1), wanted.argmax(1))
    assert float((found - wanted).abs().max()) < 1e-4  # sums run in another order
    counters = slots.counters.since(before)
    assert (counters.cpu_experts > 0) == (counters.hits > model.spec.num_layers * 6)
    if share == 1 and not kept:
        first = model.spec.num_layers * model.spec.top_k  # the first step is the GPU's
        assert counters.hits - first <= counters.cpu_experts <= counters.hits
        copied = counters.hits + counters.late + counters.misses - counters.cpu_experts
        copied += counters.early_issued
        assert counters.copied_nbytes == copied * slots.record_nbytes, "what the CPU computes stays"


def test_one_token_of_a_prompt_is_not_shared(open_tiny, heldout_tokens, monkeypatch):
    """A prompt's piece of one token asks for experts one by one: all of them must come."""
    model = open_tiny().model
    wanted = model.prefill(heldout_tokens[:1], model.new_state())
    decoder, slots = shared_qwen(model, 1.0, None, 0, 0)
    monkeypatch.setattr(model, "experts", slots)
    state = model.new_state()
    for token in heldout_tokens[:3]:
        decoder.step(token, state)
    assert torch.equal(model.prefill(heldout_tokens[:1], model.new_state()), wanted)


def test_a_dropped_row_would_show(open_tiny, heldout_tokens, monkeypatch):
    """The control of this file: rows that stay away change the logits."""
    model = open_tiny().model
    plain = qwen_decode.Decoder(model, 300, has_graphs=False)
    wanted = greedy(model, plain.step, heldout_tokens[:20], 3)
    decoder, slots = shared_qwen(model, 0.5, None, 0, 0)
    monkeypatch.setattr(slots.share, "put", lambda rows: None)
    found = greedy(model, decoder.step, heldout_tokens[:20], 3, slots)
    assert float((found - wanted).abs().max()) > 0.1


# ---- DeepSeek --------------------------------------------------------------------------------------------------------


class WavesInRam(MemoryWaves):
    """Half of the records and one at once, the others later."""

    def __init__(self, weights, seed):
        super().__init__(weights, seed)
        self.counters = ExpertCounters()
        self.record_nbytes = len(self.record(ExpertKey(0, 0)))

    def waves(self, layer, ids, guesses=()):
        order = [(expert, self.kept(ExpertKey(layer, expert))) for expert in ids]
        yield order[: len(order) // 2 + 1]
        yield []
        yield order[len(order) // 2 + 1 :]


@pytest.mark.slow  # an interpreted step takes seconds
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="interpreted on a CPU; tests/gpu has the compiled kernels"
)
def test_deepseek_gives_the_same_logits(monkeypatch):
    """A step behind a prompt: with all experts in RAM on the CPU, with none, and by the layers' own path."""
    from runtime.models.deepseek_decode import Decoder

    assert SKEW % 8 == 4, "payloads lie off any word of eight bytes"
    has_numba = importlib.util.find_spec("numba") is not None
    kernels = cpu_experts.compiled_kernels() if has_numba else None
    *prompt, token = golden.fed_tokens("p7")[:7]
    plain = golden.make_model()
    state = plain.new_state()
    plain.prefill(prompt, state)
    start = state.tensors()
    wanted = plain.decode(token, state)

    model = packed_model(monkeypatch)
    spec, offsets = model.spec, Offsets(model.spec)
    found = {}
    for share in (0.0, 1.0):
        source = WavesInRam(golden.weights_of(golden.GOLDEN / "checkpoint"), seed=1)
        compute = Mxfp4Compute(
            spec.top_k, spec.hidden, spec.intermediate, spec.swiglu_limit, CPU,
            offsets.payload_offsets, model.open_expert, kernels,
        )  # fmt: skip
        slots = in_front(
            source, spec.num_layers, spec.top_k, source.record_nbytes, 0, in_place=False
        )
        slots.share = CpuShare(compute, fixed_counts(share, spec.top_k), spec.hidden, CPU)
        model.decoder = Decoder(model, offsets, has_graphs=False, cpu=(slots.share, compute))
        model.decoder._steps = 1  # the first step would be the GPU's
        model.experts, state = slots, model.new_state()
        state.restore(start)
        found[share] = model.decode(token, state)
        in_ram = spec.num_layers * (spec.top_k // 2 + 1)
        assert slots.counters.cpu_experts == share * in_ram
    same = float((found[0.0] == found[1.0]).float().mean())
    print(f"{same:.4f} of the logits are equal to the bit with and without the CPU")
    for logits in found.values():
        assert torch.equal(logits.argmax(1), wanted.argmax(1))
        error = (logits - wanted).pow(2).mean(1).sqrt() / wanted.std(1)
        assert float(error) < golden.MEDIAN_BOUND
