"""The twelve paths: golden verdicts, what is printed of them, and the nine stories."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from advisor_drafts import advice_for, base, path
from advisor_questions import ask, offer, with_documents

from conf.schema import RunConfig
from runtime.advisor.advice import advise, to_json
from runtime.advisor.facts import machine_from, situation_of
from runtime.advisor.picture import draw
from runtime.advisor.question import hear
from runtime.advisor.question_hardware import hear_hardware, heard_of
from runtime.advisor.render import format_advice, to_markdown
from runtime.errors import UsageError
from stages.advise import wanted_model

GIB = 2**30


# ---- golden ----------------------------------------------------------------------------------------------------------


def test_the_worked_example():
    """DeepSeek on the 8 GB machine, number by number as it was worked out beforehand."""
    advice = ask("deepseek", "rtx5060")
    wanted = [
        ("keep-existing", "yes", 2.43, "tok/s"), ("upgrade-existing", "no", 0, "EUR"), ("used-hardware", "maybe", 0, "offer"),
        ("new-single-gpu", "no", 206e9, "B"), ("multi-gpu", "no", 4, "card"), ("unified-memory", "maybe", 9.5, "tok/s"),
        ("cpu-ram-offload-moe", "no", 326e9, "B"), ("cpu-only-small", "no", 510e9, "B"), ("smaller-model", "yes", 11.65, "tok/s"),
        ("cloud-api", "maybe", 1.2, "USD/Mtok"), ("cloud-gpu-rent", "maybe", 0, "offer"), ("nvme-expert-streaming", "yes", 2.43, "tok/s"),
    ]  # fmt: skip
    for entry, (name, verdict, value, unit) in zip(advice["paths"], wanted, strict=True):
        assert (entry["id"], entry["verdict"], entry["number"]["unit"]) == (name, verdict, unit)
        assert entry["number"]["value"] == pytest.approx(value, rel=3e-3)
    options = {
        o["what"]: o["tok_s"] for o in path(advice, "upgrade-existing")["details"]["options"]
    }
    assert options["a second drive like this one"] == pytest.approx(3.05, abs=0.02)
    assert path(advice, "keep-existing")["run"] == "run-ds-09"
    assert path(advice, "smaller-model")["details"]["model"] == "model-qwen3-8-flash-next"
    assert [a["key"] for a in advice["assumptions"]] == [
        "min_tok_s",
        "context_tokens",
        "users",
        "horizon_months",
        "use",
    ]


@pytest.mark.parametrize(
    ("model", "machine", "wanted"),
    [  # one letter a path: yes, maybe, no
        ("deepseek", "rtx5060", "ynmnnmnnymmy"), ("deepseek", "4070-32", "mmmnnmnnymmm"), ("deepseek", "laptop", "mmmnnmnnmmmm"),
        ("deepseek", "unified-36", "mmmnnnnnymmm"), ("deepseek", "athlon-3060", "nnmnnmnnnmmn"),
        ("qwen", "rtx5060", "ynmmnmnnymmy"), ("qwen", "4070-32", "mmmmnmnnymmm"), ("qwen", "laptop", "mmmmnmnnmmmm"),
        ("qwen", "unified-36", "mmmnnnnnymmm"), ("qwen", "athlon-3060", "nnmnnmnnnmmn"),
        ("llama-70b", "rtx5060", "nmmmnmnnymmn"), ("llama-70b", "4070-32", "nmmmnmnnymmn"), ("llama-70b", "laptop", "nmmmnmnnmmmn"),
        ("llama-70b", "unified-36", "nnmnnnnnymmn"), ("llama-70b", "athlon-3060", "nnmnnmnnnmmn"),
        ("llama-8b", "rtx5060", "ynmmnmnmnmmn"), ("llama-8b", "4070-32", "ynmmnmnmnmmn"), ("llama-8b", "laptop", "mmmmnmnmnmmn"),
        ("llama-8b", "unified-36", "ynmnnynynmmn"), ("llama-8b", "athlon-3060", "nnmnnmnnnmmn"),
    ],
)  # fmt: skip
def test_verdicts_of_four_models_on_five_machines(model, machine, wanted):
    advice = ask(model, machine)
    assert "".join(p["verdict"][0] for p in advice["paths"]) == wanted
    for p in advice["paths"]:
        assert isinstance(p["number"]["value"], (int, float))
        assert p["number"]["unit"]
        assert p["reason"].startswith(p["verdict"] + ": ")
        # it names the missing fact, or the band that overlaps, or the bound
        if p["verdict"] == "maybe":
            assert p["question"] or "between" in p["reason"] or "upper bound" in p["reason"], p


def test_what_is_printed_answers_first_and_repeats_no_number():
    text = format_advice(ask("deepseek", "rtx5060"))
    lines = text.splitlines()
    assert lines[2].startswith("in short: it runs on what you have, 2.43 tok/s")
    assert "2.43 tok/s  >= 1 tok/s wanted; measured, run-ds-09" in text
    bound = format_advice(ask("llama-8b", "laptop"))
    assert "8.13 tok/s  at most, 1 tok/s wanted; L10, an upper bound" in bound
    unknown = format_advice(ask("deepseek", machine_from(base(), {"ram": "16 GiB"})))
    assert "4.51 GB  for each token; How fast are the drive and the link?" in unknown
    assert "in short: not on what you have; smaller-model" in format_advice(
        ask("llama-70b", "rtx5060")
    )
    kb = base()
    model = kb.find("model", "deepseek").document
    question = "I have 2.000 € and no cloud, and a GTX 1080"
    heard = heard_of(kb, hear(kb, question), hear_hardware(kb, question))
    said = format_advice(advise(kb, model, model["variants"][0], None, situation_of(kb, {}), kb.as_of, heard=heard))  # fmt: skip
    assert "heard in the question: budget = 2000, currency = EUR, cloud_allowed = no" in said
    assert "not in the knowledge base, and left out: gtx 1080" in said
    wrapped = format_advice(ask("deepseek", "rtx5060"), width=100)
    table = wrapped.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 100
    assert table.split() == text.split("\n\n")[1].split(), "the same words"


def test_what_nobody_has_looked_up_is_said():
    assert ask("deepseek", "rtx5060")["unverified"] == []
    advice = ask("llama-70b", "laptop")
    assert advice["unverified"] == ["cpu-core-i5-1135g7", "model-llama-3-3-70b", "system-laptop"]
    assert "nobody has looked up: cpu-core-i5-1135g7, model-llama-3-3-70b" in format_advice(advice)


def test_the_same_question_gives_the_same_bytes():
    one, two = (to_json(ask("qwen", "rtx5060", hours_day=3.0)) for _ in range(2))
    assert one == two
    assert json.loads(one)["as_of"] == base().as_of


def test_the_order_of_variants_changes_nothing():
    document = copy.deepcopy(base().find("model", "deepseek").document)
    document["variants"].append(
        {**document["variants"][0], "id": "zz", "bits_eff": 2.0, "file_bytes": 1e11}
    )
    turned = {**document, "variants": document["variants"][::-1]}
    one, two = (ask(m, "rtx5060", variant=document["variants"][0]) for m in (document, turned))
    assert [p["number"] for p in one["paths"][:8]] == [p["number"] for p in two["paths"][:8]]


def test_table_markdown_and_picture(tmp_path):
    advice = advice_for("deepseek", "rtx5060")
    text = format_advice(advice)
    assert all(p["id"] in text for p in advice["paths"])
    assert text.index("assumed") < text.index("keep-existing")
    from runtime.advisor.advice import reports

    markdown = to_markdown(advice, reports(base()))
    assert markdown.count("| **") == 12
    assert "run-ds-09" in markdown
    assert draw(advice, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert draw(advice_for("llama-70b", "laptop", min_tok_s=0.0), tmp_path / "b.png")


# ---- the nine stories ------------------------------------------------------------------------------------------------


def test_no_country_is_asked_for_and_prices_are_not_taken():
    kb = with_documents("offer", offer("gpu-rtx-pro-6000", 9000, region="US", date="2026-11-20"))
    assert (
        path(
            ask("qwen", "4070-32", kb, budget=10000.0, currency="EUR", country="DE"),
            "new-single-gpu",
        )["verdict"]
        == "maybe"
    )
    advice = ask("qwen", "4070-32", kb, budget=10000.0, currency="EUR", country="US")
    assert path(advice, "new-single-gpu")["price"]["counts"]


def test_a_model_that_is_not_in_the_base_is_refused_with_what_is_near():
    cfg = RunConfig()
    cfg.advise.model = "DeepSeek-V4.1"
    with pytest.raises(UsageError, match="is in no document"):
        wanted_model(base(), cfg)


def test_nothing_has_to_be_bought_when_keeping_is_enough():
    upgrade = path(ask("deepseek", "rtx5060", min_tok_s=2.0), "upgrade-existing")
    assert (upgrade["verdict"], upgrade["number"]) == ("no", {"value": 0, "unit": "EUR"})
    assert "0 EUR needed" in upgrade["reason"]


def test_a_changed_mind_about_the_speed_changes_the_verdict():
    assert (
        path(ask("deepseek", "rtx5060", min_tok_s=2.0), "nvme-expert-streaming")["verdict"] == "yes"
    )
    assert (
        path(ask("deepseek", "rtx5060", min_tok_s=5.0), "nvme-expert-streaming")["verdict"] == "no"
    )


def test_a_budget_that_is_too_small_says_by_how_much():
    kb = with_documents("offer", offer("gpu-rtx-pro-6000", 9000))
    entry = path(
        ask("qwen", "4070-32", kb, budget=2000.0, currency="EUR", country="DE", min_tok_s=2.0),
        "new-single-gpu",
    )
    assert entry["verdict"] == "no"
    rich = path(
        ask("llama-70b", "4070-32", kb, budget=10000.0, currency="EUR", country="DE"),
        "new-single-gpu",
    )
    assert rich["verdict"] == "yes"
    assert "9000 EUR <= 10000" in rich["reason"]
    tight = path(
        ask("llama-70b", "4070-32", kb, budget=8500.0, currency="EUR", country="DE"),
        "new-single-gpu",
    )
    assert (tight["verdict"], tight["number"]["unit"]) == ("maybe", "tok/s")


def test_a_false_alarm_more_than_memory_is_not_unrunnable():
    """Both models are larger than all memory of the machine together, and run."""
    for model in ("deepseek", "qwen"):
        variant = base().find("model", model).document["variants"][0]
        assert variant["file_bytes"] > 31 * GIB + 8 * GIB
        assert path(ask(model, "rtx5060"), "keep-existing")["verdict"] == "yes"


def test_an_old_pc_fails_by_its_processor_and_its_disk():
    advice = ask("deepseek", "athlon-3060")
    failed = {
        r["id"] for r in path(advice, "nvme-expert-streaming")["rules"] if r["status"] == "fail"
    }
    assert {"R02", "R06", "R18"} <= failed


def test_keys_and_values_of_eight_users():
    one, eight = (
        ask("Qwen3-30B-A3B", "rtx5060", context_tokens=32768.0, users=u) for u in (1.0, 8.0)
    )
    kv = [
        next(c["result"]["value"] for c in a["calculations"] if c["law"] == "L05")
        for a in (one, eight)
    ]
    assert kv[1] == pytest.approx(24 * GIB, rel=1e-5)
    assert kv[1] == pytest.approx(8 * kv[0], rel=1e-5)


def test_own_against_rent():
    rent = {
        "id": "cloud-rent",
        "name": "x",
        "kind": "gpu-rent",
        "gpu": "gpu-rtx-5060",
        "price_hour": 0.60,
        "currency": "EUR",
        "region": "DE",
        "date": "2026-11-20",
        "sources": ["src-nvidia"],
        "status": "checked",
    }
    kb = with_documents("cloud", rent)
    situation = {"country": "DE", "currency": "EUR", "cloud_allowed": True}
    assert path(ask("qwen", "rtx5060", kb, **situation), "cloud-gpu-rent")["number"] == {
        "value": 0.6,
        "unit": "EUR/h",
    }
    assert (
        path(ask("qwen", "rtx5060", kb, hours_day=3.0, **situation), "cloud-gpu-rent")["verdict"]
        == "maybe"
    )
    kb = dataclasses.replace(
        kb, documents={**kb.documents, "offer": {"o": offer("gpu-rtx-5060", 2400)}}
    )
    entry = path(
        ask("qwen", "rtx5060", kb, hours_day=3.0, price_kwh=0.25, **situation), "cloud-gpu-rent"
    )
    month = 0.60 * 3 * 30.44 - 0.145 * 3 * 30.44 * 0.25
    assert (entry["verdict"], entry["number"]["unit"]) == ("yes", "month")
    assert entry["number"]["value"] == pytest.approx(2400 / month, rel=1e-4)
    for horizon, verdict in ((37.0, "yes"), (40.0, "maybe"), (60.0, "maybe"), (63.0, "no")):
        told = {**situation, "hours_day": 3.0, "price_kwh": 0.25, "horizon_months": horizon}
        found = path(ask("qwen", "rtx5060", kb, **told), "cloud-gpu-rent")
        assert found["verdict"] == verdict, "46.6 months, a quarter around the horizon is maybe"
    soon = path(
        ask("qwen", "rtx5060", kb, hours_day=24.0, price_kwh=0.25, **situation), "cloud-gpu-rent"
    )
    assert soon["verdict"] == "no"
    never = path(
        ask("qwen", "rtx5060", kb, hours_day=3.0, price_kwh=10.0, **situation), "cloud-gpu-rent"
    )
    assert "never" in never["reason"]
    assert (
        path(ask("qwen", "rtx5060", kb, cloud_allowed=False), "cloud-gpu-rent")["verdict"] == "no"
    )
