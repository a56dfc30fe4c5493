"""The advisor from outside: the command line, an MCP session over stdio and over HTTP, and the twins by a real server."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import anyio
import httpx
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

ROOT = Path(__file__).resolve().parents[2]
ASK = ["stages=[advise]", "model=deepseek", "hw=rtx5060"]
NO_SOCKET = """
import socket, sys
def refuse(*_, **__):
    raise AssertionError("a socket was opened")
socket.socket.connect = socket.socket.bind = socket.create_connection = socket.getaddrinfo = refuse
import run
code = run.main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


def command(*words: str, code: str | None = None, cwd: Path = ROOT):
    start = [sys.executable, "run.py"] if code is None else [sys.executable, "-c", code]
    return subprocess.run(
        [*start, *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_twelve_lines_without_torch_and_without_a_socket(tmp_path):
    done = command(
        *ASK,
        f"paths.outputs={tmp_path}",
        "advise.question=Can I run it for 2.000 € at 2 tok/s?",
        code=NO_SOCKET,
    )
    assert done.returncode == 0, done.stderr
    lines = [
        line
        for line in done.stdout.splitlines()
        if line.split()[1:2] and line.split()[1] in ("yes", "no", "maybe")
    ]
    assert len(lines) == 12
    units = ("tok/s", "EUR", "USD/Mtok", "offers", "GB", "cards")
    assert all(
        line.split()[3] in units and float(line.split()[2].replace(",", "")) >= 0 for line in lines
    )
    (folder,) = tmp_path.glob("runs/*/*")
    advice = json.loads((folder / "advice.json").read_text())
    assert advice["situation"]["budget"] == {"value": 2000, "status": "known", "unit": "EUR"}
    assert (folder / "advice.md").read_text().startswith("# DeepSeek-V4.1-Flash")
    assert (folder / "advice.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_command_writes_the_same_bytes(tmp_path):
    found = []
    for name in ("a", "b"):
        assert (
            command(*ASK, f"paths.outputs={tmp_path / name}", "advise.plot=false").returncode == 0
        )
        (path,) = (tmp_path / name).glob("runs/*/*/advice.json")
        found.append(path.read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["advise.system=mars"], 2, "there is no machine 'mars'"),
        (["advise.model=GPT-9"], 2, "GPT-9"),
        (["advise.as_of=someday"], 2, "advise.as_of is 'someday'"),
        (["advise.situation.users=-3"], 2, "advise.situation.users must be at least 1"),
        (["advise.situation.currency=XYZ"], 2, "situation.currency is 'XYZ'"),
        (["advise.transport=pigeon"], 2, "pigeon"),
        (["advise.situation.budgett=5"], 2, "did you mean 'advise.situation.budget'"),
    ],
)
def test_wrong_input_ends_with_code_2_and_one_sentence(tmp_path, words, code, says):
    done = command(*ASK, f"paths.outputs={tmp_path}", *words)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_knowledge_base_ends_with_code_3(tmp_path):
    for name in ("run.py", "conf", "runtime", "stages", "kernels"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "bundled")
            )
        else:
            shutil.copy(source, tmp_path / name)
    prices = tmp_path / "conf/advisor/offers.yaml"
    prices.write_text(prices.read_text().replace("date: 2025-05-19, ", ""))
    done = command(*ASK, f"paths.outputs={tmp_path / 'out'}", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "offers.yaml: offer-rtx-5060-launch: date is missing" in done.stderr


def test_a_draft_from_a_file(tmp_path):
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    try:
        from advisor_drafts import right
    finally:
        sys.path.pop(0)
    from runtime.advisor.validator import answer_text

    block, prose = right()
    path = tmp_path / "draft.md"
    path.write_text(answer_text(block, prose))
    words = ["stages=[advise_check]", f"paths.outputs={tmp_path / 'out'}", f"advise.answer={path}"]
    done = command(*words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
    block["paths"].pop()
    path.write_text(answer_text(block, prose))
    done = command(*words)
    assert done.returncode == 4
    assert "E-PATHS" in done.stderr
    assert command(*words[:2]).returncode == 2
    assert command(*words[:2], "advise.answer=/nowhere").returncode == 2


# ---- sessions --------------------------------------------------------------------------------------------------------

QUESTIONS = [
    (
        "advise",
        {"model": "DeepSeek-V4.1-Flash", "hw": "rtx5060", "question": "Is my machine enough?"},
    ),
    ("predict", {"model": "qwen", "hw": "rtx5060", "cache_bytes": 16e9}),
    (
        "compute_law",
        {
            "law": "L12",
            "inputs": {
                "disk_bw": {"value": 8.2, "unit": "GiB/s"},
                "h": {"value": 0, "unit": "1"},
                "routed_bytes_per_token": {"value": 4.5121536, "unit": "GB"},
            },
        },
    ),
]


async def ask_all(client) -> list:
    tools = (await client.list_tools()).tools
    assert len(tools) == 8
    assert all(t.output_schema for t in tools)
    return [(await client.call_tool(name, given)).structured_content for name, given in QUESTIONS]


def check_answers(answers) -> None:
    advice, prediction, law = answers
    verdicts = {p["id"]: (p["verdict"], p["number"]["value"]) for p in advice["paths"]}
    assert len(verdicts) == 12
    assert verdicts["nvme-expert-streaming"] == ("yes", 2.43)
    assert prediction["run"] == "run-qw-05"
    assert law["value"] == pytest.approx(1.951, rel=1e-3)
    assert law["unit"] == "tok/s"


def test_three_questions_over_stdio(tmp_path):
    server = StdioServerParameters(
        command=sys.executable,
        args=[
            "run.py",
            "stages=[advise_serve]",
            "advise.transport=stdio",
            f"paths.outputs={tmp_path}",
        ],
        cwd=str(ROOT),
    )

    async def session():
        async with Client(stdio_client(server)) as client:
            return await ask_all(client)

    check_answers(anyio.run(session))


def test_three_questions_over_http_and_by_the_twins(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["stages=[advise_serve]", f"advise.port={port}", f"paths.outputs={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "run.py", *words], cwd=ROOT, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)

        async def session():
            async with Client(f"{url}/mcp") as client:
                return await ask_all(client)

        answers = anyio.run(session)
        check_answers(answers)
        twins = [
            httpx.get(f"{url}/api/advise", params=QUESTIONS[0][1]).json(),
            httpx.get(f"{url}/api/predict", params=QUESTIONS[1][1]).json(),
            httpx.post(f"{url}/api/compute", json=QUESTIONS[2][1]).json(),
        ]
        assert twins == answers
        assert httpx.get(f"{url}/llms.txt").text.startswith("# NVMoE hardware advisor")
    finally:
        process.terminate()
        assert process.stderr is not None
        process.stderr.close()
        process.wait(20)


def test_a_drive_is_measured_benched_and_advised_about(tmp_path):
    """doctor, bench and advise on this machine: the bench is cited, below what L12 says of the measured drive."""
    done = command(
        "stages=[doctor,bench,advise]", "model=tiny", "hw=cpu", f"paths.outputs={tmp_path}", "cache.ram_gib=0",
        "doctor.each_s=0.02", "doctor.sustained_s=0", "doctor.probe_gib=0.1", "bench.tokens=8", "bench.warmup_tokens=2",
        "bench.repeats=1", "bench.prompt_length=8", "bench.plot=false", "advise.plot=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("runs/*/*")
    advice = json.loads((folder / "advice.json").read_text())
    measured = json.loads((folder / "bench.json").read_text())["decode_tok_s"]["median"]
    rate = json.loads((folder / "doctor.json").read_text())["rates"]["drive_gib_s"] * 2**30
    (row,) = advice["own_runs"]
    assert row["run"] == f"run-own-{folder.name}"
    assert row["measured"] == [pytest.approx(measured, rel=1e-5)] * 2
    assert row["ceiling"] == pytest.approx(rate / (8 * 6 * 20748), rel=1e-5)
    assert measured <= row["ceiling"]
    keep = next(p for p in advice["paths"] if p["id"] == "keep-existing")
    assert keep["run"] == row["run"]
