"""The kernels of a decoded token compile at full size for cards that are not here: sm_90 and sm_120."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import delta_rule, fp8_matvec, hyper_connection, moe_token

BF16, FP32, INT = "*bf16", "*fp32", "i32"
SHAPE = {"hidden": 2560, "rank": 320, "streams": 4}
# kernel -> (types of its arguments, values of its constants, warps); arguments that are not named are bf16 pointers
KERNELS = {
    "hyper_connection._down_kernel": (
        {"gain": FP32, "eps": "fp32"},
        SHAPE | {"has_add": True, "block_rows": hyper_connection.DOWN_ROWS, "block": 4096},
        hyper_connection.DOWN_WARPS,
    ),
    "hyper_connection._up_kernel": (
        {},
        SHAPE | {"block_rows": hyper_connection.UP_ROWS, "block_rank": 512},
        hyper_connection.UP_WARPS,
    ),
    "delta_rule._conv_kernel": (
        {"out": FP32, "width": INT},
        {"num_taps": 4, "block": delta_rule.CONV_BLOCK},
        4,
    ),
    "delta_rule._delta_kernel": (
        {"qkv": FP32, "rate": FP32, "dt_bias": FP32, "norm": FP32, "state": FP32, "eps": "fp32"},
        {"heads": 48, "repeat": 3, "key_width": 2048, "key_dim": 128, "value_dim": 128},
        8,
    ),
    "moe_token._mlp_in_kernel": (
        dict.fromkeys(
            ("experts", "intermediate", "router_programs", "guess_programs", "shared_programs"), INT
        ),
        {"hidden": 2560, "block_rows": moe_token.IN_ROWS, "block": 4096},
        moe_token.IN_WARPS,
    ),
    "moe_token._route_kernel": (
        {
            "expert_scales": FP32,
            "route": "*i64",
            "weights": FP32,
            "scales": FP32,
            "num_experts": INT,
        },
        {"top_k": 10, "num_guesses": 16, "block": 512, "width": 16, "guess_width": 16},
        4,
    ),
    "moe_token._shared_down_kernel": (
        {"hidden": INT},
        {"intermediate": 640, "block_rows": moe_token.DOWN_ROWS, "block": 1024},
        4,
    ),
    "moe_token._combine_kernel": (
        {"weights": FP32, "rows": FP32, "hidden": INT},
        {"top_k": 10, "block": moe_token.COMBINE_BLOCK},
        4,
    ),
    "fp8_matvec._fp8_matvec_kernel": (
        {"weight": "*u8", "row_scale": FP32}
        | dict.fromkeys(("num_rows", "num_others", "programs"), INT),
        {
            "columns": 2560,
            "has_cvt": True,
            "block_rows": fp8_matvec.BLOCK_ROWS,
            "block": fp8_matvec.SHORT[0],
        },
        fp8_matvec.SHORT[1],
    ),
}
MODULES = {
    m.__name__.rpartition(".")[2]: m for m in (delta_rule, fp8_matvec, hyper_connection, moe_token)
}


def compile_kernel(
    kernel, types: dict, constants: dict, capability: int, options: dict, aligned: bool = False
) -> tuple[str, int]:
    """Return the PTX of a kernel and the bytes of shared memory that it takes.

    aligned: pointers are said to be multiples of 16 bytes, as a launch finds out of real buffers.
    """
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg, BF16) for arg in kernel.arg_names
    }
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if aligned and kind.startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return done.asm["ptx"], done.metadata.shared


def compile_for(name: str, capability: int) -> tuple[str, int]:
    """Return what `compile_kernel` does, for a name of `KERNELS`."""
    types, constants, num_warps = KERNELS[name]
    module, _, function = name.partition(".")
    kernel = getattr(MODULES[module], function)
    return compile_kernel(kernel, types, constants, capability, {"num_warps": num_warps})


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], tuple[str, int]]:
    """All kernels for both cards, from a process of its own: in this one the interpreter replaces the compiler."""
    code = (
        "import json, sys; sys.path.insert(0, '.'); from tests.unit import test_token_kernels_compile as t;"
        "print(json.dumps([[cc, name, t.compile_for(name, cc)] for cc in (90, 120) for name in t.KERNELS]))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(cc, name): tuple(found) for cc, name, found in json.loads(done.stdout)}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("capability", "target"), [(90, "sm_90a"), (120, "sm_120a")])
def test_kernels_compile(compiled, name: str, capability: int, target: str):
    ptx, shared = compiled[capability, name]
    assert re.search(rf"\.target {target}", ptx)
    assert shared < 48 * 1024
    assert "tf32" not in ptx


@pytest.mark.parametrize("capability", [90, 120])
def test_a_product_of_one_warp_has_no_shared_memory_to_race_for(compiled, capability: int):
    assert compiled[capability, "hyper_connection._up_kernel"][1] == 0


@pytest.mark.parametrize("capability", [90, 120])
def test_fp8_rows_are_converted_in_hardware(compiled, capability: int):
    assert "cvt.rn.f16x2.e4m3x2" in compiled[capability, "fp8_matvec._fp8_matvec_kernel"][0]
