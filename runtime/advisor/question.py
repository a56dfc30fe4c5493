"""What a question in plain words says about the situation: numbers with units, a few words, names of the base.

Deterministic: patterns in English, German and Russian. What it does not find stays unknown; what is told by key wins.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.advisor import identity
from runtime.advisor.kb import KnowledgeBase
from runtime.errors import UsageError
from runtime.quantities import parse_number, parse_number_ways

MAX_LENGTH = 4000  # characters of a question
NUMBER = r"(\d[\d.,]*(?:[   ]\d{3})*)"
_MONEY = {
    "€": "EUR",
    "eur": "EUR",
    "euro": "EUR",
    "euros": "EUR",
    "евро": "EUR",
    "$": "USD",
    "usd": "USD",
    "dollar": "USD",
    "dollars": "USD",
    "£": "GBP",
    "gbp": "GBP",
    "pounds": "GBP",
    "chf": "CHF",
    "pln": "PLN",
    "zł": "PLN",
}
_CUR = "|".join(re.escape(word) for word in sorted(_MONEY, key=len, reverse=True))
_COUNTRIES = {
    "germany": "DE",
    "deutschland": "DE",
    "германии": "DE",
    "austria": "AT",
    "österreich": "AT",
    "switzerland": "CH",
    "schweiz": "CH",
    "france": "FR",
    "poland": "PL",
    "polen": "PL",
    "ukraine": "UA",
    "spain": "ES",
    "italy": "IT",
    "netherlands": "NL",
    "usa": "US",
    "united states": "US",
    "uk": "GB",
    "united kingdom": "GB",
    "japan": "JP",
}
_MILLION = r"(?:m|mio\.?|million(?:s|en)?|млн)\b\s*(?:tok\w*|токен\w*)?"
_NUMBERS = (  # (key, pattern, factor)
    (
        "min_tok_s",
        rf"{NUMBER}\s*(?:tok/s|tokens?/s|t/s|tokens? (?:per|a|each) second|token pro sekunde|токен\w* в секунду)",
        1.0,
    ),
    (
        "context_tokens",
        rf"{NUMBER}\s*k\b\s*(?:tokens? )?(?:of )?(?:context|kontext|контекст\w*)",
        1000.0,
    ),
    ("context_tokens", rf"(?:context|kontext|контекст\w*)\D{{0,12}}{NUMBER}\s*k\b", 1000.0),
    ("context_tokens", rf"{NUMBER}\s*(?:tokens? )(?:of )?(?:context|kontext)", 1.0),
    ("users", rf"{NUMBER}\s*(?:users|people|persons|nutzer|personen|пользовател\w*|человек)", 1.0),
    (
        "hours_day",
        rf"{NUMBER}\s*(?:h|hours?|stunden?|час\w*|ч)\s*(?:a|per|each|/|pro|am|в)\s*(?:day|tag|день)",
        1.0,
    ),
    ("horizon_months", rf"{NUMBER}\s*(?:months|monate|месяц\w*)", 1.0),
    ("horizon_months", rf"{NUMBER}\s*(?:years?|jahre?|год\w*|лет)", 12.0),
    ("line_mbit", rf"{NUMBER}\s*mbit", 1.0),
    ("tokens_in_month", rf"{NUMBER}\s*{_MILLION}\s*(?:in\b|rein\b|input|на вход)", 1e6),
    ("tokens_out_month", rf"{NUMBER}\s*{_MILLION}\s*(?:out\b|raus\b|output|на выход)", 1e6),
)
_FLAGS = (
    (
        "cloud_allowed",
        r"no cloud|without (?:the |a )?cloud|not? (?:in|into|to) the cloud|offline|keine cloud|ohne cloud|без облак",
        False,
    ),
    ("cloud_allowed", r"cloud (?:is|ist) (?:allowed|fine|ok|erlaubt)|облако можно", True),
    (
        "accepts_smaller",
        r"no smaller model|exactly this model|kein kleineres modell|только эт\w+ модель",
        False,
    ),
)


@dataclass(frozen=True, slots=True)
class Heard:
    """What a question says: situation keys, and documents of the base that it names."""

    situation: Mapping[str, Any]
    models: tuple[str, ...]
    gpus: tuple[str, ...]


def hear(kb: KnowledgeBase, question: str) -> Heard:
    """Return what a question says. Raises UsageError for one that is too long."""
    if len(question) > MAX_LENGTH:
        raise UsageError(
            f"the question has {len(question)} characters", f"say it in at most {MAX_LENGTH}"
        )
    text = unicodedata.normalize("NFKC", question).lower()
    found: dict[str, Any] = {}
    rest = text
    kwh = re.search(rf"{NUMBER}\s*({_CUR}|ct|cents?)\s*(?:/|per |a |pro |за )\s*kwh", text)
    if kwh:
        value = parse_number(kwh[1].rstrip(".,"))
        if value is not None:
            is_cent = kwh[2] not in _MONEY
            found["price_kwh"] = value / 100 if is_cent else value
            rest = rest.replace(kwh[0], " ")
    for pattern in (rf"({_CUR})\s*{NUMBER}", rf"{NUMBER}\s*({_CUR})(?!\w)(?!\s*/)"):
        money = re.search(pattern, rest)
        if money:
            word, number = (money[1], money[2]) if money[1] in _MONEY else (money[2], money[1])
            ways = parse_number_ways(number.rstrip(".,"))
            if ways:  # 2.000 € are two thousand
                found["budget"], found["currency"] = max(ways), _MONEY[word]
                break
    for key, pattern, factor in _NUMBERS:
        match = re.search(pattern, rest)
        if match and key not in found:
            value = parse_number(match[1].rstrip(".,"))
            if value is not None:
                found[key] = value * factor
    found |= {key: value for key, pattern, value in _FLAGS if re.search(pattern, text)}
    for word, code in _COUNTRIES.items():
        if re.search(rf"(?<!\w){word}(?!\w)", text):
            found["country"] = code
            break
    return Heard(found, named(kb, "model", question), named(kb, "gpu", question))


def named(kb: KnowledgeBase, kind: str, text: str) -> tuple[str, ...]:
    """Return the ids whose name or alias stands in a text, not followed by a word that makes another product."""
    words = identity.tokens(text)
    found: list[tuple[int, int, str]] = []
    for document in kb.all(kind):
        for alias in (document["name"], *document["aliases"]):
            parts = identity.tokens(alias)
            if len(parts) < 2 and not any(c.isdigit() for c in alias):
                continue  # `qwen` alone names a family
            for at in range(len(words) - len(parts) + 1):
                after = words[at + len(parts) : at + len(parts) + 1]
                is_other = bool(after) and after[0] in identity.DISTINGUISHING
                if words[at : at + len(parts)] == parts and not is_other:
                    found.append((at, len(parts), document["id"]))
    ids = []
    for at, length, name in sorted(found, key=lambda f: (f[0], -f[1])):
        inside = any(
            a <= at and at + length <= a + n and (a, n) != (at, length) for a, n, _ in found
        )
        if not inside and name not in ids:
            ids.append(name)
    return tuple(ids)
