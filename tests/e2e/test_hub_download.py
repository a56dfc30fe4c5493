"""Downloads from a stand-in of the hub that stalls, cuts, refuses, lies and moves: nothing is lost or wrong after it.

A run of these tests ends with a table: what was injected, what the user was told, what became of the bytes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest
from hub_server import COMMIT, NEXT_COMMIT, REPO, Fault, HubServer, sha256, wait_until
from huggingface_hub import close_session, constants

from runtime.checkpoint import Checkpoint
from runtime.errors import UserError, VerificationError
from stages import download
from stages.core import Runner
from stages.transfer import INCOMPLETE, Patience

ROOT = Path(__file__).resolve().parents[2]
NUM_SHARDS = 4
DRAFT = "model-draft.safetensors"
BIG = "model-00002-of-00004.safetensors"


def shard(tensors: dict[str, bytes]) -> bytes:
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def make_files(seed: int = 0) -> dict[str, bytes]:
    """A small repository: four shards of text tensors, one of drafts alone, and files that nobody wants."""
    noise = random.Random(seed)
    names = [f"model-{i:05}-of-{NUM_SHARDS:05}.safetensors" for i in range(1, NUM_SHARDS + 1)]
    files = {name: shard({f"layers.{i}.w": noise.randbytes(300_000)}) for i, name in enumerate(names)}  # fmt: skip
    files[DRAFT] = shard({"mtp.0.w": noise.randbytes(200_000)})
    weight_map = {f"layers.{i}.w": name for i, name in enumerate(names)} | {"mtp.0.w": DRAFT}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files |= {"config.json": b"{}", "tokenizer.json": b'{"version": "1.0"}', "README.md": b"# x"}
    files["inference/model.py"] = b"print()\n"
    return files


@pytest.fixture
def hub():
    with HubServer(make_files()).running() as server:
        yield server


class Machine:
    """This machine's side: config, cache folder, artifacts; pauses are noted and not waited for."""

    def __init__(self, hub: HubServer, root: Path, make_config) -> None:
        self.hub, self.root, self._make_config = hub, root, make_config
        self.cache = root / "hub"
        self.pauses: list[tuple[int, float | None]] = []

    def runner(self, artifacts: str = "artifacts", **overrides) -> Runner:
        settings = {
            "model.source": "hub", "model.repo": REPO, "model.revision": COMMIT, "model.path": None,
            "model.files": ["*.json", "model-*.safetensors", "inference/*.py"], "model.leave_out": ["mtp.*"],
            "paths.hub": str(self.cache), "hub.stall_s": 0.2, "hub.retries": 4, "hub.files_at_once": 2,
        }  # fmt: skip
        cfg = self._make_config(**{**settings, **overrides})
        return Runner(cfg, self.root / artifacts)

    def download(self, **overrides) -> dict[str, bytes]:
        """Run the stage; return the snapshot's files."""
        runner = self.runner(**overrides)
        runner.run(["download"])
        snapshot = Path(runner.find("download").facts["snapshot"])
        return {
            p.relative_to(snapshot).as_posix(): p.read_bytes()
            for p in snapshot.rglob("*")
            if p.is_file()
        }

    def blob(self, name: str) -> Path:
        return self.cache / "models--someone--tiny/blobs" / sha256(self.hub.commits[COMMIT][name])


@pytest.fixture
def machine(hub, tmp_path, make_config, monkeypatch) -> Machine:
    close_session()
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Machine(hub, tmp_path, make_config)

    def wait(_self: Patience, attempt: int, retry_after_s: float | None) -> float:
        made.pauses.append((attempt, retry_after_s))
        return 0.0

    monkeypatch.setattr(Patience, "wait", wait)
    return made


def wanted(hub: HubServer, commit: str = COMMIT) -> dict[str, bytes]:
    """What a snapshot must hold, byte for byte, but for the index, which names no draft."""
    files = {n: d for n, d in hub.commits[commit].items() if n not in (DRAFT, "README.md")}
    index = json.loads(files["model.safetensors.index.json"])
    del index["weight_map"]["mtp.0.w"]
    files["model.safetensors.index.json"] = json.dumps(index, indent=1).encode() + b"\n"
    return files


# ---- what is fetched, and where it lies ------------------------------------------------------------------------------


def test_only_the_wanted_files_of_one_commit(machine, hub):
    assert machine.download() == wanted(hub)
    assert {name for name, _ in hub.requests} == {"listing", *wanted(hub)}
    output = machine.runner().find("download")
    assert output.facts["commit"] == COMMIT
    assert output.facts["not_fetched"] == [DRAFT]
    assert sorted(Checkpoint.open(Path(output.facts["snapshot"])).tensors) == [
        f"layers.{i}.w" for i in range(NUM_SHARDS)
    ]


def test_the_cache_is_laid_out_as_other_tools_expect_it(machine, hub):
    from huggingface_hub import try_to_load_from_cache

    machine.download()
    for name, data in hub.commits[COMMIT].items():
        found = try_to_load_from_cache(REPO, name, cache_dir=machine.cache, revision=COMMIT)
        if name in wanted(hub):
            assert Path(found).read_bytes() == data
        else:
            assert found is None


def test_nothing_is_copied(machine):
    machine.download()
    folder = machine.runner().folder("download")
    real = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    assert {p.name for p in real} == {"record.json", "model.safetensors.index.json"}


def test_all_tensors_when_nothing_is_left_out_or_drafts_are_used(machine, hub):
    everything = {n: d for n, d in hub.commits[COMMIT].items() if n != "README.md"}
    assert machine.download(**{"model.leave_out": []}) == everything
    assert machine.download(**{"drafts.enabled": True}) == everything


def test_what_another_tool_has_fetched_is_used(machine, hub):
    blob = machine.blob(BIG)
    blob.parent.mkdir(parents=True)
    blob.write_bytes(hub.commits[COMMIT][BIG])
    assert machine.download() == wanted(hub)
    assert hub.served(BIG) == []


def test_a_second_run_asks_for_nothing(machine, hub):
    machine.download()
    asked = len(hub.requests)
    assert machine.runner().decide("download").action == "skip"
    machine.download()
    assert len(hub.requests) == asked
    machine.download(artifacts="elsewhere")
    assert {name for name, _ in hub.requests[asked:]} == {"listing"}, "other artifacts, the same cache"  # fmt: skip


def test_a_token_is_sent(machine, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    machine.download()
    assert set(hub.tokens) == {"Bearer hf_secret"}


def test_the_environment_is_read_by_a_process_of_its_own(hub, tmp_path):
    """HF_ENDPOINT, HF_HOME (with odd letters) and HF_TOKEN from the environment; then offline."""
    env = {
        **os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "дом, a=b"), "HF_TOKEN": "hf_x",
        "NO_PROXY": "127.0.0.1", "HYDRA_FULL_ERROR": "1",
    }  # fmt: skip
    env.pop("HF_HUB_CACHE", None)

    def run(outputs: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable, "run.py", "stages=[download]", "model.source=hub", f"model.repo={REPO}",
            f"model.revision={COMMIT}", "model.path=null", "model.files=['*.json','model-*']",
            f"paths.outputs={tmp_path / outputs}",
        ]  # fmt: skip
        return subprocess.run(
            command,
            cwd=ROOT,
            env=env | more,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = run("out puts")
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr, "no terminal, no bar"
    assert (tmp_path / "дом, a=b/hub/models--someone--tiny/blobs").is_dir()
    assert set(hub.tokens) == {"Bearer hf_x"}
    asked = len(hub.requests)
    done = run("offline", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(hub.requests) == asked


def test_a_model_of_the_hub_becomes_the_same_pack(tiny_qwen, tmp_path, make_config, monkeypatch):
    """The bundled model by way of the hub: the later stages make the same bytes of it."""
    files = {path.name: path.read_bytes() for path in tiny_qwen.iterdir()}
    with HubServer(files).running() as hub:
        close_session()
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        machine = Machine(hub, tmp_path, make_config)
        runner = machine.runner(**{"model.files": ["*.json", "*.jinja", "model-*.safetensors"]})
        runner.run(["residents", "repack"])
    direct = Runner(make_config(), tmp_path / "direct")
    direct.run(["residents", "repack"])
    for stage, name in (("repack", "experts.bin"), ("residents", "residents.safetensors")):
        fetched, bundled = (r.find(stage).record["files"][name]["blake3"] for r in (runner, direct))
        assert fetched == bundled


# ---- revisions -------------------------------------------------------------------------------------------------------


def test_main_moves_in_the_middle_and_all_files_are_of_one_commit(machine, hub, fault_row):
    hub.commits[NEXT_COMMIT] = make_files(seed=1)
    hub.faults["model-00001-of-00004.safetensors"].append(Fault("move"))
    files = machine.download(**{"model.revision": "main"})
    assert hub.main == NEXT_COMMIT
    assert files == wanted(hub, COMMIT)
    fault_row(
        "main moves while files are fetched",
        "the commit that main was",
        "all files are of that one commit",
    )
    assert machine.runner(**{"model.revision": "main"}).find("download").facts["commit"] == COMMIT


def test_a_later_run_says_that_main_has_moved_and_keeps_the_files(machine, hub, caplog):
    moving = {"model.revision": "main"}
    machine.download(**moving)
    hub.commits[NEXT_COMMIT] = make_files(seed=1)
    hub.main = NEXT_COMMIT
    assert machine.download(**moving) == wanted(hub, COMMIT)
    assert f"has moved from {COMMIT} to {NEXT_COMMIT}" in caplog.text
    assert machine.download(**moving, force=["download"]) == wanted(hub, NEXT_COMMIT)


def test_an_unknown_revision_or_repository(machine):
    with pytest.raises(UserError, match="no such revision"):
        machine.download(**{"model.revision": "c" * 40})
    with pytest.raises(UserError) as caught:
        machine.download(**{"model.repo": "no/such"})
    assert "no repository no/such" in caught.value.message
    assert "HF_TOKEN" in caught.value.hint


def test_an_index_that_names_files_which_are_not_there(machine, hub):
    del hub.commits[COMMIT][BIG]
    with pytest.raises(UserError, match=f"names 1 files which are not there: {BIG}"):
        machine.download()
    assert hub.served("model-00001-of-00004.safetensors") == [], "no shard was fetched for nothing"


# ---- disk ------------------------------------------------------------------------------------------------------------


def free_disk(monkeypatch, nbytes: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2**40, 2**40, nbytes))


def test_too_little_disk_is_said_before_the_first_byte(machine, hub, monkeypatch, fault_row):
    free_disk(monkeypatch, 64 * 2**20 + 500_000)
    with pytest.raises(UserError) as caught:
        machine.download()
    assert "download" in caught.value.message
    assert "paths.hub" in caught.value.hint
    assert {name for name, _ in hub.requests} == {"listing"}
    fault_row("too little disk for a download", caught.value.message, "not a byte fetched")


def test_only_what_is_missing_counts_as_needed(machine, hub, monkeypatch):
    hub.always[BIG] = Fault("refused", status=403)
    with pytest.raises(UserError):
        machine.download()
    del hub.always[BIG]
    free_disk(monkeypatch, 64 * 2**20 + 310_000)  # room for the one shard that is missing
    for number in (1, 3, 4):
        name = f"model-{number:05}-of-00004.safetensors"
        machine.blob(name).write_bytes(hub.commits[COMMIT][name])
    assert machine.download() == wanted(hub)


def test_a_dry_run_counts_what_is_here_already(machine, hub):
    """Also half of a shard, and files of a download that never ended."""
    total = sum(map(len, wanted(hub).values()))
    known = {"model.files_gib": total / 2**30}
    assert room(machine.runner(**known)) == pytest.approx(total, abs=1000)
    hub.faults[BIG].append(Fault("cut", 0.5))
    hub.always[BIG] = Fault("status", status=503)
    with pytest.raises(UserError):
        machine.download(**{"hub.files_at_once": 1})
    left = room(machine.runner(**known))
    # two shards were not begun, and half of another is missing
    assert left == pytest.approx(2.5 * 300_000, abs=3000)
    hub.always.clear()
    machine.download(**known)
    assert room(machine.runner(**known)) == 0


def room(runner: Runner) -> int:
    return sum(room.need_nbytes for room in runner.expected_disk(["download"]))


def test_a_disk_that_is_full_after_all(machine, hub, fault_row):
    """The kernel refuses to let a file grow; what is here is kept, and the same command goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(UserError) as caught:
            machine.download()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"download ran out of disk in {machine.cache}" in caught.value.message
    hub.requests.clear()
    assert machine.download() == wanted(hub)
    spans = [span for name, span in hub.requests if name.endswith(".safetensors")]
    assert any(not span.startswith("bytes=0-") for span in spans), "begun files go on"
    fault_row("no room for the file to grow", caught.value.message, "kept, and goes on")


def test_a_cache_without_file_locks(machine, monkeypatch, fault_row):
    real = fcntl.flock

    def flock(fd, flags):
        if "blobs" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        real(fd, flags)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError) as caught:
        machine.download()
    assert "has no file locks: Function not implemented" in caught.value.message
    assert "paths.hub=DIR" in caught.value.hint
    fault_row("a hub cache without file locks", caught.value.message, "said at the first file")


def test_pauses_grow_and_have_an_end():
    slept = []
    patience = Patience(1.0, 3, slept.append)
    seconds = [patience.wait(attempt, None) for attempt in range(1, 12)]
    assert slept == seconds
    for attempt, pause in enumerate(seconds):
        assert 0.75 * min(30, 2**attempt) <= pause <= 1.25 * min(30, 2**attempt)
    assert patience.wait(1, 60.0) == 60.0
    assert patience.wait(1, 1e6) == 300.0


def test_the_later_stages_count_too(machine, hub, monkeypatch):
    """`repack` and `residents` know their sizes from the released config alone."""
    free_disk(monkeypatch, 20 * 2**30)
    released = {"model.released": str(ROOT / "runtime/bundled/qwen38-flash-next")}
    with pytest.raises(UserError, match=r"repack 63\.\d+ GiB, residents \d+\.\d+ GiB"):
        machine.runner(**released).run(["repack", "residents"])
    assert {name for name, _ in hub.requests} == {"listing"}


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
        wait_until(lambda: partial.exists() and partial.stat().st_size > 0.4 * size, 60)
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
