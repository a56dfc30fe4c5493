"""Every operation in plain torch: the definition, and what a CPU tensor gets.

Letters: T tokens, H hidden, I expert intermediate, K head size of keys, V head size of values.
No operation here knows where its weights came from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.formats import NVFP4_GROUP, nvfp4_values


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain over the last dimension; fp32 inside, one rounding at the end.

    x: [..., N].  gain: [N] or broadcastable, fp32 (already 1 + weight where the weights are zero-centred).
    """
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) in fp32 and round once.  x: [..., T, heads, D].  cos, sin: [T, D/2] fp32."""
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, each rounded to the dtype of both."""
    return F.silu(gate) * up


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def linear(x: Tensor, weight: Tensor, row_scale: Tensor | None = None) -> Tensor:
    """Return x W^T, or (x Q^T) * row_scale for a weight kept as 8-bit rows: accumulate first, scale once.

    x: [T, K].  weight: [N, K] in x's dtype, or float8_e4m3fn or int8.  row_scale: [N] fp32, only with these.
    """
    if row_scale is None:
        return F.linear(x, weight)
    return (F.linear(x.float(), weight.float()) * row_scale).to(x.dtype)


def nvfp4_linear(x: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Return x W^T for an NVFP4 matrix: accumulate in fp32, apply the global scale once.

    x: [T, K].  codes: [N, K/2] uint8.  scales: [N, K/16] float8_e4m3fn.  global_scale: [1] fp32.  [T, N] in x's dtype.
    """
    return (F.linear(x.float(), nvfp4_values(codes, scales)) * global_scale).to(x.dtype)


def stored_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scratch: Tensor | None = None
) -> Tensor:
    """Return x W^T + bias for a weight in the dtype that it is stored in, widened exactly.

    x: [T, K].  weight: [N, K] and bias: [N], any float dtype.  scratch: flat, in x's dtype, K values at least: as many
    rows as it holds are widened at once.  One of a few MiB stays in the CPU's cache, and a BF16 matrix out of memory
    then costs 0.8 times what the same matrix in fp32 does, whose bytes are twice as many.  Returns [T, N] in x's dtype.
    """
    bias = None if bias is None else bias.to(x.dtype)
    if weight.dtype == x.dtype or scratch is None:
        return F.linear(x, weight.to(x.dtype), bias)
    columns = weight.shape[1]
    rows = scratch.numel() // columns
    out = x.new_empty(x.shape[0], weight.shape[0])
    for at in range(0, weight.shape[0], rows):
        part = weight[at : at + rows]
        widened = scratch[: part.numel()].view(part.shape)
        out[:, at : at + rows] = F.linear(x, widened.copy_(part))
    return out if bias is None else out.add_(bias)


def linear_pair(
    x: Tensor, weight: Tensor, row_scale: Tensor | None, other: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `linear(x, weight, row_scale)` and x other^T."""
    return linear(x, weight, row_scale), F.linear(x, other)


def rope_tables(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the half-split rotation for text positions: [T, rotary_dim / 2] fp32 each."""
    exponent = (
        torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32) / rotary_dim
    )
    angle = positions.float().unsqueeze(1) * (1.0 / theta**exponent)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + R/2) of the first R dimensions; the rest pass unchanged.

    x: [T, heads, D].  cos, sin: [T, R/2] fp32, rounded to x's dtype first as the reference does.
    """
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def causal_conv(
    x: Tensor, history: Tensor, taps: Tensor, dilation: int = 1
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution over tokens; the last tap multiplies the current token.

    x: [T, C].  history: [(J - 1) * dilation, C], the tokens before, zeros at the start.  taps: [J, C].
    Returns ([T, C], the new history).
    """
    tokens = x.shape[0]
    padded = torch.cat([history, x], dim=0)
    out = padded[:tokens] * taps[0]
    for j in range(1, taps.shape[0]):
        out = out + padded[j * dilation : j * dilation + tokens] * taps[j]
    return out, padded[tokens:]


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> Tensor:
    """One token of the gated delta rule, all heads; `state` is changed in place.

    q, k: [heads, K] normalised.  v: [heads, V].  beta, log_decay: [heads].  state: [heads, K, V] fp32.
    Returns [heads, V] fp32.
    """
    state.mul_(log_decay.exp().view(-1, 1, 1))
    read = torch.bmm(k.unsqueeze(1), state).squeeze(1)
    state.baddbmm_(k.unsqueeze(2), (beta.unsqueeze(1) * (v - read)).unsqueeze(1))
    return torch.bmm(q.unsqueeze(1), state).squeeze(1)


def gated_delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor, chunk: int = 64
) -> Tensor:
    """The gated delta rule over T tokens, in chunks of `chunk`; `state` is changed in place.

    q, k: [heads, T, K] normalised.  v: [heads, T, V].  beta, log_decay: [heads, T].  state: [heads, K, V] fp32.
    Returns [heads, T, V] fp32. Equal to T single steps up to rounding.
    """
    outputs = []
    for start in range(0, q.shape[1], chunk):
        part = slice(start, start + chunk)
        outputs.append(
            _delta_chunk(
                q[:, part], k[:, part], v[:, part], beta[:, part], log_decay[:, part], state
            )
        )
    return torch.cat(outputs, dim=1)


def _delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> Tensor:
    total = log_decay.cumsum(-1)  # G
    # differences before the exponential: exp(G_i) / exp(G_j) would overflow; above the diagonal they are positive
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    k_beta = k * beta.unsqueeze(-1)
    mix = torch.bmm(k_beta, k.transpose(1, 2)) * decay
    right = torch.cat([v * beta.unsqueeze(-1), k_beta * total.exp().unsqueeze(-1)], dim=-1)
    # solve (I + strictly lower mix) X = right; the solver takes the diagonal as ones and ignores what is above
    solved = torch.linalg.solve_triangular(mix, right, upper=False, unitriangular=True)
    v_new = solved[..., : v.shape[-1]] - torch.bmm(solved[..., v.shape[-1] :], state)
    out = torch.bmm(q * total.exp().unsqueeze(-1), state) + torch.bmm(
        torch.bmm(q, k.transpose(1, 2)) * decay, v_new
    )
    last = total[:, -1:]
    state.mul_(last.exp().unsqueeze(-1))
    state.baddbmm_((k * (last - total).exp().unsqueeze(-1)).transpose(1, 2), v_new)
    return out


def top_blocks(scores: Tensor, complete: Tensor, budget: int) -> Tensor:
    """Choose the `budget` best complete blocks of each query; of equal scores the earlier block wins.

    scores: [T, B] fp32.  complete: [T, B] bool.  Returns [T, B] bool with min(budget, complete) true per row.
    """
    if scores.shape[1] <= budget:
        return complete
    masked = scores.masked_fill(~complete, float("-inf"))
    threshold = masked.topk(budget, dim=1).values[:, -1:]
    above = masked > threshold
    ties = (masked == threshold) & complete
    room = budget - above.sum(1, keepdim=True)
    return above | (ties & (ties.cumsum(1) <= room))


def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Grouped-query attention over chosen positions, softmax in fp32, scale 1/sqrt(D).

    q: [T, heads, D].  k, v: [S, kv_heads, D]; query head h uses kv head h // (heads / kv_heads).
    visible: [T, S] bool, or None when every query sees every key.  Returns [T, heads, D].
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = (
        q.view(tokens, kv_heads, heads // kv_heads, dim)
        .permute(1, 2, 0, 3)
        .reshape(kv_heads, -1, dim)
    )
    scores = torch.bmm(grouped, k.permute(1, 2, 0)).float() * dim**-0.5
    if visible is not None:
        scores = scores.view(kv_heads, -1, tokens, k.shape[0]).masked_fill(~visible, float("-inf"))
        scores = scores.view(kv_heads, -1, k.shape[0])
    probabilities = scores.softmax(-1).to(v.dtype)
    out = torch.bmm(probabilities, v.transpose(0, 1))
    return (
        out.view(kv_heads, heads // kv_heads, tokens, dim)
        .permute(2, 0, 1, 3)
        .reshape(tokens, heads, dim)
    )


def nvfp4_expert_matrices(record: Tensor, hidden: int, intermediate: int) -> tuple[Tensor, Tensor]:
    """Dequantise one NVFP4 expert, but for its global scales: (gate and up [2 I, H], down [H, I]) fp32.

    record: uint8, at least the payload: gate codes | up codes | down codes | gate, up, down scales.
    """
    groups = 3 * hidden * intermediate // NVFP4_GROUP
    codes_nbytes = groups * NVFP4_GROUP // 2
    # the three matrices stand in one order in codes and scales alike: one pass decodes them all
    codes = record[:codes_nbytes].view(groups, NVFP4_GROUP // 2)
    values = nvfp4_values(
        codes, record[codes_nbytes : codes_nbytes + groups].view(groups, 1)
    ).flatten()
    split = 2 * hidden * intermediate
    return values[:split].view(2 * intermediate, hidden), values[split:].view(hidden, intermediate)


def scaled_swiglu_expert(x: Tensor, gate_up: Tensor, down: Tensor, global_scales: Tensor) -> Tensor:
    """Apply one expert to x [T, H]: matrices of `nvfp4_expert_matrices`, each sum scaled once.  Returns [T, H] fp32."""
    intermediate = down.shape[1]
    both = F.linear(x.float(), gate_up)
    gate, up = both[:, :intermediate] * global_scales[0], both[:, intermediate:] * global_scales[1]
    return F.linear(F.silu(gate) * up, down) * global_scales[2]


def nvfp4_swiglu_expert(
    x: Tensor, record: Tensor, global_scales: Tensor, intermediate: int
) -> Tensor:
    """Apply one NVFP4 expert: down(silu(gate x) * up x), weights dequantised on the way (W4A16, fp32 sums).

    x: [T, H].  record: as for `nvfp4_expert_matrices`.
    global_scales: [3] fp32 (gate, up, down), applied once to the finished sums.  Returns [T, H] fp32.
    """
    gate_up, down = nvfp4_expert_matrices(record, x.shape[1], intermediate)
    return scaled_swiglu_expert(x, gate_up, down, global_scales)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return down(silu(gate x) * up x) for plain weights: [T, H]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def read_token(
    residual: Tensor, amount: Tensor | None, y: Tensor | None, gain: Tensor, down_inject: Tensor, up: Tensor,
    moved: Tensor, x: Tensor, share: Tensor, eps: float,
) -> None:  # fmt: skip
    """Add the block before to every stream, and read a block's input from them.

    residual: [1, S, H].  amount: [1, S, 1], y: [1, H], or None for nothing to add.  gain: [S, H] fp32.
    down_inject: [rank + S, D].  up: [D, rank].  Filled: moved [1, S, H], the streams after the addition (not the
    memory of residual); x [1, H], the block's input; share [1, S, 1], how much of its output each stream takes
    (not the memory of amount).
    """
    streams = residual.shape[1]
    added = residual if amount is None or y is None else residual + amount * y.unsqueeze(1)
    moved.copy_(added)
    normed = rms_norm(moved, gain, eps)
    both = F.linear(normed.flatten(1), down_inject) / streams
    gate = torch.sigmoid(F.linear(F.silu(both[:, :-streams]), up)).view_as(normed)
    x.copy_((gate * normed).mean(1))
    share.copy_(2 * torch.sigmoid(both[:, -streams:]).unsqueeze(-1))


def conv_silu_token(x: Tensor, history: Tensor, taps: Tensor) -> Tensor:
    """x: [1, C].  history: [J - 1, C], moved on by one token in place.  taps: [J, C].  Returns [1, C] fp32."""
    out, moved = causal_conv(x, history, taps)
    history.copy_(moved)
    return F.silu(out).float()


def delta_token(
    qkv: Tensor, z: Tensor, beta_decay: Tensor, rate: Tensor, dt_bias: Tensor, norm: Tensor, state: Tensor, eps: float
) -> Tensor:  # fmt: skip
    """One token through all value heads: normed, gated output [1, heads * V] in z's dtype.

    qkv: [1, 2 * key width + heads * V] fp32, convolved.  z: [1, heads * V].  beta_decay: [1, 2 * heads].
    rate, dt_bias: [heads] fp32.  norm: [V] fp32.  state: [heads, K, V] fp32, changed in place.
    """
    heads, key_dim, value_dim = state.shape
    key_width = (qkv.shape[1] - heads * value_dim) // 2
    q, k, v = qkv[0].split([key_width, key_width, heads * value_dim])
    repeat = heads * key_dim // key_width  # value head h uses key head h // repeat
    q = l2_norm(q.view(-1, key_dim)).repeat_interleave(repeat, dim=0) * key_dim**-0.5
    k = l2_norm(k.view(-1, key_dim)).repeat_interleave(repeat, dim=0)
    b, a = beta_decay[0].split(heads)
    log_decay = rate * F.softplus(a.float() + dt_bias)
    out = gated_delta_step(
        q, k, v.view(heads, value_dim), torch.sigmoid(b).float(), log_decay, state
    )
    out = rms_norm(out.to(z.dtype), norm, eps)
    return (out.float() * torch.sigmoid(z.float()).view_as(out)).to(z.dtype).view_as(z)


def mlp_in_token(
    x: Tensor, router: Tensor, ratio: Tensor | None, next_router: Tensor | None, gate: Tensor, up: Tensor,
    shared_gate: Tensor, logits: Tensor, guess_logits: Tensor, inner: Tensor, share: Tensor,
) -> None:  # fmt: skip
    """Everything that is computed from an expert block's input x [1, H].

    router, next_router: [E, H].  ratio: [H].  gate, up: [I, H].  shared_gate: [1, H].  Filled, in x's dtype: logits
    [1, E]; guess_logits [1, E], of the next layer from x * ratio (left alone without next_router); inner [1, I] and
    share [1, 1] of the shared expert.
    """
    logits.copy_(F.linear(x, router))
    if ratio is not None and next_router is not None:
        guess_logits.copy_(F.linear(x * ratio, next_router))
    inner.copy_(F.silu(F.linear(x, gate)) * F.linear(x, up))
    share.copy_(torch.sigmoid(F.linear(x, shared_gate)))


def route_token(
    logits: Tensor, guess_logits: Tensor, expert_scales: Tensor, route: Tensor, weights: Tensor, scales: Tensor,
    num_guesses: int,
) -> None:  # fmt: skip
    """Choose the experts of a token and what the weighted sum needs.

    logits, guess_logits: [1, E].  expert_scales: [E, 3] fp32.  Filled: route [k + num_guesses] int64, the chosen
    experts best first, then the guesses for the next layer; weights [1, k] fp32, which sum to one, and scales [k, 3],
    both by ascending expert id.
    """
    top_k = weights.shape[1]
    top = logits[0].float().softmax(-1).topk(top_k)
    order = top.indices.argsort()
    share = (top.values / top.values.sum()).to(logits.dtype).float()
    route[:top_k] = top.indices
    if num_guesses:
        route[top_k:] = guess_logits[0].topk(num_guesses).indices
    weights.copy_(share[order].unsqueeze(0))
    scales.copy_(expert_scales[top.indices[order]])


def shared_down_token(inner: Tensor, share: Tensor, down: Tensor, out: Tensor) -> None:
    """Fill out [1, H] with the rest of the gated shared expert: share * (down inner).

    inner: [1, I] and share: [1, 1], from `mlp_in_token`.  down: [H, I].
    """
    out.copy_(share * F.linear(inner, down))


def combine_token(weights: Tensor, rows: Tensor, shared: Tensor, out: Tensor) -> None:
    """Fill out [1, H]: the expert block's output, routed experts and shared one.

    weights: [1, k] fp32.  rows: [k, H] fp32.  shared: [1, H].
    """
    out.copy_((weights @ rows + shared).to(shared.dtype))
