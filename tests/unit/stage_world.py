"""Made-up stages in a folder of their own, and what stops them: for the tests of the stage runner."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from conf.schema import RunConfig
from stages.core import Runner
from stages.stage import Output, Stage, StageContext

NUM_UNITS = 4
UNIT_NBYTES = 10_000


class Killed(BaseException):
    """A stop that no `except Exception` sees, at a place of the test's choice."""


class World:
    """Stages `first` -> `second`, `other` beside them, and the end point `end`; every executed unit is counted.

    A unit's bytes follow from `salt` (which no key knows), the stage's parameter and what it is made from.
    """

    def __init__(self, root: Path) -> None:
        self.artifacts = root / "artifacts"
        self.counts = root / "counts.txt"  # on the disk: a killed process has counted too
        self.params = {"first": {"size": 1}, "second": {"size": 1}, "other": {"size": 1}}
        self.versions = dict.fromkeys(self.params, 1)
        self.salt = {"first": b"", "second": b"", "other": b""}
        self.disk = dict.fromkeys(self.params, 0)
        self.external: dict[str, Path] = {}
        self.on_unit = lambda _stage, _unit, _ctx: None  # called with half of the unit written
        self.on_done = lambda _stage, _unit: None
        self.shown: list[str] = []
        self.ended: list[dict[str, Output]] = []

    def runner(self, **config) -> Runner:
        cfg = RunConfig(**config)
        cfg.model.name = "made-up"
        return Runner(cfg, self.artifacts, self.stages())

    def run(self, *targets: str, **config) -> None:
        self.runner(**config).run(targets or ("end",))

    def explain(self, *targets: str, **config) -> dict[str, str]:
        return {
            name: str(decision)
            for name, decision in self.runner(**config).explain(targets or ("end",))
        }

    def stages(self) -> dict[str, Stage]:
        needs = {"first": (), "second": ("first",), "other": ()}
        made = {name: self._stage(name, needs[name]) for name in needs}
        made["end"] = Stage(
            "end",
            run=lambda ctx: self.ended.append(dict(ctx.inputs)),
            needs=lambda _cfg: ("second", "other"),
            is_endpoint=True,
        )
        return made

    def _stage(self, name: str, needs: tuple[str, ...]) -> Stage:
        return Stage(
            name,
            run=self._make,
            version=self.versions[name],
            needs=lambda _cfg: needs,
            params=lambda _cfg: dict(self.params[name]),
            disk_nbytes=lambda _cfg, _inputs: self.disk[name],
            show=lambda _cfg, output: self.shown.append(output.record["stage"]),
        )

    def unit_bytes(self, name: str, unit: str, made_from: bytes) -> bytes:
        seed = b"%s %s %r %s " % (
            name.encode(), unit.encode(), sorted(self.params[name].items()), self.salt[name]
        )  # fmt: skip
        text = seed + made_from
        return (text * (UNIT_NBYTES // len(text) + 1))[:UNIT_NBYTES]

    def _make(self, ctx: StageContext) -> None:
        name = ctx.stage.name
        made_from = b"".join(
            (output.root / "data.bin").read_bytes()[:200] for output in ctx.inputs.values()
        )
        fd = os.open(ctx.out / "data.bin", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            for unit in ctx.todo([str(i) for i in range(NUM_UNITS)], "units"):
                with open(self.counts, "a") as counts:
                    counts.write(f"{name} {unit}\n")
                data = self.unit_bytes(name, unit, made_from)
                at = int(unit) * UNIT_NBYTES
                os.pwrite(fd, data[: UNIT_NBYTES // 2], at)
                self.on_unit(name, unit, ctx)
                os.pwrite(fd, data[UNIT_NBYTES // 2 :], at + UNIT_NBYTES // 2)
                ctx.done(unit)
                self.on_done(name, unit)
        finally:
            os.close(fd)
        ctx.external = {self.external[name]: ""} if name in self.external else {}

    def content(self, name: str) -> bytes:
        output = self.runner().find(name)
        assert output is not None
        return (output.root / "data.bin").read_bytes()

    def executed(self) -> Counter[str]:
        """Return how often each unit was begun since the last call."""
        lines = self.counts.read_text().splitlines() if self.counts.exists() else []
        self.counts.unlink(missing_ok=True)
        return Counter(lines)

    def executed_stages(self) -> list[str]:
        return sorted({line.split()[0] for line in self.executed()})

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.artifacts)): path.read_bytes()
            for path in sorted(self.artifacts.rglob("*"))
            if path.is_file()
        }

    def partial(self, name: str) -> Path:
        folder = self.runner().folder(name)
        return folder.with_name(f"{folder.name}.partial")


def stop_after(stage: str, unit: str, error: BaseException):
    def stop(name: str, at: str, *_: object) -> None:
        if (name, at) == (stage, unit):
            raise error

    return stop


def unstopped(tmp_path: Path, salt: bytes = b"") -> World:
    """Return a world made without a stop."""
    reference = World(tmp_path / "reference")
    (tmp_path / "reference").mkdir(exist_ok=True)
    reference.salt["first"] = salt
    reference.run()
    return reference
