"""The store under kills, full disks and flipped bytes, against copies of what was acknowledged."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import UserError
from runtime.living_kv import files, rewrite
from runtime.living_kv.errors import DiskFullError, StoreLockedError, StoreRefusedError
from runtime.living_kv.layout import Header, new_store_id
from runtime.living_kv.quote import open_lexical, quote
from runtime.living_kv.rewrite import compact
from runtime.living_kv.store import Store, Update

ROOT = Path(__file__).resolve().parents[2]
HEADER = Header(
    new_store_id(), "kv", "2026-01-01T00:00:00Z", codec="fp32", block=16, layers=2, kv_heads=1, head_dim=4,
    vector_values=8,
)  # fmt: skip
PAYLOAD = 2 * 2 * 16 * 4 * 4


def update(seq: int) -> Update:
    """The seq-th commit's contents, from 1: 20 tokens in two sentences, every byte decided by seq."""
    rng = random.Random(seq)
    before, after = 20 * (seq - 1), 20 * seq
    text = f"Sentence {seq} one {rng.random()}. Sentence {seq} two {rng.random()}.\n".encode()
    cut, offset = text.index(b". ") + 2, sum(len(text_of(s)) for s in range(1, seq))
    blocks = [(16 * b, 16, rng.randbytes(PAYLOAD)) for b in range(before // 16, after // 16)]
    lines = (
        [{"id": 0, "name": "s", "tag": "", "started": 0.0, "source": "", "digest": ""}]
        if seq == 1
        else []
    )
    return Update(
        blocks=blocks,
        tokens=[rng.randrange(1000) for _ in range(20)],
        sentences=[(before, before + 9, offset, cut, 0), (before + 9, after, offset + cut, len(text) - cut, 0)],
        vectors=rng.randbytes(2 * 2 * 8),
        text=text,
        sessions=lines,
        tail=rng.randbytes(64 * (after % 16)) or None,
        hot=rng.randbytes(200) if seq % 3 == 0 else None,
    )  # fmt: skip


def text_of(seq: int) -> bytes:
    rng = random.Random(seq)
    return f"Sentence {seq} one {rng.random()}. Sentence {seq} two {rng.random()}.\n".encode()


def filled(root: Path, commits: int) -> Store:
    store = Store.create(root, HEADER)
    for seq in range(1, commits + 1):
        store.append(update(seq))
    return store


def check(root: Path, at_least: int) -> int:
    """Open for reading and writing; everything up to the found commit is byte for byte what was given."""
    for is_writer in (False, True):
        store = Store.open(root, is_writer)
        seq = store.commit.seq
        assert seq >= at_least
        assert store.verify() == []
        updates = [update(s) for s in range(1, seq + 1)]
        assert store.tokens().tolist() == [t for u in updates for t in u.tokens]
        assert store.vectors().tobytes() == b"".join(u.vectors for u in updates)
        wanted = [payload for u in updates for _, _, payload in u.blocks]
        assert [bytes(store.read_block(i)[:PAYLOAD]) for i in range(store.commit.blocks)] == wanted
        stored = b"".join(store.text_of(i) for i in range(store.commit.sentences))
        assert stored == b"".join(u.text for u in updates)
        assert store.tail == ((updates[-1].tail or b"") if seq else b"")
        store.close()
    return seq


WRITER = """
import sys
from pathlib import Path
from runtime.living_kv.store import Store
from tests.property.test_living_store import HEADER, update
store = Store.open(Path(sys.argv[1]), is_writer=True)
while True:
    store.append(update(store.commit.seq + 1))
    print(store.commit.seq, flush=True)
"""


@pytest.mark.slow
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path):
    """20 kills at random moments, each going on with the store that the one before left."""
    root, rng, acknowledged = tmp_path / "store", random.Random(7), 0
    Store.create(root, HEADER).close()
    for _ in range(20):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root)], cwd=ROOT, stdout=subprocess.PIPE
        )
        writer.stdout.readline()  # it is at work
        time.sleep(rng.uniform(0, 0.08))
        writer.kill()
        seen = writer.communicate()[0].split()
        acknowledged = max([acknowledged, *map(int, seen)])
        acknowledged = check(root, acknowledged)
    assert acknowledged >= 20


class Crash(BaseException):
    """The machine stops."""


@pytest.mark.parametrize("fault", ["before a write", "half a write", "before a sync", "no room"])
def test_a_fault_at_every_step_of_a_commit(tmp_path, monkeypatch, fault):
    """Whatever is interrupted, the store is at the commit before or at the new one, whole; and takes the next."""
    template = tmp_path / "template"
    filled(template, 2).close()
    real_write, real_sync = files.write_at, files.sync
    step = 0
    while True:
        root = tmp_path / f"{step}"
        shutil.copytree(template, root)
        store, left = Store.open(root, is_writer=True), [step]

        def is_due(left=left):
            left[0] -= 1
            return left[0] < 0

        def write_at(fd, at, data):
            if fault != "before a sync" and is_due():
                if fault == "no room":
                    real_write(fd, at, bytes(data)[: len(data) // 3])
                    raise OSError(errno.ENOSPC, "No space left on device")
                if fault == "half a write":
                    real_write(fd, at, bytes(data)[: len(data) // 2])
                raise Crash
            real_write(fd, at, data)

        def sync(fd):
            if fault == "before a sync" and is_due():
                raise Crash
            real_sync(fd)

        monkeypatch.setattr(files, "write_at", write_at)
        monkeypatch.setattr(files, "sync", sync)
        try:
            store.append(update(3))
            is_done = True
        except Crash:
            is_done = False
        except DiskFullError:
            is_done = store.commit.seq == 3  # what is refused is not visible in this process either
            assert not is_done
        monkeypatch.undo()
        if fault == "no room" and not is_done:
            store.append(update(3))  # the same store goes on once there is room
            store.close()
            assert check(root, 3) == 3
        else:
            store.close()
            seq = check(root, 3 if is_done else 2)
            store = Store.open(root, is_writer=True)
            store.append(update(seq + 1))
            store.close()
            check(root, seq + 1)
        if is_done:
            break
        step += 1
    assert step >= 9


def complaints(root: Path) -> list[str]:
    """What opening for writing, or verifying, says is wrong."""
    try:
        store = Store.open(root, is_writer=True)
    except StoreRefusedError as error:
        return [str(error)]
    found = [str(problem) for problem in store.verify()]
    store.close()
    return found


def test_any_flipped_byte_is_found_and_named(tmp_path):
    filled(tmp_path / "store", 6).close()
    rng = random.Random(3)
    for path in sorted(
        p for p in (tmp_path / "store").rglob("*") if p.is_file() and p.stat().st_size
    ):
        name = str(path.relative_to(tmp_path / "store"))
        if name in ("LOCK",) or (name.startswith("hot/") and "00000006" not in name):
            continue  # of the commit before: nobody reads them
        for _ in range(4):
            raw = bytearray(path.read_bytes())
            at = rng.randrange(len(raw))
            if name == "commits.log":
                # the last line alone would look like a cut write
                at = rng.randrange(raw.rindex(b"\n", 0, -1))
            raw[at] ^= 1 << rng.randrange(8)
            good = path.read_bytes()
            path.write_bytes(raw)
            found = complaints(tmp_path / "store")
            assert any(name in text for text in found), (name, at, found)
            path.write_bytes(good)
    check(tmp_path / "store", 6)


def test_a_bad_block_is_never_served_and_spoils_only_its_sentences(tmp_path):
    store = filled(tmp_path / "s", 6)
    store.close()
    path = tmp_path / "s" / "kv" / "000001.kvb"
    raw = bytearray(path.read_bytes())
    raw[2 * 4096 + 100] ^= 4  # block 2: tokens 32 to 47
    path.write_bytes(raw)
    store = Store.open(tmp_path / "s")
    assert store.read_block(2) is None
    assert store.read_block(1) is not None
    (problem,) = store.verify()
    wanted = [i for i, s in enumerate(store.sentences) if s["lo"] < 48 and s["hi"] > 32]
    assert problem.sentences == (wanted[0], wanted[-1] + 1)
    assert store.text_of(wanted[0])  # its text is whole


def test_a_second_writer_is_refused_and_readers_see_the_commit_before(tmp_path):
    writer = filled(tmp_path / "s", 2)
    with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}") as refused:
        Store.open(tmp_path / "s", is_writer=True)
    assert refused.value.exit_code == 5
    reader = Store.open(tmp_path / "s")
    writer.append(update(3))
    assert reader.commit.seq == 2
    assert len(reader.tokens()) == 40
    assert Store.open(tmp_path / "s").commit.seq == 3
    writer.close()


def test_a_file_cut_short_takes_the_commit_back_and_stops_writers(tmp_path):
    filled(tmp_path / "s", 3).close()
    path = tmp_path / "s" / "txt" / "000001.txt"
    os.truncate(path, path.stat().st_size - 1)
    assert Store.open(tmp_path / "s").commit.seq == 2
    with pytest.raises(StoreRefusedError, match="1 acknowledged commits would be lost"):
        Store.open(tmp_path / "s", is_writer=True)


def test_what_does_not_exist_or_is_newer_is_said(tmp_path):
    with pytest.raises(UserError, match="there is no store"):
        Store.open(tmp_path / "none")
    with pytest.raises(StoreRefusedError, match="E-VERSION"):
        Store.create(tmp_path / "s", dataclasses.replace(HEADER, format_version=9))


@pytest.mark.parametrize("group", [1, 20, 50])
@pytest.mark.parametrize("gone", [[], [0, 4, 5]])
def test_a_rewrite_in_small_commits_holds_what_one_large_commit_holds(
    tmp_path, monkeypatch, group, gone
):
    stores = []
    for tokens in (10**6, group):
        root = tmp_path / str(tokens)
        store = filled(root, 6)
        if gone:
            store.append(Update(tombstones=gone, tail=store.tail or None))
        store.close()
        monkeypatch.setattr(rewrite, "GROUP_TOKENS", tokens)
        compact(root, is_forgotten=False)
        stores.append(Store.open(root))
    whole, parts = stores
    assert parts.commit.seq > whole.commit.seq == 1
    assert parts.verify() == []
    for name in ("sentences", "tombstones", "sessions", "tail"):
        assert np.array_equal(getattr(parts, name), getattr(whole, name)), name
    assert parts.tokens().tolist() == whole.tokens().tolist()
    assert parts.vectors().tobytes() == whole.vectors().tobytes()
    assert parts.read_hot() == whole.read_hot()
    length = int(whole.sentences["text_len"].sum())
    assert parts.text_range(0, length) == whole.text_range(0, length)
    for number in range(whole.commit.blocks):
        assert bytes(parts.read_block(number)) == bytes(whole.read_block(number))


def test_a_swap_that_was_stopped_says_where_the_store_is(tmp_path):
    root = tmp_path / "s"
    filled(root, 2).close()
    root.rename(tmp_path / "s.bak")
    with pytest.raises(UserError, match="there is no store") as refused:
        Store.open(root)
    assert "s.bak to s" in refused.value.hint


def test_pruned_sentences_are_hidden_then_gone(tmp_path):
    root = tmp_path / "s"
    store = filled(root, 5)
    secret = store.text_of(2)
    store.append(Update(tombstones=[2], tail=store.tail or None))
    assert all(q.sentence_id != 2 for q in quote(store, secret.decode(), 8))
    open_lexical(store).save()
    store.close()
    compact(root, is_forgotten=True)
    assert not root.with_name("s.bak").exists()
    everything = b"".join(p.read_bytes() for p in root.rglob("*") if p.is_file())
    assert secret.split()[-1] not in everything
    store = Store.open(root, is_writer=True)
    assert store.verify() == []
    assert store.text_of(3) == text_of(2)[len(secret) :]
    # layer, K or V, token, dim
    keys = np.frombuffer(store.read_block(1)[:PAYLOAD], "<f4").reshape(2, 2, 16, 4)
    lo, hi = int(store.sentences["lo"][2]), int(store.sentences["hi"][2])
    assert not keys[:, :, lo - 16 : hi - 16].any()
    store.append(Update(tail=store.tail or None))  # and it goes on
    store.close()
