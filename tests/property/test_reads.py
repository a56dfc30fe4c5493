"""Every byte of every extent, whatever the window, the pieces, the file's size and the reads that came back short."""

import os
import random
import tempfile
from pathlib import Path
from queue import SimpleQueue

from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import DirectIo, DriveConfig
from runtime.checkpoint import Extent
from runtime.experts.arena import HostArena
from runtime.experts.layout import aligned_spans
from runtime.experts.reader import DirectReader
from runtime.units import PAGE_NBYTES


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


@given(
    case=cases(),
    window=st.integers(1, 4),
    pieces=st.integers(1, 8),
    piece_kib=st.sampled_from([4, 4, 4, 10, 128]),
    direct=st.sampled_from([DirectIo.auto, DirectIo.buffered]),
    is_short=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_bytes_are_exact(case, window, pieces, piece_kib, direct, is_short, seed):
    sizes, records = case
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(sizes))]
        contents = [rng.randbytes(size) for size in sizes]
        for path, content in zip(files, contents, strict=True):
            path.write_bytes(content)
        # a direct read gives at least a page unless the file ends; a buffered one may give any number of bytes
        least = PAGE_NBYTES if direct is DirectIo.auto else 1
        preadv = short_reads(seed, least) if is_short else os.preadv
        reader = DirectReader(files, DriveConfig(direct, window, pieces, piece_kib), preadv)
        done = SimpleQueue()
        jobs = []
        for record in records:
            spans = aligned_spans([(f, Extent(files[f], a, b - a)) for f, a, b in record])
            arena = HostArena(1, spans[-1].dest + spans[-1].nbytes)
            is_required = rng.random() < 0.5
            job = reader.submit(str(record), spans, arena.view(0), is_required, done.put)
            jobs.append((job, arena, spans, record))
        for _ in jobs:
            done.get(timeout=60)
        reader.close()
    for job, arena, spans, record in jobs:
        assert job.error is None
        for span, (file, start, end) in zip(spans, record, strict=True):
            at = span.dest + start - span.offset
            assert arena.view(0)[at : at + end - start] == contents[file][start:end]
