"""Names: which document a name means, or which it may mean. Never the nearest one silently."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# words that make another product of a name; numbers always do
DISTINGUISHING = frozenset(
    [
        "flash",
        "next",
        "instruct",
        "base",
        "chat",
        "coder",
        "thinking",
        "1m",
        "ti",
        "super",
        "laptop",
        "max",
        "mini",
        "pro",
        "ultra",
        "lite",
        "mobile",
        "air",
        "distill",
        "vl",
        "omni",
        "math",
        "preview",
        "a3b",
        "d",
        "gre",
        "xt",
    ]
)
_FILLER = frozenset(
    ["geforce", "nvidia", "amd", "intel", "apple", "model", "the", "gb", "gpu", "card"]
)


def normalised(name: str) -> str:
    """Return a name in lower case, letters and digits only (NFKC)."""
    text = unicodedata.normalize("NFKC", name).lower()
    return "".join(c for c in text if c.isalnum())


def tokens(name: str) -> list[str]:
    """Return the words and numbers of a name: `RTX 5060Ti 16GB` is rtx, 5060, ti, 16, gb; 3.8 and v4.1 stay whole."""
    text = unicodedata.normalize("NFKC", name).lower()
    return re.findall(r"v?\d+(?:\.\d+)*[bm](?![a-z0-9])|a\d+b|v?\d+(?:\.\d+)*|[^\W\d_]+", text)


@dataclass(frozen=True, slots=True)
class Match:
    """What a name was resolved to: a document, or None and the candidates."""

    document: Mapping[str, Any] | None
    variant: Mapping[str, Any] | None
    candidates: tuple[str, ...]
    why: str = ""


def resolve(name: str, documents: Iterable[Mapping[str, Any]], variant: str | None = None) -> Match:
    """Return the one document that a name means.

    A name is an alias, or an alias followed by a variant's name or by nothing that makes it another product.
    """
    wanted = normalised(name)
    found: list[tuple[Mapping[str, Any], Mapping[str, Any] | None]] = []
    near: list[str] = []
    listed = list(documents)
    for document in listed:
        names = [document["id"], document["name"], *document.get("aliases", ())]
        variants = document.get("variants", ())
        if wanted in map(normalised, names):
            found.append((document, None))
            continue
        for v in variants:
            labels = [v["id"], v["quant"], *v.get("aliases", ())]
            if any(wanted == normalised(n) + normalised(label) for n in names for label in labels):
                found.append((document, v))
                break
        else:
            shared = set(tokens(name)) & {t for n in names for t in tokens(n)} - _FILLER
            if len(shared) >= 2 or any(len(t) >= 4 and not t.isalpha() for t in shared):
                near.append(document["id"])
    if len(found) != 1:
        candidates = tuple(d["id"] for d, _ in found) or tuple(near)
        why = f"{name!r} means several documents" if found else f"{name!r} is in no document"
        return Match(None, None, candidates, why)
    document, named = found[0]
    if variant is not None:
        named = find_variant(document, variant)
        if named is None:
            known = ", ".join(v["id"] for v in document.get("variants", ())) or "none"
            why = f"{document['name']} has no variant {variant!r}; known: {known}"
            return Match(None, None, (document["id"],), why)
    return Match(document, named, (document["id"],))


def find_variant(document: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the variant that a name means, if one does."""
    wanted = normalised(name)
    for variant in document.get("variants", ()):
        if wanted in map(normalised, (variant["id"], *variant.get("aliases", ()))):
            return dict(variant)
    return None


def difference(name: str, other: str) -> list[str]:
    """Return the words that make two names different products: versions, sizes, suffixes."""
    one, two = set(tokens(name)), set(tokens(other))
    odd = (one ^ two) - _FILLER
    return sorted(t for t in odd if any(c.isdigit() for c in t) or t in DISTINGUISHING)
