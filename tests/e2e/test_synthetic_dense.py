"""Random dense checkpoints: the release's sizes, the same bytes every time, within the budget, and computable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_setup import make_runner
from transformers import AutoModelForCausalLM

from runtime.checkpoint import Checkpoint
from runtime.engine import Engine
from runtime.errors import UserError
from runtime.models.dense_weights import LAYERS_NAME, LayerLayout
from stages import synthetic_dense
from stages.opening import engine_files

CUT = {
    "vocab_size": 4608, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def small_runner(outputs: Path, *overrides: str):
    """Return a runner of a small checkpoint of the release's kind."""
    outputs.mkdir(parents=True, exist_ok=True)
    config = json.loads((synthetic_dense.RELEASED / "config.json").read_text())
    (outputs / "config.json").write_text(json.dumps(config | CUT))
    return make_runner(
        outputs, "model=dense_synthetic", f"model.path={outputs}", "model.context_tokens=256", "hw=cpu",
        "model.synthetic.layers=3", "model.synthetic.disk_gib=0.1", *overrides,
    )  # fmt: skip


def test_the_released_sizes_come_to_what_the_release_weighs():
    runner = make_runner(
        Path("."), "model=dense_synthetic", "model.weights=nvfp4", "model.synthetic.disk_gib=21"
    )
    plan = synthetic_dense.make_plan(runner.cfg)
    tensors = [t for i in range(29) for t in synthetic_dense.shard_tensors(plan, i)]
    assert sum(t.nbytes for t in tensors) == 15_231_233_024  # the release's index says so
    # the head in 8 bits, 28 layers of matrices in 4.5, norms and biases
    matrices = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 3584 * 18944)
    assert plan.copy_nbytes == pytest.approx(152064 * 3588 + matrices * 4.5 / 8, rel=1e-3)


def test_it_is_a_checkpoint_that_everybody_reads_and_this_engine_computes_in_every_format(tmp_path):
    """Stored weights give the logits of transformers; the quantised copies are made from it like from any other."""
    runner = small_runner(tmp_path / "a")
    runner.run(runner.cfg.model.makers)
    root = runner.find("synthetic").root
    checkpoint = Checkpoint.open(root)
    library = {n: t for path in checkpoint.files() for n, t in load_file(path).items()}
    assert set(library) == set(checkpoint.tensors)
    reference = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    tokens = torch.randint(4608, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = reference(tokens).logits[0]
    assert 0.3 < float(wanted.std()) < 3  # of a scale that a trained model has
    stored = None
    for weights in ("stored", "int8_rows", "nvfp4"):
        runner = small_runner(tmp_path / "a", f"model.weights={weights}")
        runner.run(runner.cfg.model.makers)
        files = engine_files({n: runner.find(n) for n in runner.cfg.model.makers})
        engine = Engine.open(runner.cfg, files)
        found = engine.model.prefill(tokens[0].tolist(), engine.new_state(), True)
        engine.close()
        if stored is None:
            stored = found
            assert float((found - wanted).abs().max()) < 2e-5 * float(wanted.std())
        else:
            assert (files.layers / LAYERS_NAME).exists()
            error = float((found - stored).norm() / stored.norm())
            assert 0.001 < error < {"int8_rows": 0.05, "nvfp4": 0.5}[weights]


def test_the_same_seed_makes_the_same_bytes_and_another_one_others(tmp_path):
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        runner = small_runner(tmp_path / name, f"model.synthetic.seed={seed}")
        runner.run(["synthetic"])
        files = runner.find("synthetic").record["files"]
        digests.append({n: e["blake3"] for n, e in files.items() if n.endswith("safetensors")})
    assert digests[0] == digests[1]
    assert all(digests[0][name] != digests[2][name] for name in digests[0])


def test_layers_of_a_cut_are_those_of_the_whole(tmp_path):
    runner = small_runner(tmp_path / "a")
    runner.run(["synthetic"])
    shorter = small_runner(tmp_path / "b", "model.synthetic.layers=1")
    shorter.run(["synthetic"])
    whole, cut = (Checkpoint.open(r.find("synthetic").root) for r in (runner, shorter))
    for name in cut.tensors:
        assert bytes(cut.read(cut.info(name))) == bytes(whole.read(whole.info(name))), name
    spec = synthetic_dense.make_plan(shorter.cfg).spec
    assert LayerLayout(cut, spec).num_experts == 1


@pytest.mark.parametrize(
    ("override", "said", "hint"),
    [
        ("model.synthetic.layers=5", "at most 4", "layers=4"),
        ("model.synthetic.disk_gib=0.001", "allows 1.0", "disk_gib=0.00"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_what_can(tmp_path, override, said, hint):
    runner = small_runner(tmp_path, override)
    with pytest.raises(UserError, match=said) as refused:
        runner.run(["synthetic"])
    assert hint in refused.value.hint
