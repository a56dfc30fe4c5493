"""The qwen3_moe family against transformers on random checkpoints, and streamed against resident."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from runtime.checkpoint import Checkpoint, CheckpointError
from runtime.errors import UserError
from runtime.models import qwen3_moe
from runtime.models.qwen3_moe_weights import Qwen3MoeSpec, expert_layout
from tests.qwen3_moe_models import SIZES, open_model, save_random

# fp32 sums in another order through 4 layers
TOLERANCE = 2e-5
KINDS = {
    "as released": {},
    "weights that do not sum to one": {"norm_topk_prob": False},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
    "experts in every second layer": {"decoder_sparse_step": 2},
    "one layer without experts": {"mlp_only_layers": [1]},
    "one expert a token": {"num_experts_per_tok": 1},
    "BF16": {"dtype": torch.bfloat16},
    "F16 in one shard": {"dtype": torch.float16, "shard": "1GB"},
}
SCRIPTS = ((1, 1, 1), (7, 1, 1, 1), (100, 1, 1, 20, 1))


@pytest.fixture(scope="module", params=KINDS)
def reference(request, tmp_path_factory):
    """A random model and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("qwen3-moe")
    return save_random(folder, **KINDS[request.param]), folder


def tokens(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (count,), generator=generator).tolist()


def run(model, script, all_logits=False):
    """Feed pieces of a conversation; return the logits of each, of all its tokens if asked for."""
    state, ids, found, at = model.new_state(), tokens(sum(script)), [], 0
    for size in script:
        piece, at = ids[at : at + size], at + size
        found.append(
            model.decode(piece[0], state) if size == 1 else model.prefill(piece, state, all_logits)
        )
    return torch.cat(found)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_logits_equal_transformers(reference, script):
    wanted_model, folder = reference
    with torch.no_grad():
        wanted = wanted_model(torch.tensor([tokens(sum(script))])).logits[0]
    found = run(open_model(folder), script, all_logits=True)
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.std()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


class HostCopier:
    """Slots in RAM, filled at once: what a GPU's copy stream does in its own time."""

    def __init__(self, record_nbytes):
        self.slots = torch.full((40, record_nbytes), 255, dtype=torch.uint8)

    def copy(self, slot, record):
        self.slots[slot] = record

    def mark(self):
        return None

    launched = mark

    def wait(self, mark):
        """Everything is done when it is asked for."""

    follow = synchronize = wait


@pytest.mark.parametrize(
    "reference", ["as released", "one layer without experts", "BF16"], indirect=True
)
def test_streamed_experts_give_the_same_bits_as_resident_ones(reference):
    _, folder = reference
    script = (30, 1, 1, 12, 1)
    wanted = run(open_model(folder), script)
    top_k = qwen3_moe.read_spec(folder).top_k
    for cache_rows, guesses in ((top_k, 0), (top_k + 3, 3), (40, 4)):
        model = open_model(folder, cache_rows, guesses)
        assert torch.equal(run(model, script), wanted), (cache_rows, guesses)
        assert model.experts.counters.misses + model.experts.counters.sweep_misses > 0
        model.experts.close()
    model = open_model(folder, 40, 2, HostCopier)
    assert torch.equal(run(model, script), wanted), "through slots"
    assert model.experts.counters.copied_nbytes > 0
    model.experts.close()


# ---- hidden states in BF16 -------------------------------------------------------------------------------------------


def relative_error(found, wanted):
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("reference", ["as released", "BF16"], indirect=True)
def test_in_bf16_logits_are_as_close_to_fp32_as_those_of_transformers(reference):
    wanted_model, folder = reference
    script = (100, 1, 20, 1)
    ids = torch.tensor([tokens(sum(script))])
    peer = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        wanted = wanted_model(ids).logits[0]
        theirs = relative_error(peer(ids).logits[0], wanted)
    ours = relative_error(run(open_model(folder, dtype=torch.bfloat16), script, True), wanted)
    print(f"relative error: ours {ours:.4f}, theirs {theirs:.4f}")
    assert 0 < ours < 1.5 * theirs


@pytest.mark.parametrize("reference", ["BF16"], indirect=True)
def test_streamed_equals_resident_in_bf16(reference):
    _, folder = reference
    script = (30, 1, 1, 12, 1)
    wanted = run(open_model(folder, dtype=torch.bfloat16), script)
    for cache_rows, guesses in ((4, 0), (7, 3), (40, 4)):
        model = open_model(folder, cache_rows, guesses, dtype=torch.bfloat16)
        assert torch.equal(run(model, script), wanted), (cache_rows, guesses)
        model.experts.close()


@pytest.mark.parametrize("reference", ["BF16"], indirect=True)
def test_a_prompt_in_bf16_multiplies_whole_products(reference, monkeypatch):
    """One number of rows in these small prompts; fp32 has no products that are kept."""
    seen = []

    def swiglu(linear, x, *matrices):
        seen.append(len(x))
        return plain_swiglu(linear, x, *matrices)

    plain_swiglu = qwen3_moe.swiglu
    monkeypatch.setattr(qwen3_moe, "swiglu", swiglu)
    run(open_model(reference[1], dtype=torch.bfloat16), (30,))
    assert set(seen) == {qwen3_moe.PRODUCT_ROWS}
    seen.clear()
    run(open_model(reference[1]), (30,))
    assert sum(seen) == 30 * 4 * SIZES["num_experts_per_tok"]


def test_guesses_are_of_the_next_layer_with_experts(tmp_path):
    """A layer that repeats the one before makes every guess right: the hidden states hardly change."""
    save_random(tmp_path, decoder_sparse_step=2)
    model = open_model(tmp_path, num_guesses=4)
    first, last = (block.mlp for block in model.blocks if isinstance(block.mlp, qwen3_moe.Moe))
    x = torch.randn(1, SIZES["hidden_size"], generator=torch.Generator().manual_seed(2))
    rescaled = x / first.norm * last.norm
    assert sorted(first.guess(x)) == sorted(last.route(rescaled)[0][0].tolist())
    assert last.guess(x) == []


@pytest.fixture
def plain(tmp_path):
    """A folder with one random model in one file, experts in F32."""
    save_random(tmp_path, shard="1GB")
    return tmp_path


def rewrite(folder, files):
    """Write a checkpoint anew.  files: file name -> tensors, in file order."""
    import struct

    (folder / "model.safetensors").unlink()
    weight_map = {}
    for file, tensors_of_file in files.items():
        header, at = {}, 0
        for name, tensor in tensors_of_file.items():
            header[name] = {
                "dtype": "F32",
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            at += tensor.nbytes
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (len(text) % 2 + 1)  # an odd length: no tensor is aligned to its dtype
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors_of_file.values():
                out.write(tensor.contiguous().numpy().tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "order",
    ["by projection", "reversed", "over two shards", "shuffled"],
)
def test_experts_are_read_wherever_their_tensors_lie(plain, order):
    wanted = run(open_model(plain), (20, 1, 1))
    found = load_file(plain / "model.safetensors")
    names = sorted(found)
    if order == "by projection":
        names.sort(key=lambda name: (name.rpartition("_proj")[0][-5:], name))
    elif order == "reversed":
        names.reverse()
    elif order == "shuffled":
        permutation = torch.randperm(len(names), generator=torch.Generator().manual_seed(3))
        names = [names[i] for i in permutation]
    cut = len(names) // 2 if order in ("over two shards", "shuffled") else len(names)
    files = {"a.safetensors": names[:cut], "b.safetensors": names[cut:]}
    rewrite(plain, {file: {n: found[n] for n in some} for file, some in files.items() if some})
    for cache_rows in (None, 5):
        assert torch.equal(run(open_model(plain, cache_rows), (20, 1, 1)), wanted)


def test_adjacent_tensors_are_one_read(plain):
    layout = expert_layout(Checkpoint.open(plain), qwen3_moe.read_spec(plain))
    from runtime.experts.layout import ExpertKey

    assert all(len(layout.spans(ExpertKey(i, e))) == 1 for i in range(4) for e in range(16))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen2_moe"}, "model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "num_experts"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(plain, change, named):
    config = json.loads((plain / "config.json").read_text())
    with pytest.raises(UserError, match=named):
        Qwen3MoeSpec.from_config(config | change)


def test_a_missing_key_is_named():
    with pytest.raises(UserError, match="num_hidden_layers"):
        Qwen3MoeSpec.from_config({"model_type": "qwen3_moe"})


def test_checkpoints_that_cannot_be_read_are_refused_with_a_sentence(plain):
    spec, found = qwen3_moe.read_spec(plain), load_file(plain / "model.safetensors")
    strange = found | {"model.layers.0.self_attn.sinks": torch.zeros(3)}
    save_file(strange, plain / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"self_attn\.sinks"):
        expert_layout(Checkpoint.open(plain), spec)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file({n: t for n, t in found.items() if n != name}, plain / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        expert_layout(Checkpoint.open(plain), spec)
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(16, 80, 96)}
    save_file(found | fused, plain / "model.safetensors")
    with pytest.raises(CheckpointError, match="one tensor"):
        expert_layout(Checkpoint.open(plain), spec)


def test_a_copy_of_a_state_goes_on_with_the_same_bits(plain):
    model = open_model(plain)
    state = model.new_state()
    model.prefill(tokens(30), state)
    copied = state.tensors()
    wanted = model.decode(3, state)
    other = model.new_state()
    other.restore(copied)
    assert other.position == 30
    assert torch.equal(model.decode(3, other), wanted)
