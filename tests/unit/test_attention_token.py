"""The attention layer of one token in Triton: interpreted against its definition, compiled for cards not here."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import attention_token, reference, reference_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-6  # fp32: other orders of sums, fused multiply-adds, another exponential
EPS = 1e-6
NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Sizes:
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    index_heads: int
    index_dim: int
    block_tokens: int
    budget: int
    num_blocks: int

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_tokens

    @property
    def width(self) -> int:
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return attention + (self.index_heads + 1) * self.index_dim


TINY = Sizes(4, 2, 64, 16, 8, 32, 8, 16, 32)
ODD = Sizes(6, 2, 12, 6, 3, 10, 3, 4, 23)
SINGLE = Sizes(5, 1, 20, 8, 1, 8, 4, 2, 40)  # one key head, one index head
SHAPES = pytest.mark.parametrize("s", [TINY, ODD, SINGLE], ids=["tiny", "odd", "single"])


def positions(s: Sizes) -> list[int]:
    """The first few, both sides of a block's limit, both sides of the budget, the last one."""
    size = s.block_tokens
    first = [0, 1, 2, 3, 4, size - 1, size]
    # one token before a number of blocks is complete, and the token that completes it
    limits = [
        blocks * size + step for blocks in range(s.budget - 1, s.budget + 2) for step in (-2, -1)
    ]
    return sorted({*first, *limits, s.capacity // 2, s.capacity - 2, s.capacity - 1})


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-30))


def at(position: int) -> Tensor:
    return torch.tensor([position], device=DEVICE)


def nans(*shape: int) -> Tensor:
    return torch.full(shape, NAN, device=DEVICE)


def make_gains(s: Sizes) -> list[Tensor]:
    widths = (s.head_dim, s.head_dim, s.index_dim, s.index_dim)
    return [1 + 0.2 * random(width, seed=50 + i) for i, width in enumerate(widths)]


def make_tables(s: Sizes) -> tuple[Tensor, Tensor]:
    return reference.rope_tables(torch.arange(s.capacity, device=DEVICE), s.rotary_dim, 1e4)


class State:
    """Caches, scratch and outputs of one layer: NaN wherever nothing has been written."""

    def __init__(self, s: Sizes) -> None:
        self.s = s
        self.keys, self.values = (nans(s.capacity, s.kv_heads, s.head_dim) for _ in range(2))
        self.open_block, self.pooled = (
            nans(s.block_tokens, s.index_dim),
            nans(s.num_blocks, s.index_dim),
        )
        self.q, self.index_q = nans(s.heads, s.head_dim), nans(s.index_heads, s.index_dim)
        self.scores = nans(s.num_blocks)
        self.chosen = torch.full((s.num_blocks,), 7, dtype=torch.int8, device=DEVICE)
        shapes = attention_token.scratch_shapes(s.heads, s.head_dim, s.capacity)
        self.scratch = {name: nans(*shape) for name, shape in shapes.items()}
        self.out = nans(1, s.heads * s.head_dim)

    def caches(self) -> list[Tensor]:
        return [self.keys, self.values, self.open_block, self.pooled, self.q, self.index_q]

    def prepare(self, kernels, projected: Tensor, position: Tensor) -> None:
        tables, gains = make_tables(self.s), make_gains(self.s)
        kernels.prepare_token(projected, position, *tables, *gains, *self.caches(), EPS)

    def choose(self, kernels, position: Tensor) -> None:
        budget, size = self.s.budget, self.s.block_tokens
        parts = self.index_q, self.pooled, position, self.scores, self.chosen
        kernels.choose_blocks(*parts, budget, size)

    def attend(self, kernels, projected: Tensor, position: Tensor) -> None:
        kernels.attend_token(
            self.q, projected, self.keys, self.values, self.chosen, position, **self.scratch, out=self.out,
            budget=self.s.budget, block_tokens=self.s.block_tokens,
        )  # fmt: skip


# ---- prepare ---------------------------------------------------------------------------------------------------------


@SHAPES
def test_prepare_is_the_definition(s: Sizes):
    """Each position by itself, upon caches full of random rows."""
    size = s.block_tokens
    for place in sorted({0, 1, 2, 3, 4, size - 1, size, 3 * size - 1, s.capacity - 2}):
        states = []
        for kernels in (attention_token, reference_attention):
            state = State(s)
            for seed, cache in enumerate(state.caches()):
                cache.copy_(random(*cache.shape, seed=seed))
            state.prepare(kernels, random(1, s.width, seed=place), at(place))
            states.append(state)
        for found, wanted in zip(states[0].caches(), states[1].caches(), strict=True):
            assert error(found, wanted) < TOLERANCE


@SHAPES
def test_prepare_touches_the_rows_of_its_position_alone(s: Sizes):
    for place in (0, 1, s.block_tokens - 1, s.block_tokens, s.capacity - 1):
        state = State(s)
        state.prepare(attention_token, random(1, s.width, seed=1), at(place))
        assert (~state.keys.isnan()).flatten(1).all(1).nonzero().flatten().tolist() == [place]
        assert (~state.values.isnan()).flatten(1).all(1).nonzero().flatten().tolist() == [place]
        written = (~state.open_block.isnan()).all(1).nonzero().flatten().tolist()
        assert written == [place % s.block_tokens]
        rest = state.pooled[torch.arange(s.num_blocks, device=DEVICE) != place // s.block_tokens]
        assert rest.isnan().all()


@SHAPES
def test_pooled_keys_of_complete_blocks_hold_no_older_row(s: Sizes):
    """Blocks filled token by token from NaN: a row taken from memory too early, or too late, would show."""
    state, other = State(s), State(s)
    for place in range(2 * s.block_tokens + 1):
        projected = random(1, s.width, seed=place)
        state.prepare(attention_token, projected, at(place))
        other.prepare(reference_attention, projected, at(place))
    assert not state.pooled[:2].isnan().any()
    assert error(state.pooled[:2], other.pooled[:2]) < TOLERANCE
    assert torch.equal(state.open_block, other.open_block)


# ---- choose ----------------------------------------------------------------------------------------------------------


def expect_choice(state: State, position: int) -> None:
    """What the kernels marked is what the definition marks, from the same index queries and pooled keys."""
    s = state.s
    complete = (position + 1) // s.block_tokens
    other = State(s)
    other.index_q, other.pooled = state.index_q, state.pooled
    state.scores.fill_(NAN)
    state.chosen.fill_(7)
    state.choose(attention_token, at(position))
    other.choose(reference_attention, at(position))
    if complete <= s.budget:  # nothing is done, since nothing is read
        assert state.scores.isnan().all()
        assert (state.chosen == 7).all()
        return
    assert error(state.scores[:complete], other.scores[:complete]) < TOLERANCE
    assert int(state.chosen[:complete].sum()) == s.budget
    assert torch.equal(state.chosen[:complete], other.chosen[:complete])
    assert (state.chosen[complete:] == 7).all()


@SHAPES
def test_choice_is_the_definition(s: Sizes):
    for position in positions(s):
        state = State(s)
        complete = (position + 1) // s.block_tokens
        state.index_q.copy_(random(s.index_heads, s.index_dim, seed=position))
        state.pooled[:complete] = random(complete, s.index_dim, seed=position + 1)
        expect_choice(state, position)


@pytest.mark.parametrize("kinds", [1, 2, 3, 9])
@SHAPES
def test_of_equal_scores_the_earlier_block_is_chosen(s: Sizes, kinds: int):
    """Small whole numbers, so that scores are exact: few kinds of keys, and zeros where all dots are negative."""
    for position in positions(s):
        generator = torch.Generator().manual_seed(position)
        complete = (position + 1) // s.block_tokens
        state = State(s)
        keys = torch.randint(-2, 3, (kinds, s.index_dim), generator=generator).float()
        kind = torch.randint(0, kinds, (complete,), generator=generator)
        state.pooled[:complete] = keys[kind].to(DEVICE)
        state.index_q.copy_(
            torch.randint(-2, 3, state.index_q.shape, generator=generator).float().to(DEVICE)
        )
        expect_choice(state, position)


def test_choice_among_more_blocks_than_one_pass_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_token, "SELECT_BLOCK", 64)
    s = dataclasses.replace(TINY, num_blocks=600, budget=100, index_heads=2, index_dim=4)
    for position in (s.capacity - 1, s.capacity // 2, 101 * s.block_tokens - 1):
        complete = (position + 1) // s.block_tokens
        state = State(s)
        state.index_q.copy_(random(2, 4, seed=1).round())
        state.pooled[:complete] = random(complete, 4, seed=2).round()
        expect_choice(state, position)


@pytest.mark.parametrize("num_blocks", [16384, 20001])
def test_choice_of_a_long_window(num_blocks: int):
    """Scores given, many of them equal, some the smallest and largest numbers there are."""
    scores = (random(num_blocks, seed=1).abs() * 20).round() / 20
    scores[::97], scores[::89], scores[5::101] = 0.0, 1e-45, 3e38
    complete = torch.ones(1, num_blocks, dtype=torch.bool, device=DEVICE)
    for budget in (1, 512, num_blocks - 1):
        chosen = torch.zeros(num_blocks, dtype=torch.int8, device=DEVICE)
        attention_token._select_kernel[(1,)](
            scores, at(num_blocks * 4 - 1), chosen, budget=budget, block_tokens=4,
            digit_bits=attention_token.SELECT_BITS, block=attention_token.SELECT_BLOCK,
        )  # fmt: skip
        wanted = reference.top_blocks(scores.unsqueeze(0), complete, budget)[0]
        assert torch.equal(chosen.bool(), wanted)


# ---- attend ----------------------------------------------------------------------------------------------------------


def choices(s: Sizes, complete: int) -> list[Tensor]:
    """Random blocks, the first blocks (nothing in the last splits) and the last ones."""
    if complete <= s.budget:
        return [torch.zeros(complete, dtype=torch.int8)]  # never read
    order = torch.randperm(complete, generator=torch.Generator().manual_seed(complete))
    marks = [torch.zeros(complete, dtype=torch.int8) for _ in range(3)]
    marks[0][order[: s.budget]] = 1
    marks[1][: s.budget] = 1
    marks[2][-s.budget :] = 1
    return marks


@SHAPES
@pytest.mark.parametrize("splits", [None, 3])
def test_attention_is_the_definition(s: Sizes, splits: int | None, monkeypatch: pytest.MonkeyPatch):
    """NaN in every row that is not visible: behind the position, and in blocks that were not chosen."""
    if splits is not None:
        monkeypatch.setattr(attention_token, "SPLITS", splits)
        monkeypatch.setattr(attention_token, "TILE", 16)
    for position in positions(s):
        complete = (position + 1) // s.block_tokens
        projected = random(1, s.width, seed=position)
        for marks in choices(s, complete):
            state, other = State(s), State(s)
            other.q = state.q.copy_(random(s.heads, s.head_dim, seed=position + 1) * 2)
            for seed, part in enumerate(("keys", "values")):
                setattr(other, part, random(s.capacity, s.kv_heads, s.head_dim, seed=seed))
            state.chosen[:complete] = other.chosen[:complete] = marks.to(DEVICE)
            visible = torch.arange(position + 1, device=DEVICE)
            if complete > s.budget:
                is_seen = (state.chosen == 1) | (
                    torch.arange(s.num_blocks, device=DEVICE) >= complete
                )
                visible = visible[is_seen[visible // s.block_tokens]]
            state.keys[visible], state.values[visible] = other.keys[visible], other.values[visible]
            state.attend(attention_token, projected, at(position))
            other.attend(reference_attention, projected, at(position))
            assert error(state.out, other.out) < TOLERANCE


def test_scores_far_from_zero_neither_overflow_nor_vanish():
    """Scores of several hundred, the largest in the last tile: what came before is scaled down."""
    s, position = SINGLE, SINGLE.capacity - 2
    state, other = State(s), State(s)
    other.q = state.q.copy_(random(s.heads, s.head_dim, seed=1) * 30)
    other.keys = random(s.capacity, s.kv_heads, s.head_dim, seed=2) * 10
    other.values = random(s.capacity, s.kv_heads, s.head_dim, seed=3)
    state.keys[: position + 1], state.values[: position + 1] = (
        other.keys[: position + 1],
        other.values[: position + 1],
    )
    marks = choices(s, (position + 1) // s.block_tokens)[0].to(DEVICE)
    state.chosen[: len(marks)] = other.chosen[: len(marks)] = marks
    projected = random(1, s.width, seed=4)
    for kernels, used in ((attention_token, state), (reference_attention, other)):
        used.attend(kernels, projected, at(position))
    assert error(state.out, other.out) < 1e-4  # an exponent of 500 has an error of 500 * 2^-24


# ---- the whole layer -------------------------------------------------------------------------------------------------


def layer_definition(s: Sizes, projected: Tensor) -> Tensor:
    """All tokens at once, as a prompt is read: [T, heads * head_dim]. Written from the operations of `reference`."""
    tokens, size = projected.shape[0], s.block_tokens
    gain_q, gain_k, gain_index_q, gain_index_k = make_gains(s)
    cos, sin = (table[:tokens] for table in make_tables(s))
    both, k, v, index, raw = projected.split(
        [
            2 * s.heads * s.head_dim,
            s.kv_heads * s.head_dim,
            s.kv_heads * s.head_dim,
            s.index_heads * s.index_dim,
            s.index_dim,
        ],
        dim=1,
    )
    q, gate = both.view(tokens, s.heads, 2 * s.head_dim).chunk(2, dim=-1)
    q = reference.apply_rope(reference.rms_norm(q, gain_q, EPS), cos, sin)
    k = k.view(tokens, s.kv_heads, s.head_dim)
    k = reference.apply_rope(reference.rms_norm(k, gain_k, EPS), cos, sin)
    index = index.view(tokens, s.index_heads, s.index_dim)
    index = reference.apply_rope(reference.rms_norm(index, gain_index_q, EPS), cos, sin)
    blocks = tokens // size
    pooled = raw[: blocks * size].view(blocks, size, -1).float().mean(1).to(raw.dtype)
    pooled = reference.rms_norm(pooled, gain_index_k, EPS).unsqueeze(1)
    starts = torch.arange(blocks, device=DEVICE) * size
    pooled = reference.apply_rope(pooled, cos[starts], sin[starts]).squeeze(1)
    scores = torch.einsum("thd,bd->thb", index.float(), pooled.float())
    scores = scores.relu().sum(1) * s.index_dim**-0.5
    place = torch.arange(tokens, device=DEVICE)
    complete = (place + 1).unsqueeze(1) // size
    chosen = reference.top_blocks(scores, place[:blocks] < complete, s.budget)
    chosen = torch.nn.functional.pad(
        chosen.repeat_interleave(size, dim=1), (0, tokens - blocks * size)
    )
    is_open = (place >= complete * size) & (place <= place.unsqueeze(1))
    out = reference.attention(q, k, v.reshape(tokens, s.kv_heads, s.head_dim), chosen | is_open)
    return (out * torch.sigmoid(gate)).flatten(1)


@SHAPES
def test_token_by_token_is_the_whole_prompt(s: Sizes):
    """From empty caches (NaN) beyond the budget: every token's output is the one that a prompt's pass gives."""
    s = dataclasses.replace(s, budget=2)
    tokens = (s.budget + 2) * s.block_tokens + 2
    projected = random(tokens, s.width, seed=9)
    wanted = layer_definition(s, projected)
    state, other = State(s), State(s)
    other.keys.zero_()
    other.values.zero_()
    for token in range(tokens):
        for kernels, used in ((attention_token, state), (reference_attention, other)):
            row = projected[token : token + 1]
            used.prepare(kernels, row, at(token))
            used.choose(kernels, at(token))
            used.attend(kernels, row, at(token))
            assert error(used.out[0], wanted[token]) < 5e-6


# ---- compiled --------------------------------------------------------------------------------------------------------

POINTERS = {
    "scores": "*fp32", "best": "*fp32", "total": "*fp32", "weighted": "*fp32", "cos": "*fp32", "sin": "*fp32",
    "gain_q": "*fp32", "gain_k": "*fp32", "gain_index_q": "*fp32", "gain_index_k": "*fp32", "eps": "fp32",
    "position": "*i64", "chosen": "*i8",
}  # fmt: skip
BF16 = ("projected", "keys", "values", "open_block", "pooled", "q", "index_q", "out")
FULL = {
    "heads": 24, "kv_heads": 2, "head_dim": 256, "index_heads": 4, "index_dim": 128, "half": 32, "block_tokens": 4,
    "budget": 512, "splits": attention_token.SPLITS, "tile": attention_token.TILE, "block_head": 256,
    "block_index": 128, "block_group": 16, "block_dim": 256, "block_splits": attention_token.SPLITS,
    "block_rows": attention_token.SCORE_ROWS, "digit_bits": attention_token.SELECT_BITS,
    "block": attention_token.SELECT_BLOCK,
}  # fmt: skip
WARPS = {"_prepare_kernel": 2, "_select_kernel": 16, "_attend_kernel": 8}
KERNELS = [
    "_prepare_kernel",
    "_score_kernel",
    "_select_kernel",
    "_attend_kernel",
    "_combine_kernel",
]


def compile_for(name: str, capability: int) -> tuple[str, int]:
    """PTX of one kernel at full size, and its bytes of shared memory."""
    kernel = getattr(attention_token, name)
    columns = 128 if name == "_score_kernel" else attention_token.COMBINE_COLUMNS
    pointers = {**POINTERS, **dict.fromkeys(BF16, "*bf16")}
    signature = {arg: pointers.get(arg, "constexpr") for arg in kernel.arg_names}
    sizes = {**FULL, "block_columns": columns}
    constants = {arg: sizes[arg] for arg, kind in signature.items() if kind == "constexpr"}
    # buffers start at multiples of 16 bytes, which a launch finds out; the position does not
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, (arg, kind) in enumerate(signature.items())
        if kind.startswith("*") and arg != "position"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": WARPS.get(name, 4)}
    done = triton.compile(source, target=target, options=options)
    return done.asm["ptx"], done.metadata.shared


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], tuple[str, int]]:
    """All kernels for both cards, in a process of its own: this one has the interpreter switched on."""
    code = (
        "import json, sys; sys.path.insert(0, '.'); from tests.unit import test_attention_token as t;"
        "done = [[cc, name, t.compile_for(name, cc)] for cc in (90, 120) for name in t.KERNELS];"
        "print(json.dumps(done))"
    )
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(cc, name): tuple(built) for cc, name, built in json.loads(done.stdout)}


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_cards_that_are_not_here(compiled, name: str, capability: int):
    ptx, shared = compiled[capability, name]
    assert re.search(rf"\.target sm_{capability}a", ptx)
    assert "tf32" not in ptx
    if name == "_attend_kernel":  # tensor cores, and keys and values read 16 bytes at a time
        assert "mma.sync" in ptx
        assert ptx.count("ld.global.v4.b32") >= 16
    assert shared <= 99 * 1024  # what one program may have on the smaller card
