"""What a stage is: its description, what it sees while it runs, what it leaves. Knows no model and imports no torch."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.schema import STAGES, RunConfig
from stages.files import read_json, write_atomically
from stages.progress import Progress

if TYPE_CHECKING:
    from stages.core import Runner

JOURNAL_NAME = "journal.jsonl"
PLAN_NAME = "plan.json"


class Decision(NamedTuple):
    """What the runner does with a stage: action `skip`, `run` or `resume`, and why."""

    action: str
    reason: str

    def __str__(self) -> str:
        return f"{self.action}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Output:
    """A finished stage: its folder and its record."""

    root: Path
    record: Mapping[str, Any]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the stage chose to remember."""
        facts: Mapping[str, Any] = self.record["facts"]
        return facts


@dataclass(frozen=True, slots=True)
class Stage:
    """One step. `params` returns only what changes the output's bytes; bump `version` when they change otherwise.

    `run` of an end point (chat, serve) leaves nothing behind; of others it fills `ctx.out`. `disk_nbytes` is asked
    before anything is written; in its place, while what the stage needs is not made yet, `expected_nbytes`, which knows
    the config alone. Both are of the filesystem of `disk_root`; None is the artifacts'. `elsewhere` says
    how many more go to which other folders; without inputs, while they are not made yet. `show` prints and judges a
    finished record when the stage was asked for by name; `watch` looks at one that is used again.
    """

    name: str
    run: Callable[[StageContext], None]
    version: int = 1
    needs: Callable[[RunConfig], Sequence[str]] = lambda _cfg: ()
    params: Callable[[RunConfig], dict[str, Any]] = lambda _cfg: {}
    disk_nbytes: Callable[[RunConfig, Mapping[str, Output]], int] = lambda _cfg, _inputs: 0
    expected_nbytes: Callable[[RunConfig], int] = lambda _cfg: 0
    disk_root: Callable[[RunConfig], Path | None] = lambda _cfg: None
    elsewhere: Callable[[Runner, Mapping[str, Output] | None], Mapping[Path, int]] = (
        lambda _runner, _inputs: {}
    )
    show: Callable[[RunConfig, Output], None] = lambda _cfg, _output: None
    watch: Callable[[RunConfig, Output], None] = lambda _cfg, _output: None
    is_endpoint: bool = False


@dataclass(slots=True)
class StageContext:
    """What a running stage sees."""

    cfg: RunConfig
    stage: Stage
    inputs: Mapping[str, Output]
    out: Path  # the partial folder; for an end point the artifacts folder of the model
    runner: Runner
    facts: dict[str, Any] = field(default_factory=dict)  # goes into the record
    external: dict[Path, str] = field(default_factory=dict)  # files used in place -> blake3
    # output file -> its hash, where the stage knows it already
    digests: dict[str, str] = field(default_factory=dict)
    # finished unit -> what `done` was told
    units: dict[str, dict[str, Any]] = field(default_factory=dict)

    def todo(self, units: Sequence[str], what: str, nbytes_each: int = 0) -> Iterator[str]:
        """Yield the units that are not journalled yet, with progress."""
        left = [unit for unit in units if unit not in self.units]
        self.expect(len(units))
        with Progress(
            f"{self.stage.name}: {what}", len(units), len(units) - len(left), nbytes_each
        ) as bar:
            for unit in left:
                yield unit
                bar.advance()

    def expect(self, num_units: int) -> None:
        """Note how many units there are in all, for whoever asks after a stop."""
        plan = read_json(self.out / PLAN_NAME) or {}
        write_atomically(self.out / PLAN_NAME, json.dumps({**plan, "num_units": num_units}) + "\n")

    def done(self, unit: str, **facts: Any) -> None:
        """Journal a unit. Its bytes must be on the disk (fsync) before."""
        with open(self.out / JOURNAL_NAME, "a") as journal:
            journal.write(json.dumps({"unit": unit, **facts}) + "\n")
            journal.flush()
            os.fsync(journal.fileno())
        self.units[unit] = facts

    def forget_units(self) -> None:
        """Begin anew: nothing that is journalled counts."""
        write_atomically(self.out / JOURNAL_NAME, "")
        self.units.clear()


class StagesByName(Mapping[str, Stage]):
    """Every stage that `conf.schema.STAGES` names; a module is imported when its stage is looked up."""

    def __getitem__(self, name: str) -> Stage:
        if name not in STAGES:
            raise KeyError(name)
        stage: Stage = importlib.import_module(f"stages.{name}").STAGE
        return stage

    def __iter__(self) -> Iterator[str]:
        return iter(STAGES)

    def __len__(self) -> int:
        return len(STAGES)
