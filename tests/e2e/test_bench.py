"""`bench` on the bundled model: numbers that agree with each other, the same tokens for every cache, a tidy end.

Nothing here asks how fast the machine is.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_setup import make_runner

from runtime import hardware
from runtime.engine import Engine
from runtime.errors import UserError
from runtime.experts.routes import read_routes
from stages import bench
from stages.progress import Progress

SMALL = (
    "stages=[bench]", "hw=cpu", "hw.compute_threads=1", "bench.tokens=5", "bench.warmup_tokens=2",
    "bench.repeats=2", "bench.prompt_length=9", "model.context_tokens=64", "model.prefill_tokens=4",
)  # fmt: skip


def runner_of(outputs: Path, *argv: str, run_dir: Path | None = None):
    runner = make_runner(outputs, *SMALL, "bench.plot=false", *argv)
    runner.run_dir = run_dir
    return runner


def measured(outputs: Path, folder: Path, *argv: str):
    """Run bench in this process, without a plot; returns bench.json."""
    runner_of(outputs, *argv, run_dir=folder).run(["bench"])
    return json.loads((folder / "bench.json").read_text())


@pytest.fixture
def closed(monkeypatch) -> list[Engine]:
    """The engines that were closed."""
    engines: list[Engine] = []
    real = Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: engines.append(engine) or real(engine))
    return engines


def test_the_numbers_agree_with_each_other(cli, outputs, tmp_path):
    """The real program: bench.json, bench.png and the table."""
    done = cli(*SMALL, f"paths.artifacts={outputs}/artifacts")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (path,) = tmp_path.glob("outputs/runs/*/*/bench.json")
    found = json.loads(path.read_text())
    assert path.with_name("bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert not list(path.parent.glob("*.tmp"))

    repeats = found["repeats"]
    assert len(repeats) == 2
    everything = []
    for repeat in repeats:
        tokens, summary = repeat["tokens"], repeat["summary"]
        everything += tokens
        assert repeat["prompt"]["num_tokens"] == 9
        assert [t["position"] for t in repeat["warmup"]] == [10, 11]
        assert [t["position"] for t in tokens] == [12, 13, 14, 15, 16]
        assert len(repeat["token_ids"]) == 1 + 2 + 5
        for token in (*repeat["warmup"], *tokens, repeat["prompt"]):
            parts = ("drive_wait_ms", "row_wait_ms", "device_wait_ms", "host_ms")
            assert sum(token[part] for part in parts) == pytest.approx(token["total_ms"])
            assert token["device_wait_ms"] == 0
            nbytes = token["counters"]["read_nbytes"] + token["row_read_nbytes"]
            assert token["read_nbytes"] == nbytes
        for token in tokens:
            looked_up = [token["counters"][k] for k in ("hits", "vram_hits", "late", "misses")]
            assert sum(looked_up) == 48, "8 layers of 6 experts"
        mean_ms = sum(t["total_ms"] for t in tokens) / len(tokens)
        assert summary["decode_tok_s"] == pytest.approx(1000 / mean_ms)
        assert summary["efficiency"] == pytest.approx(summary["floor_ms"] / mean_ms)
        assert summary["floor_ms"] == max(summary["floors_ms"].values())
        prompt = repeat["prompt"]
        assert summary["prefill_tok_s"] == pytest.approx(9000 / prompt["total_ms"])
    total = found["total"]
    assert total["generated_tokens"] == len(everything) == 10
    assert total["counters"]["misses"] == sum(t["counters"]["misses"] for t in everything)
    mean_ms = sum(t["total_ms"] for t in everything) / len(everything)
    assert total["decode_tok_s"] == pytest.approx(1000 / mean_ms)
    rates = sorted(repeat["summary"]["decode_tok_s"] for repeat in repeats)
    assert found["decode_tok_s"]["min"] == rates[0]
    assert found["decode_tok_s"]["max"] == rates[1]
    assert found["decode_tok_s"]["median"] == pytest.approx(sum(rates) / 2)
    assert found["is_repeatable"] is True
    assert found["changed"]["bench.tokens"] == 5
    assert found["rates"]["drive_gib_s"] > 0

    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["repeat", "tok/s"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "2", "all"]
    assert lines[1].split()[1] == f"{repeats[0]['summary']['decode_tok_s']:.2f}"
    assert found["plan"] in "\n".join(lines)
    assert any(line.startswith("prompt: 9 tokens in ") for line in lines)


def test_the_same_tokens_with_and_without_a_cache(outputs, tmp_path):
    cached = measured(outputs, tmp_path)
    bare = measured(outputs, tmp_path, "cache.ram_gib=0", "prefetch.experts=0")
    assert bare["repeats"][0]["token_ids"] == cached["repeats"][0]["token_ids"]
    assert bare["total"]["read_nbytes_per_token"] > cached["total"]["read_nbytes_per_token"]
    drive = bare["drive_gib_s"]  # before, and behind each repeat
    assert len(drive) == 1 + len(bare["repeats"])
    for i, repeat in enumerate(bare["repeats"]):
        rate = repeat["summary"]["rates"]["drive_gib_s"]
        assert rate == pytest.approx((drive[i] + drive[i + 1]) / 2)
        needed = repeat["summary"]["read_nbytes_per_token"]
        assert repeat["summary"]["floors_ms"]["drive"] == pytest.approx(needed / rate / 2**30 * 1e3)
    assert bare["rates"]["drive_gib_s"] == pytest.approx(sum(drive) / len(drive))
    assert bare["changed"]["cache.ram_gib"] == 0
    other = measured(outputs, tmp_path, "bench.seed=1", "bench.repeats=1")
    assert other["repeats"][0]["token_ids"] != cached["repeats"][0]["token_ids"]
    assert not (tmp_path / "bench.png").exists()


def test_drafts_are_measured_beside_decoding_without_them(outputs, tmp_path):
    plain = measured(outputs, tmp_path, "bench.tokens=20")
    found = measured(outputs, tmp_path, "bench.tokens=20", "drafts.enabled=true", "drafts.depth=2")
    drafted = found["drafted"]
    wanted = plain["repeats"][0]["token_ids"]
    for repeat in (*found["repeats"], *drafted["plain"]["repeats"]):
        assert repeat["token_ids"] == wanted
    assert found["is_repeatable"]
    assert drafted["source"] == "lookup"
    assert sum(depth["passes"] for depth in drafted["gate"]["depths"]) == drafted["passes"]
    assert drafted["plain"]["total"]["tokens_per_pass"] == 1
    passes = sum(len(r["tokens"]) + len(r["warmup"]) for r in found["repeats"])
    assert drafted["passes"] == passes
    assert passes + drafted["accepted"] == 2 * 22
    assert plain["drafted"] is None


@pytest.mark.parametrize("acceptance", [0, 0.6, 1])
def test_guesses_of_a_chosen_acceptance(outputs, tmp_path, capsys, acceptance):
    words = ("drafts.enabled=true", "drafts.depth=3", "drafts.gate=false", "bench.tokens=20")
    found = measured(outputs, tmp_path, *words, f"bench.acceptance={acceptance}")
    assert found["is_repeatable"]
    first, second = found["repeats"]
    assert [t["num_tokens"] for t in first["tokens"]] == [t["num_tokens"] for t in second["tokens"]]
    accepted, passes = found["drafted"]["accepted"], found["drafted"]["passes"]
    # a pass gives four tokens at most: 2 of the warm-up are one pass, 20 are five
    least, most = {0: (0, 0), 0.6: (8, 28), 1: (32, 32)}[acceptance]
    assert least <= accepted <= most
    assert passes + accepted == 2 * 22
    assert f"drafts (the answer, {acceptance:.0%} right)" in capsys.readouterr().out


def test_conversations_decoded_together(outputs, tmp_path, capsys):
    """Each decodes what it decodes alone; the table counts all their tokens."""
    alone = [
        measured(outputs, tmp_path, f"bench.seed={seed}", "bench.repeats=1") for seed in (0, 1)
    ]
    found = measured(outputs, tmp_path, "serve.max_batch=2", "cache.ram_gib=0.002")
    wanted = [token for bench in alone for token in bench["repeats"][0]["token_ids"]]
    assert [repeat["token_ids"] for repeat in found["repeats"]] == [wanted] * 2
    assert (found["conversations"], found["changed"]["serve.max_batch"]) == (2, 2)
    for repeat in found["repeats"]:
        assert {token["num_tokens"] for token in repeat["tokens"]} == {2}
        assert repeat["summary"]["tokens_per_pass"] == 2
    assert "2 conversations decoded together: each gets" in capsys.readouterr().out


def test_routes_are_recorded(outputs, tmp_path):
    """Both repeats: prompts of 4 + 4 + 1 tokens, 7 decoded ones, and what was dropped before a cold repeat."""
    found = measured(outputs, tmp_path, "record=true", "bench.is_cold=true")
    trace = read_routes(tmp_path / "routes.bin")
    kinds = [(group[0].kind.name, len(group)) for group in trace.forwards()]
    repeat = [("forget", 1), ("sweep", 8), ("sweep", 8), *[("decode", 8)] * 8]
    assert kinds == 2 * repeat
    decoded = sum(len(s.experts) for s in trace.steps if s.kind.name == "decode")
    counts = [found["total"]["counters"][k] for k in ("hits", "vram_hits", "late", "misses")]
    assert decoded == sum(counts) + 2 * 48, "the prompts' last pieces have one token each"


def test_more_tokens_than_the_window_has(cli, outputs, tmp_path):
    """Refused before an engine is opened: the message has every number."""
    done = cli(*SMALL, "bench.prompt_length=58", f"paths.artifacts={outputs}/artifacts")
    assert done.returncode == 1
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()[-2:]
    assert error == (
        "error: bench takes 65 tokens (prompt 58, warm-up 2, counted 5), the context window has 64"
    )
    assert "model.context_tokens=65" in hint
    assert not list(tmp_path.rglob("bench.json"))


def test_the_last_place_of_the_window_is_used(outputs, tmp_path):
    found = measured(outputs, tmp_path, "bench.prompt_length=57", "bench.repeats=1")
    assert found["repeats"][0]["tokens"][-1]["position"] == 64


def test_a_cold_bench_empties_the_cache_and_counts_the_warm_up(
    outputs, tmp_path, monkeypatch, capsys
):
    """Before each repeat, what was in the cache is forgotten."""
    calls: list[int] = []
    real = getattr(Engine, "forget_experts", None)

    def forget(engine: Engine) -> None:
        calls.append(engine.counters().experts.lookups)
        if real is not None:
            real(engine)

    monkeypatch.setattr(Engine, "forget_experts", forget, raising=False)
    found = measured(outputs, tmp_path, "bench.is_cold=true")
    # before each repeat: 7 tokens of 48 experts, and the 9th token of the prompt, which is a piece of its own
    assert calls == [0, 8 * 48]
    for repeat in found["repeats"]:
        assert repeat["warmup"] == []
        assert [t["position"] for t in repeat["tokens"]] == [10, 11, 12, 13, 14, 15, 16]
    assert capsys.readouterr().out.startswith("repeat")


def test_a_stop_token_does_not_end_a_bench(outputs, tmp_path, monkeypatch, capsys):
    real = bench.Sampler.__call__

    def stop(sampler, logits):
        real(sampler, logits)
        return 0  # <|endoftext|>

    monkeypatch.setattr(bench.Sampler, "__call__", stop)
    found = measured(outputs, tmp_path)
    assert found["repeats"][0]["token_ids"] == [0] * 8
    assert len(found["repeats"][0]["tokens"]) == 5


def test_ctrl_c_in_the_middle_closes_the_engine(outputs, tmp_path, monkeypatch, closed):
    count = 0

    def interrupt(_bar, _count=1) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner_of(outputs, run_dir=tmp_path).run(["bench"])
    assert len(closed) == 1
    assert not list(tmp_path.glob("bench.*"))


def test_repeats_that_differ_are_told(outputs, monkeypatch, caplog, capsys):
    odd = iter(range(100))
    monkeypatch.setattr(bench.Sampler, "__call__", lambda *_: next(odd))
    runner_of(outputs).run(["bench"])
    assert any("different tokens" in record.getMessage() for record in caplog.records)
    assert "measured in this run" in capsys.readouterr().out


def test_the_prompt_is_text_and_depends_on_the_seed_alone(tiny_codec):
    prompt = bench.random_prompt(tiny_codec, 300, seed=3)
    assert prompt == bench.random_prompt(tiny_codec, 300, seed=3)
    assert prompt[:40] == bench.random_prompt(tiny_codec, 40, seed=3)
    assert prompt != bench.random_prompt(tiny_codec, 300, seed=4)
    assert not tiny_codec.stop_ids & set(prompt)
    assert max(prompt) < tiny_codec.vocab_size
    assert all(tiny_codec.decode([token]) for token in prompt)


def test_window_arithmetic(make_config):
    numbers = {"bench.tokens": 10, "bench.warmup_tokens": 0, "bench.prompt_length": 54}
    bench.check_window(make_config(**{"model.context_tokens": 64, **numbers}))
    with pytest.raises(UserError, match="the context window has 63"):
        bench.check_window(make_config(**{"model.context_tokens": 63, **numbers}))


def test_rates_of_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.measure_pcie_gib_s() == 0.0
    assert hardware.measure_vram_gib_s() == 0.0
