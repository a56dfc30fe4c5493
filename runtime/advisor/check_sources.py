"""Checks of where a draft's numbers come from: prices with day and region, known sources, runs that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

from runtime.advisor import identity
from runtime.advisor.draft import (
    FACT_TOLERANCE,
    Draft,
    Fault,
    near,
)
from runtime.advisor.kb import age_days, is_date
from runtime.advisor.money import VALID_DAYS
from runtime.quantities import CURRENCIES


def _identity_of_prices(d: Draft) -> Iterator[Fault]:
    """A price is of exactly the entity that it names; a cloud price of another version is not the model's."""
    for number, price in enumerate(d.block["prices"], 1):
        where = f"prices.{number}"
        item = price["item"]
        document = d.documents.get(item)
        if document is None:
            found = d.kb.by_id(item)
            document = found[1] if found else None
        if document is None:
            matches = [d.kb.find(kind, item).document for kind in ("model", "gpu", "system", "cpu")]
            document = next((m for m in matches if m is not None), None)
        if document is None:
            yield Fault(
                "E-IDENT",
                where,
                f"{item!r} is no entity of the draft and no document",
                "name an entity's ref or a document's id",
            )
            continue
        mine = [doc for doc in d.documents.values() if doc["id"].startswith("model-")]
        is_model = document["id"].startswith("model-")
        if is_model and mine and document["id"] not in [m["id"] for m in mine]:
            odd = identity.difference(document["name"], mine[0]["name"])
            yield Fault(
                "E-IDENT",
                where,
                f"the price is of {document['name']}, the answer is about {mine[0]['name']} ({', '.join(odd)})",
                "a price of another model does not count",
                mine[0]["name"],
                document["name"],
            )
        offers = [
            o
            for kind in ("offer", "cloud")
            for o in d.kb.all(kind)
            if document["id"] in (o.get("product"), o.get("model"), o.get("gpu"))
        ]
        source = price.get("source")
        named = [
            o
            for o in offers
            if source in (*o["sources"], o["id"]) and o["date"] == price.get("date")
        ]
        amounts = [
            o[k]
            for o in named
            for k in ("price", "price_in", "price_in_cached", "price_out", "price_hour")
            if k in o
        ]
        if amounts and not any(near(price["amount"], a, FACT_TOLERANCE) for a in amounts):
            yield Fault(
                "E-INPUT",
                where,
                f"the offer says {', '.join(f'{a:g}' for a in amounts)}",
                "take its amount",
                amounts[0],
                price["amount"],
            )


def _prices(d: Draft) -> Iterator[Fault]:
    for number, price in enumerate(d.block["prices"], 1):
        where = f"prices.{number}"
        if price["currency"] not in CURRENCIES:
            yield Fault(
                "E-UNIT",
                where,
                f"{price['currency']!r} is no currency of this base",
                f"known: {', '.join(CURRENCIES)}",
            )
        missing = [k for k in ("region", "date") if not price.get(k)]
        if missing:
            yield Fault(
                "E-SOURCE",
                where,
                f"the price has no {' and no '.join(missing)}",
                "say where and when it was seen",
            )
            continue
        if not is_date(price["date"]):
            yield Fault("E-SOURCE", where, f"{price['date']!r} is no day", "write it as 2026-11-30")
            continue
        age = age_days(price["date"], d.kb.as_of)
        if (
            age > VALID_DAYS
            and price["date"] not in d.text
            and not re.search(r"\b(old|stale|alt|veraltet|устар|days|Tage)", d.text)
        ):
            is_named = any(
                price["date"] in p.get("why", "") or "days old" in p.get("why", "")
                for p in d.block["paths"]
            )
            yield Fault(
                "E-SOURCE",
                where,
                f"the price is {age} days old and nothing says so",
                "say its date in the text",
                is_warning=is_named,
            )


def _sources(d: Draft) -> Iterator[Fault]:
    known = {s["id"] for s in d.kb.all("source")} | {
        o["id"] for k in ("offer", "cloud") for o in d.kb.all(k)
    }
    for number, price in enumerate(d.block["prices"], 1):
        source, web = price.get("source"), price.get("web", [])
        if source in known:
            continue
        where = f"prices.{number}"
        if not web and not (source or "").startswith("http"):
            yield Fault(
                "E-SOURCE",
                where,
                f"the source {source!r} is not in the knowledge base, and there is no address",
                "name one",
            )
        elif not d.searched_web:
            yield Fault(
                "E-SOURCE",
                where,
                "an address is given, but nothing was searched",
                "take a price of the base, or search",
            )
    for entity in d.block["entities"]:
        if entity.get("web") and not d.searched_web:
            yield Fault(
                "E-SOURCE",
                f"entities.{entity['ref']}",
                "an address is given, but nothing was searched",
                "take facts of the base, or search",
            )
    for name in d.block["evidence"]:
        if name not in d.kb.documents["run"]:
            yield Fault(
                "E-SOURCE",
                f"evidence.{name}",
                f"there is no run {name!r}",
                "use list_entities kind=run",
            )
    for path in d.block["paths"]:
        if path.get("run") and path["run"] not in d.kb.documents["run"]:
            yield Fault(
                "E-SOURCE",
                f"paths.{path['id']}",
                f"there is no run {path['run']!r}",
                "use list_entities kind=run",
            )


CHECKS = (_identity_of_prices, _prices, _sources)
