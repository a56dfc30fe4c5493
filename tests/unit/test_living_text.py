"""Sentences, words, choice and confidence of the living memory: properties, and other ways to count. No model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.living_kv.confidence import calibrate, cloze, judge, support
from runtime.living_kv.index import VectorIndex, layer_numbers, projection, statistics_count
from runtime.living_kv.lexical import LexicalIndex, terms
from runtime.living_kv.quote import quote
from runtime.living_kv.select import select
from runtime.living_kv.sentences import (
    MAX_TOKENS,
    byte_offsets,
    readable,
    split_text,
    to_token_spans,
)
from runtime.living_kv.store import Store
from runtime.living_kv.text_store import ingest_text

PIECES = st.text(st.sampled_from("ab1. !?。\n-|`é漢\udc80,"), max_size=400)


def pieces_of(text):
    ends = split_text(text)
    return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]


def test_where_sentences_end():
    parts = [
        "He left. ", '"Why?" ', "she asked! ", "Dr. Moss paid 3.50 e.g. twice. ", "J. Roe came.\n\n", "- one\n",
        "- two\n", "| a | b |\n", "| c | d |\n", "好。", "很好。",
    ]  # fmt: skip
    assert pieces_of("".join(parts)) == parts


def test_code_goes_by_a_dozen_lines():
    code = "```py\n" + "x = 1. \n" * 20 + "```\n"
    parts = pieces_of("Text.\n" + code + "More.")
    assert "".join(parts) == "Text.\n" + code + "More."
    assert max(p.count("\n") for p in parts) == 12


@given(PIECES)
def test_every_character_and_token_is_in_exactly_one_sentence(text):
    offsets = [(i, i + 1) for i, c in enumerate(text) if not c.isspace()]
    if not offsets:
        return
    spans = to_token_spans(split_text(text), offsets)
    assert spans[0].lo == spans[0].start == 0
    assert (spans[-1].hi, spans[-1].end) == (len(offsets), len(text))
    for a, b in itertools.pairwise(spans):
        assert (a.hi, a.end) == (b.lo, b.start)
    assert all(0 < s.hi - s.lo <= MAX_TOKENS for s in spans)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_text_keep_their_place(raw):
    text = raw.decode("utf-8", "surrogateescape")
    at = byte_offsets(text)
    assert at[-1] == len(raw)
    middle = len(text) // 2
    assert raw[: at[middle]] == text[:middle].encode("utf-8", "surrogateescape")
    assert len(readable(text)) == len(text)
    readable(text).encode()


def test_terms():
    assert terms("What is the Code of Überfluß, code 7?") == ["code", "überfluss", "7"]
    assert terms("北京大学") == ["北京", "京大", "大学"]


@given(
    st.lists(st.lists(st.sampled_from(["ash", "bay", "cod", "dew", "elm"]), max_size=6), min_size=1, max_size=30),
    st.lists(st.sampled_from(["ash", "bay", "cod", "zzz"]), min_size=1, max_size=4),
    st.integers(1, 9),
)  # fmt: skip
def test_word_scores_against_the_formula(tmp_path_factory, rows, question, parts):
    texts = [" ".join(row) for row in rows]
    folder = tmp_path_factory.mktemp("lex")
    index = LexicalIndex(folder, 0, lambda i: texts[i])
    for at in range(0, len(texts), parts):
        index.add(texts[at : at + parts])
        index.save()
    read = LexicalIndex(folder, len(texts), lambda i: pytest.fail("it is all in the files"))
    asked = list(dict.fromkeys(question))
    weight = {w: math.log1p(len(texts) / max(1, sum(w in row for row in rows))) for w in asked}
    wanted = [sum(weight[w] for w in asked if w in row) / sum(weight.values()) for row in rows]
    for found in (index, read):
        assert np.allclose(found.scores(" ".join(question)), wanted, atol=1e-6)


def test_a_damaged_word_index_is_built_anew(tmp_path):
    texts = ["ash bay", "cod dew"]
    index = LexicalIndex(tmp_path, 2, lambda i: texts[i])
    index.save()
    (path,) = tmp_path.glob("*.seg")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert LexicalIndex(tmp_path, 2, lambda i: texts[i]).scores("cod").tolist() == [0, 1]


def test_statistics_change_when_the_store_doubles_and_not_between():
    assert [statistics_count(n) for n in (3, 64, 100, 127, 128, 300)] == [3, 64, 64, 64, 128, 256]
    raw = np.random.default_rng(0).standard_normal((130, 8)).astype(np.float16)
    before, after = VectorIndex(raw[:129], 2, 1), VectorIndex(raw, 2, 1)
    question = raw[7]
    assert np.array_equal(before.scores(question), after.scores(question)[:129])
    assert after.scores(question).argmax() == 7


def test_an_index_that_grew_is_one_made_anew():
    """Bit for bit, from within a run of sentences that are normalised together, and over a doubling."""
    rng = np.random.default_rng(3)
    raw = rng.standard_normal((2600, 2 * 24)).astype(np.float16)
    question = rng.standard_normal(2 * 24).astype(np.float16)
    grown = VectorIndex(raw[:0], 2, 1)
    for count in (1, 40, 65, 1030, 1031, 2040, 2100, 2600):
        grown.update(raw[:count])
        anew = VectorIndex(raw[:count], 2, 1)
        assert (grown.version, grown.count) == (anew.version, count)
        assert grown.scores(question).tobytes() == anew.scores(question).tobytes()


def test_projection_keeps_angles_and_layers_are_fractions_of_the_depth():
    matrix = projection(576, 256, 1)
    assert np.allclose(matrix.T @ matrix, np.eye(256), atol=1e-5)
    assert layer_numbers([0.27, 0.40, 0.53], 30) == (7, 11, 15)
    assert layer_numbers([0.27, 0.40, 0.53], 2) == (0,)


def choose(lexical, budget=100, lengths=None, allowed=None, **options):
    lexical = np.array(lexical, np.float32)
    n = len(lexical)
    lengths, allowed = np.array(lengths or [30] * n), np.array(allowed or [True] * n)
    return select(None, lexical, lengths, allowed, budget, 0.15, 24, "lex", **options)


def test_a_clear_winner_stands_alone():
    assert choose([0.2, 0.9, 0.5]).sentences == (1,)
    assert choose([0.2, 0.9, 0.85]).sentences == (1, 2)
    assert choose([0.2, 0.9, 0.5], question="List all of them").sentences == (0, 1, 2)
    assert choose([0.2, 0.9, 0.85], width="narrow").sentences == (1,)


def test_a_short_pick_takes_what_follows_and_the_budget_holds():
    assert choose([0.9, 0.0, 0.0, 0.1], lengths=[5, 10, 12, 30]).sentences == (0, 1, 2)
    assert choose([0.9, 0.88, 0.87, 0.86], budget=65).sentences == (0, 1)
    assert choose([0.9, 0.1], budget=1).sentences == (0,)  # never nothing


def test_what_may_not_be_seen_is_not_chosen():
    assert choose([0.9, 0.1], allowed=[False, True]).sentences == (1,)
    assert choose([0.9], allowed=[False]) is None
    assert judge(None, None).reason == "empty_store"


def test_equal_sentences_go_by_place_and_are_ambiguous():
    found = choose([0.5] * 1000)
    assert found.ranked[0] == 0
    assert judge(found, None).is_low


def test_support_and_cloze():
    assert support("The code is 4821.", "code 4821 stands there") == 1
    assert support("The password is banana", "code 4821") == 0
    assert (
        cloze("The keeper of Orveth hides his key under the anvil.")
        == "The keeper of Orveth hides his key under the"
    )
    assert cloze("Yes.") is None


def test_a_fit_tells_known_from_hidden_sentences():
    """Word scores alone, names that occur once: hiding a sentence must be seen, on sentences held out too."""
    rng = np.random.default_rng(1)
    texts = [
        f"keeper name{i} owns item{rng.integers(9)} colour{rng.integers(9)} number{i}"
        for i in range(200)
    ]
    index = LexicalIndex.__new__(LexicalIndex)
    index._segments, index._num_saved = [], 0
    index.add(texts)

    def ask(question, hidden):
        allowed = np.ones(200, bool)
        if hidden is not None:
            allowed[hidden] = False
        return select(None, index.scores(question), np.full(200, 30), allowed, 60, 0.15, 24, "lex")

    fit = calibrate(texts, ask, index.rarest, 200, 0.05)
    assert fit.held_out_false <= 0.08
    assert fit.held_out_missed <= 0.05
    assert not judge(ask("keeper name5 owns", None), fit).is_low
    assert judge(ask("keeper name777 owns", None), fit).is_low


def test_quotes_are_the_stored_bytes(tmp_path):
    """1,000 sentences, some of odd bytes: each is found by its own rare word and is what was given."""
    lines = [
        f"Line {i} holds word{i} and caf\xe9 {chr(0x4E00 + i)}.\n".encode(
            "utf-8" if i % 7 else "latin-1", "replace"
        )
        for i in range(1000)
    ]
    data = b"\n".join(lines)
    ingest_text(tmp_path / "s", data[:20000], "first", clock=lambda: 0.0)
    ingest_text(tmp_path / "s", data[20000:], "second", clock=lambda: 1e9)
    store = Store.open(tmp_path / "s")
    assert b"".join(store.text_of(i) for i in range(store.commit.sentences)) == data
    for i in range(0, 1000, 13):
        best = quote(store, f"word{i}", 1)[0]
        assert f"word{i} ".encode() in best.text
        assert data[best.byte_offset : best.byte_offset + len(best.text)] == best.text
    assert quote(store, "word999", 1, "session:first") == []
    assert quote(store, "word999", 1, "since:2001-01-01")[0].session == "second"
