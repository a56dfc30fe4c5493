"""Questions to the advisor, and offers and clouds to put beside its documents, for its tests."""

from __future__ import annotations

import dataclasses

from advisor_drafts import base

from runtime.advisor.advice import advise
from runtime.advisor.facts import machine_of, situation_of


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
