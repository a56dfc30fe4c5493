"""Downloads from a stand-in of the hub that stalls, cuts, refuses and lies: nothing is lost or wrong after it.

A run of these tests ends with a table: what was injected, what the user was told, what became of the bytes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hub_machine import BIG, wanted
from hub_server import COMMIT, REPO, Fault, HubServer, sha256
from huggingface_hub import constants

from runtime.errors import UserError, VerificationError
from stages import download
from stages.transfer import INCOMPLETE
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_a_damaged_file_of_the_cache_is_set_aside_and_only_it_is_fetched_again(
    machine, hub, caplog
):
    machine.download()
    blob = machine.blob(BIG)
    before = blob.stat()
    with open(blob, "r+b") as f:
        f.seek(before.st_size // 2)
        byte = f.read(1)
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte[0] ^ 1]))
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    hub.requests.clear()
    assert machine.download(force=["download"]) == wanted(hub)
    assert [name for name, _ in hub.requests if name != "listing"] == [BIG]
    assert f"{BIG} in the hub cache is damaged" in caplog.text
    assert blob.name in caplog.text
    assert list(blob.parent.glob("*.damaged"))


def test_a_damaged_file_offline_is_an_error_that_names_both_hashes(machine, monkeypatch):
    machine.download()
    blob = machine.blob(BIG)
    os.truncate(blob, 1000)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(VerificationError) as caught:
        machine.download()
    assert caught.value.exit_code == 3
    assert BIG in caught.value.message
    assert blob.name in caught.value.message


def test_offline_with_files_missing_says_which(machine, monkeypatch, fault_row):
    machine.download()
    machine.blob(BIG).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        machine.download()
    assert BIG in caught.value.message
    assert "HF_HUB_OFFLINE" in caught.value.hint
    fault_row("a file is missing and HF_HUB_OFFLINE is set", caught.value.message, "the rest is kept")  # fmt: skip


def test_offline_without_anything(machine, monkeypatch, hub):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"nothing of revision {COMMIT}"):
        machine.download()
    assert hub.requests == []


def test_a_cache_that_may_only_be_read(machine, hub, fault_row):
    """Complete, on a read-only mount, as another user's cache is: nothing is written there."""
    machine.download()
    folders = [p for p in (machine.cache, *machine.cache.rglob("*")) if p.is_dir()]
    before = sorted(str(p) for p in machine.cache.rglob("*"))
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert machine.download(artifacts="elsewhere") == wanted(hub)
        assert sorted(str(p) for p in machine.cache.rglob("*")) == before
        fault_row("a hub cache that may only be read", "no links made in it", "used as it is")
    finally:
        for folder in folders:
            folder.chmod(0o755)


# ---- stopped, and two at once ----------------------------------------------------------------------------------------


def test_a_killed_download_goes_on_where_it_was(hub, tmp_path, fault_row):
    """SIGKILL with a shard half here; the next run asks for the rest of it, and for no finished file again."""
    hub.faults[BIG].append(Fault("stall", share=0.6))
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1",
    }
    env.pop("HF_HUB_CACHE", None)
    command = [
        sys.executable, "run.py", "stages=[download]", "model.source=hub", f"model.repo={REPO}",
        f"model.revision={COMMIT}", "model.path=null", "model.files=['*.json','model-*']",
        f"paths.outputs={tmp_path / 'outputs'}", "hub.files_at_once=1",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    blob = tmp_path / "home/hub/models--someone--tiny/blobs" / sha256(hub.commits[COMMIT][BIG])
    partial = blob.with_name(blob.name + INCOMPLETE)
    size = len(hub.commits[COMMIT][BIG])
    try:
        wait_until(lambda: partial.exists() and partial.stat().st_size > 0.4 * size)
    finally:
        process.kill()
        process.communicate()
    have = partial.stat().st_size
    finished = {name for name, _ in hub.requests} - {BIG, "listing"}
    hub.requests.clear()
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"bytes={have}-" in hub.served(BIG)[0]
    assert not finished & {name for name, _ in hub.requests}
    assert blob.read_bytes() == hub.commits[COMMIT][BIG]
    fault_row(
        "kill -9 with a shard 60 % here",
        "nothing: the process is gone",
        f"goes on at byte {have:,}, no file again",
    )


def test_another_run_ends_between_looking_and_fetching(machine, hub, monkeypatch):
    """What was not there a moment ago and is there now: taken over, checked and journalled like all else."""
    check, others = download._HubWork._check, {}

    def check_then_wait(self, files, what):
        check(self, files, what)
        if what == "weights" and not others:
            others["begun"] = True
            others["found"] = machine.download(artifacts="other")

    monkeypatch.setattr(download._HubWork, "_check", check_then_wait)
    assert machine.download(artifacts="one") == wanted(hub) == others["found"]


def test_two_runs_at_once_share_the_work(machine, hub, fault_row):
    """Two projects with one cache: each file is fetched once, both end with the right bytes."""
    hub.faults[BIG].append(Fault("stall", share=0.5))
    results: dict[str, object] = {}

    def run(name: str) -> None:
        try:
            results[name] = machine.download(artifacts=name, **{"hub.stall_s": 2.0})
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            results[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"one": wanted(hub), "two": wanted(hub)}
    starts = [name for name, span in hub.requests if span and span.startswith("bytes=0-")]
    assert len(starts) == len(set(starts))
    assert not list(machine.cache.rglob(f"*{INCOMPLETE}"))
    fault_row(
        "two runs at once, one stalls",
        "the other waits for the file",
        "each file once, both runs end well",
    )


# ---- the table of faults ---------------------------------------------------------------------------------------------

SHORT = "config.json"


def error(status: int, code: str) -> Fault:
    return Fault("refused", status=status, headers={"X-Error-Code": code})


RETRIED = [  # faults that end well: what is injected, where
    ("the line breaks half-way", BIG, [Fault("cut")]),
    ("the line breaks four times, further on each time", BIG, [Fault("cut", 0.4)] * 4),
    ("the line stalls at 99 %", BIG, [Fault("stall", 0.99)]),
    ("the range is ignored on resuming", BIG, [Fault("cut"), Fault("no_range", 1.0)]),
    ("another range than asked for", BIG, [Fault("cut"), Fault("bad_range")]),
    ("HTTP 500, 502, 503", BIG, [Fault("status", status=s) for s in (500, 502, 503)]),
    ("HTTP 429 with Retry-After: 7", BIG, [Fault("status", status=429, headers={"Retry-After": "7"})]),
    ("a signed address that has run out (HTTP 403)", BIG, [Fault("status", status=403)]),
    ("wrong bytes of the right size, once", BIG, [Fault("wrong")]),
    ("a small file with wrong bytes, once", SHORT, [Fault("wrong")]),
    ("more bytes than the listing says, once", BIG, [Fault("longer")]),
]  # fmt: skip
REFUSED = [  # faults that end with a sentence: what, where, the fault each time, what the sentence must hold
    ("wrong bytes of the right size, always", BIG, Fault("wrong"), "came with wrong bytes"),
    ("the line always breaks at the same byte", BIG, Fault("no_range", 0.5), "5 times in a row"),
    ("HTTP 401", BIG, error(401, ""), "refuses"),
    ("HTTP 403, a gated model", BIG, error(403, "GatedRepo"), "refuses"),
    ("HTTP 404 for a file of the listing", BIG, error(404, "EntryNotFound"), "no such file"),
    ("HTTP 451", BIG, Fault("status", status=451), "HTTP 451"),
    ("HTTP 503, always", BIG, Fault("status", status=503), "HTTP 503, 5 times in a row"),
    ("HTTP 429, always", BIG, Fault("status", status=429), "HTTP 429"),
    ("a Git-LFS pointer in the place of a shard", BIG, Fault("pointer"), "Git-LFS pointer"),
]  # fmt: skip


def name_of(value: object) -> str:
    return value if isinstance(value, str) and " " in value else ""


def told(caplog) -> str:
    return " / ".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


@pytest.mark.parametrize(("what", "name", "faults"), RETRIED, ids=name_of)
def test_a_fault_that_is_ridden_out(machine, hub, caplog, fault_row, what, name, faults):
    hub.faults[name].extend(faults)
    assert machine.download() == wanted(hub), "every byte is right"
    assert told(caplog), "the user is told"
    fault_row(
        what, told(caplog), f"all bytes right after {len(hub.served(name))} requests for the file"
    )
    assert not list(machine.cache.rglob(f"*{INCOMPLETE}"))


def test_the_pause_is_as_long_as_the_server_asks(machine, hub):
    hub.faults[BIG].append(Fault("status", status=429, headers={"Retry-After": "7"}))
    hub.listing_faults.append(Fault("status", status=503, headers={"Retry-After": "3"}))
    machine.download()
    # the listing is asked for twice: for the disk's room, and to fetch
    assert (1, 3.0) in machine.pauses
    assert (1, 7.0) in machine.pauses


def test_a_cut_file_is_continued_and_not_begun_again(machine, hub):
    hub.faults[BIG].extend([Fault("cut", 0.5), Fault("cut", 0.5)])
    machine.download()
    starts = [int(span.removeprefix("bytes=").split("-")[0]) for span in hub.served(BIG)]
    assert starts[0] == 0
    assert starts == sorted(set(starts)), "each request goes on behind the last"
    assert hub.sent_nbytes < sum(map(len, wanted(hub).values())) + 300_000


@pytest.mark.parametrize(("what", "name", "fault", "said"), REFUSED, ids=name_of)
def test_a_fault_that_lasts(machine, hub, fault_row, what, name, fault, said):
    """One clear sentence; everything else is kept; the same command ends well when the fault is gone."""
    hub.always[name] = fault
    with pytest.raises(UserError) as caught:
        machine.download()
    assert said in caught.value.message
    assert name in caught.value.message
    assert caught.value.hint
    assert not machine.blob(name).exists(), "a file that is not right has no name in the cache"
    hub.always.clear()
    kept = {n for n in wanted(hub) if n.endswith(".json")}
    hub.requests.clear()
    assert machine.download() == wanted(hub)
    assert not kept & {n for n, _ in hub.requests}, "what was finished is not fetched again"
    fault_row(what, caught.value.message, "the rest is kept; the same command again ends well")


def test_nobody_answers(machine, hub, monkeypatch, fault_row):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as caught:
        machine.download()
    assert "no answer from http://127.0.0.1:9" in caught.value.message
    assert "HTTPS_PROXY" in caught.value.hint
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    machine.download()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert machine.download(artifacts="elsewhere") == wanted(hub), "the cache holds all that is needed"  # fmt: skip
    fault_row("the hub does not answer", caught.value.message, "what the cache has is used")


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://x", "http://[::1"])
def test_an_endpoint_that_is_no_address(machine, monkeypatch, endpoint):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(UserError, match="is no address"):
        machine.download()
    assert machine.pauses == []


def test_something_that_is_no_hub(machine, hub, monkeypatch, fault_row):
    monkeypatch.setattr(HubServer, "listing", lambda *_: {"log in": "please"})
    with pytest.raises(UserError, match="not as the Hugging Face hub does") as caught:
        machine.download()
    fault_row("a log-in page in the place of the hub", caught.value.message, "nothing is fetched")


@pytest.mark.parametrize("path", ["../../escaped.json", "/etc/escaped.json", "a/../../b.json"])
def test_a_listing_cannot_write_outside(machine, hub, path):
    hub.commits[COMMIT][path] = b"{}"
    with pytest.raises(UserError, match="not as the Hugging Face hub does"):
        machine.download(**{"model.files": ["*.json", "*/*", "*/*/*", "*/*/*/*"]})


def test_a_cache_that_cannot_be_written(machine, hub):
    machine.cache.write_text("a file")
    with pytest.raises(UserError) as caught:
        machine.download()
    assert "cannot write to the hub cache" in caught.value.message
    assert "paths.hub=DIR" in caught.value.hint
