"""The Qwen checkpoint: the released shapes to the byte, and every tensor that is not as it must be."""

import copy
import json
import math
import shutil
import struct

import pytest
import torch
from safetensors import safe_open

from runtime.checkpoint import Checkpoint, CheckpointError, read_header
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey, Nvfp4Shape
from runtime.models.qwen_weights import (
    QwenSpec,
    account,
    expert_name,
    read_expert_block,
    read_expert_scalars,
    read_ngram_table,
    read_residents,
    table_from_json,
    table_to_json,
)

PREFIX = "model.language_model."
TABLE = f"{PREFIX}layers.1.ple.ple_embedding.ngram_embedding."

# specification, section 1.1
FULL = {
    "model_type": "qwen4_exp",
    "text_config": {
        "model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "full_attention_interval": 4,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
        "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
        "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000_000, "mrope_section": [11, 11, 10],
            "mrope_interleaved": True, "partial_rotary_factor": 0.25,
        },
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
        "indexer_compress_ratio": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "output_gate_type": "sigmoid",
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "norm_topk_prob": True,
        "hc_count": 4, "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128, "split_ngram_parts": 128, "seed": 1234,
        "bos_token_id": 248044, "eos_token_id": 248044, "pad_token_id": None,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def full():
    return QwenSpec.from_config(FULL)


@pytest.fixture(scope="module")
def spec(tiny_qwen):
    return QwenSpec.from_config(json.loads((tiny_qwen / "config.json").read_text()))


@pytest.fixture(scope="module")
def checkpoint(tiny_qwen):
    return Checkpoint.open(tiny_qwen)


def changed(checkpoint, **tensors):
    """The same checkpoint with some headers' entries replaced (None: gone)."""
    merged = {**checkpoint.tensors, **tensors}
    return Checkpoint(checkpoint.root, {n: info for n, info in merged.items() if info is not None})


def patched(checkpoint, name, at, raw, folder):
    """The same checkpoint with some bytes of a copy of one tensor's file replaced."""
    info = checkpoint.tensors[name]
    path = folder / info.extent.file.name
    shutil.copyfile(info.extent.file, path)
    with open(path, "r+b") as f:
        f.seek(info.extent.offset + at)
        f.write(raw)
    return Checkpoint(folder, {**checkpoint.tensors, **read_header(path)})


def test_released_residents_to_the_byte(full):
    shapes = full.resident_shapes()
    assert len(shapes) == 1199 - 129  # the table's parts and scale are not resident
    constants = {n: math.prod(s) for n, s in shapes.items() if "ple_embedding." in n}
    assert sum(constants.values()) * 8 == 280
    assert sum(map(math.prod, shapes.values())) - 35 == 4_947_698_560


@pytest.mark.parametrize(
    ("inside", "nbytes"),
    [
        (("linear_attn.",), 2 * 2_076_180_480 + 20_659_968),
        (("self_attn.",), 1_234_716_672),
        ((".mlp.",), 597_934_080),
        (("hyper_connection",), 1_281_249_280),
        ((".ple.",), 65_679_640),
        (("lm_head",), 1_271_398_400),
        (("embed_tokens",), 1_271_398_400),
    ],
)
def test_released_parts_to_the_byte(full, inside, nbytes):
    """Section 8.2, the DeltaNet matrices as BF16."""
    width = {name: 8 if "ple_embedding." in name else 2 for name in full.resident_shapes()}
    assert nbytes == sum(
        math.prod(shape) * width[name]
        for name, shape in full.resident_shapes().items()
        if any(part in name for part in inside)
    )


def test_released_sizes(full):
    block = Nvfp4Shape(full.hidden, full.intermediate)
    assert block.record_nbytes == block.payload_nbytes == 2_764_800 == 675 * 4096
    assert block.parts() == {
        "gate codes": (0, 819_200),
        "up codes": (819_200, 819_200),
        "down codes": (1_638_400, 819_200),
        "gate scales": (2_457_600, 102_400),
        "up scales": (2_560_000, 102_400),
        "down scales": (2_662_400, 102_400),
    }
    assert full.table_row_nbytes == 160
    assert (full.rotary_dim, full.index_blocks, full.ple_layer) == (64, 512, 1)
    assert [i for i, is_attention in enumerate(full.is_attention) if is_attention] == [
        *range(3, 48, 4)
    ]
    assert (full.key_width, full.value_width, full.conv_width) == (2048, 6144, 10240)


def test_fields_that_a_release_may_leave_out_or_rename():
    config = copy.deepcopy(FULL)
    text = config["text_config"]
    text["layer_types"] = [k.replace("full", "indexed") for k in text["layer_types"]]
    for key in ("norm_topk_prob", "seed", "attention_bias", "tie_word_embeddings"):
        del text[key]
    text["eos_token_id"] = [248044, 248046]
    assert QwenSpec.from_config(config) == QwenSpec.from_config(FULL)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("output_gate_type", "silu"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("norm_topk_prob", False),
        ("indexer_kv_heads", 2),
        ("ngram_size", 4),
        ("ple_layer_ids", [2, 6]),
        ("layer_types", ["linear_attention", "sliding_attention"]),
        ("layer_types", ["linear_attention"] * 47),  # one too few
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e7, "partial_rotary_factor": 0.25}),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused(key, value):
    config = copy.deepcopy(FULL)
    config["text_config"][key] = value
    with pytest.raises(UserError, match="rope_type" if key == "rope_parameters" else key):
        QwenSpec.from_config(config)


def test_another_architecture_is_refused():
    with pytest.raises(UserError, match="qwen3_5_moe"):
        QwenSpec.from_config({"model_type": "qwen3_5_moe"})


def test_every_tensor_has_a_place(checkpoint, spec):
    counts = account(checkpoint, spec)
    assert counts == {
        "expert blocks": 8 * 64 * 6,
        "expert scalars": 8 * 64 * 3,
        "n-gram table": 5,
        "residents": 8 * 22 + 5 + 9,
    }
    assert sum(counts.values()) == len(checkpoint.tensors)


def test_vision_and_draft_head_are_left_out(checkpoint, spec):
    info = checkpoint.info("lm_head.weight")
    more = {"model.visual.patch_embed.proj.weight": info, "mtp.fc_hidden.weight": info}
    counts = account(changed(checkpoint, **more), spec)
    assert (counts["left out: vision tower"], counts["left out: draft head (MTP)"]) == (1, 1)


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.norm.weight",
        f"{PREFIX}layers.8.mlp.gate.weight",  # a layer more
        f"{PREFIX}layers.0.mlp.experts.64.up_proj.weight",  # an expert more
        f"{PREFIX}layers.0.self_attn.q_proj.weight",  # attention in a DeltaNet layer
        f"{TABLE}shard_4.weight",
        f"{PREFIX}layers.0.mlp.experts.gate_up_proj",  # the BF16 release
        "lm_head.bias",
        "x.mtp.weight",
    ],
)
def test_a_stranger_is_named(checkpoint, spec, name):
    stranger = checkpoint.info("lm_head.weight")._replace(name=name)
    with pytest.raises(CheckpointError, match=name):
        account(changed(checkpoint, **{name: stranger}), spec)


NAMES = [
    "lm_head.weight",
    f"{PREFIX}embed_tokens.weight",
    f"{PREFIX}hyper_connection_mixer.hc_norm.weight",
    f"{PREFIX}layers.7.self_attn.indexer.k_layernorm.weight",
    f"{PREFIX}layers.4.linear_attn.A_log",
    f"{PREFIX}layers.1.ple.conv1d.weight",
    f"{PREFIX}layers.1.ple.ple_embedding.layer_multipliers",
    f"{PREFIX}layers.0.mlp.experts.0.gate_proj.weight",
    f"{PREFIX}layers.7.mlp.experts.63.down_proj.weight_scale",
    f"{PREFIX}layers.3.mlp.experts.5.up_proj.weight_scale_2",
    f"{TABLE}shard_0.weight",
    f"{TABLE}shard_3.weight",
    f"{TABLE}weight_scale",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(checkpoint, spec, name):
    with pytest.raises(CheckpointError, match=name):
        account(changed(checkpoint, **{name: None}), spec)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["flat", "transposed", "dtype"])
def test_a_wrong_shape_or_dtype_is_named(checkpoint, spec, name, change):
    info = checkpoint.info(name)
    if change == "dtype":
        info = info._replace(dtype="U16" if info.dtype != "U8" else "I8")
    elif change == "flat":
        info = info._replace(shape=(math.prod(info.shape) + 1,))  # never right, whatever it was
    elif len(info.shape) > 1:
        info = info._replace(shape=info.shape[::-1])
    else:
        info = info._replace(shape=(1, *info.shape, 1))
    with pytest.raises(CheckpointError, match=name):
        account(changed(checkpoint, **{name: info}), spec)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF, 0xB8])  # NaN, -0, NaN, negative
@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
def test_a_block_scale_that_is_no_scale(checkpoint, spec, tmp_path, byte, projection):
    key = ExpertKey(2, 9)
    name = f"{expert_name(key)}{projection}.weight_scale"
    last = checkpoint.info(name).extent.nbytes - 1
    damaged = patched(checkpoint, name, last, bytes([byte]), tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} .*0x{byte:02X}"):
        read_expert_block(damaged, spec, key)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_global_scale_that_is_no_scale(checkpoint, tmp_path, value):
    key = ExpertKey(5, 63)
    name = f"{expert_name(key)}up_proj.weight_scale_2"
    damaged = patched(checkpoint, name, 0, struct.pack("<f", value), tmp_path)
    with pytest.raises(CheckpointError, match=rf"{name} is {value}"):
        read_expert_scalars(damaged, key)


def test_scalars_in_order_of_either_shape(checkpoint, tiny_qwen):
    """Global scales of gate, up, down; this release has no input scales; shape [1] is as good as []."""
    key = ExpertKey(0, 0)
    names = [f"{expert_name(key)}{p}_proj.weight_scale_2" for p in ("gate", "up", "down")]
    with safe_open(checkpoint.info(names[0]).extent.file, "pt") as f:
        wanted = [f.get_tensor(name).item() for name in names]
    got = read_expert_scalars(checkpoint, key)
    assert got[:3] == wanted
    assert all(map(math.isnan, got[3:]))
    shaped = {name: checkpoint.info(name)._replace(shape=(1,)) for name in names}
    inputs = {
        name.replace("weight_scale_2", "input_scale"): checkpoint.info(name) for name in names
    }
    assert read_expert_scalars(changed(checkpoint, **shaped, **inputs), key) == wanted * 2
    two = {names[1]: checkpoint.info(names[1])._replace(shape=(2,))}
    with pytest.raises(CheckpointError, match=names[1]):
        read_expert_scalars(changed(checkpoint, **two), key)


def test_residents_kept_as_fp8_rows(checkpoint, spec):
    residents = {r.name: r for r in read_residents(checkpoint, spec, has_fp8_rows=True)}
    kept = [name for name, r in residents.items() if r.is_fp8_rows]
    assert len(kept) == 3 * 6  # three matrices of each DeltaNet layer
    assert {name.split(".", 2)[2] for name in kept} == {
        "linear_attn.in_proj_qkv.weight",
        "linear_attn.in_proj_z.weight",
        "linear_attn.out_proj.weight",
    }
    assert {residents["lm_head.weight"].unit, residents["embed_tokens.weight"].unit} == {"model"}
    assert residents["layers.3.self_attn.q_proj.weight"].unit == "layers.3"
    assert not any(r.is_fp8_rows for r in read_residents(checkpoint, spec, has_fp8_rows=False))


def test_table_in_place(checkpoint, spec, tiny_qwen):
    """Parts in numeric order (the file has 3 before 2), the scale as the library reads it, and a JSON round trip."""
    table, scale = read_ngram_table(checkpoint, spec)
    offsets = [part.offset for part in table.parts]
    assert offsets[3] < offsets[2]
    with safe_open(table.parts[0].file, "pt") as f:
        assert scale == f.get_tensor(f"{TABLE}weight_scale").item()
        for part in range(4):
            wanted = f.get_tensor(f"{TABLE}shard_{part}.weight").view(torch.uint8)
            _, offset = table.locate(part * table.rows_per_part + 5)
            raw = table.parts[part].file.read_bytes()[offset : offset + table.row_nbytes]
            assert list(raw) == wanted[5].tolist()
    described = json.loads(json.dumps(table_to_json(table, scale, tiny_qwen)))
    assert table_from_json(described, tiny_qwen) == (table, scale)
