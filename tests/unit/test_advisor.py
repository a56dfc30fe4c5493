"""The twelve paths: golden verdicts, the nine stories, edge cases, prices, questions in plain words, own bench runs."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
from advisor_drafts import advice_for, base

from conf.schema import RunConfig, Source
from runtime.advisor.advice import advise, to_json
from runtime.advisor.facts import machine_from, machine_of, situation_of
from runtime.advisor.local_model import model_from_folder
from runtime.advisor.own_runs import read_own_runs
from runtime.advisor.picture import draw
from runtime.advisor.question import hear
from runtime.advisor.question_hardware import hear_hardware, heard_of, machine_heard
from runtime.advisor.render import format_advice, to_markdown
from runtime.errors import UsageError
from runtime.mounts import find_mount
from stages.advise import ROOT, wanted_machine, wanted_model
from stages.core import Runner
from stages.doctor_record import drive_identity, machine_identity

GIB = 2**30


def ask(model, machine, kb=None, own=(), cache=None, variant=None, **situation):
    kb = kb or base()
    document = kb.find("model", model).document if isinstance(model, str) else model
    found = variant or document["variants"][0]
    made = machine_of(kb, machine) if isinstance(machine, str) else machine
    return advise(
        kb,
        document,
        found,
        made,
        situation_of(kb, situation),
        kb.as_of,
        own_runs=own,
        cache_bytes=cache,
    )


def path(advice, name):
    return next(p for p in advice["paths"] if p["id"] == name)


def with_documents(kind, *documents):
    kb = base()
    more = {**kb.documents[kind], **{d["id"]: d for d in documents}}
    return dataclasses.replace(kb, documents={**kb.documents, kind: more})


def offer(product, price, condition="new", date="2026-11-20", region="DE", currency="EUR", **more):
    return {
        "id": f"offer-{product}-{condition}",
        "name": "x",
        "product": product,
        "price": price,
        "currency": currency,
        "region": region,
        "condition": condition,
        "seller": "shop",
        "date": date,
        "sources": ["src-nvidia"],
        "status": "checked",
        **more,
    }


def cloud(model="model-deepseek-v4-1-flash", date="2026-11-20", **more):
    return {
        "id": f"cloud-{model}",
        "name": "x",
        "kind": "api",
        "model": model,
        "price_in": 0.14,
        "price_out": 0.28,
        "currency": "EUR",
        "region": "DE",
        "date": date,
        "sources": ["src-nvidia"],
        "status": "checked",
        **more,
    }


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
        if (
            p["verdict"] == "maybe"
        ):  # it names the missing fact, or the band that overlaps, or the bound
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


# ---- the nine stories ------------------------------------------------------------------------------------------------


def test_a_price_that_is_sold_everywhere_counts_in_every_country_and_in_its_own_currency_first():
    dollars = {**cloud(), "id": "cloud-usd", "currency": "USD", "region": "WW", "price_out": 0.1}
    kb = with_documents("cloud", dollars, {**cloud(), "id": "cloud-eur"})
    for money, value in (("USD", 0.1), ("EUR", 0.28)):
        entry = path(ask("deepseek", "rtx5060", kb, country="DE", currency=money), "cloud-api")
        assert entry["number"] == {"value": value, "unit": f"{money}/Mtok"}, (
            "two moneys are not compared"
        )


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


# ---- clouds and prices -----------------------------------------------------------------------------------------------


def test_a_price_of_another_version_is_not_the_model_s():
    kb = base()
    other = {"other": cloud("model-deepseek-v4-flash")}
    kb = dataclasses.replace(kb, documents={**kb.documents, "cloud": other})
    entry = path(ask("deepseek", "rtx5060", kb, country="DE", currency="EUR"), "cloud-api")
    assert (entry["verdict"], entry["number"]["value"]) == ("maybe", 0)
    assert "model-deepseek-v4-flash are of another model" in entry["reason"]


def test_an_api_against_electricity():
    kb = with_documents("cloud", cloud())
    told = {"country": "DE", "currency": "EUR", "cloud_allowed": True, "price_kwh": 0.25}
    assert path(ask("deepseek", "rtx5060", kb, **told), "cloud-api")["number"] == {
        "value": 0.28,
        "unit": "EUR/Mtok",
    }
    month = {"tokens_in_month": 10e6, "tokens_out_month": 2e6}
    entry = path(ask("deepseek", "rtx5060", kb, **told, **month), "cloud-api")
    assert entry["number"] == {"value": 1.96, "unit": "EUR/month"}
    assert entry["verdict"] == "yes", "at 2.43 tok/s electricity alone costs 5.14 EUR/Mtok"
    assert entry["details"]["local_per_mtok"] == pytest.approx(5.14, rel=2e-3)
    dear = with_documents("cloud", cloud(price_out=28.0))
    assert path(ask("deepseek", "rtx5060", dear, **told, **month), "cloud-api")["verdict"] == "no"
    unsaid = {k: v for k, v in told.items() if k != "cloud_allowed"}
    assert (
        path(ask("deepseek", "rtx5060", kb, **unsaid, **month), "cloud-api")["verdict"] == "maybe"
    )
    stale = with_documents("cloud", cloud(date="2026-01-01"))
    assert (
        "days old" in path(ask("deepseek", "rtx5060", stale, country="DE"), "cloud-api")["reason"]
    )


def test_used_hardware_by_the_share_of_the_new_price():
    card = "gpu-rtx-4090"
    told = {"country": "DE", "currency": "EUR", "budget": 2000.0}
    for price, verdict in ((1000, "yes"), (1900, "no")):
        kb = with_documents("offer", offer(card, 2000), offer(card, price, "used"))
        assert path(ask("llama-8b", "4070-32", kb, **told), "used-hardware")["verdict"] == verdict
    old = with_documents("offer", offer(card, 2000), offer(card, 1000, "used", date="2026-01-01"))
    assert path(ask("llama-8b", "4070-32", old, **told), "used-hardware")["verdict"] == "maybe"


@pytest.mark.parametrize(("budget", "verdict"), [(1000.0, "yes"), (920.0, "maybe"), (800.0, "no")])
def test_a_tenth_over_the_budget_is_maybe_and_more_is_no(budget, verdict):
    card = "gpu-rtx-4090"
    kb = with_documents("offer", offer(card, 2000), offer(card, 1000, "used"))
    told = {"country": "DE", "currency": "EUR", "budget": budget}
    entry = path(ask("llama-8b", "4070-32", kb, **told), "used-hardware")
    assert entry["verdict"] == verdict
    if verdict == "no":
        assert entry["number"] == {"value": 1000, "unit": "EUR"}


def test_prices_carry_day_and_age_and_currencies_need_a_dated_rate():
    advice = ask("llama-8b", "laptop")
    price = next(p for p in advice["prices"] if p["item"] == "gpu-rtx-5060")
    assert (price["date"], price["age_days"], price["counts"]) == ("2025-05-19", 560, False)
    assert "560 days old" in format_advice(advice)
    dollars = offer("gpu-rtx-5060", 300, currency="USD")
    told = {"country": "DE", "currency": "EUR", "budget": 500.0}
    entry = path(
        ask("llama-8b", "laptop", with_documents("offer", dollars), **told), "new-single-gpu"
    )
    assert "no dated rate from USD to EUR" in entry["price"]["text"]
    rate = {**offer("fx", 0.9, "rate", currency="USD"), "to_currency": "EUR"}
    entry = path(
        ask("llama-8b", "laptop", with_documents("offer", dollars, rate), **told), "new-single-gpu"
    )
    assert (entry["price"]["counts"], entry["price"]["amount"]) == (True, 270)
    tomorrow = with_documents("offer", offer("gpu-rtx-5060", 300, date="2027-01-01"))
    assert (
        "dated after"
        in path(ask("llama-8b", "laptop", tomorrow, **told), "new-single-gpu")["price"]["text"]
    )


# ---- edge cases ------------------------------------------------------------------------------------------------------


def test_no_machine_gives_numbers_and_questions():
    advice = ask("deepseek", None)
    assert [p["verdict"] for p in advice["paths"]].count("yes") == 0
    assert "Which machine do you have?" in advice["questions"]
    assert all(p["number"]["unit"] for p in ask("llama-70b", None)["paths"])


def test_several_cards_several_slots():
    kb = with_documents("offer", offer("gpu-rtx-pro-6000", 9000))
    machine = dataclasses.replace(machine_of(base(), "4070-32"), gpu_slots=4)
    told = {"country": "DE", "currency": "EUR"}
    entry = path(ask("deepseek", machine, kb, budget=40000.0, **told), "multi-gpu")
    assert (entry["verdict"], entry["number"]) == ("yes", {"value": 4, "unit": "card"})
    assert (
        path(ask("deepseek", machine, kb, budget=20000.0, **told), "multi-gpu")["verdict"] == "no"
    )
    assert path(ask("deepseek", dataclasses.replace(machine, gpu_slots=None)), "multi-gpu")[
        "question"
    ]


def test_of_two_cards_the_smaller_counts():
    machine = machine_from(base(), {"gpu": ["RTX 4090", "RTX 4070"], "ram": "64 GiB"})
    assert machine.gpu["id"] == "gpu-rtx-4070"


def test_a_cache_as_large_as_all_experts_needs_no_drive():
    advice = ask(
        "qwen",
        dataclasses.replace(machine_of(base(), "rtx5060"), ram_bytes=256 * GIB, system_id=None),
    )
    streaming = path(advice, "nvme-expert-streaming")["speed"]
    assert streaming["hit_rate"] == 1
    assert "drive" not in streaming["ceilings_tok_s"]
    assert streaming["parts_ms"]["drive"] == 0


def test_a_cache_below_one_token_finds_nothing():
    advice = ask("deepseek", machine_of(base(), "rtx5060"), cache=1e9)
    assert path(advice, "nvme-expert-streaming")["run"] == "run-ds-07", "the run without a cache"


@pytest.mark.parametrize(
    ("cache", "run"), [(12e9, "run-ds-08"), (11.5e9, None), (20e9, "run-ds-09"), (21e9, None)]
)
def test_a_run_counts_for_caches_within_a_fifth(cache, run):
    """There are runs with 14 and 16 GB."""
    entry = path(
        ask("deepseek", machine_of(base(), "rtx5060"), cache=cache), "nvme-expert-streaming"
    )
    assert entry["run"] == run
    assert (entry["calc"] is None) == (run is not None)


@pytest.mark.parametrize(("wanted", "verdict"), [(46.0, "yes"), (50.0, "maybe"), (70.0, "no")])
def test_a_band_around_the_speed_wanted_is_maybe(wanted, verdict):
    """llama-8b in 8 GiB at 448 GB/s: between 46.3 and 65.8 tok/s by L16."""
    entry = path(ask("llama-8b", "rtx5060", min_tok_s=wanted), "keep-existing")
    assert entry["verdict"] == verdict
    assert ("between 46.3 and 65.8" in entry["reason"]) == (verdict == "maybe")


def test_a_data_sheet_s_rate_and_a_length_beyond_the_effective_one_are_doubts():
    drive = {"id": "drive-x", "interface": "nvme-gen5", "read_bw_spec": 14e9, "free_bytes": 2e12}
    machine = dataclasses.replace(machine_of(base(), "rtx5060"), drives=(drive,), system_id=None)
    entry = path(ask("deepseek", machine), "nvme-expert-streaming")
    assert (entry["verdict"], "R03: the speed rests on a data sheet" in entry["reason"]) == ("maybe", True)  # fmt: skip
    measured = dataclasses.replace(machine, drives=({**drive, "read_bw_measured": 14e9},))
    assert path(ask("deepseek", measured), "nvme-expert-streaming")["verdict"] == "yes"
    card = machine_from(base(), {"system": "rtx5060", "gpu": "RTX PRO 6000"})
    for tokens, verdict in ((400e3, "yes"), (700e3, "maybe"), (2e6, "no")):
        entry = path(ask("Qwen2.5-7B-1M", card, context_tokens=tokens), "keep-existing")
        assert entry["verdict"] == verdict, entry["reason"]


def test_no_speed_wanted_and_too_long_a_context():
    assert path(ask("deepseek", "rtx5060", min_tok_s=0.0), "keep-existing")["verdict"] == "yes"
    long = ask("Qwen3-30B-A3B", "rtx5060", context_tokens=100000.0)
    failed = {r["id"] for r in path(long, "cpu-ram-offload-moe")["rules"] if r["status"] == "fail"}
    assert "R23" in failed


def test_business_use_asks_for_the_licence():
    entry = path(ask("llama-8b", "rtx5060", use="business"), "keep-existing")
    assert entry["verdict"] == "no"
    assert "licence" in entry["reason"]
    for name in ("qwen", "deepseek"):
        known = path(ask(name, "rtx5060", use="business"), "nvme-expert-streaming")
        assert known["verdict"] == "yes"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"min_tok_s": -1}, "min_tok_s"), ({"budget": float("nan")}, "budget"), ({"hours_day": "3 GB"}, "hours_day"),
        ({"users": 0}, "users"), ({"cloud_allowed": "perhaps"}, "cloud_allowed"), ({"currency": "XYZ"}, "currency"),
        ({"shoe": 43}, "shoe"), ({"context_tokens": "lots"}, "context_tokens"),
    ],
)  # fmt: skip
def test_impossible_situations_are_refused_by_name(given, names):
    with pytest.raises(UsageError, match=names):
        situation_of(base(), given)


@pytest.mark.parametrize(
    ("given", "names"),
    [({"ram": "64 parsecs"}, "hardware.ram"), ({"gpu": "RTX 9999"}, "RTX 9999"), ({"drive": "tape"}, "tape"), ({"colour": 1}, "colour"), ({"system": "mars"}, "mars"), ({"ram": -5}, "hardware.ram")],
)  # fmt: skip
def test_impossible_machines_are_refused_by_name(given, names):
    with pytest.raises(UsageError, match=names):
        machine_from(base(), given)


def test_units_of_a_situation_are_converted():
    situation = situation_of(
        base(),
        {
            "budget": {"value": 2000, "unit": "USD"},
            "line_mbit": "1 Gbit/s",
            "context_tokens": 32000,
        },
    )
    assert situation.currency == "USD"
    assert situation["line_mbit"] == 1000


# ---- words, folders, benches -----------------------------------------------------------------------------------------


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


def test_layers_are_split_over_cards_and_each_reads_its_own():
    """llama-70b: 42.4 GB need two cards of 24 GiB, which read all of it at one card's rate."""
    two = machine_from(base(), {"system": "rtx5060", "gpu": ["RTX 4090", "RTX 4090"]})
    entry = path(ask("llama-70b", two), "keep-existing")
    assert entry["verdict"] == "yes"
    assert entry["number"]["value"] == pytest.approx(0.75 * 1008e9 / (39.684e9 + 8192 * 327680), rel=1e-3)  # fmt: skip
    assert entry["details"]["cards"] == 2
    one = machine_from(base(), {"system": "rtx5060", "gpu": "RTX 4090"})
    assert path(ask("llama-70b", one), "keep-existing")["verdict"] == "no"
    eight = machine_from(base(), {"gpu": ["H200"] * 8})
    assert "that are there hold" in path(ask("deepseek", eight), "multi-gpu")["reason"]
    small = machine_from(base(), {"system": "rtx5060", "gpu": ["RTX 4090", "RTX 3060"]})
    assert path(ask("llama-70b", small), "keep-existing")["verdict"] == "no", "by the smallest card"
    pair = machine_from(base(), {"system": "rtx5060", "gpu": ["RTX 5090", "RTX 4090"]})
    said = path(ask("llama-70b", pair), "keep-existing")["reason"]
    assert "GeForce RTX 4090 24 GB, the smallest of them, bounds it" in said


@pytest.mark.parametrize(("ram", "verdict"), [("9.7 GB", "no"), ("12.1 GB", "maybe")])
def test_a_small_model_takes_at_most_half_of_ram(ram, verdict):
    """llama-8b: a file of 4.92 GB, 5.99 GB with keys and values."""
    told = machine_from(base(), {"ram": ram, "ram_bw": "40 GB/s", "cpu": "Ryzen 5 7600"})
    entry = path(ask("llama-8b", told), "cpu-only-small")
    assert entry["verdict"] == verdict
    if verdict == "no":
        assert (entry["number"]["value"], entry["threshold"]["value"]) == (4.92e9, 4.85e9)


def test_an_upgrade_that_makes_nothing_faster_is_none():
    entry = path(ask("llama-8b", "laptop"), "upgrade-existing")
    assert "no upgrade helps" in entry["reason"]
    unified = path(ask("llama-70b", "unified-36"), "upgrade-existing")
    assert (unified["verdict"], unified["number"]["unit"]) == ("no", "B")
    told = machine_from(base(), {"ram": "16 GiB", "ram_bw": "40 GB/s"})
    assert "what can be changed is not known" in path(ask("llama-70b", told), "upgrade-existing")["reason"]  # fmt: skip


def test_unified_memory_reaches_a_share_of_its_rate_and_less_with_experts():
    """16.8 tok/s were measured with 7.88 GB a token at 273 GB/s; 2.7 with 70 GB of a dense model."""
    qwen = base().find("model", "qwen").document
    spark = machine_of(base(), "dgx-spark")
    low, _, high = path(ask("qwen", spark), "unified-memory")["speed"]["tok_s"]
    token = 48 * 10 * 2764800 + qwen["variants"][0]["active_resident_bytes"]
    assert low == pytest.approx(0.45 * 273e9 / token, rel=1e-4)
    assert low <= 16.8 <= high
    dense = path(ask("llama-70b", spark), "unified-memory")
    assert dense["number"]["value"] == pytest.approx(0.75 * 273 / 39.684, rel=1e-4)
    calc = next(c for c in ask("llama-70b", spark)["calculations"] if c["ref"] == dense["calc"])
    assert calc["result"]["value"] == dense["number"]["value"], "the number is what its law gives"


def test_a_reported_speed_below_the_wanted_one_is_no():
    entry = path(ask("deepseek", "rtx5060", min_tok_s=20.0), "unified-memory")
    assert (entry["verdict"], entry["number"]["value"]) == ("no", 10)


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
