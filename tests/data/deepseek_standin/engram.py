"""Token classes, the constants of the hashes, and the rows that each position looks up."""

import re
import unicodedata
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn


def _normalised(text):
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


def build_compressed_token_map(tokenizer):
    raw, classes, found = tokenizer.backend_tokenizer, {}, []
    for i in range(len(tokenizer)):
        text = raw.decode([i], skip_special_tokens=False)
        key = raw.id_to_token(i) if "\ufffd" in text else _normalised(text) or text
        found.append(classes.setdefault(key, len(classes)))
    return found, len(classes)


def compute_hash_multipliers(layer_id, count, num_classes):
    half = (2**63 - 1) // num_classes // 2
    drawn = np.random.default_rng(10007 * layer_id).integers(0, half, count, dtype=np.int64)
    return (2 * drawn + 1).tolist()


def find_next_prime(start, taken):
    n = start + 1
    while n in taken or any(n % d == 0 for d in range(2, int(n**0.5) + 1)):
        n += 1
    return n


@dataclass
class EngramLayout:
    layers: tuple
    primes: list
    offsets: list

    @classmethod
    def from_args(cls, args):
        taken, primes, offsets = set(), [], []
        for _ in args.engram_layer_ids:
            sizes = []
            for _ in range(args.engram_max_ngram_size - 1):
                at = args.engram_vocab_size - 1
                for _ in range(args.engram_n_heads):
                    at = find_next_prime(at, taken)
                    taken.add(at)
                    sizes.append(at)
            primes.append(sizes)
            offsets.append([sum(sizes[:i]) for i in range(len(sizes))])
        return cls(tuple(args.engram_layer_ids), primes, offsets)


class NgramHashState(nn.Module):
    def __init__(self, args, layout, tokenizer):
        super().__init__()
        classes, count = build_compressed_token_map(tokenizer)
        assert count == args.engram_compressed_vocab_size, count
        self.order, self.heads = args.engram_max_ngram_size, args.engram_n_heads
        self.pad = classes[args.engram_pad_id]
        multipliers = [compute_hash_multipliers(i, self.order, count) for i in layout.layers]
        shape = (args.max_batch_size, args.max_seq_len)
        for name, value in (
            ("classes", torch.tensor(classes)),
            ("multipliers", torch.tensor(multipliers)),
            ("primes", torch.tensor(layout.primes)),
            ("offsets", torch.tensor(layout.offsets)),
            ("cache", torch.zeros(shape, dtype=torch.int64)),
        ):
            self.register_buffer(name, value, persistent=False)

    def forward(self, input_ids, start_pos, token_mask=None):
        assert token_mask is None
        b, s = input_ids.shape
        self.cache[:b, start_pos : start_pos + s] = self.classes[input_ids]
        places = torch.arange(start_pos, start_pos + s, device=input_ids.device)
        hashed, columns = 0, []
        for back in range(self.order):
            at = places - back
            seen = self.cache[:b, at.clamp(min=0)].masked_fill(at < 0, self.pad)
            hashed = hashed ^ (seen.unsqueeze(-1) * self.multipliers[:, back])
            if back:
                columns.append(hashed.unsqueeze(-1).expand(-1, -1, -1, self.heads))
        return torch.cat(columns, -1) % self.primes + self.offsets
