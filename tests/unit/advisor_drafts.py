"""Drafts of answers for the validator's tests: right ones, and one mistake at a time."""

from __future__ import annotations

import copy
import functools
from typing import Any

from runtime.advisor import kb as knowledge
from runtime.advisor.advice import advise, draft_of
from runtime.advisor.facts import machine_of, situation_of
from runtime.advisor.kb import KnowledgeBase

PROSE = {
    "en": "You can keep the machine that you have for this model, and the way to do it is that the experts come from "
    "the drive while the rest of the weights stay in the memory of the card, which is as fast as you wanted it.",
    "de": "Sie können die Maschine, die Sie haben, für das Modell behalten, und der Weg ist, dass die Experten von dem "
    "Laufwerk kommen und der Rest der Gewichte in dem Speicher der Karte ist, also nicht mit dem Netz und auch nicht neu.",
    "ru": "Можно оставить ту машину, что у вас есть, и это не потребует ничего: эксперты читаются с диска, а всё "
    "остальное лежит в памяти карты, так что это не медленнее, чем вы хотели, и для этого не нужно ничего покупать.",
}  # fmt: skip
NO = {
    "en": "This machine does not run the model as you want it, and that is what the laws and the rules say for it, not "
    "an opinion of mine; with more memory or with a model that is not as large it would be another answer.",
    "de": PROSE["de"], "ru": PROSE["ru"],
}  # fmt: skip


@functools.cache
def base() -> KnowledgeBase:
    return knowledge.load()


def advice_for(model: str, machine: str | None, **situation: Any) -> dict[str, Any]:
    kb = base()
    document = kb.find("model", model).document
    assert document is not None
    return advise(
        kb, document, document["variants"][0], None if machine is None else machine_of(kb, machine),
        situation_of(kb, situation), kb.as_of,
    )  # fmt: skip


@functools.cache
def _right(model: str, machine: str, language: str, situation: tuple[tuple[str, Any], ...]) -> Any:
    advice = advice_for(model, machine, **dict(situation))
    block = draft_of(advice, language)
    is_kept = next(p for p in advice["paths"] if p["id"] == "keep-existing")["verdict"] == "yes"
    return block, (PROSE if is_kept else NO)[language]


def right(model: str = "deepseek", machine: str = "rtx5060", language: str = "en", **situation: Any):  # fmt: skip
    """Return (block, prose) of a right answer."""
    block, prose = _right(model, machine, language, tuple(sorted(situation.items())))
    return copy.deepcopy(block), prose


def path(block: dict[str, Any], name: str) -> dict[str, Any]:
    return next(p for p in block["paths"] if p["id"] == name)


def calc(block: dict[str, Any], law: str) -> dict[str, Any]:
    return next(c for c in block["calculations"] if c["law"] == law)
