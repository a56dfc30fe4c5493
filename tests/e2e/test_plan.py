"""`plan` and `dry_run`: from the yaml alone, sizes as an engine finds them, speeds as they were published."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict

import pytest
import torch
from tiny_setup import make_runner

from runtime import hardware
from runtime.engine import EngineFiles
from runtime.errors import UserError
from stages.core import Runner
from stages.doctor_record import RECORD_NAME

CACHE_16_GB = "cache.ram_gib=14.901"  # the published runs count caches in 10**9 bytes
PUBLISHED = [  # (model, cache, tok/s): runs on the machine that conf/hw/rtx5060.yaml describes
    ("deepseek", "cache.ram_gib=0", 1.64),
    ("deepseek", CACHE_16_GB, 2.43),
    ("qwen", "cache.ram_gib=0", 4.75),
    ("qwen", CACHE_16_GB, 8.1),
]


def plan(runner: Runner, run_dir) -> dict:
    runner.run_dir = run_dir
    runner.run(["plan"])
    return json.loads((run_dir / "plan.json").read_text())


@pytest.mark.parametrize(("model", "cache", "published"), PUBLISHED)
def test_the_published_results(tmp_path, capsys, model, cache, published):
    found = plan(make_runner(tmp_path, f"model={model}", "hw=rtx5060", cache), tmp_path)
    assert found["tok_s"] == pytest.approx(published, rel=0.15)
    out = capsys.readouterr().out
    assert "L14: max(t_disk, R) + s * min(t_disk, R)" in out, "each number with its formula"
    print(f"PLAN | {model} {cache} | {found['tok_s']:.2f} tok/s | published {published}")


def test_a_deepseek_that_is_not_here(tmp_path, capsys):
    """GB, hours on a line, memory and speed, with nothing fetched and no file made but the result."""
    runner = make_runner(
        tmp_path,
        "model=deepseek",
        "hw=rtx5060",
        "hub.line_mbit_s=1000",
        f"paths.hub={tmp_path / 'hub'}",
    )
    found = plan(runner, tmp_path)
    assert found["fetch_nbytes"] == pytest.approx(501.4e9, rel=1e-3)
    assert found["fetch_s"] == pytest.approx(501.4e9 * 8 / 0.9e9, rel=1e-3)
    memory = dict(found["memory"])
    assert memory["VRAM"] <= 7.4 * 2**30
    assert memory["RAM"] <= 27 * 2**30
    assert found["improvements"]["a second drive as fast as this one"] > found["tok_s"]
    assert found["tok_s_without_cache"] < found["tok_s"]
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        (("hw.ram_gib=4",), "of RAM at least"),
        (("hw.vram_gib=6",), "of GPU memory at least"),
    ],
)
def test_a_machine_that_is_too_small_is_told_by_how_much(tmp_path, capsys, overrides, needs):
    with pytest.raises(UserError, match=needs):
        plan(
            make_runner(tmp_path, "model=deepseek", "hw=rtx5060", "hw.reserve_gib=2", *overrides),
            tmp_path,
        )
    assert "expected:" in capsys.readouterr().out, "the rest is told all the same"
    assert json.loads((tmp_path / "plan.json").read_text())["does_not_fit"]


def test_rates_come_from_the_doctor_of_this_machine(tmp_path, capsys):
    runner = make_runner(tmp_path, "hw=cpu")
    assert "tok_s" not in plan(runner, tmp_path)
    assert "run stages=[doctor]" in capsys.readouterr().out
    record = {"host": "another", "when": "today", "rates": {"drive_gib_s": 2.0, "ram_gib_s": 10.0}}
    path = runner.root.parent / RECORD_NAME
    path.write_text(json.dumps(record))
    assert "tok_s" not in plan(runner, tmp_path), "a folder that was carried here from another machine"  # fmt: skip
    import platform

    path.write_text(json.dumps(record | {"host": platform.node()}))
    found = plan(runner, tmp_path)
    assert found["lines"][-1]["inputs"]["disk_bw"] == 2 * 2**30
    assert "measured by doctor on today" in capsys.readouterr().out


def test_planned_sizes_are_those_of_an_engine(tiny_files, make_config):
    """The plan's arithmetic on shapes, the engine's on the files that the stages made."""
    for overrides in ({}, {"model.deltanet": "bf16", "model.context_tokens": 777}):
        config = make_config(**overrides)
        family = importlib.import_module("runtime.models.qwen")
        spec = family.read_spec(tiny_files.snapshot)
        layout = family.expert_layout(spec, tiny_files)
        for dtype in (torch.float32, torch.bfloat16):
            found = family.model_sizes(spec, tiny_files, layout, config, dtype)
            planned = family.planned_sizes(spec, config, dtype, has_gpu=False)
            assert asdict(planned) == asdict(found)


def test_planned_sizes_of_deepseek(make_config, tmp_path):
    config = make_config("tiny_deepseek")
    family = importlib.import_module("runtime.models.deepseek")
    runner = Runner(config, tmp_path)
    runner.run(["download"])
    from pathlib import Path

    files = EngineFiles(Path(runner.find("download").facts["snapshot"]), None, None)
    spec = family.read_spec(files.snapshot)
    layout = family.expert_layout(spec, files)
    found = asdict(family.model_sizes(spec, files, layout, config, torch.float32))
    planned = asdict(family.planned_sizes(spec, config, torch.float32, has_gpu=False))
    # a run may need one page less than it can need
    assert 0 <= planned.pop("record_nbytes") - found.pop("record_nbytes") <= 2 * 4096
    assert planned == found


def test_expected_disk_is_what_the_stages_then_take(tmp_path):
    runner = make_runner(tmp_path, "hw=cpu")
    expected = {
        name: n
        for room in runner.expected_disk(["repack", "residents"])
        for name, n in room.parts.items()
    }
    runner.run(["repack", "residents"])
    for name in ("repack", "residents"):
        taken = sum(f["nbytes"] for f in runner.find(name).record["files"].values())
        assert expected[name] == pytest.approx(taken, rel=0.01)
    assert runner.expected_disk(["repack", "residents"]) == []


def test_a_full_disk_is_told_by_plan(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    monkeypatch.setattr(hardware, "available_ram_nbytes", lambda: (2**34, "a test"))
    with pytest.raises(UserError, match=r"too little"):
        plan(make_runner(tmp_path, "hw=cpu"), tmp_path)


def test_a_dense_model_has_a_memory_plan_and_no_speed(tmp_path, capsys):
    """The laws are of routed experts: nothing is said where nothing is known."""
    runner = make_runner(tmp_path, "model=qwen25_7b_1m", "model.weights=nvfp4", "hw=rtx5060")
    runner.run(["plan"])
    told = capsys.readouterr().out
    assert "28 experts" in told.split("VRAM")[1]
    assert "2 experts" in told.split("passing")[1]
    assert "speed: not known, the laws are of routed experts" in told
