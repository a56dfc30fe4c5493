"""The stage runner with made-up stages: what is run and why, what a crash costs, and who may run at once.

Run as a program (`crash FOLDER`, `hold FILE`), this file is the other process of two of its tests.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter, namedtuple
from pathlib import Path

import pytest
from blake3 import blake3

from conf.schema import RunConfig
from runtime.errors import BusyError, UserError
from stages import core
from stages.core import Runner
from stages.lock import Lock
from stages.progress import Progress
from stages.stage import Decision, Output, Stage, StageContext

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """A killed process loses no written byte, only a power cut does; real waits would be most of the time here."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)


@pytest.fixture
def made(world) -> World:
    """A world in which everything is made."""
    world.run()
    world.executed()
    return world


# ---- what is run, and why ----------------------------------------------------------------------------------------


def test_everything_from_nothing_then_nothing(world):
    assert world.explain() == {
        "first": "run: no record",
        "second": "run: no record",
        "other": "run: no record",
        "end": "run: asked for",
    }
    world.run()
    assert world.executed_stages() == ["first", "other", "second"]
    assert set(world.ended[0]) == {"second", "other"}
    before = world.files()
    assert world.explain() == {
        "first": "skip: record matches",
        "second": "skip: record matches",
        "other": "skip: record matches",
        "end": "run: asked for",
    }
    world.run()
    assert world.executed_stages() == []
    assert len(world.ended) == 2, "an end point runs each time"
    assert world.files() == before


def test_only_wanted_stages_run_needs_first(world):
    assert world.runner().order(["end", "first"]) == ["first", "second", "other", "end"]
    assert world.runner().order(["second", "second"]) == ["first", "second"]
    world.run("second")
    assert world.executed_stages() == ["first", "second"]
    assert world.shown == ["second"], "a record is shown for the stage that was named, and no other"
    world.run("second")
    assert world.shown == ["second", "second"], "also when it was made before"


def test_a_changed_parameter_runs_that_stage_and_its_dependants(made):
    made.params["first"] = {"size": 2, "kind": "new"}
    assert made.explain() == {
        "first": "run: kind None -> new, size 1 -> 2",
        "second": "run: what it is made from changed",
        "other": "skip: record matches",
        "end": "run: asked for",
    }
    made.run()
    assert made.executed_stages() == ["first", "second"]
    made.params["second"] = {"size": 7}
    assert made.explain()["second"] == "run: size 1 -> 7"
    made.run()
    assert made.executed_stages() == ["second"]
    made.params["first"], made.params["second"] = {"size": 1}, {"size": 1}
    made.run()
    assert made.executed_stages() == [], "going back finds the outputs of before"


def test_a_new_version_of_a_stage(made):
    made.versions["first"] = 2
    assert made.explain()["first"] == "run: version 1 -> 2"
    made.run()
    assert made.executed_stages() == ["first", "second"]


def test_forced_stages(made):
    assert made.explain(force=["first"]) == {
        "first": "run: forced",
        "second": "run: if the new output of first differs",
        "other": "skip: record matches",
        "end": "run: asked for",
    }
    made.run(force=["first"])
    assert made.executed_stages() == ["first"], (
        "the same bytes again: dependants have nothing to do"
    )
    made.salt["first"] = b"other bytes from the same parameters"
    made.run(force=["first"])
    assert made.executed_stages() == ["first", "second"]
    made.run(force="other")
    assert made.executed_stages() == ["other"]
    made.run(force=True)
    assert made.executed_stages() == [], "force=true is about a red verify, not about stages"


def test_the_output_of_a_needed_stage_changed(made):
    made.salt["first"] = b"new"
    made.run("first", force=["first"])
    assert made.explain()["second"] == "run: the output of first changed"
    made.executed()
    made.run()
    assert made.executed_stages() == ["second"]
    assert made.explain()["second"] == "skip: record matches"


def _shorten(path: Path) -> None:
    os.truncate(path, 39_000)


def _damage(offset: int):
    def damage(path: Path) -> None:
        with open(path, "r+b") as f:
            f.seek(offset)
            f.write(b"\xff")

    return damage


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_shorten, "data.bin has 38.1 KiB, the record says 39.1 KiB"),
        (Path.unlink, "data.bin is missing"),
        # a small file is sampled nearly whole: first, middle and last byte
        (_damage(0), "data.bin is not what was written: a sampled checksum differs"),
        (_damage(20_000), "data.bin is not what was written: a sampled checksum differs"),
        (_damage(39_999), "data.bin is not what was written: a sampled checksum differs"),
    ],
)
def test_a_harmed_output_is_made_again(made, harm, reason):
    wanted = made.content("first")
    harm(made.runner().folder("first") / "data.bin")
    assert made.explain()["first"] == f"run: {reason}"
    made.run()
    assert made.executed_stages() == ["first"]
    assert made.content("first") == wanted


@pytest.mark.parametrize("garbage", [b"", b"\0" * 300, b"\xff\xfe\xff", b"{}", b"[]"])
def test_a_damaged_record_counts_as_none(made, garbage):
    wanted = made.content("first")
    (made.runner().folder("first") / "record.json").write_bytes(garbage)
    assert made.explain()["first"].startswith("run: ")
    made.run()
    assert made.executed_stages() == ["first"]
    assert made.content("first") == wanted


def test_a_file_used_in_place_is_watched(world, tmp_path):
    used = tmp_path / "shard.bin"
    used.write_bytes(b"weights" * 1000)
    os.utime(used, ns=(10**18, 10**18))
    world.external["first"] = used
    world.run("first")
    assert world.explain("first")["first"] == "skip: record matches"
    os.utime(used, ns=(10**18, 10**18 + 1))
    assert world.explain("first")["first"] == f"run: {used} was written after it was checked"
    used.write_bytes(b"weights")
    assert world.explain("first")["first"] == f"run: {used} has 7 B, the record says 7,000 B"
    used.unlink()
    assert world.explain("first")["first"] == f"run: {used} is missing"


def test_explain_writes_nothing(world, tmp_path):
    world.explain()
    assert list(tmp_path.iterdir()) == [], "not even the folder of the artifacts"
    world.run()
    world.params["first"] = {"size": 5}
    (tmp_path / "counts.txt").unlink()
    before = world.files()
    world.explain(force=["other"])
    assert world.files() == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]


# ---- stopped and resumed -----------------------------------------------------------------------------------------


def _stop_after(stage: str, unit: str, error: BaseException):
    def stop(name: str, at: str, *_: object) -> None:
        if (name, at) == (stage, unit):
            raise error

    return stop


def _reference(tmp_path: Path, salt: bytes = b"") -> World:
    """Return a world made without a stop."""
    reference = World(tmp_path / "reference")
    (tmp_path / "reference").mkdir(exist_ok=True)
    reference.salt["first"] = salt
    reference.run()
    return reference


@pytest.mark.parametrize("stage", ["first", "second"])
@pytest.mark.parametrize("unit", [str(i) for i in range(NUM_UNITS)])
@pytest.mark.parametrize("where", ["on_unit", "on_done"])
def test_a_stop_costs_at_most_one_unit(world, tmp_path, stage, unit, where):
    setattr(world, where, _stop_after(stage, unit, Killed()))
    with pytest.raises(Killed):
        world.run()
    assert world.runner().find(stage) is None, "no finished name before the end"
    finished = int(unit) + (where == "on_done")
    assert world.runner().decide(stage) == Decision("resume", f"{finished} of 4 units are done")
    setattr(world, where, lambda *_: None)
    world.run()
    begun = world.executed()
    assert sum(begun.values()) - len(begun) == (where == "on_unit")
    reference = _reference(tmp_path)
    for name in ("first", "second", "other"):
        assert world.content(name) == reference.content(name)
    assert not list(world.artifacts.rglob("*.partial"))


@pytest.mark.parametrize("cut", [1, 9, 14])
def test_half_a_line_at_the_end_of_the_journal(world, tmp_path, cut):
    world.on_done = _stop_after("first", "2", Killed())
    with pytest.raises(Killed):
        world.run()
    journal = world.partial("first") / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])  # {"unit": "2"}\n is 14 bytes
    lost = 0 if cut == 1 else 1  # only the newline is missing: the line says all
    assert world.runner().decide("first").reason == f"{3 - lost} of 4 units are done"
    world.on_done = _stop_after("first", "3", Killed())
    with pytest.raises(Killed):
        world.run()
    assert world.runner().decide("first").reason == "4 of 4 units are done", (
        "a line written behind half a line must not be lost with it"
    )
    world.on_done = lambda *_: None
    world.run()
    begun = world.executed()
    assert sum(begun.values()) - len(begun) == lost
    assert world.content("first") == _reference(tmp_path).content("first")


def test_partial_work_of_other_inputs_is_thrown_away(world, tmp_path):
    world.on_done = _stop_after("second", "2", Killed())
    with pytest.raises(Killed):
        world.run()
    world.on_done = lambda *_: None
    (world.partial("second") / "leftover.bin").write_bytes(b"of the other inputs")
    world.salt["first"] = b"new"
    world.run("first", force=["first"])
    assert world.runner().decide("second").action == "run"
    world.executed()
    world.run()
    begun = world.executed()
    assert {line: n for line, n in begun.items() if line.startswith("second")} == {
        f"second {unit}": 1 for unit in range(NUM_UNITS)
    }
    assert world.content("second") == _reference(tmp_path, salt=b"new").content("second")
    assert not (world.runner().folder("second") / "leftover.bin").exists()


def test_partial_work_of_other_parameters_is_not_mixed_in(world):
    world.on_done = _stop_after("first", "2", Killed())
    with pytest.raises(Killed):
        world.run("first")
    world.on_done = lambda *_: None
    world.executed()
    world.params["first"] = {"size": 2}
    world.run("first")
    assert sum(world.executed().values()) == NUM_UNITS
    assert world.content("first").count(b"('size', 1)") == 0


def test_a_crash_at_every_system_call_that_orders_the_disk(tmp_path):
    """Killed at every rename, fsync, unlink and rmdir, with and without a finished output in the way."""
    done = subprocess.run(
        [sys.executable, __file__, "crash", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert len(results) > 40, "the calls were not intercepted"
    faults = [f"{r['scenario']}, {r['call']}: {fault}" for r in results for fault in r["faults"]]
    assert not faults, "\n".join(faults)


# ---- disk --------------------------------------------------------------------------------------------------------


def test_too_little_disk_is_said_before_the_first_byte(world, monkeypatch):
    world.disk = {"first": 3 * 2**30, "second": 5 * 2**30, "other": 2**20}
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**40, 2**40, 3 * 2**30))
    with pytest.raises(UserError) as caught:
        world.run()
    # second cannot be asked yet, first and other can; 64 MiB stay free
    assert "3.00 GiB free" in str(caught.value)
    assert "need 3.06 GiB (first 3.00 GiB, other 1.00 MiB)" in str(caught.value)
    assert "paths.artifacts" in str(caught.value)
    assert sum(world.executed().values()) == 0
    assert world.files() == {}


def test_a_later_stage_is_asked_as_soon_as_it_can_say(world, monkeypatch):
    world.disk["second"] = 5 * 2**30
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**40, 2**40, 3 * 2**30))
    with pytest.raises(UserError, match=r"second 5\.00 GiB"):
        world.run()
    assert world.executed_stages() == ["first"]


def test_partial_work_counts_as_disk_already_taken(world, monkeypatch):
    world.on_done = _stop_after("first", "3", Killed())
    with pytest.raises(Killed):
        world.run("first")
    world.on_done = lambda *_: None
    world.disk["first"] = NUM_UNITS * UNIT_NBYTES
    usage = namedtuple("usage", "total used free")
    free = core.DISK_MARGIN_NBYTES + 100  # not enough for the whole output, enough for the rest
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**40, 2**40, free))
    world.run("first")
    assert sum(world.executed().values()) == NUM_UNITS


def test_a_full_disk_inside_a_unit(world, tmp_path, fault_row):
    world.on_unit = _stop_after("second", "2", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(UserError) as caught:
        world.run()
    assert "second ran out of disk" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert str(world.artifacts) in str(caught.value)
    world.on_unit = lambda *_: None
    assert world.explain()["second"] == "resume: 2 of 4 units are done"
    world.run()
    assert world.content("second") == _reference(tmp_path).content("second")
    fault_row("the disk fills in a stage's work", caught.value.message, "2 of 4 units kept, same bytes")  # fmt: skip


def test_a_full_disk_at_any_moment_is_one_sentence(world, tmp_path, monkeypatch):
    """Also while plan, journal and record are written, which is outside of the stage's own code."""
    real, reference = os.fsync, _reference(tmp_path)
    for nth in range(1, 60):
        calls = 0

        def fsync(fd: int, nth: int = nth) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise OSError(errno.ENOSPC, "No space left on device")

        shutil.rmtree(world.artifacts, ignore_errors=True)
        monkeypatch.setattr(os, "fsync", fsync)
        try:
            world.run("second")
        except UserError as error:
            if "ran out of disk" not in str(error):
                pytest.fail(f"fsync number {nth} is said as: {error}")
        except OSError as error:
            pytest.fail(f"fsync number {nth} made a traceback: {error!r}")
        finally:
            monkeypatch.setattr(os, "fsync", real)
        if calls < nth:
            break
        world.run("second")
        assert world.content("second") == reference.content("second"), f"fsync number {nth}"
    assert calls > 10, "the calls were not intercepted"


def test_a_folder_that_cannot_be_made(world, tmp_path):
    (tmp_path / "artifacts").write_text("a file")
    with pytest.raises(UserError, match=r"paths\.artifacts"):
        world.run()


# ---- progress without a terminal -----------------------------------------------------------------------------------


def test_progress_of_bytes_in_lines(monkeypatch, capsys):
    """A line now and then with bytes, rate and time left, and no control characters."""
    now = 100.0
    monkeypatch.setattr(core.time, "monotonic", lambda: now)
    with Progress("fetch", 400 * 2**20, 100 * 2**20, is_nbytes=True) as bar:
        now = 104.0
        bar.advance(50 * 2**20)  # too early for a line
        now = 110.0
        bar.advance(70 * 2**20)
        now = 120.0
        bar.advance(-20 * 2**20)  # thrown away
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "fetch 220.00 MiB of 400.00 MiB at 12.00 MiB/s, 15.0 s left",
        "fetch 200.00 MiB of 400.00 MiB at 5.00 MiB/s, 40.0 s left",
    ]


# ---- two at once -------------------------------------------------------------------------------------------------


@pytest.fixture
def holder(world):
    """Another process that holds the lock of `first`."""
    path = world.artifacts / "made-up" / f"{world.runner().folder('first').name}.lock"
    path.parent.mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, __file__, "hold", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_the_second_of_two_runs_is_told_who_holds_the_lock(world, holder, caplog, fault_row):
    with pytest.raises(BusyError) as caught:
        world.run()
    assert f"pid {holder.pid} on {socket.gethostname()}" in str(caught.value)
    assert "first" in str(caught.value)
    assert caught.value.exit_code == 4
    assert sum(world.executed().values()) == 0

    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert list(world.artifacts.rglob("*.lock")), "the dead owner's file is still there"
    with caplog.at_level(logging.INFO, "stages"):
        world.run()
    assert f"taking over from pid {holder.pid}" in caplog.text
    fault_row("two runs of one stage", caught.value.message, "taken over when its owner is killed")
    assert not list(world.artifacts.rglob("*.lock"))
    assert world.runner().decide("first").action == "skip"


def test_a_lock_file_of_an_older_run_locks_nobody_out(world):
    path = world.artifacts / "made-up" / f"{world.runner().folder('first').name}.lock"
    path.parent.mkdir(parents=True)
    path.write_text(f"pid {os.getpid()} on {socket.gethostname()}\n")  # the pid lives, but not here
    world.run()
    assert world.runner().decide("first").action == "skip"


def test_a_lock_unlinked_by_its_last_owner_between_open_and_lock(tmp_path, monkeypatch):
    """Two runs must not hold two files of one name: the loser of this race opens it again."""
    path, real = tmp_path / "x.lock", fcntl.flock
    races = iter([True, False])

    def flock(fd: int, flags: int) -> None:
        if next(races):
            path.unlink()
        real(fd, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Lock(path):
        monkeypatch.setattr(fcntl, "flock", real)
        assert path.exists()
        with pytest.raises(BusyError), Lock(path):
            pass
    assert not path.exists()


def test_another_run_that_finished_while_we_waited_is_not_repeated(world, monkeypatch):
    """The decision is taken again under the lock."""
    other, real = World(world.artifacts.parent), Lock.__enter__
    is_first = iter([True])

    def enter(lock: Lock) -> Lock:
        if next(is_first, False):
            other.run("first")
        return real(lock)

    monkeypatch.setattr(Lock, "__enter__", enter)
    world.run("first")
    assert sum(world.executed().values()) == NUM_UNITS


def test_a_filesystem_without_locks(world, monkeypatch, fault_row):
    def flock(_fd: int, _flags: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError) as caught:
        world.run()
    assert not isinstance(caught.value, BusyError)
    assert "has no file locks: Function not implemented" in str(caught.value)
    assert "paths.artifacts" in str(caught.value)
    assert sum(world.executed().values()) == 0
    fault_row("a filesystem without locks", caught.value.message, "said before any work")


# ---- the other process -------------------------------------------------------------------------------------------


def _crash_everywhere(root: Path) -> None:
    """Fork a run per system call and kill it there; print what each left behind that it should not."""
    results = []
    os.fsync = lambda _fd: None
    # hash in this thread: the hasher's pool of threads does not live on in a fork
    core.file_digest = lambda path: blake3(path.read_bytes()).hexdigest(length=16)
    for scenario in ("from nothing", "over a finished output", "over a stale output"):
        start = root / scenario / "start"
        start.mkdir(parents=True)
        if scenario != "from nothing":
            world = World(start)
            world.run("second")
            world.executed()
            if scenario == "over a stale output":
                os.truncate(world.runner().folder("first") / "data.bin", 100)
        for nth in range(1, 1000):
            world = World(shutil.copytree(start, root / scenario / str(nth)))
            world.salt["first"] = b"new" if scenario != "from nothing" else b""
            call = _crash_once(world, scenario, nth)
            if call is None:
                break
            faults = list(_faults_after_crash(world, scenario))
            results.append(
                {"scenario": scenario, "call": f"{call}, number {nth}", "faults": faults}
            )
    print(json.dumps(results))


def _target(scenario: str) -> dict[str, list[str]]:
    return {"force": ["first"]} if scenario == "over a finished output" else {}


def _crash_once(world: World, scenario: str, nth: int) -> str | None:
    """Run in a child that dies before its n-th call. Returns the call's name, None when there were fewer."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        left = nth

        def dying(name: str, real):
            def call(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left == 0:
                    os.write(writer, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("rename", "fsync", "unlink", "rmdir", "replace"):
            setattr(os, name, dying(name, getattr(os, name)))
        world.run("second", **_target(scenario))
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    name = os.read(reader, 100).decode()
    os.close(reader)
    assert os.WIFSIGNALED(status) or (os.WEXITSTATUS(status) == 0 and not name)
    return name or None


def _faults_after_crash(world: World, scenario: str):
    """Yield what is wrong with the disk now, and with a second run of the same targets."""
    old, new = World(world.artifacts), World(world.artifacts)
    new.salt["first"] = world.salt["first"]
    wanted = {
        b"".join(w.unit_bytes("first", str(i), b"") for i in range(NUM_UNITS)): w
        for w in (old, new)
    }
    runner = world.runner()
    if (output := runner.find("first")) is not None:
        content = (output.root / "data.bin").read_bytes()
        is_known_stale = scenario == "over a stale output" and len(content) == 100
        if content not in wanted and not is_known_stale:
            yield "a finished name with wrong content"
        digest = core.file_digest(output.root / "data.bin")
        if digest != output.record["files"]["data.bin"]["blake3"] and not is_known_stale:
            yield "a record that is not of this file"
    had_old = runner.find("first") is not None and runner.decide("first").action == "skip"
    is_lost = runner.find("first") is None and runner.decide("first").action != "resume"
    if scenario == "over a finished output" and is_lost:
        yield "neither the old output nor one that can be resumed"
    world.run("second")
    begun = world.executed()
    content = world.content("first")
    if content not in wanted or (not had_old and content != list(wanted)[-1]):
        yield "the second run ended with wrong content"
    made_from = content[:200]
    if world.content("second") != b"".join(
        world.unit_bytes("second", str(i), made_from) for i in range(NUM_UNITS)
    ):
        yield "the dependant ended with wrong content"
    again = sum(begun.values()) - len(begun)
    if again > 1:
        yield f"{again} units were done again"
    leftovers = [p.name for p in runner.root.iterdir() if p.suffix and not had_old]
    if leftovers:
        yield f"left over after the second run: {leftovers}"


def _hold(path: Path) -> None:
    with Lock(path):
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    {"crash": _crash_everywhere, "hold": _hold}[sys.argv[1]](Path(sys.argv[2]))
