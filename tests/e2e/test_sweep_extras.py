"""Launchers and the sweeper that are extras: joblib's processes, Ray's nodes, Optuna's trials. Skipped without them.

pip install -c constraints.txt -e '.[dev,joblib,optuna,ray]'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_setup import ROOT

BENCH = (
    "stages=[bench]", "hw=cpu", "hw.compute_threads=1", "bench.tokens=2", "bench.warmup_tokens=1",
    "bench.repeats=1", "bench.prompt_length=4", "bench.plot=false", "model.context_tokens=64",
)  # fmt: skip


@pytest.fixture
def run_sweep(outputs, tmp_path):
    """Run a sweep in a process of its own; returns its merged points and the process."""

    def call(*argv: str, environment: dict[str, str] | None = None):
        folder = tmp_path / "sweep"
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "run.py"), "-m", *BENCH, *argv),
                *(f"paths.outputs={tmp_path}", f"paths.artifacts={outputs}/artifacts"),
                f"hydra.sweep.dir={folder}",
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )  # fmt: skip
        assert "picture: " in done.stderr, done.stderr
        return json.loads((folder / "sweep.json").read_text())["points"], done

    return call


def bench_of(folder: Path, point: dict) -> dict:
    return json.loads((folder / "sweep" / point["name"] / "bench.json").read_text())


def test_joblib_runs_points_in_processes(run_sweep, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    points, done = run_sweep(
        "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "cache.ram_gib=0,1,-1"
    )
    assert done.returncode == 2, "of the point that failed in another process"
    assert [bool(p["error"]) for p in points] == [True, False, False]
    assert points[1]["figures"]["hit_rate"] == bench_of(tmp_path, points[1])["total"]["hit_rate"]
    # measured one after the other, though two processes were there
    first, second = sorted(points[1:], key=lambda p: p["started"])
    assert first["started"] + first["duration_s"] <= second["started"] + 0.001
    again, done = run_sweep("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "cache.ram_gib=0,1")
    assert done.returncode == 0
    assert [p["started"] for p in again] == [p["started"] for p in points], "nothing ran again"


def test_optuna_minimises_the_time_of_a_token(run_sweep):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    points, done = run_sweep(
        *("hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=1"),
        *("hydra.sweeper.sampler.seed=1", "cache.ram_gib=choice(0,1,-1)"),
    )
    assert done.returncode == 2, "a failing trial is told, and ends no other"
    assert [bool(p["error"]) for p in points] == [True, False, False], "all three were tried"
    best = min(points[1:], key=lambda p: 1 / p["figures"]["tok_s"])
    assert f"{1e3 / best['figures']['tok_s']:.6f}"[:7] in done.stdout + done.stderr


@pytest.mark.slow
def test_ray_runs_points_on_two_nodes(run_sweep):
    """Two nodes of one cluster on this machine; each sweep asks for what only one of them has."""
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    pytest.importorskip("ray.cluster_utils")
    # the test's own process must not speak to Ray: it leaves threads and files behind
    program = (
        "import sys, json\n"
        "from ray.cluster_utils import Cluster\n"
        "args = dict(num_cpus=1, object_store_memory=10**8)\n"
        "c = Cluster(initialize_head=True, head_node_args=dict(args, resources={'first': 1}))\n"
        "try:\n"
        "    c.add_node(**args, resources={'second': 1})\n"
        "    print(json.dumps([c.address, [n.node_id for n in c.list_all_nodes()]]), flush=True)\n"
        "    sys.stdin.read()\n"
        "finally:\n"
        "    c.shutdown()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    ) as cluster:  # fmt: skip
        try:
            line = next(text for text in cluster.stdout if text.startswith("["))
            address, nodes = json.loads(line)
            for name, ram in (("first", "0,-1"), ("second", "1")):
                points, _ = run_sweep(
                    *("hydra/launcher=ray", f"cache.ram_gib={ram}"),
                    f"hydra.launcher.ray.init.address='{address}'",
                    "+hydra.launcher.ray.init.object_store_memory=null",
                    f"+hydra.launcher.ray.remote.resources={{{name}: 1}}",
                )
        finally:
            cluster.stdin.close()
            cluster.wait(60)
    assert len(set(nodes)) == 2
    assert [bool(p["error"]) for p in points] == [True, False, False]
    assert len({p["machine"]["ray_node"] for p in points[1:]}) == 2
    assert {p["machine"]["ray_node"] for p in points} == set(nodes)
