"""Downloads from a stand-in of the hub: what is fetched and where it lies, revisions that move, and the disk's room."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from hub_machine import BIG, DRAFT, NUM_SHARDS, Machine, make_files, wanted
from hub_server import COMMIT, NEXT_COMMIT, REPO, Fault, HubServer
from huggingface_hub import close_session, constants

from runtime.checkpoint import Checkpoint
from runtime.errors import UserError
from stages.core import Runner
from stages.transfer import Patience

ROOT = Path(__file__).resolve().parents[2]

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
