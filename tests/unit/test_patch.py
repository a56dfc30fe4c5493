"""The patch stage on a stand-in for the release's code: one line changes, or nothing does and a sentence says why."""

import hashlib
import os

import pytest
from blake3 import blake3

from runtime.errors import UserError, VerificationError
from stages import patch
from stages.core import Runner
from tests.standin import know_the_standin, make_snapshot

RELEASED = b"    num_stages = 0 if round_scale or inplace else 2\n"
CHANGED = b"    num_stages = 2\n"


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    found = make_snapshot(tmp_path / "snapshot")
    know_the_standin(monkeypatch, found)
    return found


@pytest.fixture
def kernel(snapshot):
    return snapshot / "inference" / "kernel.py"


@pytest.fixture
def make_runner(snapshot, tmp_path, make_config):
    def make(**overrides):
        settings = {"model.path": str(snapshot), "model.revision": patch.REVISION, **overrides}
        return Runner(make_config("tiny_deepseek", **settings), tmp_path / "artifacts")

    return make


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def assert_refused(runner, snapshot, match, error=VerificationError):
    before = contents(snapshot)
    with pytest.raises(error, match=match) as caught:
        runner.run(["patch"])
    assert caught.value.hint
    assert contents(snapshot) == before
    assert runner.find("patch") is None
    left = runner.folder("patch").with_name(runner.folder("patch").name + ".partial")
    assert not list(left.glob("*.py"))  # nothing that could be taken for a patched file


def test_one_line_is_changed_shown_and_recorded(make_runner, snapshot, kernel, capsys):
    runner, before = make_runner(), contents(snapshot)
    runner.run(["patch"])
    output = runner.find("patch")
    old, new = kernel.read_bytes(), (output.root / "kernel.py").read_bytes()
    assert old.count(RELEASED) == 1
    assert new == old.replace(RELEASED, CHANGED)
    assert contents(snapshot) == before
    shown = capsys.readouterr().out
    for line in (f"-{RELEASED.decode()}", f"+{CHANGED.decode()}"):
        assert line in shown
    for what, data in (("before", old), ("after", new)):
        found = output.facts[what]
        assert found["sha256"] == hashlib.sha256(data).hexdigest()
        assert found["blake3"] == blake3(data).hexdigest()
        assert found["sha256"] in shown
    for name in ("model.py", "engram.py", "config.json"):
        assert (output.root / name).read_bytes() == (kernel.parent / name).read_bytes()
    assert runner.decide("patch").action == "skip"


def test_the_other_line_of_the_same_name_stays(make_runner, kernel, monkeypatch, snapshot):
    other = b"\n\ndef other_kernel(round_scale, inplace):\n" + RELEASED + b"    return num_stages\n"
    kernel.write_bytes(kernel.read_bytes() + other)
    know_the_standin(monkeypatch, snapshot)
    runner = make_runner()
    runner.run(["patch"])
    new = (runner.find("patch").root / "kernel.py").read_bytes()
    assert new.endswith(other)
    assert new.count(CHANGED) == 1


def test_unknown_file(make_runner, snapshot, kernel):
    kernel.write_bytes(kernel.read_bytes() + b"# one comment more\n")
    assert_refused(make_runner(), snapshot, "kernel.py is not the known file: SHA-256")
    runner = make_runner(**{"patch.allow_unknown": True})
    runner.run(["patch"])
    assert not runner.find("patch").facts["is_known"]


@pytest.mark.parametrize("allow_unknown", [False, True])
def test_patched_already(make_runner, snapshot, kernel, allow_unknown):
    kernel.write_bytes(kernel.read_bytes().replace(RELEASED, CHANGED))
    runner = make_runner(**{"patch.allow_unknown": allow_unknown})
    assert_refused(runner, snapshot, "is patched already")


@pytest.mark.parametrize("allow_unknown", [False, True])
def test_crlf(make_runner, snapshot, kernel, allow_unknown):
    kernel.write_bytes(kernel.read_bytes().replace(b"\n", b"\r\n"))
    runner = make_runner(**{"patch.allow_unknown": allow_unknown})
    assert_refused(runner, snapshot, "CRLF line ends")


@pytest.mark.parametrize("name", ["kernel.py", "model.py", "engram.py", "config.json"])
def test_missing_files(make_runner, snapshot, name):
    (snapshot / "inference" / name).unlink()
    assert_refused(make_runner(), snapshot, f"has no {name}", UserError)


def test_another_revision(make_runner, snapshot):
    runner = make_runner(**{"model.revision": "93cb8a5"})
    assert_refused(runner, snapshot, f"model.revision is 93cb8a5.*{patch.REVISION}")
    make_runner(**{"model.revision": "93cb8a5", "patch.allow_unknown": True}).run(["patch"])


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b"", 0),
        (b"    num_stages = 3 if round_scale or inplace else 2\n", 0),
        (b"    num_stages = 0 if round_scale and inplace else 2\n", 0),
        (RELEASED + RELEASED, 2),
        (b"    num_stages = (0 if round_scale\n        or inplace else 2)\n", 1),
    ],
    ids=["none", "other value", "other condition", "two", "over two lines"],
)
def test_unknown_is_allowed_but_exactly_one_line_is_demanded(
    make_runner, snapshot, kernel, line, count
):
    kernel.write_bytes(kernel.read_bytes().replace(RELEASED, line))
    runner = make_runner(**{"patch.allow_unknown": True})
    assert_refused(runner, snapshot, f"has {count} lines in act_quant_kernel")


def test_a_crash_while_writing_leaves_no_output(make_runner, monkeypatch):
    runner = make_runner()
    good = os.fsync

    def fail(fd):
        if "kernel.py" in os.readlink(f"/proc/self/fd/{fd}"):
            raise KeyboardInterrupt
        good(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        runner.run(["patch"])
    assert runner.find("patch") is None
    monkeypatch.undo()
    # the stand-in's hash is unknown again
    runner = make_runner(**{"patch.allow_unknown": True})
    runner.run(["patch"])
    assert patch.is_patched((runner.find("patch").root / "kernel.py").read_bytes())


def test_the_released_hash_is_the_published_one():
    """Of the release at its pinned revision; its BLAKE3 is not published."""
    assert patch.KNOWN_SHA256["kernel.py"].startswith("1236c3507019ed17")
    assert patch.REVISION == "dba1be0a40aa45a94ad051997016db3960a90277"
