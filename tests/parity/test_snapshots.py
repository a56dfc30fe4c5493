"""Conversations that go on from copies: the same bits as the run that was never interrupted, for both families."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from runtime.engine import Engine, EngineFiles
from runtime.sampling import SamplingParams
from runtime.session import Cancelled, Session
from runtime.snapshot import SnapshotStore
from tests.parity.deepseek_golden import GOLDEN

MIB = 2**20
FAMILIES = ("tiny", "tiny_deepseek", "drafts")
CONSTANT = {"spec", "version", "reach", "device"}  # of a state: what is no part of a conversation


@pytest.fixture
def open_family(make_config, tiny_qwen, tiny_files):
    """Return a function that opens a new engine of a family: what a restart does."""
    engines = []
    files = {
        "tiny": tiny_files,
        "tiny_deepseek": EngineFiles(tiny_qwen.parent / "tiny-deepseek"),
        "drafts": EngineFiles(GOLDEN / "checkpoint"),
    }

    def open_engine(family, **overrides):
        model = "tiny" if family == "tiny" else "tiny_deepseek"
        fields = {"cache.ram_gib": 1.0, "drafts.enabled": family == "drafts"}
        context = {"model.context_tokens": 400, **overrides}
        engines.append(Engine.open(make_config(model, **fields, **context), files[family]))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def make_prompt(engine, heldout_tokens, start, count):
    size = engine.codec.vocab_size
    return [token % size for token in heldout_tokens[start : start + count]]


def answer(session, prompt, count=6):
    params = SamplingParams(temperature=0.0, max_tokens=count)
    return [piece.token for piece in session.generate(prompt, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_is_the_uninterrupted_runs(open_family, heldout_tokens, tmp_path, family):
    """Uninterrupted; with another conversation in between; after a restart of everything."""
    engine = open_family(family)
    prompt = make_prompt(engine, heldout_tokens, 0, 40)
    more = make_prompt(engine, heldout_tokens, 100, 9)
    plain = Session(engine)
    first = answer(plain, prompt)
    second = prompt + first + more
    wanted = plain.sync(second).clone()
    assert plain.cached_tokens == len(prompt) + len(first) - 1

    store = SnapshotStore(64 * MIB, tmp_path, 64 * MIB)
    session = Session(engine, store)
    assert answer(session, prompt) == first
    session.sync(make_prompt(engine, heldout_tokens, 200, 30))
    assert torch.equal(session.sync(second), wanted)
    assert session.cached_tokens == len(prompt) + len(first) - 1
    store.close()

    restarted = open_family(family)
    again = SnapshotStore(64 * MIB, tmp_path, 64 * MIB)
    session = Session(restarted, again)
    # a turn that is already over: all of it is there
    assert torch.equal(session.sync(second), wanted)
    assert session.cached_tokens == len(second)
    again.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_restart_only_the_new_tail_is_read(open_family, heldout_tokens, tmp_path, family):
    engine = open_family(family)
    prompt = make_prompt(engine, heldout_tokens, 0, 40)
    more = make_prompt(engine, heldout_tokens, 100, 9)
    store = SnapshotStore(64 * MIB, tmp_path, 64 * MIB)
    first = answer(Session(engine, store), prompt)
    store.close()
    plain = Session(engine)
    assert answer(plain, prompt) == first
    second = prompt + first + more
    wanted = plain.sync(second)
    session = Session(open_family(family), SnapshotStore(64 * MIB, tmp_path, 64 * MIB))
    assert torch.equal(session.sync(second), wanted)
    assert session.cached_tokens == len(prompt) + len(first) - 1
    assert session.prefill_stats.num_tokens == len(second) - session.cached_tokens
    assert answer(session, second) == answer(plain, second)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_at_every_kind_of_position(open_family, heldout_tokens, tmp_path, family):
    """Odd and even, before and behind windows and blocks: from 16 to 130, through the file."""
    engine = open_family(family)
    tokens = make_prompt(engine, heldout_tokens, 0, 140)
    live, store = Session(engine), SnapshotStore(256 * MIB, tmp_path, 256 * MIB)
    saved = Session(engine, store)
    at = [16, 17, 31, 32, 33, 47, 63, 64, 65, 66, 95, 127, 128, 129, 130]
    wanted = {}
    for position in at:
        live.sync(tokens[:position])
        saved.sync(tokens[:position])
        assert store.flush(30)
        branch = Session(engine)
        branch._state.restore(live._state.tensors())
        branch.tokens = list(live.tokens)
        wanted[position] = [branch.sync(tokens[: position + n]).clone() for n in (1, 5)]
    store.close()
    again = SnapshotStore(256 * MIB, tmp_path, 256 * MIB)
    assert again.num_saved == len(at)
    for position in reversed(at):
        other = [*tokens[:position], (tokens[position] + 1) % engine.codec.vocab_size]
        session = Session(engine, again)
        session.sync(other)  # departs right behind: no later copy fits
        assert session.cached_tokens == position
    for position in at:
        store = SnapshotStore(256 * MIB)
        store.add(again.longest(tokens[:position]))
        session = Session(engine, store)
        found = [session.sync(tokens[: position + n]).clone() for n in (1, 5)]
        assert session.cached_tokens == position + 1
        assert all(torch.equal(a, b) for a, b in zip(found, wanted[position], strict=True))
    again.close()


def leaves(state, path=()):
    """Yield the path to each thing that a state holds."""
    if dataclasses.is_dataclass(state):
        names = [field.name for field in dataclasses.fields(state)]
    elif isinstance(state, dict):
        names = list(state)
    elif isinstance(state, (torch.Tensor, int, list)):
        yield path
        return
    else:
        names = [name for name in vars(state) if name not in CONSTANT]
    for name in names:
        yield from leaves(at_path(state, (name,)), (*path, name))


def at_path(state, path):
    for name in path:
        state = state[name] if isinstance(state, dict) else getattr(state, name)
    return state


def change(state, path):
    """Change one thing that a state holds."""
    owner, name = at_path(state, path[:-1]), path[-1]
    value = at_path(owner, (name,))
    if isinstance(value, torch.Tensor):
        value = value + 1
    else:
        value = value + 1 if isinstance(value, int) else [value[0] + 1, *value[1:]]
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_a_state_holds_is_copied(open_family, heldout_tokens, family):
    engine = open_family(family)
    session = Session(engine)
    # odd: tails and open blocks are not empty
    session.sync(make_prompt(engine, heldout_tokens, 0, 77))
    whole = session._state.tensors()
    paths = list(leaves(session._state))
    assert len(paths) > 10
    for path in paths:
        if path[-1] in ("length", "oldest", "position"):
            continue  # told by the sizes of what is copied, and by the position below
        if "_windows_start" in path:
            continue  # of no weight once a window of tokens has followed, which bounded replay sees to
        if isinstance(at_path(session._state, path), list) and not at_path(session._state, path):
            continue  # drafts have no context
        copy = engine.new_state()
        copy.restore(whole)
        before = copy.tensors()
        assert all(torch.equal(before[name], whole[name]) for name in whole)
        change(copy, path)
        after = copy.tensors()
        assert any(not torch.equal(after[name], whole[name]) for name in whole), path
    assert int(whole["position"]) == 77


# ---- where copies are made -------------------------------------------------------------------------------------------


def test_copies_in_a_long_prompt_and_at_the_shared_beginning(open_family, heldout_tokens):
    engine = open_family("tiny", **{"model.prefill_tokens": 16, "snapshots.every_tokens": 32})
    tokens = make_prompt(engine, heldout_tokens, 0, 100)
    store = SnapshotStore(256 * MIB)
    session = Session(engine, store)
    session.sync(tokens, shared=70)
    # the next multiple of 32, 96, is inside the last piece: the copy is at its end
    assert [n for n in range(1, 101) if store.has(tokens[:n])] == [32, 64, 70, 100]
    departed = [*tokens[:72], 1, 2, 3]
    session.sync(departed)
    assert session.cached_tokens == 70
    plain = Session(engine)
    plain.sync(tokens[:70])
    assert torch.equal(session.sync(departed), plain.sync(departed))


def test_a_prompt_that_is_given_up_goes_on_where_it_was(open_family, heldout_tokens):
    """Also in the middle of a piece, where a copy of the state before it is at hand."""
    engine = open_family("tiny", **{"model.prefill_tokens": 32, "snapshots.every_tokens": 32})
    tokens = make_prompt(engine, heldout_tokens, 0, 100)
    wanted = Session(engine).sync(tokens).clone()
    store = SnapshotStore(256 * MIB)
    session = Session(engine, store)
    asked = []

    def is_cancelled():
        asked.append(len(session.tokens))
        return asked.count(64) == 4  # in the third piece, after some layers

    with pytest.raises(Cancelled):
        session.sync(tokens, is_cancelled)
    assert session.tokens == []
    session.sync(make_prompt(engine, heldout_tokens, 200, 20))
    assert torch.equal(session.sync(tokens), wanted)
    assert session.cached_tokens == 64
