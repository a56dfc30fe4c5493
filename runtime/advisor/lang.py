"""Which language a text is in: by script, then by the commonest words. No model; decides only over twenty words."""

from __future__ import annotations

import re
from collections import Counter

MIN_WORDS = 20
_STOP_WORDS = {
    "en": "the of and to in is that for it with as are on be this you at by not or from have can which but if was will",
    "de": "der die das und ist nicht mit ein eine den von zu auf für sich dem es im auch als wird sind oder bei",
    "pl": "nie na się jest to że do jak co tak za od po przez dla ale czy już może być są tylko oraz lub bez ten",
    "fr": "le la les de des et est un une pour que dans qui pas sur avec ce il au par plus ne sont ou vous mais du en",
    "es": "el la los las de que y en un una es por con no para su al lo como más pero o se del son muy sin está",
    "it": "il lo la gli le di che e un una è per non con del della si da come più anche ma sono o nel questo alla",
    "ru": "и в не на что с это как по но для из к у от за так же его бы или если вы мы при только можно есть нет",
    "uk": "і в не на що з це як по але для із до у від за так його або якщо ви ми при тільки можна є немає та",
}  # fmt: skip
_WORDS = {language: frozenset(words.split()) for language, words in _STOP_WORDS.items()}


def visible(text: str) -> str:
    """Return a text without code, addresses and numbers."""
    text = re.sub(r"```.*?(```|\Z)", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|https?://\S+", " ", text)
    return re.sub(r"[\w.,-]+", lambda word: " " if re.search(r"\d", word[0]) else word[0], text)


def detect(text: str, ignore: frozenset[str] = frozenset()) -> str | None:
    """Return en, de, ru, uk, pl, fr, es, it, zh or ja; None for fewer than twenty words or no clear language.

    ignore: words in lower case that are names.
    """
    text = visible(text)
    kana = len(re.findall(r"[぀-ヿ]", text))
    han = len(re.findall(r"[一-鿿]", text))
    if kana + han >= MIN_WORDS and kana + han > len(re.findall(r"[A-Za-zÀ-ɏЀ-ӿ]", text)) / 2:
        return "ja" if kana > 0.1 * (kana + han) else "zh"
    words = [w for w in re.findall(r"[^\W\d_]+", text.lower()) if w not in ignore]
    if len(words) < MIN_WORDS:
        return None
    cyrillic = sum(bool(re.search(r"[Ѐ-ӿ]", w)) for w in words)
    candidates = ("ru", "uk") if cyrillic > len(words) / 2 else ("en", "de", "pl", "fr", "es", "it")
    counts = Counter({lang: sum(w in _WORDS[lang] for w in words) for lang in candidates})
    if candidates == ("ru", "uk"):
        counts["uk"] += 3 * len(re.findall(r"[іїєґ]", text.lower()))
        counts["ru"] += 3 * len(re.findall(r"[ыэъё]", text.lower()))
    (best, score), (_, second) = counts.most_common(2)
    return best if score >= 2 and score > 1.2 * second else None
