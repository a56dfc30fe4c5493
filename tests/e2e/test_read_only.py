"""A finished set-up that nobody may write to: models run without a network; what must write says where and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from tiny_setup import ROOT, make_runner

import run
from stages.core import Runner

WATCHED = """
import os, sys
FOLDER = sys.argv.pop(1)
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.utime")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def watch(event, args):
    if event == "open":
        path, _, flags = args
        is_writing = bool(flags & WRITING)
    elif event in CHANGES:
        path, is_writing = args[0], True
    elif event in ("socket.connect", "socket.getaddrinfo", "socket.bind"):
        raise AssertionError("the network was asked")
    else:
        return
    if not is_writing or not isinstance(path, (str, bytes, os.PathLike)):
        return
    if os.path.abspath(os.fsdecode(path)).startswith(FOLDER):
        if event == "os.mkdir" and os.path.isdir(path):
            return  # the kernel says first that it is there
        raise OSError(30, "Read-only file system", path)
sys.addaudithook(watch)
import run
sys.exit(run.main(sys.argv[1:]))
"""


def run_watched(outputs: Path, tmp_path: Path, *words: str, **environment: str):
    """Run the command line where every write below the set-up's folder is refused, as on a read-only filesystem."""
    return subprocess.run(
        [sys.executable, "-c", WATCHED, str(outputs), *words, "hw=cpu", "hw.compute_threads=1",
         f"paths.outputs={tmp_path}", f"paths.artifacts={outputs / 'artifacts'}"],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_set_up_that_may_only_be_read(outputs, tmp_path, fault_row):
    words = ("stages=[chat]", "prompt=What is a whale?", "max_tokens=3", "cache.verify=true")
    done = run_watched(outputs, tmp_path, *words, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "skip: record matches" in done.stderr
    fault_row("the set-up's folder is read-only, and there is no network", "nothing", "the answer")


def test_a_stage_that_must_write_says_where_and_why(outputs, tmp_path, fault_row):
    done = run_watched(outputs, tmp_path, "stages=[repack]", "force=[repack]")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Read-only file system" in done.stderr
    assert str(outputs / "artifacts" / "tiny") in done.stderr
    assert "paths.artifacts" in done.stderr
    told = done.stderr.partition("error: ")[2].partition("\n")[0]
    fault_row("a stage has to write into a read-only folder", told, "the old output stays")
    assert make_runner(outputs).decide("repack").action == "skip"


@pytest.mark.parametrize("kind", ["run", "sweep"])
@pytest.mark.parametrize("given", ["outputs", "here and, there=(1)"])
def test_runs_lie_below_the_project_wherever_the_command_is_typed(tmp_path, monkeypatch, kind, given):  # fmt: skip
    """A read-only current folder is as good as any."""
    import stages.sweep  # noqa: F401 - brings the resolvers

    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        words = run.prepare([f"paths.outputs={given}"])
        cfg = compose("config", words, return_hydra_config=True)
    folder = Path(cfg.hydra[kind].dir)
    assert folder.is_relative_to(ROOT / given / f"{kind}s")


def test_a_disk_check_that_is_overruled(tmp_path, monkeypatch):
    import shutil

    from runtime.errors import UserError

    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    runner: Runner = make_runner(tmp_path, "hw=cpu")
    with pytest.raises(UserError, match="check_disk=false") as caught:
        runner.run(["repack"])
    assert "the coming stages need" in caught.value.message
    runner.cfg.check_disk = False
    runner.run(["repack"])
    assert runner.find("repack") is not None
