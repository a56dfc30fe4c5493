"""Which sentences share words with a question: an inverted index over word hashes, kept in files that can be rebuilt.

Terms are runs of letters and digits, NFKC, case-folded; words of grammar do not count. Knows no store and no torch.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from runtime.living_kv import files

Array = np.ndarray[Any, Any]
MAGIC = 0x31584C4B  # and the version
MAX_SEGMENTS = 8
_RUN = re.compile(r"[^\W_]+")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
# of questions: they name nothing, and a store that lacks them is not less likely to know the answer
_GRAMMAR = frozenset(
    [
        "a",
        "an",
        "the",
        "of",
        "in",
        "on",
        "at",
        "to",
        "for",
        "from",
        "by",
        "with",
        "and",
        "or",
        "is",
        "are",
        "was",
        "were",
        "be",
        "been",
        "do",
        "does",
        "did",
        "has",
        "have",
        "had",
        "what",
        "which",
        "who",
        "whom",
        "whose",
        "when",
        "where",
        "why",
        "how",
        "that",
        "this",
        "these",
        "those",
        "it",
        "its",
        "he",
        "she",
        "they",
        "we",
        "you",
        "me",
        "my",
        "your",
        "his",
        "her",
        "their",
        "our",
        "as",
        "tell",
        "say",
        "says",
        "said",
        "please",
        "question",
        "answer",
        "reminder",
        "что",
        "кто",
        "какой",
        "какая",
        "какое",
        "какие",
        "где",
        "когда",
        "почему",
        "как",
        "и",
        "в",
        "на",
        "с",
        "по",
        "из",
        "за",
        "от",
        "для",
        "это",
        "эта",
        "этот",
        "был",
        "была",
        "было",
        "были",
        "der",
        "die",
        "das",
        "ein",
        "eine",
        "und",
        "ist",
        "war",
        "wer",
        "wo",
        "wie",
        "wann",
        "warum",
        "welche",
        "welcher",
        "welches",
        "im",
        "den",
        "dem",
    ]
)


def terms(text: str) -> list[str]:
    """Return the distinct terms of a text, in order; CJK runs give pairs of characters."""
    found: list[str] = []
    for run in _RUN.findall(unicodedata.normalize("NFKC", text).casefold()):
        rest = run
        for cjk in _CJK.findall(run):
            found += [cjk[i : i + 2] for i in range(max(1, len(cjk) - 1))]
            rest = rest.replace(cjk, " ")
        found += [w for w in rest.split() if len(w) >= 2 or w.isdigit()]
    return [w for w in dict.fromkeys(found) if w not in _GRAMMAR]


def _hashes(words: Sequence[str]) -> Array:
    raw = b"".join(blake3(w.encode()).digest(length=8) for w in words)
    return np.frombuffer(raw, "<u8")


class Segment:
    """Sentences [first, end): sorted term hashes, and which sentences hold each."""

    def __init__(self, first: int, end: int, keys: Array, starts: Array, ids: Array) -> None:
        self.first, self.end, self.keys, self.starts, self.ids = first, end, keys, starts, ids

    @classmethod
    def build(cls, first: int, texts: Sequence[str]) -> Segment:
        words = [terms(text) for text in texts]
        known: dict[str, int] = {}
        flat = [known.setdefault(word, len(known)) for row in words for word in row]
        hashes = _hashes(list(known))[flat] if flat else np.zeros(0, "<u8")
        owners = np.repeat(
            np.arange(first, first + len(texts), dtype="<u4"), [len(row) for row in words]
        )
        return cls._from_pairs(first, first + len(texts), hashes, owners)

    @classmethod
    def _from_pairs(cls, first: int, end: int, hashes: Array, owners: Array) -> Segment:
        order = np.argsort(hashes, kind="stable")
        keys, starts = np.unique(hashes[order], return_index=True)
        starts = np.append(starts, len(hashes)).astype("<u8")
        return cls(first, end, keys.astype("<u8"), starts, owners[order].astype("<u4"))

    @classmethod
    def merged(cls, parts: Sequence[Segment]) -> Segment:
        hashes = np.concatenate(
            [np.repeat(p.keys, np.diff(p.starts).astype(np.int64)) for p in parts]
        )
        return cls._from_pairs(
            parts[0].first, parts[-1].end, hashes, np.concatenate([p.ids for p in parts])
        )

    def holders(self, key: int) -> Array:
        """Return the sentences that hold a term, ascending."""
        at = int(np.searchsorted(self.keys, np.uint64(key)))
        if at == len(self.keys) or int(self.keys[at]) != key:
            return self.ids[:0]
        return self.ids[int(self.starts[at]) : int(self.starts[at + 1])]

    def to_bytes(self) -> bytes:
        head = np.array(
            [MAGIC, self.first, self.end, len(self.keys), len(self.ids)], "<u8"
        ).tobytes()
        body = head + self.keys.tobytes() + self.starts.tobytes() + self.ids.tobytes()
        return body + blake3(body).digest()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Segment | None:
        """Return a segment; None for bytes that are not one: it is built anew."""
        if len(raw) < 72 or blake3(raw[:-32]).digest() != raw[-32:]:
            return None
        magic, first, end, keys, ids = (int(n) for n in np.frombuffer(raw, "<u8", 5))
        if magic != MAGIC:
            return None
        found = np.frombuffer(raw, "<u8", keys, 40)
        starts = np.frombuffer(raw, "<u8", keys + 1, 40 + 8 * keys)
        return cls(first, end, found, starts, np.frombuffer(raw, "<u4", ids, 48 + 16 * keys))


class LexicalIndex:
    """All segments of a store."""

    def __init__(self, folder: Path, count: int, text_of: Callable[[int], str]) -> None:
        """Read what the folder has of the first `count` sentences; build the rest from their text."""
        self._folder = folder
        self._segments: list[Segment] = []
        for path in sorted(folder.glob("*.seg")):
            part = Segment.from_bytes(path.read_bytes())
            if part is None or part.first != self.count or part.end > count:
                break
            self._segments.append(part)
        self._num_saved = len(self._segments)
        if self.count < count:
            self.add([text_of(i) for i in range(self.count, count)])

    @property
    def count(self) -> int:
        return self._segments[-1].end if self._segments else 0

    def add(self, texts: Sequence[str]) -> None:
        """Take in the next sentences."""
        if texts:
            self._segments.append(Segment.build(self.count, texts))

    def save(self) -> None:
        """Write what is new; of too many segments make one."""
        if len(self._segments) == self._num_saved:
            return
        if len(self._segments) > MAX_SEGMENTS:
            self._segments, self._num_saved = [Segment.merged(self._segments)], 0
        for number in range(self._num_saved, len(self._segments)):
            files.replace(self._folder / f"{number:04d}.seg", self._segments[number].to_bytes())
        for path in self._folder.glob("*.seg"):
            if int(path.stem) >= len(self._segments):
                path.unlink()
        self._num_saved = len(self._segments)

    def rarest(self, question: str) -> str | None:
        """Return the question's term that the fewest sentences hold, but at least one; None if none holds any."""
        known = [
            (count, word)
            for word in terms(question)
            if (count := sum(len(s.holders(int(_hashes([word])[0]))) for s in self._segments))
        ]
        return min(known)[1] if known else None

    def scores(self, question: str) -> Array:
        """Return for each sentence the share of the question's terms, weighted by rarity, that it holds: [n] fp32.

        A term that no sentence holds counts like one that a single sentence holds: an absent name lowers every score.
        """
        out = np.zeros(self.count, np.float32)
        total = 0.0
        for key in _hashes(terms(question)):
            parts = [s.holders(int(key)) for s in self._segments]
            weight = float(np.log1p(self.count / max(1, sum(len(p) for p in parts))))
            total += weight
            for part in parts:
                out[part] += weight
        return out / total if total else out
