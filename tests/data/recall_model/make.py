"""Make this folder's checkpoint: a Qwen2 of 4 layers trained to recall facts. Minutes on one core.

    python tests/data/recall_model/make.py

It reads "code of NAME NUMBER ." some tens of tokens before and answers "code of NAME". It starts as an induction head
that is written by hand (look one token back, then look for what was seen there) and learns the rest.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
NAMES = [
    a + b + c
    for a, b, c in itertools.product(("Ba", "Lu", "Mi", "So", "Te", "Ku", "Ra", "Vo"), ("na", "ri", "lo", "de"),
                                     ("k", "m", "s", "x", "n", "l", "t", "p"))
]  # fmt: skip
NUMBERS = [str(n) for n in range(100, 228)]
FILLER = (
    "the river runs past old mill and a quiet boat waits under green trees while rain falls on road near "
    "small town where people sell bread fish cloth every morning before bell rings twice over market hall"
).split()
WORDS = ["<unk>", "<eos>", ".", "code", "of", *sorted(set(FILLER)), *NAMES, *NUMBERS]
IDS = {word: i for i, word in enumerate(WORDS)}
LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, THETA = 4, 64, 4, 2, 16, 128, 1e6
FACTS = 8


def config() -> dict:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": len(WORDS),
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "intermediate_size": INNER, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "max_position_embeddings": 1_048_576, "tie_word_embeddings": True, "use_sliding_window": False,
        "eos_token_id": IDS["<eos>"], "torch_dtype": "bfloat16",
    }  # fmt: skip


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    made.add_special_tokens(["<eos>"])
    return made


def init() -> dict[str, torch.Tensor]:
    def normal(*shape: int, scale: float = 0.08) -> torch.Tensor:
        return (torch.randn(shape) * scale).requires_grad_()

    weights = {"model.embed_tokens.weight": normal(len(WORDS), HIDDEN, scale=0.3)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        weights |= {
            p + "self_attn.q_proj.weight": normal(HEADS * DIM, HIDDEN, scale=0.12),
            p + "self_attn.k_proj.weight": normal(KV_HEADS * DIM, HIDDEN, scale=0.12),
            p + "self_attn.v_proj.weight": normal(KV_HEADS * DIM, HIDDEN),
            p + "self_attn.q_proj.bias": normal(HEADS * DIM, scale=0.5),
            p + "self_attn.k_proj.bias": normal(KV_HEADS * DIM, scale=0.5),
            p + "self_attn.v_proj.bias": torch.zeros(KV_HEADS * DIM).requires_grad_(),
            p + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * DIM),
            p + "mlp.gate_proj.weight": normal(INNER, HIDDEN),
            p + "mlp.up_proj.weight": normal(INNER, HIDDEN),
            p + "mlp.down_proj.weight": normal(HIDDEN, INNER),
            p + "input_layernorm.weight": torch.ones(HIDDEN).requires_grad_(),
            p + "post_attention_layernorm.weight": torch.ones(HIDDEN).requires_grad_(),
        }
    with torch.no_grad():
        _write_induction(weights)
    return {**weights, "model.norm.weight": torch.ones(HIDDEN).requires_grad_()}


def _write_induction(w: dict[str, torch.Tensor]) -> None:
    """Head 0 of layer 0 looks one token back; head 0 of layer 1 looks for a token that followed the present one."""
    first, second = "model.layers.0.self_attn.", "model.layers.1.self_attn."
    key = torch.zeros(DIM)
    key[0], key[1] = 6.0, 8.0  # the two fastest frequencies
    inverse = 1.0 / THETA ** (torch.arange(0, DIM, 2) / DIM)
    a, b = key.chunk(2)
    query = torch.cat(
        [a * inverse.cos() + b * inverse.sin(), b * inverse.cos() - a * inverse.sin()]
    )
    seen, written = (torch.linalg.qr(torch.randn(HIDDEN, DIM))[0] for _ in range(2))
    w[first + "q_proj.weight"][:DIM] = w[first + "k_proj.weight"][:DIM] = 0
    w[first + "q_proj.bias"][:DIM], w[first + "k_proj.bias"][:DIM] = query, key
    w[first + "v_proj.weight"][:DIM] = seen.T
    w[first + "o_proj.weight"][:, :DIM] = written
    w[second + "q_proj.weight"][:DIM], w[second + "k_proj.weight"][:DIM] = 2 * seen.T, 2 * written.T
    w[second + "q_proj.bias"][:DIM] = w[second + "k_proj.bias"][:DIM] = 0


def forward(w, tokens, positions):
    """tokens, positions: [B, T].  Returns logits [B, T, vocab]."""
    batch, length = tokens.shape
    inverse = 1.0 / THETA ** (torch.arange(0, DIM, 2) / DIM)
    angle = (positions.double().unsqueeze(-1) * inverse.double()).unsqueeze(1)
    cos, sin = angle.cos().float(), angle.sin().float()

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def norm(x, gain):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain

    def heads(x, count):
        return x.view(batch, length, count, DIM).transpose(1, 2)

    hidden = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        x = norm(hidden, w[p + "input_layernorm.weight"])
        q = rotate(
            heads(
                F.linear(x, w[p + "self_attn.q_proj.weight"], w[p + "self_attn.q_proj.bias"]), HEADS
            )
        )
        k = rotate(
            heads(
                F.linear(x, w[p + "self_attn.k_proj.weight"], w[p + "self_attn.k_proj.bias"]),
                KV_HEADS,
            )
        )
        v = heads(
            F.linear(x, w[p + "self_attn.v_proj.weight"], w[p + "self_attn.v_proj.bias"]), KV_HEADS
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + out.transpose(1, 2).flatten(2) @ w[p + "self_attn.o_proj.weight"].T
        x = norm(hidden, w[p + "post_attention_layernorm.weight"])
        inner = F.silu(x @ w[p + "mlp.gate_proj.weight"].T) * (x @ w[p + "mlp.up_proj.weight"].T)
        hidden = hidden + inner @ w[p + "mlp.down_proj.weight"].T
    return norm(hidden, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def sample(batch, generator, facts):
    """Facts with filler among them, then some of them again: the number is the target."""
    rows, places, targets = [], [], []
    name_ids = [IDS[n] for n in NAMES]
    number_ids = [IDS[n] for n in NUMBERS]
    filler_ids = [IDS[n] for n in FILLER]
    code, of, dot = (IDS[x] for x in ("code", "of", "."))

    def rand(n):
        return int(torch.randint(n, (1,), generator=generator))

    for _ in range(batch):
        names = [name_ids[i] for i in torch.randperm(len(name_ids), generator=generator)[:facts]]
        numbers = [
            number_ids[i] for i in torch.randint(len(number_ids), (facts,), generator=generator)
        ]
        row, place, target, at = [], [], [], rand(3)

        def put(sentence, wanted=None):
            nonlocal at
            row.extend(sentence)
            place.extend(range(at, at + len(sentence)))
            target.extend(wanted or [-100] * len(sentence))
            at += len(sentence)

        for number_of, (name, number) in enumerate(zip(names, numbers, strict=True)):
            put([code, of, name, number, dot])
            if number_of % 2:
                put([filler_ids[rand(len(filler_ids))] for _ in range(3)] + [dot])
        for i in torch.randint(facts, (6,), generator=generator).tolist():
            put([code, of, names[i], numbers[i], dot], [-100, -100, numbers[i], dot, -100])
        rows.append(row), places.append(place), targets.append(target)
    return torch.tensor(rows), torch.tensor(places), torch.tensor(targets)


def main(steps: int) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    w = init()
    optimizer = torch.optim.AdamW(w.values(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    started, recent = time.time(), []
    for step in range(steps):
        rate = min(1, (step + 1) / 50, max(0.02, (steps - step) / (steps * 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * rate
        tokens, positions, targets = sample(32, generator, FACTS)
        logits = forward(w, tokens, positions)
        is_asked = targets != -100
        loss = F.cross_entropy(logits[is_asked], targets[is_asked])
        every = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + 0.02 * every).backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        hits = (logits[is_asked].argmax(-1) == targets[is_asked]).float()
        recent = [*recent[-50:], float(hits[0::2].mean())]
        if step % 100 == 0:
            share = sum(recent) / len(recent)
            print(
                step,
                f"loss {loss:.3f}, recall {share:.3f}, {time.time() - started:.0f} s",
                flush=True,
            )
        if step % 250 == 249 or step == steps - 1:
            save(w)


def save(w) -> None:
    save_file({k: v.detach().bfloat16() for k, v in w.items()}, HERE / "model.safetensors")
    (HERE / "config.json").write_text(json.dumps(config(), indent=1) + "\n")
    (HERE / "generation_config.json").write_text(json.dumps({"eos_token_id": IDS["<eos>"]}) + "\n")
    tokenizer().save(str(HERE / "tokenizer.json"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1500)
