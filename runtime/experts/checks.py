"""Checks of what the drive gives: an expert's hash on its first read, and a word when nothing comes for long."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from queue import Empty
from typing import Protocol

from blake3 import blake3

from runtime.errors import DeviceError, UserError, VerificationError
from runtime.experts.layout import (
    CHECKSUM_NBYTES,
    CHECKSUMS_NAME,
    ExpertKey,
    ExpertLayout,
    PackedLayout,
    Span,
)
from runtime.experts.reader_wire import Hash
from runtime.experts.schedule import ReadJob
from runtime.experts.spread_reader import Copies
from runtime.units import format_duration

log = logging.getLogger(__name__)

SILENT_S = 10.0  # without any arrival, after which it is said


def runs_of(layout: ExpertLayout, key: ExpertKey) -> tuple[Span, ...]:
    """Return what of an expert has a checksum each: its reads; a packed block is one, in however many parts it lies."""
    if isinstance(layout, PackedLayout):
        return (layout.block(key),)
    return layout.spans(key)


def all_runs(layout: ExpertLayout) -> list[Span]:
    """Return every expert's runs, one after the other, in the order of their checksums."""
    keys = (
        ExpertKey(layer, expert)
        for layer in range(layout.num_layers)
        for expert in range(layout.num_experts)
    )
    return [run for key in keys for run in runs_of(layout, key)]


class Checksums:
    """The hashes that `repack` or `checksums` recorded, compared the first time that an expert is read."""

    def __init__(self, recorded: bytes, layout: ExpertLayout, copies: Copies | None = None) -> None:
        """recorded: CHECKSUM_NBYTES for each of `all_runs`.  copies: where they lie on several drives."""
        self._recorded, self._layout, self._copies = recorded, layout, copies
        self._is_packed = isinstance(layout, PackedLayout)
        self._first: dict[ExpertKey, int] = {}  # number of an expert's first run
        count = 0
        for layer in range(layout.num_layers):
            for expert in range(layout.num_experts):
                key = ExpertKey(layer, expert)
                self._first[key] = count
                count += len(runs_of(layout, key))
        self._seen: set[Hashable] = set()

    @classmethod
    def open(
        cls, layout: ExpertLayout, folder: Path | None = None, copies: Copies | None = None
    ) -> Checksums:
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
        return cls(recorded, layout, copies)

    def expected(self, key: ExpertKey) -> list[Hash]:
        """Return what an expert's bytes must hash to; nothing when they were found right before."""
        if key in self._seen:
            return []
        return [
            Hash(run.dest, run.need_nbytes, self._wanted(key, number))
            for number, run in enumerate(runs_of(self._layout, key))
        ]

    def passed(self, key: Hashable) -> None:
        """Note that somebody else found an expert's bytes as `expected`."""
        self._seen.add(key)

    def _wanted(self, key: ExpertKey, number: int) -> bytes:
        at = CHECKSUM_NBYTES * (self._first[key] + number)
        return self._recorded[at : at + CHECKSUM_NBYTES]

    def check(self, job: ReadJob) -> None:
        """Give a finished read an error when its bytes are not what was recorded; each expert once."""
        key = job.key
        if job.error is not None or key in self._seen:
            return
        assert isinstance(key, ExpertKey)
        for number, run in enumerate(runs_of(self._layout, key)):
            # up to what is needed: the last page of a file may be short, and what follows it in a row is left over
            data = job.buffer[run.dest : run.dest + run.need_nbytes]
            found = blake3(data).digest(length=CHECKSUM_NBYTES)
            wanted = self._wanted(key, number)
            if found != wanted:
                job.error = self._error(key, number, run.need_nbytes, found, wanted)
                return
        self._seen.add(key)

    def _error(
        self, key: ExpertKey, number: int, nbytes: int, found: bytes, wanted: bytes
    ) -> VerificationError:
        ways: Sequence[Sequence[Span]]
        if self._copies is None:
            files, ways = self._layout.files, (self._layout.spans(key),)
        else:
            files, ways = self._copies.files, self._copies.copies(key)
        places = []
        for way in ways:
            spans = way if self._is_packed else way[number : number + 1]
            places.append(" and ".join(f"{files[s.file_idx]} at byte {s.offset:,}" for s in spans))
        stage, again = ("repack", "repack") if self._is_packed else ("checksums", "download")
        mend = f"then force=[{again}]"
        if self._copies is not None and not self._is_packed:
            mend += ", or force=[mirror] where it finds nothing: a copy is damaged"
        return VerificationError(
            f"layer {key.layer}, expert {key.expert} came from {' or '.join(places)} with wrong bytes: the checksum of "
            f"{nbytes:,} bytes is {found.hex()}, {stage} recorded {wanted.hex()}",
            f"see the kernel log (dmesg); run stages=[spot_check] spot_check.experts=all, {mend}",
        )


class TimedArrivals(Protocol):
    """Finished reads that can be waited for for some time: a `SimpleQueue`, or a `ChildReader`."""

    def get(self, *, timeout: float) -> ReadJob:
        """Raise queue.Empty when nothing has come for `timeout` seconds."""


def next_arrival(arrivals: TimedArrivals, limit_s: float | None = None) -> ReadJob:
    """Wait for a read, however long it takes; say so every `SILENT_S` in which nothing comes.

    limit_s: raise DeviceError when nothing has come for that long.
    """
    started = time.monotonic()
    while True:
        left = SILENT_S if limit_s is None else started + limit_s - time.monotonic()
        try:
            return arrivals.get(timeout=max(0.0, min(SILENT_S, left)))
        except Empty:
            if left <= SILENT_S and limit_s is not None:
                raise DeviceError(
                    f"the drive has given nothing for {limit_s:g} s, which is as long as the GPU waits with "
                    "hw.graphs=token",
                    "see the kernel log (dmesg), raise hw.graph_limit_s, or set hw.graphs=true, which waits",
                ) from None
            waited = format_duration(time.monotonic() - started)
            log.warning("the drive has given nothing for %s: still waiting (see dmesg)", waited)
