"""What all tests share: one compute thread, the bundled model, and memory that is never zero by luck."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# counts only if set before a kernel module is imported; with a GPU the kernels run as they are
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
from hypothesis import HealthCheck, settings
from omegaconf import OmegaConf

from conf.schema import RunConfig, load
from runtime.engine import Engine, EngineFiles
from runtime.models.qwen_codec import QwenCodec
from runtime.text import TextCodec
from stages.core import Runner
from stages.opening import engine_files

ROOT = Path(__file__).resolve().parent.parent
TINY_QWEN = ROOT / "runtime" / "bundled" / "tiny-qwen"

# a busy machine must not make a test red: nothing here is timed
settings.register_profile("nvmoe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nvmoe")

# tiny tensors: more threads only add overhead, and each worker has one core
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def fault_row(record_property):
    """Return a function: what was injected, what the user was told, what became of it -> a row of the last table."""

    def note(injected: str, told: str, outcome: str) -> None:
        record_property("fault", [injected, told, outcome])

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every fault that was injected, as the last thing."""
    rows = [
        value
        for report in terminalreporter.stats.get("passed", ())
        for name, value in report.user_properties
        if name == "fault"
    ]
    if rows:
        terminalreporter.section("faults injected: what the user was told, and what became of it")
    for injected, told, outcome in rows:
        terminalreporter.write_line(f"{injected}\n    told: {told}\n    then: {outcome}")


@pytest.fixture(scope="session")
def tiny_qwen() -> Path:
    """The bundled checkpoint's folder: never written to."""
    return TINY_QWEN


def _make_config(model: str = "tiny", **overrides) -> RunConfig:
    conf = ROOT / "conf"
    groups = {"model": f"model/{model}.yaml", "hw": "hw/cpu.yaml"}
    cfg = OmegaConf.structured(RunConfig)
    for key, file in groups.items():
        OmegaConf.update(cfg, key, OmegaConf.load(conf / file))
    for key, value in {"hw.compute_threads": 1, "hw.reserve_gib": 0.0, **overrides}.items():
        OmegaConf.update(cfg, key, value)
    return load(cfg)


@pytest.fixture(scope="session")
def make_config():
    """Return a function: dotted keys and values -> the checked config of the bundled model on one thread.

    `conf/local` plays no part: a developer's defaults must not change what is tested.
    """
    return _make_config


@pytest.fixture(scope="session")
def make_files(tmp_path_factory):
    """Return a function: dotted keys and values -> what the set-up stages make of the bundled model."""
    artifacts = tmp_path_factory.mktemp("artifacts")

    def make(**overrides) -> EngineFiles:
        runner = Runner(_make_config(**overrides), artifacts)
        names = ("download", "repack", "residents")
        runner.run(names)
        return engine_files({name: runner.find(name) for name in names})

    return make


@pytest.fixture(scope="session")
def tiny_files(make_files) -> EngineFiles:
    """The bundled model's snapshot, pack and residents, made once by the real stages."""
    return make_files()


@pytest.fixture
def open_tiny(tiny_files):
    """Return a function: dotted keys and values -> an open engine of the bundled model; closed after the test."""
    engines = []

    def open_engine(is_resident: bool = False, **overrides) -> Engine:
        config = _make_config(**{"cache.ram_gib": 1.0, **overrides})
        engines.append(Engine.open(config, tiny_files, is_resident))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def resident_engine(tiny_files):
    """An engine with every expert in memory: read-only, for all tests of a worker."""
    engine = Engine.open(_make_config(), tiny_files, is_resident=True)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def tiny_codec(tiny_qwen) -> TextCodec:
    """The bundled model's tokenizer and template."""
    return QwenCodec(tiny_qwen)


@pytest.fixture(scope="session")
def heldout_tokens(tiny_qwen, tiny_codec) -> list[int]:
    """Held-out English and Russian text with <|endoftext|> (0) between documents, twice in a row at one place."""
    english = (tiny_qwen / "heldout_en.txt").read_text()[:3200]
    russian = (tiny_qwen / "heldout_ru.txt").read_text()[:1600]
    tokens = tiny_codec.encode(english + russian)
    first = tokens.index(0)
    tokens.insert(first, 0)
    return tokens
