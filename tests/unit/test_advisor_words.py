"""What the advisor takes in beside its documents: questions in plain words, folders, own bench runs, this machine."""

from __future__ import annotations

import json

import pytest
from advisor_drafts import base, path
from advisor_questions import ask

from conf.schema import RunConfig, Source
from runtime.advisor.advice import advise
from runtime.advisor.facts import machine_of, situation_of
from runtime.advisor.local_model import model_from_folder
from runtime.advisor.own_runs import read_own_runs
from runtime.advisor.question import hear
from runtime.advisor.question_hardware import hear_hardware, machine_heard
from runtime.errors import UsageError
from runtime.mounts import find_mount
from stages.advise import ROOT, wanted_machine, wanted_model
from stages.core import Runner
from stages.doctor_record import drive_identity, machine_identity

GIB = 2**30


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("question", "situation", "models"),
    [
        ("Can I run DeepSeek-V4.1-Flash in Germany for 2.000 € at 2 tok/s?", {"budget": 2000.0, "currency": "EUR", "min_tok_s": 2.0, "country": "DE"}, ("model-deepseek-v4-1-flash",)),
        ("Kann ich Qwen3.8-Flash-Next ohne Cloud betreiben, 3 Stunden am Tag, 25 ct pro kWh, 5 Nutzer?", {"cloud_allowed": False, "hours_day": 3.0, "price_kwh": 0.25, "users": 5.0}, ("model-qwen3-8-flash-next",)),
        ("I have $1,500 and want 10 tokens per second with 32k context for 2 years", {"budget": 1500.0, "currency": "USD", "min_tok_s": 10.0, "context_tokens": 32000.0, "horizon_months": 24.0}, ()),
        ("DeepSeek-V4-Flash or Llama 3.1 8B?", {}, ("model-deepseek-v4-flash", "model-llama-3-1-8b")),
        ("Хватит ли 2 000 евро и 3 часа в день?", {"budget": 2000.0, "currency": "EUR", "hours_day": 3.0}, ()),
        ("10M tokens in and 2.5 million out a month, cloud is fine", {"tokens_in_month": 10e6, "tokens_out_month": 2.5e6, "cloud_allowed": True}, ()),
        ("5 Mio Token rein, 1,5 Mio raus, Cloud ist erlaubt", {"tokens_in_month": 5e6, "tokens_out_month": 1.5e6, "cloud_allowed": True}, ()),
        ("The cloud is not allowed", {}, ()),
        ("A line of 100 Mbit, 0.30 EUR/kWh", {"line_mbit": 100.0, "price_kwh": 0.3}, ()),
        ("Which computer?", {}, ()),
    ],
)  # fmt: skip
def test_questions_in_plain_words(question, situation, models):
    heard = hear(base(), question)
    assert heard.situation == situation
    assert heard.models == models


def test_a_question_of_a_book_s_length_is_refused():
    with pytest.raises(UsageError, match="has 4001 characters"):
        hear(base(), "7" * 4001)


def test_a_ti_is_not_heard_as_the_plain_card():
    assert hear(base(), "I have an RTX 5060 Ti").gpus == ()
    assert hear(base(), "I have an RTX 5060.").gpus == ("gpu-rtx-5060",)
    assert hear(base(), "an RTX 5060 Laptop").gpus == ("gpu-rtx-5060-laptop",)


@pytest.mark.parametrize(
    ("question", "given", "unknown", "is_own"),
    [
        ("I have a laptop with 4 GB RAM and no graphics card.", {"ram": "4 GiB", "gpu": []}, (), True),
        ("8x H200, 20 users at 32k context", {"gpu": ["gpu-h200"] * 8}, (), False),
        ("Ich habe zwei RTX 4090, 64 GB Arbeitsspeicher und eine Festplatte", {"ram": "64 GiB", "gpu": ["gpu-rtx-4090"] * 2, "drive": "hdd"}, (), True),
        ("У меня RTX 3060 и 32 ГБ ОЗУ", {"ram": "32 GiB", "gpu": ["gpu-rtx-3060"]}, (), True),
        ("Would an RTX 5060 Ti with 16 GB VRAM do?", {}, ("rtx 5060 ti",), False),
        ("DGX Spark mit 128 GB, 4 Nutzer", {"system": "system-dgx-spark"}, (), False),
        ("a laptop with an i5-1135G7 and 8 GB RAM", {"ram": "8 GiB", "cpu": "cpu-core-i5-1135g7"}, (), False),
        ("my MacBook with 36 GB", {"ram": "36 GiB", "unified_memory": "36 GiB"}, (), True),
        ("my PC: RAM 1.5 TB, a PCIe 5 SSD of 12,5 GB/s", {"ram": "1.5 TiB", "drive": "nvme-gen5", "disk_bw": "12.5 GB/s"}, (), True),
        ("Does it run without a GPU?", {"gpu": []}, (), False),
        ("I have 2.000 € and an hour a day", {}, (), True),
    ],
)  # fmt: skip
def test_machines_in_plain_words(question, given, unknown, is_own):
    heard = hear_hardware(base(), question)
    assert heard.given == given
    assert heard.unknown_cards == unknown
    assert heard.is_own is is_own


def test_the_machine_in_a_question_changes_the_one_that_was_named_only_if_it_is_one_s_own():
    def machine(question, name, is_named):
        heard = hear_hardware(base(), question)
        return machine_heard(base(), heard, machine_of(base(), name), is_named)

    assert machine("Would an RTX 4090 help?", "rtx5060", True).gpu["id"] == "gpu-rtx-5060"
    mine = machine("I have an RTX 4090.", "rtx5060", True)
    assert (mine.gpu["id"], mine.ram_bytes, mine.system_id) == ("gpu-rtx-4090", 31 * GIB, None)
    same = machine("I have an RTX 5060 and an NVMe drive.", "rtx5060", True)
    assert same.system_id == "system-s", "what was measured on it still holds"
    other = machine("32 GB RAM and an RTX 3060", "rtx5060", False)
    assert (other.ram_bytes, other.disk_bw) == (32 * GIB, None), "not the machine that this runs on"
    assert machine("without a GPU", "laptop", False).ram_bytes == 16 * GIB


def test_a_card_in_the_question_is_spoken_of_even_if_no_law_makes_it_faster():
    kb, qwen = base(), base().find("model", "qwen").document
    advice = advise(kb, qwen, qwen["variants"][0], machine_of(kb, "rtx5060"), situation_of(kb, {}), kb.as_of, asked=("gpu-rtx-4090",))  # fmt: skip
    assert "GeForce RTX 4090 24 GB" in path(advice, "upgrade-existing")["reason"]
    assert "RTX 4090" not in path(ask("qwen", "rtx5060"), "upgrade-existing")["reason"]


# ---- folders, benches, machines --------------------------------------------------------------------------------------


def test_a_folder_that_the_base_does_not_know_is_measured():
    for name, experts in (("tiny-qwen", True), ("tiny-deepseek", True)):
        folder = ROOT / "runtime" / "bundled" / name
        document = model_from_folder(folder, name, "nvfp4")
        variant = document["variants"][0]
        files = sum(p.stat().st_size for p in folder.glob("**/*.safetensors"))
        assert variant["file_bytes"] == files
        routed = variant["expert_bytes"] * document["experts"] * document["moe_layers"]
        assert 0 < routed + variant["resident_bytes"] + variant.get("tables_bytes", 0) <= files
        assert (document["arch"] == "moe") is experts
        assert path(ask(document, "rtx5060"), "keep-existing")["number"]["unit"] == "tok/s"


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        model_from_folder(tmp_path, "x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="safetensors"):
        model_from_folder(tmp_path, "x")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="header"):
        model_from_folder(tmp_path, "x")


def bench(
    folder,
    model="deepseek",
    hw="rtx5060",
    cache=16e9 / GIB,
    source="hub",
    simulated=0.0,
    speed=3.33,
):
    folder.mkdir(parents=True)
    config = {
        "model": {"source": source},
        "hw": {"name": hw, "drive": {"simulate_gib_s": simulated}},
        "cache": {"ram_gib": cache},
    }
    (folder / "bench.json").write_text(
        json.dumps(
            {
                "model": model,
                "config": config,
                "decode_tok_s": {"median": speed, "min": speed - 0.01, "max": speed + 0.01},
            }
        )
    )


def test_after_a_bench_of_one_s_own_that_run_is_cited_instead_of_a_law(tmp_path):
    bench(tmp_path / "a")
    bench(tmp_path / "b", source="synthetic", speed=99)
    bench(tmp_path / "c", simulated=4.0, speed=99)
    bench(tmp_path / "d", model="tiny", speed=99)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "bench.json").write_text("{")
    own = read_own_runs(base(), tmp_path)
    assert [r["id"] for r in own] == ["run-own-a"]
    entry = path(ask("deepseek", "rtx5060", own=own), "keep-existing")
    assert entry["run"] == "run-own-a"
    assert entry["number"]["value"] == pytest.approx(3.33)
    assert entry["speed"]["law_tok_s"] == pytest.approx(2.43, rel=0.02), "beside what the law says"


def test_a_machine_that_was_changed_is_another_machine():
    cfg = RunConfig()
    cfg.hw.name, cfg.hw.ram_gib = "rtx5060", 31
    machine = wanted_machine(base(), cfg, Runner(cfg, ROOT / "nothing"))
    assert machine.system_id == "system-s"
    cfg.hw.ram_gib = 64
    assert wanted_machine(base(), cfg, Runner(cfg, ROOT / "nothing")).system_id is None
    cfg.hw.ram_gib, cfg.hw.rates.drive_gib_s = 31, 4.0
    slower = wanted_machine(base(), cfg, Runner(cfg, ROOT / "nothing"))
    assert slower.system_id is None
    assert slower.disk_bw == 4 * GIB
    cfg = RunConfig()
    cfg.hw.name = "auto"
    here = wanted_machine(base(), cfg, Runner(cfg, ROOT / "nothing"))
    assert here.ram_bytes > 0
    assert here.gpu is None
    cfg.advise.system = "machine S"
    assert wanted_machine(base(), cfg, Runner(cfg, ROOT / "nothing")).system_id == "system-s"


def test_doctor_s_rates_are_taken_for_this_machine(tmp_path, caplog):
    cfg = RunConfig()
    cfg.hw.name = "auto"
    runner = Runner(cfg, tmp_path)
    drive = {"record_nbytes": 4096, "drive_gib_s": 3.0}
    record = {
        "when": "2026-11-30", "rates": {"pcie_gib_s": 20.0, "ram_gib_s": 30.0}, "machine": machine_identity(),
        "drives": [drive | {"identity": drive_identity(find_mount(runner.root))}],
    }  # fmt: skip
    (tmp_path / "doctor.json").write_text(json.dumps(record))
    machine = wanted_machine(base(), cfg, runner)
    assert (machine.disk_bw, machine.pcie_bw, machine.ram_bw) == (3 * GIB, 20 * GIB, 30 * GIB)
    assert machine.is_disk_measured
    (tmp_path / "doctor.json").write_text(json.dumps(record | {"machine": {"cpu": "another"}}))
    assert wanted_machine(base(), cfg, runner).disk_bw is None
    assert "of another machine" in caplog.text


def test_the_model_asked_about():
    cfg = RunConfig()
    cfg.model.name, cfg.model.source, cfg.model.path = (
        "tiny",
        Source.bundled,
        "runtime/bundled/tiny-qwen",
    )
    assert wanted_model(base(), cfg)[0]["id"] == "model-local-tiny"
    heard = hear(base(), "Does DeepSeek-V4.1-Flash run?")
    assert wanted_model(base(), cfg, heard)[0]["id"] == "model-deepseek-v4-1-flash"
    cfg.advise.model, cfg.advise.variant = "qwen", "q99"
    with pytest.raises(UsageError, match="no variant"):
        wanted_model(base(), cfg)
    cfg.advise.model, cfg.advise.variant = "DeepSeek-V4-Flash", None
    with pytest.raises(UsageError, match="no sizes"):
        wanted_model(base(), cfg)
