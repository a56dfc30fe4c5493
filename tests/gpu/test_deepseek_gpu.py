"""DeepSeek on a real GPU: the bundled model against the CPU engine and its golden answers, streamed against resident,
and a few layers of the released shape against plain torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from runtime.engine import Engine, EngineFiles
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.units import GIB
from stages.download import snapshot_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from tiny_setup import make_runner

pytestmark = pytest.mark.gpu

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


def close_to(found, wanted):
    """Return the median over rows of the rms difference, in standard deviations of the row."""
    return float(((found - wanted).pow(2).mean(1).sqrt() / wanted.std(1)).median())


def test_gpu_engine_is_the_cpu_engine(open_deepseek, heldout_tokens):
    """Prompt across the window and 60 decoded tokens; one bf16 result that rounds otherwise moves what follows it."""
    prompt, rest = heldout_tokens[:301], heldout_tokens[301:361]
    found = []
    for device in ("cpu", "cuda"):
        engine = open_deepseek(**{"hw.device": device})
        state = engine.new_state()
        rows = [engine.model.prefill(prompt, state, all_logits=True).cpu()]
        rows += [engine.model.decode(token, state).cpu() for token in rest]
        found.append(torch.cat(rows))
    wanted, rows = found
    same = float((rows.argmax(-1) == wanted.argmax(-1)).float().mean())
    print(f"median difference {close_to(rows, wanted):.1e}, same choice in {same:.4f}")
    assert close_to(rows, wanted) < 0.01
    assert same > 0.99


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


def test_layers_of_the_released_shape_are_plain_torch(tmp_path_factory):
    """Five layers at full width from a checkpoint of random bytes: a prompt, then steps, on both devices."""
    outputs = tmp_path_factory.mktemp("full")
    sizes = ("layers=5", "experts=12", "disk_gib=12", "ngram_rows=100000")
    overrides = (
        "model=deepseek_synthetic", *(f"model.synthetic.{size}" for size in sizes),
        "model.context_tokens=1024", "cache.ram_gib=2",
    )  # fmt: skip
    runner = make_runner(outputs, *overrides, "hw=cpu")
    runner.run(["download"])
    files = EngineFiles(snapshot_of(runner.find("download")))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1000, 100_000, (148,), generator=generator).tolist()
    found = []
    for device in ("cpu", "cuda"):
        config = make_runner(outputs, *overrides, "hw=auto", f"hw.device={device}").cfg
        engine = Engine.open(config, files)
        state = engine.new_state()
        rows = [engine.model.prefill(tokens[:140], state, all_logits=True).cpu()]
        rows += [engine.model.decode(token, state).cpu() for token in tokens[140:]]
        engine.close()
        found.append(torch.cat(rows))
    wanted, rows = found
    median, steps = close_to(rows[:140], wanted[:140]), close_to(rows[140:], wanted[140:])
    print(f"prompt: median difference {median:.1e}; steps: {steps:.1e}")
    assert median < 0.01
    assert steps < 0.01
    assert float((rows.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.97
