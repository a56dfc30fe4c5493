"""`simulate` as a stage: a recording made by the real program, a sweep over policies, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tiny_setup import make_runner

from runtime.errors import UserError
from runtime.units import format_nbytes

DRIVE = "hw.drive.simulate_gib_s=0.25"


def simulated(folder, *argv: str):
    runner = make_runner(folder, "stages=[simulate]", *argv)
    runner.run_dir = folder
    runner.run(["simulate"])
    return json.loads((folder / "simulate.json").read_text())


def test_from_a_recording_to_a_sweep(cli, outputs, tmp_path, capsys):
    bench = (
        "stages=[bench]", "hw=cpu", "hw.compute_threads=1", "bench.tokens=12", "bench.warmup_tokens=2",
        "bench.repeats=1", "bench.prompt_length=9", "bench.plot=false", "record=true", DRIVE,
        "cache.ram_gib=0.003", "prefetch.experts=0",
    )  # fmt: skip
    runner = make_runner(outputs, *bench)
    runner.run_dir = tmp_path
    runner.run(["bench"])
    measured = json.loads((tmp_path / "bench.json").read_text())["total"]["counters"]
    routes = f"simulate.routes={tmp_path / 'routes.bin'}"
    same = (routes, DRIVE, "cache.ram_gib=0.003", "prefetch.experts=0", "bench.warmup_tokens=2")
    found = simulated(tmp_path, *same)["summary"]["counters"]
    for name in ("hits", "misses", "read_nbytes"):
        assert found[name] == measured[name], name

    words = ("simulate.policy=lru,lfu,slru,belady", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    done = cli("-m", "stages=[simulate]", *same, *words)
    assert done.returncode == 0, done.stderr
    points = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    rates = {p["config"]["simulate.policy"]: p["figures"]["hit_rate"] for p in points}
    assert rates["lru"] == pytest.approx(found["hits"] / (12 * 48))
    assert rates["belady"] == max(rates.values()) > rates["lru"]
    assert "best: simulate.policy=belady" in done.stdout


def test_what_a_second_drive_would_give(tmp_path, capsys):
    """Of each drive its own rate, through the queue that reads; one without a rate is refused."""
    words = ("simulate=qwen_rtx5060", "bench.tokens=4", "bench.warmup_tokens=2", "cache.ram_gib=0")
    words += ("prefetch.experts=0", "simulate.host_us=0")
    drives = "hw.drives=[{simulate_gib_s:4.1},{simulate_gib_s:%s}]"

    def wait_ms(*more):
        return simulated(tmp_path, *words, *more)["summary"]["drive_wait_ms_per_token"]

    one = wait_ms("hw.drive.simulate_gib_s=4.1")
    assert wait_ms(drives % 4.1, "hw.spread=mirror") == pytest.approx(one / 2, rel=0.01)
    assert wait_ms(drives % 4.1) == pytest.approx(one / 2, rel=0.01)
    assert wait_ms(drives % 2, "hw.spread=mirror") == pytest.approx(one * 4.1 / 6.1, rel=0.02)
    assert one / 1.8 < wait_ms(drives % 4.1, "hw.spread=stripe") < one / 1.5
    with pytest.raises(UserError, match="has no rate"):
        wait_ms("hw.drives=[{simulate_gib_s:4.1},{}]")
    capsys.readouterr()


def test_a_published_model_on_more_ram(tmp_path, capsys):
    """A few tokens: more RAM and guesses are faster, a machine without a drive is refused."""
    words = ("simulate=deepseek_rtx5060", "bench.tokens=4", "bench.warmup_tokens=8")
    fast = "hw.drive.simulate_gib_s=8.2"
    bare = simulated(tmp_path, *words, fast, "cache=none", "prefetch=none")["summary"]
    assert bare["read_nbytes_per_token"] == 240 * 18_800_640
    ahead = simulated(tmp_path, *words, fast, "cache=none")["summary"]
    warm = simulated(tmp_path, *words, fast, "cache.ram_gib=16")["summary"]
    assert bare["decode_tok_s"] < ahead["decode_tok_s"] < warm["decode_tok_s"]
    out = capsys.readouterr().out
    assert "40 layers of 384 experts" in out
    assert "no policy more than" in out
    with pytest.raises(UserError, match="the imagined machine has no rate"):
        simulated(tmp_path, *words)


@pytest.mark.parametrize("model", ["qwen", "deepseek"])
def test_every_assumption_is_printed(tmp_path, capsys, model):
    words = (f"simulate={model}_nvmoe_rtx5060", "hw.drive.simulate_gib_s=8.2", "cache.ram_gib=2")
    few = ("bench.tokens=2", "bench.warmup_tokens=3", "cache.policy=lfu", "prefetch.copy=5")
    document = simulated(tmp_path, *words, *few)
    assert document["policy"] == "lfu", "simulate.policy is cache.policy unless it is given"
    out = capsys.readouterr().out
    path = Path(__file__).resolve().parents[2] / "conf" / "simulate" / f"{model}_nvmoe_rtx5060.yaml"
    for key, value in OmegaConf.load(path).items():
        if key == "record_nbytes":
            assert format_nbytes(value) in out
        elif key == "reads_in_place":
            assert "copied to slots" in out
        else:
            assert re.search(rf"(?<![\d.]){value}(?![\d.])", out), key
    assert "not counted: 3 tokens" in out


def test_more_warm_up_than_was_recorded(tmp_path, outputs):
    from runtime.experts.routes import Kind, RouteHeader, RouteTrace, Step, write_routes

    path = tmp_path / "routes.bin"
    write_routes(path, RouteTrace(RouteHeader("m", 1, 4, 1, 4096), [Step(Kind.decode, 0, 0, (1,))]))
    with pytest.raises(UserError, match=r"has 1 decoded tokens, .*=16 leaves none to count"):
        simulated(tmp_path, DRIVE, f"simulate.routes={path}")
    with pytest.raises(UserError, match=r"cannot read routes from .*none\.bin"):
        simulated(tmp_path, DRIVE, f"simulate.routes={tmp_path}/none.bin")
