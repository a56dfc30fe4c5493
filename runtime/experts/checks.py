"""Checks of what the drive gives: an expert's hash on its first read, and a word when nothing comes for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from queue import Empty, SimpleQueue

from blake3 import blake3

from runtime.errors import UserError, VerificationError
from runtime.experts.layout import (
    CHECKSUM_NBYTES,
    PACK_CHECKSUMS,
    ExpertKey,
    ExpertLayout,
    PackedLayout,
)
from runtime.experts.schedule import ReadJob
from runtime.units import format_duration

log = logging.getLogger(__name__)

SILENT_S = 10.0  # without any arrival, after which it is said


class Checksums:
    """The hashes that `repack` recorded, one per expert, compared the first time that an expert is read."""

    def __init__(self, recorded: bytes, num_experts: int, record_nbytes: int, source: str) -> None:
        self._recorded, self._num_experts, self._record_nbytes = (
            recorded,
            num_experts,
            record_nbytes,
        )
        self._source = source
        self._seen: set[Hashable] = set()

    @classmethod
    def open(cls, layout: ExpertLayout) -> Checksums:
        """Read the checksums beside a pack. Raises UserError for a layout that has none."""
        if not isinstance(layout, PackedLayout):
            raise UserError(
                "cache.verify=true needs a pack with a checksum of each expert, and this model's experts are read in "
                "the released files",
                "leave it out; stages=[download] force=[download] compares every file with the hub's hash",
            )
        path = layout.root / PACK_CHECKSUMS
        recorded = path.read_bytes()
        if len(recorded) != CHECKSUM_NBYTES * layout.num_layers * layout.num_experts:
            raise UserError(
                f"{path} has {len(recorded):,} bytes, which is not one checksum per expert",
                "run the repack stage again: stages=[repack] force=[repack]",
            )
        return cls(
            recorded, layout.num_experts, layout.record_nbytes, " or ".join(map(str, layout.files))
        )

    def check(self, job: ReadJob) -> None:
        """Give a finished read an error when its bytes are not what was packed; each expert once."""
        key = job.key
        if job.error is not None or key in self._seen:
            return
        assert isinstance(key, ExpertKey)
        at = CHECKSUM_NBYTES * (self._num_experts * key.layer + key.expert)
        found = blake3(job.buffer[: self._record_nbytes]).digest(length=CHECKSUM_NBYTES)
        if found == self._recorded[at : at + CHECKSUM_NBYTES]:
            self._seen.add(key)
            return
        job.error = VerificationError(
            f"layer {key.layer}, expert {key.expert} came from {self._source} with wrong bytes: its checksum is "
            f"{found.hex()}, repack recorded {self._recorded[at : at + CHECKSUM_NBYTES].hex()}",
            "see the kernel log (dmesg); run stages=[spot_check] spot_check.experts=all, then force=[repack]",
        )


def next_arrival(arrivals: SimpleQueue[ReadJob]) -> ReadJob:
    """Wait for a read, however long it takes; say so every `SILENT_S` in which nothing comes."""
    started = time.monotonic()
    while True:
        try:
            return arrivals.get(timeout=SILENT_S)
        except Empty:
            waited = format_duration(time.monotonic() - started)
            log.warning("the drive has given nothing for %s: still waiting (see dmesg)", waited)
