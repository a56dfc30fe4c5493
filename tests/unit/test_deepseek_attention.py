"""Attention of one DeepSeek token: interpreted against its definition and against what the released kernel gave."""

from __future__ import annotations

import pytest
import torch

from kernels import deepseek_attention
from tests.parity.deepseek_golden import golden
from tests.unit import deepseek_checks as checks
from tests.unit.deepseek_checks import SMALL, Sizes, at, nans, there

SHAPES = pytest.mark.parametrize("s", SMALL.values(), ids=SMALL)


@SHAPES
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_attention_is_the_definition(s: Sizes, ratio: int):
    """Steps of 64 begin at other places while the window fills: each position has its own."""
    others = [checks.check_attention(s, position, ratio) for position in checks.positions(s)]
    assert sum(others) / len(others) <= checks.ATTENTION_SHARE


@SHAPES
@pytest.mark.parametrize("ratio", [1, 2])
def test_a_layer_gives_the_same_bits_twice(s: Sizes, ratio: int):
    """All kernels of a layer in their order: what one leaves unwritten, the next must not read."""
    for position in (0, 1, s.window - 1, s.topk * ratio + 1, s.capacity - 1):
        checks.check_layer(s, position, ratio)


@SHAPES
def test_scores_far_apart_neither_overflow_nor_vanish(s: Sizes):
    for position in (0, s.window, s.capacity - 1):
        checks.check_attention(s, position, 1, spread=100.0)


@pytest.mark.parametrize("case", ["one_block", "three_blocks"])
def test_attention_is_the_released_kernel(case: str):
    """Recorded lists have holes; the first entry, if any, stands for a window of one. The angles are zero."""
    q, kv, sink, slots, wanted = (
        golden("kernels")[f"sparse_attn.{case}.{part}"]
        for part in ("q", "kv", "attn_sink", "topk_idxs", "o")
    )
    batch, tokens, heads, dim = q.shape
    checked = 0
    for b in range(batch):
        for t in range(tokens):
            places = slots[b, t].int()
            if places[0] < 0:
                continue
            checked += 1
            shape = deepseek_attention.scores_shape(heads, 1, len(places) - 1)
            scores, out = nans(*shape, dtype=torch.float32), nans(heads, dim)
            ring, entries, chosen, angle = there(
                kv[b, places[:1].long()], kv[b], places[1:].contiguous(), torch.zeros(1, dim // 2)
            )
            deepseek_attention.attend_token(
                *there(q[b, t]), ring, entries, chosen, *there(sink), at(0), angle.cos(), angle, scores, out
            )  # fmt: skip
            # tensor cores sum in an order of their own: what nearly cancels moves by any number of its steps, but by
            # no more than what others of its row are rounded by
            of_row = 0.0 if out.device.type == "cpu" else 2.0**-7
            checks.expect_near(out, wanted[b, t], share=0.02, of_row=of_row)
    assert checked > 1
