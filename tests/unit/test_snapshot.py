"""Copies of conversations: found by what a prompt begins with, bounded, and on the disk whole or not at all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.snapshot import (
    ASIDE,
    SUFFIX,
    TEMPORARY,
    Snapshot,
    SnapshotError,
    SnapshotStore,
    make_key,
    read_snapshot,
    write_snapshot,
)

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def make(*tokens: int, nbytes: int = 1000) -> Snapshot:
    """A state that can be told from every other by its tokens."""
    seed = torch.Generator().manual_seed(hash(tokens) % 2**31)
    rows = torch.randn(nbytes // 8, 1, generator=seed)
    tensors = {
        "position": torch.tensor([len(tokens)]),
        "keys.3": rows.to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "strided": rows.expand(-1, 2).t()[:1],
    }
    return Snapshot(tokens, tensors, torch.randn(1, 7, generator=seed))


def same(a: Snapshot | None, b: Snapshot) -> bool:
    assert a is not None
    assert a.tokens == b.tokens
    assert a.tensors.keys() == b.tensors.keys()
    pairs = [(a.tensors[n], b.tensors[n]) for n in a.tensors] + [(a.logits, b.logits)]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def settle(store: SnapshotStore) -> None:
    store.close()


# ---- in RAM ----------------------------------------------------------------------------------------------------------

timelines = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8)


@settings(max_examples=60)
@given(stored=timelines, prompt=st.lists(st.integers(0, 2), max_size=8), known=st.integers(0, 4))
def test_the_longest_beginning_is_found(stored, prompt, known):
    store = SnapshotStore(MIB)
    for tokens in stored:
        store.add(make(*tokens, nbytes=80))
    fits = [t for t in stored if prompt[: len(t)] == t and len(t) > known]
    found = store.longest(prompt, more_than=known)
    if fits:
        assert same(found, make(*max(fits, key=len), nbytes=80))
    else:
        assert found is None


def test_a_token_of_several_bytes_is_not_found_by_half():
    store = SnapshotStore(MIB)
    store.add(make(0x01020304, 5))
    assert store.longest([0x01020304]) is None
    assert store.longest([0x01020304, 5, 6]) is not None
    assert store.longest([0x01020305, 5, 6]) is None


def test_the_least_recently_used_goes_first_and_the_bytes_stay_within_the_limit():
    size = make(1).nbytes
    store = SnapshotStore(3 * size)
    for token in (1, 2, 3):
        store.add(make(token))
    assert store.longest([1, 9]) is not None  # used again
    store.add(make(4))
    assert [store.has([t]) for t in (1, 2, 3, 4)] == [True, False, True, True]
    assert store.used_nbytes == 3 * size
    store.add(make(5, nbytes=100 * size))  # larger than all: not kept, and nothing goes for it
    assert len(store) == 3
    store.add(make(4))
    assert len(store) == 3


def test_nothing_is_kept_without_room():
    store = SnapshotStore(0)
    assert not store.is_enabled


# ---- on the disk -----------------------------------------------------------------------------------------------------


def test_a_restart_finds_what_was_saved(tmp_path):
    store = SnapshotStore(MIB, tmp_path / "key", MIB)
    for tokens in ([1], [1, 2], [1, 2, 3], [7]):
        store.add(make(*tokens), is_saved=tokens != [7])
        assert store.flush(30)
    settle(store)
    again = SnapshotStore(MIB, tmp_path / "key", MIB)
    assert again.num_saved == 3
    assert len(again) == 0
    assert same(again.longest([1, 2, 3, 4]), make(1, 2, 3))
    assert again.has([1, 2, 3])
    assert again.longest([7]) is None
    assert again.longest([1, 2, 9], more_than=2) is None
    settle(again)
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "key").iterdir())


def test_the_disk_is_bounded_and_the_oldest_goes(tmp_path):
    size = write_snapshot(tmp_path / f"x{SUFFIX}", make(1))
    store = SnapshotStore(MIB, tmp_path / "key", int(2.5 * size))
    for token in (1, 2, 3):
        store.add(make(token))
        assert store.flush(30)
    settle(store)
    again = SnapshotStore(MIB, tmp_path / "key", int(2.5 * size))
    assert again.saved_nbytes <= 2.5 * size
    assert [again.longest([t]) is not None for t in (1, 2, 3)] == [False, True, True]
    settle(again)


def test_a_full_disk_costs_one_copy_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    store = SnapshotStore(MIB, tmp_path, MIB)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    store.add(make(1))
    assert store.flush(30)
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())
    assert "No space left" in caplog.text
    assert store.has([1])
    store.add(make(2))
    settle(store)
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


def test_every_flipped_byte_is_noticed(tmp_path):
    path = tmp_path / f"a{SUFFIX}"
    write_snapshot(path, make(1, 2, 3))
    whole = path.read_bytes()
    drawn = random.Random(1)
    places = {*range(40), *(drawn.randrange(len(whole)) for _ in range(60)), len(whole) - 1}
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(SnapshotError):
            read_snapshot(path)
    for end in (0, 10, 100, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(SnapshotError):
            read_snapshot(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(SnapshotError):
        read_snapshot(path)
    path.write_bytes(whole)
    assert same(read_snapshot(path), make(1, 2, 3))


@pytest.mark.parametrize("place", [20, -1])
def test_a_damaged_file_is_put_aside_and_a_shorter_one_used(tmp_path, place):
    store = SnapshotStore(MIB, tmp_path, MIB)
    for tokens in ([1], [1, 2]):
        store.add(make(*tokens))
        assert store.flush(30)
    settle(store)
    longer = max(tmp_path.glob(f"*{SUFFIX}"), key=lambda p: len(read_snapshot(p).tokens))
    raw = bytearray(longer.read_bytes())
    raw[place] ^= 1
    longer.write_bytes(raw)
    again = SnapshotStore(MIB, tmp_path, MIB)
    assert same(again.longest([1, 2, 3]), make(1))
    settle(again)
    assert len(list(tmp_path.glob(f"*{ASIDE}"))) == 1
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 1


WRITER = """
import sys, itertools, torch
from pathlib import Path
from runtime.snapshot import Snapshot, SnapshotStore
store = SnapshotStore(2**30, Path(sys.argv[1]), 2**30)
for i in itertools.count():
    store.add(Snapshot((5, i), {"x": torch.full((400_000,), float(i))}, torch.zeros(1, 3)))
    print(i, flush=True)
"""


@pytest.mark.parametrize("writes", [3, 8])
def test_killed_in_the_middle_of_a_write(tmp_path, writes):
    """kill -9: the store opens, what was whole is intact, the half-written one is no snapshot."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        while len(list(tmp_path.glob(f"*{SUFFIX}"))) < writes:
            process.stdout.readline()
        # in a write, not between two
        while not list(tmp_path.glob(f"*{TEMPORARY}")):
            pass
        os.kill(process.pid, signal.SIGKILL)
    whole = list(tmp_path.glob(f"*{SUFFIX}"))
    (tmp_path / f"other{TEMPORARY}").write_bytes(b"half")
    store = SnapshotStore(2**30, tmp_path, 2**30)
    assert store.num_saved == len(whole) >= writes
    assert not list(tmp_path.glob(f"*{TEMPORARY}"))
    for path in whole:
        number = read_snapshot(path).tokens[1]
        found = store.longest([5, number, 1])
        assert found is not None
        assert torch.equal(found.tensors["x"], torch.full((400_000,), float(number)))
    store.add(make(9))
    settle(store)
    assert SnapshotStore(2**30, tmp_path, 2**30).longest([9]) is not None


def test_the_key_names_every_fact():
    facts = {"revision": "a", "pieces": 512}
    assert make_key(facts) == make_key(dict(reversed(facts.items())))
    assert len({make_key(facts), make_key(facts | {"pieces": 511}), make_key({})}) == 3
