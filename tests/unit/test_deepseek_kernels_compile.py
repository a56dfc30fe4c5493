"""DeepSeek's kernels of a decoded token compile at full size for cards that are not here, and fuse no product."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from kernels import (
    deepseek_attention,
    deepseek_compress,
    deepseek_index,
    deepseek_linear,
    deepseek_moe,
    deepseek_prompt,
    deepseek_token,
    mxfp4_expert,
)
from kernels.reference_deepseek import SLOTS_BLOCK
from tests.unit.test_token_kernels_compile import compile_kernel

SHARED_NBYTES = 99 * 1024  # what one program may have on the smaller card
FP32, FP64, INT64 = "*fp32", "*fp64", "*i64"
MIXING = {
    "hidden": 5120, "num_streams": 4, "mixes": 24, "block_rows": 32, "block_streams": 4,
    "block": deepseek_token.MIX_COLUMNS,
}  # fmt: skip
MIXED = {"fn": FP32, "partials": FP64, "post": FP32, "comb": FP32}
TABLES = {"position": INT64, "cos": FP32, "sin": FP32, "eps": "fp32"}
ATTENDED = {"chosen": "*i32", "scores": FP32, "sink": FP32}
ATTENDING = {
    "heads": 64, "dim": 512, "half": 32, "window": 128, "topk": 512, "places": 640, "is_wide": False,
    "block_heads": deepseek_attention.HEADS,
}  # fmt: skip
WINDOW_ALONE = {"topk": 0, "places": 128, "entries": None, "chosen": None}
EXTENDING = {
    "dim": 512, "key_dim": 128, "half": 32, "block_dim": 512, "block_key": 128,
}  # fmt: skip
EXPERT = {
    "hidden": 5120, "intermediate": 2304, "align": 8, "tile_blocks": deepseek_linear.TILE_BLOCKS,
}  # fmt: skip
BYTES = dict.fromkeys(("weight", "scale", "gate", "gate_scale", "up", "up_scale"), "*u8")
# kernel -> (types of its arguments, values of its constants, warps); arguments that are not named are bf16 pointers
KERNELS = {
    "deepseek_token._mix_kernel": (MIXED, MIXING, deepseek_token.MIX_WARPS),
    "deepseek_token._write_kernel": (
        MIXED,
        {"has_mixes": True, **MIXING},
        deepseek_token.MIX_WARPS,
    ),
    "deepseek_token._read_kernel": (
        MIXED
        | dict.fromkeys(("pre", "scale", "base", "next_pre"), FP32)
        | {"norm_eps": "fp32", "eps": "fp32"},
        {
            "has_mixes": True, "hidden": 5120, "num_streams": 4, "iterations": 20, "programs": 160, "block_streams": 4,
            "block_programs": 256, "block": 8192,
        },
        deepseek_token.READ_WARPS,
    ),
    "deepseek_token._write_kernel/alone": (
        MIXED,
        {"has_mixes": False, "fn": None, "partials": None, **MIXING},
        deepseek_token.MIX_WARPS,
    ),
    "deepseek_token._read_kernel/alone": (
        {"pre": FP32, "norm_eps": "fp32", "eps": "fp32"},
        {
            "has_mixes": False, "hidden": 5120, "num_streams": 4, "iterations": 0, "programs": 1, "block_streams": 4,
            "block_programs": 1, "block": 8192,
        } | dict.fromkeys(("partials", "scale", "base", "next_pre", "post", "comb")),
        deepseek_token.READ_WARPS,
    ),
    "deepseek_token._prepare_kernel": (
        TABLES,
        {"window": 128, "dim": 512, "half": 32, "rank": 1280, "block_dim": 512, "block_rank": 2048},
        4,
    ),
    "deepseek_token._engram_kernel": (
        {"gate": FP32, "eps": "fp32", "root": "fp32"},
        {"hidden": 5120, "num_streams": 4, "block": 8192},
        deepseek_token.READ_WARPS,
    ),
    "deepseek_attention._score_kernel": (
        TABLES | ATTENDED | {"scale": "fp32"},
        ATTENDING | {"block_dim": 512, "tile": deepseek_attention.SCORE_TILE},
        deepseek_attention.SCORE_WARPS,
    ),
    "deepseek_attention._mix_kernel": (
        TABLES | ATTENDED,
        ATTENDING | {"block_columns": deepseek_attention.MIX_COLUMNS, "tile": SLOTS_BLOCK},
        deepseek_attention.MIX_WARPS,
    ),
    "deepseek_attention._score_kernel/window": (
        TABLES | ATTENDED | {"scale": "fp32"},
        ATTENDING | WINDOW_ALONE | {"block_dim": 512, "tile": deepseek_attention.SCORE_TILE},
        deepseek_attention.SCORE_WARPS,
    ),
    "deepseek_attention._mix_kernel/window": (
        TABLES | ATTENDED,
        ATTENDING | WINDOW_ALONE | {"block_columns": deepseek_attention.MIX_COLUMNS, "tile": SLOTS_BLOCK},
        deepseek_attention.MIX_WARPS,
    ),
    "deepseek_index._query_kernel": (
        TABLES | {"scale": "fp32"},
        {"dim": 128, "half": 32, "block_dim": 128},
        1,
    ),
    "deepseek_index._score_kernel": (
        TABLES,
        {
            "heads": 32, "dim": 128, "ratio": 2, "topk": 512, "is_wide": False, "block_heads": 32, "block_dim": 128,
            "tile": deepseek_index.SCORE_TILE,
        },
        deepseek_index.SCORE_WARPS,
    ),
    "deepseek_index._list_kernel": (
        TABLES | {"candidates": "*i8", "chosen": "*i32"},
        {
            "ratio": 1, "capacity": 8192, "topk": 512, "num_blocks": 2048, "size": 8, "is_masked": False,
            "block_topk": 512, "block": 8192,
        },
        16,
    ),
    # a longer context than is planned for: the least that leaves blocks out
    "deepseek_index._list_kernel/masked": (
        TABLES | {"candidates": "*i8", "chosen": "*i32"},
        {
            "ratio": 1, "capacity": 32768, "topk": 512, "num_blocks": 2048, "size": 8, "is_masked": True,
            "block_topk": 512, "block": 32768,
        },
        32,
    ),
    "deepseek_index._mark_kernel": (
        TABLES | {"candidates": "*i8"},
        {
            "ratio": 1, "capacity": 32768, "num_blocks": 2048, "size": 8, "block_size": 8, "block": 4096,
        },
        32,
    ),
    "deepseek_compress._extend_kernel/one": (
        TABLES,
        EXTENDING | {"ratio": 1, "gates": None, "tail": None},
        deepseek_compress.WARPS,
    ),
    "deepseek_compress._extend_kernel/two": (
        TABLES | dict.fromkeys(("values", "gates", "tail"), FP32),
        EXTENDING | {"ratio": 2},
        deepseek_compress.WARPS,
    ),
    "deepseek_linear._fp8_kernel": (
        BYTES | dict.fromkeys(("num_rows", "group_rows"), "i32"),
        {
            "columns": 5120, "has_cvt": True, "block_rows": deepseek_linear.ROWS,
            "tile_blocks": deepseek_linear.TILE_BLOCKS,
        },
        deepseek_linear.WARPS,
    ),
    "deepseek_linear._fp8_kernel/soft": (
        BYTES | dict.fromkeys(("num_rows", "group_rows"), "i32") | {"out": FP32},
        {
            "columns": 5120, "has_cvt": False, "block_rows": deepseek_linear.ROWS,
            "tile_blocks": deepseek_linear.TILE_BLOCKS,
        },
        deepseek_linear.WARPS,
    ),
    "deepseek_linear._fp8_swiglu_kernel": (
        BYTES | {"num_rows": "i32", "limit": "fp32"},
        {"columns": 5120, "has_cvt": True, "tile_blocks": deepseek_linear.TILE_BLOCKS},
        deepseek_linear.SWIGLU_WARPS,
    ),
    "deepseek_linear._act_round_kernel": (
        {"num_blocks": "i32"}, {"tile_blocks": deepseek_linear.ACT_TILE}, 4
    ),
    "deepseek_linear._steady_kernel": (
        {"out": FP32, "ratio": FP32, "num_rows": "i32"},
        {
            "columns": 5120, "has_ratio": True, "is_double": True, "block_rows": deepseek_linear.STEADY_ROWS,
            "block": deepseek_linear.STEADY_BLOCK,
        },
        4,
    ),
    "mxfp4_expert._gate_up_kernel": (
        {"table": INT64, "weights": FP32, "limit": "fp32"},
        EXPERT | {"has_cvt": False},
        mxfp4_expert.GATE_WARPS,
    ),
    "mxfp4_expert._gate_up_kernel/hard": (
        {"table": INT64, "weights": FP32, "limit": "fp32"},
        EXPERT | {"has_cvt": True},
        mxfp4_expert.GATE_WARPS,
    ),
    "mxfp4_expert._down_kernel": (
        {"table": INT64},
        {
            "has_cvt": False, "block_rows": mxfp4_expert.DOWN_ROWS, **EXPERT,
        },
        mxfp4_expert.DOWN_WARPS,
    ),
    "deepseek_moe._route_kernel": (
        dict.fromkeys(("logits", "bias", "guess_logits", "guess_bias", "weights"), FP32)
        | {"route": INT64, "num_experts": "i32", "scale": "fp32"},
        {"top_k": 6, "num_guesses": 6, "block": 512, "width": 8, "guess_width": 8},
        4,
    ),
    "deepseek_moe._route_kernel/many_guesses": (
        dict.fromkeys(("logits", "bias", "guess_logits", "guess_bias", "weights"), FP32)
        | {"route": INT64, "num_experts": "i32", "scale": "fp32"},
        {"top_k": 6, "num_guesses": 10, "block": 512, "width": 8, "guess_width": 16},
        4,
    ),
    "deepseek_moe._combine_kernel": (
        {"hidden": "i32"}, {"top_k": 6, "block": deepseek_moe.COMBINE_BLOCK}, 4
    ),
    "deepseek_prompt._fp8_kernel": (
        BYTES | dict.fromkeys(("tokens", "num_rows", "group_rows"), "i32"),
        {
            "columns": 5120, "x_columns": 5120, "has_cvt": True, "is_wide": False, "tile_tokens": 64,
            "tile_rows": deepseek_prompt.TILE_ROWS,
        },
        deepseek_prompt.WARPS,
    ),
    "deepseek_prompt._fp4_kernel": (
        {"codes": "*u8", "scale": "*u8"} | dict.fromkeys(("tokens", "num_rows"), "i32"),
        {"columns": 5120, "is_wide": False, "tile_tokens": 64, "tile_rows": deepseek_prompt.TILE_ROWS},
        deepseek_prompt.WARPS,
    ),
    "deepseek_prompt._swiglu_kernel": (
        {"weights": FP32, "limit": "fp32"}, {"has_weights": True, "blocks": 72}, 1
    ),
}  # fmt: skip
# products of quantised or bf16 numbers are exact in fp32 (fp64): fused or not, the sums are the same
EXACT_PRODUCTS = ("deepseek_linear", "deepseek_moe", "deepseek_prompt", "mxfp4_expert")
BLACKWELL_ALONE = "mxfp4_expert._gate_up_kernel/hard"
STAGES = {"deepseek_attention._mix_kernel": deepseek_attention.MIX_STAGES}
CASES = [(cc, name) for cc in (90, 120) for name in KERNELS if cc == 120 or name != BLACKWELL_ALONE]
MODULES = {
    m.__name__.rpartition(".")[2]: m
    for m in (
        deepseek_attention,
        deepseek_compress,
        deepseek_index,
        deepseek_linear,
        deepseek_moe,
        deepseek_prompt,
        deepseek_token,
        mxfp4_expert,
    )
}


def compile_for(name: str, capability: int) -> tuple[str, int]:
    """PTX of one kernel at full size, and its bytes of shared memory."""
    types, constants, num_warps = KERNELS[name]
    module, _, function = name.partition("/")[0].partition(".")
    options = {
        "num_warps": num_warps,
        "num_stages": STAGES.get(name, 3),
        "enable_fp_fusion": name.startswith(EXACT_PRODUCTS),
    }
    kernel = getattr(MODULES[module], function)
    return compile_kernel(kernel, types, constants, capability, options, aligned=True)


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], tuple[str, int]]:
    """All kernels for both cards, from a process of its own: in this one the interpreter replaces the compiler."""
    code = (
        "import json, sys; sys.path.insert(0, '.'); from tests.unit import test_deepseek_kernels_compile as t;"
        "print(json.dumps([[cc, name, t.compile_for(name, cc)] for cc, name in t.CASES]))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(cc, name): tuple(found) for cc, name, found in json.loads(done.stdout)}


@pytest.mark.parametrize(("capability", "name"), CASES)
def test_kernels_compile(compiled, name: str, capability: int):
    ptx, shared = compiled[capability, name]
    assert re.search(rf"\.target sm_{capability}a", ptx)
    assert shared <= SHARED_NBYTES
    assert "tf32" not in ptx


@pytest.mark.parametrize(
    ("capability", "name"), [case for case in CASES if not case[1].startswith(EXACT_PRODUCTS)]
)
def test_products_are_rounded_before_they_are_added(compiled, name: str, capability: int):
    """As in the definitions: one fused multiply-add in a million falls on the other side of a bf16 rounding."""
    ptx, _ = compiled[capability, name]
    assert "fma." not in ptx
    assert not re.search(r"\b(mul|add|sub)\.f(32|64)\b", ptx)  # without .rn the assembler may fuse


def test_fp4_and_fp8_are_converted_in_hardware_where_it_can(compiled):
    assert "cvt.rn.f16x2.e2m1x2" in compiled[120, BLACKWELL_ALONE][0]
    for capability in (90, 120):
        assert "cvt.rn.f16x2.e4m3x2" in compiled[capability, "deepseek_linear._fp8_kernel"][0]
        assert "e4m3x2" not in compiled[capability, "deepseek_linear._fp8_kernel/soft"][0]
