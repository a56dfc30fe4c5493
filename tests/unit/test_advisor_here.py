"""The machine that this runs on: what doctor measured, what bench ran, and what the laws say of both."""

from __future__ import annotations

import json
import platform

import pytest
from advisor_drafts import base

from conf.schema import RunConfig, Source
from runtime.advisor.advice import advise
from runtime.advisor.facts import situation_of
from runtime.advisor.own_runs import Here, read_own_runs
from runtime.advisor.render import format_advice
from runtime.mounts import Mount, find_mount
from stages.advise import wanted_machine, wanted_model
from stages.core import Runner
from stages.doctor_record import changes, drive_identity, machine_identity, read_record

GIB = 2**30
# of a virtual drive, as doctor recorded them
RATES = {"ram_gib_s": 33.2025, "drive_gib_s": 0.35747}
# of the tiny model: 8 layers, 6 experts each, unpadded
EXPERTS_PER_TOKEN, EXPERT_NBYTES = (48, 20748)


def record(folder, rates=RATES, machine=None, interface=None, **more):
    """What doctor leaves, of this machine and the drive below `folder` unless told otherwise."""
    rates = dict(rates)
    drive = {"identity": drive_identity(find_mount(folder)), "record_nbytes": 24576, "interface": interface}  # fmt: skip
    found = {
        "rates": rates, "when": "2026-11-30T09:05:18Z", "machine": machine or machine_identity(), "model": "tiny",
        "drives": [drive | {"drive_gib_s": rates["drive_gib_s"]}], **more,
    }  # fmt: skip
    (folder / "doctor.json").write_text(json.dumps(found))


def bench(folder, least, most, host=None, ram_gib=0.0, read=1229120.0, wasted=2605056):
    """A bench of the tiny model as it was recorded on the same machine, cut to what the advisor reads."""
    found = {
        "model": "tiny",
        "config": {"model": {"source": "bundled"}, "hw": {"name": "cpu", "drive": {"simulate_gib_s": 0.0}}, "cache": {"ram_gib": ram_gib}},
        "decode_tok_s": {"median": (least + most) / 2, "min": least, "max": most},
        "total": {"read_nbytes_per_token": read, "counters": {"read_nbytes": 78102528, "wasted_nbytes": wasted}},
        "machine": {"host": host or platform.node()},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "bench.json").write_text(json.dumps(found))


def config(**changed):
    cfg = RunConfig()
    cfg.hw.name = "cpu"
    cfg.model.name, cfg.model.source, cfg.model.path = "tiny", Source.bundled, "runtime/bundled/tiny-qwen"  # fmt: skip
    cfg.model.family = "qwen"
    for name, value in changed.items():
        setattr(cfg.hw.rates, name, value)
    return cfg


def ask(folder, cache=0.0, cfg=None, **situation):
    kb, cfg = base(), cfg or config()
    model, variant = wanted_model(kb, cfg)
    machine = wanted_machine(kb, cfg, Runner(cfg, folder))
    own = read_own_runs(kb, folder / "runs", Here(platform.node(), 24e9, model))
    return advise(kb, model, variant, machine, situation_of(kb, situation), kb.as_of, cache_bytes=cache, own_runs=own)  # fmt: skip


def keep(advice):
    return next(p for p in advice["paths"] if p["id"] == "keep-existing")


def test_a_measured_drive_bounds_what_the_engine_reaches_with_the_drive_alone(tmp_path):
    """L12 with doctor's rate against the bench: 385 tok/s that the drive could feed, 17 to 36 measured."""
    record(tmp_path)
    bench(tmp_path / "runs" / "a", 17.24, 36.11)
    advice = ask(tmp_path)
    (row,) = advice["own_runs"]
    assert row["ceiling"] == pytest.approx(0.35747 * GIB / (EXPERTS_PER_TOKEN * EXPERT_NBYTES), rel=1e-4)  # fmt: skip
    assert row["measured"] == [17.24, 36.11]
    assert row["measured"][1] <= row["predicted"] <= row["ceiling"]
    assert (row["role"], row["is_above_ceiling"]) == ("bound", False), "a CPU's time is not counted"
    assert (keep(advice)["verdict"], keep(advice)["run"]) == ("yes", "run-own-a")
    said = format_advice(advice)
    assert "measured here by stages=[doctor] on 2026-11-30: drive 0.384 GB/s, RAM 35.7 GB/s" in said
    assert "run-own-a: 17.2 to 36.1 tok/s measured; the laws say at most" in said


def test_a_bench_faster_than_the_drive_says_that_the_drive_was_measured_wrongly(tmp_path):
    record(tmp_path, {**RATES, "drive_gib_s": 0.01})
    bench(tmp_path / "runs" / "a", 17.24, 36.11)
    advice = ask(tmp_path)
    assert advice["own_runs"][0]["is_above_ceiling"]
    assert "above the ceiling: the drive's rate is too low" in format_advice(advice)


def test_what_a_cache_held_raises_the_ceiling(tmp_path):
    """Half of a token's bytes came from the drive: it could feed twice as many tokens."""
    record(tmp_path, {"ram_gib_s": 1e6, "drive_gib_s": 0.35747})
    half = EXPERTS_PER_TOKEN * EXPERT_NBYTES / 2
    bench(tmp_path / "runs" / "a", 17.24, 36.11, ram_gib=0.006, read=half, wasted=0)
    (row,) = ask(tmp_path, cache=0.006 * GIB)["own_runs"]
    assert row["ceiling"] == pytest.approx(2 * 0.35747 * GIB / (2 * half), rel=1e-4)


def test_runs_of_other_machines_and_what_if_rates_are_not_this_machine_s(tmp_path):
    record(tmp_path)
    bench(tmp_path / "runs" / "a", 17.24, 36.11, host="elsewhere")
    assert ask(tmp_path)["own_runs"] == []
    bench(tmp_path / "runs" / "b", 17.24, 36.11)
    assert keep(ask(tmp_path))["run"] == "run-own-b"
    assert keep(ask(tmp_path, cfg=config(drive_gib_s=7.0)))["run"] is None
    record(tmp_path, machine={**machine_identity(), "cpu": "another"})
    assert ask(tmp_path)["machine"]["measured"] is None
    assert read_record(Runner(config(), tmp_path)).rates == {}


def test_all_of_ram_is_a_cache_of_all_experts(tmp_path):
    """A cache as large as half of RAM holds no more than the model has: the run without cache.ram_gib is found."""
    record(tmp_path)
    bench(tmp_path / "runs" / "a", 90.0, 100.0, ram_gib=None, read=0.0)
    assert keep(ask(tmp_path, cache=None))["run"] == "run-own-a"


def test_rates_that_move_by_more_than_15_percent_are_not_steady(tmp_path):
    record(tmp_path)
    before = read_record(Runner(config(), tmp_path))
    assert changes(before, "tiny", {**RATES, "drive_gib_s": 0.40}) == {}
    moved = changes(before, "tiny", {**RATES, "drive_gib_s": 0.48})
    assert moved == {"drive_gib_s": 0.35747}
    assert changes(before, "tiny", {"drive_gib_s": 0.30}) == moved
    assert changes(before, "another", {"drive_gib_s": 0.48}) == {}
    record(tmp_path, unsteady=["drive_gib_s"])
    assert "not steady from run to run: drive_gib_s" in format_advice(ask(tmp_path))
    (tmp_path / "doctor.json").write_text("[]")
    assert changes(read_record(Runner(config(), tmp_path)), "tiny", RATES) == {}


@pytest.mark.parametrize(
    ("device", "rotational", "link", "interface"),
    [
        ("nvme0n1", False, "32.0 GT/s PCIe x4", "nvme-gen5"), ("nvme0n1", False, "16.0 GT/s PCIe x4", "nvme-gen4"),
        ("nvme0n1", False, "8.0 GT/s PCIe x2", "nvme-gen3"), ("nvme1n1", None, None, "nvme-gen3"),
        ("sda", True, None, "hdd"), ("sda", False, None, None), ("vda", True, None, None),
    ],
)  # fmt: skip
def test_the_interface_of_a_drive(device, rotational, link, interface):
    assert Mount("/", "ext4", device, rotational, None, link).interface == interface


def test_the_kind_of_drive_that_doctor_saw_decides(tmp_path):
    """A spinning disc blocks (R02), an unknown kind is asked for; a run on it settles both."""
    cases = (("hdd", "no", "R02"), ("nvme-gen4", "maybe", "upper bound"), (None, "maybe", "What kind of drive"))  # fmt: skip
    for interface, verdict, says in cases:
        record(tmp_path, interface=interface)
        found = next(p for p in ask(tmp_path)["paths"] if p["id"] == "nvme-expert-streaming")
        assert (found["verdict"], says in found["reason"]) == (verdict, True), found["reason"]
    record(tmp_path, interface="hdd")
    bench(tmp_path / "runs" / "a", 17.24, 36.11)
    assert keep(ask(tmp_path))["verdict"] == "yes", "measured beats a rule of thumb"
