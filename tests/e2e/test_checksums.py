"""Checksums of experts inside released files: recorded from bytes that were checked, compared where they are read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from blake3 import blake3
from tiny_setup import ROOT, make_runner

from conf.schema import ConfigError
from runtime.engine import Engine
from runtime.errors import UserError, VerificationError
from runtime.experts.reader import DirectReader
from runtime.sampling import SamplingParams
from runtime.session import Session
from stages import checksums
from stages.core import Runner
from stages.opening import engine_files, setup_stages

PAGE = 4096
DEEPSEEK = ("model=tiny_deepseek", "hw=cpu")
DENSE = ("model=qwen25_7b_1m", "model.source=local", f"model.path={ROOT}/tests/data/recall_model", "hw=cpu",
         "model.context_tokens=64")  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def runs_of(folder: Path, names: list[str]) -> list[tuple[Path, int, int]]:
    """Return (file, start of its first page, end) of tensors that touch, by reading headers here."""
    places = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        for name, info in json.loads(raw[8 : 8 + size]).items():
            if name != "__metadata__":
                places[name] = (path, *(8 + size + at for at in info["data_offsets"]))
    runs: list[tuple[Path, int, int]] = []
    for path, start, end in sorted(places[name] for name in names):
        if runs and runs[-1][0] == path and runs[-1][2] == start:
            runs[-1] = (path, runs[-1][1], end)
        else:
            runs.append((path, start // PAGE * PAGE, end))
    return runs


def digest(run: tuple[Path, int, int]) -> bytes:
    path, start, end = run
    return blake3(path.read_bytes()[start:end]).digest(length=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Runner:
    """The tiny DeepSeek model with its checksums: not to be changed."""
    runner = make_runner(tmp_path_factory.mktemp("deepseek"), *DEEPSEEK, "cache.verify=true")
    runner.run(["checksums"])
    return runner


@pytest.fixture
def copied(tmp_path) -> Runner:
    """A snapshot that a test may damage, downloaded."""
    snapshot = shutil.copytree(ROOT / "runtime/bundled/tiny-deepseek", tmp_path / "snapshot")
    runner = make_runner(tmp_path / "outputs", *DEEPSEEK, f"model.path={snapshot}", "model.source=local")  # fmt: skip
    runner.run(["download"])
    return runner


def test_every_deepseek_expert(made, tmp_path):
    recorded = (made.find("checksums").root / "checksums.bin").read_bytes()
    folder = ROOT / "runtime/bundled/tiny-deepseek"
    config = json.loads((folder / "config.json").read_text())["text_config"]
    for layer in range(config["num_hidden_layers"]):
        for expert in (0, 7, config["n_routed_experts"] - 1):
            at = 16 * (config["n_routed_experts"] * layer + expert)
            prefix = f"layers.{layer}.ffn.experts.{expert}."
            for kind in ("weight", "scale"):
                (run,) = runs_of(folder, [f"{prefix}{m}.{kind}" for m in ("w1", "w2", "w3")])
                assert recorded[at : at + 8] == digest(run), (layer, expert, kind)
                at += 8
    assert len(recorded) == at


def test_every_dense_layer(tmp_path):
    runner = make_runner(tmp_path, *DENSE, "spot_check.experts=all")
    runner.run(["spot_check"])
    recorded = (runner.find("checksums").root / "checksums.bin").read_bytes()
    folder = ROOT / "tests/data/recall_model"
    header = (folder / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]).keys()
    wanted = b""
    for layer in range(4):
        mine = [n for n in names if n.startswith(f"model.layers.{layer}.")]
        wanted += b"".join(digest(run) for run in runs_of(folder, mine))
    assert recorded == wanted
    assert runner.find("spot_check").facts["compared_with"] == "checksums"
    assert runner.find("spot_check").facts["experts"] == 4


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_runs_that_share_bytes_and_cross_chunks(tmp_path, monkeypatch, chunk):
    data = os.urandom(1000)
    path = tmp_path / "x"
    path.write_bytes(data)
    monkeypatch.setattr(checksums, "CHUNK_NBYTES", chunk)
    places = [(0, 1000), (0, 1), (3, 10), (5, 8), (63, 129), (999, 1000), (64, 128)]
    whole, found = checksums.hash_runs(path, [checksums.Run(*p, i) for i, p in enumerate(places)])
    assert whole == blake3(data).hexdigest(length=16)
    assert found == {i: blake3(data[a:b]).digest(length=8) for i, (a, b) in enumerate(places)}


def test_a_stop_costs_one_file(made, tmp_path, monkeypatch):
    runner = make_runner(tmp_path, *DEEPSEEK)
    real, hashed = checksums.hash_runs, []

    def stopping(path, runs):
        hashed.append(path.name)
        if len(hashed) == 4:
            raise KeyboardInterrupt
        return real(path, runs)

    monkeypatch.setattr(checksums, "hash_runs", stopping)
    with pytest.raises(KeyboardInterrupt):
        runner.run(["checksums"])
    runner.run(["checksums"])
    again = {name for name in hashed if hashed.count(name) > 1}
    assert again == {hashed[3]}
    files = [r.find("checksums").root / "checksums.bin" for r in (runner, made)]
    assert files[0].read_bytes() == files[1].read_bytes()


def flip(path: Path, at: int) -> None:
    """Turn a bit; size and time stay."""
    before = path.stat()
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def middle_of_an_expert(snapshot: Path) -> tuple[Path, int]:
    names = [f"layers.3.ffn.experts.5.{m}.weight" for m in ("w1", "w2", "w3")]
    ((path, start, end),) = runs_of(snapshot, names)
    return path, (start + PAGE + end) // 2


def test_bytes_that_changed_since_the_download(copied, tmp_path, fault_row):
    """Nothing is recorded of bytes whose file is not the one that was checked."""
    flip(*middle_of_an_expert(tmp_path / "snapshot"))
    with pytest.raises(VerificationError, match="download recorded") as caught:
        copied.run(["checksums"])
    assert copied.find("checksums") is None
    assert "force=[download]" in caught.value.hint
    fault_row(
        "a bit turns between download and checksums", caught.value.message, "nothing recorded"
    )


def test_damage_is_named_by_spot_check(copied, tmp_path, fault_row):
    copied.run(["checksums"])
    copied.cfg.spot_check.experts = "all"
    path, at = middle_of_an_expert(tmp_path / "snapshot")
    flip(path, at)
    # the runner looks at samples only, so this bit is spot_check's to find
    with pytest.raises(VerificationError, match="layer 3, expert 5 came from") as caught:
        copied.run(["spot_check"])
    assert path.name in caught.value.message
    fault_row("a bit turns in a released shard", caught.value.message, "exit code 3, no answer")


def test_a_bit_that_turns_on_its_way(made, monkeypatch, fault_row):
    """The engine with cache.verify: right tokens, or an error that names the expert; never a token of wrong bytes."""
    cfg = made.cfg
    assert setup_stages(cfg) == ("download", "checksums")
    inputs = {name: made.find(name) for name in setup_stages(cfg)}
    turn = [0]

    def preadv(fd, buffers, offset):
        got = os.preadv(fd, buffers, offset)
        # a whole expert's: the middle of a smaller one may be its neighbour's
        turn[0] -= got > 16384
        if turn[0] == 0 and got > 16384:
            buffers[0][got // 2] ^= 16
        return got

    monkeypatch.setattr(DirectReader.__init__, "__defaults__", (preadv,))
    cfg.cache.ram_gib = 0.0
    engine = Engine.open(cfg, engine_files(inputs))
    try:
        session = Session(engine)
        prompt = list(range(5, 25))
        right = [p.token for p in session.generate(prompt, GREEDY) if p.token is not None]
        # every expert that is asked for was compared by now: anew, with nothing seen
        engine._experts._checksums._seen.clear()
        session.reset()
        engine.forget_experts()
        turn[0] = 9
        with pytest.raises(VerificationError, match=r"layer \d+, expert \d+ came from") as caught:
            list(session.generate(prompt, GREEDY))
        assert [p.token for p in session.generate(prompt, GREEDY) if p.token is not None] == right
    finally:
        engine.close()
    fault_row("a bit turns in a read of a shard", caught.value.message, "right again")


def test_without_recorded_checksums(tmp_path):
    runner = make_runner(tmp_path, *DEEPSEEK, "cache.verify=true")
    runner.run(["download"])
    with pytest.raises(UserError) as caught:
        Engine.open(runner.cfg, engine_files({"download": runner.find("download")}))
    assert "stages=[checksums]" in caught.value.hint


def test_a_pack_has_its_own():
    with pytest.raises(ConfigError, match=r"stages=\[checksums\] is not for model=tiny: repack"):
        make_runner(Path("unused"), "stages=[checksums]")
