"""The other process of the stage runner's tests: `crash FOLDER` or `hold FILE`. Not for the test process itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from blake3 import blake3

from stages import core
from stages.lock import Lock
from tests.unit.stage_world import NUM_UNITS, World


def _crash_everywhere(root: Path) -> None:
    """Fork a run per system call and kill it there; print what each left behind that it should not."""
    results = []
    os.fsync = lambda _fd: None
    # hash in this thread: the hasher's pool of threads does not live on in a fork
    core.file_digest = lambda path: blake3(path.read_bytes()).hexdigest(length=16)
    for scenario in ("from nothing", "over a finished output", "over a stale output"):
        start = root / scenario / "start"
        start.mkdir(parents=True)
        if scenario != "from nothing":
            world = World(start)
            world.run("second")
            world.executed()
            if scenario == "over a stale output":
                os.truncate(world.runner().folder("first") / "data.bin", 100)
        for nth in range(1, 1000):
            world = World(shutil.copytree(start, root / scenario / str(nth)))
            world.salt["first"] = b"new" if scenario != "from nothing" else b""
            call = _crash_once(world, scenario, nth)
            if call is None:
                break
            faults = list(_faults_after_crash(world, scenario))
            results.append(
                {"scenario": scenario, "call": f"{call}, number {nth}", "faults": faults}
            )
    print(json.dumps(results))


def _target(scenario: str) -> dict[str, list[str]]:
    return {"force": ["first"]} if scenario == "over a finished output" else {}


def _crash_once(world: World, scenario: str, nth: int) -> str | None:
    """Run in a child that dies before its n-th call. Returns the call's name, None when there were fewer."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        left = nth

        def dying(name: str, real):
            def call(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left == 0:
                    os.write(writer, name.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in ("rename", "fsync", "unlink", "rmdir", "replace"):
            setattr(os, name, dying(name, getattr(os, name)))
        world.run("second", **_target(scenario))
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    name = os.read(reader, 100).decode()
    os.close(reader)
    assert os.WIFSIGNALED(status) or (os.WEXITSTATUS(status) == 0 and not name)
    return name or None


def _faults_after_crash(world: World, scenario: str):
    """Yield what is wrong with the disk now, and with a second run of the same targets."""
    old, new = World(world.artifacts), World(world.artifacts)
    new.salt["first"] = world.salt["first"]
    wanted = {
        b"".join(w.unit_bytes("first", str(i), b"") for i in range(NUM_UNITS)): w
        for w in (old, new)
    }
    runner = world.runner()
    if (output := runner.find("first")) is not None:
        content = (output.root / "data.bin").read_bytes()
        is_known_stale = scenario == "over a stale output" and len(content) == 100
        if content not in wanted and not is_known_stale:
            yield "a finished name with wrong content"
        digest = core.file_digest(output.root / "data.bin")
        if digest != output.record["files"]["data.bin"]["blake3"] and not is_known_stale:
            yield "a record that is not of this file"
    had_old = runner.find("first") is not None and runner.decide("first").action == "skip"
    is_lost = runner.find("first") is None and runner.decide("first").action != "resume"
    if scenario == "over a finished output" and is_lost:
        yield "neither the old output nor one that can be resumed"
    world.run("second")
    begun = world.executed()
    content = world.content("first")
    if content not in wanted or (not had_old and content != list(wanted)[-1]):
        yield "the second run ended with wrong content"
    made_from = content[:200]
    if world.content("second") != b"".join(
        world.unit_bytes("second", str(i), made_from) for i in range(NUM_UNITS)
    ):
        yield "the dependant ended with wrong content"
    again = sum(begun.values()) - len(begun)
    if again > 1:
        yield f"{again} units were done again"
    leftovers = [p.name for p in runner.root.iterdir() if p.suffix and not had_old]
    if leftovers:
        yield f"left over after the second run: {leftovers}"


def _hold(path: Path) -> None:
    with Lock(path):
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    {"crash": _crash_everywhere, "hold": _hold}[sys.argv[1]](Path(sys.argv[2]))
