"""Every byte of every extent, whatever the window, the pieces, the file's size and the reads that came back short."""

import os
import random
import tempfile
from functools import partial
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conf.schema import DirectIo, DriveConfig
from runtime.checkpoint import Extent
from runtime.experts.arena import HostArena, shared_arena
from runtime.experts.child_reader import ChildReader
from runtime.experts.layout import ExpertKey, aligned_spans
from runtime.experts.reader import DirectReader
from runtime.units import PAGE_NBYTES
from tests.faulty_drives import ChildDrive


def short_reads(seed, least):
    """Return a preadv that gives back fewer bytes than asked for, and noise behind them."""
    rng = random.Random(seed)

    def preadv(fd, buffers, offset):
        (buffer,) = buffers
        got = os.preadv(fd, [buffer], offset)
        told = min(got, rng.randint(least, least + 2 * PAGE_NBYTES))
        buffer[told:] = b"\xa5" * (len(buffer) - told)
        return told

    return preadv


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(1, 12 * PAGE_NBYTES), min_size=1, max_size=3))
    records = []
    for _ in range(draw(st.integers(1, 6))):
        record = []
        for _ in range(draw(st.integers(1, 3))):
            file = draw(st.integers(0, len(sizes) - 1))
            start = draw(st.integers(0, sizes[file] - 1))
            is_last = draw(st.booleans())  # up to the end of the file: the last page is short
            end = sizes[file] if is_last else draw(st.integers(start + 1, sizes[file]))
            record.append((file, start, end))
        records.append(record)
    return sizes, records


any_read = given(
    case=cases(),
    window=st.integers(1, 4),
    pieces=st.integers(1, 8),
    piece_kib=st.sampled_from([4, 4, 4, 10, 128]),
    direct=st.sampled_from([DirectIo.auto, DirectIo.buffered]),
    is_short=st.booleans(),
    seed=st.integers(0, 2**32),
)


@any_read
@settings(max_examples=60, deadline=None)
def test_bytes_are_exact(case, window, pieces, piece_kib, direct, is_short, seed):
    def open_reader(files, _folder, least):
        preadv = short_reads(seed, least) if is_short else os.preadv
        return DirectReader(files, DriveConfig(direct, window, pieces, piece_kib), preadv)

    check_bytes(case, direct, seed, open_reader)


@any_read
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
def test_bytes_of_a_reader_process_are_exact(
    case, window, pieces, piece_kib, direct, is_short, seed
):
    def open_reader(files, folder, least):
        drive = ChildDrive(folder, short_nbytes=least if is_short else None)
        return drive.open_reader(files, DriveConfig(direct, window, pieces, piece_kib))

    check_bytes(case, direct, seed, open_reader)


def check_bytes(case, direct, seed, open_reader):
    sizes, records = case
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(sizes))]
        contents = [rng.randbytes(size) for size in sizes]
        for path, content in zip(files, contents, strict=True):
            path.write_bytes(content)
        spans = [
            aligned_spans([(f, Extent(files[f], a, b - a)) for f, a, b in record])
            for record in records
        ]
        # a direct read gives at least a page unless the file ends; a buffered one may give any number of bytes
        reader = open_reader(files, folder, PAGE_NBYTES if direct is DirectIo.auto else 1)
        make_arena = HostArena
        if isinstance(reader, ChildReader):
            make_arena = partial(shared_arena, reader)
        arena = make_arena(len(records), max(s[-1].dest + s[-1].nbytes for s in spans))
        jobs = [
            reader.submit(ExpertKey(0, row), spans[row], arena.view(row), rng.random() < 0.5)
            for row in range(len(records))
        ]
        for job in jobs:
            reader.wait(job)
        reader.close()
    for row, record in enumerate(records):
        for span, (file, start, end) in zip(spans[row], record, strict=True):
            at = span.dest + start - span.offset
            assert arena.view(row)[at : at + end - start] == contents[file][start:end]
