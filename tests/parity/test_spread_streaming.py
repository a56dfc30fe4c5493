"""Experts from two or three drives in every mode, of which some fail, stall or are slow: the same logits."""

import errno
import logging
import os
import random
import threading
import time

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conf.schema import DirectIo, DriveConfig
from runtime.errors import UserError, VerificationError
from runtime.experts import spread_reader
from runtime.experts.checks import Checksums
from runtime.experts.layout import ExpertKey
from runtime.experts.plain import PlainExperts
from runtime.experts.reader import ReadError
from runtime.experts.spread import open_pack, spare_rows
from runtime.experts.spread_reader import SpreadReader
from runtime.experts.streamer import ExpertStreamer
from runtime.units import GIB, PAGE_NBYTES
from tests.parity.test_streaming import SCRIPTS, run_script

TOP_K, EVERYTHING = 6, 8 * 64
RECORD_GIB = 24576 / GIB
MODES = {  # name -> spread, what each drive is told
    "stripe": ("stripe", [{"rate_gib_s": 4.1}, {"rate_gib_s": 2.0}]),
    "stripe of three, one small": ("stripe", [{}, {"limit_gib": 90 * RECORD_GIB}, {}]),
    "split": ("split", [{"share": 2}, {"share": 1}]),
    "split over three": ("split", [{}, {}, {}]),
    "mirror": ("mirror", [{}, {}]),
    "mirror of three, two small": (
        "mirror",
        [{}, {"limit_gib": 200 * RECORD_GIB}, {"limit_gib": 400 * RECORD_GIB}],
    ),
}


@pytest.fixture(scope="module")
def packs(make_files, tmp_path_factory):
    """Return a function: name of a mode -> config overrides and files, made once."""
    made = {}

    def get(name):
        if name not in made:
            spread, drives = MODES[name]
            root = tmp_path_factory.mktemp("drives")
            told = []
            for i, drive in enumerate(drives):
                (root / str(i)).mkdir()
                told.append({"folder": str(root / str(i)), **drive})
            overrides = {"hw.drives": told, "hw.spread": spread}
            made[name] = overrides, make_files(**overrides)
        return made[name]

    return get


@pytest.fixture(scope="module")
def wanted(resident_engine, heldout_tokens):
    model = resident_engine.model
    return {script: run_script(model, script, heldout_tokens) for script in SCRIPTS}


class Faulty:
    """A `preadv` that is late and short at random, and from a read on has a fault on one drive's file."""

    def __init__(self, seed, file, first, fault):
        self.random, self.file, self.first, self.fault = (
            random.Random(seed),
            str(file),
            first,
            fault,
        )
        self.reads = 0

    def __call__(self, fd, buffers, offset):
        time.sleep(self.random.random() / 1e4)
        (buffer,) = buffers
        if len(buffer) > PAGE_NBYTES and self.random.random() < 0.1:
            buffer = buffer[: self.random.randrange(1, len(buffer) // PAGE_NBYTES) * PAGE_NBYTES]
        if os.readlink(f"/proc/self/fd/{fd}") == self.file:
            self.reads += 1
            if self.reads > self.first:
                return self.fault(fd, buffer, offset)
        return os.preadv(fd, [buffer], offset)


def honest(fd, buffer, offset):
    return os.preadv(fd, [buffer], offset)


def eio(_fd, _buffer, _offset):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def gone(_fd, _buffer, _offset):
    raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))


def warm_up(streamer, seed, count, cache_rows):
    keys = [ExpertKey(layer, e) for layer in range(8) for e in range(64)]
    streamer.warm_up(random.Random(seed).sample(keys, count), cache_rows - TOP_K)


def stream(model, streamer, prefetch, run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "experts", streamer)
        patch.setattr(model, "num_guesses", prefetch)
        return run(model)


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(
    mode=st.sampled_from(sorted(MODES)),
    cache_rows=st.sampled_from([TOP_K, TOP_K + 1, 48, EVERYTHING]),
    sweep_rows=st.sampled_from([1, 3, 40]),
    prefetch=st.integers(0, 3),
    window=st.integers(1, 3),
    pieces=st.integers(1, 6),
    direct=st.sampled_from([DirectIo.auto, DirectIo.buffered]),
    rates=st.lists(st.sampled_from([0.0, 0.0, 1.0, 5.0]), min_size=3, max_size=3),
    fault=st.sampled_from([honest, eio, gone]),
    first=st.integers(0, 300),
    seed=st.integers(0, 2**32),
    script=st.sampled_from(SCRIPTS),
    num_warm=st.sampled_from([0, 20, EVERYTHING]),
)
def test_any_setting(
    resident_engine, packs, heldout_tokens, wanted,
    mode, cache_rows, sweep_rows, prefetch, window, pieces, direct, rates, fault, first, seed, script, num_warm,
):  # fmt: skip
    """Of mirrors one drive fails at any read; of the others none: they have a test of their own."""
    _, files = packs(mode)
    layout = open_pack(files.pack)
    configs = [
        DriveConfig(direct=direct, window=window, pieces=pieces, piece_kib=4, simulate_gib_s=rate)
        for rate in rates[: len(layout.files)]
    ]
    fault = fault if mode == "mirror" else honest
    preadv = Faulty(seed, layout.files[seed % 2], first, fault)
    reader = SpreadReader(layout, configs, [None] * len(configs), preadv)
    streamer = ExpertStreamer(layout, reader, cache_rows, sweep_rows, prefetch)
    warm_up(streamer, seed, num_warm, cache_rows)
    try:
        found = stream(
            resident_engine.model,
            streamer,
            prefetch,
            lambda m: run_script(m, script, heldout_tokens),
        )
    finally:
        streamer.close()
    assert streamer.counters.read_nbytes + streamer.counters.warmed > 0
    assert torch.equal(found, wanted[script])


@pytest.mark.parametrize("mode", sorted(MODES))
def test_through_the_configuration(packs, make_config, heldout_tokens, wanted, mode):
    """As a run opens its engine; and every expert resident, and one at a time."""
    from runtime.engine import Engine

    overrides, files = packs(mode)
    script = SCRIPTS[0]
    verified = {"cache.ram_gib": 0.002, "cache.verify": True}
    for settings_ in ({"cache.ram_gib": 0.0}, verified, {"resident": True}):
        is_resident = settings_.pop("resident", False)
        engine = Engine.open(make_config(**overrides, **settings_), files, is_resident)
        try:
            assert torch.equal(run_script(engine.model, script, heldout_tokens), wanted[script])
            assert engine.is_direct or is_resident
        finally:
            engine.close()
    layout = open_pack(files.pack)
    count = len(layout.files)
    plain = PlainExperts(layout)
    reader = SpreadReader(layout, [DriveConfig()] * count, [None] * count)
    streamed = ExpertStreamer(layout, reader, 8, 1, 0)
    try:
        for layer in (0, 5, 7):
            wanted_records = dict(plain.fetch(layer, range(6)))
            for expert, record in streamed.fetch(layer, range(6)):
                assert torch.equal(record, wanted_records[expert])
    finally:
        streamed.close()
        plain.close()


@pytest.mark.parametrize(("mode", "named"), [("stripe", 1), ("split", 2), ("mirror", 2)])
def test_a_bit_that_turns_on_its_way(packs, mode, named):
    """The whole block has one checksum, in however many parts it is read; every file that it is from is named."""
    _, files = packs(mode)
    layout = open_pack(files.pack)

    def turned(fd, buffer, offset):
        got = os.preadv(fd, [buffer], offset)
        buffer[got // 2] ^= 16
        return got

    key = next(
        k for k in map(ExpertKey, [2] * 64, range(64)) if layout.copies(k)[-1][-1].file_idx == 1
    )
    preadv = Faulty(0, layout.files[1], 0, turned)
    # of copies the reads go to the faster drive
    reader = SpreadReader(layout, [DriveConfig()] * 2, [1.0, 1e5], preadv)
    checksums = Checksums.open(layout, copies=layout)
    streamer = ExpertStreamer(layout, reader, TOP_K, 1, 0, checksums=checksums)
    try:
        with pytest.raises(VerificationError, match=f"layer 2, expert {key.expert} came") as caught:
            list(streamer.fetch(2, [key.expert]))
        preadv.fault = honest
        ((_, record),) = streamer.fetch(2, [key.expert])
        wanted = PlainExperts(layout)
        ((_, right),) = wanted.fetch(2, [key.expert])
        assert torch.equal(record, right)
        wanted.close()
    finally:
        streamer.close()
    assert str(layout.files[1]) in caught.value.message
    assert sum(str(file) in caught.value.message for file in layout.files) == named


@pytest.mark.parametrize("mode", ["stripe", "split"])
@pytest.mark.parametrize("first", [0, 7, 60])
def test_a_striped_drive_that_vanishes_is_a_clear_error(
    resident_engine, packs, heldout_tokens, wanted, mode, first
):
    """What came before is right; when the drive is back, so is the answer."""
    _, files = packs(mode)
    layout = open_pack(files.pack)
    preadv = Faulty(0, layout.files[1], first, gone)
    reader = SpreadReader(layout, [DriveConfig()] * 2, [None] * 2, preadv)
    streamer = ExpertStreamer(layout, reader, TOP_K + 2, 8, 2)
    model, script = resident_engine.model, SCRIPTS[0]
    try:
        with pytest.raises(ReadError) as caught:
            stream(model, streamer, 2, lambda m: run_script(m, script, heldout_tokens))
        assert f"from {layout.files[1]} at byte" in caught.value.message
        assert "layer" in caught.value.message
        assert "the drive is gone" in caught.value.hint
        preadv.fault = honest
        streamer.forget()  # with reads that were on their way when the drive was gone
        found = stream(model, streamer, 2, lambda m: run_script(m, script, heldout_tokens))
        assert torch.equal(found, wanted[script])
    finally:
        streamer.close()


@pytest.mark.parametrize("first", [0, 11, 90])
@pytest.mark.parametrize("cache_rows", [TOP_K + 2, EVERYTHING])
@pytest.mark.parametrize("num_warm", [0, EVERYTHING])
def test_a_mirror_that_stalls_and_wakes_up_with_wrong_bytes(
    resident_engine, packs, make_config, heldout_tokens, wanted, monkeypatch, caplog, first, cache_rows, num_warm
):  # fmt: skip
    """Reads that were given up write garbage in the end: into no row that is in use, now or from the cache later."""
    monkeypatch.setattr(spread_reader, "STALL_S", 0.1)
    overrides, files = packs("mirror")
    layout = open_pack(files.pack)
    gate, stuck, late = threading.Event(), [], []

    def stall(_fd, buffer, _offset):
        stuck.append(1)
        gate.wait(60)
        buffer[:] = b"\xa5" * len(buffer)
        late.append(1)
        return len(buffer)

    config = DriveConfig(window=2, pieces=3, piece_kib=4)
    preadv = Faulty(first, layout.files[0], first, stall)
    reader = SpreadReader(layout, [config] * 2, [None] * 2, preadv)
    spares = spare_rows(layout, make_config(**overrides).hw, layout.record_nbytes)
    checksums = Checksums.open(layout, copies=layout)
    streamer = ExpertStreamer(
        layout, reader, cache_rows, 3, 2, checksums=checksums, spare_rows=spares
    )
    warm_up(streamer, first, num_warm, cache_rows)
    model, script = resident_engine.model, SCRIPTS[2]
    try:
        found = stream(model, streamer, 2, lambda m: run_script(m, script, heldout_tokens))
        assert torch.equal(found, wanted[script])
        assert "drive 0 of hw.drives" in caplog.text
        assert stuck
        gate.set()
        while len(late) < len(stuck):
            time.sleep(0.01)
        again = stream(model, streamer, 2, lambda m: run_script(m, script, heldout_tokens))
        assert torch.equal(again, wanted[script])
    finally:
        gate.set()
        streamer.close()


def test_a_mirror_without_one_drive_goes_on_with_a_warning(
    packs, make_config, heldout_tokens, wanted, caplog
):
    from runtime.engine import Engine

    overrides, files = packs("mirror")
    script = SCRIPTS[0]
    for number, drive in enumerate(overrides["hw.drives"]):
        folder = drive["folder"]
        os.rename(folder, f"{folder}-unplugged")
        caplog.clear()
        try:
            engine = Engine.open(make_config(**overrides, **{"cache.ram_gib": 0.0}), files)
            try:
                assert torch.equal(run_script(engine.model, script, heldout_tokens), wanted[script])
            finally:
                engine.close()
        finally:
            os.rename(f"{folder}-unplugged", folder)
        (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert f"drive {number} of hw.drives ({folder}/" in said
        assert "is not there" in said


@pytest.mark.parametrize("mode", ["stripe", "split", "mirror of three, two small"])
def test_a_drive_that_is_needed_and_missing_is_refused_with_how_to_mend(packs, make_config, mode):
    from runtime.engine import Engine

    overrides, files = packs(mode)
    needed = overrides["hw.drives"][:2] if mode != "stripe" else overrides["hw.drives"][1:]
    if mode.startswith("mirror"):
        needed = overrides["hw.drives"]  # all three
    for drive in needed:
        os.rename(drive["folder"], f"{drive['folder']}-unplugged")
    try:
        with pytest.raises(UserError, match=r"drive \d of hw\.drives .* is needed") as caught:
            Engine.open(make_config(**overrides), files)
    finally:
        for drive in needed:
            os.rename(f"{drive['folder']}-unplugged", drive["folder"])
    assert "connect and mount it" in caught.value.hint
