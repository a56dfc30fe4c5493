"""The grouped Triton experts against their definition: interpreted here, compiled for cards that are not here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import nvfp4_grouped, reference_grouped
from tests.unit.test_nvfp4_kernel import DEVICE, make_case

# of a row's norm: fp32 sums in another order, on tensor cores from three bf16 parts of each fp32 number
TOLERANCE = 5e-6
# two parts of the inner values leave 2^-18 of them, or 2^-16 in the interpreter, which cuts bf16 off; a row's own sum
# may be small beside its terms: of 16 inner columns 3.3e-5 was seen on a GPU, of 640 it is 8.5e-6
TOLERANCE_BF16 = 6e-5
NAN = float("nan")


def make_pairs(counts: list[int], tokens: int, seed: int = 0):
    """Return (pair_tokens [P], starts [n + 1]) int32: each expert gets `count` tokens, in ascending order."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [
        torch.randperm(tokens, generator=generator)[:count].sort().values.int() for count in counts
    ]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return torch.cat(chosen).to(DEVICE), starts.to(DEVICE)


def run(x, pair_tokens, starts, records, scales, intermediate: int, **options) -> torch.Tensor:
    """Return y with a margin of one untouched row before and after, checked to be still NaN."""
    pairs = len(pair_tokens)
    table = torch.tensor([record.data_ptr() for record in records], device=DEVICE)
    inner = torch.full((pairs + 2, intermediate), NAN, device=DEVICE)
    y = torch.full((pairs + 2, x.shape[1]), NAN, device=DEVICE)
    options.setdefault("max_pairs", int(starts.diff().max()))
    nvfp4_grouped.grouped_experts(
        x, pair_tokens, starts, table, scales, inner[1:-1], y[1:-1], **options
    )
    for buffer in (inner, y):
        assert buffer[0].isnan().all()
        assert buffer[-1].isnan().all()
        assert not buffer[1:-1].isnan().any()
    return y[1:-1]


def row_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error of a row relative to its norm."""
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


def wanted_rows(x, pair_tokens, starts, records, scales, intermediate: int) -> torch.Tensor:
    y = torch.full((len(pair_tokens), x.shape[1]), NAN, device=DEVICE)
    reference_grouped.grouped_experts(
        x.float(), pair_tokens, starts, records, scales, intermediate, y
    )
    return y


CASES = [
    (256, 48, [5, 0, 17, 1, 40]),  # the bundled model; no pair, one pair, no multiple of the tile
    (80, 48, [16, 3]),  # 5 groups: the last block of columns is mostly masked
    (272, 80, [0, 33, 0]),  # 17 groups a row, rows that are no multiple of the tile
    (64, 16, [1]),  # one expert, one pair
    (144, 208, [20, 40]),  # more rows of the inner values than of the output
    (32, 16, [1000, 1, 0]),  # many tiles of one expert, none of the others
]


@pytest.mark.parametrize(("hidden", "intermediate", "counts"), CASES)
def test_fp32_is_the_definition(hidden: int, intermediate: int, counts: list[int]):
    records, scales, _ = make_case(hidden, intermediate, len(counts))
    tokens = max(counts) + 3
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    case = (x, *make_pairs(counts, tokens), records, scales, intermediate)
    assert row_error(run(*case), wanted_rows(*case)) < TOLERANCE


@pytest.mark.parametrize(("hidden", "intermediate", "counts"), CASES)
def test_bf16_tokens_are_taken_as_they_are(hidden: int, intermediate: int, counts: list[int]):
    records, scales, _ = make_case(hidden, intermediate, len(counts))
    tokens = max(counts) + 3
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1))
    case = (
        x.to(DEVICE, torch.bfloat16),
        *make_pairs(counts, tokens),
        records,
        scales,
        intermediate,
    )
    assert row_error(run(*case), wanted_rows(*case)) < TOLERANCE_BF16


@pytest.mark.parametrize("block_pairs", [16, 32, 64])
def test_every_tile_and_a_generous_bound_on_the_counts(block_pairs: int):
    counts = [31, 65, 2]
    records, scales, _ = make_case(80, 48, 3)
    x = torch.randn(70, 80, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    case = (x, *make_pairs(counts, 70), records, scales, 48)
    found = run(*case, block_pairs=block_pairs, max_pairs=300)
    assert row_error(found, wanted_rows(*case)) < TOLERANCE


def test_tokens_and_scales_far_from_one_keep_their_precision():
    records, scales, _ = make_case(64, 32, 2)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x *= torch.logspace(-8, 2, 9, base=2.0, device=DEVICE).unsqueeze(1)
    scales = scales * torch.tensor([0.1, 1e6, 1e-9], device=DEVICE)
    case = (x, *make_pairs([9, 5], 9), records, scales, 32)
    assert row_error(run(*case), wanted_rows(*case)) < TOLERANCE


def test_a_batch_without_pairs_does_nothing():
    records, scales, x = make_case(64, 16, 2)
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    table = torch.tensor([record.data_ptr() for record in records], device=DEVICE)
    inner, y = torch.empty(0, 16, device=DEVICE), torch.empty(0, 64, device=DEVICE)
    nvfp4_grouped.grouped_experts(x, empty, starts, table, scales, inner, y, max_pairs=0)
    out = torch.full((4, 64), NAN, device=DEVICE)
    where = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    nvfp4_grouped.add_pairs(out, y, where, torch.ones(4, 2, device=DEVICE), 0)
    assert out.isnan().all()


# ---- the weighted sum ----------------------------------------------------------------------------------------------


def make_route(tokens: int, top_k: int, experts: int):
    """Return (places [T, k] int32, weights [T, k], ends: places where an expert's pairs end) of random routes."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    order = ids.flatten().argsort(stable=True)
    where = order.argsort().view(tokens, top_k).sort(dim=1).values.int()
    counts = ids.flatten().bincount(minlength=experts)
    weights = torch.rand(tokens, top_k, generator=generator)
    return where.to(DEVICE), weights.to(DEVICE), counts.cumsum(0).tolist()


def add_in_batches(add, out, y, where, weights, ends: list[int], size: int) -> torch.Tensor:
    """Add y in batches of `size` experts, each batch from a buffer with NaN around its rows."""
    first = 0
    for end in [*ends[size - 1 : -1 : size], ends[-1]]:
        rows = torch.full((end - first + 2, y.shape[1]), NAN, device=DEVICE)
        rows[1:-1] = y[first:end]
        add(out, rows[1:-1], where, weights, first)
        first = end
    return out


@pytest.mark.parametrize("hidden", [80, 1100])
def test_the_sum_is_the_plain_loop_whatever_the_batches(hidden: int):
    tokens, top_k, experts = 13, 3, 7
    where, weights, ends = make_route(tokens, top_k, experts)
    generator = torch.Generator().manual_seed(4)
    y = torch.randn(tokens * top_k, hidden, generator=generator).to(DEVICE)
    before = torch.randn(tokens, hidden, generator=generator).to(DEVICE)

    def add_all(size: int, add) -> torch.Tensor:
        padded = torch.full((tokens + 2, hidden), NAN, device=DEVICE)
        padded[1:-1] = before
        add_in_batches(add, padded[1:-1], y, where, weights, ends, size)
        assert padded[0].isnan().all()
        assert padded[-1].isnan().all()
        return padded[1:-1]

    outs = {size: add_all(size, nvfp4_grouped.add_pairs) for size in (1, 3, experts)}
    assert torch.equal(outs[1], outs[experts])
    assert torch.equal(outs[3], outs[experts])
    loop = before.clone()
    for t in range(tokens):
        for j in range(top_k):
            loop[t] += weights[t, j] * y[int(where[t, j])]
    wanted = add_all(3, reference_grouped.add_pairs)
    assert torch.equal(wanted, loop)
    # a fused multiply-add rounds once where torch rounds twice
    assert row_error(outs[3], loop) < 1e-6


def test_tokens_without_a_pair_in_the_batch_are_left_alone():
    where = torch.tensor([[0, 4], [1, 2], [3, 5]], dtype=torch.int32, device=DEVICE)
    weights = torch.full((3, 2), 0.5, device=DEVICE)
    out = torch.tensor([[1.0], [NAN], [1.0]], device=DEVICE).repeat(1, 64)
    y = torch.full((2, 64), 4.0, device=DEVICE)
    nvfp4_grouped.add_pairs(out, y, where, weights, 3)  # places 3 and 4
    assert (out[0] == 3.0).all()
    assert out[1].isnan().all()
    assert (out[2] == 3.0).all()


# ---- compiled ------------------------------------------------------------------------------------------------------

SIGNATURES = {
    "_gate_up_kernel": {
        "table": "*i64", "x": "*bf16", "pair_tokens": "*i32", "starts": "*i32", "global_scales": "*fp32",
        "inner": "*fp32",
    },
    "_down_kernel": {
        "table": "*i64", "inner": "*fp32", "starts": "*i32", "global_scales": "*fp32", "y": "*fp32",
    },
}  # fmt: skip
TILES = (nvfp4_grouped.MIN_PAIRS, nvfp4_grouped.MAX_PAIRS)


def compile_for(name: str, capability: int, block_pairs: int) -> tuple[str, int]:
    """Return (PTX, bytes of shared memory) at full size as the wrapper launches it for bf16 tokens."""
    kernel = getattr(nvfp4_grouped, name)
    sizes = {
        "hidden": 2560,
        "intermediate": 640,
        "has_cvt": capability == 120,
        "operand": tl.bfloat16,
        "parts": 1 if name == "_gate_up_kernel" else 2,
        "block_pairs": block_pairs,
        "block_rows": nvfp4_grouped.BLOCK_ROWS,
        "block_columns": nvfp4_grouped.BLOCK_COLUMNS,
    }
    signature = {arg: SIGNATURES[name].get(arg, "constexpr") for arg in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, arg in enumerate(kernel.arg_names)
        if arg in SIGNATURES[name]
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes, attrs=aligned)
    options = {"num_warps": nvfp4_grouped.NUM_WARPS, "num_stages": nvfp4_grouped.NUM_STAGES}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return done.asm["ptx"], done.metadata.shared


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str, int], tuple[str, int]]:
    """Both kernels for a card without and one with the conversion, in a process without the interpreter."""
    code = (
        "import json, sys; sys.path.insert(0, '.'); from tests.unit import test_nvfp4_grouped as t;"
        "print(json.dumps([[cc, name, pairs, *t.compile_for(name, cc, pairs)]"
        " for cc in (90, 120) for name in t.SIGNATURES for pairs in t.TILES]))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    return {(cc, name, pairs): (ptx, shared) for cc, name, pairs, ptx, shared in rows}


@pytest.mark.parametrize("pairs", TILES)
@pytest.mark.parametrize("name", SIGNATURES)
def test_the_code_uses_each_card_s_own_instructions(compiled, name: str, pairs: int):
    assert "cvt.rn.f16x2.e2m1x2" in compiled[120, name, pairs][0]
    assert "e2m1x2" not in compiled[90, name, pairs][0]
    assert re.search(r"wgmma\.mma_async\S*f32\.bf16", compiled[90, name, pairs][0])
    assert re.search(r"mma\.sync\S*f32\.bf16", compiled[120, name, pairs][0])


@pytest.mark.parametrize("pairs", TILES)
@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("capability", [90, 120])
def test_tiles_fit_and_codes_are_not_read_byte_by_byte(
    compiled, capability: int, name: str, pairs: int
):
    ptx, shared = compiled[capability, name, pairs]
    assert shared <= 99 * 1024  # what a block of sm_120 may have
    assert not re.search(r"ld\.global\S*\.b8", ptx)
