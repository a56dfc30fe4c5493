"""Our kernels under the published names, against the recorded vectors; and the stand-in's, which share no line."""

import importlib.util
import json

import pytest
import torch

from kernels import deepseek_published
from kernels.deepseek_prompt import Fp4Weight, Fp8Weight
from tests.parity.deepseek_golden import golden
from tests.standin import GOLDEN, STANDIN, flat_config

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
GOLD = golden("kernels")
ROWS = (1, 17, 64, 65, 300)


def standin():
    spec = importlib.util.spec_from_file_location("standin_kernel", STANDIN / "kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["ours", "stand-in"])
def kernel(request):
    """With bf16 as torch's default dtype, as the published code has it."""
    found = deepseek_published if request.param == "ours" else standin()
    torch.set_default_dtype(torch.bfloat16)
    yield found
    assert torch.get_default_dtype() == torch.bfloat16
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("rows", ROWS)
def test_act_quant(kernel, rows):
    x = GOLD[f"act_quant.r{rows}.x"]
    values, scale = kernel.act_quant(x, 32, "ue8m0", E8M0)
    assert torch.equal(values.view(torch.uint8), GOLD[f"act_quant.r{rows}.y"].view(torch.uint8))
    assert scale.dtype == E8M0
    assert torch.equal(scale.view(torch.uint8), GOLD[f"act_quant.r{rows}.scale"].view(torch.uint8))
    wanted = GOLD.get(f"act_quant.r{rows}.inplace")
    if wanted is not None:
        copy = x.clone()
        assert kernel.act_quant(copy, 32, "ue8m0", E8M0, True).data_ptr() == copy.data_ptr()
        assert torch.equal(copy, wanted)


@pytest.mark.parametrize("rows", ROWS[:-1])
@pytest.mark.parametrize(
    ("kind", "block", "dtype"), [("e8m0_b32", 32, E8M0), ("e4m3_b16", 16, E4M3)]
)
def test_fp4_act_quant(kernel, rows, kind, block, dtype):
    name = f"fp4_act_quant.{kind}.r{rows}"
    copy = GOLD[f"{name}.x"].clone()
    kernel.fp4_act_quant(copy, block, True, dtype)
    assert torch.equal(copy, GOLD[f"{name}.inplace"])


def products():
    for name in sorted(GOLD):
        kind, _, rest = name.partition(".")
        if kind in ("fp8_gemm", "fp4_gemm") and name.endswith(".c"):
            sizes, rows = rest.split(".")[:2]
            yield kind, sizes, rows


@pytest.mark.parametrize(("kind", "sizes", "rows"), list(products()))
def test_products(kernel, kind, sizes, rows):
    """A sum may end on the other side of a bf16 step, rarely; also in the Triton kernels that a GPU runs."""
    a, a_s = (GOLD[f"gemm_in.k{sizes.split('k')[1]}.{rows}.{part}"] for part in ("a", "a_scale"))
    b, b_s = (GOLD[f"{kind}.{sizes}.{part}"] for part in ("b", "b_scale"))
    if kind == "fp4_gemm":
        b = b.view(torch.float4_e2m1fn_x2)
    found = getattr(kernel, kind)(a, a_s, b, b_s, E8M0, 32)
    wanted = GOLD[f"{kind}.{sizes}.{rows}.c"]
    assert found.dtype == torch.bfloat16
    assert (found == wanted).float().mean() > 0.999
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    if kernel is deepseek_published and len(a) <= 17:
        x = deepseek_published._activations(a, a_s)
        raw = (b.view(torch.uint8), b_s.view(torch.uint8))
        packed = Fp8Weight(b, b_s) if kind == "fp8_gemm" else Fp4Weight(*raw)
        torch.testing.assert_close(packed.product(x), found, rtol=2**-7, atol=0)


@pytest.mark.parametrize("case", ["one_block", "three_blocks", "wide"])
def test_sparse_attn(kernel, case):
    q, kv, sink, listed, wanted = (
        GOLD[f"sparse_attn.{case}.{part}"] for part in ("q", "kv", "attn_sink", "topk_idxs", "o")
    )
    found = kernel.sparse_attn(q, kv, sink, listed, q.shape[-1] ** -0.5)
    assert (found == wanted).float().mean() > 0.98
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.008)
    assert not found[0, 0].any()  # no entry


@pytest.mark.parametrize("case", ["normal", "single", "extreme"])
def test_hc_split_sinkhorn(kernel, case):
    inputs = [GOLD[f"hc_split_sinkhorn.{case}.{part}"] for part in ("mixes", "scale", "base")]
    for found, part in zip(kernel.hc_split_sinkhorn(*inputs), ("pre", "post", "comb"), strict=True):
        wanted = GOLD[f"hc_split_sinkhorn.{case}.{part}"]
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_what_the_published_code_never_asks_for_is_refused():
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    for call in (
        lambda: deepseek_published.act_quant(x),
        lambda: deepseek_published.act_quant(x, 32),
        lambda: deepseek_published.fp4_act_quant(x),
    ):
        with pytest.raises(ValueError, match="must be"):
            call()


def test_the_flat_config_follows_from_the_nested_one():
    flat = json.loads((GOLDEN / "inference" / "config.json").read_text())
    derived = flat_config(json.loads((GOLDEN / "config.json").read_text()))
    assert derived.items() <= flat.items()
