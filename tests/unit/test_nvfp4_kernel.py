"""The Triton experts against their definition: interpreted here, compiled for cards that are not here."""

from __future__ import annotations

import mmap
import os
import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import nvfp4_expert, reference

# fp32 sums in another order; inputs are scaled so that 1 % of one term would show
TOLERANCE = 2e-6


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def page_aligned(record: torch.Tensor) -> torch.Tensor:
    """Return the record at the start of a page, where the device can read it."""
    if DEVICE == "cuda":
        return torch.zeros(len(record) + 4096, dtype=torch.uint8, device=DEVICE)[
            : len(record)
        ].copy_(record)
    memory = mmap.mmap(-1, -(-len(record) // 4096) * 4096)
    out = torch.frombuffer(memory, dtype=torch.uint8)
    out[: len(record)] = record
    return out


def make_case(hidden: int, intermediate: int, experts: int, seed: int = 0):
    """Records of random codes and block scales (finite E4M3), global scales, one token."""
    generator = torch.Generator().manual_seed(seed)
    codes, scales = 3 * hidden * intermediate // 2, 3 * hidden * intermediate // 16
    records = [
        page_aligned(
            torch.cat(
                [
                    torch.randint(0, 256, (codes,), dtype=torch.uint8, generator=generator),
                    torch.randint(0, 0x7F, (scales,), dtype=torch.uint8, generator=generator),
                ]
            )
        )
        for _ in range(experts)
    ]
    # large enough for silu to bend, small enough not to saturate
    global_scales = (0.5 + torch.rand(experts, 3, generator=generator)) * 1e-3
    return records, global_scales.to(DEVICE), torch.randn(1, hidden, generator=generator).to(DEVICE)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts"),
    [
        (
            256,
            48,
            6,
        ),  # the bundled model: 48 rows are three blocks of 16, 3 groups a row are no power of two
        (64, 16, 1),  # one block, one expert
        (80, 48, 3),  # 5 groups: the last block of groups is mostly masked
        (272, 80, 2),  # 17 groups
    ],
)
def test_interpreted_kernel_is_the_reference(hidden: int, intermediate: int, experts: int):
    records, scales, x = make_case(hidden, intermediate, experts)
    table = torch.tensor([record.data_ptr() for record in records], device=DEVICE)
    inner, out = (
        torch.full((experts, intermediate), float("nan"), device=DEVICE),
        torch.full((experts, hidden), float("nan"), device=DEVICE),
    )
    nvfp4_expert.nvfp4_experts(x, table, scales, inner, out)
    for row, record in enumerate(records):
        wanted = reference.nvfp4_swiglu_expert(x, record, scales[row], intermediate)[0]
        assert float((out[row] - wanted).norm() / wanted.norm()) < TOLERANCE


def test_address_zero_leaves_its_row_untouched():
    records, scales, x = make_case(64, 16, 2)
    table = torch.tensor([0, records[1].data_ptr()], device=DEVICE)
    inner, out = torch.zeros(2, 16, device=DEVICE), torch.full((2, 64), 7.0, device=DEVICE)
    nvfp4_expert.nvfp4_experts(x, table, scales, inner, out)
    assert (out[0] == 7.0).all()
    assert not (out[1] == 7.0).any()


def test_where_a_record_lies_never_shows():
    """The same records at other addresses and in another order of rows: the same bits."""
    records, scales, x = make_case(80, 48, 3)
    outs = []
    for order in ([0, 1, 2], [2, 0, 1]):
        moved = [page_aligned(records[i]) for i in order]
        table = torch.tensor([record.data_ptr() for record in moved], device=DEVICE)
        out = torch.empty(3, 80, device=DEVICE)
        nvfp4_expert.nvfp4_experts(x, table, scales[order], torch.empty(3, 48, device=DEVICE), out)
        outs.append(out[torch.tensor(order).argsort()])
    assert torch.equal(*outs)


SIGNATURES = {
    "_gate_up_kernel": {"table": "*i64", "x": "*bf16", "global_scales": "*fp32", "inner": "*fp32"},
    "_down_kernel": {"table": "*i64", "inner": "*fp32", "global_scales": "*fp32", "out": "*fp32"},
}


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], str]:
    """PTX of both kernels at full size for a card without and one with the conversion; no GPU is needed.

    In a process of its own: this one has the interpreter switched on, which replaces the compiler.
    """
    import json
    import subprocess
    import sys

    code = (
        "import json, sys; sys.path.insert(0, '.'); from tests.unit import test_nvfp4_kernel as t;"
        "cards = [(90, False), (120, True)];"
        "ptx = [[cc, name, t.compile_for(name, cc, cvt)] for cc, cvt in cards for name in t.SIGNATURES];"
        "print(json.dumps(ptx))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(cc, name): ptx for cc, name, ptx in json.loads(done.stdout)}


def compile_for(name: str, capability: int, has_cvt: bool) -> str:
    kernel = getattr(nvfp4_expert, name)
    sizes = {
        "hidden": 2560,
        "intermediate": 640,
        "has_cvt": has_cvt,
        "block_rows": nvfp4_expert.BLOCK_ROWS,
        **nvfp4_expert._blocks(2560 if name == "_gate_up_kernel" else 640),
    }
    signature = {arg: SIGNATURES[name].get(arg, "constexpr") for arg in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    ptx: str = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return ptx


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_conversion_instruction_is_in_the_code_for_sm_120_alone(compiled, name: str):
    assert re.search(r"\.target sm_120a", compiled[120, name])
    assert "cvt.rn.f16x2.e2m1x2" in compiled[120, name]
    assert "e2m1x2" not in compiled[90, name]


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("capability", [90, 120])
def test_codes_are_read_in_words_of_eight_bytes_at_least(compiled, capability: int, name: str):
    """Single bytes over PCIe would be slow; only the block scales may be loaded as bytes."""
    loads = re.findall(r"ld\.global\.[\w.]*?(b\d+)", compiled[capability, name])
    assert loads.count("b64") >= loads.count("b8")
