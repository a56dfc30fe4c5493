"""What the end-to-end tests share: a finished set-up of the tiny model, the command line, a stand-in of the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_machine import Machine, make_files
from hub_server import HubServer
from tiny_setup import SETUP, make_runner


@pytest.fixture(scope="session")
def outputs(tmp_path_factory) -> Path:
    """A folder in which the tiny model is set up: not to be changed."""
    folder = tmp_path_factory.mktemp("outputs")
    make_runner(folder).run(SETUP)
    return folder


@pytest.fixture(scope="session")
def _fork_server() -> Iterator[subprocess.Popen[str]]:
    program = Path(__file__).with_name("fork_server.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server
        server.stdin.close()


@pytest.fixture
def cli(tmp_path, _fork_server) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python run.py ...` without a terminal, in a process of its own; nothing is left in the project."""

    def call(*argv: str, **request: object) -> subprocess.CompletedProcess[str]:
        if not any(word.startswith("paths.outputs=") for word in argv):
            argv = (*argv, f"paths.outputs={tmp_path / 'outputs'}")
        request |= {"argv": argv, "cwd": str(tmp_path), "folder": str(tmp_path)}
        _fork_server.stdin.write(json.dumps(request) + "\n")
        _fork_server.stdin.flush()
        code = int(_fork_server.stdout.readline())
        out, err = ((tmp_path / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(argv, code, out, err)

    return call


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """The small repository, served on 127.0.0.1."""
    with HubServer(make_files()).running() as server:
        yield server


@pytest.fixture
def machine(hub, tmp_path, make_config, monkeypatch) -> Machine:
    """A machine that knows of no hub but that one."""
    # here, and not at the top: most end-to-end tests need neither
    from huggingface_hub import close_session, constants

    from stages.transfer import Patience

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
