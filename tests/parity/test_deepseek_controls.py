"""Damage on purpose to the DeepSeek model must show, and be gone afterwards; and verify's rows see real mistakes."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from kernels import reference_deepseek as ops
from runtime.engine import Engine, EngineFiles
from runtime.models import deepseek, deepseek_checks
from runtime.models.deepseek_controls import CONTROLS, SUBTLE
from stages import verify_rows
from stages.verify_measures import document_ids, read_documents
from tests.parity.deepseek_golden import TINY

RATIO = 1.5
DIVERGENCE = deepseek_checks.CHECKS.least_divergence
FILES = EngineFiles(TINY)


@pytest.fixture(scope="module")
def engine(make_config):
    engine = Engine.open(make_config("tiny_deepseek"), FILES, is_resident=True)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def documents(engine):
    """Four held-out documents as tokens: RoPE in halves spoils the first alone 1.4 times."""
    return [document_ids(engine, text, 500) for text in read_documents(TINY, "en")[:4]]


def all_logits(model, documents):
    return [model.prefill(tokens[:-1], model.new_state(), all_logits=True) for tokens in documents]


@pytest.fixture(scope="module")
def healthy(engine, documents):
    return all_logits(engine.model, documents)


def loss(logits, documents):
    """Mean negative log-likelihood of all documents together."""
    targets = torch.tensor([token for tokens in documents for token in tokens[1:]])
    return float(F.cross_entropy(torch.cat(logits).double(), targets))


def divergence(logits, others):
    right, other = (torch.cat(list(found)).double().log_softmax(-1) for found in (logits, others))
    return float((right.exp() * (right - other)).sum(1).mean())


def test_the_healthy_model_predicts(healthy, documents):
    """Far below the 4,608 of chance: what is spoiled below was good before. (Measured: 1.73.)"""
    found = math.exp(loss(healthy, documents))
    print(f"{found:.3f}")
    assert found < 2


@pytest.mark.parametrize("name", CONTROLS)
def test_control_shows_and_mends(engine, documents, healthy, name):
    model = engine.model
    with CONTROLS[name](model):
        damaged = all_logits(model, documents)
    ratio = math.exp(loss(damaged, documents) - loss(healthy, documents))
    moved = divergence(healthy, damaged)
    print(f"{name}: perplexity {ratio:.3f} times, divergence {moved:.1e}")
    if name in SUBTLE:  # no measure of the text would see these
        assert 0.9 < ratio < 1.1
    else:
        assert not ratio < RATIO  # not a number counts as broken
    assert not moved < DIVERGENCE
    for before, again in zip(healthy, all_logits(model, documents), strict=True):
        assert torch.equal(again, before)


@pytest.mark.parametrize("name", CONTROLS)
def test_control_shows_in_decoding_too(engine, documents, name):
    """A decoded token takes another way to its experts and rows than a prompt."""
    model, tokens = engine.model, documents[0]
    state = model.new_state()
    model.prefill(tokens[:40], state)
    right = model.decode(tokens[40], state)[0]
    state = model.new_state()
    model.prefill(tokens[:40], state)
    with CONTROLS[name](model):
        damaged = model.decode(tokens[40], state)[0]
    moved = float((damaged - right).abs().max())
    print(f"{name}: {moved:.2g}")
    assert not moved < 0.02


@pytest.mark.parametrize("name", CONTROLS)
def test_an_error_inside_leaves_the_model_whole(engine, documents, healthy, name):
    model = engine.model
    with pytest.raises(KeyboardInterrupt), CONTROLS[name](model):
        raise KeyboardInterrupt
    again = model.prefill(documents[1][:-1], model.new_state(), all_logits=True)
    assert torch.equal(again, healthy[1])


# ---- the rows of verify ----------------------------------------------------------------------------------------------


@pytest.fixture
def case(make_config):
    cfg = make_config("tiny_deepseek", **{"cache.ram_gib": 1.0, "verify.control_documents": 2})
    return verify_rows.Case.open(cfg, FILES)


def red(rows):
    return [row.name for row in rows if not row.is_ok]


def test_one_expert_is_equal_to_float64(case):
    (row,) = verify_rows.expert_rows(case)
    assert row.is_ok
    assert row.found == "0.0e+00"


def unrounded(x, gate, up, down, limit, weight=None):
    rounded = ops.act_rounded(x)
    g = ops.block_product(rounded, gate).clamp(max=limit)
    u = ops.block_product(rounded, up).clamp(-limit, limit)
    h = F.silu(g) * u * (1 if weight is None else weight)
    return ops.block_product(ops.act_rounded(h.to(torch.bfloat16)), down)


def weighed_late(x, gate, up, down, limit, weight=None):
    y = swiglu_expert(x, gate, up, down, limit)
    return y if weight is None else (y.float() * weight).to(torch.bfloat16)


def not_clamped(x, gate, up, down, limit, weight=None):
    return swiglu_expert(x, gate, up, down, math.inf, weight)


swiglu_expert = ops.swiglu_expert


@pytest.mark.parametrize("wrong", [unrounded, weighed_late, not_clamped])
def test_a_wrong_expert_is_red(case, monkeypatch, wrong):
    monkeypatch.setattr(ops, "swiglu_expert", wrong)
    assert red(verify_rows.expert_rows(case)) == ["expert arithmetic against float64"]


@pytest.mark.parametrize("place", [0, 1], ids=["codes", "scales"])
def test_wrong_bytes_are_red(case, monkeypatch, place):
    """One value of each matrix: what is compared with is found by its name in the headers."""
    good = deepseek.expert_matrices

    def damaged(*tensors):
        changed = [[t.clone() for t in group] for group in tensors]
        for tensor in changed[place]:
            tensor[5, 1] ^= 0x11 if place == 0 else 1
        return good(*changed)

    monkeypatch.setattr(deepseek, "expert_matrices", damaged)
    assert red(verify_rows.expert_rows(case)) == ["expert arithmetic against float64"]


def test_not_a_number_is_red(case, monkeypatch):
    checks = dataclasses.replace(case.checks, expert_error=lambda *_: math.nan)
    assert red(verify_rows.expert_rows(dataclasses.replace(case, checks=checks)))


def test_wrong_answers_are_red(case, monkeypatch):
    """One recorded question, the shortest; then with rows of Engram that are not the token's."""
    short = min(case.golden["greedy"], key=lambda question: len(question["answer_own_keys_ids"]))
    case = dataclasses.replace(case, golden={"greedy": [short]})
    assert not red(verify_rows.answer_rows(case))
    good = deepseek.EngramHash.row_ids
    monkeypatch.setattr(
        deepseek.EngramHash, "row_ids", lambda self, tokens, context=(): good(self, tokens, ())
    )
    assert red(verify_rows.answer_rows(case)) == ["greedy answers as the reference's"]


def test_no_recorded_answers_no_row(case):
    assert not list(verify_rows.answer_rows(dataclasses.replace(case, golden={})))


def test_a_setting_that_changes_a_token_is_red(case, monkeypatch):
    """The model is damaged under one setting only, as a race of reading ahead might."""
    monkeypatch.setattr(verify_rows, "QUESTIONS", verify_rows.QUESTIONS[:1])
    monkeypatch.setattr(verify_rows, "QUESTION_TOKENS", 4)
    good = deepseek.open_model

    def open_model(spec, files, layout, experts, config, device, dtype):
        model = good(spec, files, layout, experts, config, device, dtype)
        if config.prefetch.experts == 4:
            model.head = model.head.flip(0)
        return model

    monkeypatch.setattr(deepseek, "open_model", open_model)
    rows = list(verify_rows.setting_rows(case))
    assert len(rows) == 5
    assert red(rows) == ["same tokens: no cache, prefetch 4"]


@pytest.mark.slow
def test_perplexity_of_both_languages_is_the_references(case):
    """Of 40 documents asked for, the 30 that the reference has read."""
    english, russian = verify_rows.perplexity_rows(case)
    print(english, russian)
    assert english.name == "perplexity en, 30 documents, 4774 tokens"
    assert russian.name == "perplexity ru, 30 documents, 2519 tokens"
    assert english.wanted == "1.6468 within 1.0%"
    assert russian.wanted == "1.7859 within 1.0%"
    assert english.is_ok
    assert russian.is_ok


@pytest.mark.parametrize(
    ("language", "figure", "tokens", "is_ok"),
    [("en", 1.0, 204, True), ("en", 1.02, 204, False), ("en", 0.98, 204, False), ("en", 1.0, 203, False)],
)  # fmt: skip
def test_perplexity_is_compared_within_a_percent(
    case, engine, documents, healthy, language, figure, tokens, is_ok
):
    """Against a record of two documents: the right figure, 2 % more and less, another count of tokens."""
    assert sum(map(len, documents[:2])) - 2 == 204
    recorded = math.exp(loss(healthy[:2], documents[:2])) * figure
    entry = {"ppl": recorded, "predicted_tokens": tokens}
    golden = {"perplexity": {f"heldout_{language}.txt, first 2 documents": entry}}
    cfg = dataclasses.replace(case.cfg, verify=dataclasses.replace(case.cfg.verify, documents=2))
    rows = list(verify_rows.perplexity_rows(dataclasses.replace(case, cfg=cfg, golden=golden)))
    assert [row.is_ok for row in rows] == [is_ok, True]
    assert rows[1].wanted == "a number (no reference)"
    assert rows[0].name == "perplexity en, 2 documents, 204 tokens"


def test_a_control_that_breaks_nothing_is_red(case, monkeypatch):
    """Neither measure calls a model damaged that is not."""
    nothing = dict.fromkeys(("perplexity", "divergence"), lambda _model: nullcontext())
    checks = dataclasses.replace(case.checks, controls=nothing, subtle_controls={"divergence"})
    rows = list(verify_rows.control_rows(dataclasses.replace(case, checks=checks)))
    assert [row.is_ok for row in rows] == [True, False, False]
    assert rows[0].name.startswith("divergence of a prompt in pieces")
    assert rows[2].found == "divergence 0.0e+00 a token, perplexity 1 times"
