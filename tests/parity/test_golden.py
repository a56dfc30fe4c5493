"""Recorded answers of the reference implementation (runtime/bundled/tiny-qwen/golden_answers.json)."""

import json

import pytest

from runtime.sampling import SamplingParams
from runtime.session import Session

LOGIT_TOLERANCE = 1e-3  # the recorded logits have four digits after the point


@pytest.fixture(scope="module")
def golden(tiny_qwen):
    found = json.loads((tiny_qwen / "golden_answers.json").read_text())["greedy"]
    assert len(found) == 8
    return found


@pytest.mark.parametrize("ram_gib", [0, 1], ids=["no cache", "everything cached"])
def test_greedy_answers(open_tiny, golden, ram_gib):
    engine = open_tiny(**{"cache.ram_gib": ram_gib})
    for question in golden:
        prompt = question["prompt_ids"]
        session = Session(engine)
        logits = session.sync(prompt)[0]
        for token, value in question["last_prompt_logits_top5"]:
            assert abs(float(logits[token]) - value) < LOGIT_TOLERANCE
        params = SamplingParams(temperature=0, max_tokens=len(question["answer_ids"]))
        pieces = list(session.generate(prompt, params))
        assert [piece.token for piece in pieces] == question["answer_ids"], question["question"]
        assert "".join(piece.text for piece in pieces) == question["answer"]
