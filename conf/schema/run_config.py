"""All groups together, and the keys that are in none: what one run is told."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from conf.schema.advise import AdviseConfig
from conf.schema.bench import BenchConfig, DoctorConfig, SpotCheckConfig, VerifyConfig
from conf.schema.cache import CacheConfig, PrefetchConfig
from conf.schema.deepseek import DeepseekConfig, PatchConfig
from conf.schema.drafts import DraftsConfig
from conf.schema.files import HubConfig, PathsConfig
from conf.schema.hw import HwConfig
from conf.schema.memory import MemoryConfig
from conf.schema.model import ModelConfig
from conf.schema.serve import ServeConfig, SnapshotsConfig
from conf.schema.simulate import SimulateConfig


@dataclass
class RunConfig:
    """Everything that one run is told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    hw: HwConfig = field(default_factory=HwConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    drafts: DraftsConfig = field(default_factory=DraftsConfig)
    deepseek: DeepseekConfig = field(default_factory=DeepseekConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    snapshots: SnapshotsConfig = field(default_factory=SnapshotsConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    spot_check: SpotCheckConfig = field(default_factory=SpotCheckConfig)
    patch: PatchConfig = field(default_factory=PatchConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    advise: AdviseConfig = field(default_factory=AdviseConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    # what to run; set-up stages run first where needed
    stages: list[str] = field(default_factory=lambda: ["serve"])
    # stages to run again; true also lets serve start on a red verify
    force: Any = field(default_factory=list)
    dry_run: bool = False  # only say what would run, and why
    # false: start even where a drive seems too small, for filesystems that compress or grow
    check_disk: bool = True
    # bench, chat and serve write every route to routes.bin in the run's folder
    record: bool = False
    # in a sweep: bench, chat and verify run one at a time on a machine, whatever launcher starts them
    measure_alone: bool = True
    prompt: str | None = None  # for stages=[chat]
    system: str | None = None  # system message for stages=[chat]
    thinking: bool = False  # for stages=[chat]: reason before the answer, where the model can
    effort: str | None = None  # of the thinking: a word that the model knows; null: its default
    max_tokens: int = 400  # of the answer, for stages=[chat]

    @property
    def forced_stages(self) -> list[str]:
        if isinstance(self.force, str):
            return [self.force]
        return list(self.force) if isinstance(self.force, list) else []

    @property
    def engine_stages(self) -> tuple[str, ...]:
        """Stages that make what an engine opens.

        Where experts are read in released shards: `mirror` with several drives, `checksums` with cache.verify.
        """
        names = list(self.model.makers)
        if "repack" in names:
            return tuple(names)
        if self.hw.drives:
            names.insert(names.index("download") + 1, "mirror")
        return (*names, *(["checksums"] if self.cache.verify else []))

    @property
    def is_forced(self) -> bool:
        return self.force is True


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {"max_tokens": (1, 2**24)}


def known_keys(cls: type = RunConfig, prefix: str = "") -> dict[str, bool]:
    """Return every dotted key of the schema; the value says whether it is a group of keys."""
    keys: dict[str, bool] = {}
    for f in fields(cls):
        default = f.default_factory() if callable(f.default_factory) else f.default
        keys[prefix + f.name] = is_dataclass(default)
        if is_dataclass(default):
            keys |= known_keys(type(default), f"{prefix}{f.name}.")
    return keys
