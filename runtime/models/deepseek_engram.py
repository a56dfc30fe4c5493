"""Engram of DeepSeek-V4.1-Flash: which rows of which tables a token needs, and what their bytes are worth.

Owns the map of tokens to classes, the constants of the hashes and the place of the tables in the checkpoint. Knows
nothing of how rows are read or of what a layer does with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from runtime.checkpoint import Checkpoint
from runtime.errors import UserError
from runtime.models.deepseek_weights import QUANT_BLOCK, DeepseekSpec, engram_table_shapes
from runtime.rows import RowTable

DEAD = -1  # stands for a position that holds no text (an image's), among tokens
SEED_FACTOR = 10007
_SPACE = "\ue000"  # keeps a lone space through the strip


def build_token_map(tokenizer_file: Path) -> list[int]:
    """Return the class of every token id: tokens that differ in case, accents or outer space share one.

    tokenizer_file: a tokenizer.json. Raises UserError when it is none.
    """
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"{tokenizer_file} is no tokenizer: {error}", "fetch the file again"
        ) from error
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"\A \z"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    classes: dict[str, int] = {}
    token_map = []
    for token, text in zip(ids, texts, strict=True):
        is_partial = "\ufffd" in text  # of a character: its name in the vocabulary sets it apart
        key = tokenizer.id_to_token(token) if is_partial else normalizer.normalize_str(text)
        key = key or text
        token_map.append(classes.setdefault(key, len(classes)))
    return token_map


def _is_prime(n: int) -> bool:
    """Say whether n is a prime, by trial division: for table sizes, not for cryptography."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def table_primes(fewest: int, columns: int, tables: int) -> tuple[tuple[int, ...], ...]:
    """Return the rows of each column of each table: primes from `fewest` on, each given out once."""
    candidates = filter(_is_prime, itertools.count(fewest))
    return tuple(tuple(itertools.islice(candidates, columns)) for _ in range(tables))


@dataclass(frozen=True, slots=True)
class EngramLayout:
    """The constants of the hashes, per Engram layer. A column is an n-gram length and a head, heads innermost."""

    multipliers: tuple[tuple[int, ...], ...]  # [layer][tokens back]
    primes: tuple[tuple[int, ...], ...]  # [layer][column]: rows of the column
    offsets: tuple[tuple[int, ...], ...]  # [layer][column]: first row of the column

    @classmethod
    def derive(cls, spec: DeepseekSpec) -> EngramLayout:
        """Derive the constants; raise UserError when the tables they ask for are not those of the config."""
        half = (2**63 - 1) // spec.engram_classes // 2
        multipliers = tuple(
            tuple(
                2 * int(v) + 1
                for v in np.random.default_rng(SEED_FACTOR * layer).integers(
                    0, half, spec.engram_max_ngram, dtype=np.int64
                )
            )
            for layer in spec.engram_layers
        )
        primes = table_primes(spec.engram_vocab_size, spec.engram_columns, len(spec.engram_layers))
        for layer, rows, sizes in zip(spec.engram_layers, spec.engram_rows, primes, strict=True):
            if sum(sizes) != rows:
                raise UserError(
                    f"the Engram table of layer {layer} has {rows:,} rows in config.json "
                    f"(engram_num_embeddings), {sum(sizes):,} follow from engram_vocab_size="
                    f"{spec.engram_vocab_size} and {spec.engram_columns} columns",
                    "this is another release, or config.json was edited: fetch the snapshot again",
                )
        offsets = tuple(tuple(itertools.accumulate(p[:-1], initial=0)) for p in primes)
        return cls(multipliers, primes, offsets)


class EngramHash:
    """Which table rows a token needs, from its class and those of the tokens before it."""

    def __init__(self, spec: DeepseekSpec, token_map: Sequence[int]) -> None:
        """token_map: of `build_token_map`. Raises UserError when it is not of this checkpoint."""
        found = max(token_map, default=-1) + 1
        if found != spec.engram_classes:
            raise UserError(
                f"tokenizer.json gives {found:,} token classes, the checkpoint's config.json says "
                f"engram_compressed_vocab_size={spec.engram_classes:,}: every hash would be wrong",
                "fetch tokenizer.json of the same revision again; if it is right, change the version of the "
                "tokenizers library",
            )
        if spec.engram_pad_id >= len(token_map):
            raise UserError(
                f"engram_pad_token_id={spec.engram_pad_id} is none of the tokenizer's {len(token_map)} tokens",
                "fetch tokenizer.json of the same revision again",
            )
        self.layout = EngramLayout.derive(spec)
        self._reach = spec.engram_max_ngram - 1
        self._heads = spec.engram_heads
        # the last entry, which DEAD finds, is the class of padding
        self._classes = np.array([*token_map, token_map[spec.engram_pad_id]], dtype=np.int64)
        self._multipliers = np.array(self.layout.multipliers, dtype=np.int64)
        self._primes = np.array(self.layout.primes, dtype=np.int64)
        self._offsets = np.array(self.layout.offsets, dtype=np.int64)

    def row_ids(self, tokens: Sequence[int], context: Sequence[int] = ()) -> list[list[int]]:
        """Return per Engram layer the rows of each token, token-major: 2-gram heads, then 3-gram heads, and so on.

        context: the tokens before the first, oldest first; the last three count, fewer mean that the text starts
        there. DEAD stands for a position without text, in both. Raises IndexError for an id that is no token.
        """
        reach, count = self._reach, len(tokens)
        before = [DEAD] * reach + list(context)
        history = np.array(before[len(before) - reach :] + list(tokens), dtype=np.int64)
        if history.min(initial=0) < DEAD or history.max(initial=0) >= len(self._classes) - 1:
            raise IndexError(f"a token outside 0..{len(self._classes) - 2}")
        classes, is_text = self._classes[history], history != DEAD
        hashed = np.zeros((len(self._multipliers), count), dtype=np.int64)
        is_live = np.ones(count, dtype=np.bool_)
        columns = []
        for back in range(reach + 1):
            place = slice(reach - back, reach - back + count)
            is_live = is_live & is_text[place]  # beyond a dead position all is padding
            values = np.where(is_live, classes[place], self._classes[-1])
            hashed = hashed ^ values * self._multipliers[:, back, None]
            if back:
                columns.append(np.repeat(hashed[:, :, None], self._heads, axis=2))
        rows = np.concatenate(columns, axis=2) % self._primes[:, None] + self._offsets[:, None]
        flat: list[list[int]] = rows.reshape(len(rows), -1).tolist()
        return flat


class EngramTable(NamedTuple):
    """One layer's table on the drive: row i is the values of row i times the scales of row i."""

    values: RowTable  # rows of head_dim bytes, E4M3
    scales: RowTable  # rows of head_dim / 32 bytes, E8M0


def read_engram_tables(checkpoint: Checkpoint, spec: DeepseekSpec) -> list[EngramTable]:
    """Return the tables in place, one per Engram layer, from the headers. Raises CheckpointError."""
    tables = [
        RowTable((checkpoint.info(name, dtype, (rows, nbytes)).extent,), rows, nbytes)
        for name, (dtype, (rows, nbytes)) in engram_table_shapes(spec).items()
    ]
    return [EngramTable(*pair) for pair in zip(tables[::2], tables[1::2], strict=True)]


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """values: [n, head_dim] uint8 (E4M3).  scales: [n, head_dim / 32] uint8 (E8M0).  Returns [n, head_dim] bf16."""
    factors = scales.view(torch.float8_e8m0fnu).float().repeat_interleave(QUANT_BLOCK, dim=1)
    return (values.view(torch.float8_e4m3fn).float() * factors).to(torch.bfloat16)
