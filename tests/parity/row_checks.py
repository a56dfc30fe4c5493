"""What passes with drafts are held to, on a CPU and on a GPU."""

from __future__ import annotations

import torch

from runtime.session import Session


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def check_rows(model, tokens, start, rows):
    """Attempts of which the first `count` tokens are right, for every count, against single steps."""
    right, after = tokens[start : start + rows], tokens[start + rows]
    plain, state = model.new_state(), model.new_state()
    for each in (plain, state):
        model.prefill(tokens[:start], each)
    logits, states = [], [plain.tensors()]
    for token in right:
        logits.append(model.decode(token, plain))
        states.append(plain.tensors())
    for count in range(rows + 1):
        attempt = model.attempt(right[:count] + [7] * (rows - count), state)
        assert torch.equal(attempt.logits[:count], torch.cat(logits)[:count])
        for kept in sorted({count, count // 2, 0}, reverse=True):
            attempt.keep(kept)
            assert state.position == start + kept
            assert same(state.tensors(), states[kept])
    model.attempt(right, state)
    assert torch.equal(model.decode(after, state), model.decode(after, plain))
    assert same(state.tensors(), plain.tensors())


def answer(engine, prompt, params):
    """Return the tokens of an answer in a conversation of its own."""
    return [piece.token for piece in Session(engine).generate(prompt, params)]


def check_half_right(engine, wanted, prompt, params):
    """The answer with guesses of which every third is wrong is `wanted`, and some of them are of use."""
    engine.drafting.source, before = HalfRight(wanted, len(prompt)), engine.drafting.report()
    assert answer(engine, prompt, params) == wanted
    report = engine.drafting.report()
    accepted, proposed = (report[key] - before[key] for key in ("accepted", "proposed"))
    assert 5 < accepted < proposed
    assert report["passes"] - before["passes"] < len(wanted)


class HalfRight:
    """Guesses what the answer is, and every third token wrongly."""

    def __init__(self, answer, start):
        self.answer, self.start = answer, start

    def propose(self, tokens, token, state, depth):
        at = len(tokens) - self.start + 1
        guesses = self.answer[at : at + depth]
        return [guess if (at + i) % 3 else (guess + 1) % 100 for i, guess in enumerate(guesses)]
