"""DeepSeek's native sublayers on a GPU against the CPU's, each from the CPU's inputs: bundled model and released width.

Without a GPU the same runs with the CPU as the second device, but for the decoder: interpreted, it is compared in
`tests/parity/test_deepseek_taught.py`, which also shows what a mistake looks like.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from kernels.deepseek_prompt import Fp4Weight
from runtime.engine import Engine, EngineFiles
from runtime.experts.layout import ExpertKey
from tests.bench.compare_arithmetics import make_checkpoint
from tests.parity.deepseek_planted import DECODER_MISTAKES, late_positions
from tests.parity.deepseek_taught import faults_of, others_of, record_token, teach_prompt
from tests.parity.deepseek_taught_decoder import DECODER_BOUNDS, corrected

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from tiny_setup import make_runner

# one worker: it compiles once, and makes what the tests share once
pytestmark = pytest.mark.xdist_group("deepseek_sublayers")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, DECODED = 301, 24
LAYER = 3


@pytest.fixture(scope="module")
def models(make_config, tiny_qwen):
    """The bundled model on the CPU and on the second device."""
    files = EngineFiles(tiny_qwen.parent / "tiny-deepseek")
    engines = []
    for device in ("cpu", DEVICE):
        settings = {"cache.ram_gib": 1.0, "hw.device": device, "hw.graphs": False}
        engines.append(Engine.open(make_config("tiny_deepseek", **settings), files))
    engines[1].model.chunk_tokens = 128
    yield [engine.model for engine in engines]
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def tokens(heldout_tokens):
    return heldout_tokens[: PROMPT + DECODED]


def teach_tokens(models, tokens, state):
    """Decode tokens on both devices, the second corrected.  state: the CPU's.  Returns (faults, the second's state)."""
    first, second = models
    other = second.new_state()
    other.restore(state.tensors())
    with corrected(second.decoder) as right:
        for token in tokens:
            right.step(token, other, record_token(first, token, state), state)
    return faults_of(right.compared, DECODER_BOUNDS), other


def test_sublayers_of_a_prompt(models, tokens):
    """Three pieces, the window passed twice; the states are the same to the bit, as each result was corrected."""
    tape, state, other = teach_prompt(*models, tokens[:PROMPT])
    assert not faults_of(tape.compared)
    assert not others_of(other.tensors(), state.tensors())


@pytest.mark.gpu
def test_sublayers_of_decoded_tokens(models, tokens):
    """From an empty conversation, and behind the prompt."""
    for prompt in (0, PROMPT):
        state = models[0].new_state()
        if prompt:
            models[0].prefill(tokens[:prompt], state)
        faults, other = teach_tokens(models, tokens[prompt : prompt + DECODED], state)
        assert not faults
        assert not others_of(other.tensors(), state.tensors())


# ---- that it would show ----------------------------------------------------------------------------------------------


def wrong_scale(model, patch):
    """One expert's gate a power of two aside."""
    plain = model.open_expert

    def opened(key, record):
        gate, up, down = plain(key, record)
        if key != ExpertKey(LAYER, 7):
            return gate, up, down
        if isinstance(gate, Fp4Weight):
            return dataclasses.replace(gate, scale=gate.scale + 1), up, down
        return 2 * gate, up, down

    patch.setattr(model, "open_expert", opened)


@pytest.mark.parametrize(("plant", "kind"), [(late_positions, "rotate"), (wrong_scale, "Moe")])
def test_a_mistake_in_a_prompt_shows(models, tokens, monkeypatch, plant, kind):
    plant(models[1], monkeypatch)
    tape, _, _ = teach_prompt(*models, tokens[:PROMPT])
    faults = faults_of(tape.compared)
    assert faults
    assert all(kind in fault for fault in faults)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODER_MISTAKES)
def test_a_mistake_in_a_decoded_token_shows(models, tokens, monkeypatch, name):
    plant, kind = DECODER_MISTAKES[name]
    state = models[0].new_state()
    models[0].prefill(tokens[:PROMPT], state)
    plant(models[1].decoder, monkeypatch)
    faults, _ = teach_tokens(models, tokens[PROMPT : PROMPT + 3], state)
    assert any(kind in fault for fault in faults)


# ---- released width --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.usefixtures("many_threads")
def test_sublayers_of_the_released_width(tmp_path_factory):
    """Layers 0, 1, 2 and 20 of the release, random weights, few experts and the bundled vocabulary."""
    folder = tmp_path_factory.mktemp("wide")
    source, overrides = make_checkpoint(folder)
    overrides = [part for part in overrides if part != "hw=cpu"]
    engines = []
    for device in ("cpu", DEVICE):
        settings = ("hw=auto", f"hw.device={device}", "hw.graphs=false")
        config = make_runner(folder, *overrides, *settings).cfg
        engines.append(Engine.open(config, EngineFiles(source)))
    models = [engine.model for engine in engines]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, 4600, (23,), generator=generator).tolist()
    tape, state, other = teach_prompt(*models, tokens[:20])
    found = faults_of(tape.compared)
    found += others_of(other.tensors(), state.tensors())
    faults, other = teach_tokens(models, tokens[20:], state)
    found += faults + others_of(other.tensors(), state.tensors())
    for engine in engines:
        engine.close()
    assert not found
