"""`make tour`: every stage of the bundled model in one command, from nothing, with no network to be had."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

from tiny_setup import ROOT

NO_SOCKET = """
import socket, sys
def refuse(*_, **__):
    raise AssertionError("a socket was opened")
socket.socket.connect = socket.socket.bind = socket.create_connection = socket.getaddrinfo = refuse
import run
sys.exit(run.main(sys.argv[1:]))
"""
SHORT = (
    "doctor.each_s=0.01", "doctor.sustained_s=0", "doctor.probe_gib=0.1", "verify.documents=1",
    "verify.control_documents=1", "bench.tokens=4", "bench.warmup_tokens=1", "bench.repeats=1", "bench.plot=false",
    "max_tokens=4", "hw=cpu", "hw.compute_threads=1",
)  # fmt: skip
NOT_TOURED = {
    "synthetic", "patch", "checksums", "mirror", "quantize",  # of other models or drives
    "serve", "advise_serve",  # do not end
    "simulate", "advise", "advise_check",  # of machines that are not here
}  # fmt: skip


def tour() -> list[str]:
    """Return the words of the Makefile's command."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(r"^TOUR := (.*)$", text, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


def test_every_stage_from_nothing_and_without_a_network(tmp_path):
    from conf.schema import STAGES

    stages = tour()[0].removeprefix("stages=[").removesuffix("]").split(",")
    assert set(STAGES) - set(stages) - NOT_TOURED == {s for s in STAGES if s.startswith("memory_")}
    outputs = tmp_path / "outputs"
    done = subprocess.run(
        [sys.executable, "-c", NO_SOCKET, *tour(), *SHORT, f"paths.outputs={outputs}"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in stages:
        assert re.search(rf"{name}: run: (no record|asked for)", done.stderr), name
    (run_dir,) = outputs.glob("runs/*/*")
    for name in ("doctor.json", "plan.json", "bench.json", "result.json"):
        assert json.loads((run_dir / name).read_text()), name
    # plan is told what doctor measured a moment before
    assert "measured by doctor on" in done.stdout
    assert len(json.loads((run_dir / "result.json").read_text())["tokens"]) == 3
