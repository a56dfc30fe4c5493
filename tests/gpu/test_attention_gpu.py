"""The attention layer of one token at full size in bf16: against fp32 arithmetic, twice, and as a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import attention_token, reference, reference_attention

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM = 24, 2, 256, 64
INDEX_HEADS, INDEX_DIM, BLOCK_TOKENS, BUDGET = 4, 128, 4, 512
CAPACITY, EPS = 8192, 1e-6
NUM_BLOCKS = CAPACITY // BLOCK_TOKENS
WIDTH = 2 * (HEADS + KV_HEADS) * HEAD_DIM + (INDEX_HEADS + 1) * INDEX_DIM
POSITIONS = [10, 2047, 2048, 5000, 8191]
TOLERANCE = 1e-2  # a few roundings of 2^-9 each


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


class Layer:
    """Inputs, caches and scratch of one layer: random rows before the position, NaN from there on."""

    def __init__(self, position: int, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator(device="cuda").manual_seed(position)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator).bfloat16().to(dtype)

        def nans(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"), device="cuda", dtype=dtype)

        self.position = torch.tensor([position], device="cuda")
        self.projected = random(1, WIDTH)
        self.tables = reference.rope_tables(torch.arange(CAPACITY, device="cuda"), ROTARY_DIM, 1e7)
        widths = (HEAD_DIM, HEAD_DIM, INDEX_DIM, INDEX_DIM)
        self.gains = [1 + 0.2 * random(width).float() for width in widths]
        self.keys, self.values = (nans(CAPACITY, KV_HEADS, HEAD_DIM) for _ in range(2))
        self.pooled, self.open_block = nans(NUM_BLOCKS, INDEX_DIM), nans(BLOCK_TOKENS, INDEX_DIM)
        blocks, open_tokens = divmod(position, BLOCK_TOKENS)
        self.keys[:position] = random(position, KV_HEADS, HEAD_DIM)
        self.values[:position] = random(position, KV_HEADS, HEAD_DIM)
        self.pooled[:blocks] = random(blocks, INDEX_DIM)
        self.open_block[:open_tokens] = random(open_tokens, INDEX_DIM)
        self.q, self.index_q = nans(HEADS, HEAD_DIM), nans(INDEX_HEADS, INDEX_DIM)
        self.scores = nans(NUM_BLOCKS).float()
        self.chosen = torch.full((NUM_BLOCKS,), 7, dtype=torch.int8, device="cuda")
        shapes = attention_token.scratch_shapes(HEADS, HEAD_DIM, CAPACITY)
        self.scratch = {name: nans(*shape).float() for name, shape in shapes.items()}
        self.out = nans(1, HEADS * HEAD_DIM)

    def caches(self) -> list[Tensor]:
        return [self.keys, self.values, self.open_block, self.pooled]

    def prepare(self, kernels) -> None:
        kernels.prepare_token(
            self.projected, self.position, *self.tables, *self.gains, *self.caches(), self.q, self.index_q, EPS
        )  # fmt: skip

    def choose(self, kernels) -> None:
        parts = self.index_q, self.pooled, self.position, self.scores, self.chosen
        kernels.choose_blocks(*parts, BUDGET, BLOCK_TOKENS)

    def attend(self, kernels) -> None:
        kernels.attend_token(
            self.q, self.projected, self.keys, self.values, self.chosen, self.position, **self.scratch, out=self.out,
            budget=BUDGET, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip

    def run(self) -> None:
        for part in (self.prepare, self.choose, self.attend):
            part(attention_token)

    def results(self) -> list[Tensor]:
        complete = (int(self.position) + 1) // BLOCK_TOKENS
        return [self.q, self.index_q, self.pooled[:complete], self.chosen[:complete], self.out]


@pytest.mark.parametrize("position", POSITIONS)
def test_full_size_layer_is_the_definition(position: int):
    layer, exact = Layer(position), Layer(position, torch.float32)
    layer.run()
    exact.prepare(reference_attention)
    length, complete = position + 1, (position + 1) // BLOCK_TOKENS
    for found, wanted, rows in zip(
        [layer.q, layer.index_q, *layer.caches()],
        [exact.q, exact.index_q, *exact.caches()],
        [HEADS, INDEX_HEADS, length, length, position % BLOCK_TOKENS + 1, complete],
        strict=True,
    ):
        assert not found[:rows].isnan().any()
        if rows:
            assert error(found[:rows], wanted[:rows]) < TOLERANCE
    # from here on from the kernels' own rounded queries and keys: two scores may be closer than one rounding
    exact.index_q, exact.pooled = layer.index_q, layer.pooled
    exact.choose(reference_attention)
    if complete > BUDGET:
        assert error(layer.scores[:complete], exact.scores[:complete]) < 1e-5
        is_complete = torch.arange(NUM_BLOCKS, device="cuda") < complete
        wanted = reference.top_blocks(layer.scores.unsqueeze(0), is_complete.unsqueeze(0), BUDGET)[
            0
        ]
        assert torch.equal(layer.chosen[:complete].bool(), wanted[:complete])
    exact.q = layer.q.float()
    exact.keys, exact.values = layer.keys.float().nan_to_num(), layer.values.float().nan_to_num()
    exact.chosen = layer.chosen
    exact.attend(reference_attention)
    assert error(layer.out, exact.out) < TOLERANCE


@pytest.mark.parametrize("position", POSITIONS)
def test_queries_and_keys_round_where_the_definition_rounds(position: int):
    """Both in bf16: only a few roundings fall the other way, after sums in another order."""
    layer, other = Layer(position), Layer(position)
    other.keys.nan_to_num_()
    other.values.nan_to_num_()
    layer.prepare(attention_token)
    other.prepare(reference_attention)
    for found, wanted in ((layer.q, other.q), (layer.index_q, other.index_q)):
        assert error(found, wanted) < 1e-3
        assert float((found == wanted).float().mean()) > 0.99
    assert error(layer.keys[position], other.keys[position]) < 1e-3
    assert torch.equal(layer.values[position], other.values[position])


@pytest.mark.parametrize("position", POSITIONS)
def test_two_runs_and_a_graph_captured_elsewhere_give_the_same_bits(position: int):
    first, second = Layer(position), Layer(position)
    first.run()
    second.run()
    for a, b in zip(first.results(), second.results(), strict=True):
        assert torch.equal(a, b)
    replayed = Layer(position)
    replayed.position.fill_(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captured, not run
        replayed.run()
    replayed.position.fill_(position)
    graph.replay()
    for a, b in zip(first.results(), replayed.results(), strict=True):
        assert torch.equal(a, b)
