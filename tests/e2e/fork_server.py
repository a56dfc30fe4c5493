"""Run command lines one after the other in forks of a process that has loaded torch once.

Reads a JSON object per line: `argv`, `cwd`, `folder` (for the files `stdout` and `stderr`), and maybe `signal` (sent
to itself after the second layer of repack) or `is_closed` (nobody reads stdout). Answers the exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hydra
import torch

import run
from stages import chat, download, repack, residents, spot_check
from stages.stage import StageContext

LOADED = (hydra, torch, chat, download, repack, residents, spot_check)


def answer(request: dict) -> None:
    """Become `python run.py ARGV`."""
    folder = Path(request["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if request.get("is_closed"):
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    os.chdir(request["cwd"])
    if number := request.get("signal"):
        # started in the background, a process inherits that ctrl-c is ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        real = StageContext.done

        def done(ctx: StageContext, unit: str, **facts: object) -> None:
            real(ctx, unit, **facts)
            if (ctx.stage.name, unit) == ("repack", "1"):
                os.kill(os.getpid(), number)

        StageContext.done = done
    sys.argv = ["run.py", *request["argv"]]
    sys.exit(run.main(request["argv"]))


def serve() -> None:
    """Fork for every line."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answer(json.loads(line))
        status = os.waitpid(child, 0)[1]
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
