"""The dense family against transformers: random checkpoints of every supported architecture, saved and read back."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from runtime.checkpoint import CheckpointError
from runtime.engine import EngineFiles
from runtime.errors import UserError
from runtime.models import dense
from runtime.models.dense_weights import DenseSpec, LayerLayout
from tests.dense_models import SIZES, open_dense

# fp32 sums in another order through 3 layers; logits have a standard deviation near 1
TOLERANCE = 2e-5

KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with biases, tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3, norms of heads": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def reference(request, tmp_path):
    """A random model of one architecture and the folder that it was saved to, in shards of a few tensors."""
    config_class, model_class, extra = request.param
    torch.manual_seed(3)
    model = model_class(config_class(**SIZES | extra)).eval()
    with torch.no_grad():
        for (
            name,
            weight,
        ) in model.named_parameters():  # biases and gains that do nothing hide mistakes
            if weight.ndim == 1:
                weight.copy_(torch.rand_like(weight) + 0.5 * ("norm" in name))
            else:
                weight.mul_(4)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    return model, tmp_path


def test_logits_equal_transformers_in_pieces_and_token_by_token(reference):
    model, folder = reference
    tokens = torch.randint(SIZES["vocab_size"], (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits[0]
    ours = open_dense(folder)
    state = ours.new_state()
    ids = tokens[0].tolist()
    found = [ours.prefill(ids[:7], state, all_logits=True), ours.prefill(ids[7:30], state, True)]
    found += [ours.decode(token, state) for token in ids[30:]]
    assert (torch.cat(found) - wanted).abs().max() <= TOLERANCE * wanted.std()
    assert state.position == 40


def test_streamed_layers_give_the_same_bits_as_resident_ones(reference):
    _, folder = reference
    ids = list(range(20))
    outs = []
    for rows in (None, 1, 2):  # all in memory; one and two of three kept
        model = open_dense(folder, cache_rows=rows)
        state = model.new_state()
        outs.append(torch.cat([model.prefill(ids[:15], state, True), model.decode(15, state)]))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_a_cache_smaller_than_the_model_keeps_what_it_holds(tmp_path):
    """The layers go round: an LRU would find nothing, ever."""
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    model = open_dense(tmp_path, cache_rows=1)
    state = model.new_state()
    for token in range(4):
        model.decode(token, state)
    assert model.experts.counters.sweep_hits == 3
    assert model.experts.counters.sweep_misses == 4 * SIZES["num_hidden_layers"] - 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(tmp_path, change, named):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(UserError, match=named):
        DenseSpec.from_config(config | change)


def test_a_tensor_that_nobody_knows_stops_the_opening(reference):
    _, folder = reference
    spec = DenseSpec.from_config(json.loads((folder / "config.json").read_text()))
    from runtime.checkpoint import Checkpoint

    found = Checkpoint.open(folder)
    found.tensors["model.layers.0.self_attn.sinks"] = next(iter(found.tensors.values()))
    with pytest.raises(CheckpointError, match=r"self_attn\.sinks"):
        LayerLayout(found, spec)


def test_the_plan_from_the_configuration_is_that_of_the_files(reference, make_config):
    _, folder = reference
    spec, config = dense.read_spec(folder), make_config("qwen25_7b_1m")
    files = EngineFiles(folder)
    found = dense.model_sizes(spec, files, dense.expert_layout(spec, files), config, torch.float32)
    planned = dense.planned_sizes(spec, config, torch.float32, has_gpu=False)
    # saved in fp32, planned for the two bytes of a release
    assert 2 * planned.embedding_nbytes == found.embedding_nbytes
    assert planned.state_nbytes == found.state_nbytes
    assert abs(2 * planned.record_nbytes - found.record_nbytes) <= 16 * 4096


def test_a_copy_of_a_state_goes_on_with_the_same_bits(reference):
    model = open_dense(reference[1])
    state, other = model.new_state(), model.new_state()
    model.prefill(list(range(20)), state)
    other.restore(state.tensors())
    assert other.position == 20
    assert torch.equal(model.decode(3, other), model.decode(3, state))
