"""`verify` where a release's own code computes, with the stand-in beside the bundled trained model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny_setup import make_runner

from runtime.models import deepseek_probe as probe
from stages import verify, verify_published
from tests.standin import ROOT, TINY, make_snapshot


def words(snapshot, *more):
    return (
        "model=tiny_deepseek", "hw=cpu", "hw.compute_threads=1", "model.source=local", f"model.path={snapshot}",
        "model.setup=[download,patch]", "patch.allow_unknown=true", "deepseek.arithmetic=reference",
        "verify.documents=1", "verify.control_documents=1", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp("released") / "snapshot", TINY)


@pytest.mark.slow
def test_the_whole_table(snapshot, tmp_path, capsys, monkeypatch):
    """As released, with its index keys; the row counts are fewer."""
    monkeypatch.setattr(probe, "ROWS", (1, 17, 65))
    runner = make_runner(tmp_path, *words(snapshot))
    assert runner.order(["verify"]) == ["download", "patch", "verify"]
    runner.run(["verify"])
    rows = {row["name"]: row for row in runner.find("verify").facts["rows"]}
    assert not runner.find("verify").facts["red"]
    assert rows["index keys at even positions"]["found"].endswith("as released")
    assert sum(name.startswith("same tokens: plain path against") for name in rows) == 6
    assert sum(name.startswith("layer ") for name in rows) == 8
    assert rows["next tokens of recorded answers"]["found"] == "199 of 199"
    assert "as released" in capsys.readouterr().out


@pytest.mark.slow
def test_recorded_answers_with_own_keys(snapshot, tmp_path):
    runner = make_runner(tmp_path, *words(snapshot, "deepseek.fix_index_keys=true"))
    case = open_case(runner)
    (row,) = verify_published.recorded_rows(case)
    assert row.is_ok
    same, total = map(int, row.found.split(" of "))
    assert total == 199
    assert same >= total - 1
    (row,) = verify_published.index_key_rows(case)
    assert row.found == "each source's own"


def open_case(runner):
    runner.run(["patch"])
    inputs = {name: runner.find(name) for name in ("download", "patch")}
    return verify.Case.open(runner.cfg, verify.engine_files(inputs))


def test_a_wrong_table_of_experts_is_red(snapshot, tmp_path, monkeypatch):
    """Every part is able to be red: here what the streamer gives is not what the plain path reads."""
    case = open_case(make_runner(tmp_path, *words(snapshot)))
    good = verify_published.PlainExperts._read
    monkeypatch.setattr(
        verify_published.PlainExperts,
        "_read",
        lambda self, layer, e: good(self, layer, (e + 1) % 48),
    )
    monkeypatch.setattr(verify_published, "QUESTION_TOKENS", 4)
    monkeypatch.setattr(verify_published, "other_settings", lambda *_: {})
    assert not any(row.is_ok for row in verify_published.setting_rows(case))


def test_native_needs_no_patch(tmp_path):
    runner = make_runner(
        tmp_path, "model=deepseek", "model.source=local", "model.path=/nowhere", "hw=cpu"
    )
    for name in ("chat", "verify", "bench", "serve"):
        assert runner.stages[name].needs(runner.cfg) == ("download",)
    wanted = "deepseek.arithmetic=reference"
    runner = make_runner(tmp_path, "model=deepseek", wanted, "hw=cpu")
    assert runner.order(["serve"])[:2] == ["download", "patch"]


class Racing:
    """Our kernels, but one: other bits now and then, or NaN beyond some rows."""

    def __init__(self, good, name, is_nan):
        self._good, self._name, self._is_nan, self._calls = good, name, is_nan, 0

    def __getattr__(self, name):
        good = getattr(self._good, name)
        if name != self._name:
            return good

        def run(*args):
            out, self._calls = good(*args), self._calls + 1
            if len(args[0]) > 64 and self._calls % 3 == 0:
                out = out.clone()
                out.view(-1)[7] = float("nan") if self._is_nan else out.view(-1)[7] * 1.01 + 1
            return out

        return run


@pytest.mark.parametrize("name", ["fp8_gemm", "fp4_gemm"])
@pytest.mark.parametrize("is_nan", [True, False])
def test_the_probe_sees_a_race(name, is_nan):
    """Clean up to 64 rows, wrong at every third call beyond: what an unpatched kernel did."""
    from kernels import deepseek_published

    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)

    fp8 = torch.randn(96, 64, generator=generator).to(torch.float8_e4m3fn)
    steps = torch.full((3, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    fp4 = random(64, 32).view(torch.float4_e2m1fn_x2)
    fp4_steps = torch.full((64, 2), 126, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    kernel = Racing(deepseek_published, name, is_nan)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = list(
            probe.probe(kernel, (fp8, steps), (fp4, fp4_steps), torch.device("cpu"), (17, 64, 65))
        )
    finally:
        torch.set_default_dtype(torch.float32)
    wrong = [(f.name, f.rows) for f in found if not f.is_ok]
    assert wrong == [(name, 65)]


@pytest.mark.slow
def test_the_script_for_a_real_snapshot(tmp_path):
    """On the stand-in beside the golden checkpoint, which has drafts; without the release's own numbers."""
    snapshot = make_snapshot(tmp_path / "snapshot")
    script = ROOT / "tests" / "gpu" / "check_snapshot.py"
    words = (
        "hw=cpu", "hw.compute_threads=1", "patch.allow_unknown=true", "model.context_tokens=192",
        "--quick", "--other-checkpoint", f"--outputs={tmp_path / 'out'}",
    )  # fmt: skip
    command = [sys.executable, str(script), str(snapshot), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    for number in range(1, 9):
        assert f"-- {number} " in done.stdout
    assert "RED" not in done.stdout
    assert "prompt of 129, 8 decoded: the same bits" in done.stdout
