"""What a store's files are called and what stands in them: header, sentences, blocks, sessions. Writes nothing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from runtime.living_kv.errors import StoreNotFoundError, StoreRefusedError, checksum

FORMAT_VERSION = 1
HEADER_NAME = "HEADER.json"
BLOCK_MAGIC = b"LKVB"
# magic, version, layers, heads, dim, first position, tokens, flags
BLOCK_HEADER = struct.Struct("<4sHHHHQHH40x")
TEXT, SPANS, TOKENS, VECTORS = "txt/000001.txt", "txt/spans.bin", "tok/tokens.bin", "idx/000001.vec"
TABLE, SESSIONS, TOMBSTONES = "kv/blocks.tbl", "sessions.jsonl", "txt/tombstones.bin"

SENTENCE = np.dtype(
    [("lo", "<u8"), ("hi", "<u8"), ("text_off", "<u8"), ("text_len", "<u4"), ("session", "<u4"), ("flags", "<u2"),
     ("weight", "<f2"), ("reserved", "<u4")]
)  # fmt: skip
BLOCK = np.dtype(
    [("first", "<u8"), ("offset", "<u8"), ("file", "<u4"), ("nbytes", "<u4"), ("tokens", "<u4"), ("flags", "<u4"),
     ("digest", "u1", 32)]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """What a store was made with. Written once."""

    store_id: str  # 32 hex digits
    kind: str  # kv: keys, values, vectors, text; text: text alone
    created: str
    codec: str = ""
    block: int = 64  # tokens
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "float32"  # of the exact tail and the hot snapshot
    vector_values: int = 0  # numbers of one sentence's index vectors
    index_layers: tuple[int, ...] = ()
    projection_seed: int = 0
    projection_digest: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)  # identity: what changes keys and values
    tokenizer: str = ""  # digest of tokenizer.json
    rope_theta: float = 0.0
    splitter: int = 1
    format_version: int = FORMAT_VERSION
    endianness: str = "little"

    @property
    def exact_nbytes(self) -> int:
        """Bytes of one token's exact keys and values."""
        size = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return 2 * self.layers * self.kv_heads * self.head_dim * size


class Session(NamedTuple):
    """A stretch of the timeline with a name."""

    id: int
    name: str
    tag: str
    started: float  # seconds since 1970
    source: str
    digest: str  # of the source's bytes
    is_finished: bool


def kv_name(number: int) -> str:
    """Return the name of a block file; the first is 1."""
    return f"kv/{number:06d}.kvb"


def new_store_id() -> str:
    """Return 16 random bytes as hex."""
    return os.urandom(16).hex()


def header_bytes(header: Header) -> bytes:
    """Return the header file: the header and the digest of its canonical JSON."""
    raw = json.dumps(asdict(header), sort_keys=True, indent=1)
    body = {"header": json.loads(raw), "blake3": blake3(raw.encode()).hexdigest()}
    return (json.dumps(body, indent=1) + "\n").encode()


def read_header(root: Path) -> Header:
    """Read the header of the store in a folder. Raises StoreNotFoundError, StoreRefusedError."""
    path = root / HEADER_NAME
    if not path.exists():
        backup = root.with_name(root.name + ".bak")
        raise StoreNotFoundError(
            f"there is no store at {root}",
            f"a rewrite was stopped between two renames: rename {backup} to {root.name}"
            if (backup / HEADER_NAME).exists()
            else "check memory.store, or make it with stages=[memory_ingest]",
        )
    hint = "restore HEADER.json from a copy: it says how the store is read"
    try:
        body = json.loads(path.read_bytes())
        raw = json.dumps(body["header"], sort_keys=True, indent=1)
        if blake3(raw.encode()).hexdigest() != body["blake3"]:
            raise ValueError("its checksum differs")
        data = body["header"]
        if data["format_version"] > FORMAT_VERSION:
            raise StoreRefusedError(
                f"E-VERSION: the store {root.name} has format {data['format_version']}, this program reads "
                f"{FORMAT_VERSION}",
                "use a newer version of this program",
            )
        return Header(**{**data, "index_layers": tuple(data["index_layers"])})
    except (ValueError, KeyError, TypeError) as error:
        raise checksum(f"{root.name}/{HEADER_NAME} is damaged: {error}", hint) from error


def parse_sessions(raw: bytes) -> list[Session]:
    """Read the lines of sessions: one line starts a session, a later one says that it is finished."""
    sessions: list[Session] = []
    for line in raw.splitlines():
        data = json.loads(line)
        if data.get("finished"):
            sessions[data["id"]] = sessions[data["id"]]._replace(is_finished=True)
        else:
            sessions.append(Session(**data, is_finished=False))
    return sessions
