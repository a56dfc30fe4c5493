"""Read safetensors checkpoints by their headers.

Owns the mapping from a tensor's name to its place in a file, and every way in which that mapping can be
wrong. Reads tensors by offset; never maps a shard, never reads one whole. Knows no model.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from runtime.errors import UserError
from runtime.units import format_nbytes

if TYPE_CHECKING:
    import torch

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_NBYTES = 100_000_000  # the limit of the format's own library

DTYPE_NBYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


class CheckpointError(UserError):
    """A checkpoint that cannot be used as it is."""


class ShortFileError(CheckpointError):
    """A file that ends before its header or its last tensor does."""


class TrailingBytesError(CheckpointError):
    """A file that goes on after its last tensor."""


class BadHeaderError(CheckpointError):
    """A header that is not the JSON that the format asks for."""


class BadOffsetsError(CheckpointError):
    """Tensors that overlap, leave holes, or do not have the size of their shape."""


class UnknownDtypeError(CheckpointError):
    """A dtype that the format does not have."""


class PointerFileError(CheckpointError):
    """A Git-LFS pointer in the place of the file itself."""


class MissingShardError(CheckpointError):
    """A file that the index names and the folder does not have."""


class IndexMismatchError(CheckpointError):
    """An index that does not agree with the headers."""


class MissingTensorError(CheckpointError):
    """A tensor that the model needs and the checkpoint does not have, or has in another dtype or shape."""


class Extent(NamedTuple):
    """A run of bytes in a file."""

    file: Path
    offset: int
    nbytes: int


class TensorInfo(NamedTuple):
    """What a header says of one tensor. `dtype` is the format's name (`BF16`, `F8_E4M3`, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file in file order, with every offset checked.

    Raises a CheckpointError whose class says which way the file is wrong.
    """
    file_nbytes = path.stat().st_size
    with open(path, "rb") as f:
        prefix = f.read(8)
        if prefix.startswith(b"version "):
            raise PointerFileError(
                f"{path.name} is a Git-LFS pointer, not the weights",
                "run `git lfs pull` there, or download the file again",
            )
        if len(prefix) < 8:
            raise ShortFileError(
                f"{path.name} has {file_nbytes} bytes: too short for a safetensors header",
                _again(path),
            )
        (header_nbytes,) = struct.unpack("<Q", prefix)
        if header_nbytes > MAX_HEADER_NBYTES:
            raise BadHeaderError(
                f"{path.name} does not start like a safetensors file", _again(path)
            )
        if 8 + header_nbytes > file_nbytes:
            raise ShortFileError(
                f"{path.name} is truncated inside its header: the header ends at byte {8 + header_nbytes:,}, "
                f"the file has {file_nbytes:,}",
                _again(path),
            )
        raw = f.read(header_nbytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadHeaderError(
            f"{path.name} has a header that is not JSON: {error}", _again(path)
        ) from error
    if not isinstance(header, dict):
        raise BadHeaderError(f"{path.name} has a header that is not a JSON object", _again(path))
    header.pop("__metadata__", None)
    return _parse_header(path, header, 8 + header_nbytes, file_nbytes)


def _parse_header(
    path: Path, header: Mapping[str, Any], data_start: int, file_nbytes: int
) -> dict[str, TensorInfo]:
    infos = sorted(
        (_parse_entry(path, name, entry, data_start) for name, entry in header.items()),
        key=lambda info: (info.extent.offset, info.extent.nbytes),
    )
    end = data_start
    previous = "the header"
    for info in infos:
        if info.extent.offset != end:
            kind = "overlaps" if info.extent.offset < end else "leaves a hole after"
            raise BadOffsetsError(
                f"{path.name}: tensor {info.name} {kind} {previous}", _again(path)
            )
        end = info.extent.offset + info.extent.nbytes
        previous = info.name
        if end > file_nbytes:
            raise ShortFileError(
                f"{path.name} is truncated: tensor {info.name} ends at byte {end:,}, the file has {file_nbytes:,} "
                f"({format_nbytes(end - file_nbytes)} missing at least)",
                _again(path),
            )
    if end != file_nbytes:
        raise TrailingBytesError(
            f"{path.name} has {file_nbytes - end:,} bytes after its last tensor, which ends at byte {end:,}",
            _again(path),
        )
    return {info.name: info for info in infos}


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        usable = isinstance(dtype, str) and all(
            type(n) is int and n >= 0 for n in (*shape, start, end)
        )
    except (KeyError, TypeError, ValueError):
        usable = False
    if not usable:
        raise BadHeaderError(
            f"{path.name}: the header entry of {name} is not dtype, shape and two offsets",
            _again(path),
        )
    if dtype not in DTYPE_NBYTES:
        raise UnknownDtypeError(
            f"{path.name}: tensor {name} has dtype {dtype!r}, which is none of {', '.join(DTYPE_NBYTES)}",
            _again(path),
        )
    nbytes = DTYPE_NBYTES[dtype]
    for n in shape:
        nbytes *= n
    if end - start != nbytes:
        raise BadOffsetsError(
            f"{path.name}: tensor {name} of {dtype} {list(shape)} needs "
            f"{nbytes:,} bytes, its offsets span {end - start:,}",
            _again(path),
        )
    return TensorInfo(name, dtype, shape, Extent(path, data_start + start, nbytes))


def _again(path: Path) -> str:
    return f"fetch {path.name} again and put it in the place of {path}"


class Checkpoint:
    """All tensors of a checkpoint folder, by name."""

    def __init__(self, root: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.root = root
        self.tensors = tensors

    @classmethod
    def open(cls, root: Path) -> Checkpoint:
        """Read the index and the header of every file it names; check that they agree."""
        index_path = root / INDEX_NAME
        if index_path.exists():
            return cls(root, _open_indexed(root, index_path))
        single = root / "model.safetensors"
        if not single.exists():
            raise MissingShardError(
                f"{root} holds no checkpoint: neither {INDEX_NAME} nor model.safetensors is there",
                "check model.path, or run the download stage again",
            )
        return cls(root, read_header(single))

    def files(self) -> list[Path]:
        """Return the weight files, in name order."""
        return sorted({info.extent.file for info in self.tensors.values()})

    def info(
        self,
        name: str,
        dtype: str | Iterable[str] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> TensorInfo:
        """Return one tensor's place, after checking the dtype and shape that the caller relies on."""
        info = self.tensors.get(name)
        if info is None:
            raise MissingTensorError(
                f"the checkpoint in {self.root} has no tensor {name}",
                "check model.family and revision",
            )
        wanted = (dtype,) if isinstance(dtype, str) else tuple(dtype or (info.dtype,))
        if info.dtype not in wanted or (shape is not None and info.shape != shape):
            raise MissingTensorError(
                f"tensor {name} is {info.dtype} {list(info.shape)}, expected {' or '.join(wanted)} "
                f"{list(shape if shape is not None else info.shape)}",
                "this checkpoint is not of the layout that model.family names",
            )
        return info

    def read(self, info: TensorInfo) -> bytearray:
        """Return a tensor's bytes."""
        return read_extent(info.extent)

    def account(
        self, places: Mapping[str, str], left_out: Iterable[tuple[re.Pattern[str], str]]
    ) -> dict[str, int]:
        """Return how many tensors have which place, in the order of places' names. Every tensor must have one.

        places: tensor -> place.  left_out: beginnings of names that have none, and why.  Raises CheckpointError naming
        tensors that are neither.
        """
        patterns = tuple(left_out)
        counts: Counter[str] = Counter()
        strangers = []
        for tensor in self.tensors:
            place = places.get(tensor) or next(
                (f"left out: {why}" for pattern, why in patterns if pattern.match(tensor)), None
            )
            if place is None:
                strangers.append(tensor)
            else:
                counts[place] += 1
        if strangers:
            raise CheckpointError(
                f"{len(strangers)} tensors of the checkpoint have no place in this engine: "
                f"{', '.join(sorted(strangers)[:4])}",
                "check model.family and model.revision: this is another architecture or another release",
            )
        return dict(sorted(counts.items()))

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor as torch sees it (a copy of its bytes; `F8_E4M3` becomes float8_e4m3fn)."""
        info = self.info(name)
        return bytes_to_tensor(self.read(info), info.dtype, info.shape)


def read_extent(extent: Extent) -> bytearray:
    """Read a run of bytes through the page cache; an early end of the file is an error."""
    out = bytearray(extent.nbytes)
    view = memoryview(out)
    fd = os.open(extent.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        got = 0
        while got < extent.nbytes:
            n = os.preadv(fd, [view[got:]], extent.offset + got)
            if n == 0:
                raise ShortFileError(
                    f"{extent.file.name} ends at byte {extent.offset + got:,}; bytes up to "
                    f"{extent.offset + extent.nbytes:,} were to be read",
                    _again(extent.file),
                )
            got += n
    finally:
        os.close(fd)
    return out


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a safetensors dtype name."""
    import torch

    names = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu", "U16": "uint16", "I16": "int16", "F16": "float16", "BF16": "bfloat16",
        "U32": "uint32", "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64",
    }  # fmt: skip
    dtype: torch.dtype = getattr(torch, names[name])
    return dtype


def bytes_to_tensor(raw: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View bytes as a tensor; shape [] gives a scalar tensor."""
    import torch

    if not raw:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    return torch.frombuffer(raw, dtype=torch.uint8).view(torch_dtype(dtype)).reshape(shape)


def _open_indexed(root: Path, index_path: Path) -> dict[str, TensorInfo]:
    try:
        weight_map = json.loads(index_path.read_bytes())["weight_map"]
        shards = sorted(set(weight_map.values()))
        if not all(isinstance(shard, str) for shard in shards):
            raise TypeError("a shard's name is no text")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise IndexMismatchError(
            f"{index_path.name} is not a weight index: {error!r}", _again(index_path)
        ) from error
    missing = [shard for shard in shards if not (root / shard).is_file()]
    if missing:
        raise MissingShardError(
            f"{len(missing)} of {len(shards)} weight files are missing in {root}: {', '.join(missing[:5])}",
            "run the download stage again; it fetches only what is missing",
        )
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in read_header(root / shard).items():
            if weight_map.get(name) != shard:
                raise IndexMismatchError(
                    f"{shard} holds tensor {name}, which the index places in {weight_map.get(name, 'no file')}",
                    _again(index_path),
                )
            tensors[name] = info
    for name, shard in weight_map.items():
        if name not in tensors:
            raise IndexMismatchError(
                f"the index places tensor {name} in {shard}, whose header does not have it",
                _again(root / shard),
            )
    return tensors
