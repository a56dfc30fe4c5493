"""Where an expert's bytes are: (layer, expert) -> aligned spans to read, and the place of the payload in them.

Pure arithmetic over shapes and headers. Knows no tensor and opens no expert file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from runtime.checkpoint import Extent
from runtime.errors import UserError
from runtime.units import PAGE_NBYTES, align_down, align_up

PACK_VERSION = 1
PACK_HEADER = "pack.json"
PACK_BLOCKS = "experts.bin"
PACK_SCALARS = "scalars.f32"
CHECKSUMS_NAME = "checksums.bin"  # in a pack, or of experts inside released files
CHECKSUM_NBYTES = 8  # of blake3, per run of an expert's bytes: a packed block is one
# global scales of gate, up, down; input scales of gate, up, down (NaN where absent)
SCALARS_PER_EXPERT = 6

_AGAIN = "run the repack stage again: python run.py stages=[repack] force=[repack]"


class ExpertKey(NamedTuple):
    """One routed expert."""

    layer: int
    expert: int


class Span(NamedTuple):
    """One aligned read: `nbytes` from `offset` of file `file_idx` to `dest` in the record.

    The file may end early, but not before `need_nbytes` (the last page of a shard is short).
    """

    file_idx: int
    offset: int
    nbytes: int
    need_nbytes: int
    dest: int


class ExpertLayout(Protocol):
    """What reader and streamer ask of a layout. A record is what is read: aligned, payload inside."""

    num_layers: int
    num_experts: int
    record_nbytes: int

    @property
    def files(self) -> tuple[Path, ...]: ...

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        """Return the reads that fill one record."""


def aligned_spans(extents: list[tuple[int, Extent]]) -> tuple[Span, ...]:
    """Widen (file_idx, extent) pairs to page limits and lay them one after the other in a record."""
    spans, dest = [], 0
    for file_idx, extent in extents:
        start = align_down(extent.offset)
        end = extent.offset + extent.nbytes
        spans.append(Span(file_idx, start, align_up(end) - start, end - start, dest))
        dest += align_up(end) - start
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class Nvfp4Shape:
    """Sizes of one NVFP4 expert and of its packed block: gate, up, down codes, then their scales, then padding."""

    hidden: int
    intermediate: int

    @property
    def codes_nbytes(self) -> int:
        return self.hidden * self.intermediate // 2

    @property
    def scales_nbytes(self) -> int:
        return self.hidden * self.intermediate // 16

    @property
    def payload_nbytes(self) -> int:
        return 3 * (self.codes_nbytes + self.scales_nbytes)

    @property
    def record_nbytes(self) -> int:
        return align_up(self.payload_nbytes, PAGE_NBYTES)

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return (offset in the block, nbytes) of each part, in block order."""
        c, s = self.codes_nbytes, self.scales_nbytes
        names = ("gate codes", "up codes", "down codes", "gate scales", "up scales", "down scales")
        offsets = (0, c, 2 * c, 3 * c, 3 * c + s, 3 * c + 2 * s)
        return {
            name: (offset, c if offset < 3 * c else s)
            for name, offset in zip(names, offsets, strict=True)
        }


@dataclass(frozen=True, slots=True)
class PackHeader:
    """The facts that `pack.json` holds."""

    version: int
    num_layers: int
    num_experts: int
    hidden: int
    intermediate: int
    record_nbytes: int
    payload_nbytes: int
    source_revision: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


class PackedLayout:
    """One aligned block per expert in `experts.bin`: block number num_experts * layer + expert."""

    def __init__(self, root: Path, header: PackHeader) -> None:
        self.root = root
        self.header = header
        self.num_layers = header.num_layers
        self.num_experts = header.num_experts
        self.record_nbytes = header.record_nbytes
        self.shape = Nvfp4Shape(header.hidden, header.intermediate)

    @staticmethod
    def read_header(root: Path) -> PackHeader:
        """Read and check `pack.json`. Raises UserError."""
        try:
            header = PackHeader(**json.loads((root / PACK_HEADER).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"the expert pack in {root} has no usable {PACK_HEADER}: {error}", _AGAIN
            ) from error
        if header.version != PACK_VERSION:
            raise UserError(
                f"the expert pack in {root} has layout version {header.version}, expected {PACK_VERSION}",
                _AGAIN,
            )
        shape = Nvfp4Shape(header.hidden, header.intermediate)
        if (shape.payload_nbytes, shape.record_nbytes) != (
            header.payload_nbytes,
            header.record_nbytes,
        ):
            raise UserError(
                f"the sizes in {root / PACK_HEADER} do not follow from its shapes", _AGAIN
            )
        return header

    @classmethod
    def open(cls, root: Path) -> PackedLayout:
        """Read and check `pack.json` and the size of `experts.bin`."""
        header = cls.read_header(root)
        wanted = header.num_layers * header.num_experts * header.record_nbytes
        found = (root / PACK_BLOCKS).stat().st_size if (root / PACK_BLOCKS).exists() else 0
        if found != wanted:
            raise UserError(
                f"expert pack is truncated: {PACK_BLOCKS} has {found:,} bytes, {wanted:,} were written",
                _AGAIN,
            )
        return cls(root, header)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.root / PACK_BLOCKS,)

    def block(self, key: ExpertKey) -> Span:
        """Return where a block stands among all of them."""
        offset = (self.num_experts * key.layer + key.expert) * self.record_nbytes
        return Span(0, offset, self.record_nbytes, self.record_nbytes, 0)

    def spans(self, key: ExpertKey) -> tuple[Span, ...]:
        return (self.block(key),)

    def copies(self, key: ExpertKey) -> tuple[tuple[Span, ...], ...]:
        """Return the ways to read a record whole: one."""
        return (self.spans(key),)
