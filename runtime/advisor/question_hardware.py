"""What a question in plain words says about a machine: RAM, cards and how many, the drive, unified memory.

Deterministic, in English, German and Russian. A GB of RAM is heard as a GiB: modules come in powers of two.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime.advisor.facts import Machine, machine_from
from runtime.advisor.kb import KnowledgeBase
from runtime.advisor.question import NUMBER, Heard, named
from runtime.quantities import parse_number

MAX_CARDS = 64
_SIZE = rf"{NUMBER}\s*(gb|gib|гб|tb|tib|тб)"
_OWN = re.compile(
    r"\b(?:i have|i've|i own|my|we have|we've|our)\b|\b(?:ich habe|habe ich|mein\w*|wir haben|unser\w*)\b"
    r"|у меня|у нас|\bмо(?:й|ём|ем|я|ей|и)\b|\bнаш\w*"
)
_NO_CARD = re.compile(
    r"\b(?:no|without(?: an?| any)?) (?:dedicated |discrete )?(?:gpu|graphics card|video card)\b"
    r"|\b(?:kein\w*|ohne) (?:gpu|grafikkarte)\b|\b(?:без|нет) (?:gpu|видеокарт\w*)"
)
_RAM_WORD = r"(?:ram|arbeitsspeicher|hauptspeicher|system memory|main memory|озу|оператив\w*)"
_RAM = (
    re.compile(rf"{_SIZE}\s*(?:of |an |ddr\d\S* )*{_RAM_WORD}\b"),
    re.compile(rf"\b{_RAM_WORD}\b\s*(?:of|von|:|=|is)?\s*{_SIZE}"),
)
_UNIFIED = re.compile(
    r"\b(?:macbook|imac|mac|apple m\d|unified memory|strix halo|ryzen ai max|dgx spark)\b"
)
_DRIVES = (
    ("hdd", r"\b(?:hdd|hard disk|hard drive|festplatte)\b|жестк\w+ диск|жёстк\w+ диск"),
    ("sata", r"\bsata\b"),
    ("nvme-gen5", r"\b(?:gen ?5|pcie ?5(?:\.0)?)\b[^.,;]{0,12}\b(?:nvme|ssd|drive)\b"),
    ("nvme-gen4", r"\b(?:gen ?4|pcie ?4(?:\.0)?)\b[^.,;]{0,12}\b(?:nvme|ssd|drive)\b"),
    ("nvme-gen3", r"\b(?:nvme|m\.2)\b"),  # the least that it may be
)
_COUNTS = {
    **dict.fromkeys(("two", "zwei", "два", "две"), 2),
    **dict.fromkeys(("three", "drei", "три"), 3),
    **dict.fromkeys(("four", "vier", "четыре"), 4),
}
_COUNT = rf"(?<![\w.,])(\d{{1,2}}|{'|'.join(_COUNTS)})\s*[x×]?\s*"
_CARD = re.compile(
    r"\b(?:(?:rtx|gtx|rx|arc|radeon|titan|tesla|quadro)(?: pro)? ?[a-z]?\d{3,4}(?: ?(?:ti|super|xtx|xt|laptop|ada))*"
    r"|[ahbvl]\d{2,3}s?(?: ?(?:pcie|sxm))?|mi\d{3}x?)\b"
)


_WORDS = {"ram": "RAM", "unified_memory": "unified memory", "cpu": "CPU", "disk_bw": "drive at"}


@dataclass(frozen=True, slots=True)
class HeardHardware:
    """Parts of a machine as `machine_from` takes them, cards that the base lacks, whether they are one's own."""

    given: Mapping[str, Any]
    unknown_cards: tuple[str, ...]
    is_own: bool

    def text(self, kb: KnowledgeBase) -> str:
        """Return it in words: `RAM 4 GiB, no card`; empty when nothing was heard."""
        said = []
        for name, value in self.given.items():
            if name == "system":
                said.append(str(kb.get("system", value)["name"]))
            elif name == "gpu":
                counts = {kb.get("gpu", g)["name"]: value.count(g) for g in value}
                cards = [f"{n} x {g}" if n > 1 else g for g, n in counts.items()]
                said.append(f"card {' and '.join(cards)}" if cards else "no card")
            else:
                said.append(f"{_WORDS.get(name, name)} {value}")
        return ", ".join(said)


def hear_hardware(kb: KnowledgeBase, question: str) -> HeardHardware:
    """Return what a question says about a machine."""
    text = unicodedata.normalize("NFKC", question).lower()
    given: dict[str, Any] = {}
    boxes = [
        s for s in named(kb, "system", question) if "unified_memory_bytes" in kb.get("system", s)
    ]
    if len(boxes) == 1:  # its memory and rate are known
        given["system"] = boxes[0]
    elif (ram := next(filter(None, (pattern.search(text) for pattern in _RAM)), None)) is not None:
        given["ram"] = _size(ram[1], ram[2])
    elif _UNIFIED.search(text) and (size := re.search(_SIZE, text)):
        given["ram"] = given["unified_memory"] = _size(size[1], size[2])
    cards = [card for g in named(kb, "gpu", question) for card in [g] * _count(kb, g, text)]
    if cards:
        given["gpu"] = cards[:MAX_CARDS]
    elif _NO_CARD.search(text):
        given["gpu"] = []
    cpus = named(kb, "cpu", question)
    if len(cpus) == 1:
        given["cpu"] = cpus[0]
    kind = next((kind for kind, pattern in _DRIVES if re.search(pattern, text)), None)
    if kind is not None:
        given["drive"] = kind
        if (rate := re.search(rf"{NUMBER}\s*(gb|gib|mb)/s", text)) is not None:
            given["disk_bw"] = f"{parse_number(rate[1].rstrip('.,'))} {_UNITS[rate[2]]}/s"
    unknown = [m[0] for m in _CARD.finditer(text) if not named(kb, "gpu", m[0])]
    return HeardHardware(given, tuple(dict.fromkeys(unknown)), bool(_OWN.search(text)))


_UNITS = {
    "gb": "GB", "gib": "GiB", "mb": "MB", "гб": "GB", "tb": "TB", "tib": "TiB", "тб": "TB",
}  # fmt: skip


def _size(number: str, unit: str) -> str:
    return f"{parse_number(number.rstrip('.,')):g} {'TiB' if _UNITS[unit][0] == 'T' else 'GiB'}"


def _count(kb: KnowledgeBase, gpu: str, text: str) -> int:
    """Return how many of a card are meant: `8x H200`, `two RTX 4090`."""
    for alias in kb.get("gpu", gpu)["aliases"]:
        found = re.search(rf"{_COUNT}(?:nvidia |geforce )*{re.escape(alias.lower())}\b", text)
        if found is not None:
            return max(1, _COUNTS.get(found[1]) or int(found[1]))
    return 1


def machine_heard(
    kb: KnowledgeBase, heard: HeardHardware, base: Machine | None, is_named: bool
) -> Machine | None:
    """Return the machine asked about: `base` with what was heard of it, or one made of what was heard.

    is_named: somebody named the base (hw=, advise.system); then only what the person owns changes it, so that a card
    which is merely asked about does not. A base that nobody named gives way to a machine whose RAM or card is told.
    """
    if not heard.given or (base is not None and is_named and not heard.is_own):
        return base
    start = (
        None
        if not is_named and (heard.given.get("gpu") or heard.given.keys() & {"ram", "system"})
        else base
    )
    given = dict(heard.given)
    if start is not None and _is_nvme(start.drive) and given.get("drive") == "nvme-gen3":
        del given["drive"]  # `NVMe` alone says nothing new about it
    made = machine_from(kb, given, start)
    if made == start:
        return start
    name = "the machine in the question" if start is None else start.name
    return replace(made, name=f"{name}; as the question says: {heard.text(kb)}")


def heard_of(
    kb: KnowledgeBase, heard: Heard | None, hardware: HeardHardware | None
) -> dict[str, Any] | None:
    """Return what was taken from a question, to be shown: the situation's keys, the machine's parts, unknown cards."""
    if heard is None or hardware is None:
        return None
    return {
        "situation": dict(heard.situation),
        "hardware": hardware.text(kb),
        "unknown_cards": list(hardware.unknown_cards),
    }


def _is_nvme(drive: Mapping[str, Any] | None) -> bool:
    return drive is not None and str(drive.get("interface")).startswith("nvme")
