"""The six kernels that the model imports, in plain torch; the factory whose line the patch stage changes."""

import functools

import torch
import torch.nn.functional as F

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _power_of_two(x):
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), torch.where(mantissa == 0.5, exponent - 1, exponent))


@functools.cache
def act_quant_kernel(block_size, round_scale=False, inplace=False):
    num_stages = 0 if round_scale or inplace else 2

    def run(x):
        assert num_stages in (0, 2)
        blocks = x.float().unflatten(-1, (-1, block_size))
        amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4)
        scale = amax * torch.tensor(1 / 448, dtype=torch.float32, device=x.device)
        if round_scale:
            scale = _power_of_two(scale)
        codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes, scale

    run.num_stages = num_stages
    return run


def act_quant(x, block_size=128, scale_fmt=None, scale_dtype=torch.float32, inplace=False):
    x = x.contiguous()
    codes, scale = act_quant_kernel(block_size, scale_fmt is not None, inplace)(x)
    if inplace:
        return x.copy_((codes.float() * scale).flatten(-2))
    return codes.flatten(-2), scale.squeeze(-1).to(scale_dtype)


def _to_e2m1(x):
    grid = torch.tensor(E2M1, device=x.device)
    steps = torch.where(x.abs() < 2, 0.5, torch.where(x.abs() < 4, 1.0, 2.0))
    rounded = torch.round(x.abs() / steps) * steps  # ties to even multiples of a step
    assert bool(torch.isin(rounded, grid).all())
    return torch.copysign(rounded, x)


def fp4_act_quant(x, block_size=32, inplace=False, scale_dtype=torch.float8_e8m0fnu):
    assert inplace, "the model uses no other form"
    blocks = x.float().unflatten(-1, (-1, block_size))
    amax = blocks.abs().amax(-1, keepdim=True)
    if scale_dtype == torch.float8_e4m3fn:
        scale = amax.clamp(min=6 * 2.0**-9) / 6
        scale = scale.clamp(max=448).to(scale_dtype).float()
    else:
        third = torch.tensor(1 / 6, dtype=torch.float32, device=x.device)
        scale = _power_of_two(amax.clamp(min=6 * 2.0**-126) * third)
    values = _to_e2m1((blocks / scale).clamp(-6, 6))
    return x.copy_((values * scale).flatten(-2))


def _steps(scale):
    return torch.ldexp(
        torch.ones(scale.shape, dtype=torch.float64, device=scale.device),
        scale.view(torch.uint8).int() - 127,
    )


def _activations(a, a_s):
    return a.double() * _steps(a_s).repeat_interleave(32, -1)


def fp8_gemm(a, a_s, b, b_s, scale_dtype=torch.float32, block_size=128):
    assert a.is_contiguous()
    assert b.is_contiguous()
    steps = _steps(b_s).repeat_interleave(block_size, 0)[: len(b)]
    weight = b.double() * steps.repeat_interleave(block_size, 1)
    return F.linear(_activations(a, a_s), weight).float().to(torch.get_default_dtype())


def fp4_gemm(a, a_s, b, b_s, scale_dtype=torch.float32, act_block_size=128):
    assert b.dtype == torch.float4_e2m1fn_x2
    assert b.is_contiguous()
    raw = b.view(torch.uint8).long()
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=a.device)
    weight = torch.stack([table[raw & 15], table[raw >> 4]], -1).flatten(1)
    weight = weight * _steps(b_s).repeat_interleave(32, 1)
    return F.linear(_activations(a, a_s), weight).float().to(torch.get_default_dtype())


def sparse_attn(q, kv, attn_sink, topk_idxs, softmax_scale):
    assert all(t.is_contiguous() for t in (q, kv, attn_sink, topk_idxs))
    assert topk_idxs.dtype == torch.int32
    b, m, h, d = q.shape
    best = q.new_full((b, m, h), -1e30, dtype=torch.float32)
    total = q.new_zeros((b, m, h), dtype=torch.float32)
    out = q.new_zeros((b, m, h, d), dtype=torch.float32)
    for part in topk_idxs.split(64, -1):
        rows = kv[torch.arange(b, device=q.device)[:, None, None], part.clamp(min=0).long()].float()
        scores = torch.einsum("bmhd,bmnd->bmhn", q.float(), rows) * softmax_scale
        scores = scores.masked_fill(part.unsqueeze(2) < 0, float("-inf"))
        top = torch.maximum(best, scores.amax(-1))
        p, shrink = torch.exp(scores - top[..., None]), torch.exp(best - top)
        total = total * shrink + p.sum(-1)
        out = out * shrink[..., None] + torch.einsum("bmhn,bmnd->bmhd", p.bfloat16().float(), rows)
        best = top
    total = total + torch.exp(attn_sink - best)
    return (out / total[..., None]).to(q.dtype)


def hc_split_sinkhorn(mixes, hc_scale, hc_base, hc_mult=4, sinkhorn_iters=20, eps=1e-6):
    n = hc_mult
    first, second, rest = mixes.split([n, n, n * n], -1)
    pre = torch.sigmoid(first * hc_scale[0] + hc_base[:n]) + eps
    post = 2 * torch.sigmoid(second * hc_scale[1] + hc_base[n : 2 * n])
    comb = (rest * hc_scale[2] + hc_base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb
