"""The decoder of fixed shapes against the layers' own path, weights as they are stored; kernels interpreted."""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest
import torch

from kernels.deepseek_prompt import Fp8Weight
from runtime.experts.layout import ExpertKey
from runtime.models import deepseek_model, deepseek_moe
from runtime.models.deepseek_decode import Decoder
from runtime.models.deepseek_whole import TokenDecoder
from runtime.models.head_split import HeadSplit
from tests.parity import deepseek_golden as golden

pytestmark = pytest.mark.slow  # an interpreted step takes seconds
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SKEW = 4  # bytes before a record's payload
CODES = 3  # matrices, whose codes lie before their scales


class MemoryWaves(golden.MemoryExperts):
    """Records in waves of random sizes and order, each record off by four bytes."""

    def __init__(self, weights, seed):
        super().__init__(weights, seed)
        self.random = random.Random(seed)
        self.guesses = []

    def record(self, key):
        record = super().record(key)
        return torch.cat([torch.zeros(SKEW, dtype=torch.uint8), record])

    def waves(self, layer, ids, guesses=()):
        order = list(ids)
        self.random.shuffle(order)
        self.guesses.append(list(guesses))
        yield []
        while order:
            size = self.random.randint(1, len(order))
            yield [(expert, self.kept(ExpertKey(layer, expert))) for expert in order[:size]]
            order = order[size:]

    def kept(self, key):
        record = self.record(key)
        self.alive = [*getattr(self, "alive", [])[-8:], record]
        return record


class Offsets:
    """Where the payload lies in such a record."""

    def __init__(self, spec):
        self.codes_nbytes = CODES * spec.hidden * spec.intermediate // 2

    def payload_offsets(self, key):
        return SKEW, SKEW + self.codes_nbytes


def packed_model(monkeypatch, num_guesses=0):
    """The golden model with its FP8 weights as they are stored, and a decoder."""

    def stored(weights, name):
        return Fp8Weight(weights[f"{name}.weight"], weights[f"{name}.scale"])

    for module in (deepseek_model, deepseek_moe):
        monkeypatch.setattr(module, "fp8_matrix", stored)
    model = golden.make_model()
    model.num_guesses = num_guesses
    cut = model.open_expert
    model.open_expert = lambda key, record: cut(key, record[SKEW:])
    model.decoder = Decoder(model, Offsets(model.spec), has_graphs=False)
    model.experts = MemoryWaves(golden.weights_of(golden.GOLDEN / "checkpoint"), seed=1)
    return model


@pytest.mark.skipif(
    DEVICE == "cuda", reason="interpreted on a CPU; tests/gpu runs the compiled kernels"
)
@pytest.mark.parametrize(("prompt", "steps"), [("p1", 3), ("p40", 2)])
def test_decoder_is_the_layers_own_path(monkeypatch, prompt: str, steps: int):
    plain = golden.make_model()
    tokens = golden.fed_tokens(prompt)
    length = len(tokens) - 23
    state = plain.new_state()
    plain.prefill(tokens[:length], state)
    start = state.tensors()
    wanted = torch.cat([plain.decode(token, state) for token in tokens[length : length + steps]])

    model = packed_model(monkeypatch, num_guesses=4)
    other = model.new_state()
    other.restore(start)
    found = torch.cat([model.decode(token, other) for token in tokens[length : length + steps]])
    assert torch.equal(found.argmax(1), wanted.argmax(1))
    errors = (found - wanted).pow(2).mean(1).sqrt() / wanted.std(1)
    assert float(errors.median()) < golden.MEDIAN_BOUND
    for name, value in state.tensors().items():
        close = (
            other.tensors()[name].float() - value.float()
        ).abs() <= 0.02 * value.float().abs().max()
        assert close.float().mean() > 0.98, name


@pytest.mark.skipif(
    DEVICE == "cuda", reason="interpreted on a CPU; tests/gpu runs the compiled kernels"
)
def test_two_conversations_take_turns(monkeypatch):
    model = packed_model(monkeypatch)
    tokens = golden.fed_tokens("p7")
    alone = model.new_state()
    wanted = torch.cat([model.decode(token, alone) for token in tokens[:2]])
    one, two = model.new_state(), model.new_state()
    found = []
    for token in tokens[:2]:
        found.append(model.decode(token, one))
        if not two.position:
            model.decode(tokens[6], two)
    assert torch.equal(torch.cat(found), wanted)
    for name, value in alone.tensors().items():
        assert torch.equal(one.tensors()[name], value), name


@pytest.mark.skipif(
    DEVICE == "cuda", reason="interpreted on a CPU; tests/gpu runs the compiled kernels"
)
def test_prompts_and_steps_alternate(monkeypatch):
    """A prompt's tail token, whose partner a step brings, and the other way round."""
    plain, tokens = golden.make_model(), golden.fed_tokens("p40")
    sizes = [3, 1, 2, 1]
    wanted = golden.in_pieces(plain, tokens[:7], sizes)
    model = packed_model(monkeypatch)
    state, found, at = model.new_state(), [], 0
    for size in sizes:
        piece = tokens[at : at + size]
        at += size
        found.append(
            model.decode(piece[0], state)
            if size == 1
            else model.prefill(piece, state, all_logits=True)
        )
    errors = (torch.cat(found) - wanted).pow(2).mean(1).sqrt() / wanted.std(1)
    assert float(errors.median()) < golden.MEDIAN_BOUND
    assert torch.equal(torch.cat(found).argmax(1), wanted.argmax(1))


@pytest.mark.skipif(DEVICE == "cuda", reason="the layers' own path on a CPU")
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_chunks_of_a_prompt_never_show(chunk: int):
    model, tokens = golden.make_model(), golden.fed_tokens("p100")[:110]
    whole, cut = model.new_state(), model.new_state()
    wanted = model.prefill(tokens, whole, all_logits=True)
    model.chunk_tokens = chunk
    found = model.prefill(tokens, cut, all_logits=True)
    errors = (found - wanted).pow(2).mean(1).sqrt() / wanted.std(1)
    # bf16 products of another number of rows may round one result otherwise
    assert float(errors.median()) == 0
    assert float(errors.mean()) < 1e-3
    assert cut.position == whole.position


class ThreadDecoder(TokenDecoder):
    """The graph of a token is a thread."""

    def _launch(self):
        self.thread = threading.Thread(target=self._play, daemon=True)
        self.thread.start()

    @torch.inference_mode()
    def _play(self):
        self._whole()

    def _synchronize(self):
        if hasattr(self, "thread"):
            self.thread.join(120)
            assert not self.thread.is_alive(), "the graph hangs"

    def step(self, token, state):
        logits = super().step(token, state)
        self._synchronize()  # the stream's order
        return logits


@pytest.mark.skipif(
    DEVICE == "cuda", reason="interpreted on a CPU; tests/gpu runs the compiled kernels"
)
def test_one_graph_per_token_has_the_bits_of_segments(monkeypatch):
    """The first step runs in segments in any case."""
    tokens = golden.fed_tokens("p7")
    model = packed_model(monkeypatch, num_guesses=4)
    decoder = model.decoder = ThreadDecoder(model, Offsets(model.spec), 60.0, has_graphs=False)
    decoder._token_graph._breathe = lambda _: time.sleep(1e-3)  # the interpreter needs the core
    state, other = model.new_state(), model.new_state()
    model.decode(tokens[0], state)
    other.restore(state.tensors())
    wanted = Decoder.step(decoder, tokens[1], other).clone()
    assert torch.equal(model.decode(tokens[1], state), wanted)
    found = state.tensors()
    for name, value in other.tensors().items():
        assert torch.equal(found[name], value), name


@pytest.mark.skipif(
    DEVICE == "cuda", reason="interpreted on a CPU; tests/gpu runs the compiled kernels"
)
def test_a_shared_head_is_the_same_head(monkeypatch):
    """The CPU's rows differ by fp32's rounding, the GPU's by nothing."""
    tokens = golden.fed_tokens("p1")[:2]

    def decode(model):
        state = model.new_state()
        return torch.cat([model.decode(token, state) for token in tokens])

    model = packed_model(monkeypatch)
    wanted = decode(model)
    weight = golden.weights_of(golden.GOLDEN / "checkpoint")["head.weight"]
    product = functools.partial(model.decoder._linear.steady_linear, is_double=False)
    split = HeadSplit(weight, product, threads=2)
    for cpu_rows in (0, len(weight) // 2, len(weight)):
        split.cpu_rows = cpu_rows
        model.head_split = split
        model.decoder = Decoder(model, Offsets(model.spec), has_graphs=False)
        found = decode(model)
        assert torch.equal(found[:, cpu_rows:], wanted[:, cpu_rows:])
        u = model.decoder.u  # of the last token
        bound = 2 * u.numel() * 2.0**-24 * (weight.double().abs() @ u.double().abs())
        assert ((found[-1] - wanted[-1]).double().abs() <= bound).all()
        assert torch.equal(found.argmax(1), wanted.argmax(1))
    split.close()
