"""Which experts were warm when a model was last used, in a small file: keys alone, no bytes of theirs.

A file is MAGIC, the length of its head (8 bytes, little-endian), the head (JSON: whose experts, how many), the keys
(layer u16, expert u16, little-endian, the coldest first), and the blake3 of all that. It is written under another
name and appears whole by a rename. What is damaged or of another model is not used, and said: it only costs reads.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from runtime.experts.layout import ExpertKey, ExpertLayout

log = logging.getLogger(__name__)

MAGIC = b"nvmoe warm experts 1\n"
DIGEST_NBYTES = 32
SAVE_EVERY_S = 60.0  # at most; asked between answers


@dataclass(frozen=True, slots=True)
class WarmOwner:
    """Whose experts a file names."""

    key: str  # of the files that they are read from
    num_layers: int
    num_experts: int

    @classmethod
    def of(cls, layout: ExpertLayout, key: str) -> WarmOwner:
        return cls(key, layout.num_layers, layout.num_experts)


class WarmFile:
    """One model's file: read once at the start, written now and then."""

    def __init__(
        self, path: Path, owner: WarmOwner, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.path, self._owner, self._clock_s = path, owner, clock_s
        self._saved_s = clock_s()
        self._loaded: list[ExpertKey] = []

    def load(self) -> list[ExpertKey]:
        """Return the keys, the coldest first; none, with a sentence in the log, when the file cannot be used."""
        try:
            owner, keys = _parse(self.path.read_bytes())
        except FileNotFoundError:
            return []
        except OSError as error:
            return self._ignore(f"it cannot be read: {error.strerror}")
        except ValueError as error:
            return self._ignore(str(error))
        except (KeyError, TypeError, struct.error) as error:
            return self._ignore(f"other code wrote it ({error})")
        if owner != self._owner:
            return self._ignore("it is of other expert files")
        self._loaded = keys
        return keys

    def _ignore(self, why: str) -> list[ExpertKey]:
        log.warning("%s is not used, %s: the expert cache starts empty", self.path, why)
        return []

    def save_if_due(self, keys: Callable[[], Sequence[ExpertKey]]) -> None:
        """Save when the last time is long ago."""
        if self._clock_s() - self._saved_s >= SAVE_EVERY_S:
            self.save(keys())

    def save(self, keys: Sequence[ExpertKey]) -> None:
        """Write the keys, the coldest first; what was loaded and is not among them stays, as colder still.

        So a short run, or one with a small cache, does not lose what a long one has learnt. A disk that refuses is no
        reason to stop: it is logged.
        """
        self._saved_s = self._clock_s()
        found = set(keys)
        others = [key for key in self._loaded if key not in found]
        try:
            _write(self.path, _format(self._owner, [*others, *keys]))
        except OSError as error:
            log.warning(
                "the warm experts could not be saved to %s (%s): the next start is as this one was",
                self.path, error.strerror,
            )  # fmt: skip


def _format(owner: WarmOwner, keys: Sequence[ExpertKey]) -> bytes:
    head = json.dumps({**asdict(owner), "count": len(keys)}).encode()
    numbers = [number for key in keys for number in key]
    body = struct.pack(f"<{len(numbers)}H", *numbers)
    data = MAGIC + len(head).to_bytes(8, "little") + head + body
    return data + blake3(data).digest(length=DIGEST_NBYTES)


def _parse(data: bytes) -> tuple[WarmOwner, list[ExpertKey]]:
    """Raises ValueError with what is wrong."""
    if not data.startswith(MAGIC):
        raise ValueError("it does not start as such a file does")
    data, digest = data[:-DIGEST_NBYTES], data[-DIGEST_NBYTES:]
    if blake3(data).digest(length=DIGEST_NBYTES) != digest:
        raise ValueError("its checksum is wrong")
    at = len(MAGIC) + 8
    length = int.from_bytes(data[len(MAGIC) : at], "little")
    head = json.loads(data[at : at + length])
    count = head.pop("count")
    owner = WarmOwner(**head)
    numbers = struct.unpack_from(f"<{2 * count}H", data, at + length)
    keys = [ExpertKey(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    is_right = len(set(keys)) == len(keys) and all(
        key.layer < owner.num_layers and key.expert < owner.num_experts for key in keys
    )
    if not is_right:
        raise ValueError("it names experts that are not there, or one twice")
    return owner, keys


def _write(path: Path, data: bytes) -> None:
    """A reader sees the old or the new file, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name of this process: two servers of one model do not write into each other's
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
