"""The DeepSeek checkpoint: the released inventory to the byte, and every tensor or key that is not as it must be."""

import copy
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from runtime.checkpoint import Checkpoint, CheckpointError, Extent, TensorInfo
from runtime.errors import UserError
from runtime.experts.layout import ExpertKey
from runtime.models.deepseek_weights import (
    DeepseekSpec,
    Yarn,
    account,
    draft_expert_layout,
    draft_shapes,
    engram_table_shapes,
    expert_layout,
    resident_shapes,
)

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "deepseek_golden" / "checkpoint"
TINY = ROOT / "runtime" / "bundled" / "tiny-deepseek"

# specification, section 1.3
FULL = {
    "architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "image_token_id": 129264,
    "quantization_config": {
        "quant_method": "fp8", "expert_dtype": "fp4", "activation_scheme": "dynamic",
        "weight_block_size": [32, 32], "scale_fmt": "ue8m0",
    },
    "text_config": {
        "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40,
        "num_nextn_predict_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
        "moe_intermediate_size": 2304, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "rms_norm_eps": 1e-20,
        "sliding_window": 128, "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048, "candidate_block_size": 8, "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "max_position_embeddings": 1048576, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_head_dim": 256,
        "engram_pad_token_id": 2, "engram_compressed_vocab_size": 99092, "dspark_block_size": 5,
        "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128, "dspark_num_experts_per_tok": 3, "attention_bias": False,
        "attention_dropout": 0, "tie_word_embeddings": False, "use_cache": True, "initializer_range": 0.02,
    },
    "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32, "hidden_size": 1024},
}  # fmt: skip

# specification, section 2.1, written out: what every layer and every draft has, less its experts
BLOCK = """
attn.wq_a 1280 5120
attn.q_norm.weight BF16 1280
attn.wq_b 32768 1280
attn.wkv 512 5120
attn.kv_norm.weight BF16 512
attn.wo_a 8192 4096
attn.wo_b 5120 8192
attn.attn_sink F32 64
attn_norm.weight BF16 5120
ffn_norm.weight BF16 5120
hc_attn_fn F32 24 20480
hc_ffn_fn F32 24 20480
hc_attn_base F32 24
hc_ffn_base F32 24
hc_attn_scale F32 3
hc_ffn_scale F32 3
ffn.gate.weight BF16 EXPERTS 5120
ffn.gate.bias F32 EXPERTS
ffn.gate.bias_vl F32 EXPERTS
ffn.shared_experts.w1 2304 5120
ffn.shared_experts.w3 2304 5120
ffn.shared_experts.w2 5120 2304
"""
KV_SOURCE = """
attn.compressor.wkv.weight BF16 512 5120
attn.compressor.norm.weight BF16 512
attn.indexer.wk.weight BF16 128 512
attn.indexer.k_norm.weight BF16 128
"""
INDEX_SOURCE = "attn.indexer.wq_b 4096 1280\nattn.indexer.weights_proj.weight BF16 32 5120"
# shards 47 and 48 are in this order
ENGRAM = """
engram.embed.weight F8_E4M3 ROWS 256
engram.embed.scale F8_E8M0 ROWS 8
engram.k_weight BF16 4 5120
engram.q_weight BF16 4 5120
engram.wkv 25600 6144
"""
VISION_BLOCK = """
norm1.weight BF16 1024
attn.wqkv.weight BF16 3072 1024
attn.wqkv.bias BF16 3072
attn.wo.weight BF16 1024 1024
attn.wo.bias BF16 1024
norm2.weight BF16 1024
mlp.w1.weight BF16 5632 1024
mlp.w2.weight BF16 1024 2816
"""
VISION = """
vision.patch_embed.proj.weight BF16 1024 588
vision.patch_embed.proj.bias BF16 1024
vision.norm.weight BF16 1024
aligner.w1.weight BF16 5120 9216
aligner.w1.bias BF16 5120
aligner.w2.weight BF16 5120 5120
aligner.w2.bias BF16 5120
"""
DRAFT_EXTRAS = {
    0: "main_proj 5120 15360\nmain_norm.weight BF16 5120",
    1: "",
    2: """
norm.weight BF16 5120
markov_head.embed.weight BF16 129280 256
markov_head.head.weight BF16 129280 256
confidence_head.proj.weight BF16 1 5376
""",
}
NBYTES = {"F32": 4, "BF16": 2, "F8_E8M0": 1, "F8_E4M3": 1, "I8": 1}  # in the order of a shard


def parse(text, prefix="", **values):
    """Lines of `name dtype sizes`, or `name rows columns` for an FP8 matrix with its scales."""
    found = {}
    for line in filter(None, text.splitlines()):
        name, *rest = line.split()
        sizes = [values[n] if n in values else int(n) for n in rest if n not in NBYTES]
        if rest[0] in NBYTES:
            found[prefix + name] = (rest[0], tuple(sizes))
        else:
            found[f"{prefix}{name}.weight"] = ("F8_E4M3", tuple(sizes))
            found[f"{prefix}{name}.scale"] = ("F8_E8M0", (sizes[0] // 32, sizes[1] // 32))
    return found


def block_of(prefix, num_experts):
    found = parse(BLOCK, prefix, EXPERTS=num_experts)
    for expert in range(num_experts):
        for name, rows, cols in (("w1", 2304, 5120), ("w2", 5120, 2304), ("w3", 2304, 5120)):
            found[f"{prefix}ffn.experts.{expert}.{name}.weight"] = ("I8", (rows, cols // 2))
            found[f"{prefix}ffn.experts.{expert}.{name}.scale"] = ("F8_E8M0", (rows, cols // 32))
    return found


def released_shards():
    """Return shard number -> its tensors in file order, by section 1.2, 2.1 and 2.3."""
    shards = defaultdict(dict)
    shards[1] = parse(VISION)
    for layer in range(32):
        shards[1] |= parse(VISION_BLOCK, f"vision.blocks.{layer}.")
    shards[2] = parse("embed.weight BF16 129280 5120") | parse(
        "start BF16 5120\nend BF16 5120\nnewline BF16 5120", "image_"
    )
    for layer in range(40):
        found = block_of(f"layers.{layer}.", 384)
        if layer in (2, 8, 14, 20):
            found |= parse(KV_SOURCE, f"layers.{layer}.")
        if layer in (2, 8, 14):
            found |= parse("attn.compressor.wgate.weight BF16 512 5120", f"layers.{layer}.")
        if layer in (2, 8, 14, 20, 24, 28, 32, 36):
            found |= parse(INDEX_SOURCE, f"layers.{layer}.")
        shards[3 + layer] = found
    shards[43] = parse("head.weight BF16 129280 5120\nnorm.weight BF16 5120")
    for draft, extras in DRAFT_EXTRAS.items():
        shards[44 + draft] = block_of(f"mtp.{draft}.", 128) | parse(extras, f"mtp.{draft}.")
    order = list(NBYTES)
    for number, shard in shards.items():
        in_order = sorted(shard.items(), key=lambda item: (order.index(item[1][0]), item[0]))
        shards[number] = dict(in_order)
    shards[47] = parse(ENGRAM, "layers.1.", ROWS=384006168)
    shards[48] = parse(ENGRAM, "layers.14.", ROWS=384016682)
    return shards


@pytest.fixture(scope="module")
def released():
    """The released headers rebuilt: a checkpoint without files, and shard number -> (header end, file bytes)."""
    tensors, sizes = {}, {}
    for number, shard in released_shards().items():
        at, header = 0, {}
        for name, (dtype, shape) in shard.items():
            nbytes = math.prod(shape) * NBYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        end = 8 + -(-len(json.dumps(header, separators=(",", ":"))) // 8) * 8
        path = Path(f"/release/model-{number:05}-of-00048.safetensors")
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            extent = Extent(path, end + start, stop - start)
            tensors[name] = TensorInfo(name, entry["dtype"], entry["shape"], extent)
        sizes[number] = (end, end + at)
    return Checkpoint(Path("/release"), tensors), sizes


@pytest.fixture(scope="module")
def full():
    return DeepseekSpec.from_config(FULL)


def read_spec(folder):
    return DeepseekSpec.from_config(json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def spec():
    return read_spec(GOLDEN)


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint.open(GOLDEN)


def changed(checkpoint, **tensors):
    """The same checkpoint with some headers' entries replaced (None: gone)."""
    merged = {**checkpoint.tensors, **tensors}
    return Checkpoint(checkpoint.root, {n: info for n, info in merged.items() if info is not None})


def test_the_bundled_config_is_the_releases(full):
    assert read_spec(ROOT / "runtime" / "bundled" / "deepseek-v41-flash") == full


def nbytes_of(shapes):
    return sum(math.prod(shape) * NBYTES[dtype] for dtype, shape in shapes.values())


def part_nbytes(shapes, *inside, without=()):
    return nbytes_of(
        {
            name: entry
            for name, entry in shapes.items()
            if any(part in name for part in inside) and not any(part in name for part in without)
        }
    )


def test_released_headers_and_shards(released):
    """Section 1.2: names, dtypes and shapes give the size of every header and of every shard."""
    checkpoint, sizes = released
    assert len(checkpoint.tensors) == 96_085
    assert sum(info.extent.nbytes for info in checkpoint.tensors.values()) == 510_286_023_000
    assert sum(total for _, total in sizes.values()) == 510_296_708_312
    special = {2: 7_405_953_784, 8: 7_405_953_784, 14: 7_405_956_128, 20: 7_400_713_088}
    special |= dict.fromkeys((24, 28, 32, 36), 7_395_337_384)
    for layer in range(40):
        plain = 7_389_759_032 if layer < 10 else 7_389_761_368
        assert sizes[3 + layer][1] == special.get(layer, plain)
    ends = [end for end, _ in sizes.values()]
    assert (min(ends[2:42]), max(ends[2:42])) == (258_144, 261_448)
    assert {n: sizes[n] for n in (1, 2, 43, 44, 45, 46, 47, 48)} == {
        1: (27_384, 970_533_624),
        2: (352, 1_323_858_272),
        43: (184, 1_323_837_624),
        44: (84_936, 2_652_728_736),
        45: (84_616, 2_573_998_176),
        46: (85_624, 2_706_402_896),
        47: (664, 101_535_150_936),
        48: (672, 101_537_926_640),
    }


def test_every_released_tensor_has_a_place(released, full):
    checkpoint, _ = released
    with_drafts = {
        "Engram tables": 4,
        "draft experts": 3 * 128 * 6,
        "drafts": 3 * (798 - 768 - 1) + 7,
        "experts": 40 * 384 * 6,
        "left out: image delimiters": 3,
        "left out: routing bias of image tokens": 43,
        "left out: vision tower": 263,
        "residents": 40 * (2334 - 2304 - 1) + 11 + 8 + 24 + 8 + 3,
    }
    assert account(checkpoint, full, has_drafts=True) == with_drafts
    assert sum(with_drafts.values()) == 96_085
    counts = account(checkpoint, full)
    assert counts.pop("left out: drafts (DSpark)") == 2401
    assert counts.pop("left out: routing bias of image tokens") == 40
    assert counts == {
        k: v for k, v in with_drafts.items() if k in counts and "bias" not in k and "draft" not in k
    }
    assert sum(counts.values()) == 96_085 - 2401 - 40


def test_released_parts_to_the_byte(full):
    """Section 1.2; each plain layer and each draft have the bytes of section 2.1."""
    shapes, expert = resident_shapes(full), full.expert_shape.payload_nbytes
    bias = 384 * 4  # `bias_vl` is no resident
    for layer in (0, 9, 19, 39):
        plain = part_nbytes(shapes, f"layers.{layer}.") + bias + 384 * expert
        assert plain == 7_389_500_888
    assert 40 * 384 * expert == 288_777_830_400
    assert nbytes_of(engram_table_shapes(full)) == 202_758_032_400
    drafts = draft_shapes(full)
    assert part_nbytes(drafts, "mtp.1.") + 128 * 4 + 128 * expert == 2_573_913_560
    assert nbytes_of(drafts) + 3 * 128 * 4 + 3 * 128 * expert == 7_932_874_632
    rest = (".compressor.", ".indexer.", "_norm", "attn_sink")
    assert part_nbytes(shapes, ".attn.w") == 5_069_568_000
    assert part_nbytes(shapes, "embed.", "head.") == 2_647_654_400
    assert part_nbytes(shapes, ".shared_experts.") == 1_416_960_000
    assert part_nbytes(shapes, ".engram.") == 315_043_840
    assert part_nbytes(shapes, ".gate.") + 40 * bias == 157_409_280
    assert part_nbytes(shapes, ".hc_") == 157_295_040
    assert part_nbytes(shapes, ".compressor.", ".indexer.") == 81_835_008
    norms = part_nbytes(shapes, *rest[2:], "norm.weight", without=rest[:2])
    assert norms + 3 * 5120 * 2 == 1_013_760


def test_released_residents_by_name_and_shape(released, full):
    """What the specification lists is what is asked for: no more, no less."""
    listed = {name: (info.dtype, info.shape) for name, info in released[0].tensors.items()}
    asked = resident_shapes(full) | draft_shapes(full) | engram_table_shapes(full)
    skipped = (".ffn.experts.", "vision.", "aligner.", "image_", ".bias_vl")
    assert asked == {n: e for n, e in listed.items() if not any(part in n for part in skipped)}


def test_released_experts_in_their_shards(released, full):
    """Section 2.3: first bytes, skews, and reads that are always one page longer than the bytes."""
    checkpoint, sizes = released
    layout = expert_layout(checkpoint, full)
    assert layout.record_nbytes == 18_808_832
    assert [path.name[6:11] for path in layout.files] == [f"{n:05}" for n in range(3, 43)]
    first = dict.fromkeys(range(10), 594_986_552) | dict.fromkeys(range(10, 40), 594_988_888)
    first |= {2: 611_181_304, 8: 611_181_304, 14: 611_183_648, 20: 605_940_608}
    first |= dict.fromkeys((24, 28, 32, 36), 600_564_904)
    for layer in range(40):
        for expert in (0, 1, 2, 99, 383):
            weights, scales = layout.spans(ExpertKey(layer, expert))
            at = layout.payload_offsets(ExpertKey(layer, expert))
            assert (weights.nbytes, scales.nbytes) == (17_698_816, 1_110_016)
            assert at[0] == weights.need_nbytes - 17_694_720 == first[layer] % 4096
            assert at[1] - scales.dest == scales.need_nbytes - 1_105_920
            if expert == 0:
                assert weights.offset + at[0] == first[layer]
            if expert == 99:  # the last as a string
                assert weights.offset + weights.need_nbytes == sizes[3 + layer][1]
                assert weights.offset + weights.nbytes > sizes[3 + layer][1]
    starts = [
        [
            span.offset + at - span.dest
            for span, at in zip(layout.spans(key), layout.payload_offsets(key), strict=True)
        ]
        for key in (ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(0, 2))
    ]
    assert starts[0] == [594_986_552, 8_273_720]
    assert starts[1] == [594_986_552 + 17_694_720, 8_273_720 + 1_105_920]
    assert starts[2][0] == 2_576_795_192 == 594_986_552 + 112 * 17_694_720
    _, scales = layout.spans(ExpertKey(39, 0))
    assert scales.need_nbytes - 1_105_920 == 2136
    assert draft_expert_layout(checkpoint, full).record_nbytes == 18_808_832


def test_released_engram_in_place(released):
    """Section 2.4."""
    extents = {name: info.extent for name, info in released[0].tensors.items()}
    assert extents["layers.1.engram.embed.weight"][1:] == (664, 98_305_579_008)
    assert extents["layers.14.engram.embed.weight"][1:] == (672, 98_308_270_592)
    assert extents["layers.1.engram.embed.scale"][1:] == (98_305_579_672, 3_072_049_344)
    assert extents["layers.14.engram.embed.scale"][1:] == (98_308_271_264, 3_072_133_456)
    assert extents["layers.1.engram.wkv.weight"].offset == 101_377_710_936


def test_released_roles(full):
    """Section 1.4."""
    kv = [None, None, *[2] * 6, *[8] * 6, *[14] * 6, *[20] * 20]
    index = [*kv[:20], *[i for i in (20, 24, 28, 32, 36) for _ in range(4)]]
    assert [full.kv_source_of(i) for i in range(40)] == kv
    assert [full.index_source_of(i) for i in range(40)] == index
    assert [i for i in range(40) if full.is_kv_source(i)] == [2, 8, 14, 20]
    assert [i for i in range(40) if full.is_index_source(i)] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert full.compress_ratios == (0, 0, *[2] * 18, *[1] * 20)
    assert (full.engram_columns, full.engram_dim) == (24, 6144)
    assert full.yarn == Yarn(16.0, 32.0, 1.0, 65536)
    assert (full.eps, full.hc_eps, full.route_scale) == (1e-20, 1e-6, 1.5)
    assert (full.num_drafts, full.dspark_block, full.noise_id) == (3, 5, 128799)
    assert (full.target_layers, full.markov_rank) == ((37, 38, 39), 256)
    assert (full.draft_experts, full.draft_top_k) == (128, 3)


def test_roles_of_the_tiny_model():
    spec = read_spec(TINY)
    assert [spec.kv_source_of(i) for i in range(8)] == [None, 1, 1, 1, 4, 4, 4, 4]
    assert [spec.index_source_of(i) for i in range(8)] == [None, 1, 1, 1, 4, 4, 6, 6]
    assert draft_shapes(spec) == {}


def test_fields_that_a_release_may_leave_out():
    config = copy.deepcopy(FULL)
    for key in ("norm_topk_prob", "attention_bias", "tie_word_embeddings"):
        del config["text_config"][key]
    assert DeepseekSpec.from_config(config) == DeepseekSpec.from_config(FULL)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("gate_temp", 2.0),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("rope_scaling", FULL["text_config"]["rope_scaling"] | {"rope_type": "linear"}),
        ("compress_ratios", [0, 0, *[2] * 18, *[1] * 20]),  # those of the drafts are missing
        ("compress_ratios", [0, 0, *[2] * 18, *[1] * 20, 0, 0, 1]),
        ("compress_ratios", [0, 0, *[4] * 18, *[1] * 20, 0, 0, 0]),
        ("compress_ratios", [0, 2, *[2] * 18, *[1] * 20, 0, 0, 0]),  # nothing to read in layer 1
        ("kv_source_layer_ids", [2, 8, 14]),  # ratio 1 in layer 20, ratio 2 in its source
        ("kv_source_layer_ids", [2, 8, 14, 20, 40]),
        ("kv_source_layer_ids", [8, 2, 14, 20]),
        ("kv_source_layer_ids", [1, 2, 8, 14, 20]),  # no compression there
        ("index_source_layer_ids", [2, 8, 20]),
        ("index_source_layer_ids", [0, 2, 8, 14, 20]),
        ("candidate_source_layer_id", 24),
        ("hidden_size", 5136),
        ("moe_intermediate_size", 2320),
        ("head_dim", 500),
        ("index_head_dim", 100),
        ("engram_head_dim", 16),
        ("num_attention_heads", 60),
        ("qk_rope_head_dim", 63),
        ("qk_rope_head_dim", 130),
        ("num_experts_per_tok", 385),
        ("num_experts_per_tok", 0),
        ("engram_layer_ids", [14, 1]),
        ("engram_layer_ids", [1, 40]),
        ("engram_num_embeddings", [384006168]),
        ("engram_max_ngram_size", 1),
        ("engram_pad_token_id", 129280),
        ("dspark_target_layer_ids", [37, 38, 40]),
        ("dspark_num_experts_per_tok", 129),
        ("dspark_block_size", 0),
    ],
)  # fmt: skip
def test_unsupported_values_are_refused(key, value):
    config = copy.deepcopy(FULL)
    config["text_config"][key] = value
    wanted = {"rope_scaling": "rope_scaling.rope_type"}.get(key, key)
    if key == "compress_ratios" and value[1] == 2:
        wanted = "kv_source_layer_ids"
    with pytest.raises(UserError, match=rf"does not support {wanted}\b.*=.*\(only "):
        DeepseekSpec.from_config(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "awq"),
        ("expert_dtype", "fp8"),
        ("activation_scheme", "static"),
        ("weight_block_size", [128, 128]),
        ("scale_fmt", None),
    ],
)
def test_another_storage_is_refused(key, value):
    config = copy.deepcopy(FULL)
    config["quantization_config"][key] = value
    with pytest.raises(UserError, match=f"quantization_config.{key}={value!r}".replace("[", r"\[")):
        DeepseekSpec.from_config(config)


def test_another_architecture_is_refused():
    with pytest.raises(UserError, match="deepseek_v3"):
        DeepseekSpec.from_config({"model_type": "deepseek_v3"})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        DeepseekSpec.from_config(FULL | {"tie_word_embeddings": True})


@pytest.mark.parametrize(
    ("part", "key"),
    [(None, "quantization_config"), (None, "text_config"), ("text_config", "hc_mult"), ("text_config", "rope_scaling")],
)  # fmt: skip
def test_a_missing_key_is_named(part, key):
    config = copy.deepcopy(FULL)
    del (config[part] if part else config)[key]
    with pytest.raises(UserError, match=f"lacks '{key}'"):
        DeepseekSpec.from_config(config)


def test_every_golden_tensor_has_a_place(checkpoint, spec):
    counts = account(checkpoint, spec, has_drafts=True)
    assert counts == {
        "Engram tables": 4,
        "draft experts": 2 * 8 * 6,
        "drafts": 2 * 29 + 7,
        "experts": 6 * 16 * 6,
        "left out: routing bias of image tokens": 8,
        "residents": 6 * 29 + 3 + 5 + 4 + 9 + 8,
    }
    assert sum(counts.values()) == len(checkpoint.tensors)


def test_every_tiny_tensor_has_a_place():
    checkpoint, spec = Checkpoint.open(TINY), read_spec(TINY)
    assert account(checkpoint, spec) == account(checkpoint, spec, has_drafts=True)
    assert sum(account(checkpoint, spec).values()) == len(checkpoint.tensors)


def test_drafts_need_not_be_there(checkpoint, spec):
    tensors = {n: i for n, i in checkpoint.tensors.items() if not n.startswith("mtp.")}
    bare = Checkpoint(checkpoint.root, tensors)
    assert sum(account(bare, spec).values()) == len(tensors)
    with pytest.raises(CheckpointError, match=r"mtp\.0\."):
        account(bare, spec, has_drafts=True)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "layers.6.ffn.gate.weight",  # a layer more
        "layers.0.ffn.experts.16.w1.weight",  # an expert more
        "layers.0.attn.compressor.wkv.weight",  # no KV source
        "layers.3.attn.compressor.wgate.weight",  # ratio 1 has no gate
        "layers.2.engram.wkv.weight",
        "layers.0.ffn.gate.bias_vl.scale",
        "layers.0.ffn.experts.0.w1.bias",
        "image_middle",
        "x.mtp.weight",
        "head.scale",
    ],
)
def test_a_stranger_is_named(checkpoint, spec, name):
    stranger = checkpoint.info("head.weight")._replace(name=name)
    with pytest.raises(CheckpointError, match=rf"1 tensors .*{name}"):
        account(changed(checkpoint, **{name: stranger}), spec)


@pytest.mark.parametrize(
    "name", ["mtp.2.norm.weight", "mtp.0.norm.weight", "mtp.1.main_norm.weight"]
)
def test_a_stranger_among_the_drafts_is_named(checkpoint, spec, name):
    stranger = checkpoint.info("head.weight")._replace(name=name)
    more = changed(checkpoint, **{name: stranger})
    assert account(more, spec)["left out: drafts (DSpark)"] == 164
    with pytest.raises(CheckpointError, match=name):
        account(more, spec, has_drafts=True)


NAMES = [
    "head.weight",
    "norm.weight",
    "layers.0.attn.attn_sink",
    "layers.5.attn.wo_a.scale",
    "layers.5.attn.indexer.wq_b.weight",
    "layers.1.attn.compressor.wgate.weight",
    "layers.3.attn.indexer.wk.weight",
    "layers.3.engram.q_weight",
    "layers.1.engram.embed.scale",
    "layers.2.hc_ffn_fn",
    "layers.4.ffn.gate.bias",
    "layers.0.ffn.shared_experts.w2.scale",
    "layers.5.ffn.experts.15.w2.weight",
    "layers.0.ffn.experts.10.w3.scale",
    "mtp.0.main_proj.weight",
    "mtp.1.confidence_head.proj.weight",
    "mtp.1.ffn.experts.7.w1.scale",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(checkpoint, spec, name):
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        account(changed(checkpoint, **{name: None}), spec, has_drafts=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["flat", "dtype"])
def test_a_wrong_shape_or_dtype_is_named(checkpoint, spec, name, change):
    info = checkpoint.info(name)
    new = {"dtype": {"dtype": "F16"}, "flat": {"shape": (math.prod(info.shape) + 1,)}}[change]
    with pytest.raises(CheckpointError, match=name):
        account(changed(checkpoint, **{name: info._replace(**new)}), spec, has_drafts=True)
