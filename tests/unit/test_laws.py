"""The laws: their worked examples, their units, and what a formula may not do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import laws
from runtime.laws import LAWS, LawError, Quantity, evaluate, format_unit, parse_unit

GIB = 2**30
QWEN, DEEPSEEK = (
    {"layers": 48, "experts": 512, "expert_bytes": 2_764_800},
    {"layers": 40, "experts": 384, "expert_bytes": 18_800_640},
)


def test_worked_examples():
    """Figures of the releases and of the published runs, worked out by hand."""
    assert laws.ROUTED_SET(**QWEN) / GIB == pytest.approx(63.28, rel=1e-3)
    assert laws.ROUTED_SET(**DEEPSEEK) / GIB == pytest.approx(268.95, rel=1e-3)
    token = {"layers": 48, "top_k": 10, "expert_bytes": 2_764_800, "one_token": 1}
    assert laws.ROUTED_PER_TOKEN(**token) == 1_327_104_000
    assert laws.CEIL_PCIE(pcie_bw=28.6e9, h_vram=0, routed=4.512e9, host_read=0) == pytest.approx(
        6.34, rel=1e-3
    )
    assert laws.CEIL_DISK(disk_bw=8.2 * GIB, h=0, routed=1.327e9) == pytest.approx(6.63, rel=2e-3)
    assert laws.HIT_RATE(cache=14e9, routed_set=288.8e9, a=0.32) == pytest.approx(0.380, rel=2e-3)
    assert laws.HIT_RATE(cache=16e9, routed_set=67.95e9, a=0.32) == pytest.approx(0.630, rel=2e-3)
    hours = laws.DOWNLOAD_TIME(file_bytes=510e9, bits_per_byte=8, line=100e6) / 3600
    assert hours == pytest.approx(12.6, rel=2e-3)
    # 24 tokens of a prompt touch 17 % of Qwen's experts, 2451 touch 99 %
    for tokens, share in ((24, 0.17), (2451, 0.99)):
        seconds = laws.PROMPT_TIME(
            routed_set=1e9, top_k=10, experts=512, n=tokens, beta=laws.REPEAT_EXPONENT, h=0, disk_bw=1e9,
            one_token=1, rate=1e30,
        )  # fmt: skip
        assert seconds == pytest.approx(share, abs=0.01)


def test_every_law_has_the_unit_that_it_says_and_uses_each_input():
    for law in LAWS.values():
        values = dict.fromkeys(law.inputs, 0.5)
        assert math.isfinite(law(**values))
        for name in law.inputs:
            assert name in law.formula
        with pytest.raises(LawError):
            law(**{**values, "stranger": 1.0})
        with pytest.raises(LawError):
            law(**{k: v for k, v in values.items() if k != next(iter(values))})
        with pytest.raises(LawError, match="at least 0"):
            law(**{**values, next(iter(values)): -1.0})
        with pytest.raises(LawError, match="at least 0"):
            law(**{**values, next(iter(values)): math.nan})


def test_units_that_do_not_fit_are_refused():
    values = {"a": Quantity(1.0, parse_unit("B")), "b": Quantity(2.0, parse_unit("B/s"))}
    assert evaluate("a / b", values) == Quantity(0.5, parse_unit("s"))
    for formula in (
        "a + b",
        "a - b",
        "min(a, b)",
        "a < b",
        "a ** 2",
        "2 ** a",
        "sqrt(a)",
        "where(1, a, b)",
    ):
        with pytest.raises(LawError):
            evaluate(formula, values)
    for text in ("B", "B/s", "tok/s", "B/tok", "s/tok", "1", "1/s"):
        assert format_unit(parse_unit(text)) == text


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os')", "a.real", "a[0]", "lambda: 1", "'text'", "[1]", "True", "f(1)", "max()", "min(key=1)",
        "1 if 2 else 3", "a and a", "9 ** 99", "1 / 0", "(0 - 1) ** 0.5", "a +", "", "+".join(["1"] * 200), "b",
        "log(0)",
    ],
)  # fmt: skip
def test_a_formula_is_arithmetic_and_nothing_else(formula):
    with pytest.raises(LawError):
        evaluate(formula, {"a": Quantity(2.0, ())})


def test_arithmetic_is_python_s():
    values = {"a": Quantity(3.0, ()), "n": Quantity(7.0, ())}
    for formula in (
        "a + n * 2",
        "-a ** 2",
        "(a - n) / 4",
        "max(a, n, 1) - min(a, 2)",
        "n ** 0.7",
        "exp(log(a))",
    ):
        expected = eval(formula, {"a": 3.0, "n": 7.0, "exp": math.exp, "log": math.log})
        assert evaluate(formula, values).value == pytest.approx(expected, rel=1e-12)
    assert evaluate("where(a > n, 1, 2) + ceil(a / 2) + floor(n / 2)", values).value == 7


rates = st.floats(1e8, 1e12)
shares = st.floats(0, 1)


@given(rates, rates, rates, shares, shares)
def test_no_token_is_faster_than_its_ceilings(disk_bw, pcie_bw, mem_bw, h, s):
    routed = 4.5e9
    beside = laws.TIME_BESIDE_DRIVE(
        routed=routed, host_read=1e9, pcie_bw=pcie_bw, dense=7e9, mem_bw=mem_bw, layers=40, t_layer=5e-4
    )  # fmt: skip
    drive = laws.TIME_ON_DRIVE(h=h, routed=routed, disk_bw=disk_bw)
    token = laws.TOKEN_TIME(t_disk=drive, r=beside, s=s)
    assert max(drive, beside) <= token <= drive + beside + 1e-12
    assert 1 / token <= laws.CEIL_PCIE(pcie_bw=pcie_bw, h_vram=0, routed=routed, host_read=1e9) * (
        1 + 1e-9
    )
    if h < 1:
        assert 1 / token <= laws.CEIL_DISK(disk_bw=disk_bw, h=h, routed=routed) * (1 + 1e-9)


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0.1, 1))
def test_a_larger_cache_finds_no_less(one, other, a):
    small, large = sorted((one, other))
    found = [laws.HIT_RATE(cache=c, routed_set=1e11, a=a) for c in (small, large, 1e11)]
    assert 0 <= found[0] <= found[1] <= 1
    assert found[2] == 1
    assert found[0] >= min(1, small / 1e11) - 1e-12, "no less than the share that is kept"
