"""The stage runner with made-up stages: what is run and why, and what a crash costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.stage import Decision
from tests.unit.stage_world import NUM_UNITS, Killed, World, stop_after, unstopped

ROOT = Path(__file__).resolve().parents[2]
PROCESS = Path(__file__).with_name("stage_process.py")


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


@pytest.mark.parametrize("stage", ["first", "second"])
@pytest.mark.parametrize("unit", [str(i) for i in range(NUM_UNITS)])
@pytest.mark.parametrize("where", ["on_unit", "on_done"])
def test_a_stop_costs_at_most_one_unit(world, tmp_path, stage, unit, where):
    setattr(world, where, stop_after(stage, unit, Killed()))
    with pytest.raises(Killed):
        world.run()
    assert world.runner().find(stage) is None, "no finished name before the end"
    finished = int(unit) + (where == "on_done")
    assert world.runner().decide(stage) == Decision("resume", f"{finished} of 4 units are done")
    setattr(world, where, lambda *_: None)
    world.run()
    begun = world.executed()
    assert sum(begun.values()) - len(begun) == (where == "on_unit")
    reference = unstopped(tmp_path)
    for name in ("first", "second", "other"):
        assert world.content(name) == reference.content(name)
    assert not list(world.artifacts.rglob("*.partial"))


@pytest.mark.parametrize("cut", [1, 9, 14])
def test_half_a_line_at_the_end_of_the_journal(world, tmp_path, cut):
    world.on_done = stop_after("first", "2", Killed())
    with pytest.raises(Killed):
        world.run()
    journal = world.partial("first") / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])  # {"unit": "2"}\n is 14 bytes
    lost = 0 if cut == 1 else 1  # only the newline is missing: the line says all
    assert world.runner().decide("first").reason == f"{3 - lost} of 4 units are done"
    world.on_done = stop_after("first", "3", Killed())
    with pytest.raises(Killed):
        world.run()
    assert world.runner().decide("first").reason == "4 of 4 units are done", (
        "a line written behind half a line must not be lost with it"
    )
    world.on_done = lambda *_: None
    world.run()
    begun = world.executed()
    assert sum(begun.values()) - len(begun) == lost
    assert world.content("first") == unstopped(tmp_path).content("first")


def test_partial_work_of_other_inputs_is_thrown_away(world, tmp_path):
    world.on_done = stop_after("second", "2", Killed())
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
    assert world.content("second") == unstopped(tmp_path, salt=b"new").content("second")
    assert not (world.runner().folder("second") / "leftover.bin").exists()


def test_partial_work_of_other_parameters_is_not_mixed_in(world):
    world.on_done = stop_after("first", "2", Killed())
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
        [sys.executable, str(PROCESS), "crash", str(tmp_path)],
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
