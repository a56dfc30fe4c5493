"""The memory plan: within its limit, never below a layer's route, and with advice that works when it is followed."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from runtime.budget import (
    MIN_PROMPT_TOKENS,
    MemoryPlan,
    ModelSizes,
    VramPlan,
    describe_ram_limit,
    format_plans,
    plan_memory,
    plan_vram,
    ram_limit,
    vram_limit,
)
from runtime.errors import UserError
from runtime.units import GIB, MIB, format_nbytes

PAGE = 4096


@st.composite
def model_sizes(draw) -> ModelSizes:
    num_experts = draw(st.integers(1, 512))
    return ModelSizes(
        residents_nbytes=draw(st.integers(0, 12 * GIB)),
        state_nbytes=draw(st.integers(0, 2 * GIB)),
        record_nbytes=draw(st.integers(1, 4096)) * PAGE,
        num_layers=draw(st.integers(1, 64)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
    )


limits = st.one_of(st.integers(0, 64 * GIB), st.integers(0, 64).map(lambda n: n * GIB))
caches = st.one_of(st.none(), st.just(0.0), st.floats(0, 64), st.floats(0, 0.5))
sweeps = st.integers(1, 512)


def plan_or_error(*args: object) -> MemoryPlan | UserError:
    try:
        return plan_memory(*args)
    except UserError as error:
        return error


@settings(max_examples=300)
@given(model_sizes(), limits, caches, sweeps)
def test_a_plan_keeps_its_limits(sizes, limit, cache_gib, sweep):
    plan = plan_or_error(sizes, limit, cache_gib, sweep)
    if isinstance(plan, UserError):
        assert len(re.findall(r"[\d.,]+ (?:B|KiB|MiB|GiB|TiB)\b", plan.message)) == 2, plan.message
        assert format_nbytes(limit) in plan.message
        assert plan.hint
        return
    needed = sizes.residents_nbytes + sizes.state_nbytes
    needed += (plan.cache_rows + plan.sweep_rows) * sizes.record_nbytes
    assert plan.total_nbytes == needed <= limit
    assert sizes.top_k <= plan.cache_rows <= sizes.num_layers * sizes.num_experts
    wanted = min(sweep, sizes.num_experts)
    fixed = sizes.residents_nbytes + sizes.embedding_nbytes + sizes.state_nbytes
    room_rows = (limit - fixed) // sizes.record_nbytes
    if cache_gib is None:  # staging gives way, whole, where a route would not fit beside it
        staged = wanted if room_rows >= wanted + sizes.top_k else 1
    else:  # it gives way row by row to the cache that was asked for
        staged = max(1, min(wanted, room_rows - plan.cache_rows))
    assert plan.sweep_rows == staged
    room = limit - plan.total_nbytes
    if cache_gib is not None:
        assert plan.cache_nbytes <= max(cache_gib * GIB, sizes.top_k * sizes.record_nbytes)
    else:
        is_full = plan.cache_rows == sizes.num_layers * sizes.num_experts
        assert is_full or room < sizes.record_nbytes, "all that is left goes to the cache"


@settings(max_examples=200)
@given(model_sizes(), limits, st.integers(0, 8 * GIB), caches, sweeps)
def test_more_memory_never_means_a_smaller_cache(sizes, limit, more, cache_gib, sweep):
    small = plan_or_error(sizes, limit, cache_gib, sweep)
    large = plan_or_error(sizes, limit + more, cache_gib, sweep)
    assume(isinstance(small, MemoryPlan))
    assert isinstance(large, MemoryPlan)
    # the prompt's staging may come back first, which is worth a few rows
    staged = large.sweep_rows - small.sweep_rows
    assert large.cache_rows >= small.cache_rows - max(0, staged)


@settings(max_examples=200)
@given(model_sizes(), limits, st.floats(0, 32), st.floats(0, 32), sweeps)
def test_asking_for_more_cache_never_gives_less(sizes, limit, a, b, sweep):
    small, large = (plan_or_error(sizes, limit, gib, sweep) for gib in sorted((a, b)))
    assume(isinstance(large, MemoryPlan))
    assert isinstance(small, MemoryPlan), "the larger cache fits, the smaller one does not"
    assert small.cache_rows <= large.cache_rows


@settings(max_examples=300)
@given(model_sizes(), limits, sweeps)
def test_what_fits_by_itself_fits_with_no_cache(sizes, limit, sweep):
    """`cache=none` is the smallest plan there is: it must not be refused where `cache=lru` is not."""
    assume(isinstance(plan_or_error(sizes, limit, None, sweep), MemoryPlan))
    assert isinstance(plan_or_error(sizes, limit, 0.0, sweep), MemoryPlan)


@settings(max_examples=300)
@given(model_sizes(), limits, caches, sweeps)
def test_the_advice_of_a_refusal_works(sizes, limit, cache_gib, sweep):
    refused = plan_or_error(sizes, limit, cache_gib, sweep)
    assume(isinstance(refused, UserError))
    match = re.search(r"cache\.ram_gib=([\d.e+-]+) or less", refused.hint)
    if match is None:
        assert not isinstance(plan_or_error(sizes, limit, 0.0, sweep), MemoryPlan)
        return
    assert isinstance(plan_or_error(sizes, limit, float(match[1]), sweep), MemoryPlan), refused.hint


def _advised(plan: MemoryPlan) -> float:
    (warning,) = plan.warnings
    match = re.search(r"cache\.ram_gib=([\d.e+-]+) would hold a step's experts", warning)
    assert match, warning
    return float(match[1])


@settings(max_examples=300)
@example(ModelSizes(0, 0, 864 * 4096 * 3, 48, 512, 10), 31 * GIB, 1.0, 32)
@example(ModelSizes(0, 0, 24576, 8, 64, 6), 31 * GIB, 0.0001, 32)
@given(model_sizes(), st.just(2**50), st.floats(1e-4, 8), sweeps)
def test_the_advice_of_the_warning_ends_it(sizes, limit, cache_gib, sweep):
    """The cache is smaller than one token's experts: the number that the warning names must be enough."""
    plan = plan_memory(sizes, limit, cache_gib, sweep)
    assert bool(plan.warnings) == (plan.cache_rows < sizes.num_layers * sizes.top_k)
    if plan.warnings:
        assert f"holds {plan.cache_rows} experts" in plan.warnings[0]
        assert f"uses up to {sizes.num_layers * sizes.top_k}" in plan.warnings[0]
        better = plan_memory(sizes, limit, _advised(plan), sweep)
        assert not better.warnings, f"{plan.warnings[0]}, but then: {better.warnings}"


def test_a_warning_does_not_advise_what_would_be_refused():
    """All that is left is too little for one token's experts: asking for more in cache.ram_gib cannot help."""
    sizes = ModelSizes(6 * GIB, GIB, 3 * MIB, 48, 512, 10)
    plan = plan_memory(sizes, 8 * GIB, None, 32)
    assert plan.warnings, "480 experts of 3 MiB do not fit into 1 GiB"
    match = re.search(r"cache\.ram_gib=([\d.e+-]+)", plan.warnings[0])
    if match is not None:
        assert isinstance(plan_or_error(sizes, 8 * GIB, float(match[1]), 32), MemoryPlan), (
            f"{plan.warnings[0]}: this is refused"
        )


def test_no_cache_on_purpose_is_no_warning():
    sizes = ModelSizes(GIB, 0, MIB, 8, 64, 6)
    plan = plan_memory(sizes, 4 * GIB, 0, 32)
    assert (plan.cache_rows, plan.warnings) == (6, ())


def test_little_room_takes_from_the_staging_first():
    sizes = ModelSizes(GIB, 0, MIB, 8, 64, 6)
    least = GIB + 7 * MIB  # six rows for a layer's route, one for the prompt
    plan = plan_memory(sizes, least, None, 32)
    assert (plan.cache_rows, plan.sweep_rows) == (6, 1)
    with pytest.raises(UserError) as caught:
        plan_memory(sizes, least - 1, None, 32)
    assert "needs 1.01 GiB of RAM at least, the plan may use 1.01 GiB" in str(caught.value)
    assert plan_memory(sizes, GIB + 38 * MIB, None, 32).sweep_rows == 32


def test_plans_as_a_table():
    sizes = ModelSizes(GIB, 64 * MIB, MIB, 8, 64, 6, scratch=((MIB, MIB),))
    plan = plan_memory(sizes, 4 * GIB, 0.25, 32)
    vram = plan_vram(sizes, 2 * GIB, 100, 16, 0.125)
    assert (
        format_plans(plan, vram)
        == """\
RAM                        1.34 GiB  of 4.00 GiB that may be used
  residents                1.00 GiB
  state                   64.00 MiB
  expert cache           256.00 MiB  256 experts
  prompt staging          32.00 MiB  32 experts
VRAM                       1.30 GiB  of 2.00 GiB that may be used
  residents                1.00 GiB
  state                   64.00 MiB
  scratch                101.00 MiB  prompt pieces of 100 tokens
  expert slots, kept     128.00 MiB  128 experts
  expert slots, passing   16.00 MiB  16 experts"""
    )
    assert format_plans(plan, None) == format_plans(plan)


# ---- how much may be used ----------------------------------------------------------------------------------------


@given(st.floats(0.0625, 4096), st.integers(0, 2048), st.integers(0, 2048), st.floats(0, 64))
def test_ram_limit_is_never_above_what_is_there(wanted, total_gib, available_gib, reserve):
    total, available = (total_gib * GIB, "cgroup limit /x"), (available_gib * GIB, "MemAvailable")
    assert 0 <= ram_limit(None, total, available, reserve) <= available[0]
    if wanted > total_gib:
        with pytest.raises(UserError) as caught:
            ram_limit(wanted, total, available, reserve)
        assert f"{wanted:g} GiB" in caught.value.message
        assert f"{total_gib:.1f} GiB (cgroup limit /x)" in caught.value.message
    else:
        limit = ram_limit(wanted, total, available, reserve)
        assert 0 <= limit <= min(total[0], wanted * GIB)
        assert limit == pytest.approx(max(0, (wanted - reserve) * GIB), abs=1)


def test_where_the_limit_is_from():
    available = (3 * GIB, "cgroup limit /x less what is used")
    assert describe_ram_limit(None, available, 1.0) == (
        "3.00 GiB, cgroup limit /x less what is used, less hw.reserve_gib=1"
    )
    assert describe_ram_limit(2.5, available, 0.5) == "hw.ram_gib=2.5, less hw.reserve_gib=0.5"


@given(st.integers(2**26, 2**42))
def test_the_advice_of_ram_limit_works(total):
    with pytest.raises(UserError) as caught:
        ram_limit(99_999, (total, "MemTotal"), (total, "MemAvailable"), 1)
    advised = float(re.search(r"hw\.ram_gib=([\d.]+) or less", caught.value.hint)[1])
    ram_limit(advised, (total, "MemTotal"), (total, "MemAvailable"), 0)


# ---- the GPU's memory ----------------------------------------------------------------------------------------------


@st.composite
def gpu_sizes(draw) -> ModelSizes:
    lines = st.tuples(st.integers(0, GIB // 2), st.integers(0, 64 * 1024))
    return ModelSizes(
        residents_nbytes=draw(st.integers(0, 8 * GIB)),
        state_nbytes=draw(st.integers(0, GIB)),
        record_nbytes=draw(st.integers(1, 4096)) * PAGE,
        num_layers=draw(st.integers(1, 64)),
        num_experts=draw(st.integers(8, 512)),
        top_k=8,
        scratch=tuple(draw(st.lists(lines, min_size=1, max_size=4))),
    )


def vram_or_error(*args: object) -> VramPlan | UserError:
    try:
        return plan_vram(*args)
    except UserError as error:
        return error


@settings(max_examples=300)
@given(
    gpu_sizes(),
    st.integers(0, 12 * GIB),
    st.integers(1, 16384),
    st.integers(16, 64),
    st.one_of(st.none(), st.just(0.0), st.floats(0, 2)),
)
def test_a_vram_plan_keeps_its_limit(sizes, limit, tokens, passing, kept_gib):
    plan = vram_or_error(sizes, limit, tokens, passing, kept_gib)
    fixed = sizes.residents_nbytes + sizes.state_nbytes + passing * sizes.record_nbytes
    least = fixed + sizes.scratch_nbytes(min(tokens, MIN_PROMPT_TOKENS))
    if isinstance(plan, UserError):
        assert least > limit or (kept_gib and "cache.vram_gib" in plan.message)
        assert re.search(r"[\d.,]+ (?:B|KiB|MiB|GiB)\b", plan.message)
        assert plan.hint
        return
    assert least <= limit
    assert plan.total_nbytes <= limit
    assert min(tokens, MIN_PROMPT_TOKENS) <= plan.prompt_tokens <= tokens
    assert plan.scratch_nbytes == sizes.scratch_nbytes(plan.prompt_tokens)
    if plan.prompt_tokens < tokens:  # a longer piece would not have fitted
        assert fixed + sizes.scratch_nbytes(plan.prompt_tokens + 1) > limit
    is_full = plan.kept_slots == sizes.num_layers * sizes.num_experts
    if kept_gib is None:
        assert is_full or limit - plan.total_nbytes < sizes.record_nbytes
    else:
        assert plan.kept_slots * sizes.record_nbytes <= kept_gib * GIB


def test_advice_about_vram_slots_works():
    sizes = ModelSizes(4 * GIB, GIB // 2, MIB, 8, 512, 6)
    with pytest.raises(UserError, match=r"cache\.vram_gib=9 asks for 9\.00 GiB") as caught:
        plan_vram(sizes, 6 * GIB, 512, 16, 9.0)
    advised = float(re.search(r"cache\.vram_gib=([\d.]+)", caught.value.hint).group(1))
    plan = plan_vram(sizes, 6 * GIB, 512, 16, advised)
    assert plan.total_nbytes <= 6 * GIB
    assert advised > 1.4


def test_the_prompt_piece_gives_way_before_the_model_is_refused():
    sizes = ModelSizes(4 * GIB, 0, MIB, 8, 64, 6, scratch=((MIB, MIB), (0, 2 * MIB)))
    plan = plan_vram(sizes, 4 * GIB + 16 * MIB + 600 * MIB, 8192, 16, None)
    assert (plan.prompt_tokens, plan.kept_slots) == (300, 0)
    with pytest.raises(UserError, match=r"needs 4\.27 GiB of GPU memory at least"):
        plan_vram(sizes, 4 * GIB + 16 * MIB + 2 * MIB * MIN_PROMPT_TOKENS - 1, 8192, 16, None)


def test_what_a_card_may_give():
    assert vram_limit(None, 16 * GIB, 10 * GIB, 0.5) == int(9.5 * GIB)
    assert vram_limit(8, 16 * GIB, 10 * GIB, 0.5) == int(7.5 * GIB)
    assert vram_limit(None, 16 * GIB, 0, 0.5) == 0
    with pytest.raises(UserError, match=r"hw\.vram_gib is 24 GiB, but this GPU has 16\.00 GiB"):
        vram_limit(24, 16 * GIB, 10 * GIB, 0.5)


def test_with_a_gpu_ram_holds_the_embedding_and_experts():
    sizes = ModelSizes(6 * GIB, GIB, MIB, 8, 64, 6, embedding_nbytes=GIB)
    cpu = plan_memory(sizes, 16 * GIB, 0.25, 8)
    gpu = plan_memory(sizes, 16 * GIB, 0.25, 8, has_gpu=True)
    assert (cpu.residents_nbytes, cpu.state_nbytes) == (7 * GIB, GIB)
    assert (gpu.residents_nbytes, gpu.state_nbytes) == (GIB, 0)
    with pytest.raises(UserError, match="of RAM at least"):
        plan_memory(sizes, 7 * GIB, 0.25, 8)
    assert plan_memory(sizes, 7 * GIB, 0.25, 8, has_gpu=True).cache_rows == 256


def test_a_drive_only_cache_has_rows_for_guesses_where_there_is_room():
    """Without them the route pins every row, and nothing is ever read ahead."""
    sizes = ModelSizes(1000, 0, 4096, num_layers=4, num_experts=8, top_k=3)
    room = 10**6
    assert plan_memory(sizes, room, 0.0, 2, guess_rows=2).cache_rows == 5
    assert plan_memory(sizes, room, 0.0, 2).cache_rows == 3
    assert plan_memory(sizes, room, 20 * 4096 / GIB, 2, guess_rows=2).cache_rows == 20
    tight = 1000 + 4 * 4096
    assert plan_memory(sizes, tight, 0.0, 2, guess_rows=2).cache_rows == 3
