"""What a sweep shows, from points that can be checked by hand."""

from __future__ import annotations

import csv
import json

import pytest

from stages import sweep_report
from stages.sweep_report import Point, draw, format_sweep, read_points, swept_keys, write_tables


def point(ram, guesses, tok_s=None, spread=0.0, drive_ms=5.0, error=None, **more) -> Point:
    figures = {}
    if tok_s is not None:
        figures = {
            "tok_s": tok_s, "tok_s_min": tok_s - spread, "tok_s_max": tok_s + spread,
            "drive_wait_ms": drive_ms, "host_ms": 1e3 / tok_s - drive_ms, "hit_rate": 0.5,
            "inter_token_p50_ms": 1e3 / tok_s, "floor_ms": 1.0, "read_mib": 2.0,
        }  # fmt: skip
    config = {"cache.ram_gib": ram, "prefetch.experts": guesses, "max_tokens": 4}
    return Point(
        name=f"point-{ram}-{guesses}", overrides=[f"prefetch.experts={guesses}", f"cache.ram_gib={ram}"],
        config=config, figures=figures, error=error, exit_code=1 if error else 0, commit="abc",
        machine={"cpu": "a cpu", "cores": 2, "gpu": None}, versions={}, started=1.0, duration_s=2.0, **more,
    )  # fmt: skip


@pytest.fixture
def points() -> list[Point]:
    return [
        point(0.0, 0, 10.0, drive_ms=90.0), point(8.0, 0, 20.0, drive_ms=30.0),
        point(None, 0, 40.0, spread=2.0), point(0.0, 2, 12.5, drive_ms=60.0),
        point(8.0, 2, error="no room"), point(None, 2, 41.0, spread=2.0),
    ]  # fmt: skip


def test_keys_that_differ_come_in_the_order_given(points):
    assert swept_keys(points) == ["prefetch.experts", "cache.ram_gib"]
    assert swept_keys(points[:3]) == ["cache.ram_gib"]
    assert swept_keys(points[:1]) == []


def test_the_table_says_which_wins_and_why(points):
    lines = format_sweep(points).splitlines()
    assert len({len(line) for line in lines[:6]}) == 1
    assert [line.startswith("*") for line in lines[1:6]] == [False] * 4 + [True]
    assert lines[1].endswith("waiting for the drive 90%")
    assert lines[3].endswith("host work 80%")
    assert "commit" not in lines[0], "it does not differ"
    assert lines[7] == (
        "best: prefetch.experts=2 cache.ram_gib=null: 41.00 tok/s, 4.10 times the slowest "
        "(prefetch.experts=0 cache.ram_gib=0): of 75.61 ms saved a token, waiting for the drive 85.00"
    )
    assert lines[8] == (
        "within the spread of the repeats as fast: prefetch.experts=0 cache.ram_gib=null"
    )
    assert lines[9:11] == [
        "automatic cache (prefetch.experts=0): 200% of the best size given (cache.ram_gib=8)",
        "automatic cache (prefetch.experts=2): 328% of the best size given (cache.ram_gib=0)",
    ]
    assert lines[11] == "failed: prefetch.experts=2 cache.ram_gib=8: no room"


@pytest.mark.parametrize(
    ("automatic", "spread", "said"),
    [(40.0, 0.0, "100%"), (37.0, 0.0, "92%"), (30.0, 0.0, "75%"), (30.0, 12.0, "75%")],
)
def test_an_automatic_size_that_falls_off_is_told(automatic, spread, said):
    """A cache so large that the machine swaps is slower than one that leaves room."""
    sizes = [point(4.0, 2, 30.0), point(8.0, 2, 40.0), point(16.0, 2, 20.0)]
    (line,) = [
        line
        for line in format_sweep([*sizes, point(None, 2, automatic, spread)]).splitlines()
        if line.startswith("automatic")
    ]
    assert line.startswith(f"automatic cache: {said} of the best size given (cache.ram_gib=8)")
    assert ("WORSE" in line) == (automatic == 30.0 and not spread)
    assert "automatic" not in format_sweep(sizes)


def test_points_of_two_commits_are_told_apart(points):
    from dataclasses import replace

    lines = format_sweep([points[0], replace(points[1], commit="def")]).splitlines()
    assert "commit" in lines[0].split()
    assert "def" in lines[2].split()


def test_a_round_trip_through_the_folders(points, tmp_path):
    for p in reversed(points):
        (tmp_path / p.name).mkdir()
        (tmp_path / p.name / "point.json").write_text(p.to_json())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "point.json").write_text("{")
    found = read_points(tmp_path)
    assert [(p.config["prefetch.experts"], p.config["cache.ram_gib"]) for p in found] == [
        (0, 0.0), (0, 8.0), (0, None), (2, 0.0), (2, 8.0), (2, None),
    ]  # fmt: skip
    table, document = write_tables(found, tmp_path)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["tok_s"] for row in rows] == ["10.0", "20.0", "40.0", "12.5", "", "41.0"]
    assert [row["cache.ram_gib"] for row in rows] == ["0.0", "8.0", "", "0.0", "8.0", ""]
    diffs = [p["diff"] for p in json.loads(document.read_text())["points"]]
    assert diffs[1] == {"prefetch.experts": 0, "cache.ram_gib": 8.0}


@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_picture_of_any_number_of_keys(points, tmp_path, count):
    assert draw(points[:count], tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert not draw([points[4]], tmp_path / "none.png"), "nothing was measured"


def test_a_token_takes_for_ever_where_nothing_was_measured(points):
    assert points[0].token_ms == 100.0
    assert points[4].token_ms == sweep_report.UNKNOWN_MS
