"""Every operation of DeepSeek against the recorded inputs and outputs of the released kernels."""

import math

import numpy as np
import pytest
import torch

from kernels import reference_deepseek as ops
from kernels.formats import (
    E2M1_MAX,
    E4M3_MAX,
    e8m0_values,
    fp8_blocks_dequantize,
    mxfp4_dequantize,
)
from tests.parity.deepseek_golden import GOLDEN, MAX_POSITIONS, golden, make_model, spec_of

NAMES = sorted(golden("kernels"))
ACT = [n.removesuffix(".x") for n in NAMES if n.startswith("act_quant") and n.endswith(".x")]
FP4 = [n.removesuffix(".x") for n in NAMES if n.startswith("fp4_act_quant") and n.endswith(".x")]
PRODUCTS = [n.removesuffix(".c") for n in NAMES if "_gemm." in n and n.endswith(".c")]
ATTENTION = ["one_block", "three_blocks", "wide"]
SINKHORN = ["normal", "single", "extreme"]
RELEASED_YARN = (16.0, 32.0, 1.0, 65536)


@pytest.fixture(scope="module")
def kernels():
    return golden("kernels")


def same_bits(found, wanted):
    """Equal to the bit: the sign of zero counts."""
    return found.dtype == wanted.dtype and torch.equal(
        found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


def bf16_steps(found, wanted):
    """How many bf16 numbers lie between two, per element."""

    def places(x):
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (places(found) - places(wanted)).abs()


def test_all_vectors_are_used(kernels):
    """A vector that is none of those below would pass unseen."""
    known = ("act_quant.", "fp4_act_quant.", "gemm_in.", "fp8_gemm.", "fp4_gemm.", "sparse_attn.")
    known += ("hc_split_sinkhorn.", "rope.", "rms_norm.", "candidates.")
    assert [n for n in NAMES if not n.startswith(known)] == []
    assert (len(ACT), len(FP4), len(PRODUCTS)) == (5, 11, 16)
    for prefix, cases in (("sparse_attn", ATTENTION), ("hc_split_sinkhorn", SINKHORN)):
        assert {n.split(".")[1] for n in NAMES if n.startswith(prefix)} == set(cases)


@pytest.mark.parametrize("name", ACT)
def test_act_quant(kernels, name):
    x = kernels[f"{name}.x"]
    values, scale = ops.act_quant(x)
    assert same_bits(values, kernels[f"{name}.y"])
    assert same_bits(scale, e8m0_values(kernels[f"{name}.scale"]))
    if f"{name}.inplace" in kernels:
        assert same_bits(ops.act_rounded(x).to(torch.bfloat16), kernels[f"{name}.inplace"])


@pytest.mark.parametrize("name", FP4)
def test_fp4_quant(kernels, name):
    x, is_kv, wanted = kernels[f"{name}.x"], ".e4m3_b16." in name, kernels[f"{name}.scale"]
    codes, scale = ops.fp4_quant(x, is_kv)
    assert same_bits(codes[:, 0::2] | (codes[:, 1::2] << 4), kernels[f"{name}.y"])
    assert same_bits(scale, wanted.float() if is_kv else e8m0_values(wanted))
    if f"{name}.inplace" in kernels:
        assert same_bits(ops.fp4_rounded(x, is_kv), kernels[f"{name}.inplace"])


def test_bf16_holds_what_the_quantisers_make(kernels):
    for name in ACT:
        found = ops.act_rounded(kernels[f"{name}.x"])
        assert torch.equal(found, found.to(torch.bfloat16).float())


@pytest.mark.parametrize("name", PRODUCTS)
def test_block_product(kernels, name):
    weight, rows = name.rsplit(".", 1)
    source = f"gemm_in.{weight[weight.rindex('k') :]}.{rows}"
    steps = e8m0_values(kernels[f"{source}.a_scale"]).unsqueeze(-1)
    x = (kernels[f"{source}.a"].float().unflatten(-1, (-1, ops.BLOCK)) * steps).flatten(-2)
    dequantize = fp8_blocks_dequantize if name.startswith("fp8") else mxfp4_dequantize
    matrix = dequantize(kernels[f"{weight}.b"], kernels[f"{weight}.b_scale"])
    found = ops.block_product(x, matrix).to(torch.bfloat16)
    steps = bf16_steps(found, kernels[f"{name}.c"])
    assert steps.max() <= 1
    assert steps.count_nonzero() <= steps.numel() / 1000


def test_quantized_linear_is_quantiser_and_product(kernels):
    """The activations of the products come from nowhere else than the quantiser: a chain of both by hand in fp64."""
    x = kernels["act_quant.r64.x"]
    weight = fp8_blocks_dequantize(
        kernels["fp8_gemm.n96k128.b"], kernels["fp8_gemm.n96k128.b_scale"]
    )
    wanted = (kernels["act_quant.r64.inplace"].double() @ weight.double().t()).to(torch.bfloat16)
    steps = bf16_steps(ops.quantized_linear(x, weight), wanted)
    assert steps.max() <= 1
    assert steps.count_nonzero() <= steps.numel() / 1000


@pytest.mark.parametrize("case", ATTENTION)
def test_sparse_attention(kernels, case):
    q, kv, sink, slots, wanted = (
        kernels[f"sparse_attn.{case}.{part}"] for part in ("q", "kv", "attn_sink", "topk_idxs", "o")
    )
    for i in range(len(q)):
        found = ops.sparse_attention(q[i], kv[i], sink, slots[i], q.shape[-1] ** -0.5)
        assert torch.equal(found, wanted[i])
    assert not slots[0, 0].ge(0).any()
    assert not wanted[0, 0].any()


@pytest.mark.parametrize("case", SINKHORN)
def test_split_mixes(kernels, case):
    mixes, scale, base = (
        kernels[f"hc_split_sinkhorn.{case}.{part}"] for part in ("mixes", "scale", "base")
    )
    outputs = ops.split_mixes(mixes.flatten(0, -2), scale, base, 4, 20, 1e-6)
    for part, found in zip(("pre", "post", "comb"), outputs, strict=True):
        wanted = kernels[f"hc_split_sinkhorn.{case}.{part}"].flatten(0, 1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("place", "name"), [(0, "window"), (1, "compress")])
def test_rope_tables(kernels, place, name):
    for found, part in zip(make_model().tables[place], ("cos", "sin"), strict=True):
        wanted = kernels[f"rope.{name}.{part}"]
        assert len(wanted) == MAX_POSITIONS
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "base", "yarn"), [("window", 10000, None), ("compress", 160000, RELEASED_YARN)]
)
def test_released_rope_tables(kernels, name, base, yarn):
    positions = torch.arange(64).float().unsqueeze(1)
    angles = positions * ops.rotation_rates(64, base, yarn)
    for found, part in ((angles.cos(), "cos"), (angles.sin(), "sin")):
        wanted = kernels[f"rope.released_{name}.{part}"]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["forward", "inverse"])
def test_rotate(kernels, name):
    cos, sin = kernels["rope.compress.cos"], kernels["rope.compress.sin"]
    found = ops.rotate(kernels["rope.x"][0], cos, sin, inverse=name == "inverse")
    assert torch.equal(found, kernels[f"rope.{name}"][0])


def test_rotate_leaves_the_front_alone(kernels):
    """Only the last values of a head turn."""
    cos, sin = kernels["rope.compress.cos"], kernels["rope.compress.sin"]
    x = torch.cat([kernels["rope.x"][0]] * 2, dim=-1)
    found = ops.rotate(x, cos, sin)
    assert torch.equal(found[..., :16], kernels["rope.x"][0])
    assert torch.equal(found[..., 16:], kernels["rope.forward"][0])


def test_rms_norm(kernels):
    eps = spec_of(GOLDEN / "checkpoint").eps
    found = ops.rms_norm(kernels["rms_norm.x"], kernels["rms_norm.weight"], eps)
    assert torch.equal(found, kernels["rms_norm.y"])


def test_candidate_mask(kernels):
    scores, lens = kernels["candidates.scores"][0], kernels["candidates.lens"]
    assert torch.equal(ops.candidate_mask(scores, lens, 3, 4), kernels["candidates.mask"][0])


def test_e8m0_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = torch.tensor([*(2.0 ** (code - 127) for code in range(255)), math.nan])
    for form in (codes, codes.view(torch.float8_e8m0fnu)):
        torch.testing.assert_close(e8m0_values(form), wanted, rtol=0, atol=0, equal_nan=True)
    assert e8m0_values(codes)[0] > 0


def steps_around(x):
    """Return (one fp32 step below, x, one above)."""
    x = np.float32(x)
    return [np.nextafter(x, np.float32(0)), x, np.nextafter(x, np.float32(np.inf))]


@pytest.mark.parametrize("n", range(-126, 127, 4))
def test_power_of_two_above(n):
    below, x, above = ops.power_of_two_above(torch.tensor(np.stack(steps_around(2.0**n)[-3:])))
    if n > -126:  # below the least normal number: not asked for
        assert below == 2.0**n
    assert x == 2.0**n
    assert above == 2.0 ** (n + 1)


@pytest.mark.parametrize("largest", [E4M3_MAX, E2M1_MAX])
def test_scales_around_a_power_of_two(largest):
    """amax = largest * 2^n, and one bf16 or fp32 step either side: the least power of two above their product."""
    for n in range(-20, 21):
        edge = np.float32(largest * 2.0**n)
        bits = torch.tensor([edge]).to(torch.bfloat16).view(torch.int16)
        nearby = [float((bits + i).view(torch.bfloat16)) for i in (-1, 0, 1)]
        assert nearby[1] == edge
        for amax in [*nearby, *steps_around(edge)]:
            product = np.float32(amax) * np.float32(1.0 / largest)
            mantissa, exponent = math.frexp(product)
            wanted = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
            found = ops.power_of_two_above(torch.tensor(float(amax)) * (1.0 / largest))
            assert found == wanted, (n, amax)
        exact = ops.power_of_two_above(torch.tensor(nearby) * (1.0 / largest))
        assert exact.tolist() == [2.0**n, 2.0**n, 2.0 ** (n + 1)]


@pytest.mark.parametrize("n", [-13, -1, 0, 5, 30])
def test_quantisers_around_a_power_of_two(n):
    for largest, quantise in ((E4M3_MAX, ops.act_quant), (E2M1_MAX, ops.fp4_quant)):
        edge = torch.tensor([largest * 2.0**n]).to(torch.bfloat16).view(torch.int16)
        rows = torch.stack([(edge + i).view(torch.bfloat16) for i in (-1, 0, 1)])
        scale = quantise(rows.expand(3, ops.BLOCK))[1]
        assert scale.flatten().tolist() == [2.0**n, 2.0**n, 2.0 ** (n + 1)]
