"""What synthetic checkpoints of all families share: experts within a budget, shard headers, and quick random bytes.

Knows no family's tensors and no stage.

The bytes follow from sizes and seed alone, on every machine: generators whose raw words numpy guarantees, integer sums
for the normal distribution, and no function of the C library that may round in its own way. They are quick rather than
independent: `Noise` says what is shared.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from conf.schema import RunConfig, SyntheticConfig
from runtime.checkpoint import DTYPE_NBYTES
from runtime.errors import UserError
from runtime.units import GIB, format_nbytes
from stages.download import absolute

BANK_WORDS = 2**19  # 4 MiB each: in the CPU's cache
CHUNK_WORDS = 2**15
GAIN_STD = 0.05  # of the gains of norms

Words = NDArray[np.uint64]
Floats = NDArray[np.float32]


class Tensor(NamedTuple):
    """One tensor to be written. `dtype` is the name in a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


# ---- sizes ---------------------------------------------------------------------------------------------------------


def read_release(cfg: RunConfig, released: Path) -> str:
    """Return the text of the config.json whose sizes are cut: of `model.path`, else of the folder `released`.

    Raises UserError when there is none, or it is no JSON object.
    """
    path = (released if cfg.model.path is None else absolute(cfg.model.path)) / "config.json"
    try:
        text = path.read_text()
        config = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {path}: {error}",
            "set model.path to a folder with a release's config.json, or model.path=null",
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object", "set model.path=null")
    return text


def check_vocabulary(vocab_size: int, needed: int) -> None:
    """Refuse a config whose vocabulary does not hold the bundled tokenizer's tokens."""
    if vocab_size < needed:
        raise UserError(
            f"the config has vocab_size {vocab_size}, the bundled tokenizer has {needed} tokens",
            "set model.path to a config.json with a larger vocabulary",
        )


def check_layers(wanted: int | None, fewest: int, most: int, why: str) -> int:
    """Return the number of layers; raise UserError when it is not of `fewest` to `most`.  why: that many at least."""
    layers = most if wanted is None else wanted
    if not fewest <= layers <= most:
        raise UserError(
            f"model.synthetic.layers is {layers}: at least {fewest} ({why}), at most {most}",
            f"set model.synthetic.layers={min(max(layers, fewest), most)}",
        )
    return layers


def choose_experts(
    wanted: SyntheticConfig, layers: int, top_k: int, most: int, fixed: int, each: int, what: str
) -> int:
    """Return how many experts a layer gets: as asked for, else as many as the budget allows.

    fixed, each: bytes without any expert, and for one more in every layer.  what: the bytes are for.
    Raises UserError for a number that the model cannot have, or that does not fit `disk_gib`.
    """
    budget = int(wanted.disk_gib * GIB)
    if wanted.experts is not None and not top_k <= wanted.experts <= most:
        raise UserError(
            f"model.synthetic.experts is {wanted.experts}: at least {top_k} (a token takes that "
            f"many), at most {most}",
            f"set model.synthetic.experts={min(max(wanted.experts, top_k), most)}",
        )
    fitting = min((budget - fixed) // each, most)
    experts = wanted.experts if wanted.experts is not None else max(fitting, top_k)
    needed = fixed + experts * each
    if needed <= budget:
        return experts
    enough = math.ceil(needed / GIB * 1000) / 1000
    fewest = "" if wanted.experts is not None else " (the fewest: a token takes that many)"
    hint = f"set model.synthetic.disk_gib={enough:g} or more, or fewer model.synthetic.layers"
    if fitting >= top_k:
        hint += f", or model.synthetic.experts={fitting}"
    raise UserError(
        f"{layers} layers of {experts} experts{fewest} need {format_nbytes(needed)} for {what}, "
        f"model.synthetic.disk_gib={wanted.disk_gib:g} allows {format_nbytes(budget)}",
        hint,
    )


# ---- headers -------------------------------------------------------------------------------------------------------


def make_header(tensors: Sequence[Tensor], metadata: dict[str, str], align_nbytes: int) -> bytes:
    """Return a safetensors header, its length in front; the data behind it start at a multiple of `align_nbytes`."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * DTYPE_NBYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % align_nbytes)
    return struct.pack("<Q", len(text)) + text


# ---- bytes ---------------------------------------------------------------------------------------------------------


def generator(seed: int, name: str) -> np.random.SFC64:
    """Return the source of raw words that belongs to a name: the same wherever making starts."""
    return np.random.SFC64(int.from_bytes(blake3(f"{seed}/{name}".encode()).digest(length=16)))


def uniform(source: np.random.SFC64, count: int, low: float, high: float) -> NDArray[np.float64]:
    """Return `count` numbers of [low, high)."""
    raw = source.random_raw(count) >> np.uint64(11)
    return low + raw.astype(np.float64) * 2.0**-53 * (high - low)


def normal(source: np.random.SFC64, count: int) -> Floats:
    """Return `count` numbers of mean 0 and deviation 1, none beyond 6: sums of twelve 16-bit integers, exact."""
    parts = source.random_raw(3 * count).view(np.uint16).reshape(count, 12)
    doubled = 2 * parts.sum(axis=1, dtype=np.int32) - 12 * 65535
    values: Floats = doubled.astype(np.float32) * np.float32(2.0**-17)
    return values


def to_bf16(values: Floats) -> NDArray[np.uint16]:
    """Round finite fp32 to the bits of BF16, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


class Noise:
    """Random bytes and normal BF16 values faster than a generator makes them.

    A seed has two banks of 4 MiB of words and a million normal numbers, made once. A chunk of 256 KiB is the
    exclusive or of one stretch of each bank; of BF16 values, a stretch of the normal numbers with such words as signs.
    Where stretches begin is drawn from the tensor's own generator. Chunks hardly ever repeat and signs are as good as
    independent, but magnitudes of BF16 values come back: sums over rows behave as those of independent numbers do, a
    test for randomness over many chunks would fail.
    """

    def __init__(self, seed: int) -> None:
        self._banks = [
            generator(seed, f"bank {i}").random_raw(BANK_WORDS + CHUNK_WORDS) for i in range(2)
        ]
        self._normals = normal(generator(seed, "normals"), 4 * BANK_WORDS // 2)
        self._scaled: dict[float, Words] = {}

    def words(self, source: np.random.SFC64, nbytes: int) -> Iterator[Words]:
        """Yield random words chunk by chunk, at least nbytes in all and less than a word more. Each may be changed."""
        left = -(-nbytes // 8)
        while left:
            n = min(left, CHUNK_WORDS)
            a, b = (int(word) % BANK_WORDS for word in source.random_raw(2))
            yield self._banks[0][a : a + n] ^ self._banks[1][b : b + n]
            left -= n

    def masked(
        self, source: np.random.SFC64, nbytes: int, mask: int = 0xFF, base: int = 0
    ) -> Iterator[memoryview]:
        """Yield nbytes of `base + (random & mask)`, byte by byte."""
        byte = np.uint64(0x0101010101010101)
        for words in self.words(source, nbytes):
            if mask != 0xFF:
                words &= np.uint64(mask) * byte
            if base:
                words += np.uint64(base) * byte  # no byte overflows into its neighbour
            piece = words.view(np.uint8).data[:nbytes]
            nbytes -= len(piece)
            yield piece

    def bf16(self, source: np.random.SFC64, count: int, std: float) -> Iterator[memoryview]:
        """Yield the bytes of `count` BF16 values of this deviation."""
        bank = self._bank(std)
        signs = np.uint64(0x8000800080008000)
        nbytes = 2 * count
        for words in self.words(source, nbytes):
            start = int(source.random_raw()) % (len(bank) - CHUNK_WORDS)
            words &= signs
            words ^= bank[start : start + len(words)]
            piece = words.view(np.uint8).data[:nbytes]
            nbytes -= len(piece)
            yield piece

    def _bank(self, std: float) -> Words:
        if std not in self._scaled:
            self._scaled[std] = to_bf16(self._normals * np.float32(std)).view(np.uint64)
        return self._scaled[std]


def router_rows(source: np.random.SFC64, shape: tuple[int, ...], skew: float) -> bytes:
    """Return the rows of a router in BF16, [experts, hidden]: those of a larger norm are chosen more often.

    skew: standard deviation of the logarithm of the norms; their median is 1.
    """
    rows, columns = shape
    logs = [Decimal(skew) * Decimal(float(n)) for n in normal(source, rows)]
    norms = np.array([float(log.exp()) for log in logs])  # math.exp rounds as the machine likes
    values = normal(source, rows * columns).reshape(shape)
    return bf16_bytes(values * (norms / math.sqrt(columns))[:, None])


def bf16_bytes(values: NDArray[np.float64]) -> bytes:
    """Round fp64 to fp32, then to BF16."""
    return to_bf16(values.astype(np.float32)).tobytes()


def e4m3_value(byte: int) -> float:
    """Return what a positive E4M3 byte is worth."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    return (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9


def rms(values: Sequence[float]) -> float:
    """Return the root mean square."""
    return math.sqrt(math.fsum(v * v for v in values) / len(values))
