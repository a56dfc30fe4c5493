"""How a head's rows are shared, on imagined machines whose times are known. No torch, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.head_shares import (
    STEP_ROWS,
    HeadReport,
    Timing,
    balanced_rows,
    find_split,
    find_threads,
    format_head,
    rounded_rows,
)

VOCAB = 129_280


def machine(cpu: float, gpu: float, shared: float = float("inf")):
    """Rates in rows a millisecond, and what the RAM gives to both while both are at work."""

    def time_split(rows: int) -> Timing:
        slower = max(1.0, (cpu + gpu) / shared) if 0 < rows < VOCAB else 1.0
        return Timing(rows, rows / cpu * slower, (VOCAB - rows) / gpu * slower)

    return time_split


def test_both_end_together_by_hand():
    # 1,000 rows on the CPU took 10 ms, 9,000 on the GPU 30: rates 100 and 300, so a quarter is the CPU's
    assert balanced_rows(Timing(1000, 10.0, 30.0), 10_000) == rounded_rows(2500, 10_000) == 2496


@given(
    st.floats(1, 10_000),
    st.floats(1, 10_000),
    st.floats(0.4, 3.0),
)
def test_no_other_split_is_much_faster(cpu: float, gpu: float, shared: float):
    time_split = machine(cpu, gpu, shared * (cpu + gpu))
    found = find_split(time_split, VOCAB)
    assert found == time_split(found.rows)
    best = min(time_split(rows).ms for rows in range(0, VOCAB + 1, STEP_ROWS))
    alone, step = time_split(0).ms, STEP_ROWS * (1 / cpu + 1 / gpu) / min(1.0, shared)
    assert found.ms <= alone
    assert found.ms <= best * 1.02 + step or (found.rows == 0 and best * 1.02 + step > 0.95 * alone)


def test_a_slow_cpu_is_left_alone():
    assert find_split(machine(cpu=10.0, gpu=2600.0), VOCAB).rows == 0


@pytest.mark.parametrize("total", [1, 2, 63, 64, 65, 200])
def test_small_vocabularies(total: int):
    rows = rounded_rows(total / 3, total)
    assert 0 <= rows < total
    assert rows % STEP_ROWS == 0
    found = find_split(lambda rows: Timing(rows, rows + 1.0, total - rows + 1.0), total)
    assert 0 <= found.rows <= total


def test_threads_are_as_few_as_fill_the_ram():
    def time_threads(count: int) -> float:
        return 1.0 / min(count * 10.0, 35.0)

    assert find_threads(time_threads, 1) == 1
    assert find_threads(time_threads, 3) == 3
    assert find_threads(time_threads, 16) == 4


def test_what_is_said():
    report = HeadReport(1000, 250, 4, True, Timing(250, 9.0, 10.0), 0, 0.0, 0.0)
    line = format_head(report)
    assert "250 of 1000 rows (25%) by 4 CPU threads" in line
    assert "CPU 9.0 ms, GPU 10.0 ms" in line
    assert "a token" not in line
