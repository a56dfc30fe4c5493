"""What Hydra runs: one job, alone or as a point of a sweep, and the gathering of a sweep's points at its end.

A point's folder is named by what it computes, so that a second sweep into the same folder finds what is done. Any
launcher may run a job: it is a plain function of this module, and what it found is in its folder, not in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.schema import ConfigError, RunConfig, Source, load
from runtime.errors import UserError
from stages.bench_report import machine, versions
from stages.core import Runner
from stages.disk_report import fetch_line, format_disk
from stages.files import ROOT, absolute, write_atomically
from stages.sweep_report import (
    POINT_NAME,
    Point,
    draw,
    figures_of,
    format_sweep,
    read_points,
    write_tables,
)

log = logging.getLogger("stages")

# change no result
NOT_IDENTITY = ("hydra", "paths", "force", "dry_run", "measure_alone", "check_disk")
MEASURING = ("bench", "chat", "verify")  # stages whose figures another job would spoil
CRASH_EXIT_CODE = 1


def point_id(*, _root_: DictConfig) -> str:
    """Return the name of a point's folder: a hash of every key that its results depend on. A resolver."""
    values = {
        str(key): OmegaConf.to_container(value, resolve=True, enum_to_str=True)
        if OmegaConf.is_config(value := _root_[key])
        else value
        for key in _root_
        if key not in NOT_IDENTITY
    }
    identity = json.dumps(values, sort_keys=True, default=str)
    return "point-" + blake3(identity.encode()).hexdigest(length=6)


# launchers import this module in their workers before they ask for a job's folder
OmegaConf.register_new_resolver("point_id", point_id, replace=True)
# Hydra would take a relative folder from where the command was typed, all else is taken from the folder of run.py
OmegaConf.register_new_resolver("absolute", lambda path: str(absolute(path)), replace=True)


def report(error: Exception) -> int:
    """Print an expected error, at most two lines, and return its exit code."""
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code if isinstance(error, UserError) else 2


def run_stages(cfg: RunConfig, run_dir: Path) -> None:
    """Run (or, with dry_run, explain) what a checked config asks for."""
    runner = Runner(cfg, absolute(cfg.paths.artifacts), run_dir=run_dir)
    if cfg.dry_run:
        for name, decision in runner.explain(cfg.stages):
            print(f"{name}: {decision}")
        if cfg.model.source is not Source.bundled:
            rooms = runner.expected_disk(cfg.stages)
            print(format_disk(rooms, fetch_line(cfg, rooms)))
        return
    runner.run(cfg.stages)
    if runner.exit_code:
        Outcome.exit_codes.append(runner.exit_code)


class Outcome:
    """What the main process must know when Hydra has returned."""

    exit_codes: ClassVar[list[int]] = []
    sweeps: ClassVar[list[tuple[Path, float]]] = []  # folders, and when each was started

    @classmethod
    def forget(cls) -> None:
        """Start anew: of a process that runs several command lines, each counts for itself."""
        cls.exit_codes, cls.sweeps = [], []


def job(cfg: DictConfig) -> float:
    """Run one composed config. Returns milliseconds a token, which a sweeper may minimise; infinite where unknown."""
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    try:
        if hydra.mode == RunMode.MULTIRUN and not cfg.get("dry_run"):
            return run_point(cfg, folder, list(hydra.overrides.task))
        run_stages(load(cfg), folder)
    except (ConfigError, UserError) as error:
        Outcome.exit_codes.append(report(error))
    except BrokenPipeError:  # nobody reads stdout any more; Hydra would print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return float("inf")


# ---- one point -------------------------------------------------------------------------------------------------------


def run_point(cfg: DictConfig, folder: Path, overrides: list[str]) -> float:
    """Run a point of a sweep unless it is done, and leave `point.json` in its folder, whatever happened.

    An error, expected or not, is written down and reported; the sweep goes on.
    """
    path = folder / POINT_NAME
    done = _finished(path)
    if done is not None and not cfg.force:
        log.info("skip: %s is done%s", " ".join(overrides), _other_commit(done))
        return done.token_ms
    started = time.time()
    error, exit_code, duration_s = None, 0, 0.0
    try:
        config = load(cfg)
        with _turn(config):
            started = time.time()
            try:
                run_stages(config, folder)
            finally:
                duration_s = time.time() - started
    except (ConfigError, UserError) as expected:
        error, exit_code = str(expected).partition("\n")[0], report(expected)
    except BrokenPipeError:
        raise
    except Exception as unexpected:  # noqa: BLE001 - the other points must run; this one is told
        traceback.print_exc(file=sys.stderr)
        error, exit_code = f"{type(unexpected).__name__}: {unexpected}", CRASH_EXIT_CODE
    values = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    assert isinstance(values, dict)
    point = Point(
        name=folder.name,
        overrides=overrides,
        config=flat({key: value for key, value in values.items() if key not in NOT_IDENTITY}),
        figures={} if error else figures_of(folder),
        error=error,
        exit_code=exit_code,
        commit=commit(),
        machine=machine(folder) | {"gpu": _gpu_name(), "ray_node": _ray_node()},
        versions=versions(),
        started=started,
        duration_s=round(duration_s, 3),
    )
    write_atomically(path, point.to_json())
    return point.token_ms


def _finished(path: Path) -> Point | None:
    try:
        point = Point.from_json(path.read_text())
    except (OSError, ValueError, TypeError):  # not there, or no point that we know
        return None
    return None if point.error else point


def _other_commit(done: Point) -> str:
    now = commit()
    return f" (measured at commit {done.commit}, this is {now})" if done.commit != now else ""


def flat(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested groups as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@contextlib.contextmanager
def _turn(cfg: RunConfig) -> Iterator[None]:
    """Wait until no other job of this machine measures: two would share its GPU, drive and cores."""
    if not cfg.measure_alone or not set(MEASURING).intersection(cfg.stages):
        yield
        return
    path = Path(tempfile.gettempdir()) / f"nvmoe-measuring-{os.getuid()}.lock"
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another job on this machine (measure_alone=false does not wait)")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _gpu_name() -> str | None:
    """Return the GPU's name if this process computes on one; never wakes a GPU up."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    name: str = torch.cuda.get_device_name()
    return name


def _ray_node() -> str | None:
    """Return the id of the Ray node that runs this job; None where Ray did not start it."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    node: str = ray.get_runtime_context().get_node_id()
    return node


def commit() -> str | None:
    """Return the commit of this code, with a plus if files differ from it; None outside a repository."""
    try:
        text = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return text.strip() or None


# ---- the whole sweep -------------------------------------------------------------------------------------------------


class NoteSweep(Callback):
    """Hydra's hook around a multirun: remembers its folder for the main process."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Note where the points will be."""
        if not config.get("dry_run"):
            Outcome.sweeps.append((Path(config.hydra.sweep.dir), time.time()))


def gather() -> int:
    """Merge and show the sweeps that this process ran; return the worst exit code of the points that ran now."""
    codes = [0]
    for folder, started in Outcome.sweeps:
        points = read_points(folder)
        if not points:
            continue
        codes += [point.exit_code for point in points if point.started >= started]
        print(format_sweep(points), flush=True)
        for path in write_tables(points, folder):
            print(f"all points: {path}", file=sys.stderr)
        plot = folder / "sweep.png"
        if draw(points, plot):
            print(f"picture: {plot}", file=sys.stderr)
    return max(codes)
