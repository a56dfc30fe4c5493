"""DeepSeek on a real GPU: the bundled model beside the CPU engine, its golden answers, streamed against resident."""

from __future__ import annotations

import json

import pytest
import torch

from runtime.engine import Engine, EngineFiles
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.units import GIB
from tests.parity.deepseek_taught import drift_faults, perplexity

# one worker: it compiles once, and makes what the tests share once
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("deepseek")]

RECORD_GIB = 36_864 / GIB


@pytest.fixture(scope="module")
def snapshot(tiny_qwen):
    return tiny_qwen.parent / "tiny-deepseek"


@pytest.fixture
def open_deepseek(make_config, snapshot):
    engines = []

    def open_engine(is_resident=False, **overrides):
        settings = {"hw.device": "cuda", "cache.ram_gib": 1.0, **overrides}
        config = make_config("tiny_deepseek", **settings)
        engines.append(Engine.open(config, EngineFiles(snapshot), is_resident))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def test_gpu_engine_drifts_as_rounding_does(open_deepseek, heldout_tokens):
    """A text of 512 tokens, the last 60 decoded; what each sublayer makes is in test_deepseek_sublayers_gpu.py."""
    tokens, found = heldout_tokens[:512], []
    for device in ("cpu", "cuda"):
        model = open_deepseek(**{"hw.device": device}).model
        state = model.new_state()
        rows = [model.prefill(tokens[:452], state, all_logits=True).cpu()]
        rows += [model.decode(token, state).cpu() for token in tokens[452:]]
        found.append(torch.cat(rows))
    wanted, rows = found
    assert not drift_faults(rows, wanted)
    assert perplexity(rows, tokens) == pytest.approx(perplexity(wanted, tokens), rel=5e-3)


@pytest.mark.parametrize("ram_gib", [0.0, 1.0])
def test_answers_are_the_references(open_deepseek, snapshot, ram_gib):
    golden = json.loads((snapshot / "golden_answers.json").read_text())["greedy"]
    engine = open_deepseek(**{"cache.ram_gib": ram_gib})
    for question in golden:
        wanted = question["answer_own_keys_ids"]
        params = SamplingParams(temperature=0.0, max_tokens=len(wanted))
        session = Session(engine)
        tokens = [piece.token for piece in session.generate(question["prompt_ids"], params)]
        assert tokens == wanted


def logits_of(engine, tokens):
    prompt, rest = tokens[:81], tokens[81:281]
    assert len(rest) == 200
    state = engine.new_state()
    rows = [engine.model.prefill(prompt, state)]
    rows += [engine.model.decode(token, state) for token in rest]
    return torch.cat(rows)


@pytest.fixture(scope="module")
def wanted_logits(make_config, snapshot, heldout_tokens):
    """Logits of a prompt and 200 decoded tokens with every expert in memory."""
    config = make_config(
        "tiny_deepseek", **{"hw.device": "cuda", "cache.vram_gib": 0.0, "hw.graphs": False}
    )
    engine = Engine.open(config, EngineFiles(snapshot), is_resident=True)
    yield logits_of(engine, heldout_tokens)
    engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 0.0, "prefetch.experts": 0, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 40 * RECORD_GIB, "prefetch.experts": 2, "prefetch.copy": 3},
        {"cache.ram_gib": 40 * RECORD_GIB, "prefetch.copy": 4, "cache.vram_gib": 60 * RECORD_GIB},
        {"cache.ram_gib": 1.0, "prefetch.copy": 10, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 40 * RECORD_GIB, "prefetch.copy": 4, "hw.graphs": False},
        {"cache.ram_gib": 1.0, "cache.table_rows": 0, "hw.drive.simulate_latency_us": 200.0},
    ],
)
def test_streamed_equals_resident_on_the_gpu(
    open_deepseek, wanted_logits, heldout_tokens, settings
):
    """Prompt and 200 decoded tokens, twice on one engine: every logit equal, bit for bit."""
    engine = open_deepseek(**settings)
    for _ in range(2):
        assert torch.equal(logits_of(engine, heldout_tokens), wanted_logits)
    if settings.get("prefetch.copy"):
        assert engine.counters().experts.early_used > 0
