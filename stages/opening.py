"""Open an engine on what the set-up stages made."""

from __future__ import annotations

from collections.abc import Mapping

from conf.schema import Arithmetic, RunConfig
from runtime.engine import Engine, EngineFiles
from runtime.errors import VerificationError
from runtime.models.deepseek_backends import resolve_arithmetic
from stages.core import Output, Runner
from stages.download import snapshot_of


def setup_stages(cfg: RunConfig) -> tuple[str, ...]:
    """Return the stages that make what this run's engine opens: `patch` only where the release's own code computes."""
    if "patch" not in cfg.model.setup or uses_published_code(cfg):
        return tuple(cfg.model.setup)
    return tuple(name for name in cfg.model.setup if name != "patch")


def uses_published_code(cfg: RunConfig) -> bool:
    """Say whether the release's own code computes."""
    has_code = "patch" in cfg.model.setup
    return has_code and resolve_arithmetic(cfg, has_code) is Arithmetic.reference


def engine_files(inputs: Mapping[str, Output]) -> EngineFiles:
    """Return the folders that `Engine.open` needs."""
    made = (inputs.get(name) for name in ("repack", "residents", "patch"))
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
    return Engine.open(cfg, engine_files(inputs))
