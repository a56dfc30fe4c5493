"""What the kernels of one DeepSeek token must do at any sizes: each check runs one beside its definition on the CPU.

Small sizes go through the interpreter in `tests/unit`, the released sizes through a GPU in `tests/gpu`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels import (
    deepseek_attention,
    deepseek_compress,
    deepseek_index,
    deepseek_token,
    reference_deepseek,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the mixes' own is much larger than a model's, so that each place of it shows
EPS, HC_EPS, ITERATIONS = 1e-20, 1e-2, 20
NAN = float("nan")
# fp32 behind an exponential and 20 iterations: a few roundings of 2^-24
MIX_TOLERANCE = 2e-6
# bf16 behind a norm: the mean of squares is summed in another order, so one result in some hundred is rounded otherwise
NORM_SHARE = 0.01
# a share on the other side of a bf16 rounding: now and then with torch's exponential, more often with a GPU's
ATTENTION_TOLERANCE, ATTENTION_SHARE = 1e-3, 0.001 if DEVICE == "cpu" else 0.02
SCORE_SHARE = 0.001
# a number on the other side of an FP4 threshold is a third aside, a scale on the other side moves a block
FP4_SHARE, FP4_TOLERANCE = 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden: int = 5120
    streams: int = 4
    heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_rank: int = 1280
    window: int = 128
    index_heads: int = 32
    index_dim: int = 128
    topk: int = 512
    num_blocks: int = 2048
    block: int = 8
    capacity: int = 8192  # positions


FULL = Sizes()
TINY = Sizes(256, 4, 4, 64, 16, 96, 64, 4, 32, 32, 12, 8, 256)  # the bundled model
GOLDEN = Sizes(128, 4, 4, 64, 16, 64, 16, 4, 32, 8, 3, 4, 192)  # the golden vectors' model
ODD = Sizes(330, 3, 19, 96, 24, 40, 12, 3, 64, 7, 2, 3, 90)  # no power of two anywhere
SMALL = {"tiny": TINY, "golden": GOLDEN, "odd": ODD}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def narrow(*shape: int, seed: int) -> Tensor:
    return random(*shape, seed=seed).to(torch.bfloat16)


def nans(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def there(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def at(position: int) -> Tensor:
    return torch.tensor([position], device=DEVICE)


def tables(s: Sizes) -> tuple[Tensor, Tensor]:
    rates = reference_deepseek.rotation_rates(s.rope_dim, 160000.0, (16.0, 32.0, 1.0, 65536))
    angles = torch.arange(s.capacity).float().unsqueeze(1) * rates
    return angles.cos(), angles.sin()


def positions(s: Sizes) -> list[int]:
    """The first few, both sides of a full window, of a full list, of more candidates than are kept; the last."""
    edges = [s.window, s.topk, 2 * s.topk, s.num_blocks * s.block, s.capacity // 2]
    near = [edge + step for edge in edges for step in (-2, -1, 0, 1)]
    return sorted({p for p in [0, 1, 2, 3, *near, s.capacity - 1] if 0 <= p < s.capacity})


def bf16_steps(found: Tensor, wanted: Tensor) -> Tensor:
    """How many bf16 numbers lie between two, per element."""

    def places(x: Tensor) -> Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (places(found) - places(wanted)).abs()


def expect_near(
    found: Tensor, wanted: Tensor, share: float, steps: int = 1, of_row: float = 0.0
) -> None:
    """Equal but for a share of the results, which are so many bf16 steps aside.

    of_row: or by so much of the root mean square of their row: steps of what nearly cancels are as small as it is.
    """
    found = found.cpu()
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert not found.isnan().any()
    aside = bf16_steps(found, wanted)
    size = wanted.float().square().mean(-1, keepdim=True).sqrt()
    is_near = (found.float() - wanted.float()).abs() <= of_row * size
    assert aside.masked_fill(is_near, 0).max() <= steps
    assert aside.count_nonzero() <= 1 + share * aside.numel()


def expect_same(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found.cpu(), wanted)


# ---- streams ---------------------------------------------------------------------------------------------------------


class Connection:
    """Weights and inputs of one hyper-connection."""

    def __init__(self, s: Sizes, seed: int) -> None:
        width, mixes = s.streams * s.hidden, 2 * s.streams + s.streams**2
        self.fn = random(mixes, width, seed=seed) * width**-0.5
        self.scale, self.base = (
            random(3, seed=seed + 1).abs() + 0.5,
            random(mixes, seed=seed + 2) * 0.5,
        )
        # one stream is much larger than the others, as in the model
        self.streams = narrow(s.streams, s.hidden, seed=seed + 3)
        self.streams[0] *= 30
        self.weight = (1 + 0.2 * random(s.hidden, seed=seed + 4)).to(torch.bfloat16)
        self.pre = random(s.streams, seed=seed + 5).sigmoid()

    def definition(self, streams: Tensor) -> list[Tensor]:
        mixes = reference_deepseek.hyper_mixes(
            streams.unsqueeze(0), self.fn, self.scale, self.base, ITERATIONS, EPS, HC_EPS
        )
        return [part[0] for part in mixes]


def run_read(
    c: Connection, s: Sizes, streams: Tensor, partials: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The sublayer's input, and the mixes if partials are given.  All on the device."""
    u, fp32 = nans(s.hidden), torch.float32
    mixes = [nans(*shape, dtype=fp32) for shape in ((s.streams,), (s.streams,), (s.streams,) * 2)]
    pre, weight, scale, base = there(c.pre, c.weight, c.scale, c.base)
    if partials is None:
        deepseek_token.read_streams(streams, pre, weight, u, EPS)
    else:
        deepseek_token.read_streams(
            streams, pre, weight, u, EPS, partials, scale, base, *mixes, ITERATIONS, HC_EPS
        )
    return u, mixes


def check_read(s: Sizes, seed: int = 0) -> None:
    c = Connection(s, seed)
    streams, fn = there(c.streams, c.fn)
    partials = nans(*deepseek_token.partials_shape(s.streams, s.hidden), dtype=torch.float64)
    deepseek_token.mix_streams(streams, fn, partials)
    u, mixes = run_read(c, s, streams, partials)
    for found, wanted in zip(mixes, c.definition(c.streams), strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=MIX_TOLERANCE, atol=MIX_TOLERANCE)
    x = reference_deepseek.hyper_read(c.streams.unsqueeze(0), c.pre.unsqueeze(0))
    expect_near(u, reference_deepseek.rms_norm(x, c.weight, EPS)[0], NORM_SHARE)
    alone, untouched = run_read(c, s, streams, None)
    assert torch.equal(alone, u)
    assert all(part.isnan().all() for part in untouched)


def check_read_bits(s: Sizes) -> None:
    """Where the norm is exact, the rest is, too: one stream of signs, taken alone."""
    c = Connection(s, 7)
    c.streams[1] = narrow(s.hidden, seed=8).sign()
    c.pre = torch.zeros(s.streams)
    c.pre[1] = 1.0
    u, _ = run_read(c, s, c.streams.to(DEVICE), None)
    expect_same(u, (c.weight.float() * c.streams[1].float()).to(torch.bfloat16))


def check_write(s: Sizes, seed: int = 20) -> None:
    """Bit for bit, and the partial mixes are those of what was written."""
    c = Connection(s, seed)
    y, post, comb = (
        narrow(s.hidden, seed=seed + 10),
        random(s.streams, seed=seed + 11),
        random(s.streams, s.streams, seed=seed + 12),
    )
    wanted = reference_deepseek.hyper_write(
        y.unsqueeze(0), c.streams.unsqueeze(0), post.unsqueeze(0), comb.unsqueeze(0)
    )[0]
    y, streams, post, comb, fn = there(y, c.streams, post, comb, c.fn)
    shape = deepseek_token.partials_shape(s.streams, s.hidden)
    partials, others = (nans(*shape, dtype=torch.float64) for _ in range(2))
    out, alone = nans(s.streams, s.hidden), nans(s.streams, s.hidden)
    deepseek_token.write_streams(y, streams, post, comb, out, fn, partials)
    expect_same(out, wanted)
    deepseek_token.write_streams(y, streams, post, comb, alone)
    expect_same(alone, wanted)
    deepseek_token.mix_streams(out, fn, others)
    assert torch.equal(partials, others)
    sums = partials.sum(0).cpu()
    flat = wanted.double().flatten()
    torch.testing.assert_close(sums[:-1], c.fn.double() @ flat, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums[-1], flat.square().sum(), rtol=1e-12, atol=0)


def check_engram(s: Sizes) -> None:
    """Gates that are open, shut and undecided: almost, by a number under the floor, and by a zero."""
    streams, gate = (
        narrow(s.streams, s.hidden, seed=1),
        1 + 0.2 * random(s.streams, s.hidden, seed=2),
    )
    kv = narrow((s.streams + 1) * s.hidden, seed=3)
    keys = kv[: s.streams * s.hidden].view(s.streams, s.hidden)
    keys[0] = streams[0]
    keys[1] = -streams[1]
    keys[2, 1:], keys[2, 0], streams[2, 0] = 0, 1.0, 2e-8
    if s.streams > 3:
        streams[3] = 0
    x, k, value = streams.float(), keys.float(), kv[s.streams * s.hidden :].float()
    g = (x * gate * k).sum(-1)
    for part in (x, k):
        g = g * torch.rsqrt(part.square().mean(-1) + EPS)
    g = g * s.hidden**-0.5
    amount = torch.sigmoid(g.sign() * g.abs().clamp(min=1e-6).sqrt())
    wanted = (x + amount.unsqueeze(-1) * value).to(torch.bfloat16)
    assert amount.min() < 0.1
    assert amount.max() > 0.9
    streams, kv, gate = there(streams, kv, gate)
    out = nans(s.streams, s.hidden)
    deepseek_token.gate_engram(streams, kv, gate, out, EPS)
    expect_near(out[:3], wanted[:3], NORM_SHARE)
    # of a small gate, the sum's own error is larger: its terms are not
    error = (out.cpu().float() - wanted.float()).norm() / wanted.float().norm()
    assert error < 1e-3
    deepseek_token.gate_engram(streams, kv, gate, streams, EPS)
    assert torch.equal(streams, out)


# ---- window ----------------------------------------------------------------------------------------------------------


def check_prepare(s: Sizes, position: int, is_exact: bool) -> None:
    """is_exact: inputs whose norm is one, so that everything behind it is equal to the bit."""
    kv, qr = narrow(s.head_dim, seed=position), narrow(s.q_rank, seed=position + 1)
    if is_exact:
        kv, qr = kv.sign(), qr.sign()
    kv_weight, q_weight = (
        (1 + 0.3 * random(size, seed=size)).to(torch.bfloat16) for size in (s.head_dim, s.q_rank)
    )
    cos, sin = tables(s)
    wanted_qr = reference_deepseek.rms_norm(qr, q_weight, EPS)
    normed = reference_deepseek.rms_norm(kv.unsqueeze(0), kv_weight, EPS)
    turned = reference_deepseek.rotate(normed, cos[position, None], sin[position, None])
    wanted = reference_deepseek.act_rounded(turned)[0].to(torch.bfloat16)
    ring, out = nans(s.window, s.head_dim), nans(s.q_rank)
    inputs = there(kv, qr, kv_weight, q_weight)
    deepseek_token.prepare_token(*inputs, at(position), *there(cos, sin), ring, out, EPS)
    row = position % s.window
    if is_exact:
        expect_same(ring[row], wanted)
        expect_same(out, wanted_qr)
    else:
        expect_near(out, wanted_qr, NORM_SHARE)
        # what is rounded otherwise to bf16 may be a step of E4M3 aside: 16 steps of bf16
        expect_near(ring[row], wanted, NORM_SHARE, steps=16)
    assert ring[torch.arange(s.window, device=DEVICE) != row].isnan().all()


# ---- attention -------------------------------------------------------------------------------------------------------


def check_attention(s: Sizes, position: int, ratio: int, spread: float = 1.0) -> float:
    """NaN in every row that is not to be seen.  ratio: 0 for a window alone.  spread: of the scores.

    Returns the share of results that are not the definition's to the bit.
    """
    visible = (position + 1) // ratio if ratio else 0
    generator = torch.Generator().manual_seed(position)
    chosen = torch.randperm(visible, generator=generator)[: s.topk].sort().values
    entries = narrow(max(s.capacity // max(ratio, 1), 1), s.head_dim, seed=position + 1)
    kv = narrow(s.window, s.head_dim, seed=position + 2)
    q = (spread * random(s.heads, s.head_dim, seed=position + 3)).to(torch.bfloat16)
    sink = 2 * random(s.heads, seed=4)
    cos, sin = tables(s)
    filled = min(position + 1, s.window)
    rows = torch.arange(position + 1 - filled, position + 1) % s.window
    here = [table[position, None] for table in (cos, sin)]
    wanted = reference_deepseek.sparse_attention(
        reference_deepseek.rotate(q.unsqueeze(0), *here),
        torch.cat([kv[rows], entries]),
        sink,
        torch.cat([torch.arange(filled), chosen + filled]).unsqueeze(0),
        s.head_dim**-0.5,
    )
    wanted = reference_deepseek.rotate(wanted, *here, inverse=True)[0]
    ring, cache = nans(s.window, s.head_dim), nans(*entries.shape)
    ring[rows.to(DEVICE)] = kv[rows].to(DEVICE)
    cache[chosen.to(DEVICE)] = entries[chosen].to(DEVICE)
    topk = s.topk if ratio else 0
    slots = torch.nn.functional.pad(chosen, (0, topk - len(chosen)), value=-1).to(DEVICE).int()
    scores = nans(*deepseek_attention.scores_shape(s.heads, s.window, topk), dtype=torch.float32)
    out = nans(s.heads, s.head_dim)
    compressed = (cache, slots) if ratio else (None, None)
    deepseek_attention.attend_token(
        q.to(DEVICE), ring, *compressed, *there(sink), at(position), *there(cos, sin), scores, out
    )
    found = out.cpu()
    assert not found.isnan().any()
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < ATTENTION_TOLERANCE
    return float((found != wanted).float().mean())


# ---- indexer ---------------------------------------------------------------------------------------------------------


def make_index(s: Sizes, position: int, ratio: int, kinds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Raw queries, raw weights and FP4 keys of a token.  kinds: of keys; few kinds make many ties."""
    q, weights = (
        narrow(s.index_heads, s.index_dim, seed=position),
        narrow(s.index_heads, seed=position + 1),
    )
    rows = s.capacity // ratio
    keys = reference_deepseek.fp4_rounded(narrow(min(kinds, rows), s.index_dim, seed=position + 2))
    generator = torch.Generator().manual_seed(position)
    return q, weights, keys[torch.randint(0, len(keys), (rows,), generator=generator)]


def check_query(s: Sizes, position: int) -> tuple[Tensor, Tensor]:
    """Bit for bit.  Returns the queries and the weights, on the device."""
    q, weights, _ = make_index(s, position, 1, 1)
    cos, sin = tables(s)
    turned = reference_deepseek.rotate(q.unsqueeze(0), cos[position, None], sin[position, None])
    q_out, weights_out = nans(s.index_heads, s.index_dim), nans(s.index_heads)
    inputs = [*there(q, weights), at(position), *there(cos, sin)]
    deepseek_index.prepare_query(*inputs, q_out, weights_out)
    expect_same(q_out, reference_deepseek.fp4_rounded(turned)[0])
    expect_same(weights_out, weights * (s.index_dim**-0.5 * s.index_heads**-0.5))
    return q_out, weights_out


def check_choice(s: Sizes, position: int, ratio: int, kinds: int, is_source: bool) -> None:
    """Scores as defined but for single steps; the list and the candidates are exactly those of the scores.

    is_source: mark candidates from these scores, then choose among them by another token's.
    """
    visible = (position + 1) // ratio
    q, weights = check_query(s, position)
    keys = make_index(s, position, ratio, kinds)[2]
    cache = nans(*keys.shape)
    cache[:visible] = keys[:visible].to(DEVICE)
    scores, chosen = (
        nans(len(keys)),
        torch.full((s.topk,), -7, dtype=torch.int32, device=DEVICE),
    )
    marks = torch.full((-(-len(keys) // s.block),), 7, dtype=torch.int8, device=DEVICE)
    deepseek_index.score_entries(q, cache, weights, at(position), scores, ratio, s.topk)
    if visible <= s.topk:  # nothing is done, since nothing is read
        assert scores.isnan().all()
    else:
        wanted = reference_deepseek.index_scores(
            q.cpu().unsqueeze(0), keys[:visible], weights.cpu().unsqueeze(0)
        )
        expect_scores(scores[:visible].cpu(), wanted[0])
        assert scores[visible:].isnan().all()
    own = scores.cpu()[None, :visible]
    masked = own
    blocks = {"num_blocks": s.num_blocks, "size": s.block}
    deepseek_index.list_best(scores, at(position), chosen, ratio)
    expect_list(chosen, own, s.topk)
    if not is_source or visible <= s.topk:
        return
    deepseek_index.mark_candidates(scores, at(position), marks, ratio, **blocks)
    mask = reference_deepseek.candidate_mask(own, torch.tensor([visible]), s.num_blocks, s.block)
    if -(-visible // s.block) <= s.num_blocks:
        assert mask.all()
        assert (marks == 7).all()
    else:
        found = marks.repeat_interleave(s.block)[:visible].cpu()
        assert torch.equal(found.bool(), mask[0])
        assert (marks[-(-visible // s.block) :] == 7).all()
    other = (random(len(keys), seed=position) * 4).round().to(torch.bfloat16)
    masked = other[None, :visible].masked_fill(~mask, float("-inf"))
    deepseek_index.list_best(other.to(DEVICE), at(position), chosen, ratio, marks, **blocks)
    expect_list(chosen, masked, s.topk)


def expect_scores(found: Tensor, wanted: Tensor) -> None:
    """Equal but for few: fp32 sums of weights of both signs may cancel, which leaves their order's error."""
    assert (found != wanted).sum() <= 1 + SCORE_SHARE * wanted.numel()
    atol = 2e-6 * float(wanted.float().abs().max())
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=atol)


def expect_list(chosen: Tensor, scores: Tensor, topk: int) -> None:
    best = reference_deepseek.best_places(scores, min(topk, scores.shape[1]))[0].sort().values
    wanted = torch.nn.functional.pad(best, (0, topk - len(best)), value=-1)
    assert torch.equal(chosen.cpu().long(), wanted)


# ---- compressor ------------------------------------------------------------------------------------------------------


class Compressed:
    """Weights, caches and the definition of one layer that makes entries: NaN wherever nothing was written."""

    def __init__(self, s: Sizes, ratio: int, is_exact: bool) -> None:
        """is_exact: norms that are one all the way, so that everything is equal to the bit."""
        self.s, self.ratio, self.is_exact = s, ratio, is_exact
        self.norm, self.k_norm = (
            (1 + 0.3 * random(size, seed=size)).to(torch.bfloat16)
            for size in (s.head_dim, s.index_dim)
        )
        self.wk = narrow(s.index_dim, s.head_dim, seed=3) * s.head_dim**-0.5
        if is_exact:  # a key repeats the latent, up to signs
            self.norm = torch.ones(s.head_dim, dtype=torch.bfloat16)
            place = torch.arange(s.index_dim) % s.head_dim
            self.wk = torch.zeros(s.index_dim, s.head_dim, dtype=torch.bfloat16)
            self.wk[torch.arange(s.index_dim), place] = narrow(s.index_dim, seed=5).sign()
        self.tables = tables(s)
        rows = s.capacity // ratio
        self.entries, self.keys = nans(rows, s.head_dim), nans(rows, s.index_dim)
        self.tail = nans(2, s.head_dim, dtype=torch.float32) if ratio == 2 else None

    def token(self, position: int) -> tuple[Tensor, Tensor | None]:
        """What a token's projections give: values and gates."""
        values = random(self.s.head_dim, seed=2 * position)
        if self.is_exact:  # both tokens of a pair alike: any mix of the two is as long
            values = random(self.s.head_dim, seed=position // self.ratio).sign()
        if self.ratio == 1:
            return values.to(torch.bfloat16), None
        return values, random(self.s.head_dim, seed=2 * position + 1)

    def feed(self, position: int) -> None:
        values, gates = self.token(position)
        deepseek_compress.extend_entries(
            values.to(DEVICE), None if gates is None else gates.to(DEVICE), self.tail,
            *there(self.norm, self.wk, self.k_norm), at(position), *there(*self.tables), self.entries, self.keys, EPS,
        )  # fmt: skip

    def definition(self, number: int) -> tuple[Tensor, Tensor]:
        """The entry and the key of a group of tokens."""
        group = [self.token(number * self.ratio + i) for i in range(self.ratio)]
        values = torch.stack([v for v, _ in group])
        if self.ratio == 2:
            scores = torch.stack([z for _, z in group])
            values = (scores.softmax(0) * values).sum(0, keepdim=True).to(torch.bfloat16)
        ops = reference_deepseek
        latent = ops.rms_norm(values, self.norm, EPS)
        key = ops.rms_norm(torch.nn.functional.linear(latent, self.wk), self.k_norm, EPS)
        c, s = (table[number * self.ratio, None] for table in self.tables)
        entry = ops.fp4_rounded(ops.rotate(latent, c, s), is_kv=True)
        return entry[0], ops.fp4_rounded(ops.rotate(key, c, s))[0]


def check_compressor(s: Sizes, ratio: int, is_exact: bool, places: list[int]) -> None:
    """places: positions to feed, each with those before it in its group."""
    c, others, total = Compressed(s, ratio, is_exact), 0, 0
    for place in places:
        number = place // ratio
        for position in range(number * ratio, place + 1):
            before = c.entries.clone(), c.keys.clone()
            c.feed(position)
            is_row = torch.arange(len(c.entries), device=DEVICE) == number
            is_complete = position % ratio == ratio - 1
            for cache, old in zip((c.entries, c.keys), before, strict=True):
                kept = ~is_row if is_complete else torch.ones_like(is_row)
                torch.testing.assert_close(cache[kept], old[kept], rtol=0, atol=0, equal_nan=True)
            if not is_complete:
                continue
            for cache, wanted in zip((c.entries, c.keys), c.definition(number), strict=True):
                found = cache[number].cpu()
                assert not found.isnan().any()
                error = (found.float() - wanted.float()).norm() / wanted.float().norm()
                assert error < FP4_TOLERANCE
                others, total = others + int((found != wanted).sum()), total + found.numel()
    assert others <= (0 if is_exact else total * FP4_SHARE)


# ---- all of a layer --------------------------------------------------------------------------------------------------


class Layer:
    """The kernels of one layer in their order, on inputs in place of what the products between them give.

    Caches hold random rows before the position, and NaN from there on.
    """

    def __init__(self, s: Sizes, position: int, ratio: int) -> None:
        self.s, self.ratio, self.position = s, ratio, at(position)
        c, compressed = Connection(s, 1), Compressed(s, ratio, is_exact=False)
        self.fn, self.scale, self.base, self.streams, self.weight, self.pre = there(
            c.fn, c.scale, c.base, c.streams, c.weight, c.pre
        )
        values, gates = compressed.token(position)
        self.values, self.gates = values.to(DEVICE), None if gates is None else gates.to(DEVICE)
        self.norm, self.wk, self.k_norm = there(compressed.norm, compressed.wk, compressed.k_norm)
        self.cos, self.sin = there(*compressed.tables)
        self.kv, self.qr, self.q, self.y, self.q_weight = (
            narrow(*shape, seed=seed).to(DEVICE)
            for seed, shape in enumerate(
                [(s.head_dim,), (s.q_rank,), (s.heads, s.head_dim), (s.hidden,), (s.q_rank,)], 20
            )
        )
        raw = make_index(s, position, ratio, 50)
        self.raw_q, self.raw_weights = there(*raw[:2])
        self.sink = random(s.heads, seed=30).to(DEVICE)
        rows, filled, number = s.capacity // ratio, min(position, s.window), position // ratio
        self.ring = nans(s.window, s.head_dim)
        places = torch.arange(position - filled, position, device=DEVICE) % s.window
        self.ring[places] = narrow(filled, s.head_dim, seed=31).to(DEVICE)
        self.entries, self.keys = compressed.entries, compressed.keys
        self.entries[:number] = narrow(number, s.head_dim, seed=32).to(DEVICE)
        self.keys[:number] = raw[2][:number].to(DEVICE)
        self.tail = None if ratio == 1 else random(2, s.head_dim, seed=33).to(DEVICE)
        fp32, fp64 = torch.float32, torch.float64
        shape = deepseek_token.partials_shape(s.streams, s.hidden)
        self.partials, self.next_partials = nans(*shape, dtype=fp64), nans(*shape, dtype=fp64)
        self.u, self.q_out = nans(s.hidden), nans(s.q_rank)
        self.mixes = [
            nans(*shape, dtype=fp32) for shape in ((s.streams,), (s.streams,), (s.streams,) * 2)
        ]
        self.index_q, self.weights, self.scores = (
            nans(s.index_heads, s.index_dim),
            nans(s.index_heads),
            nans(rows),
        )
        self.marks = torch.full((-(-rows // s.block),), 7, dtype=torch.int8, device=DEVICE)
        self.chosen = torch.full((s.topk,), -7, dtype=torch.int32, device=DEVICE)
        shape = deepseek_attention.scores_shape(s.heads, s.window, s.topk)
        self.attention_scores, self.o = nans(*shape, dtype=fp32), nans(s.heads, s.head_dim)
        self.out = nans(s.streams, s.hidden)

    def run(self) -> None:
        s, tables = self.s, (self.cos, self.sin)
        deepseek_token.mix_streams(self.streams, self.fn, self.partials)
        deepseek_token.read_streams(
            self.streams, self.pre, self.weight, self.u, EPS, self.partials, self.scale, self.base, *self.mixes,
            ITERATIONS, HC_EPS,
        )  # fmt: skip
        deepseek_token.prepare_token(
            self.kv, self.qr, self.norm, self.q_weight, self.position, *tables, self.ring, self.q_out, EPS
        )  # fmt: skip
        deepseek_compress.extend_entries(
            self.values, self.gates, self.tail, self.norm, self.wk, self.k_norm, self.position, *tables, self.entries,
            self.keys, EPS,
        )  # fmt: skip
        deepseek_index.prepare_query(
            self.raw_q, self.raw_weights, self.position, *tables, self.index_q, self.weights
        )
        deepseek_index.score_entries(
            self.index_q, self.keys, self.weights, self.position, self.scores, self.ratio, s.topk
        )
        blocks = {"num_blocks": s.num_blocks, "size": s.block}
        deepseek_index.mark_candidates(self.scores, self.position, self.marks, self.ratio, **blocks)
        deepseek_index.list_best(
            self.scores, self.position, self.chosen, self.ratio, self.marks, **blocks
        )
        deepseek_attention.attend_token(
            self.q, self.ring, self.entries, self.chosen, self.sink, self.position, *tables, self.attention_scores,
            self.o,
        )  # fmt: skip
        deepseek_token.write_streams(
            self.y,
            self.streams,
            self.mixes[1],
            self.mixes[2],
            self.out,
            self.fn,
            self.next_partials,
        )

    def results(self) -> list[Tensor]:
        """What the layer leaves behind: caches as bits, since a NaN is not equal to itself."""
        caches = [self.ring, self.entries, self.keys, self.index_q, self.marks, self.chosen]
        if self.tail is not None:
            caches.append(self.tail)
        parts = [*caches, *self.mixes, self.u, self.q_out, self.o, self.out, self.next_partials]
        return [part.contiguous().view(torch.uint8) for part in parts]


def check_layer(s: Sizes, position: int, ratio: int) -> list[Tensor]:
    """Two runs give the same bits, and no NaN of an unwritten row comes through.  Returns the results."""
    first, second = Layer(s, position, ratio), Layer(s, position, ratio)
    for layer in (first, second):
        layer.run()
        assert not any(part.isnan().any() for part in (layer.u, layer.o, layer.out, *layer.mixes))
    for a, b in zip(first.results(), second.results(), strict=True):
        assert torch.equal(a, b)
    return first.results()
