"""Bring a model's files to this machine and check them: bundled models, local snapshots and synthetic ones, in place.

A snapshot folder is used where it is and never changed; its files are hashed once and watched from then on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from conf.schema import RunConfig, Source
from runtime.checkpoint import Checkpoint
from runtime.errors import UserError
from stages.core import Output, Stage, StageContext
from stages.files import file_digest

PROJECT = Path(__file__).resolve().parent.parent
NEEDED = ("config.json", "tokenizer.json")


def params(cfg: RunConfig) -> dict[str, Any]:
    """Return what decides which bytes these are."""
    is_made = (
        cfg.model.source is Source.synthetic
    )  # then the key of the synthetic stage says it all
    return {
        "source": cfg.model.source.value,
        "path": None if is_made else cfg.model.path,
        "revision": cfg.model.revision,
        "files": cfg.model.files,
    }


def snapshot_of(output: Output) -> Path:
    """Return the snapshot folder that a finished download stands for."""
    return Path(output.facts["snapshot"])


def run(ctx: StageContext) -> None:
    """Check headers and index, then hash every file."""
    made = ctx.inputs.get("synthetic")
    root = _snapshot_root(ctx.cfg) if made is None else made.root.resolve()
    for name in NEEDED:
        if not (root / name).is_file():
            raise UserError(
                f"{root} has no {name}", "point model.path to a complete snapshot folder"
            )
    try:
        json.loads((root / "config.json").read_text())
    except ValueError as error:
        raise UserError(
            f"{root / 'config.json'} is not JSON: {error}", "fetch the snapshot again"
        ) from error
    checkpoint = Checkpoint.open(root)
    made_files = None if made is None else [root / name for name in made.record["files"]]
    wanted = {*_wanted(root, ctx.cfg.model.files, made_files), *checkpoint.files()}
    names = sorted(str(path.relative_to(root)) for path in wanted)
    for name in names:  # hashed before a stop, written to since: again
        unit = ctx.units.get(name)
        if unit is not None and unit["mtime_ns"] != (root / name).stat().st_mtime_ns:
            del ctx.units[name]
    for name in ctx.todo(names, "files checked"):
        found = (root / name).stat()
        ctx.done(name, blake3=file_digest(root / name), mtime_ns=found.st_mtime_ns)
    ctx.external = {root / name: ctx.units[name]["blake3"] for name in names}
    ctx.facts = {
        "snapshot": str(root),
        "revision": ctx.cfg.model.revision,
        "num_tensors": len(checkpoint.tensors),
        "weights_nbytes": sum(path.stat().st_size for path in checkpoint.files()),
    }


def _snapshot_root(cfg: RunConfig) -> Path:
    model = cfg.model
    if model.source is Source.hub:
        raise UserError(
            f"model={model.name} comes from the hub ({model.repo}), and this version cannot fetch it yet",
            f"hf download {model.repo} --revision {model.revision} --local-dir DIR, then add "
            "model.source=local model.path=DIR",
        )
    if model.path is None:
        raise UserError(f"model.source={model.source.value} needs a folder", "set model.path=DIR")
    root = absolute(model.path)
    if not root.is_dir():
        raise UserError(f"there is no folder {root}", "set model.path to a snapshot folder")
    return root


def absolute(path: str) -> Path:
    """Return a configured path; relative ones are taken from the project's folder."""
    expanded = Path(path).expanduser()
    return (expanded if expanded.is_absolute() else PROJECT / expanded).resolve()


def needs(cfg: RunConfig) -> tuple[str, ...]:
    """Return what makes the snapshot, where a stage does."""
    return ("synthetic",) if cfg.model.source is Source.synthetic else ()


def _wanted(root: Path, patterns: Sequence[str], made: Sequence[Path] | None) -> list[Path]:
    """Return the files that patterns ask for: by name in `root` (of `made`, if given), with a slash in its folders."""
    listed = root.iterdir() if made is None else made
    found = [path for path in listed if any(fnmatch(path.name, pattern) for pattern in patterns)]
    inside = [path for pattern in patterns if "/" in pattern for path in root.glob(pattern)]
    return [path for path in (*found, *inside) if path.is_file()]


STAGE = Stage(name="download", run=run, params=params, needs=needs)
