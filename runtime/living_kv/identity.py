"""Which model a store belongs to: what changes keys and values, and the header that says so."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from conf.schema import MemoryConfig
from runtime.living_kv.errors import StoreRefusedError
from runtime.living_kv.index import layer_numbers, projection, projection_digest
from runtime.living_kv.layout import Header, new_store_id
from runtime.living_kv.sentences import SPLITTER_VERSION
from runtime.models.dense import DenseModel

REREAD = "read the stored text in anew with stages=[memory_migrate]"
PROJECTION_SEED = 20240601


def model_identity(model: DenseModel) -> dict[str, Any]:
    """Return what changes keys and values: the architecture, its numbers, the weights, the arithmetic.

    Weight files up to 1 GiB are hashed whole, larger ones by their headers and samples.
    """
    spec = model.spec
    return {
        "architecture": spec.model_type,
        "layers": spec.depth,
        "hidden": spec.hidden,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "rope_theta": spec.rope_theta,
        "eps": spec.eps,
        "weights": _weights_digest(model.layout.files),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def _weights_digest(paths: Sequence[Path]) -> str:
    found = (path.stat() for path in paths)
    return _digest_once(tuple(paths), tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in found))


@functools.lru_cache(maxsize=4)
def _digest_once(paths: tuple[Path, ...], _versions: tuple[tuple[int, int, int], ...]) -> str:
    """A server opens stores again and again: files that did not change are hashed once."""
    hasher = blake3()
    for path in paths:
        size = path.stat().st_size
        with open(path, "rb") as f:
            if size <= 2**30:
                hasher.update(f.read())
                continue
            (header_nbytes,) = struct.unpack("<Q", f.read(8))
            hasher.update(f"{size}".encode() + f.read(header_nbytes))
            for i in range(256):
                f.seek((size - 4096) * i // 255)
                hasher.update(f.read(4096))
    return hasher.hexdigest(length=16)


def new_header(model: DenseModel, snapshot: Path, config: MemoryConfig, created: str) -> Header:
    """Return the header of a store for this model."""
    spec = model.spec
    layers = layer_numbers(config.index_layers, spec.depth)
    matrix = projection(spec.hidden, config.index_dim, PROJECTION_SEED)
    return Header(
        store_id=new_store_id(),
        kind="kv",
        created=created,
        codec=config.codec.value,
        block=config.block,
        layers=spec.depth,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=str(model.dtype).removeprefix("torch."),
        vector_values=len(layers) * matrix.shape[1],
        index_layers=layers,
        projection_seed=PROJECTION_SEED,
        projection_digest=projection_digest(matrix),
        model=model_identity(model),
        tokenizer=tokenizer_digest(snapshot),
        rope_theta=spec.rope_theta,
        splitter=SPLITTER_VERSION,
    )


def tokenizer_digest(snapshot: Path) -> str:
    """Return what tells tokenizers apart."""
    return blake3((snapshot / "tokenizer.json").read_bytes()).hexdigest(length=16)


def check_identity(header: Header, model: DenseModel, snapshot: Path) -> None:
    """Refuse a store of another model, naming both."""
    if header.kind != "kv":
        raise StoreRefusedError(
            "this store holds text only: no model can read keys and values from it",
            "ask it with stages=[memory_quote], or make a kv store with stages=[memory_migrate]",
        )
    ours = {**model_identity(model), "tokenizer": tokenizer_digest(snapshot)}
    theirs = {**header.model, "tokenizer": header.tokenizer}
    wrong = [k for k in ours if ours[k] != theirs.get(k)]
    if wrong:
        raise StoreRefusedError(
            f"E-MODEL: the store was made by another model: "
            f"{', '.join(f'{k} {theirs.get(k)} there, {ours[k]} here' for k in wrong)}",
            f"choose that model, or {REREAD}",
        )
    if header.splitter != SPLITTER_VERSION:
        raise StoreRefusedError(
            "E-VERSION: the store's sentences were cut by another version of the splitter", REREAD
        )
