"""The types of every option, and `load`, which checks a composed config once.

YAML holds values, this package holds types, units and ranges. A key exists once; what can be computed is not a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from conf.schema.advise import AdviseConfig, SituationConfig
from conf.schema.bench import BenchConfig, DoctorConfig, SpotCheckConfig, VerifyConfig
from conf.schema.cache import CacheConfig, CachePolicy, PrefetchConfig
from conf.schema.checks import faults
from conf.schema.deepseek import Arithmetic, DeepseekConfig, Head, Kernels, PatchConfig, Replay
from conf.schema.drafts import DraftsConfig, DraftSource
from conf.schema.files import HubConfig, PathsConfig
from conf.schema.hw import (
    ComputeDtype,
    DirectIo,
    DriveConfig,
    DrivePlace,
    HwConfig,
    RatesConfig,
    Spread,
)
from conf.schema.memory import (
    AnswerMode,
    Fuse,
    KvCodec,
    MemoryConfig,
    PositionMode,
    StoreKind,
    Template,
    Width,
)
from conf.schema.model import (
    Deltanet,
    ModelConfig,
    SamplingConfig,
    Source,
    SyntheticConfig,
    Weights,
)
from conf.schema.names import nearest
from conf.schema.run_config import RunConfig, known_keys
from conf.schema.serve import ServeConfig, SnapshotsConfig
from conf.schema.simulate import Policy, SimulateConfig
from conf.schema.stages import NOT_FOR_FAMILY, STAGES

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = [
    "NOT_FOR_FAMILY",
    "STAGES",
    "AdviseConfig",
    "AnswerMode",
    "Arithmetic",
    "BenchConfig",
    "CacheConfig",
    "CachePolicy",
    "ComputeDtype",
    "ConfigError",
    "DeepseekConfig",
    "Deltanet",
    "DirectIo",
    "DoctorConfig",
    "DraftSource",
    "DraftsConfig",
    "DriveConfig",
    "DrivePlace",
    "Fuse",
    "Head",
    "HubConfig",
    "HwConfig",
    "Kernels",
    "KvCodec",
    "MemoryConfig",
    "ModelConfig",
    "PatchConfig",
    "PathsConfig",
    "Policy",
    "PositionMode",
    "PrefetchConfig",
    "RatesConfig",
    "Replay",
    "RunConfig",
    "SamplingConfig",
    "ServeConfig",
    "SimulateConfig",
    "SituationConfig",
    "SnapshotsConfig",
    "Source",
    "SpotCheckConfig",
    "Spread",
    "StoreKind",
    "SyntheticConfig",
    "Template",
    "VerifyConfig",
    "Weights",
    "Width",
    "known_keys",
    "load",
    "nearest",
]


class ConfigError(ValueError):
    """A key or value that cannot be used. The message says how to mend it."""


def load(cfg: DictConfig) -> RunConfig:
    """Check and convert the composed config; nothing below this line sees Hydra.

    Raises ConfigError with every fault that was found, one sentence each.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        raw = OmegaConf.to_container(cfg, resolve=True)
        assert isinstance(raw, dict)
        unknown = _unknown_keys(raw)
        if unknown:
            raise ConfigError("; ".join(unknown))
        run = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(RunConfig), cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(run, RunConfig)
    found = list(faults(run))
    if found:
        raise ConfigError("; ".join(found))
    return run


def _unknown_keys(raw: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """`+model.topk=3`, which Hydra's own message suggests, would otherwise pass and be ignored."""
    known = known_keys()
    found = []
    for key, value in raw.items():
        dotted = f"{prefix}{key}"
        if dotted not in known:
            level = [
                k.removeprefix(prefix)
                for k in known
                if k.startswith(prefix) and "." not in k.removeprefix(prefix)
            ]
            found.append(f"unknown key {dotted!r}: {nearest(str(key), level)}")
        elif known[dotted] and isinstance(value, Mapping):
            found += _unknown_keys(value, f"{dotted}.")
    return found
