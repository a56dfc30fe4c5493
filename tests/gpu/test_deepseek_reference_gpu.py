"""The reference arithmetic on a real GPU, with the stand-in package: golden logits, streaming, states, full width."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from conf.schema import Kernels
from kernels import deepseek_published
from runtime.engine import Engine, EngineFiles
from runtime.models import deepseek_backends as backends
from runtime.units import GIB
from stages.download import snapshot_of
from tests.parity.deepseek_golden import (
    MEDIAN_BOUND,
    PROMPTS,
    fed_tokens,
    row_errors,
    wanted_logits,
)
from tests.standin import make_patched, make_published, make_snapshot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from tiny_setup import make_runner

pytestmark = pytest.mark.gpu

RECORD_GIB = 12_288 / GIB
SETTINGS = {
    "hw.device": "cuda", "model.setup": ["download", "patch"], "model.context_tokens": 192,
    "model.prefill_tokens": 128, "deepseek.arithmetic": "reference", "deepseek.kernels": "ours",
    "deepseek.fix_index_keys": True, "cache.ram_gib": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    snapshot = make_snapshot(folder / "snapshot")
    return EngineFiles(snapshot, published=make_patched(snapshot, folder / "patched"))


@pytest.fixture
def open_reference(files, make_config):
    engines = []

    def open_engine(is_resident=False, **overrides):
        config = make_config("tiny_deepseek", **{**SETTINGS, **overrides})
        engines.append(Engine.open(config, files, is_resident))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def logits_of(model, tokens, prompt):
    state = model.new_state()
    found = [model.prefill(tokens[:prompt], state, all_logits=True).cpu()]
    found += [model.decode(token, state).cpu() for token in tokens[prompt:]]
    return torch.cat(found)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_golden_logits(open_reference, prompt):
    tokens, wanted = fed_tokens(prompt), wanted_logits(prompt)
    found = logits_of(open_reference().model, tokens, len(tokens) - 24)
    errors = row_errors(found, wanted)
    print(f"median {errors.median():.1e}, largest {errors.max():.1e}")
    assert errors.median() < MEDIAN_BOUND
    assert (found.argmax(1) == wanted.argmax(1)).float().mean() >= 0.98


@pytest.fixture(scope="module")
def wanted_bits(files, make_config):
    engine = Engine.open(make_config("tiny_deepseek", **SETTINGS), files, is_resident=True)
    bits = logits_of(engine.model, fed_tokens("p40"), 40)
    engine.close()
    return bits


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


def test_kernels_are_plain_torch(open_reference):
    model = open_reference().model
    assert all(finding.is_ok for finding in model.probe_kernels(deepseek_published))


def test_tilelang_is_plain_torch_where_it_is_installed(open_reference):
    """The stand-in's kernel.py has no TileLang in it: what this shows is the way there, check_snapshot.py the rest."""
    fault = backends.tilelang_fault(backends.tilelang_version(), backends.capability())
    if fault is not None:
        pytest.skip(fault)
    model = open_reference(**{"deepseek.kernels": "tilelang"}).model
    assert model.parts.kernels is Kernels.tilelang
    assert all(finding.is_ok for finding in model.probe_kernels(model.parts.package.kernel))


@pytest.mark.slow
def test_layers_of_the_released_shape(tmp_path_factory):
    """Full width from a checkpoint of random bytes: our kernels under the published code, on both devices."""
    outputs = tmp_path_factory.mktemp("full")
    sizes = ("layers=5", "experts=12", "disk_gib=12", "ngram_rows=100000")
    overrides = (
        "model=deepseek_synthetic", *(f"model.synthetic.{size}" for size in sizes),
        "model.setup=[download,patch]", "deepseek.arithmetic=reference", "deepseek.kernels=ours",
        "model.context_tokens=1024", "cache.ram_gib=2",
    )  # fmt: skip
    runner = make_runner(outputs, *overrides, "hw=cpu")
    runner.run(["download"])
    source = snapshot_of(runner.find("download"))
    files = EngineFiles(source, published=make_published(source, outputs))
    tokens = torch.randint(
        1000, 100_000, (148,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    found = []
    for device in ("cpu", "cuda"):
        config = make_runner(outputs, *overrides, "hw=auto", f"hw.device={device}").cfg
        engine = Engine.open(config, files)
        found.append(logits_of(engine.model, tokens, 140))
        engine.close()
    wanted, rows = found
    error = (row_errors(rows, wanted) / wanted.std(1)).median()
    print(f"median difference {error:.1e}")
    assert error < 0.01
    assert float((rows.argmax(-1) == wanted.argmax(-1)).float().mean()) > 0.97
