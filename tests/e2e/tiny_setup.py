"""Configs as the command line makes them, and runners of the real stages on the bundled model."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

import run
from conf.schema import RunConfig, load
from stages.core import Runner

ROOT = Path(__file__).resolve().parents[2]
SETUP = ["download", "repack", "spot_check", "residents"]


@functools.cache
def _config(*overrides: str) -> RunConfig:
    ConfigStore.instance().store(name="schema", node=RunConfig)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return load(compose("config", run.prepare(list(overrides))))


def make_runner(outputs: Path, *overrides: str) -> Runner:
    """Return a runner of real stages, configured as by a command line, whose artifacts lie under `outputs`."""
    cfg = copy.deepcopy(_config(*overrides))
    cfg.paths.outputs, cfg.paths.artifacts = str(outputs), str(outputs / "artifacts")
    return Runner(cfg, outputs / "artifacts")
