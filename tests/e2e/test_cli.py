"""The command line as a person meets it: answers, exit codes, messages, and what is on which stream."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from tiny_setup import ROOT, make_runner

GREEDY = ("stages=[chat]", "model.sampling.temperature=0")
SHORT = (*GREEDY, "prompt=Hello!", "max_tokens=3")


def assert_clean(done, code: int) -> list[str]:
    """Check exit code and stderr of a refused command: one error line, at most one hint. Returns the lines."""
    lines = [line for line in done.stderr.splitlines() if not re.match(r"(INFO|WARNING) ", line)]
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr
    assert len(lines) in (1, 2), done.stderr
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or lines[1].startswith("hint: ")
    assert done.stdout == ""
    return lines


def assert_plain(text: str) -> None:
    """Check that a text for a log file has no control characters and no line that never ends."""
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x1b]", text), repr(text)
    assert max(map(len, text.splitlines()), default=0) < 1000


# ---- answers -----------------------------------------------------------------------------------------------------


def test_from_nothing_to_the_reference_answer(tmp_path, tiny_qwen):
    """The real program, from another folder than the project's."""
    golden = json.loads((tiny_qwen / "golden_answers.json").read_text())["greedy"]
    story = next(g for g in golden if g["question"].startswith("Tell me a short story"))
    length, folder = len(story["answer_ids"]), f"paths.outputs={tmp_path / 'outputs'}"
    words = (*GREEDY, f"prompt={story['question']}", f"max_tokens={length}", folder)
    done = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(story["answer"].strip()[:200])
    assert done.stdout.count("\n") >= 1
    for stage in ("download", "repack", "spot_check", "residents"):
        assert f"{stage}: run: no record" in done.stderr
    for figure in (
        r"\d+ tokens, \d+\.\d tok/s \(p50 ", r"first token after \d+ ms", r"read per token",
        r"experts in RAM \d+\.\d% of \d+ look-ups", r"RAM +\d", r"expert cache +\d", r"efficiency \d",
    ):  # fmt: skip
        assert re.search(figure, done.stderr), figure
    assert "tok/s" not in done.stdout
    assert_plain(done.stderr)
    assert_plain(done.stdout)
    (path,) = (tmp_path / "outputs").glob("runs/*/*/result.json")
    result = json.loads(path.read_text())
    # the first token comes out of the prompt and has no record of its own
    tokens = result["tokens"]
    assert [token["position"] for token in tokens] == list(
        range(len(story["prompt_ids"]) + 1, len(story["prompt_ids"]) + length)
    )
    read = sum(token["counters"]["read_nbytes"] + token["row_read_nbytes"] for token in tokens)
    assert read / len(tokens) == pytest.approx(result["summary"]["read_nbytes_per_token"])


def test_a_sweep_goes_on_after_a_failing_point(cli, outputs):
    done = cli("-m", *SHORT, "prefetch.experts=0,99,2", f"paths.artifacts={outputs}/artifacts")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: prefetch.experts must be at most 64, got 99") == 1
    assert "Traceback" not in done.stderr
    assert len(re.findall(r"tok/s \(p50", done.stderr)) == 2
    assert re.search(r"guesses 0 issued", done.stderr)
    assert re.search(r"guesses [1-9]\d* issued", done.stderr)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert lines[0] == lines[1], "reading ahead changes no token"
    assert lines[2].split()[0] == "prefetch.experts", "the table of the sweep"
    assert lines[-1].startswith("failed: prefetch.experts=99: ")


# ---- refused before anything is loaded -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (["model=tinny"], "there is no model=tinny", "did you mean 'tiny'"),
        (["hw=rtx5600"], "there is no hw=rtx5600", "did you mean 'rtx5060'"),
        (["stages=[chta]", "prompt=x"], "unknown stage 'chta'", "did you mean 'chat'"),
        (["cache.ram_gb=3"], "unknown key 'cache.ram_gb'", "did you mean 'cache.ram_gib'"),
        (["+model.topk=3"], "unknown key '+model.topk'", "known: "),
        (["stages=[chat]"], "needs a prompt", ""),
        (["stages=[chat]", "prompt="], "the prompt is empty", ""),
        (["prompt=\udcff\udcfe", "stages=[chat]"], "is not valid UTF-8", "LC_ALL"),
        # Hydra's own complaints, in our form: they too are a wrong use, and nobody needs a "complete stack trace"
        (["max_tokens=many"], "max_tokens", ""),
        (["stages=chat", "prompt=x"], "stages", "stages=[chat]"),
        (["model.deltanet=fp9"], "fp9", "fp8_rows"),
        (["stages=[chat", "prompt=x"], "stages=[chat", ""),
        (["~model.path"], "model.path", ""),
    ],
    ids=str,
)
def test_wrong_use(cli, argv, error, hint):
    lines = assert_clean(cli(*argv), 2)
    assert error in lines[0]
    assert hint in "\n".join(lines)


def test_an_output_folder_that_cannot_be(cli):
    lines = assert_clean(cli("paths.outputs=/dev/null/x", "dry_run=true"), 1)
    assert "the output folder /dev/null/x cannot be written" in lines[0]
    assert "paths.outputs=DIR" in lines[1]


def test_an_artifacts_folder_that_cannot_be(cli):
    lines = assert_clean(cli("paths.artifacts=/dev/null/x", "stages=[download]"), 1)
    assert "/dev/null/x/tiny" in lines[0]
    assert "paths.artifacts" in lines[1]


def test_every_key_is_printed(cli):
    """As --help says: `python run.py --cfg job` prints this alone."""
    done = cli("--cfg", "job", "hw=cpu")
    assert done.returncode == 0, done.stderr
    assert "device: cpu" in done.stdout
    assert "sweep_experts: 32" in done.stdout


def test_dry_run_says_what_would_run_and_makes_nothing(cli, tmp_path):
    done = cli("dry_run=true", *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "download: run: no record",
        "repack: run: no record",
        "spot_check: run: no record",
        "residents: run: no record",
        "chat: run: asked for",
    ]
    assert not list(tmp_path.rglob("artifacts"))


def test_a_reader_that_goes_away_is_no_error(cli):
    """`python run.py ... | head`: what is printed meets a closed pipe."""
    done = cli("dry_run=true", "stages=[download]", is_closed=True)
    assert done.stderr == ""
    assert done.returncode == 0


# ---- refused by the engine ---------------------------------------------------------------------------------------


@pytest.fixture
def engine(cli, outputs):
    """Run chat on the finished set-up."""

    def call(*argv: str):
        return cli(*argv, f"paths.artifacts={outputs}/artifacts")

    return call


def test_more_ram_than_there_is(engine):
    lines = assert_clean(engine(*SHORT, "hw.ram_gib=99999"), 1)
    assert re.search(r"hw\.ram_gib is 99999 GiB, but this machine has \d+\.\d GiB \(\w+", lines[0])
    assert re.search(r"set hw\.ram_gib=[\d.]+ or less", lines[1])


def test_a_card_that_is_not_there(engine):
    if torch.cuda.is_available():
        return
    lines = assert_clean(engine(*SHORT, "hw=rtx5060"), 1)
    assert lines == [
        "error: hw.device is cuda, but torch finds no CUDA device",
        "hint: use hw=cpu, or hw.device=cpu",
    ]


def test_a_prompt_longer_than_the_window(engine):
    lines = assert_clean(
        engine(*GREEDY, f"prompt={'a fox and ' * 100}", "model.context_tokens=64"), 1
    )
    numbers = re.search(r"maximum context length is 64 tokens.* has (\d+) tokens", lines[0])
    assert 200 < int(numbers[1]) < 1100
    assert "model.context_tokens" in lines[1]


def test_a_small_cache_warns_with_the_number_that_is_enough(engine):
    done = engine(*SHORT, "cache.ram_gib=0.0005")
    assert done.returncode == 0, done.stderr
    warning = re.search(
        r"WARNING .*holds (\d+) experts, a decoding step uses up to 48: .*cache\.ram_gib=([\d.]+)",
        done.stderr,
    )
    assert int(warning[1]) < 48
    assert float(warning[2]) * 2**30 >= 48 * 24576


# ---- stopped -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGINT, 130, "stopped; what is finished is kept, and the same command goes on"),
        (signal.SIGTERM, 143, "terminated; what is finished is kept"),
    ],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_ends_with_one_line_and_the_next_run_goes_on(
    cli, tmp_path, outputs, number, code, message
):
    done = cli("stages=[repack]", signal=int(number))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("INFO")]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    runner = make_runner(tmp_path / "outputs")
    assert str(runner.decide("repack")) == "resume: 2 of 8 units are done"
    runner.run(["repack"])
    assert (
        runner.find("repack").record["digest"]
        == make_runner(outputs).find("repack").record["digest"]
    )


def test_damage_ends_with_its_own_exit_code(cli, outputs, tmp_path):
    shutil.copytree(outputs, tmp_path / "outputs")
    path = make_runner(tmp_path / "outputs").find("repack").root / "experts.bin"
    with open(path, "r+b") as f:
        f.seek(200 * 24576 + 7)
        f.write(b"\xa5\x5a\xa5")
    lines = assert_clean(cli("stages=[spot_check]", "spot_check.experts=all"), 3)
    assert "layer 3, expert 8, gate codes" in lines[0]


def test_a_second_run_is_told_to_wait(cli, outputs, tmp_path):
    from stages.lock import Lock

    shutil.copytree(outputs, tmp_path / "outputs")
    folder = make_runner(tmp_path / "outputs").folder("residents")
    shutil.rmtree(folder)
    with Lock(folder.with_name(f"{folder.name}.lock")):
        lines = assert_clean(cli("stages=[residents]"), 4)
    assert re.search(r"residents-\w+ is being made by another run \(pid \d+ on \S+\)", lines[0])
