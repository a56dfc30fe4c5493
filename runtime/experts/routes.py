"""Which experts a model asked for: written down while it runs, and read again. Knows no tensor and no drive.

A file is a line that names the format, a line of JSON about the model, then one frame per layer and forward:

    kind u8, flags u8, layer u16, experts u16, guesses u16, forward u32, then the ids u16 each, then, if flagged, the
    guesses' scores f16 each; little-endian

Kinds: a decoded token's layer (experts in router order, guesses for the next layer, likeliest first), a prompt's layer
(experts in the order of reading), and a moment at which every expert kept was dropped. A forward is one token or one
piece of a prompt. A file that was cut in the middle of a frame is good up to there.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from runtime.errors import UserError

MAGIC = b"NVMOE-ROUTES 1\n"
MAX_ID = 2**16 - 1
_FRAME = struct.Struct("<BBHHHI")
_HAS_SCORES = 1


class Kind(IntEnum):
    """What a frame tells."""

    decode = 0
    sweep = 1
    forget = 2


class Guesses(list[int]):
    """Guessed ids, likeliest first, with what the router said of each."""

    def __init__(self, ids: Iterable[int], scores: Any) -> None:
        """scores: a tensor or a sequence as long as ids; looked at only when a route is recorded."""
        super().__init__(ids)
        self.scores = scores


class RouteListener(Protocol):
    """Who is told what an expert source is asked for."""

    def decoded(self, layer: int, ids: Sequence[int], guesses: Sequence[int]) -> None: ...

    def swept(self, layer: int, ids: Sequence[int]) -> None: ...

    def forgot(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RouteHeader:
    """The model that a route is of."""

    model: str
    num_layers: int
    num_experts: int
    top_k: int
    record_nbytes: int  # of one expert, as it is read


class Step(NamedTuple):
    """One frame."""

    kind: Kind
    forward: int
    layer: int
    experts: tuple[int, ...]
    guesses: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()  # as many as guesses, or none where the model tells none


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """A whole recording."""

    header: RouteHeader
    steps: list[Step]

    @property
    def num_tokens(self) -> int:
        """Decoded tokens."""
        return len({step.forward for step in self.steps if step.kind is Kind.decode})

    def forwards(self) -> Iterator[list[Step]]:
        """Yield the steps of one token, of one piece of a prompt, or one moment of forgetting, in order."""
        group: list[Step] = []
        for step in self.steps:
            if group and (step.forward, step.kind) != (group[0].forward, group[0].kind):
                yield group
                group = []
            group.append(step)
        if group:
            yield group


class RouteRecorder:
    """Writes frames as it is told of them. For one thread."""

    def __init__(self, path: Path, header: RouteHeader) -> None:
        """Raises UserError when the file is there already or cannot be written."""
        if max(header.num_experts - 1, header.num_layers) > MAX_ID:
            raise ValueError(f"a route file counts to {MAX_ID}, got {header}")
        try:
            self._file: BinaryIO = open(path, "xb")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise UserError(
                f"cannot write routes to {path}: {error.strerror}",
                "choose another folder for this run with hydra.run.dir=DIR",
            ) from error
        self.path = path
        self._forward = -1
        self._last: tuple[int, Kind | None] = (-1, None)
        self._file.write(MAGIC + json.dumps(asdict(header)).encode() + b"\n")

    def decoded(self, layer: int, ids: Sequence[int], guesses: Sequence[int]) -> None:
        scores = getattr(guesses, "scores", None)
        self._write(Kind.decode, layer, ids, guesses, scores)

    def swept(self, layer: int, ids: Sequence[int]) -> None:
        self._write(Kind.sweep, layer, ids, (), None)

    def forgot(self) -> None:
        self._write(Kind.forget, 0, (), (), None)

    def _write(
        self, kind: Kind, layer: int, ids: Sequence[int], guesses: Sequence[int], scores: Any
    ) -> None:
        last_layer, last_kind = self._last
        if kind is not last_kind or layer <= last_layer:
            self._forward += 1
            self._file.flush()  # once a token: a server that is killed leaves what it has seen
        self._last = (layer, kind)
        flags = _HAS_SCORES if scores is not None and len(guesses) else 0
        self._file.write(
            _FRAME.pack(kind, flags, layer, len(ids), len(guesses), self._forward)
            + struct.pack(f"<{len(ids) + len(guesses)}H", *ids, *guesses)
        )
        if flags:
            values = [min(65504.0, max(-65504.0, float(score))) for score in scores]
            self._file.write(struct.pack(f"<{len(values)}e", *values))

    def close(self) -> None:
        """Write what is left."""
        self._file.close()


def write_routes(path: Path, trace: RouteTrace) -> None:
    """Write a whole trace, for instance a generated one."""
    recorder = RouteRecorder(path, trace.header)
    for step in trace.steps:
        if step.kind is Kind.decode:
            guesses = Guesses(step.guesses, step.scores) if step.scores else step.guesses
            recorder.decoded(step.layer, step.experts, guesses)
        elif step.kind is Kind.sweep:
            recorder.swept(step.layer, step.experts)
        else:
            recorder.forgot()
    recorder.close()


def read_routes(path: Path) -> RouteTrace:
    """Read a recording. Raises UserError when there is none, or when it is no such file."""
    hint = "record one: python run.py stages=[bench] record=true"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read routes from {path}: {error.strerror}", hint) from error
    head, _, rest = data.partition(b"\n")
    line, _, frames = rest.partition(b"\n")
    if head + b"\n" != MAGIC:
        raise UserError(f"{path} holds no routes: it does not start with {MAGIC!r}", hint)
    try:
        header = RouteHeader(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise UserError(f"the header of {path} cannot be read: {error}", hint) from error
    steps = list(_frames(frames, header, path))
    return RouteTrace(header, steps)


def _frames(data: bytes, header: RouteHeader, path: Path) -> Iterator[Step]:
    at = 0
    while at + _FRAME.size <= len(data):
        kind, flags, layer, num_ids, num_guesses, forward = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        middle = start + 2 * (num_ids + num_guesses)
        end = middle + (2 * num_guesses if flags & _HAS_SCORES else 0)
        if end > len(data):
            return
        ids = struct.unpack_from(f"<{num_ids + num_guesses}H", data, start)
        scores = struct.unpack_from(f"<{num_guesses}e", data, middle) if end > middle else ()
        if (
            kind > max(Kind)
            or layer >= header.num_layers
            or max(ids, default=0) >= header.num_experts
        ):
            raise UserError(
                f"{path} is damaged: the frame at byte {at:,} behind its header names layer {layer} or an expert that "
                f"the model ({header.num_layers} layers of {header.num_experts}) does not have",
                "record it again",
            )
        yield Step(Kind(kind), forward, layer, ids[:num_ids], ids[num_ids:], scores)
        at = end
