"""Products of many tokens in Triton against the definition: interpreted, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import deepseek_prompt
from kernels import reference_deepseek as ops
from kernels.formats import fp8_blocks_dequantize, mxfp4_dequantize
from tests.unit.test_deepseek_linear import BF16, DEVICE, random_fp8, random_x


@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "groups"),
    [(1, 32, 32, 1), (17, 96, 160, 1), (70, 64, 96, 2), (5, 256, 64, 4)],
)
def test_fp8_product(tokens: int, rows: int, columns: int, groups: int):
    generator = torch.Generator().manual_seed(tokens)
    weight, scale = random_fp8(generator, rows, columns)
    x = ops.act_rounded(random_x(generator, tokens, groups * columns)).to(BF16)
    found = deepseek_prompt.fp8_product(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), groups)
    full = fp8_blocks_dequantize(weight, scale.view(torch.float8_e8m0fnu))
    parts = zip(x.float().chunk(groups, 1), full.chunk(groups), strict=True)
    wanted = torch.cat([ops.block_product(part, w) for part, w in parts], dim=1)
    assert torch.equal(found.cpu(), wanted.to(BF16))


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 32, 32), (17, 96, 160), (70, 72, 96)])
@pytest.mark.parametrize("skew", [0, 8, 3])
def test_fp4_product(tokens: int, rows: int, columns: int, skew: int):
    generator = torch.Generator().manual_seed(tokens)
    x = ops.act_rounded(random_x(generator, tokens, columns)).to(BF16)
    raw = torch.randint(
        0, 256, (skew + rows * columns // 2,), dtype=torch.uint8, generator=generator
    )
    steps = torch.randint(
        110, 130, (skew + rows * columns // 32,), dtype=torch.uint8, generator=generator
    )
    codes, scales = raw[skew:].view(rows, -1), steps[skew:].view(rows, -1)
    found = deepseek_prompt.fp4_product(
        x.to(DEVICE), raw.to(DEVICE)[skew:].view(rows, -1), steps.to(DEVICE)[skew:].view(rows, -1)
    )
    wanted = ops.block_product(x.float(), mxfp4_dequantize(codes, scales))
    assert torch.equal(found.cpu(), wanted.to(BF16))
