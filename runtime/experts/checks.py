"""Checks of what the drive gives: an expert's hash on its first read, and a word when nothing comes for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from pathlib import Path
from queue import Empty, SimpleQueue

from blake3 import blake3

from runtime.errors import UserError, VerificationError
from runtime.experts.layout import (
    CHECKSUM_NBYTES,
    CHECKSUMS_NAME,
    ExpertKey,
    ExpertLayout,
    PackedLayout,
    Span,
)
from runtime.experts.schedule import ReadJob
from runtime.units import format_duration

log = logging.getLogger(__name__)

SILENT_S = 10.0  # without any arrival, after which it is said


def all_runs(layout: ExpertLayout) -> list[Span]:
    """Return every expert's reads, one after the other, in the order of their checksums."""
    keys = (
        ExpertKey(layer, expert)
        for layer in range(layout.num_layers)
        for expert in range(layout.num_experts)
    )
    return [span for key in keys for span in layout.spans(key)]


class Checksums:
    """The hashes that `repack` or `checksums` recorded, compared the first time that an expert is read."""

    def __init__(self, recorded: bytes, layout: ExpertLayout) -> None:
        """recorded: CHECKSUM_NBYTES for each of `all_runs`."""
        self._recorded, self._layout = recorded, layout
        self._is_packed = isinstance(layout, PackedLayout)
        self._first: dict[ExpertKey, int] = {}  # number of an expert's first run
        count = 0
        for layer in range(layout.num_layers):
            for expert in range(layout.num_experts):
                key = ExpertKey(layer, expert)
                self._first[key] = count
                count += len(layout.spans(key))
        self._seen: set[Hashable] = set()

    @classmethod
    def open(cls, layout: ExpertLayout, folder: Path | None = None) -> Checksums:
        """Read the checksums in a folder, by default those of a pack. Raises UserError for none, or too few."""
        if folder is None and isinstance(layout, PackedLayout):
            folder = layout.root
        stage = "repack" if isinstance(layout, PackedLayout) else "checksums"
        if folder is None:
            raise UserError(
                "cache.verify=true needs a checksum of each expert, and none are recorded",
                "run stages=[checksums] first: it reads every file of the model once",
            )
        path = folder / CHECKSUMS_NAME
        recorded = path.read_bytes()
        if len(recorded) != CHECKSUM_NBYTES * len(all_runs(layout)):
            raise UserError(
                f"{path} has {len(recorded):,} bytes, which is not one checksum per run of an expert",
                f"run the stage again that makes it: stages=[{stage}] force=[{stage}]",
            )
        return cls(recorded, layout)

    def check(self, job: ReadJob) -> None:
        """Give a finished read an error when its bytes are not what was recorded; each expert once."""
        key = job.key
        if job.error is not None or key in self._seen:
            return
        assert isinstance(key, ExpertKey)
        for number, span in enumerate(self._layout.spans(key), self._first[key]):
            # up to what is needed: the last page of a file may be short, and what follows it in a row is left over
            data = job.buffer[span.dest : span.dest + span.need_nbytes]
            found = blake3(data).digest(length=CHECKSUM_NBYTES)
            wanted = self._recorded[CHECKSUM_NBYTES * number : CHECKSUM_NBYTES * (number + 1)]
            if found != wanted:
                job.error = self._error(key, span, found, wanted)
                return
        self._seen.add(key)

    def _error(self, key: ExpertKey, span: Span, found: bytes, wanted: bytes) -> VerificationError:
        stage, again = ("repack", "repack") if self._is_packed else ("checksums", "download")
        return VerificationError(
            f"layer {key.layer}, expert {key.expert} came from {self._layout.files[span.file_idx]} with wrong bytes: "
            f"the checksum of {span.need_nbytes:,} bytes from byte {span.offset:,} on is {found.hex()}, {stage} "
            f"recorded {wanted.hex()}",
            f"see the kernel log (dmesg); run stages=[spot_check] spot_check.experts=all, then force=[{again}]",
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
