"""Bounded replay: what must be exact is, bit for bit; the rest equals the exact arithmetic under a mask."""

from __future__ import annotations

import dataclasses

import deepseek_golden as golden
import pytest
import torch
from deepseek_golden import TINY, make_model, spec_of

from conf.schema import ConfigError, DraftSource
from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.models import deepseek, deepseek_replay
from runtime.models.deepseek_model import Attention, DeepseekModel
from runtime.models.deepseek_replay import BoundedModel, first_bounded_layer
from runtime.models.deepseek_state import DeepseekState

SPEC = spec_of(golden.GOLDEN / "checkpoint")
WINDOW, BOUNDED = SPEC.window, first_bounded_layer(SPEC)
# never multiples of the window, where a wrong place in the ring would not show; the last piece is one or more windows
PIECES = [(WINDOW + 1,), (130,), (450,), (1030,), (37, 101), (130, 3, 2 * WINDOW - 1), (5, 1, 40)]


def make(model_class, monkeypatch, folder=golden.GOLDEN / "checkpoint"):
    with monkeypatch.context() as patch:
        patch.setattr(golden, "DeepseekModel", model_class)
        patch.setattr(golden, "MAX_POSITIONS", 1100)
        return make_model(folder)


@pytest.fixture
def models(monkeypatch):
    return make(DeepseekModel, monkeypatch), make(BoundedModel, monkeypatch)


def tokens_of(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(10, 100, (count,), generator=generator).tolist()


def run(model, tokens, pieces, decoded=6, before=lambda position, size: None):
    """Return the logits after each piece and each of `decoded` more tokens, and the state after the pieces."""
    state, at, logits = model.new_state(), 0, []
    for size in pieces:
        before(at, size)
        piece, at = tokens[at : at + size], at + size
        logits.append(model.prefill(piece, state))
    after = state.tensors()
    before(at, 0)
    logits += [model.decode(token, state) for token in tokens[at : at + decoded]]
    return torch.cat(logits), after


class Masked:
    """The definition, on the exact model: rows of a long piece's end see nothing before the first of them."""

    def __init__(self, monkeypatch):
        self.first, real = 0, Attention._visible

        def visible(attention, kv, start, choice, state):
            old = len(state.window(attention.layer, start))
            entries, slots = real(attention, kv, start, choice, state)
            if attention.layer >= BOUNDED:
                reach = min(WINDOW, old + len(kv))
                rows = torch.arange(start, start + len(kv)).unsqueeze(1)
                positions = slots[:, :reach] + start - old
                hidden = (positions < self.first) & (rows >= self.first)
                slots[:, :reach] = slots[:, :reach].masked_fill(hidden, -1)
            return entries, slots

        monkeypatch.setattr(Attention, "_visible", visible)

    def before(self, position, size):
        self.first = position + size - WINDOW if size > WINDOW else 0


@pytest.mark.parametrize("pieces", PIECES)
def test_it_is_the_exact_arithmetic_under_a_mask(models, monkeypatch, pieces):
    exact, bounded = models
    tokens = tokens_of(sum(pieces) + 6)
    found, state = run(bounded, tokens, pieces)
    mask = Masked(monkeypatch)
    wanted, wanted_state = run(exact, tokens, pieces, before=mask.before)
    assert torch.equal(found, wanted)
    assert state.keys() == wanted_state.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, wanted_state[name]), name


@pytest.mark.parametrize("pieces", PIECES)
def test_entries_keys_and_earlier_windows_are_those_of_an_exact_prompt(models, pieces):
    exact, bounded = models
    tokens = tokens_of(sum(pieces) + 6)
    (found, state), (wanted, wanted_state) = (run(m, tokens, pieces) for m in (bounded, exact))
    later = {f"window.{layer}" for layer in range(BOUNDED + 1, SPEC.num_layers)}
    for name, tensor in state.items():
        assert torch.equal(tensor, wanted_state[name]) == (name not in later), name
    assert not torch.equal(found, wanted), "an approximation"


@pytest.mark.parametrize("pieces", [(WINDOW,), (WINDOW, 5, WINDOW), (1, 2, 3)])
def test_pieces_of_a_window_at_most_are_exact(models, pieces):
    exact, bounded = models
    tokens = tokens_of(sum(pieces) + 6)
    (found, state), (wanted, wanted_state) = (run(m, tokens, pieces) for m in (bounded, exact))
    assert torch.equal(found, wanted)
    assert all(torch.equal(tensor, wanted_state[name]) for name, tensor in state.items())


@pytest.mark.parametrize("chunk", [7, 24])
def test_chunks_do_not_show(models, chunk):
    """In which a GPU takes a prompt."""
    _, bounded = models
    tokens = tokens_of(136)
    wanted, state = run(bounded, tokens, (37, 93))
    bounded.chunk_tokens = chunk
    found, chunked = run(bounded, tokens, (37, 93))
    assert torch.equal(found, wanted)
    assert all(torch.equal(tensor, chunked[name]) for name, tensor in state.items())


def test_all_logits_are_exact(models):
    exact, bounded = models
    tokens = tokens_of(50)
    logits = [m.prefill(tokens, m.new_state(), all_logits=True) for m in (bounded, exact)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("mistake", ["no start of windows", "places of the ring"])
def test_planted_mistakes_show(models, monkeypatch, mistake):
    _, bounded = models
    tokens = tokens_of(136)
    wanted, _ = run(bounded, tokens, (130,))
    if mistake == "no start of windows":  # the ring's zeros take part
        monkeypatch.setattr(DeepseekState, "forget_windows", lambda *_: None)
    else:  # as those of a prompt of their own: right at multiples of the window
        real, first = DeepseekState.remember, 130 - WINDOW

        def shifted(state, layer, start, kv):
            real(state, layer, 0 if start == first else start, kv)

        monkeypatch.setattr(DeepseekState, "remember", shifted)
    found, _ = run(bounded, tokens, (130,))
    assert not torch.allclose(found, wanted, atol=1e-3)


def test_a_state_copied_after_a_prompt_goes_on_as_the_first(models):
    """Where windows start is no part of a copy."""
    _, bounded = models
    tokens = tokens_of(160)
    state, copy = bounded.new_state(), bounded.new_state()
    bounded.prefill(tokens[:131], state)
    copy.restore(state.tensors())
    for token in tokens[131:155]:
        assert torch.equal(bounded.decode(token, state), bounded.decode(token, copy))


def test_a_state_goes_back_to_an_earlier_copy(models):
    _, bounded = models
    tokens = tokens_of(160)
    state = bounded.new_state()
    bounded.prefill(tokens[:20], state)
    copy = state.tensors()
    wanted = bounded.prefill(tokens[20:30], state)
    bounded.prefill(tokens[30:90], state)
    state.restore(copy)
    assert torch.equal(bounded.prefill(tokens[20:30], state), wanted)


def test_it_is_close_to_exact_on_text(monkeypatch, heldout_tokens):
    """The trained model: the next tokens' distributions. One port of the release saw a mean KL of 0.005."""
    exact, bounded = (make(each, monkeypatch, TINY) for each in (DeepseekModel, BoundedModel))
    pieces = (130,)
    (found, _), (wanted, _) = (run(m, heldout_tokens, pieces, 8) for m in (bounded, exact))
    p, q = wanted.log_softmax(-1), found.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert kl.mean() < 0.01, kl
    assert (p.argmax(-1) == q.argmax(-1)).float().mean() >= 0.8


# ---- the option --------------------------------------------------------------------------------------------------


def test_it_is_off_unless_asked_for_and_says_so_once(make_config, caplog):
    for overrides, expected in (
        ({}, DeepseekModel),
        ({"deepseek.arithmetic": "native"}, DeepseekModel),
        ({"deepseek.replay": "bounded"}, BoundedModel),
    ):
        caplog.clear()
        config = make_config("tiny_deepseek", **{"cache.ram_gib": 0.01, **overrides})
        engine = Engine.open(config, EngineFiles(TINY))
        engine.close()
        assert type(engine.model) is expected
        said = [r.getMessage() for r in caplog.records if "replay" in r.getMessage()]
        wanted = [deepseek_replay.describe(spec_of(TINY))] if expected is BoundedModel else []
        assert said == wanted
    assert "approximate, layers 4 to 7 see the last 64 tokens" in said[0]


def test_the_release_replays_from_the_twentieth_layer():
    """Section 3.10 of the specification."""
    released = spec_of(golden.ROOT / "runtime" / "bundled" / "deepseek-v41-flash")
    assert (first_bounded_layer(released), released.window) == (20, 128)


def test_draft_heads_and_gpus_are_refused(make_config):
    spec = dataclasses.replace(spec_of(TINY), num_drafts=3, dspark_block=3)
    config = make_config("tiny_deepseek", **{"deepseek.replay": "bounded", "drafts.enabled": True})
    with pytest.raises(UserError, match="draft heads are seeded from every token"):
        deepseek.check_support(spec, config, torch.device("cpu"))
    config.drafts.source = DraftSource.lookup
    deepseek.check_support(spec, config, torch.device("cpu"))
    with pytest.raises(UserError, match="replay=bounded runs on the CPU only so far"):
        deepseek.check_support(spec, config, torch.device("cuda"))


def test_the_reference_arithmetic_has_neither(make_config):
    for overrides in ({"deepseek.replay": "bounded"}, {"drafts.enabled": True}):
        settings = {"model.setup": ["download", "patch"], "deepseek.arithmetic": "reference"}
        with pytest.raises(ConfigError, match=r"of deepseek.arithmetic=native: leave out"):
            make_config("tiny_deepseek", **settings, **overrides)
