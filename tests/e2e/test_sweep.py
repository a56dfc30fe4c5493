"""`-m`: points that stay, points that fail, and what is merged of them. Nothing here asks which setting is faster."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from stages import sweep
from stages.sweep_report import Point

BENCH = (
    "stages=[bench]", "hw=cpu", "hw.compute_threads=1", "bench.tokens=3", "bench.warmup_tokens=1",
    "bench.repeats=2", "bench.prompt_length=4", "bench.plot=false", "model.context_tokens=64",
)  # fmt: skip


@pytest.fixture
def run_sweep(cli, outputs, tmp_path):
    """Run a sweep of bench into one folder; returns what the command printed."""

    def call(*argv: str):
        folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
        return cli("-m", *BENCH, folder, f"paths.artifacts={outputs}/artifacts", *argv)

    return call


def test_a_sweep_is_merged_and_goes_on_where_it_was(run_sweep, tmp_path):
    folder = tmp_path / "sweep"
    done = run_sweep("cache.ram_gib=0,1", "prefetch.experts=0,99")
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.count("failed: ") == 2, "a wrong value ends its own points"
    assert "prefetch.experts must be at most 64, got 99" in done.stdout
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = list(csv.DictReader((folder / "sweep.csv").read_text().splitlines()))
    assert [(r["cache.ram_gib"], r["prefetch.experts"], bool(r["error"])) for r in rows] == [
        ("0.0", "0", False), ("0.0", "99", True), ("1.0", "0", False), ("1.0", "99", True),
    ]  # fmt: skip
    merged = json.loads((folder / "sweep.json").read_text())
    assert merged["keys"] == ["cache.ram_gib", "prefetch.experts"]
    good = [point for point in merged["points"] if not point["error"]]
    for point, row in zip(good, (rows[0], rows[2]), strict=True):
        bench = json.loads((folder / point["name"] / "bench.json").read_text())
        assert point["figures"]["tok_s"] == bench["decode_tok_s"]["median"] == float(row["tok_s"])
        assert point["figures"]["hit_rate"] == bench["total"]["hit_rate"]
        assert point["diff"] == {
            "cache.ram_gib": bench["config"]["cache"]["ram_gib"],
            "prefetch.experts": 0,
        }
    assert good[0]["figures"]["read_mib"] > good[1]["figures"]["read_mib"]

    before = {path: path.read_bytes() for path in folder.glob("*/bench.json")}
    assert len(before) == 2
    # other words for one of the points, a new one, and one that failed before
    again = run_sweep("cache=none,lru", "cache.ram_gib=0", "prefetch.experts=0,2")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("INFO stages: skip: ") == 3, "cache=lru with ram_gib=0 is cache=none"
    assert {path: path.read_bytes() for path in before} == before
    assert len(list(folder.glob("*/bench.json"))) == 3
    merged = json.loads((folder / "sweep.json").read_text())
    assert len(merged["points"]) == 5
    assert again.stdout.count("failed: ") == 2, "what failed before is still told"


def test_a_crash_of_one_point_does_not_end_the_others(outputs, tmp_path, monkeypatch, capsys):
    """An error that nobody expected is written down with its traceback on stderr."""
    cfg = OmegaConf.create({"force": [], "stages": ["bench"]})
    monkeypatch.setattr(sweep, "load", lambda _cfg: (_ for _ in ()).throw(ZeroDivisionError("odd")))
    folder = tmp_path / "point-1"
    folder.mkdir()
    assert sweep.run_point(cfg, folder, ["a=1"]) == float("inf")
    point = Point.from_json((folder / "point.json").read_text())
    assert (point.error, point.exit_code) == ("ZeroDivisionError: odd", 1)
    assert "Traceback" in capsys.readouterr().err


def test_the_folder_is_named_by_what_is_computed():
    def name(**changes) -> str:
        base = {
            "hydra": {"job": {"num": 0}},
            "paths": {"outputs": "a"},
            "force": [],
            "cache": {"ram_gib": 1.0},
            "max_tokens": 4,
        }
        root = OmegaConf.create(base | changes)
        return sweep.point_id(_root_=root)

    assert name() == name(hydra={"job": {"num": 1}}, paths={"outputs": "b"}, force=["bench"])
    assert len({name(), name(cache={"ram_gib": 2.0}), name(max_tokens=5)}) == 3


def test_force_measures_again(run_sweep, tmp_path):
    run_sweep("cache.ram_gib=0")
    (path,) = Path(tmp_path).glob("sweep/*/bench.json")
    before = path.read_bytes()
    run_sweep("cache.ram_gib=0", "force=true")
    assert path.read_bytes() != before
