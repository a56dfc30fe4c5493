"""The bundled DeepSeek model through the configuration: its answers, and streaming that never shows."""

from __future__ import annotations

import json

import pytest
import torch

from conf.schema import ConfigError
from runtime.engine import Engine, EngineFiles
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.units import GIB

RECORD_GIB = 36_864 / GIB
SCRIPT = (9, 1, 1, 1, 6, 1, 1)  # pieces: longer than one token goes through the layers as a prompt


@pytest.fixture(scope="module")
def snapshot(tiny_qwen):
    return tiny_qwen.parent / "tiny-deepseek"


@pytest.fixture
def open_deepseek(make_config, snapshot):
    engines = []

    def open_engine(is_resident=False, **overrides):
        config = make_config("tiny_deepseek", **{"cache.ram_gib": 1.0, **overrides})
        engines.append(Engine.open(config, EngineFiles(snapshot), is_resident))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def run_script(engine, tokens):
    state, logits, at = engine.new_state(), [], 0
    for size in SCRIPT:
        piece, at = tokens[at : at + size], at + size
        logits.append(
            engine.model.decode(piece[0], state)
            if size == 1
            else engine.model.prefill(piece, state)
        )
    return torch.cat(logits)


@pytest.fixture(scope="module")
def wanted(make_config, snapshot, heldout_tokens):
    engine = Engine.open(make_config("tiny_deepseek"), EngineFiles(snapshot), is_resident=True)
    yield run_script(engine, heldout_tokens)
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 0.0, "prefetch.experts": 0},
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 8.5 * RECORD_GIB, "prefetch.experts": 2, "cache.sweep_experts": 1},
        {"cache.ram_gib": 40 * RECORD_GIB, "hw.drive.window": 4, "hw.drive.pieces": 1},
        {"cache.ram_gib": 1.0, "cache.table_rows": 0, "hw.drive.simulate_latency_us": 200.0},
    ],
)
def test_streamed_equals_resident(open_deepseek, wanted, heldout_tokens, settings):
    engine = open_deepseek(**settings)
    for _ in range(2):  # what the first conversation left behind must not show in a second
        assert torch.equal(run_script(engine, heldout_tokens), wanted)
    assert engine.counters().experts.read_nbytes > 0
    assert engine.counters().row_read_nbytes > 0


def test_a_copied_state_goes_on_as_the_first(open_deepseek, heldout_tokens):
    """At an odd position: half a pair is on its way in the ratio-2 sources."""
    model = open_deepseek().model
    state, copy = model.new_state(), model.new_state()
    model.prefill(heldout_tokens[:75], state)
    copy.restore(state.tensors())
    for token in heldout_tokens[75:79]:
        assert torch.equal(model.decode(token, state), model.decode(token, copy))


def test_greedy_answers_are_the_references(open_deepseek, snapshot):
    golden = json.loads((snapshot / "golden_answers.json").read_text())["greedy"]
    engine = open_deepseek()
    for question in golden[:3]:
        wanted = question["answer_own_keys_ids"]
        params = SamplingParams(temperature=0.0, max_tokens=len(wanted))
        session = Session(engine)
        tokens = [piece.token for piece in session.generate(question["prompt_ids"], params)]
        assert tokens == wanted


def test_stages_that_do_not_know_the_family_are_refused(make_config):
    with pytest.raises(ConfigError, match=r"stages=\[repack\] is not for model=tiny_deepseek"):
        make_config("tiny_deepseek", stages=["repack"])
