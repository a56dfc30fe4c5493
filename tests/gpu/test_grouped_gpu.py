"""The grouped experts at full size on a CUDA device. Run with `-m gpu`."""

from __future__ import annotations

import pytest
import torch

from kernels import nvfp4_grouped, reference, reference_grouped
from kernels.nvfp4_expert import _has_cvt
from runtime.experts.arena import HostArena
from tests.unit.test_nvfp4_grouped import make_pairs, row_error

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE, TOKENS, TOP_K, EXPERTS = 2560, 640, 300, 10, 8
RECORD_NBYTES = 2_764_800
COUNTS = [300, 1, 0, 47, 150, 16, 64, 7]


@pytest.fixture(scope="module")
def case():
    """Eight full-size experts in pinned RAM, a copy in VRAM, their global scales, and a prompt in bf16."""
    generator = torch.Generator().manual_seed(0)
    arena = HostArena(EXPERTS, RECORD_NBYTES)
    codes = 3 * HIDDEN * INTERMEDIATE // 2
    for row in range(EXPERTS):
        arena.rows[row, :codes] = torch.randint(
            0, 256, (codes,), dtype=torch.uint8, generator=generator
        )
        arena.rows[row, codes:] = torch.randint(
            0, 0x7F, (RECORD_NBYTES - codes,), dtype=torch.uint8, generator=generator
        )
    arena.pin()
    scales = ((0.5 + torch.rand(EXPERTS, 3, generator=generator)) * 1e-4).cuda()
    x = torch.randn(TOKENS, HIDDEN, generator=generator).cuda().bfloat16()
    yield arena, arena.rows.cuda(), scales, x
    arena.close()


def run(rows, scales, x, counts: list[int], **options) -> torch.Tensor:
    """Return y [P, H] of the first len(counts) records of `rows`."""
    pair_tokens, starts = make_pairs(counts, TOKENS)
    table = torch.tensor([rows[i].data_ptr() for i in range(len(counts))], device="cuda")
    inner = torch.full((len(pair_tokens), INTERMEDIATE), float("nan"), device="cuda")
    y = torch.full((len(pair_tokens), HIDDEN), float("nan"), device="cuda")
    nvfp4_grouped.grouped_experts(
        x, pair_tokens, starts, table, scales, inner, y, max_pairs=max(counts), **options
    )
    return y


def definition(slots, scales, x, counts: list[int]) -> torch.Tensor:
    pair_tokens, starts = make_pairs(counts, TOKENS)
    bounds = starts.tolist()
    return torch.cat(
        [
            reference.nvfp4_swiglu_expert(
                x[pair_tokens[bounds[i] : bounds[i + 1]].long()], slots[i], scales[i], INTERMEDIATE
            )
            for i in range(len(counts))
        ]
    )


def test_full_size_experts_are_the_definition(case):
    _, slots, scales, x = case
    found, wanted = run(slots, scales, x, COUNTS), definition(slots, scales, x, COUNTS)
    print(f"largest relative error of a row, bf16: {row_error(found, wanted):.2e}")
    assert row_error(found, wanted) < 2e-5


def test_full_size_experts_are_the_definition_in_fp32(case):
    _, slots, scales, x = case
    x = x.float() + torch.randn(x.shape, device="cuda") * 1e-3
    found, wanted = run(slots, scales, x, COUNTS), definition(slots, scales, x, COUNTS)
    print(f"largest relative error of a row, fp32: {row_error(found, wanted):.2e}")
    assert row_error(found, wanted) < 2e-5


def test_twice_and_from_pinned_ram_the_same_bits(case):
    arena, slots, scales, x = case
    first = run(slots, scales, x, COUNTS)
    assert torch.equal(run(slots, scales, x, COUNTS), first)
    assert torch.equal(run(arena.rows, scales, x, COUNTS), first)


def test_tiles_and_company_never_show(case):
    """An expert's rows are the same bits whatever the tile of pairs and whichever experts share its batch."""
    _, slots, scales, x = case
    wanted = run(slots, scales, x, COUNTS)
    for block_pairs in (16, 32, 64):
        assert torch.equal(run(slots, scales, x, COUNTS, block_pairs=block_pairs), wanted)
    first = sum(COUNTS[:1])
    alone = run(slots, scales, x, COUNTS[:1])
    assert torch.equal(alone, wanted[:first])


def test_the_conversion_in_hardware_gives_the_same_bits(case):
    _, slots, scales, x = case
    if torch.cuda.get_device_capability() < (10, 0):  # cards have it from 10.0 on
        assert not _has_cvt(x.device)
        return
    assert _has_cvt(x.device)
    found = [run(slots, scales, x, COUNTS, has_cvt=has_cvt) for has_cvt in (False, True)]
    assert torch.equal(*found)


def test_a_prompt_s_sum_is_the_same_whatever_the_batches():
    experts = 64
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(TOKENS, experts, generator=generator).topk(TOP_K).indices
    where = ids.flatten().argsort(stable=True).argsort().view(TOKENS, TOP_K).sort(dim=1).values
    where = where.int().cuda()
    weights = torch.rand(TOKENS, TOP_K, generator=generator).cuda()
    y = torch.randn(TOKENS * TOP_K, HIDDEN, generator=generator).cuda()
    ends = ids.flatten().bincount(minlength=experts).cumsum(0).tolist()
    outs = []
    for size in (1, 3, 8, experts):
        out, first = torch.zeros(TOKENS, HIDDEN, device="cuda"), 0
        for end in [*ends[size - 1 : -1 : size], ends[-1]]:
            nvfp4_grouped.add_pairs(out, y[first:end], where, weights, first)
            first = end
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)
    wanted = torch.zeros(TOKENS, HIDDEN, device="cuda")
    reference_grouped.add_pairs(wanted, y, where, weights, 0)
    assert row_error(outs[0], wanted) < 1e-6
