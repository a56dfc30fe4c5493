"""The bench of the living memory at a tiny size on the CPU: the code that runs on a GPU, and what must be flat."""

from __future__ import annotations

import json

import pytest
import torch

from conf.schema import AnswerMode, MemoryConfig, Template, Weights
from tests.bench import bench_living_kv
from tests.bench.bench_living_kv import measure, predicted_nbytes, read_config, table
from tests.random_dense import random_model

TINY = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
    "max_position_embeddings": 1010000, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("weights", [Weights.int8_rows, Weights.nvfp4])
def test_rows_say_what_was_moved_and_memory_is_flat(tmp_path, weights):
    model = random_model(TINY, weights, torch.device("cpu"), torch.float32)
    logits = model.prefill([5, 6, 7], model.new_state())
    assert 0.05 < float(logits.std()) < 50  # products keep their scale
    config = MemoryConfig(
        window=128, chunk=64, budget=48, commit_tokens=256, ram_gib=0.0001, calibration=20, template=Template.none,
        mode=AnswerMode.kv,
    )  # fmt: skip
    rows = list(measure(model, config, tmp_path / "store", 3000))
    assert rows[-1].tokens >= 3000
    assert rows[0].tokens < 0.2 * rows[-1].tokens
    # the first row may still lack the buffers of questions
    peaks = {row.peak_nbytes for row in rows[1:]}
    assert len(peaks) == 1
    assert predicted_nbytes(model, config) > model.dense_nbytes
    far = rows[-1]
    assert 0 < far.fetched_tokens <= 48 + 128
    assert far.worth_nbytes <= far.moved_nbytes  # whole blocks move
    # pages of the drive
    assert far.read_nbytes >= far.moved_nbytes - model.spec.depth * 64 * 2 * 2 * 16 * 2
    assert model.dense_nbytes < far.step_nbytes < model.dense_nbytes + 400 * 4 * model.spec.kv_token_values  # fmt: skip
    assert table(rows).count("\n") == len(rows)


def test_the_command_prints_a_table_and_json(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sizes = "--layers 2 --tokens 400 --window 128 --chunk 64 --budget 48 --ram-gib 0.0001"
    places = ["--config", str(tmp_path / "config.json"), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["bench", *places, *sizes.split()])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    bench_living_kv.main()
    told = capsys.readouterr().out
    assert told.startswith("2 layers in nvfp4 on cpu")
    assert json.loads(told.splitlines()[-1])["rows"][-1]["tokens"] >= 400
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert read_config(tmp_path / "config.json", 1)["num_hidden_layers"] == 1
