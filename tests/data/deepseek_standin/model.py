"""The text model. x: four residual streams [b, s, 4, d]; a sublayer reads them with the mix of the one before."""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from engram import EngramLayout, NgramHashState
from image_processor import ImageProcessor  # noqa: F401
from kernel import act_quant, fp4_act_quant, fp4_gemm, fp8_gemm, hc_split_sinkhorn, sparse_attn
from torch import nn
from vision import VisionTransformer

world_size, rank = 1, 0
default_dtype = torch.bfloat16
fp8_block_size = fp4_block_size = 32
scale_fmt = "ue8m0"
scale_dtype = torch.float8_e8m0fnu


class SharedAttentionRuntime:
    def __init__(self):
        self.compress_kv = self.index_k = self.topk_idxs = self.candidates = None


shared_attn = SharedAttentionRuntime()


@dataclass
class ModelArgs:
    max_batch_size: int = 4
    max_seq_len: int = 4096
    temperature: float = 1
    dtype: str = "fp8"
    expert_dtype: str = "fp4"
    vocab_size: int = 0
    dim: int = 0
    moe_inter_dim: int = 0
    n_layers: int = 0
    n_mtp_layers: int = 0
    n_heads: int = 0
    n_routed_experts: int = 0
    n_shared_experts: int = 1
    n_activated_experts: int = 0
    score_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    route_scale: float = 1.0
    gate_temp: float = 1.0
    swiglu_limit: float = 0.0
    q_lora_rank: int = 0
    head_dim: int = 0
    rope_head_dim: int = 0
    norm_eps: float = 1e-20
    o_groups: int = 1
    o_lora_rank: int = 0
    window_size: int = 0
    compress_ratios: tuple = ()
    kv_source_layers: tuple = ()
    index_source_layers: tuple = ()
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0
    candidate_source_layer: int = 0
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 1.0
    original_seq_len: int = 0
    beta_fast: int = 32
    beta_slow: int = 1
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple = ()
    engram_num_embeddings: tuple = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 0
    engram_n_heads: int = 0
    engram_head_dim: int = 0
    engram_pad_id: int = 0
    engram_compressed_vocab_size: int = 0
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple = ()
    dspark_markov_rank: int = 0
    dspark_n_routed_experts: int = 0
    dspark_n_activated_experts: int = 0
    vision_n_layers: int = 0
    image_token_id: int = 0

    def get_moe_config(self, layer_id):
        if layer_id < self.n_layers:
            return self.n_routed_experts, self.n_activated_experts
        return self.dspark_n_routed_experts, self.dspark_n_activated_experts


def best(scores, count):
    """Of equal scores the lowest place wins."""
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[..., :count]


def linear(x, weight, bias=None):
    if weight.dtype == torch.float4_e2m1fn_x2:
        q, s = act_quant(x, fp4_block_size, scale_fmt, scale_dtype)
        return fp4_gemm(q, s, weight, weight.scale, scale_dtype, fp4_block_size)
    if weight.dtype == torch.float8_e4m3fn:
        q, s = act_quant(x, fp8_block_size, scale_fmt, scale_dtype)
        return fp8_gemm(q, s, weight, weight.scale, scale_dtype, fp8_block_size)
    return F.linear(x, weight)


def _parameter(*shape, dtype=None):
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class ParallelEmbedding(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.weight = _parameter(vocab_size, dim)

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias=False, dtype=None):
        super().__init__()
        assert not bias
        dtype = dtype or default_dtype
        if dtype == torch.float4_e2m1fn_x2:
            self.weight = _parameter(out_features, in_features // 2, dtype=dtype)
            shape = out_features, in_features // fp4_block_size
        else:
            self.weight = _parameter(out_features, in_features, dtype=dtype)
            shape = -(-out_features // fp8_block_size), -(-in_features // fp8_block_size)
        if dtype in (torch.float4_e2m1fn_x2, torch.float8_e4m3fn):
            self.weight.scale = self.scale = _parameter(*shape, dtype=scale_dtype)

    def forward(self, x):
        return linear(x, self.weight)


class ColumnParallelLinear(Linear):
    pass


class RowParallelLinear(Linear):
    pass


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, _parameter(dim)

    def forward(self, x):
        v = x.float()
        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * v).to(x.dtype)


@functools.lru_cache(2)
def precompute_freqs_cis(dim, seqlen, original_seq_len, base, factor, beta_fast, beta_slow):
    freqs = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if original_seq_len > 0:

        def bound(turns):
            return dim * math.log(original_seq_len / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = max(math.floor(bound(beta_fast)), 0), min(math.ceil(bound(beta_slow)), dim - 1)
        ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
        freqs = freqs / factor * ramp + freqs * (1 - ramp)
    angles = torch.outer(torch.arange(seqlen).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(x, freqs_cis, inverse=False):
    """Rotate x in place: [b, s, (heads,) r], freqs_cis [s, r / 2]."""
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    shape = [1, x.size(1), *([1] * (x.dim() - 3)), -1]
    turned = turned * (freqs_cis.conj() if inverse else freqs_cis).view(shape)
    return x.copy_(torch.view_as_real(turned).flatten(-2))


@functools.lru_cache(1)
def get_window_topk_idxs(window, b, s, start_pos):
    if start_pos == 0:
        ends = torch.arange(s).unsqueeze(1)
        places = (ends - window + 1).clamp(min=0) + torch.arange(min(s, window))
        places = places.masked_fill(places > ends, -1)
    elif start_pos >= window - 1:
        at = start_pos % window
        places = torch.cat([torch.arange(at + 1, window), torch.arange(at + 1)]).unsqueeze(0)
    else:
        places = F.pad(torch.arange(start_pos + 1), (0, window - start_pos - 1), value=-1)[None]
    return places.int().unsqueeze(0).expand(b, -1, -1).contiguous()


class ParallelEngramEmbedding(nn.Module):
    def __init__(self, num_embeddings, dim):
        super().__init__()
        self.weight = _parameter(num_embeddings, dim, dtype=torch.float8_e4m3fn)
        self.scale = _parameter(num_embeddings, dim // 32, dtype=scale_dtype)

    def forward(self, indices):
        steps = self.scale[indices].float().repeat_interleave(32, -1)
        return (self.weight[indices].float() * steps).bfloat16()


class Engram(nn.Module):
    def __init__(self, args, layer_id, layout):
        super().__init__()
        self.layer_hash_index = layout.layers.index(layer_id)
        self.dim, self.eps, self.n = args.dim, args.norm_eps, args.hc_mult
        rows, width = args.engram_num_embeddings[self.layer_hash_index], args.engram_head_dim
        self.embed = ParallelEngramEmbedding(rows, width)
        columns = (args.engram_max_ngram_size - 1) * args.engram_n_heads
        self.wkv = Linear(columns * width, (self.n + 1) * args.dim)
        self.q_weight, self.k_weight = (_parameter(self.n, args.dim) for _ in range(2))

    def forward(self, x, hash_ids, token_mask=None):
        kv = self.wkv(self.embed(hash_ids).flatten(-2)).float().unflatten(-1, (self.n + 1, -1))
        key, value, v = kv[..., : self.n, :], kv[..., self.n :, :], x.float()
        gate = (v * (self.q_weight.float() * self.k_weight.float()) * key).sum(-1)
        gate = gate * torch.rsqrt(v.square().mean(-1) + self.eps)
        gate = gate * torch.rsqrt(key.square().mean(-1) + self.eps) * self.dim**-0.5
        gate = torch.sigmoid(gate.sign() * gate.abs().clamp(min=1e-6).sqrt())
        return (v + gate.unsqueeze(-1) * value).to(x.dtype)


class Compressor(nn.Module):
    def __init__(self, args, layer_id):
        super().__init__()
        self.ratio, d = args.compress_ratios[layer_id], args.head_dim
        dtype = torch.float32 if self.ratio == 2 else torch.bfloat16
        self.wkv = Linear(args.dim, d, dtype=dtype)
        self.norm = RMSNorm(d, args.norm_eps)
        if self.ratio == 2:
            self.wgate = Linear(args.dim, d, dtype=dtype)
            for name in ("kv_state", "score_state"):
                shape = args.max_batch_size, 2, d
                self.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)

    def forward(self, x, start_pos):
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        b, s, _ = x.shape
        a, z = self.wkv(x.float()), self.wgate(x.float())
        if start_pos == 0:
            whole = s // 2 * 2
            if s % 2:
                self.kv_state[:b, 0], self.score_state[:b, 0] = a[:, -1], z[:, -1]
            if not whole:
                return None
            a, z = a[:, :whole].unflatten(1, (-1, 2)), z[:, :whole].unflatten(1, (-1, 2))
        else:
            at = start_pos % 2
            self.kv_state[:b, at], self.score_state[:b, at] = a[:, 0], z[:, 0]
            if not at:
                return None
            a, z = self.kv_state[:b].unsqueeze(1), self.score_state[:b].unsqueeze(1)
        return self.norm((z.softmax(2) * a).sum(2).to(x.dtype))


def select_candidate_blocks(scores, visible, num_blocks, size):
    entries = scores.size(-1)
    padded = F.pad(scores.float(), (0, -entries % size), value=float("-inf"))
    blocks = padded.unflatten(-1, (-1, size)).amax(-1)
    own = F.one_hot(((visible - 1) // size).clamp(min=0), blocks.size(-1)).bool()
    blocks = blocks.masked_fill(own & (visible > 0).unsqueeze(-1), float("inf"))
    kept = best(blocks, min(num_blocks, blocks.size(-1)))
    mask = torch.zeros_like(blocks, dtype=torch.bool).scatter_(-1, kept, True)
    mask &= blocks > float("-inf")
    return mask.repeat_interleave(size, -1)[..., :entries]


class Indexer(nn.Module):
    def __init__(self, args, layer_id):
        super().__init__()
        self.args, self.layer_id, self.ratio = args, layer_id, args.compress_ratios[layer_id]
        self.heads, self.dim = args.index_n_heads, args.index_head_dim
        self.wq_b = Linear(args.q_lora_rank, self.heads * self.dim)
        self.weights_proj = Linear(args.dim, self.heads, dtype=torch.bfloat16)
        self.freqs_cis = None
        if layer_id in args.kv_source_layers:
            self.wk = Linear(args.head_dim, self.dim, dtype=torch.bfloat16)
            self.k_norm = RMSNorm(self.dim, args.norm_eps)
            shape = args.max_batch_size, args.max_seq_len // self.ratio, self.dim
            self.register_buffer("k_cache", torch.zeros(shape), persistent=False)

    def forward(self, x, qr, latent, start_pos, offset):
        (b, s, _), r = x.shape, self.args.rope_head_dim
        end = start_pos + s
        if latent is not None:
            n, first = latent.size(1), start_pos // self.ratio
            k = self.k_norm(self.wk(latent))
            apply_rotary_emb(k[..., -r:], self.freqs_cis[first * self.ratio :: self.ratio][:n])
            fp4_act_quant(k, fp4_block_size, True, scale_dtype)
            self.k_cache[:b, first : first + n] = k
            shared_attn.index_k = self.k_cache[:b, : first + n]
        if shared_attn.index_k is None:
            return torch.empty(b, s, 0, dtype=torch.int32, device=x.device)
        q = self.wq_b(qr).unflatten(-1, (self.heads, self.dim))
        apply_rotary_emb(q[..., -r:], self.freqs_cis[start_pos:end])
        fp4_act_quant(q, fp4_block_size, True, scale_dtype)
        w = self.weights_proj(x) * (self.dim**-0.5 * self.heads**-0.5)
        dots = torch.einsum("bshd,btd->bsht", q, shared_attn.index_k)
        scores = (dots.relu() * w.unsqueeze(-1)).sum(2)
        visible = (torch.arange(start_pos, end, device=x.device) + 1) // self.ratio
        places = torch.arange(scores.size(-1), device=x.device)
        scores = scores.masked_fill(places >= visible.unsqueeze(-1), float("-inf"))
        args = self.args
        if self.layer_id == args.candidate_source_layer:
            shared_attn.candidates = select_candidate_blocks(
                scores, visible, args.candidate_topk_blocks, args.candidate_block_size
            )
        elif self.layer_id > args.candidate_source_layer:
            scores = scores.masked_fill(~shared_attn.candidates, float("-inf"))
        chosen = best(scores, min(args.index_topk, scores.size(-1))).sort(-1).values
        return torch.where(chosen < visible[:, None], chosen + offset, -1).int()


class Attention(nn.Module):
    def __init__(self, layer_id, args):
        super().__init__()
        self.args, self.layer_id, self.ratio = args, layer_id, args.compress_ratios[layer_id]
        h, d, eps = args.n_heads, args.head_dim, args.norm_eps
        self.wq_a = Linear(args.dim, args.q_lora_rank)
        self.q_norm = RMSNorm(args.q_lora_rank, eps)
        self.wq_b = ColumnParallelLinear(args.q_lora_rank, h * d)
        self.wkv = Linear(args.dim, d)
        self.kv_norm = RMSNorm(d, eps)
        rank = args.o_groups * args.o_lora_rank
        self.wo_a = ColumnParallelLinear(h * d // args.o_groups, rank, dtype=torch.bfloat16)
        self.wo_b = RowParallelLinear(rank, args.dim)
        self.attn_sink = _parameter(h, dtype=torch.float32)
        self.compressor = self.indexer = None
        if layer_id in args.kv_source_layers:
            self.compressor = Compressor(args, layer_id)
            shape = args.max_batch_size, args.max_seq_len // self.ratio, d
            self.register_buffer("compress_kv_cache", torch.zeros(shape), persistent=False)
        if layer_id in args.index_source_layers:
            self.indexer = Indexer(args, layer_id)
        shape = args.max_batch_size, args.window_size, d
        self.register_buffer("window_kv_cache", torch.zeros(shape), persistent=False)
        base, original = args.rope_theta, 0
        if self.ratio:
            base, original = args.compress_rope_theta, args.original_seq_len
        rope = args.rope_head_dim, args.max_seq_len, original, base
        freqs = precompute_freqs_cis(*rope, args.rope_factor, args.beta_fast, args.beta_slow)
        self.register_buffer("freqs_cis", freqs, persistent=False)

    def forward(self, x, start_pos):
        (b, s, _), args, window = x.shape, self.args, self.args.window_size
        r, freqs = args.rope_head_dim, self.freqs_cis[start_pos : start_pos + s]
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).unflatten(-1, (args.n_heads, -1))
        apply_rotary_emb(q[..., -r:], freqs)
        kv = self.kv_norm(self.wkv(x))
        apply_rotary_emb(kv[..., -r:], freqs)
        act_quant(kv, fp8_block_size, scale_fmt, scale_dtype, True)
        places = get_window_topk_idxs(window, b, s, start_pos)
        if start_pos == 0:
            kept = kv[:, -window:]
            at = torch.arange(max(0, s - window), s) % window
            self.window_kv_cache[:b, at] = kept
        else:
            self.window_kv_cache[:b, start_pos % window] = kv[:, 0]
            kv = self.window_kv_cache[:b]
        if self.ratio:
            latent = None if self.compressor is None else self.compressor(x, start_pos)
            if self.indexer is not None:
                if self.indexer.freqs_cis is None:
                    self.indexer.freqs_cis = self.freqs_cis
                offset = kv.size(1)
                shared_attn.topk_idxs = self.indexer(x, qr, latent, start_pos, offset)
            if latent is not None:
                n, first = latent.size(1), start_pos // self.ratio
                apply_rotary_emb(
                    latent[..., -r:], self.freqs_cis[first * self.ratio :: self.ratio][:n]
                )
                fp4_act_quant(latent, 16, True, torch.float8_e4m3fn)
                self.compress_kv_cache[:b, first : first + n] = latent
            if self.compressor is not None:
                entries = (start_pos + s) // self.ratio
                shared_attn.compress_kv = self.compress_kv_cache[:b, :entries]
            places = torch.cat([places, shared_attn.topk_idxs], -1)
            kv = torch.cat([kv, shared_attn.compress_kv], 1)
        o = sparse_attn(q, kv.contiguous(), self.attn_sink, places, args.head_dim**-0.5)
        apply_rotary_emb(o[..., -r:], freqs, True)
        o = o.flatten(-2).unflatten(-1, (args.o_groups, -1))
        weight = self.wo_a.weight.view(args.o_groups, args.o_lora_rank, -1)
        return self.wo_b(torch.einsum("bsgd,grd->bsgr", o, weight).flatten(-2))


class Gate(nn.Module):
    def __init__(self, layer_id, args):
        super().__init__()
        experts, self.topk = args.get_moe_config(layer_id)
        self.route_scale, self.temp = args.route_scale, args.gate_temp
        self.weight = _parameter(experts, args.dim)
        self.bias, self.bias_vl = (_parameter(experts, dtype=torch.float32) for _ in range(2))

    def forward(self, x, image_mask=None):
        scores = F.softplus(F.linear(x.float(), self.weight.float()) / self.temp).sqrt()
        indices = best(scores + self.bias, self.topk)
        weights = scores.gather(-1, indices)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.route_scale, indices


class Expert(nn.Module):
    def __init__(self, dim, inter_dim, dtype=None, swiglu_limit=0.0):
        super().__init__()
        self.w1 = Linear(dim, inter_dim, dtype=dtype)
        self.w2 = Linear(inter_dim, dim, dtype=dtype)
        self.w3 = Linear(dim, inter_dim, dtype=dtype)
        self.limit = swiglu_limit

    def forward(self, x, weights=None):
        g, u = self.w1(x).float(), self.w3(x).float()
        if self.limit > 0:
            g, u = g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        h = F.silu(g) * u
        return self.w2((h if weights is None else h * weights).to(x.dtype))


class MoE(nn.Module):
    def __init__(self, layer_id, args):
        super().__init__()
        experts, _ = args.get_moe_config(layer_id)
        dtype = torch.float4_e2m1fn_x2 if args.expert_dtype == "fp4" else None
        sizes, limit = (args.dim, args.moe_inter_dim), args.swiglu_limit
        self.gate = Gate(layer_id, args)
        self.experts = nn.ModuleList(Expert(*sizes, dtype, limit) for _ in range(experts))
        self.shared_experts = Expert(*sizes, swiglu_limit=limit)

    def forward(self, x, image_mask=None):
        rows = x.flatten(0, 1)
        weights, indices = self.gate(rows, image_mask)
        y = torch.zeros_like(rows, dtype=torch.float32)
        for i, expert in enumerate(self.experts):
            at, place = torch.where(indices == i)
            if len(at):
                y[at] += expert(rows[at], weights[at, place, None])
        y += self.shared_experts(rows)
        return y.to(x.dtype).view_as(x)


class Block(nn.Module):
    def __init__(self, layer_id, args, engram_layout=None):
        super().__init__()
        self.args, n = args, args.hc_mult
        self.attn, self.ffn = Attention(layer_id, args), MoE(layer_id, args)
        self.attn_norm, self.ffn_norm = (RMSNorm(args.dim, args.norm_eps) for _ in range(2))
        for part in ("attn", "ffn"):
            for name, shape in (
                ("fn", (2 * n + n * n, n * args.dim)),
                ("base", (2 * n + n * n,)),
                ("scale", (3,)),
            ):
                setattr(self, f"hc_{part}_{name}", _parameter(*shape, dtype=torch.float32))
        self.engram = None
        if layer_id in args.engram_layer_ids:
            self.engram = Engram(args, layer_id, engram_layout)

    def hc_mixes(self, x, fn, scale, base):
        z, args = x.float().flatten(2), self.args
        mixes = F.linear(z, fn) * torch.rsqrt(z.square().mean(-1, keepdim=True) + args.norm_eps)
        return hc_split_sinkhorn(
            mixes, scale, base, args.hc_mult, args.hc_sinkhorn_iters, args.hc_eps
        )

    def hc_pre(self, x, pre_mix):
        return (pre_mix.unsqueeze(-1) * x.float()).sum(2).to(x.dtype)

    def hc_post(self, x, residual, post, comb):
        mixed = (comb.unsqueeze(-1) * residual.float().unsqueeze(-2)).sum(2)
        return (post.unsqueeze(-1) * x.float().unsqueeze(-2) + mixed).to(x.dtype)

    def forward(self, x, start_pos, pre_mix, image_mask, *attn_args):
        parts = (self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        pre, post, comb = self.hc_mixes(x, *parts)
        y = self.attn(self.attn_norm(self.hc_pre(x, pre_mix)), start_pos, *attn_args)
        x = self.hc_post(y, x, post, comb)
        after, post, comb = self.hc_mixes(x, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        y = self.ffn(self.ffn_norm(self.hc_pre(x, pre)), image_mask)
        return self.hc_post(y, x, post, comb), after


class ParallelHead(nn.Module):
    def __init__(self, vocab_size, dim, norm_eps, hc_eps):
        super().__init__()
        self.weight = _parameter(vocab_size, dim, dtype=torch.float32)

    def forward(self, x, full_logits=False):
        return F.linear((x if full_logits else x[:, -1]).float(), self.weight)


def make_identity_pre_mix(x):
    pre = torch.zeros(x.shape[:3], dtype=torch.float32, device=x.device)
    pre[..., 0] = 1
    return pre


def sample(logits, temperature):
    if temperature == 0:
        return logits.argmax(-1)
    p = (logits / temperature).softmax(-1, dtype=torch.float32)
    return (p / torch.empty_like(p).exponential_(1)).argmax(-1)


class Transformer(nn.Module):
    def __init__(self, args, tokenizer=None):
        global world_size, rank, default_dtype
        world_size, rank = 1, 0
        default_dtype = torch.float8_e4m3fn if args.dtype == "fp8" else torch.bfloat16
        super().__init__()
        self.args = args
        self.embed = ParallelEmbedding(args.vocab_size, args.dim)
        layout = EngramLayout.from_args(args)
        self.engram_hash = NgramHashState(args, layout, tokenizer)
        self.layers = nn.ModuleList(Block(i, args, layout) for i in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.head = ParallelHead(args.vocab_size, args.dim, args.norm_eps, args.hc_eps)
        self.mtp = nn.ModuleList()
        assert not args.dspark_block_size, "the stand-in has no drafts"
        self.vision = VisionTransformer(args) if args.vision_n_layers else None

    @torch.inference_mode()
    def forward(self, input_ids, start_pos=0, images=None, token_types=None):
        args, taps = self.args, []
        x = self.embed(input_ids).unsqueeze(2).repeat(1, 1, args.hc_mult, 1)
        rows, pre = self.engram_hash(input_ids, start_pos), make_identity_pre_mix(x)
        for i, layer in enumerate(self.layers):
            if layer.engram is not None:
                x = layer.engram(x, rows[:, :, layer.engram.layer_hash_index])
            if i in args.dspark_target_layer_ids:
                taps.append(x.mean(2))
            x, pre = layer(x, start_pos, pre, None)
        logits = self.head(self.norm(self.layers[-1].hc_pre(x, pre)))
        return sample(logits, args.temperature), logits, torch.cat(taps, -1) if taps else None
