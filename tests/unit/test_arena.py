"""Pinning memory where the system grants less than is asked for: as far as it goes, and told."""

from __future__ import annotations

import logging
import os
from functools import partial

import pytest

from runtime.errors import UserError
from runtime.experts import arena as arenas
from runtime.experts.arena import HostArena
from runtime.experts.layout import PackedLayout
from runtime.experts.reader import DirectReader
from runtime.experts.streamer import ExpertStreamer

PAGE = 4096


class Granting:
    """A system that pins up to `nbytes` in all, and checks what it is asked for."""

    def __init__(self, nbytes: int) -> None:
        self.limit, self.pinned, self.checks = nbytes, {}, 0

    @property
    def used(self) -> int:
        return sum(self.pinned.values())

    def register(self, address: int, nbytes: int) -> bool:
        assert address % PAGE == 0
        assert nbytes % PAGE == 0
        for start, size in self.pinned.items():
            assert address + nbytes <= start or start + size <= address, "pinned twice"
        if self.used + nbytes > self.limit:
            return False
        self.pinned[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.pinned[address]

    def check(self) -> None:
        self.checks += 1


def test_all_at_once_where_it_is_granted():
    system = Granting(2**30)
    arena = HostArena(100, 3 * PAGE, system)
    assert arena.pin_rows() == 100
    assert list(system.pinned.values()) == [300 * PAGE]
    assert not system.checks, "nothing was refused"
    arena.close()
    assert not system.pinned


@pytest.mark.parametrize("num_rows", [1, 2, 63, 64, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("is_shared", [False, True])
def test_as_far_as_it_goes(num_rows, share, is_shared):
    row_nbytes = 2 * PAGE
    system = Granting(int(share * num_rows * row_nbytes))
    fd = os.memfd_create("arena")
    arena = HostArena(num_rows, row_nbytes, system, shared_fd=fd if is_shared else -1)
    os.close(fd)
    arena.rows.fill_(7)
    rows = arena.pin_rows()
    assert system.checks == 1
    assert system.used == rows * row_nbytes
    # one row of every registration's end could span two: none does
    starts = {(address - arena.rows.data_ptr()) % row_nbytes for address in system.pinned}
    assert starts <= {0}
    granted = system.limit // row_nbytes
    step = max(1, num_rows // arenas.PIN_STEPS)
    assert granted - 2 * step - 1 <= rows <= granted
    if granted > 1:
        assert rows < granted or num_rows < arenas.PIN_STEPS, "something is left for CUDA itself"
    assert (arena.rows[:rows] == 7).all()
    assert (arena.rows[rows:] == 0).all(), "what is not pinned is given back to the system"
    arena.close()
    assert not system.pinned


def test_memory_that_must_be_pinned_whole(monkeypatch):
    system = Granting(10 * PAGE)
    arena = HostArena(1, 20 * PAGE, system)
    with pytest.raises(UserError, match=r"CUDA pins 0 B of the 80\.0 KiB"):
        arena.pin()
    assert not system.pinned


@pytest.fixture
def open_streamer(tiny_files, make_config):
    layout = PackedLayout.open(tiny_files.pack)
    made = []

    def open_it(system, cache_rows=40, sweep_rows=8, least_rows=8, spares=0) -> ExpertStreamer:
        reader = DirectReader(layout.files, make_config().hw.drive)
        streamer = ExpertStreamer(
            layout, reader, cache_rows, sweep_rows, 0, spare_rows=spares, least_rows=least_rows,
            make_arena=partial(HostArena, registrar=system),
        )  # fmt: skip
        made.append(streamer)
        return streamer

    yield open_it
    for streamer in made:
        streamer.close()


def read_some(streamer: ExpertStreamer) -> list[bytes]:
    """Return the bytes of a few tokens' experts and of a prompt's."""
    found = []
    for layer in (0, 1, 0, 2, 0):
        by_id = {e: bytes(record.numpy()) for e, record in streamer.fetch(layer, range(3, 9))}
        found += [by_id[e] for e in sorted(by_id)]
    found += [bytes(record.numpy()) for _, record in streamer.sweep(3, range(20))]
    return found


def test_a_cache_shrinks_to_what_may_be_pinned_and_no_byte_changes(
    open_streamer, caplog, fault_row
):
    whole = open_streamer(Granting(2**40))
    whole.pin()
    row_nbytes = whole.record_nbytes
    system = Granting(20 * row_nbytes)
    small = open_streamer(system)
    with caplog.at_level(logging.WARNING):
        small.pin()
    assert small.cache.num_rows + small.max_hold == system.used // row_nbytes
    assert 8 <= small.cache.num_rows < 40
    assert read_some(small) == read_some(whole)
    assert "instead of 40" in caplog.text
    told = caplog.records[0].getMessage()
    fault_row("less memory may be pinned than planned", told, "same bytes, smaller cache")


def test_staging_gives_way_before_the_route(open_streamer):
    streamer = open_streamer(Granting(13 * 24576))
    streamer.pin()
    assert streamer.cache.num_rows >= 8
    assert streamer.max_hold >= 1
    read_some(streamer)


def test_rows_to_spare_for_a_drive_that_stalls_are_pinned_too(open_streamer):
    system = Granting(20 * 24576)
    streamer = open_streamer(system, spares=5)
    streamer.pin()
    pinned = system.used // 24576
    assert streamer.cache.num_rows + streamer.max_hold + 5 == pinned
    assert streamer._spares == list(range(pinned - 5, pinned))
    read_some(streamer)
    whole = open_streamer(Granting(2**40), spares=5)
    whole.pin()
    assert whole.cache.num_rows == 40
    with pytest.raises(UserError, match="14 experts need"):
        open_streamer(Granting(13 * 24576), spares=5).pin()


def test_less_than_one_layers_route(open_streamer, fault_row):
    system = Granting(3 * 24576)
    with pytest.raises(UserError, match="9 experts need") as caught:
        open_streamer(system).pin()
    assert "ulimit -l" in caught.value.hint
    fault_row("hardly any memory may be pinned", caught.value.message, "nothing is started")
