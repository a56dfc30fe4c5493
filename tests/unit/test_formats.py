"""Number formats against arithmetic on their bit fields."""

import math

import pytest
import torch

from kernels.formats import (
    fp8_rows_dequantize,
    fp8_rows_quantize,
    fp8_tiles_dequantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    nvfp4_values,
)


def e2m1(code):
    exponent, mantissa = code >> 1 & 3, code & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if code & 8 else value


def e4m3(byte):
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = (
        mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )  # fmt: skip
    return -value if byte & 0x80 else value


E2M1 = torch.tensor([e2m1(code) for code in range(16)], dtype=torch.float64)
E4M3 = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)


def test_every_code_times_every_scale():
    """All 256 bytes of codes under all 256 scale bytes: exact in fp32, fp16 and bf16."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, -1).expand(256, -1).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(-1, 1).expand(-1, 32).contiguous()
    byte = torch.arange(256)
    pairs = torch.stack([E2M1[byte & 15], E2M1[byte >> 4]], dim=1).flatten()  # low nibble first
    wanted = E4M3.unsqueeze(1) * pairs
    for given in (scales, scales.view(torch.float8_e4m3fn)):
        got = nvfp4_values(codes, given)
        assert got.dtype == torch.float32
        assert torch.equal(got.double().nan_to_num(1e9), wanted.nan_to_num(1e9))
        for dtype in (torch.float16, torch.bfloat16):
            assert torch.equal(got.to(dtype).double().nan_to_num(1e9), wanted.nan_to_num(1e9))


def test_nibble_and_group_order():
    """Row 1: column 2j low, 2j + 1 high; columns 16..31 take the second scale."""
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    codes[1, 0], codes[1, 7], codes[1, 8] = 0x21, 0xF0, 0x07
    scales = torch.tensor([[1.0, 1.0], [2.0, 0.5]]).to(torch.float8_e4m3fn)
    got = nvfp4_dequantize(codes, scales, 0.25)
    wanted = torch.zeros(2, 32)
    wanted[1, 0], wanted[1, 1], wanted[1, 15], wanted[1, 16] = 0.25, 0.5, -3.0, 0.75
    assert torch.equal(got, wanted)


def test_nvfp4_takes_the_nearest_code():
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1e-3
    weight[4, :16] = 0  # a block of zeros
    codes, scales, global_scale = nvfp4_quantize(weight)
    assert codes.shape == (24, 32)
    assert scales.shape == (24, 4)
    step = E4M3[scales.view(torch.uint8).int()].repeat_interleave(16, 1) * global_scale.double()
    error = (weight - nvfp4_dequantize(codes, scales, global_scale)).double().abs()
    nearest = (weight.double().unsqueeze(-1) - step.unsqueeze(-1) * E2M1).abs().amin(-1)
    assert (error <= nearest + 1e-6 * weight.abs().amax()).all()
    # half the widest gap of codes is one step, a sixth of the block's maximum (scales round by 1/16 at most)
    block_max = weight.abs().view(24, 4, 16).amax(-1).repeat_interleave(16, 1)
    normal = E4M3[scales.view(torch.uint8).int()].repeat_interleave(16, 1) >= 2**-6
    assert (error <= block_max / 6 * 17 / 16 * 1.001)[normal].all()
    assert normal.double().mean() > 0.9
    assert torch.equal(weight[4, :16], nvfp4_dequantize(codes, scales, global_scale)[4, :16])


def test_nvfp4_ties_go_to_the_even_code():
    weight = torch.zeros(1, 16)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    weight[0, :7], weight[0, 7:14], weight[0, 15] = ties, -ties, 6.0
    codes, scales, global_scale = nvfp4_quantize(weight * 448)  # so that step is exactly 448
    assert (scales.float().item(), global_scale.item()) == (448, 1)
    got = nvfp4_dequantize(codes, scales, global_scale)[0] / 448
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(got, torch.cat([even, -even, torch.tensor([0.0, 6.0])]))


def test_nvfp4_of_its_own_values_changes_nothing():
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    first = nvfp4_quantize(weight)
    values = nvfp4_dequantize(*first)
    again = nvfp4_quantize(values)
    assert torch.equal(first[1].view(torch.uint8), again[1].view(torch.uint8))
    torch.testing.assert_close(nvfp4_dequantize(*again), values, rtol=1e-6, atol=0)
    # the error of NVFP4 on Gaussian weights is 9.5 % (specification, 4.10)
    assert (weight - values).norm() / weight.norm() == pytest.approx(0.095, abs=0.005)


def test_nvfp4_edges():
    codes, scales, global_scale = nvfp4_quantize(torch.zeros(2, 16))
    assert global_scale.item() > 0
    assert torch.equal(nvfp4_dequantize(codes, scales, global_scale), torch.zeros(2, 16))
    with pytest.raises(ValueError, match="24"):
        nvfp4_quantize(torch.zeros(2, 24))


@pytest.mark.parametrize(
    ("rows", "columns"), [(256, 384), (128, 128), (200, 384), (256, 130), (7, 5)]
)
def test_fp8_tiles_share_a_scale(rows, columns):
    codes = torch.randint(0, 127, (rows, columns), generator=torch.Generator().manual_seed(rows))
    scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    kept = values.view(torch.uint8).clone()
    found = fp8_tiles_dequantize(values, scales, 128)
    places = torch.arange(rows).unsqueeze(1) // 128, torch.arange(columns) // 128
    assert torch.equal(found, E4M3[codes].float() * scales[places])
    assert torch.equal(values.view(torch.uint8), kept)


def test_fp8_rows():
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(2))
    weight[5] = 0
    weight[6] *= 1e4  # rows are scaled on their own
    values, scales = fp8_rows_quantize(weight)
    wanted = weight.abs().amax(1) / 448
    wanted[5] = 1
    torch.testing.assert_close(scales, wanted, rtol=1e-6, atol=0)
    assert (values.float().abs().amax(1)[torch.arange(32) != 5] == 448).all()
    got = fp8_rows_dequantize(values, scales)
    finite = E4M3[~E4M3.isnan()]
    scaled = weight.double() / scales.double().unsqueeze(1)
    nearest = (scaled.unsqueeze(-1) - finite).abs().amin(-1)
    error = (scaled - got.double() / scales.double().unsqueeze(1)).abs()
    assert (error <= nearest + 1e-4).all()  # the nearest of all 254 values, up to fp32
    assert (weight - got).norm() / weight.norm() < 0.03  # 2.6 % on Gaussian rows
