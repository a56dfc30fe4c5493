"""The reference operations against loops, torch's own layers and the equations of the specification."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference as ops
from kernels.formats import fp8_rows_dequantize, fp8_rows_quantize


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


def test_norms(rng):
    x, gain = torch.randn(3, 4, 6, generator=rng), torch.randn(4, 6, generator=rng)
    for row in ((0, 0), (2, 3)):
        values = x[row].double()
        mean_square = sum(float(v) ** 2 for v in values) / 6
        wanted = values / math.sqrt(mean_square + 1e-2) * gain[row[1]]
        torch.testing.assert_close(ops.rms_norm(x, gain, 1e-2)[row].double(), wanted)
        wanted = values / math.sqrt(mean_square * 6 + 1e-2)
        torch.testing.assert_close(ops.l2_norm(x, 1e-2)[row].double(), wanted)
    # one rounding at the end: equal to the fp32 result rounded
    low = x.bfloat16()
    assert torch.equal(
        ops.rms_norm(low, gain, 1e-6), ops.rms_norm(low.float(), gain, 1e-6).bfloat16()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("room", [None, 32, 70, 10_000])  # one row, two, all
def test_linear_with_a_weight_as_stored(rng, dtype, room):
    x = torch.randn(3, 32, generator=rng)
    weight = torch.randn(5, 32, generator=rng).to(dtype)
    bias = torch.randn(5, generator=rng).to(dtype)
    scratch = None if room is None else torch.full((room,), float("nan"))
    wanted = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(ops.stored_linear(x, weight, None, scratch), wanted)
    found = ops.stored_linear(x, weight, bias, scratch)
    torch.testing.assert_close(found, wanted + bias.float())
    assert found.dtype == torch.float32


def test_linear_with_fp8_rows(rng):
    x, weight = torch.randn(3, 32, generator=rng), torch.randn(5, 32, generator=rng)
    torch.testing.assert_close(ops.linear(x, weight), x @ weight.T)
    values, scale = fp8_rows_quantize(weight * torch.tensor([[1.0], [10.0], [0.1], [5.0], [0.0]]))
    wanted = x.double() @ fp8_rows_dequantize(values, scale).double().T
    torch.testing.assert_close(ops.linear(x, values, scale).double(), wanted, rtol=1e-5, atol=1e-5)
    assert ops.linear(x.bfloat16(), values, scale).dtype == torch.bfloat16


def test_rope_is_a_complex_rotation(rng):
    """Pairs (i, i + R/2) of the first R dimensions turn by pos * theta^(-2i/R); the rest pass."""
    rotary, theta = 8, 10_000.0
    positions = torch.tensor([0, 1, 7, 300])
    x = torch.randn(4, 3, 14, generator=rng)
    got = ops.apply_rope(x, *ops.rope_tables(positions, rotary, theta))
    pairs = torch.complex(x[..., :4].double(), x[..., 4:8].double())
    angle = positions.double().unsqueeze(1) * theta ** (-torch.arange(4).double() * 2 / rotary)
    turned = pairs * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    torch.testing.assert_close(got[..., :4].double(), turned.real, rtol=0, atol=1e-4)
    torch.testing.assert_close(got[..., 4:8].double(), turned.imag, rtol=0, atol=1e-4)
    assert torch.equal(got[..., 8:], x[..., 8:])


@pytest.mark.parametrize("dilation", [1, 3])
def test_causal_conv(rng, dilation):
    taps, channels, tokens = 4, 5, 23
    weight, x = (
        torch.randn(taps, channels, generator=rng),
        torch.randn(tokens, channels, generator=rng),
    )
    history = torch.zeros((taps - 1) * dilation, channels)
    whole, after = ops.causal_conv(x, history, weight, dilation)
    padded = F.pad(x.T.unsqueeze(0), ((taps - 1) * dilation, 0))
    wanted = F.conv1d(padded, weight.T.unsqueeze(1), groups=channels, dilation=dilation)[0].T
    torch.testing.assert_close(whole, wanted)
    # pieces shorter and longer than the history give the very same numbers
    pieces = []
    for part in x.split([1, 1, 2, 14, 1, 4]):
        out, history = ops.causal_conv(part, history, weight, dilation)
        pieces.append(out)
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(history, after)
    assert torch.equal(after, x[-(taps - 1) * dilation :])


def delta_loop(q, k, v, beta, log_decay, state):
    """The recurrent form of section 4.5, in float64, one head and token at a time."""
    q, k, v, beta, log_decay = (t.double() for t in (q, k, v, beta, log_decay))
    state = state.double().clone()
    out = torch.zeros(v.shape, dtype=torch.float64)
    for head in range(q.shape[0]):
        for t in range(q.shape[1]):
            state[head] *= torch.exp(log_decay[head, t])
            read = k[head, t] @ state[head]
            state[head] += torch.outer(k[head, t], beta[head, t] * (v[head, t] - read))
            out[head, t] = q[head, t] @ state[head]
    return out, state


def delta_case(tokens, rng, decay):
    heads, key, value = 3, 5, 7
    q = ops.l2_norm(torch.randn(heads, tokens, key, generator=rng)) * key**-0.5
    k = ops.l2_norm(torch.randn(heads, tokens, key, generator=rng))
    v = torch.randn(heads, tokens, value, generator=rng)
    beta = torch.rand(heads, tokens, generator=rng)
    log_decay = -decay * torch.rand(heads, tokens, generator=rng)
    return q, k, v, beta, log_decay, torch.randn(heads, key, value, generator=rng)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("decay", [0.1, 30.0])  # 30: exp of the sum over a chunk underflows
def test_delta_chunks_are_single_steps(rng, tokens, decay):
    *case, state = delta_case(tokens, rng, decay)
    wanted, wanted_state = delta_loop(*case, state)
    memory = state.double()
    out = ops.gated_delta_chunks(*(t.double() for t in case), memory)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(memory, wanted_state, rtol=0, atol=1e-12)
    memory = state.clone()
    out = ops.gated_delta_chunks(*case, memory)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(memory.double(), wanted_state, rtol=0, atol=2e-5)
    memory = state.clone()
    steps = [
        ops.gated_delta_step(
            *(t[:, i] for t in case), memory
        )
        for i in range(tokens)
    ]  # fmt: skip
    torch.testing.assert_close(torch.stack(steps, 1).double(), wanted, rtol=0, atol=2e-5)
    torch.testing.assert_close(memory.double(), wanted_state, rtol=0, atol=2e-5)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_top_blocks_with_ties(data):
    blocks, budget = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 3), min_size=blocks, max_size=blocks)  # few values: many ties
    scores = data.draw(st.lists(row, min_size=1, max_size=4))
    complete = [data.draw(st.integers(0, blocks)) for _ in scores]
    got = ops.top_blocks(
        torch.tensor(scores).float(),
        torch.tensor([[b < n for b in range(blocks)] for n in complete]),
        budget,
    )
    for values, n, chosen in zip(scores, complete, got.tolist(), strict=True):
        best = sorted(range(n), key=lambda b: (-values[b], b))[:budget]
        assert [b for b in range(blocks) if chosen[b]] == sorted(best)


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_is_a_loop(rng, is_masked):
    tokens, heads, kv_heads, dim, keys = 3, 6, 2, 5, 7
    q = torch.randn(tokens, heads, dim, generator=rng)
    k, v = (torch.randn(keys, kv_heads, dim, generator=rng) for _ in range(2))
    visible = torch.rand(tokens, keys, generator=rng) < 0.5
    visible[:, 2] = True
    got = ops.attention(q, k, v, visible if is_masked else None)
    for t in range(tokens):
        seen = [s for s in range(keys) if visible[t, s] or not is_masked]
        for h in range(heads):
            kv = h // (heads // kv_heads)
            weights = [math.exp(float(q[t, h] @ k[s, kv]) / math.sqrt(dim)) for s in seen]
            wanted = sum(w * v[s, kv] for w, s in zip(weights, seen, strict=True)) / sum(weights)
            torch.testing.assert_close(got[t, h], wanted, rtol=1e-4, atol=1e-5)


CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def dot(codes, scales, s2, x):
    """Section 5 of the specification, letter by letter: s2 * sum_g scale_g * sum_j (low, high)."""
    out = []
    for row, steps in zip(codes.tolist(), scales.double().tolist(), strict=True):
        total = 0.0
        for g, step in enumerate(steps):
            inner = 0.0
            for j in range(8):
                byte = row[8 * g + j]
                inner += CODES[byte & 15] * x[16 * g + 2 * j]
                inner += CODES[byte >> 4] * x[16 * g + 2 * j + 1]
            total += step * inner
        out.append(s2 * total)
    return out


def test_nvfp4_expert_from_its_bytes(rng):
    """Three different global scales, gate and up of one shape, down of another, padding behind."""
    hidden, inner = 48, 32
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    codes = [
        torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=rng) for n, k in shapes
    ]
    scales = [
        (torch.rand(n, k // 16, generator=rng) * 2 + 0.1).to(torch.float8_e4m3fn) for n, k in shapes
    ]
    s2 = torch.tensor([0.02, 0.05, 0.03])
    padding = torch.full((100,), 0xFF, dtype=torch.uint8)
    record = torch.cat([t.view(torch.uint8).flatten() for t in (*codes, *scales, padding)])
    x = torch.randn(2, hidden, generator=rng)
    got = ops.nvfp4_swiglu_expert(x, record, s2, inner)
    for token in range(2):
        gate, up = (dot(codes[i], scales[i], s2[i].item(), x[token].tolist()) for i in (0, 1))
        h = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
        wanted = torch.tensor(dot(codes[2], scales[2], s2[2].item(), h), dtype=torch.float64)
        scale = wanted.abs().max()
        torch.testing.assert_close(got[token].double() / scale, wanted / scale, rtol=0, atol=1e-5)


def test_swiglu(rng):
    x = torch.randn(2, 4, generator=rng)
    gate, up = (torch.randn(3, 4, generator=rng) for _ in range(2))
    down = torch.randn(4, 3, generator=rng)
    a = x @ gate.T
    torch.testing.assert_close(
        ops.swiglu(x, gate, up, down), (a / (1 + (-a).exp()) * (x @ up.T)) @ down.T
    )
