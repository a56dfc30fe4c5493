"""Plain attention, in pieces and fused, against its definition in fp64."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from runtime.models import dense_state
from runtime.models.dense_state import FUSED_ROWS, LEAST_FUSED, attend_rows

HEADS, KV_HEADS, DIM = 6, 2, 24


def operands(count: int, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    sizes = ((count, HEADS), (length, KV_HEADS), (length, KV_HEADS))
    return [torch.randn(n, heads, DIM, generator=generator).to(dtype) for n, heads in sizes]


def causal(count: int, length: int) -> torch.Tensor:
    return torch.arange(length - count, length).unsqueeze(1) >= torch.arange(length)


def windowed(count: int, length: int) -> torch.Tensor:
    """Four sinks and the last 50."""
    places = torch.arange(length)
    recent = places > (torch.arange(length - count, length) - 50).unsqueeze(1)
    return causal(count, length) & (recent | (places < 4))


COUNTS = [2, LEAST_FUSED, LEAST_FUSED + 1, FUSED_ROWS, FUSED_ROWS + 1, 700]


@pytest.mark.parametrize("mask", [causal, windowed, None])
@pytest.mark.parametrize("before", [0, 333])
@pytest.mark.parametrize("count", COUNTS)
def test_every_number_of_queries_gives_the_definition(count, before, mask):
    q, k, v = operands(count, count + before)
    visible = None if mask is None else mask(count, count + before)
    wanted = reference.attention(q.double(), k.double(), v.double(), visible)
    assert (attend_rows(q, k, v, visible).double() - wanted).abs().max() < 2e-6


@pytest.mark.parametrize("count", COUNTS)
def test_few_queries_are_separate_products(count, monkeypatch):
    """Which are faster for them; a prompt's are not."""
    seen = []

    def attention(q, *_):
        seen.append(len(q))
        return q

    monkeypatch.setattr(dense_state.ops, "attention", attention)
    attend_rows(*operands(count, count), causal(count, count))
    assert seen == ([count] if count <= LEAST_FUSED else [])


def test_few_queries_on_many_keys_are_cut_into_pieces(monkeypatch):
    q, k, v = operands(40, 500)
    visible = causal(40, 500)
    wanted = attend_rows(q, k, v, visible)
    seen = []

    def attention(q, *rest):
        seen.append(len(q))
        return plain(q, *rest)

    plain = reference.attention
    monkeypatch.setattr(dense_state.ops, "attention", attention)
    monkeypatch.setattr(dense_state, "CPU_SCORES_NBYTES", 4 * HEADS * 500 * 7)
    assert torch.allclose(attend_rows(q, k, v, visible), wanted, atol=1e-6)
    assert seen == [7, 7, 7, 7, 7, 5]


def test_keys_that_nobody_sees_are_not_looked_at():
    """Rows of a buffer that were never written may hold anything."""
    q, k, v = operands(300, 400)
    visible = causal(300, 400)
    visible[:, 390:] = False
    wanted = attend_rows(q, k, v, visible)
    k[390:], v[390:] = float("nan"), float("nan")
    assert torch.equal(attend_rows(q, k, v, visible), wanted)


def test_bf16_is_no_farther_from_the_definition_than_separate_products():
    q, k, v = operands(300, 300, torch.bfloat16)
    visible = causal(300, 300)
    wanted = reference.attention(q.double(), k.double(), v.double(), visible)

    def error(found):
        return float((found.double() - wanted).norm() / wanted.norm())

    products = error(reference.attention(q, k, v, visible))
    assert 0 < error(attend_rows(q, k, v, visible)) <= products


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_no_bit(threads):
    q, k, v = operands(700, 700)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (threads, 2):
            torch.set_num_threads(count)
            found.append(attend_rows(q, k, v, causal(700, 700)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
