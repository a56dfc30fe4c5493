"""The file of warm experts: whole or not used, whoever damages it; and a save that is killed."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blake3 import blake3

from runtime.experts import warm
from runtime.experts.layout import ExpertKey
from runtime.experts.warm import SAVE_EVERY_S, WarmFile, WarmOwner

ROOT = Path(__file__).resolve().parents[2]
OWNER = WarmOwner("repack 0123", num_layers=3, num_experts=300)
KEYS = [ExpertKey(2, 299), ExpertKey(0, 0), ExpertKey(1, 256)]


@pytest.fixture
def path(tmp_path):
    """A file in a folder that is not there yet."""
    return tmp_path / "warm" / "tiny.warm"


def load(path, owner=OWNER):
    return WarmFile(path, owner).load()


def test_what_was_saved_is_loaded(path, caplog):
    assert load(path) == []
    WarmFile(path, OWNER).save(KEYS)
    assert load(path) == KEYS
    WarmFile(path, OWNER).save([])
    assert load(path) == []
    assert not caplog.records
    assert [p.name for p in path.parent.iterdir()] == ["tiny.warm"]


def test_what_was_loaded_is_colder_than_what_is_warm_now(path):
    """A run that ends at once, or has a small cache, forgets nothing."""
    WarmFile(path, OWNER).save(KEYS)
    for now in ([], [ExpertKey(0, 0), ExpertKey(0, 7)]):
        file = WarmFile(path, OWNER)
        file.load()
        file.save(now)
    assert load(path) == [KEYS[0], KEYS[2], ExpertKey(0, 0), ExpertKey(0, 7)]


def test_every_damage_is_said_and_costs_nothing_else(path, caplog):
    WarmFile(path, OWNER).save(KEYS)
    whole = path.read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << at % 8
        for data in (bytes(flipped), whole[:at]):
            caplog.clear()
            path.write_bytes(data)
            assert load(path) == []
            (record,) = caplog.records
            assert "is not used" in record.message
            assert "the expert cache starts empty" in record.message
    path.write_bytes(whole + b"\0")
    assert load(path) == []


@pytest.mark.parametrize(
    "owner",
    [
        WarmOwner("repack 0124", 3, 300),
        WarmOwner("repack 0123", 4, 300),
        WarmOwner("repack 0123", 3, 301),
    ],
)
def test_another_model_s_file_is_not_used(path, caplog, owner):
    WarmFile(path, OWNER).save(KEYS)
    assert load(path, owner) == []
    assert "it is of other expert files" in caplog.text


@pytest.mark.parametrize("keys", [[ExpertKey(3, 0)], [ExpertKey(0, 300)], [KEYS[0]] * 2])
def test_keys_that_no_cache_can_have(path, caplog, keys):
    """Right by its checksum, wrong in itself: written by other code."""
    WarmFile(path, OWNER).save(keys)
    assert load(path) == []
    assert "names experts that are not there, or one twice" in caplog.text


@pytest.mark.parametrize(
    "head", [b"{}", b"[1]", b'{"key": "k", "count": 0}', b'{"count": 9}', b"?"]
)
def test_a_head_that_other_code_wrote(path, caplog, head):
    data = warm.MAGIC + len(head).to_bytes(8, "little") + head
    path.parent.mkdir()
    path.write_bytes(data + blake3(data).digest())
    assert load(path) == []
    assert "is not used" in caplog.text


def test_a_file_that_cannot_be_read_or_written(path, caplog):
    path.mkdir(parents=True)
    file = WarmFile(path, OWNER)
    assert file.load() == []
    assert "cannot be read: Is a directory" in caplog.text
    file.save(KEYS)
    assert "could not be saved" in caplog.text
    assert list(path.parent.iterdir()) == [path], "nothing half-written"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_fault_while_saving_leaves_the_old_file(path, caplog, monkeypatch, step):
    file = WarmFile(path, OWNER)
    file.save(KEYS)

    def fail(*_args):
        raise OSError(28, os.strerror(28))

    if step == "fsync":
        monkeypatch.setattr(warm.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    file.save(KEYS[:1])
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert load(path) == KEYS
    assert list(path.parent.iterdir()) == [path]


def test_saved_every_so_often(path):
    now = 100.0
    file = WarmFile(path, OWNER, lambda: now)
    for moment, is_saved in ((0, False), (SAVE_EVERY_S - 1, False), (SAVE_EVERY_S, True)):
        now = 100.0 + moment
        file.save_if_due(lambda: KEYS)
        assert path.exists() == is_saved
    path.unlink()
    now += SAVE_EVERY_S - 1
    file.save_if_due(lambda: KEYS)
    assert not path.exists()


SAVER = """
import sys
from pathlib import Path
from runtime.experts.layout import ExpertKey
from runtime.experts.warm import WarmFile, WarmOwner
file = WarmFile(Path(sys.argv[1]), WarmOwner("repack 0123", 3, 300))
for count in range(1, 10**9):
    file.save([ExpertKey(0, count % 300), *(ExpertKey(1, e) for e in range(count % 250))])
    print(count, flush=True)
"""


def test_killed_while_saving(path, caplog):
    """Whenever it is, the file is the last one that was saved, or the one after it, or there is none yet."""
    rng = random.Random(0)
    for _ in range(6):
        command = [sys.executable, "-c", SAVER, str(path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as saver:
            assert saver.stdout is not None
            saver.stdout.readline()
            time.sleep(rng.random() * 0.02)
            saver.send_signal(signal.SIGKILL)
            lines = saver.stdout.read().split()
        last = int(lines[-1]) if lines else 1
        keys = load(path)
        assert len(keys) - 1 in (last % 250, (last + 1) % 250)
        assert keys[0].expert in (last % 300, (last + 1) % 300)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
