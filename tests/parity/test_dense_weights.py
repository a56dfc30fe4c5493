"""Dense layers in 8 and 4 bits: against transformers with weights decoded by themselves, and what quantising costs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from conf.schema import ConfigError, Weights
from runtime.budget import plan_vram
from runtime.checkpoint import Checkpoint, CheckpointError
from runtime.engine import Engine
from runtime.errors import UserError
from runtime.living_kv.identity import model_identity
from runtime.models import dense
from runtime.models.dense_weights import LAYERS_NAME, DenseSpec, LayerLayout, entries
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.units import GIB
from stages import quantize
from stages.core import Runner
from stages.opening import engine_files
from tests.data.recall_model.make import FILLER, NAMES, NUMBERS
from tests.dense_models import QWEN25_7B
from tests.unit.test_nvfp4_matvec import decoded

RECALL = Path(__file__).resolve().parents[1] / "data" / "recall_model"
SIZES = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
KINDS = {
    "llama, tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2, biases": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": False}),
}
FORMATS = (Weights.int8_rows, Weights.nvfp4)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def released(request, tmp_path_factory):
    """A random model in BF16 and its folder; logits are spread, so that an error shows."""
    config_class, model_class, extra = request.param
    folder = tmp_path_factory.mktemp("released")
    torch.manual_seed(3)
    model = model_class(config_class(**SIZES | extra, eos_token_id=1)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(torch.rand_like(weight) + 0.5 * ("norm" in name))
            else:
                weight.mul_(4)
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    tokenizer = json.loads((RECALL / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model.float(), folder


def made(make_config, folder, tmp_path, weights, **more):
    """Run the set-up stages; return config and files of an engine."""
    config = make_config(
        "qwen25_7b_1m",
        **{"model.source": "local", "model.path": str(folder), "model.files": ["*.json", "*.safetensors"]},
        **{"model.weights": weights.value, "model.context_tokens": 256, **more},
    )  # fmt: skip
    runner = Runner(config, tmp_path / "artifacts")
    runner.run(config.model.makers)
    inputs = {name: runner.find(name) for name in config.model.makers}
    return config, engine_files(inputs)


def decode_file(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a quantised file, decoded apart from the code under test: fp64 under its released name."""
    out = {}
    with safe_open(path, "pt") as f:
        names = set(f.keys())
        for name in names:
            if name.endswith(("_scale", "_global")):
                continue
            value = f.get_tensor(name)
            if f"{name}_global" in names:
                value = decoded(
                    value, f.get_tensor(f"{name}_scale"), f.get_tensor(f"{name}_global")
                )
            elif f"{name}_scale" in names:
                scale = f.get_tensor(f"{name}_scale").numpy().astype(np.float64)
                value = torch.from_numpy(value.numpy().astype(np.float64) * scale[:, None])
            out[name] = value.double()
    return out


@pytest.mark.parametrize("weights", FORMATS)
def test_logits_are_those_of_the_decoded_weights(released, make_config, tmp_path, weights):
    model, folder = released
    config, files = made(make_config, folder, tmp_path, weights)
    values = decode_file(files.layers / LAYERS_NAME)
    reference = type(model)(model.config).double().eval()
    state = {name: t.double() for name, t in model.state_dict().items()} | values
    reference.load_state_dict(state, strict=False)
    # a tied head is rounded, its table is not
    reference.lm_head.weight = torch.nn.Parameter(values["lm_head.weight"])
    reference.model.embed_tokens.weight = torch.nn.Parameter(
        model.model.embed_tokens.weight.double()
    )
    tokens = torch.randint(300, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = reference(tokens).logits[0]
        plain = model.double()(tokens).logits[0]
        model.float()
    found = {}
    for is_resident in (True, False):
        engine = Engine.open(config, files, is_resident)
        try:
            state, ids = engine.new_state(), tokens[0].tolist()
            parts = [engine.model.prefill(ids[:7], state, all_logits=True)]
            parts += [engine.model.prefill(ids[7:30], state, True)]
            parts += [engine.model.decode(token, state) for token in ids[30:]]
            found[is_resident] = torch.cat(parts)
        finally:
            engine.close()
    assert torch.equal(found[True], found[False])  # streamed is resident, bit for bit
    error = float((found[True] - wanted).abs().max() / wanted.std())
    assert error < 2e-5  # fp32 sums in another order
    rounding = float((wanted - plain).norm() / plain.norm())
    assert 1e-3 < rounding < {Weights.int8_rows: 0.1, Weights.nvfp4: 0.9}[weights]


def test_what_is_written_is_the_nearest(released, make_config, tmp_path):
    """Errors of the matrices, against what uniform and E2M1 steps come to on Gaussian rows."""
    model, folder = released
    for weights, low, high in ((Weights.int8_rows, 0.004, 0.011), (Weights.nvfp4, 0.075, 0.095)):
        _, files = made(make_config, folder, tmp_path / weights.value, weights)
        values = decode_file(files.layers / LAYERS_NAME)
        for name, stored in model.state_dict().items():
            if ".layers." not in name:
                continue
            error = float((values[name] - stored).norm() / stored.norm())
            if stored.ndim == 1:
                assert error == 0
            else:
                assert low < error < high, (name, error)


def test_a_stopped_quantize_goes_on_and_ends_the_same(released, make_config, tmp_path, monkeypatch):
    _, folder = released
    _, whole = made(make_config, folder, tmp_path / "whole", Weights.nvfp4)
    convert, left = quantize.convert, [20]

    def stopping(*args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return convert(*args)

    monkeypatch.setattr(quantize, "convert", stopping)
    with pytest.raises(KeyboardInterrupt):
        made(make_config, folder, tmp_path / "parts", Weights.nvfp4)
    calls = []
    monkeypatch.setattr(quantize, "convert", lambda *args: calls.append(args) or convert(*args))
    _, parts = made(make_config, folder, tmp_path / "parts", Weights.nvfp4)
    spec = DenseSpec.from_config(json.loads((folder / "config.json").read_text()))
    assert 0 < len(calls) < len(list(quantize.sources(spec)))
    assert (parts.layers / LAYERS_NAME).read_bytes() == (whole.layers / LAYERS_NAME).read_bytes()


def test_the_plan_counts_what_is_kept(released, make_config, tmp_path):
    _, folder = released
    need, identities = {}, set()
    for weights in Weights:
        config, files = made(make_config, folder, tmp_path / weights.value, weights)
        engine = Engine.open(config, files)
        need[weights] = engine.plan.record_nbytes
        identities.add(model_identity(engine.model)["weights"])
        engine.close()
        layout = dense.expert_layout(dense.read_spec(files.snapshot), files)
        sizes = dense.model_sizes(
            dense.read_spec(files.snapshot), files, layout, config, torch.float32
        )
        planned = dense.planned_sizes(
            dense.read_spec(files.snapshot), config, torch.float32, has_gpu=False
        )
        # pages between shards
        assert abs(planned.record_nbytes - sizes.record_nbytes) <= 2 * 4096 * 4
        assert replace(planned, record_nbytes=sizes.record_nbytes) == sizes
    spec = DenseSpec.from_config(json.loads((folder / "config.json").read_text()))
    assert len(identities) == 3  # keys and values of one form are refused by another
    matrices = sum(s[0] * s[1] for s in spec.layer_shapes().values() if len(s) == 2)
    assert need[Weights.stored] >= 2 * matrices
    assert matrices <= need[Weights.int8_rows] <= 1.1 * matrices + 2 * 4096
    assert matrices * 4.5 / 8 <= need[Weights.nvfp4] <= 1.1 * matrices * 4.5 / 8 + 2 * 4096


def test_a_7b_fits_8_gb_in_four_bits_and_is_refused_as_stored(make_config):
    spec = DenseSpec.from_config(QWEN25_7B)
    limit = int(7.5 * GIB)  # of an 8 GB card, what its plan may use
    plans = {}
    for weights in Weights:
        config = make_config(
            "qwen25_7b_1m", **{"model.weights": weights.value, "stages": ["serve"]}
        )
        sizes = dense.planned_sizes(spec, config, torch.bfloat16, has_gpu=True)
        if weights is Weights.stored:
            # layers as stored stream through two slots, but their head and a widened layer must be there
            assert sizes.record_nbytes > 2 * 233e6
        plans[weights] = plan_vram(sizes, limit, 512, sizes.passing_slots, None)
    assert plans[Weights.nvfp4].kept_slots == 28
    assert plans[Weights.nvfp4].total_nbytes < limit
    assert plans[Weights.stored].kept_slots < plans[Weights.int8_rows].kept_slots < 28
    with pytest.raises(UserError, match="at least") as refused:
        plan_vram(sizes, 2 * GIB, 512, sizes.passing_slots, None)
    assert "model.weights=int8_rows or nvfp4" in refused.value.hint


def test_formats_that_cannot_be_are_refused(make_config):
    with pytest.raises(UserError, match="multiple of 16") as refused:
        entries("model.layers.0.mlp.down_proj.weight", (8, 24), Weights.nvfp4)
    assert "int8_rows" in refused.value.hint
    with pytest.raises(ConfigError, match="is of dense models"):
        make_config(**{"model.weights": "int8_rows"})
    with pytest.raises(ConfigError, match=r"add model\.weights"):
        make_config("qwen25_7b_1m", stages=["quantize"])


def test_a_file_of_another_shape_is_refused(released, make_config, tmp_path):
    _, folder = released
    _, files = made(make_config, folder, tmp_path, Weights.int8_rows)
    config = json.loads((folder / "config.json").read_text())
    spec = DenseSpec.from_config(config | {"intermediate_size": 128})
    with pytest.raises(CheckpointError, match="expected I8"):
        LayerLayout(Checkpoint.open(files.layers), spec)


def recall_prompts(count: int = 24) -> list[tuple[str, str]]:
    """Texts that hold four facts among words that say nothing, asked for one of them; and the answer."""
    rng, out = random.Random(4), []
    for _ in range(count):
        names = rng.sample(NAMES, 4)
        numbers = [rng.choice(NUMBERS) for _ in names]
        lines = [f"code of {n} {number} ." for n, number in zip(names, numbers, strict=True)]
        lines += [" ".join(rng.choices(FILLER, k=8)) + " ." for _ in range(4)]
        rng.shuffle(lines)
        asked = rng.randrange(4)
        out.append(("\n".join([*lines, f"code of {names[asked]}"]), numbers[asked]))
    return out


@pytest.mark.parametrize("weights", Weights)
def test_the_bundled_model_recalls_in_every_format(make_config, tmp_path, weights):
    config, files = made(make_config, RECALL, tmp_path, weights)
    engine = Engine.open(config, files)
    right = 0
    try:
        session, params = Session(engine), SamplingParams(temperature=0, max_tokens=1)
        for prompt, answer in recall_prompts():
            pieces = session.generate(engine.codec.encode_plain(prompt), params)
            right += "".join(piece.text for piece in pieces).strip() == answer
    finally:
        engine.close()
    print(weights.value, right)
    assert right >= 23
