"""A drive that fails, lies, stalls, vanishes or changes under a running engine: an error or the right token.

A run of these tests ends with a table: what was injected, what the user was told, what became of the answer.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from conf.schema import ServeConfig
from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError, VerificationError
from runtime.experts import checks
from runtime.experts.child_reader import ChildReader
from runtime.experts.reader import DirectReader
from runtime.sampling import SamplingParams
from runtime.server.app import create_app
from runtime.server.served import Served
from runtime.server.worker import Worker
from runtime.session import Session
from runtime.snapshot import SnapshotStore
from tests.faulty_drives import ChildDrive

TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
PAGE = 4096


class Drive:
    """A `preadv` with a fault that can be switched on; it counts reads from there."""

    def __init__(self) -> None:
        self.fault = None
        self.reads = 0

    def __call__(self, fd, buffers, offset):
        if self.fault is None:
            return os.preadv(fd, buffers, offset)
        self.reads += 1
        return self.fault(fd, buffers, offset, self.reads)


@pytest.fixture
def drive(monkeypatch) -> Drive:
    """The drive under everything that an engine reads while it runs."""
    made = Drive()
    monkeypatch.setattr(DirectReader.__init__, "__defaults__", (made,))
    return made


@pytest.fixture
def files(tiny_files, tmp_path) -> EngineFiles:
    """A pack that a test may damage."""
    pack = shutil.copytree(tiny_files.pack, tmp_path / "pack")
    return EngineFiles(tiny_files.snapshot, pack, tiny_files.residents)


@pytest.fixture
def question(tiny_qwen) -> list[int]:
    return json.loads((tiny_qwen / "golden_answers.json").read_text())["greedy"][0]["prompt_ids"]


@pytest.fixture
def right(resident_engine, question) -> list[int]:
    """The tokens with every expert in memory."""
    return answer(Session(resident_engine), question)


@pytest.fixture
def open_engine(files, make_config):
    engines = []

    def open_it(**overrides) -> Engine:
        # nothing is kept, so that every token reads
        settings = {
            "cache.ram_gib": 0.0,
            "cache.table_rows": 0,
            "hw.drive.pieces": 6,
            "hw.drive.piece_kib": 4,
            **overrides,
        }
        engines.append(Engine.open(make_config(**settings), files))
        return engines[-1]

    yield open_it
    for engine in engines:
        engine.close()


def answer(session: Session, prompt: list[int]) -> list[int]:
    return [p.token for p in session.generate(prompt, GREEDY) if p.token is not None]


def up_to_the_error(session: Session, prompt: list[int]) -> tuple[list[int | None], UserError]:
    """Return the tokens that were given out before the error, and the error."""
    given = []
    try:
        for piece in session.generate(prompt, GREEDY):
            given.append(piece.token)  # noqa: PERF401 - an error would lose a list in the making
    except UserError as error:
        return given, error
    pytest.fail("there was no error")


def error_at(number: int, code: int, lasting: bool = False):
    def fault(fd, buffers, offset, reads):
        if reads == number or (lasting and reads >= number):
            raise OSError(code, os.strerror(code))
        return os.preadv(fd, buffers, offset)

    return fault


def short(fd, buffers, offset, _reads):
    return os.preadv(fd, [buffers[0][:PAGE]], offset)


def empty(number: int):
    def fault(fd, buffers, offset, reads):
        return 0 if reads >= number else os.preadv(fd, buffers, offset)

    return fault


FAILING = [  # what, the fault, what the error must say, what its hint must say
    ("EIO once, in the prompt", error_at(3, errno.EIO), "Input/output error", "dmesg"),
    ("EIO once, while decoding", error_at(1000, errno.EIO), "Input/output error", "dmesg"),
    ("EIO from then on", error_at(900, errno.EIO, True), "Input/output error", "dmesg"),
    ("the drive is pulled out (ENODEV)", error_at(900, errno.ENODEV, True), "No such device", "the drive is gone"),
    ("the drive is gone (ENXIO)", error_at(2, errno.ENXIO, True), "No such device or address", "the drive is gone"),
    ("a network drive goes away (ENOTCONN)", error_at(900, errno.ENOTCONN, True), "not connected", "the drive is gone"),
    ("no memory for the read (ENOMEM)", error_at(900, errno.ENOMEM), "Cannot allocate memory", "dmesg"),
    ("reads that give nothing", empty(900), "the drive gives no more bytes", "dmesg"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "fault", "said", "hint"), FAILING, ids=[f[0] for f in FAILING])
def test_a_read_that_fails(fault_row, drive, open_engine, question, right, what, fault, said, hint):
    """The request fails with one clear error; what came before it is right, and so is the next answer."""
    session = Session(open_engine())
    assert answer(session, question) == right
    session.reset()
    drive.fault = fault
    given, error = up_to_the_error(session, question)
    assert given == right[: len(given)], "no wrong token before the error"
    assert said in error.message
    assert hint in error.hint
    assert "layer" in error.message or "table rows" in error.message
    drive.fault = None
    assert answer(session, question) == right
    fault_row(what, error.message, f"{len(given)} right tokens, then right again")


def test_short_reads_are_no_fault(fault_row, drive, open_engine, question, right):
    drive.fault = short
    session = Session(open_engine())
    assert answer(session, question) == right
    assert drive.reads > 1000
    fault_row("one page of each read", "nothing: the rest is asked for", "right tokens")


def test_a_drive_that_stalls_is_waited_for_and_named(
    fault_row, drive, open_engine, question, right, caplog, monkeypatch
):
    monkeypatch.setattr(checks, "SILENT_S", 0.1)
    session = Session(open_engine())

    def stall(fd, buffers, offset, reads):
        if 200 <= reads < 208:  # every thread of the reader
            time.sleep(0.6)
        return os.preadv(fd, buffers, offset)

    drive.fault = stall
    with caplog.at_level(logging.WARNING):
        assert answer(session, question) == right
    assert "the drive has given nothing for" in caplog.text
    fault_row("the drive stalls", caplog.records[0].getMessage(), "right tokens")


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_changes_under_a_running_engine(
    fault_row, open_engine, files, question, right, verify, process
):
    """Same size, other bytes: no token of the new bytes is given out, whether or not checksums are compared."""
    session = Session(open_engine(**{"cache.verify": verify, "hw.drive.process": process}))
    assert answer(session, question) == right
    pack = files.pack / "experts.bin"
    size = pack.stat().st_size
    time.sleep(0.02)  # the kernel's clock of file times ticks every few milliseconds
    with open(pack, "r+b") as f:
        f.write(os.urandom(size))
    session.reset()
    given, error = up_to_the_error(session, question)
    assert given == []
    assert "written to while it was in use" in error.message
    assert "start again" in error.hint
    fault_row("the pack is overwritten", error.message, "no token given")


@pytest.mark.parametrize("process", [False, True])
def test_a_file_that_is_cut_under_a_running_engine(
    fault_row, open_engine, files, question, process
):
    session = Session(open_engine(**{"hw.drive.process": process}))
    os.truncate(files.pack / "experts.bin", PAGE)
    with pytest.raises(UserError) as caught:
        answer(session, question)
    # said by the reads behind the cut, or by one before it that finds the file changed
    assert re.search(
        "the file ends at byte 4,096|written to while it was in use", caught.value.message
    )
    fault_row("the pack is cut", caught.value.message, "no token given")


@pytest.mark.parametrize("ram_gib", [0.0, 1.0])
def test_wrong_bytes_that_no_error_tells_of(
    fault_row, drive, open_engine, question, right, ram_gib
):
    """A bit turns on its way: with cache.verify=true the expert is named, and no token is made of it."""
    session = Session(open_engine(**{"cache.verify": True, "cache.ram_gib": ram_gib}))

    def turned(fd, buffers, offset, reads):
        got = os.preadv(fd, buffers, offset)
        if reads == 40:
            buffers[0][100] ^= 4
        return got

    drive.fault = turned
    given, error = up_to_the_error(session, question)
    assert isinstance(error, VerificationError)
    assert given == right[: len(given)]
    assert "came from" in error.message
    assert "with wrong bytes" in error.message
    assert "spot_check" in error.hint
    drive.fault = None
    assert answer(session, question) == right
    fault_row("a bit turns in a read", error.message, "right again")


@pytest.fixture
def child_drive(monkeypatch, tmp_path) -> ChildDrive:
    """The drive under the reader process of the engine that a test opens."""
    (tmp_path / "drive").mkdir()
    made = ChildDrive(tmp_path / "drive")
    monkeypatch.setitem(ChildReader.__init__.__kwdefaults__, "command", made.command)
    return made


PROCESS = {"hw.drive.process": True, "prefetch.experts": 0}


def pages(files: EngineFiles, offset: int) -> set[tuple[int, int]]:
    inode = (files.pack / "experts.bin").stat().st_ino
    return {(inode, at) for at in range(offset, 2**24, PAGE)}


@pytest.mark.parametrize(
    ("what", "code", "said", "hint"),
    [
        ("EIO", errno.EIO, "Input/output error", "dmesg"),
        ("ENODEV", errno.ENODEV, "No such device", "the drive is gone"),
    ],
)
def test_a_read_of_the_reader_process_that_fails(
    fault_row, child_drive, open_engine, files, question, right, what, code, said, hint
):
    session = Session(open_engine(**PROCESS))
    assert answer(session, question) == right
    session.reset()
    child_drive.settle(errno=code)
    child_drive.bad = pages(files, 2**23)  # of the later layers
    given, error = up_to_the_error(session, question)
    assert given == right[: len(given)]
    assert re.search(r"layer \d+, expert \d+ from .*experts.bin at byte", error.message)
    assert said in error.message
    assert hint in error.hint
    child_drive.bad = set()
    assert answer(session, question) == right
    fault_row(f"{what}, reader process", error.message, "right again")


def test_a_silent_drive_of_the_reader_process_is_named(
    child_drive, open_engine, files, question, right, caplog, monkeypatch
):
    monkeypatch.setattr(checks, "SILENT_S", 0.05)
    session = Session(open_engine(**PROCESS))
    child_drive.gated = pages(files, 2**23)

    def stall() -> None:
        assert child_drive.is_waiting.wait(60)
        time.sleep(0.3)
        child_drive.gate.set()

    threading.Thread(target=stall).start()
    with caplog.at_level(logging.WARNING):
        assert answer(session, question) == right
    assert "the drive has given nothing for" in caplog.text


def test_wrong_bytes_from_the_reader_process(child_drive, open_engine, files, question, right):
    """Noise that no error tells of: the expert is named, no token is made of it."""
    session = Session(open_engine(**PROCESS, **{"cache.verify": True}))
    child_drive.settle(noise_after=60)
    given, error = up_to_the_error(session, question)
    assert isinstance(error, VerificationError)
    assert given == right[: len(given)]
    assert "with wrong bytes" in error.message
    child_drive.settle(noise_after=None)
    assert answer(session, question) == right


def test_the_reader_process_is_killed_in_the_middle_of_a_token(
    fault_row, child_drive, open_engine, files, question, right
):
    """One clear error, and again for the next answer; closing the engine works."""
    engine = open_engine(**PROCESS)
    session, pid = Session(engine), engine._streamer._reader.pid
    assert answer(session, question) == right
    session.reset()
    child_drive.gated = pages(files, 2**23)

    def kill() -> None:
        assert child_drive.is_waiting.wait(60)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    given, error = up_to_the_error(session, question)
    killer.join()
    assert given == right[: len(given)]
    assert f"the process that reads experts (pid {pid}) was ended by signal 9" in error.message
    session.reset()
    again, error = up_to_the_error(session, question)
    assert again == []
    assert f"(pid {pid})" in error.message
    engine.close()
    assert not Path(f"/proc/{pid}").exists()
    fault_row("the reader process is killed", error.message, "no wrong token")


def test_verified_reads_give_the_same_tokens(open_engine, question, right):
    for overrides in ({"cache.ram_gib": 0.0}, {"cache.ram_gib": 1.0}):
        session = Session(open_engine(**{"cache.verify": True, **overrides}))
        assert answer(session, question) == right
        assert answer(session, question) == right


def test_checksums_that_are_cut(make_config, files):
    os.truncate(files.pack / "checksums.bin", 8)
    with pytest.raises(UserError, match="not one checksum per run"):
        Engine.open(make_config(**{"cache.verify": True}), files)


def test_the_server_stays_up(fault_row, drive, open_engine, tiny_codec):
    """A request that meets a failing drive gets an error of its own; the next one is answered."""
    served = Served("tiny", "tiny-1", tiny_codec, 4096, "0.1", None)
    worker = Worker(served, open_engine, lambda _: SnapshotStore(0), 4, lambda: None)
    app = create_app(worker, ServeConfig())
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is a whale?"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    worker.start()
    try:
        with TestClient(app, raise_server_exceptions=False) as client:
            until = time.monotonic() + 60
            while client.get("/health").status_code != 200:
                assert time.monotonic() < until
                time.sleep(0.05)
            before = client.post("/v1/chat/completions", json=body)
            assert before.status_code == 200
            # other words: the first answer's timeline must not be what answers
            other = body | {"messages": [{"role": "user", "content": "What is 8 + 9?"}]}
            drive.fault = error_at(1, errno.EIO, lasting=True)
            for _ in range(2):
                failed = client.post("/v1/chat/completions", json=other)
                assert failed.status_code >= 500
                assert "ReadError" in failed.json()["error"]["message"]
                assert "experts.bin" not in failed.text  # paths stay in the log
                assert "Traceback" not in failed.text
                assert client.get("/health").status_code == 200
            drive.fault = None
            after = client.post("/v1/chat/completions", json=body)
            content = [r.json()["choices"][0]["message"]["content"] for r in (before, after)]
            assert content[0] == content[1]
    finally:
        worker.stop()
        worker.join(10)
    fault_row(
        "EIO under the server", failed.json()["error"]["message"], "the next request is answered"
    )


def test_a_drive_that_vanished_before_the_start(files, make_config):
    (Path(files.pack) / "experts.bin").unlink()
    with pytest.raises(UserError, match="expert pack is truncated"):
        Engine.open(make_config(), files)
