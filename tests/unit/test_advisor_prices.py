"""The twelve paths by money: offers, clouds, currencies, and how old a price may be."""

from __future__ import annotations

import dataclasses

import pytest
from advisor_drafts import base, path
from advisor_questions import ask, cloud, offer, with_documents

from runtime.advisor.render import format_advice


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


def test_a_price_that_is_sold_everywhere_counts_in_every_country_and_in_its_own_currency_first():
    dollars = {**cloud(), "id": "cloud-usd", "currency": "USD", "region": "WW", "price_out": 0.1}
    kb = with_documents("cloud", dollars, {**cloud(), "id": "cloud-eur"})
    for money, value in (("USD", 0.1), ("EUR", 0.28)):
        entry = path(ask("deepseek", "rtx5060", kb, country="DE", currency=money), "cloud-api")
        assert entry["number"] == {"value": value, "unit": f"{money}/Mtok"}, (
            "two moneys are not compared"
        )
