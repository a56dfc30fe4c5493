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
from runtime.mounts import find_mount
from stages.core import Runner
from stages.doctor_record import (
    RECORD_NAME,
    drive_identity,
    expert_folder,
    machine_identity,
    merged_drives,
    read_record,
)

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


@pytest.fixture
def measured(tmp_path):
    """A runner on hw=cpu, and a function that changes parts of a record of this machine and writes it."""
    runner = make_runner(tmp_path, "hw=cpu")
    drive = {
        "identity": drive_identity(find_mount(expert_folder(runner))), "record_nbytes": 24576,
        "when": "today", "drive_gib_s": 2.0, "drive_sustained_gib_s": 2.0,
    }  # fmt: skip

    def write(machine=(), drives=None, rates=()) -> Runner:
        record = {
            "when": "today", "machine": machine_identity() | dict(machine),
            "rates": {"drive_gib_s": 9.0, "ram_gib_s": 10.0} | dict(rates),
            "drives": [drive | change for change in ([{}] if drives is None else drives)],
        }  # fmt: skip
        path = runner.root.parent / RECORD_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record))
        return runner

    return write


def used_drive(found: dict) -> float:
    return found["lines"][-1]["inputs"]["disk_bw"] / 2**30


def test_rates_come_from_the_doctor_of_this_machine(tmp_path, capsys, measured):
    assert "tok_s" not in plan(make_runner(tmp_path, "hw=cpu"), tmp_path)
    assert "run stages=[doctor]" in capsys.readouterr().out
    assert used_drive(plan(measured(), tmp_path)) == 2.0
    assert "measured by doctor on today" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"cpu": "An Older Processor"}, "cpu An Older Processor -> "),
        ({"ram_nbytes": 2**43}, "RAM 8.00 TiB -> "),
        ({"gpus": ["A Card", "A Card"]}, "gpus A Card and A Card -> none"),
    ],
)
def test_a_record_of_another_machine_is_not_used_and_told(tmp_path, caplog, measured, machine, said):  # fmt: skip
    if machine_identity()["gpus"] and "gpus" in machine:
        said = "gpus A Card and A Card -> "
    assert "tok_s" not in plan(measured(machine), tmp_path)
    assert "is of another machine" in caplog.text
    assert said in caplog.text


def test_ram_that_a_new_kernel_counts_otherwise_is_the_same_machine(tmp_path, measured):
    ram = machine_identity()["ram_nbytes"]
    assert used_drive(plan(measured({"ram_nbytes": int(ram * 1.02)}), tmp_path)) == 2.0


def test_another_drive_is_told_and_its_rate_not_used(tmp_path, caplog, measured):
    old = {"filesystem": "xfs", "model": "Old Drive", "link": "8.0 GT/s PCIe x4"}
    assert "tok_s" not in plan(measured(drives=[{"identity": old}]), tmp_path)
    assert "is not on the drive that doctor measured" in caplog.text
    assert "(xfs, Old Drive, 8.0 GT/s PCIe x4 -> " in caplog.text
    # memory's rate still holds: only the drive's is missing
    runner = measured(drives=[{"identity": old}])
    runner.cfg.hw.rates.drive_gib_s = 3.0
    found = plan(runner, tmp_path)
    assert used_drive(found) == 3.0
    (line,) = (line for line in found["lines"] if "mem_bw" in line["inputs"])
    assert line["inputs"]["mem_bw"] == 10 * 2**30


def test_each_size_of_reads_has_its_own_rate(tmp_path, caplog, measured):
    large = {"record_nbytes": 2**22, "drive_gib_s": 5.0}
    assert used_drive(plan(measured(drives=[{}, large]), tmp_path)) == 2.0
    assert not caplog.text
    assert used_drive(plan(measured(drives=[large]), tmp_path)) == 5.0
    assert "measured with reads of 4.00 MiB, this model's are of 24,576 B" in caplog.text


def test_a_record_that_cannot_be_read(tmp_path, caplog, measured):
    runner = measured()
    for text in ("", "{}", "[1]", '{"rates": 1}'):
        (runner.root.parent / RECORD_NAME).write_text(text)
        caplog.clear()
        assert "tok_s" not in plan(runner, tmp_path)
        assert "cannot be used" in caplog.text


def test_a_machine_that_is_not_this_one_does_not_get_its_rates(tmp_path, capsys, measured):
    runner = measured()
    runner.cfg.hw.ram_gib = 100_000.0
    assert "tok_s" not in plan(runner, tmp_path)
    assert "describes another machine than this one" in capsys.readouterr().out


def test_an_earlier_record_is_completed(tmp_path, measured):
    runner = measured(drives=[{}, {"record_nbytes": 2**22}], rates={"pcie_gib_s": 20.0})
    path = runner.root.parent / RECORD_NAME
    drive = json.loads(path.read_text())["drives"][0]
    assert merged_drives(path, drive | {"drive_gib_s": 7.0})[-1]["drive_gib_s"] == 7.0
    assert len(merged_drives(path, drive | {"drive_gib_s": 7.0})) == 2
    assert len(merged_drives(path, drive | {"record_nbytes": 1})) == 3
    assert merged_drives(tmp_path / "nowhere", drive) == [drive]
    assert read_record(runner).rates["pcie_gib_s"] == 20.0


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
