"""The figures of a run, from numbers that can be checked by hand; and numbers as text."""

import pytest

from runtime.stats import (
    ExpertCounters,
    Rates,
    TokenStats,
    format_summary,
    percentile,
    summarize,
)
from runtime.units import GIB, align_down, align_up, format_duration, format_nbytes


def token(total_ms, counters, row_read_nbytes=0, num_tokens=1, drive_wait_ms=1.0):
    return TokenStats(7, num_tokens, total_ms, drive_wait_ms, 0.5, 1.5, counters, row_read_nbytes)


def test_counters_since_a_copy():
    counters = ExpertCounters(hits=3, read_nbytes=10)
    earlier = counters.copy()
    counters.hits += 2
    counters.wait_ns += 7
    assert counters.since(earlier) == ExpertCounters(hits=2, wait_ns=7)
    assert earlier.hits == 3


def test_summary_of_three_tokens():
    tokens = [
        token(10, ExpertCounters(hits=6, late=1, misses=3, read_nbytes=GIB // 100)),
        token(20, ExpertCounters(hits=8, misses=2, read_nbytes=GIB // 50), row_read_nbytes=4096),
        token(60, ExpertCounters(hits=10), drive_wait_ms=4.0),
    ]
    prefill = token(500, ExpertCounters(sweep_misses=99), num_tokens=40)
    rates = Rates(drive_gib_s=2, memory_gib_s=10)
    s = summarize(prefill, tokens, prompt_tokens=50, dense_nbytes=GIB // 20, rates=rates)
    assert (s.prompt_tokens, s.cached_tokens, s.generated_tokens) == (50, 10, 4)
    assert s.ttft_ms == 500
    assert s.prefill_tok_s == pytest.approx(80)
    assert s.decode_tok_s == pytest.approx(1000 / 30)
    assert s.inter_token_p50_ms == 20
    assert s.inter_token_p95_ms == 60
    assert s.hit_rate == pytest.approx(24 / 30)  # late is no hit
    assert s.counters.sweep_misses == 0  # the prompt's experts are not the answer's
    assert s.drive_wait_ms_per_token == pytest.approx(2)
    assert s.read_nbytes_per_token == pytest.approx((GIB * 0.03 + 4096) / 3, abs=2)
    # floor: 0.01 GiB at 2 GiB/s and 0.05 GiB at 10 GiB/s are 5 ms each; the rows' bytes decide
    assert s.floor_ms == pytest.approx(5, abs=0.01)
    assert s.floor_ms > 5
    assert s.efficiency == pytest.approx(s.floor_ms / 30)
    assert "80.0% of 30 look-ups (5 missed, 1 on their way)" in format_summary(s)


def test_the_slower_of_drive_and_memory_is_the_floor():
    tokens = [token(50, ExpertCounters(read_nbytes=GIB // 10))]
    for drive, memory, wanted in (
        (1, 100, 100),
        (100, 4, 250),
        (0, 4, 250),
        (1, 0, 100),
        (0, 0, 0),
    ):
        s = summarize(None, tokens, 0, GIB, Rates(drive, memory))
        assert s.floor_ms == pytest.approx(wanted, rel=1e-6)  # fmt: skip


def test_nothing_was_generated():
    s = summarize(None, [], prompt_tokens=0, dense_nbytes=0, rates=Rates())
    assert (s.generated_tokens, s.decode_tok_s, s.hit_rate, s.efficiency) == (0, 0, 0, 0)
    assert "0 tokens" in format_summary(s)


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [
        ([], 0.5, 0),
        ([4], 0.95, 4),
        ([3, 1, 2], 0.5, 2),
        ([3, 1, 2], 0, 1),
        ([3, 1, 2], 1, 3),
        (list(range(101)), 0.95, 95),
    ],
)
def test_percentile(values, share, wanted):
    assert percentile(values, share) == wanted


def test_numbers_as_text():
    assert format_nbytes(67_947_724_800) == "63.28 GiB"  # the expert store (specification, 3)
    assert format_nbytes(20_736) == "20,736 B"
    assert format_nbytes(2_764_800) == "2.64 MiB"
    assert format_nbytes(2**15) == "32.0 KiB"
    assert format_duration(99.94) == "99.9 s"
    assert format_duration(125) == "2 min 05 s"
    assert format_duration(3 * 3600 + 12 * 60) == "3 h 12 min"
    assert [align_down(n) for n in (0, 4095, 4096)] == [0, 0, 4096]
    assert [align_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
