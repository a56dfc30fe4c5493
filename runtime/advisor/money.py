"""Prices: which offers count today, how old they are, and sums in one currency. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.advisor.kb import KnowledgeBase, age_days

VALID_DAYS = 90
EVERYWHERE = "WW"  # a region


@dataclass(frozen=True, slots=True)
class Price:
    """One offer as of a day: its amount in the wanted currency (None without a rate), and why it does not count."""

    offer: Mapping[str, Any]
    amount: float | None
    currency: str
    age_days: int
    faults: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        return not self.faults

    def text(self) -> str:
        """Return it for people, with its age."""
        o = self.offer
        said = f"{o['price']:g} {o['currency']} ({place(o['region'])}, {o['date']}, {self.age_days} days old)"
        return said if self.is_valid else f"{said}: {'; '.join(self.faults)}"


def place(region: str) -> str:
    """Return a region in words."""
    return "worldwide" if region == EVERYWHERE else region


def price_of(
    kb: KnowledgeBase,
    offer: Mapping[str, Any],
    as_of: str,
    country: str | None,
    currency: str | None,
) -> Price:
    """Return what an offer is worth today."""
    faults = list(date_faults(offer, as_of, country))
    wanted = currency or offer["currency"]
    amount: float | None = float(offer["price"])
    if wanted != offer["currency"]:
        rate = _rate(kb, offer["currency"], wanted, as_of)
        amount = None if rate is None else float(offer["price"]) * rate
        if amount is None:
            faults.append(f"no dated rate from {offer['currency']} to {wanted}")
    return Price(offer, amount, wanted, age_days(offer["date"], as_of), tuple(faults))


def date_faults(offer: Mapping[str, Any], as_of: str, country: str | None) -> list[str]:
    """Return why an offer's day or region does not count today."""
    age, valid = age_days(offer["date"], as_of), int(offer.get("valid_days", VALID_DAYS))
    faults = []
    if age > valid:
        faults.append(f"older than {valid} days")
    if age < 0:
        faults.append(f"dated after {as_of}")
    if country is not None and offer["region"] not in (country, EVERYWHERE):
        faults.append(f"of {offer['region']}, not {country}")
    return faults


def _rate(kb: KnowledgeBase, currency: str, wanted: str, as_of: str) -> float | None:
    for offer in kb.all("offer"):
        if offer["product"] == "fx" and not date_faults(offer, as_of, None):
            pair = (offer["currency"], offer["to_currency"])
            if pair == (currency, wanted):
                return float(offer["price"])
            if pair == (wanted, currency):
                return 1 / float(offer["price"])
    return None


def prices_of(
    kb: KnowledgeBase,
    product: str,
    condition: str,
    as_of: str,
    country: str | None,
    currency: str | None,
) -> list[Price]:
    """Return all offers of a product in a condition, those that count first, cheapest first."""
    found = [
        price_of(kb, offer, as_of, country, currency)
        for offer in kb.all("offer")
        if offer["product"] == product
        and (
            offer["condition"] == condition
            or (condition == "used" and offer["condition"] == "refurbished")
        )
    ]
    return sorted(
        found, key=lambda p: (not p.is_valid, p.amount is None, p.amount or 0, p.age_days)
    )
