"""Another process goes on: the same bytes, the same numbers, nothing read again; and what belongs to whom."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from conf.schema import AnswerMode, Fuse, KvCodec, StoreKind, Template
from runtime.errors import UserError
from runtime.living_kv.errors import DiskFullError, MemoryUsageError, StoreRefusedError
from runtime.living_kv.identity import check_identity
from runtime.living_kv.store import Store
from runtime.sampling import SamplingParams
from tests.dense_models import open_dense
from tests.living import config, make_snapshot, open_memory, words

GREEDY = SamplingParams(temperature=0, max_tokens=6)
A, B = words(500, 1).encode(), words(430, 2).encode()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(snapshot):
    return open_dense(snapshot)


def contents(root):
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and p.name not in ("HEADER.json", "LOCK")
    }


def settings(**changes):
    return config(template=Template.none, mode=AnswerMode.kv, **changes)


def test_two_processes_write_the_bytes_of_one(snapshot, model, tmp_path):
    one = open_memory(snapshot, tmp_path / "one", settings(), model)
    one.ingest(A, "a")
    one.ingest(B, "b")
    one.close()
    for data, name in ((A, "a"), (B, "b")):
        part = open_memory(snapshot, tmp_path / "two", settings(), model)
        part.ingest(data, name)
        assert not part.was_rebuilt
        part.close()
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_resumed_memory_answers_bit_for_bit_and_reads_no_text(snapshot, model, tmp_path):
    memory = open_memory(snapshot, tmp_path / "s", settings(), model)
    memory.ingest(A, "a")
    question = "w010 w020 w030?"
    prompt = memory.prompt(question)
    before = memory.attend(prompt, memory.find(question))
    tokens = memory.ask(question, GREEDY).tokens
    following = memory.model.prefill(prompt, memory.state)
    memory.close()
    again = open_memory(snapshot, tmp_path / "s", settings(), open_dense(snapshot), is_writer=False)
    assert torch.equal(again.attend(prompt, again.find(question)), before)
    assert again.ask(question, GREEDY).tokens == tokens
    assert torch.equal(again.model.prefill(prompt, again.state), following)
    assert not again.was_rebuilt
    assert again.read_tokens == 0


def test_without_its_snapshot_the_window_is_rebuilt_and_says_so(snapshot, model, tmp_path):
    prompt = [10, 20, 30]
    outs = {}
    for codec in (KvCodec.fp32, KvCodec.k8c_v8t):
        memory = open_memory(snapshot, tmp_path / codec.value, settings(codec=codec), model)
        memory.ingest(A, "a")
        outs[codec] = model.prefill(prompt, memory.state)
        memory.close()
        for path in (tmp_path / codec.value / "hot").glob("*.hot"):
            path.write_bytes(b"damaged")
        again = open_memory(snapshot, tmp_path / codec.value, settings(), model, is_writer=False)
        found = model.prefill(prompt, again.state)
        assert again.was_rebuilt
        if codec is KvCodec.fp32:
            assert torch.equal(found, outs[codec])
        else:
            wanted = outs[codec]
            assert 0 < (found - wanted).abs().max() <= 0.02 * (wanted.max() - wanted.min())
            assert found.argmax() == wanted.argmax()


def test_an_interrupted_text_goes_on_behind_its_last_piece(snapshot, model, tmp_path, monkeypatch):
    whole = open_memory(snapshot, tmp_path / "whole", settings(), model)
    total = whole.ingest(A, "a")
    whole.close()
    memory = open_memory(snapshot, tmp_path / "cut", settings(), model)
    real, left = Store.append, [2]

    def append(self, update):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, update)

    monkeypatch.setattr(Store, "append", append)
    with pytest.raises(KeyboardInterrupt):
        memory.ingest(A, "a")
    monkeypatch.undo()
    memory.close()
    again = open_memory(snapshot, tmp_path / "cut", settings(), model)
    done = again.store.commit.tokens
    assert 0 < done < total
    assert again.ingest(A, "a") == total - done
    cut = again.store.tokens().tolist()
    again.close()
    assert cut == Store.open(tmp_path / "whole").tokens().tolist()
    assert Store.open(tmp_path / "cut").verify() == []
    assert len(Store.open(tmp_path / "cut").sessions) == 1


def test_a_commit_that_fails_behind_the_model_ends_the_text_there(
    snapshot, model, tmp_path, monkeypatch
):
    """The piece after it is being read: its error comes out, nothing behind it is committed, the rest can follow."""
    whole = open_memory(snapshot, tmp_path / "whole", settings(), model)
    whole.ingest(A, "a", progress=(all_done := []).append)
    whole.close()
    memory = open_memory(snapshot, tmp_path / "cut", settings(), model)
    real, seen, done = Store.append, [], []

    def append(self, update):
        seen.append(threading.current_thread())
        if len(seen) == 3:
            raise DiskFullError("E-SPACE: the third", "free some")
        return real(self, update)

    monkeypatch.setattr(Store, "append", append)
    with pytest.raises(DiskFullError, match="the third"):
        memory.ingest(A, "a", progress=done.append)
    assert len(seen) == 3
    assert threading.main_thread() not in seen
    assert memory.store.commit.seq == 2
    assert done == all_done[:2]
    assert memory.state.position == memory.store.commit.tokens
    monkeypatch.undo()
    memory.ingest(A, "a", progress=done.append)
    assert done == all_done
    memory.close()
    # the window came back from 8-bit blocks, so keys differ; what was said does not
    cut, one = (Store.open(tmp_path / name) for name in ("cut", "whole"))
    assert cut.tokens().tolist() == one.tokens().tolist()
    assert cut.sentences.tobytes() == one.sentences.tobytes()
    assert cut.verify() == []


def test_twenty_sessions_do_not_mix(snapshot, model, tmp_path):
    memory = open_memory(snapshot, tmp_path / "s", settings(), model)
    for i in range(20):
        memory.ingest(words(80, i).encode(), f"session {i}", tag="even" if i % 2 == 0 else "odd")
    for i in range(20):
        memory.config.scope = f"session:session {i}"
        found = memory.find("w001 w002 w003?")
        owners = {memory.store.session_of(s).name for s in (*found.sentences, *found.ranked)}
        assert owners == {f"session {i}"}
    memory.config.scope = "tag:odd"
    assert {memory.store.session_of(s).tag for s in memory.find("w001?").ranked} == {"odd"}
    memory.config.scope = "tag:none"
    answer = memory.ask("w001?", GREEDY)
    assert (answer.verdict.is_low, answer.verdict.reason) == (True, "empty_store")
    memory.config.scope = "sessions"
    with pytest.raises(MemoryUsageError, match="not understood"):
        memory.find("w001?")
    memory.close()


def test_a_conversation_is_remembered_by_the_next_process(snapshot, model, tmp_path):
    memory = open_memory(snapshot, tmp_path / "s", settings(), model)
    first = memory.turn("w010 w011 w012 w013 w014.", "talk", GREEDY)
    assert first.verdict.reason == "empty_store"
    memory.turn("w020 w021 w022 w023 w024.", "talk", GREEDY)
    memory.close_session()
    memory.close()
    again = open_memory(snapshot, tmp_path / "s", settings(), model)
    again.turn("w011 w012?", "talk", GREEDY)
    assert not again.was_rebuilt
    again.config.fuse = Fuse.lex  # hidden states of a random model mean nothing
    assert again.find("w012 w013 w014?").ranked[0] == 0
    assert {s.name for s in again.store.sessions} == {"talk"}
    assert again.store.verify() == []
    again.close()


def test_another_model_is_refused_with_both_identities(snapshot, model, tmp_path):
    memory = open_memory(snapshot, tmp_path / "s", settings(), model)
    memory.ingest(A[:300], "a")
    memory.close()
    other = make_snapshot(tmp_path / "other", seed=6)
    store = Store.open(tmp_path / "s")
    check_identity(store.header, model, snapshot)
    with pytest.raises(StoreRefusedError, match=r"E-MODEL: .*weights .* there, .* here") as refused:
        check_identity(store.header, open_dense(other), other)
    assert refused.value.exit_code == 4
    text = dataclasses.replace(store.header, kind=StoreKind.text.value)
    with pytest.raises(StoreRefusedError, match="text only"):
        check_identity(text, model, snapshot)


def test_a_damaged_block_costs_its_tokens_and_nothing_else(snapshot, model, tmp_path):
    memory = open_memory(snapshot, tmp_path / "s", settings(budget=2048), model)
    memory.ingest(A, "a")
    memory.close()
    path = tmp_path / "s" / "kv" / "000001.kvb"
    raw = bytearray(path.read_bytes())
    size = len(raw) // 7
    raw[2 * size + 500] ^= 1
    path.write_bytes(raw)
    again = open_memory(
        snapshot, tmp_path / "s", settings(budget=2048, ram_gib=0.0), model, is_writer=False
    )
    again.attend(again.prompt("w001?"), again.find("w001?"))
    places = set(again.scratch.places[again.scratch._first : again.scratch._hot_at].tolist())
    assert places == set(range(again.scratch.hot_start)) - set(range(128, 192))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 32}, "memory.chunk"),
        ({"recency_tail": 20}, "recency_tail"),
        ({"window": 64}, "sinks"),
    ],
)
def test_settings_that_cannot_work_are_named(snapshot, model, tmp_path, changes, named):
    with pytest.raises(MemoryUsageError, match=named):
        open_memory(snapshot, tmp_path / "s", settings(**changes), model)


def test_edges(snapshot, model, tmp_path):
    memory = open_memory(snapshot, tmp_path / "s", settings(), model)
    for empty in (b"", b"  \n "):
        with pytest.raises(MemoryUsageError, match="no text"):
            memory.ingest(empty, "a")
    memory.ingest(b"w001", "one word")
    memory.ingest(b"\xff\xfe w002 \xc3", "bytes")
    assert memory.store.text_of(1) == b"\xff\xfe w002 \xc3"
    assert memory.ask("w002?", GREEDY).sentences
    with pytest.raises(UserError, match="E-RANGE"):
        memory.ask(words(400), GREEDY)
    with pytest.raises(MemoryUsageError, match="empty"):
        memory.ask(" ", GREEDY)
    memory.close()
