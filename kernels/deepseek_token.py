"""What surrounds attention and experts of one DeepSeek-V4.1 token, in Triton: streams, norms, window, Engram's gate.

A sublayer takes two launches besides its own: `read_streams` makes its input and finishes the mixes of the streams that
it read, `write_streams` adds its output and begins the mixes of the streams that come out. Definitions:
`reference_deepseek.hyper_mixes`, `hyper_read`, `hyper_write`, `rms_norm`, `rotate`, `act_rounded`.

Letters: S streams, d hidden, M = 2 S + S^2 mixes, P programs. What differs from token to token is read on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.deepseek_numbers import act_rounded, bf16_rounded, normed, rotated

MIX_COLUMNS, MIX_WARPS = 32, 4  # columns of every stream that one program mixes
READ_WARPS = 16


@triton.jit
def _store_partial_mixes(
    x, at, is_column, fn, partials, mixes: tl.constexpr, width: tl.constexpr, block_rows: tl.constexpr
):  # fmt: skip
    """Store this program's part of the M products and, behind them, of the sum of squares: fp64.

    x: fp32 [columns], zero where is_column is not set.  at: their places in the flattened streams.
    """
    row = tl.arange(0, block_rows)
    w = tl.load(
        fn + row[:, None] * width + at[None, :],
        mask=(row < mixes)[:, None] & is_column[None, :],
        other=0.0,
    )
    w = tl.where((row == mixes)[:, None], x[None, :], w)
    total = tl.sum(w.to(tl.float64) * x.to(tl.float64)[None, :], axis=1)
    tl.store(partials + tl.program_id(0) * (mixes + 1) + row, total, mask=row <= mixes)


@triton.jit
def _mix_kernel(
    streams, fn, partials, hidden: tl.constexpr, num_streams: tl.constexpr, mixes: tl.constexpr,
    block_rows: tl.constexpr, block_streams: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, block_streams * block)
    stream, column = place // block, tl.program_id(0) * block + place % block
    is_column = (stream < num_streams) & (column < hidden)
    at = stream * hidden + column
    x = tl.load(streams + at, mask=is_column, other=0.0).to(tl.float32)
    _store_partial_mixes(x, at, is_column, fn, partials, mixes, num_streams * hidden, block_rows)


@triton.jit
def _write_kernel(
    y, streams, post, comb, out, fn, partials, has_mixes: tl.constexpr, hidden: tl.constexpr, num_streams: tl.constexpr,
    mixes: tl.constexpr, block_rows: tl.constexpr, block_streams: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, block_streams * block)
    stream, column = place // block, tl.program_id(0) * block + place % block
    is_stream = stream < num_streams
    is_column = is_stream & (column < hidden)
    mixed = tl.zeros([block_streams * block], dtype=tl.float32)
    for source in tl.static_range(num_streams):
        x = tl.load(streams + source * hidden + column, mask=is_column, other=0.0).to(tl.float32)
        mixed += tl.load(comb + source * num_streams + stream, mask=is_stream, other=0.0) * x
    amount = tl.load(post + stream, mask=is_stream, other=0.0)
    added = amount * tl.load(y + column, mask=is_column, other=0.0).to(tl.float32)
    new = bf16_rounded(added + mixed)
    at = stream * hidden + column
    tl.store(out + at, new.to(tl.bfloat16), mask=is_column)
    if has_mixes:
        _store_partial_mixes(
            new, at, is_column, fn, partials, mixes, num_streams * hidden, block_rows
        )


@triton.jit
def _summed(partials, row, is_row, programs: tl.constexpr, mixes: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """Sum the programs' parts of some mixes: row [n].  fp32 [n], rounded from fp64."""
    program = tl.arange(0, block)
    parts = tl.load(
        partials + program[None, :] * (mixes + 1) + row[:, None],
        mask=(program < programs)[None, :] & is_row[:, None],
        other=0.0,
    )
    return tl.sum(parts, axis=1).to(tl.float32)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _finish_mixes(
    partials, scale, base, pre, post, comb, norm_eps, eps, num_streams: tl.constexpr, iterations: tl.constexpr,
    programs: tl.constexpr, width: tl.constexpr, block_streams: tl.constexpr, block_programs: tl.constexpr,
):  # fmt: skip
    mixes: tl.constexpr = 2 * num_streams + num_streams * num_streams
    one = tl.arange(0, 1)
    squares = _summed(partials, mixes + one, one < 1, programs, mixes, block_programs)
    rate = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, width * 1.0) + norm_eps))  # [1]
    stream = tl.arange(0, block_streams)
    is_stream = stream < num_streams
    m = _summed(partials, stream, is_stream, programs, mixes, block_programs) * rate
    m = m * tl.load(scale) + tl.load(base + stream, mask=is_stream, other=0.0)
    tl.store(pre + stream, _sigmoid(m) + eps, mask=is_stream)
    row = num_streams + stream
    m = _summed(partials, row, is_stream, programs, mixes, block_programs) * rate
    m = m * tl.load(scale + 1) + tl.load(base + row, mask=is_stream, other=0.0)
    tl.store(post + stream, 2.0 * _sigmoid(m), mask=is_stream)
    place = tl.arange(0, block_streams * block_streams)
    j, k = place // block_streams, place % block_streams
    is_pair, at = (j < num_streams) & (k < num_streams), j * num_streams + k
    row = 2 * num_streams + at
    m = _summed(partials, row, is_pair, programs, mixes, block_programs) * rate
    m = m * tl.load(scale + 2) + tl.load(base + row, mask=is_pair, other=0.0)
    c = tl.reshape(tl.where(is_pair, m, -1e30), [block_streams, block_streams])
    c = tl.exp(c - tl.max(c, axis=1)[:, None])
    is_real = is_stream[:, None] & is_stream[None, :]
    c = tl.where(is_real, c / tl.sum(c, axis=1)[:, None] + eps, 0.0)
    c = c / (tl.sum(c, axis=0)[None, :] + eps)
    for _ in range(iterations - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + eps)
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
    tl.store(comb + stream[:, None] * num_streams + stream[None, :], c, mask=is_real)


@triton.jit
def _read_kernel(
    streams, pre, weight, u, partials, scale, base, next_pre, post, comb, norm_eps, eps, has_mixes: tl.constexpr,
    hidden: tl.constexpr, num_streams: tl.constexpr, iterations: tl.constexpr, programs: tl.constexpr,
    block_streams: tl.constexpr, block_programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        column = tl.arange(0, block)
        is_column = column < hidden
        x = tl.zeros([block], dtype=tl.float32)
        for stream in tl.static_range(num_streams):
            value = tl.load(streams + stream * hidden + column, mask=is_column, other=0.0)
            x += tl.load(pre + stream) * value.to(tl.float32)
        x = bf16_rounded(x)
        gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
        out = normed(x, gain, tl.sum(x * x, axis=0), hidden, norm_eps)
        tl.store(u + column, out.to(tl.bfloat16), mask=is_column)
    elif has_mixes:
        _finish_mixes(
            partials, scale, base, next_pre, post, comb, norm_eps, eps, num_streams, iterations, programs,
            num_streams * hidden, block_streams, block_programs,
        )  # fmt: skip


@triton.jit
def _normed_row(source, weight, eps, dim: tl.constexpr, block: tl.constexpr):
    """Return a row of bf16 numbers, normed: fp32 [block], and which of its columns are real."""
    column = tl.arange(0, block)
    is_column = column < dim
    x = tl.load(source + column, mask=is_column, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    return normed(x, gain, tl.sum(x * x, axis=0), dim, eps), is_column


@triton.jit
def _prepare_kernel(
    kv, qr, kv_weight, q_weight, position, cos, sin, ring, q_out, eps, window: tl.constexpr, dim: tl.constexpr,
    half: tl.constexpr, rank: tl.constexpr, block_dim: tl.constexpr, block_rank: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        place = tl.load(position)
        x, is_column = _normed_row(kv, kv_weight, eps, dim, block_dim)
        x = rotated(tl.reshape(x, [1, block_dim]), 0, cos, sin, place, dim, half, False)
        x = tl.reshape(act_rounded(x), [block_dim])
        at = place % window * dim + tl.arange(0, block_dim)
        tl.store(ring + at, x.to(tl.bfloat16), mask=is_column)
    else:
        query, is_rank = _normed_row(qr, q_weight, eps, rank, block_rank)
        tl.store(q_out + tl.arange(0, block_rank), query.to(tl.bfloat16), mask=is_rank)


@triton.jit
def _engram_kernel(
    streams, kv, gate, out, eps, root, hidden: tl.constexpr, num_streams: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    stream = tl.program_id(0)
    column = tl.arange(0, block)
    is_column = column < hidden
    at = stream * hidden + column
    x = tl.load(streams + at, mask=is_column, other=0.0).to(tl.float32)
    key = tl.load(kv + at, mask=is_column, other=0.0).to(tl.float32)
    g = tl.sum(x * tl.load(gate + at, mask=is_column, other=0.0) * key, axis=0)
    g = g * tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, axis=0), hidden * 1.0) + eps))
    g = g * tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(key * key, axis=0), hidden * 1.0) + eps))
    g = g * root
    strength = tl.sqrt_rn(tl.maximum(tl.abs(g), 1e-6))
    strength = tl.where(g > 0.0, strength, tl.where(g < 0.0, -strength, 0.0))
    value = tl.load(kv + num_streams * hidden + column, mask=is_column, other=0.0).to(tl.float32)
    new = bf16_rounded(x + _sigmoid(strength) * value)
    tl.store(out + at, new.to(tl.bfloat16), mask=is_column)


def _mix_sizes(num_streams: int, hidden: int) -> dict[str, int]:
    mixes = 2 * num_streams + num_streams**2
    return {
        "hidden": hidden,
        "num_streams": num_streams,
        "mixes": mixes,
        "block_rows": triton.next_power_of_2(mixes + 1),
        "block_streams": triton.next_power_of_2(num_streams),
        "block": MIX_COLUMNS,
    }


def partials_shape(num_streams: int, hidden: int) -> tuple[int, int]:
    """Return the shape [P, M + 1] of the fp64 buffer between `mix_streams` or `write_streams` and `read_streams`."""
    return triton.cdiv(hidden, MIX_COLUMNS), 2 * num_streams + num_streams**2 + 1


def mix_streams(streams: Tensor, fn: Tensor, partials: Tensor) -> None:
    """Begin the mixes of streams that `write_streams` has not made: of the first layer, and behind Engram.

    streams: [S, d] bf16.  fn: [M, S d] fp32, of the sublayer that reads them.  partials: see `partials_shape`, filled.
    """
    num_streams, hidden = streams.shape
    _mix_kernel[(partials.shape[0],)](
        streams, fn, partials, **_mix_sizes(num_streams, hidden), num_warps=MIX_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def write_streams(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, out: Tensor, fn: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:  # fmt: skip
    """Add a sublayer's output to the streams; with fn, begin the mixes of what comes out.

    y: [d] bf16.  streams: [S, d] bf16.  post: [S], comb: [S, S] fp32, of the streams that the sublayer read.
    out: [S, d] bf16, filled: not the memory of streams.  fn: [M, S d] fp32, of the sublayer that reads `out`.
    partials: see `partials_shape`, filled.
    """
    num_streams, hidden = streams.shape
    _write_kernel[(triton.cdiv(hidden, MIX_COLUMNS),)](
        y, streams, post, comb, out, fn, partials, has_mixes=fn is not None, **_mix_sizes(num_streams, hidden),
        num_warps=MIX_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def read_streams(
    streams: Tensor, pre: Tensor, weight: Tensor, u: Tensor, norm_eps: float, partials: Tensor | None = None,
    scale: Tensor | None = None, base: Tensor | None = None, next_pre: Tensor | None = None,
    post: Tensor | None = None, comb: Tensor | None = None, iterations: int = 0, eps: float = 0.0,
) -> None:  # fmt: skip
    """Read and norm a sublayer's input; with partials, finish the mixes of the same streams.

    streams: [S, d] bf16.  pre: [S] fp32, what the sublayer before has made.  weight: [d], of the norm.  u: [d] bf16,
    filled.  partials: see `partials_shape`, of these streams.  scale: [3], base: [M] fp32, of this sublayer.
    Filled, fp32: next_pre [S], for the sublayer after this one (not the memory of pre); post [S], comb [S, S], for
    `write_streams` of this one.  iterations: of Sinkhorn.  eps: of the mixes.
    """
    num_streams, hidden = streams.shape
    programs = 1 if partials is None else partials.shape[0]
    _read_kernel[(1 if partials is None else 2,)](
        streams, pre, weight, u, partials, scale, base, next_pre, post, comb, norm_eps, eps,
        has_mixes=partials is not None, hidden=hidden, num_streams=num_streams, iterations=iterations,
        programs=programs, block_streams=triton.next_power_of_2(num_streams),
        block_programs=triton.next_power_of_2(programs), block=triton.next_power_of_2(hidden), num_warps=READ_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def prepare_token(
    kv: Tensor, qr: Tensor, kv_weight: Tensor, q_weight: Tensor, position: Tensor, cos: Tensor, sin: Tensor,
    ring: Tensor, q_out: Tensor, eps: float,
) -> None:  # fmt: skip
    """Norm a token's window entry and low-rank query; rotate and quantise the former and enter it into the window.

    kv: [D], qr: [q_rank] bf16, as projected.  kv_weight: [D], q_weight: [q_rank].  position: [1] int, on the device.
    cos, sin: [positions, R / 2] fp32.  ring: [window, D] bf16, row `position` mod window is written.
    q_out: [q_rank] bf16, filled.  D must be a multiple of 32.
    """
    window, dim = ring.shape
    rank = qr.shape[0]
    _prepare_kernel[(2,)](
        kv, qr, kv_weight, q_weight, position, cos, sin, ring, q_out, eps, window=window, dim=dim, half=cos.shape[1],
        rank=rank, block_dim=triton.next_power_of_2(dim), block_rank=triton.next_power_of_2(rank),
        enable_fp_fusion=False,
    )  # fmt: skip


def gate_engram(streams: Tensor, kv: Tensor, gate: Tensor, out: Tensor, eps: float) -> None:
    """Add the projected n-gram rows of a token to the streams, each by as much as its gate opens.

    streams: [S, d] bf16.  kv: [(S + 1) d] bf16, a key for each stream, then the value.  gate: [S, d] fp32, the product
    of q_weight and k_weight.  out: [S, d] bf16, filled; may be the memory of streams.
    """
    num_streams, hidden = streams.shape
    _engram_kernel[(num_streams,)](
        streams, kv, gate, out, eps, hidden**-0.5, hidden=hidden, num_streams=num_streams,
        block=triton.next_power_of_2(hidden), num_warps=READ_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
