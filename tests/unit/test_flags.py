"""Flags between host and graph: the kernels interpreted and their definition alike; compiled for cards not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch

from kernels import flags, reference_flags
from kernels.reference_flags import LINE
from tests.unit.test_token_kernels_compile import compile_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 10
NUMBER = 2**40 + 6  # wider than 32 bits
WAYS = {"kernel": flags, "definition": reference_flags}
FIVE_SECONDS = 5 * 10**9
# of a wait: in time on a GPU and in the definition; the interpreter counts polls
SHORT = {("kernel", "cpu"): 50}
LONG = {("kernel", "cpu"): 10**6}


def words(*values: int, is_pinned: bool = False) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.to(DEVICE) if not is_pinned or DEVICE == "cpu" else tensor.pin_memory()


class Step:
    """What a step has: its number, the row of a wave, a table."""

    def __init__(self, way: str, number: int) -> None:
        self.way = WAYS[way]
        self.short = SHORT.get((way, DEVICE), 10**8)
        self.long = LONG.get((way, DEVICE), FIVE_SECONDS)
        self.ticket, self.poison, self.closed = words(number, 0), words(0), words(0)
        self.row = words(*[0] * (LINE + 16), is_pinned=True)
        self.table = words(*[-1] * 16)

    def wait(self, limit: int) -> list[int]:
        self.ticket[1] = limit
        self.way.wait(self.ticket, self.poison, self.closed, self.row, self.table, COUNT)
        return self.table.tolist()

    def answer(self, flag: int, first: int = 100) -> None:
        view = self.row.numpy()
        view[LINE : LINE + COUNT] = range(first, first + COUNT)
        view[0] = flag


# plain torch plays the GPU only where there is none
@pytest.fixture(params=["kernel"] if DEVICE == "cuda" else WAYS)
def step(request) -> Step:
    return Step(request.param, NUMBER)


GIVEN = [*range(100, 100 + COUNT), *[-1] * 6]
NONE = [*[0] * COUNT, *[-1] * 6]


def test_what_is_published_is_there_behind_its_flag(step):
    source = words(*range(50, 66))
    step.way.publish(step.ticket, step.poison, source, step.row, COUNT)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert step.row.tolist() == [NUMBER, *[0] * (LINE - 1), *range(50, 60), *[0] * 6]
    step.poison.fill_(NUMBER)
    step.way.publish(step.ticket, step.poison, source, step.row, 0)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert step.row[0] == -NUMBER


def test_an_answer_that_is_there_is_taken(step):
    step.answer(NUMBER)
    assert step.wait(step.short) == GIVEN
    assert step.poison.item() == 0


def test_an_answer_that_comes_late_is_waited_for(step):
    thread = threading.Thread(target=lambda: (time.sleep(0.2), step.answer(NUMBER)))
    thread.start()
    found = step.wait(step.long)
    thread.join()
    assert found == GIVEN
    assert step.poison.item() == 0


@pytest.mark.parametrize("flag", [0, NUMBER - 2, NUMBER - 1, 2 - NUMBER, NUMBER + 2])
def test_what_does_not_come_poisons_the_step(step, flag):
    """The flag of the step before is no answer to this one."""
    step.answer(flag)
    assert step.wait(step.short) == NONE
    assert step.poison.item() == NUMBER
    step.answer(NUMBER)  # too late
    assert step.wait(step.long) == NONE


def test_behind_the_last_row_nothing_is_waited_for(step):
    step.answer(NUMBER + 1)
    assert step.wait(step.short) == GIVEN
    step.answer(0)
    assert step.wait(step.long) == NONE
    assert (step.closed.item(), step.poison.item()) == (NUMBER, 0)
    step.ticket[0] = NUMBER + 2  # the next step waits again
    assert step.wait(step.short) == NONE
    assert step.poison.item() == NUMBER + 2


def test_a_step_that_the_host_gives_up_ends_at_once(step):
    step.answer(-NUMBER)
    assert step.wait(step.long) == NONE
    assert step.poison.item() == NUMBER


def test_the_next_step_is_not_poisoned(step):
    step.answer(-NUMBER)
    step.wait(step.long)
    step.ticket[0] = NUMBER + 2
    step.answer(NUMBER + 2, first=300)
    assert step.wait(step.short)[:COUNT] == list(range(300, 300 + COUNT))


# ---- compiled ------------------------------------------------------------------------------------------------------

KERNELS = {  # kernel -> its constants; the largest and the least that it is launched with
    "publish": (flags._publish_kernel, {"count": 26, "width": 32, "on_gpu": True}),
    "publish/flag": (flags._publish_kernel, {"count": 0, "width": 1, "on_gpu": True}),
    "wait": (flags._wait_kernel, {"count": 12, "width": 16, "on_gpu": True}),
    "wait/flag": (flags._wait_kernel, {"count": 0, "width": 1, "on_gpu": True}),
}


def compile_for(name: str, capability: int) -> tuple[str, int]:
    kernel, constants = KERNELS[name]
    types = dict.fromkeys(kernel.arg_names, "*i64")
    return compile_kernel(kernel, types, constants, capability, {"num_warps": 1}, aligned=True)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], str]:
    code = (
        "import json, sys; sys.path.insert(0, '.'); from tests.unit import test_flags as t;"
        "print(json.dumps([[cc, name, t.compile_for(name, cc)[0]] for cc in (90, 120) for name in t.KERNELS]))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(cc, name): ptx for cc, name, ptx in json.loads(done.stdout)}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("capability", "target"), [(90, "sm_90a"), (120, "sm_120a")])
def test_kernels_compile_to_the_orders_that_they_need(compiled, name, capability, target):
    ptx = compiled[capability, name]
    assert re.search(rf"\.target {target}", ptx)
    if name.startswith("wait"):
        assert "ld.acquire.sys.global.b64" in ptx
        assert ptx.count("%globaltimer") >= 2  # before the loop and in it
    else:
        # the whole warp has stored before the flag is
        assert ptx.index("bar.sync") < ptx.index("st.release.sys.global.b64")
