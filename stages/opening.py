"""Open an engine on what the set-up stages made."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from conf.schema import Arithmetic, RunConfig
from runtime.engine import Engine, EngineFiles
from runtime.errors import VerificationError
from runtime.models.deepseek_backends import resolve_arithmetic
from runtime.mounts import IN_MEMORY, find_mount
from stages.core import Runner
from stages.download import absolute, snapshot_of
from stages.parts import bases, warn_of_shared_drives
from stages.stage import Output

log = logging.getLogger("stages")

WARM_FOLDER = "warm"  # under paths.outputs
ROUTES_NAME = "routes.bin"  # in the folder of the run, with record=true


def setup_stages(cfg: RunConfig) -> tuple[str, ...]:
    """Return the stages that make what this run's engine opens.

    `patch` only where the release's own code computes.
    """
    if "patch" not in cfg.model.setup or uses_published_code(cfg):
        return cfg.engine_stages
    return tuple(name for name in cfg.engine_stages if name != "patch")


def uses_published_code(cfg: RunConfig) -> bool:
    """Say whether the release's own code computes."""
    has_code = "patch" in cfg.model.setup
    return has_code and resolve_arithmetic(cfg, has_code) is Arithmetic.reference


def engine_files(inputs: Mapping[str, Output]) -> EngineFiles:
    """Return the folders that `Engine.open` needs."""
    names = ("repack", "residents", "patch", "checksums", "quantize", "mirror")
    made = (inputs.get(name) for name in names)
    roots = [None if output is None else output.root for output in made]
    return EngineFiles(snapshot_of(inputs["download"]), *roots)


def open_engine(cfg: RunConfig, inputs: Mapping[str, Output], runner: Runner) -> Engine:
    """Open an engine, unless a `verify` of exactly these files is red and force=true was not given."""
    verified = runner.find("verify")
    if verified is not None and verified.facts["red"] and not cfg.is_forced:
        raise VerificationError(
            f"verify found wrong numbers on this machine: {', '.join(verified.facts['red'])}",
            "run stages=[verify] force=[verify] to see the table again, or force=true to go on all the same",
        )
    files = engine_files(inputs)
    folders = bases(cfg, files.snapshot if files.pack is None else runner.root.parent)
    warn_of_shared_drives(folders)
    for folder in folders or [files.pack or files.snapshot]:
        warn_of_slow_place(folder)
    engine = Engine.open(cfg, files)
    if cfg.record and runner.run_dir is not None:
        path = runner.run_dir / ROUTES_NAME
        try:
            engine.record_routes(path)
        except BaseException:
            engine.close()
            raise
        log.info("recording routes: %s", path)
    return engine


def warm_up(engine: Engine, inputs: Mapping[str, Output]) -> None:
    """With cache.warm_start, go on with the experts that were warm when this model was last used."""
    cfg = engine.config
    if not cfg.cache.warm_start:
        return
    source = "repack" if "repack" in inputs else "download"
    path = absolute(cfg.paths.outputs) / WARM_FOLDER / f"{cfg.model.name}.warm"
    engine.warm_up(path, f"{source} {inputs[source].record['digest']}")


def warn_of_slow_place(experts: Path) -> None:
    """Say once at the start when the experts lie where no setting makes them fast."""
    mount = find_mount(next(experts.glob("*.safetensors"), experts))
    if mount.is_network:
        log.warning(
            "the experts lie on %s (%s), a network or foreign filesystem: expect a fraction of a local drive's speed; "
            "stages=[doctor] measures it, paths.artifacts and paths.hub move it",
            mount.kind, mount.device,
        )  # fmt: skip
    elif mount.kind in IN_MEMORY:
        log.warning(
            "the experts lie on %s and take RAM that the expert cache could have", mount.kind
        )
