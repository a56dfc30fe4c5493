"""Our engine against transformers' own model class, in fp32, from the same checkpoint read by another way.

The weights of the reference come straight from the safetensors files and are dequantised here, value by value
from the formats' bit fields: no kernel, no stage and no reader of ours has a part in it.
"""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import DynamicCache, Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from runtime.engine import Engine

# Measured on x86 (torch 2.13, fp32): 1.0e-5 after 1 and 7 tokens, 1.6e-5 after 100, 2.0e-5 after 600, on logits
# of standard deviation 4.7. It is the rounding of sums in another order through 8 layers; an expert's weight
# rounded to bf16, an n-gram window cut one token late or one block chosen wrongly gives 1e-2 and more.
TOLERANCE = 1e-4
DECODE_STEPS = 64
PREFIX = "model.language_model."
TABLE = f"{PREFIX}layers.1.ple.ple_embedding.ngram_embedding."
FP8_ROWS = ("in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.out_proj.weight")


def e4m3_values():
    """All 256 values by their bit fields, NaN left as 0."""
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        small = mantissa / 8 * 2.0**-6
        value = small if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(0.0 if byte & 0x7F == 0x7F else -value if byte & 0x80 else value)
    return torch.tensor(values)


E4M3 = e4m3_values()
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = torch.cat([E2M1, -E2M1])


def from_e4m3(tensor):
    return E4M3[tensor.view(torch.uint8).long()]


def from_nvfp4(raw, name):
    """Column 2j is the low nibble of byte j; 16 columns share a scale; one global scale."""
    codes, scales = raw[f"{name}.weight"].long(), from_e4m3(raw[f"{name}.weight_scale"])
    values = torch.empty(codes.shape[0], 2 * codes.shape[1])
    values[:, 0::2], values[:, 1::2] = E2M1[codes % 16], E2M1[codes // 16]
    return values * scales.repeat_interleave(16, dim=1) * raw[f"{name}.weight_scale_2"]


def through_fp8_rows(weight):
    """Round to the nearest E4M3 value of the row's own scale, ties to the even code, and back."""
    weight = weight.float()
    scale = weight.abs().amax(1, keepdim=True) / 448
    scaled = weight / scale
    table = E4M3[:127]
    above = torch.searchsorted(table, scaled.abs().contiguous()).clamp(1, 126)
    below = above - 1
    to_above, to_below = table[above] - scaled.abs(), scaled.abs() - table[below]
    even = torch.where(below % 2 == 0, below, above)
    code = torch.where(to_above < to_below, above, torch.where(to_below < to_above, below, even))
    return table[code] * scaled.sign() * scale


def read_raw(root):
    raw = {}
    for file in sorted(root.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            raw |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return raw


def reference_weights(raw):
    """Return the state dict of the reference, by the names of its own modules; every tensor of `raw` is used."""
    left = set(raw)
    out = {}
    layers = 1 + max(int(n.split("layers.")[1].split(".")[0]) for n in raw if "layers." in n)
    for layer in range(layers):
        name = f"{PREFIX}layers.{layer}.mlp.experts."
        mine = {n for n in raw if n.startswith(name)}
        left -= mine
        experts = sorted({int(n.removeprefix(name).split(".")[0]) for n in mine})
        gate, up, down = (
            [from_nvfp4(raw, f"{name}{e}.{p}_proj") for e in experts]
            for p in ("gate", "up", "down")
        )
        at = f"model.layers.{layer}.mlp.experts."
        pairs = zip(gate, up, strict=True)
        out[f"{at}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        out[f"{at}down_proj"] = torch.stack(down)
    parts = {int(n.split("shard_")[1].split(".")[0]): n for n in raw if n.startswith(f"{TABLE}sh")}
    left -= {*parts.values(), f"{TABLE}weight_scale"}
    table = torch.cat([from_e4m3(raw[parts[i]]) for i in range(len(parts))])
    # the released table stands for bf16 values: fp32 product, rounded once
    table = (table * raw[f"{TABLE}weight_scale"].float()).bfloat16().float()
    out["model.layers.1.ple.ple_embedding.ngram_embedding.weight"] = table
    for name in left:
        value = raw[name]
        out[name.replace(PREFIX, "model.")] = value if value.dtype == torch.int64 else value.float()
    return out


def build_reference(root, weights):
    text = json.loads((root / "config.json").read_text())["text_config"]
    config = Qwen4ExpTextConfig(**{**text, "dtype": "float32"})
    model = Qwen4ExpForCausalLM._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    found = model.load_state_dict(weights, strict=False)
    assert found.missing_keys == []
    assert found.unexpected_keys == []
    return model


@pytest.fixture(scope="module")
def weights(tiny_qwen):
    return reference_weights(read_raw(tiny_qwen))


@pytest.fixture(scope="module")
def reference(tiny_qwen, weights):
    return build_reference(tiny_qwen, weights)


def forced(tokens, prompt, step):
    """Return the logits at every position: a prompt in one piece, then one token after the other."""
    out = [step(tokens[:prompt])]
    out += [step([token]) for token in tokens[prompt:]]
    return torch.cat(out)


@torch.no_grad()
def reference_logits(model, tokens, prompt):
    cache = DynamicCache(config=model.config)
    return forced(
        tokens,
        prompt,
        lambda ids: model(torch.tensor([ids]), cache=cache, use_cache=True).logits[0],
    )


def our_logits(engine, tokens, prompt):
    state = engine.new_state()

    def step(ids):
        if len(ids) == 1:
            return engine.model.decode(ids[0], state)
        return engine.model.prefill(ids, state, all_logits=True)

    return forced(tokens, prompt, step)


def assert_same(found, wanted):
    difference = (found - wanted).abs().amax(1)
    print(f"largest difference {difference.max():.2e}, wanted std {wanted.std():.2f}")
    assert found.shape == wanted.shape
    assert difference.max() < TOLERANCE, (
        f"first at position {int((difference >= TOLERANCE).nonzero()[0])}"
    )
    assert torch.equal(found.argmax(1), wanted.argmax(1))


# where each starts in the text, so that n-gram boundaries fall into the prompt and into the decoded part
@pytest.mark.parametrize(("prompt", "start"), [(1, 165), (7, 160), (100, 100), (600, 80)])
def test_logits(reference, open_tiny, heldout_tokens, prompt, start):
    """600 tokens are beyond the indexer's budget of 128: blocks are chosen in the prompt and in every step."""
    tokens = heldout_tokens[start : start + prompt + DECODE_STEPS]
    assert 0 in tokens[:prompt]
    assert 0 in tokens[prompt:]
    engine = open_tiny()
    assert_same(our_logits(engine, tokens, prompt), reference_logits(reference, tokens, prompt))


def test_fp8_rows(tiny_qwen, weights, make_config, make_files, heldout_tokens):
    """DeltaNet matrices kept as E4M3 rows: the reference computes with the same values in fp32."""
    overrides = {"model.deltanet": "fp8_rows", "cache.ram_gib": 1.0}
    files = make_files(**overrides)
    rounded = {n: through_fp8_rows(w) if n.endswith(FP8_ROWS) else w for n, w in weights.items()}
    # 3 of each of 6 layers
    assert sum(not torch.equal(rounded[n], weights[n]) for n in weights) == 18
    reference = build_reference(tiny_qwen, rounded)
    tokens = heldout_tokens[100:216]
    engine = Engine.open(make_config(**overrides), files)
    try:
        found = our_logits(engine, tokens, prompt=100)
    finally:
        engine.close()
    assert_same(found, reference_logits(reference, tokens, prompt=100))
