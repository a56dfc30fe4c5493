"""The reference arithmetic on a GPU, with the stand-in package: sublayers, golden logits, streaming, states.

Sublayers are compared with the CPU's from the CPU's inputs; without a GPU the CPU is the second device, too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from conf.schema import Kernels
from kernels import deepseek_published
from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.models import deepseek_backends as backends
from runtime.units import GIB
from tests.bench.compare_arithmetics import make_checkpoint
from tests.parity.deepseek_golden import PROMPTS, fed_tokens, wanted_logits
from tests.parity.deepseek_taught import Tape, drift_faults, faults_of, others_of, run_reference
from tests.standin import make_patched, make_published, make_snapshot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from tiny_setup import make_runner

# one worker: it compiles once, and makes what the tests share once
pytestmark = pytest.mark.xdist_group("deepseek_reference")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECORD_GIB = 12_288 / GIB
SETTINGS = {
    "hw.device": DEVICE, "model.setup": ["download", "patch"], "model.context_tokens": 192,
    "model.prefill_tokens": 128, "deepseek.arithmetic": "reference", "deepseek.kernels": "ours",
    "deepseek.fix_index_keys": True, "cache.ram_gib": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    snapshot = make_snapshot(folder / "snapshot")
    return EngineFiles(snapshot, published=make_patched(snapshot, folder / "patched"))


class OneEngine:
    """Opens engines: settings -> the last one if it has these, else that is closed first, as a process holds one."""

    def __init__(self, files, make_config):
        self.files, self.make_config = files, make_config
        self.asked, self.engine = None, None

    def __call__(self, is_resident=False, **overrides):
        asked = is_resident, overrides
        if asked != self.asked:
            self.close()
            config = self.make_config("tiny_deepseek", **{**SETTINGS, **overrides})
            self.engine, self.asked = Engine.open(config, self.files, is_resident), asked
        return self.engine

    def close(self):
        if self.engine is not None:
            self.engine.close()
        self.asked, self.engine = None, None


@pytest.fixture(scope="module")
def open_reference(files, make_config):
    one = OneEngine(files, make_config)
    yield one
    one.close()


def logits_of(model, tokens, prompt):
    state = model.new_state()
    found = [model.prefill(tokens[:prompt], state, all_logits=True).cpu()]
    found += [model.decode(token, state).cpu() for token in tokens[prompt:]]
    return torch.cat(found)


def sublayer_faults(open_on, tokens, prompt):
    """Take tokens in on the CPU, then corrected on the second device.  Returns what is over its bound."""
    tape, states = Tape(), []
    for device in ("cpu", DEVICE):
        states.append(run_reference(tape, open_on(device).model, tokens, prompt))
        if len(states) == 1:
            tape.rewind()
    assert tape.is_at_end
    return faults_of(tape.compared) + others_of(states[1], states[0])


NO_GUESSES = {"prefetch.experts": 0, "prefetch.copy": 0}  # they would be routes of their own


@pytest.mark.parametrize("prompt", ["p7", "p100"])
def test_sublayers_from_the_same_input(open_reference, prompt):
    """A prompt and 24 decoded tokens."""

    def open_on(device):
        return open_reference(**{"hw.device": device, **NO_GUESSES})

    tokens = fed_tokens(prompt)
    assert not sublayer_faults(open_on, tokens, len(tokens) - 24)


def test_a_mistake_shows(open_reference, monkeypatch):
    """On the second device one layer's queries are made of another input, in one block of columns."""

    def open_on(device):
        is_second = open_reference.asked is not None
        engine = open_reference(is_resident=is_second, **{"hw.device": device, **NO_GUESSES})
        if is_second:
            linear = engine.model.transformer.layers[2].attn.wq_b
            plain = linear.forward
            monkeypatch.setattr(
                linear, "forward", lambda x: plain(torch.cat([1.1 * x[..., :32], x[..., 32:]], -1))
            )
        return engine

    open_reference.close()
    faults = sublayer_faults(open_on, fed_tokens("p40")[:44], 40)
    open_reference.close()  # it is spoilt
    assert faults
    assert all("quantized_linear" in fault for fault in faults)


@pytest.mark.gpu
@pytest.mark.parametrize("prompt", PROMPTS)
def test_golden_logits(open_reference, prompt):
    tokens, wanted = fed_tokens(prompt), wanted_logits(prompt)
    found = logits_of(open_reference().model, tokens, len(tokens) - 24)
    # random weights leave fewer clear than trained ones
    assert not drift_faults(found, wanted, clear=0.3)


@pytest.fixture(scope="module")
def wanted_bits(open_reference):
    return logits_of(open_reference(is_resident=True).model, fed_tokens("p40"), 40)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 0.0, "prefetch.experts": 0, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 30 * RECORD_GIB, "prefetch.experts": 2, "prefetch.copy": 3},
        {"cache.ram_gib": 1.0, "prefetch.copy": 4, "cache.vram_gib": 40 * RECORD_GIB},
        {"cache.ram_gib": 1.0, "cache.table_rows": 0, "hw.drive.simulate_latency_us": 200.0},
    ],
)
def test_streamed_equals_resident(open_reference, wanted_bits, settings):
    engine = open_reference(**settings)
    for _ in range(2):
        assert torch.equal(logits_of(engine.model, fed_tokens("p40"), 40), wanted_bits)


@pytest.mark.gpu
@pytest.mark.parametrize("position", [40, 41])
@pytest.mark.parametrize("fix", [False, True])
def test_a_restored_state_goes_on_as_the_first(open_reference, position, fix):
    tokens, model = fed_tokens("p40"), open_reference(**{"deepseek.fix_index_keys": fix}).model
    state, copy = model.new_state(), model.new_state()
    model.prefill(tokens[:position], state)
    copy.restore(state.tensors())
    wanted = [model.decode(token, state) for token in tokens[position : position + 6]]
    found = [model.decode(token, copy) for token in tokens[position : position + 6]]
    assert torch.equal(torch.cat(found), torch.cat(wanted))


@pytest.mark.gpu
def test_kernels_are_plain_torch(open_reference):
    model = open_reference().model
    assert all(finding.is_ok for finding in model.probe_kernels(deepseek_published))


@pytest.mark.gpu
def test_tilelang_is_plain_torch_or_refused_by_a_sentence(open_reference):
    """The stand-in's kernel.py has no TileLang in it: what this shows is the way there, check_snapshot.py the rest."""
    fault = backends.tilelang_fault(backends.tilelang_version(), backends.capability())
    if fault is not None:  # absent, or a version that is refused
        with pytest.raises(UserError, match=re.escape(fault)):
            open_reference(**{"deepseek.kernels": "tilelang"})
        return
    model = open_reference(**{"deepseek.kernels": "tilelang"}).model
    assert model.parts.kernels is Kernels.tilelang
    assert all(finding.is_ok for finding in model.probe_kernels(model.parts.package.kernel))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("many_threads")
def test_sublayers_of_the_released_width(open_reference, tmp_path_factory):
    """Layers 0, 1, 2 and 20 of the release, random weights, few experts and the bundled vocabulary.

    The CPU expands every weight for every call: few tokens.
    """
    open_reference.close()
    folder = tmp_path_factory.mktemp("wide")
    source, overrides = make_checkpoint(folder)
    files = EngineFiles(source, published=make_published(source, folder))
    settings = (
        "model.setup=[download,patch]", "deepseek.arithmetic=reference", "deepseek.kernels=ours",
        "prefetch.experts=0", "prefetch.copy=0",
    )  # fmt: skip
    overrides = [part for part in overrides if part != "hw=cpu"]
    engines = []

    def open_on(device):
        if engines:
            engines.pop().close()
        config = make_runner(folder, *overrides, *settings, "hw=auto", f"hw.device={device}").cfg
        engines.append(Engine.open(config, files))
        return engines[-1]

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, 4600, (21,), generator=generator).tolist()
    try:
        assert not sublayer_faults(open_on, tokens, 20)
    finally:  # a process holds one
        for engine in engines:
            engine.close()
