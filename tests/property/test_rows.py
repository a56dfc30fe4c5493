"""Rows of a table on the drive against the file's bytes, and each page read at most once per request."""

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import DirectIo, DriveConfig
from runtime.checkpoint import Extent
from runtime.experts.reader import DirectReader, ReadError
from runtime.rows import RowReader, RowTable
from runtime.units import PAGE_NBYTES, align_up

directs = st.sampled_from([DirectIo.auto, DirectIo.buffered])


class Table:
    """Parts in any order over one or two files, with other bytes before, between and behind them."""

    def __init__(self, folder, rng, num_parts, rows_per_part, row_nbytes, num_files):
        self.rows = {}
        order = rng.sample(range(num_parts), num_parts)  # of storage
        contents = [bytearray(rng.randbytes(rng.randint(0, 5000))) for _ in range(num_files)]
        places = {}
        for part in order:
            file = rng.randrange(num_files)
            places[part] = (file, len(contents[file]))
            for within in range(rows_per_part):
                row = rng.randbytes(row_nbytes)
                self.rows[part * rows_per_part + within] = row
                contents[file] += row
            contents[file] += rng.randbytes(rng.choice((0, 0, 1, 9000, 50_000)))
        self.paths = [Path(folder) / f"{i}" for i in range(num_files)]
        for path, content in zip(self.paths, contents, strict=True):
            path.write_bytes(content)
        nbytes = rows_per_part * row_nbytes
        extents = [Extent(self.paths[places[p][0]], places[p][1], nbytes) for p in range(num_parts)]
        self.table = RowTable(tuple(extents), rows_per_part, row_nbytes)
        self.pages_read = []

    def preadv(self, fd, buffers, offset):
        (buffer,) = buffers
        assert offset % PAGE_NBYTES == len(buffer) % PAGE_NBYTES == 0
        inode = os.fstat(fd).st_ino
        self.pages_read += [
            (inode, page) for page in range(offset, offset + len(buffer), PAGE_NBYTES)
        ]
        return os.preadv(fd, buffers, offset)

    def pages_of(self, row):
        part, offset = self.table.locate(row)
        inode = self.table.parts[part].file.stat().st_ino
        first = offset // PAGE_NBYTES * PAGE_NBYTES
        last = align_up(offset + self.table.row_nbytes)
        return {(inode, page) for page in range(first, last, PAGE_NBYTES)}

    def open(self, cache_rows, config):
        files = sorted({part.file for part in self.table.parts})
        return RowReader(self.table, DirectReader(files, config, self.preadv), cache_rows)


@given(
    num_parts=st.integers(1, 5),
    rows_per_part=st.integers(1, 60),
    row_nbytes=st.sampled_from([1, 16, 160, 1000, 4096, 5001]),
    num_files=st.integers(1, 2),
    cache_rows=st.sampled_from([0, 1, 5, 8, 1000]),
    config=st.builds(DriveConfig, directs, st.integers(1, 2), piece_kib=st.just(4)),
    seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_rows_are_the_bytes_of_the_file(
    num_parts, rows_per_part, row_nbytes, num_files, cache_rows, config, seed
):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        made = Table(folder, rng, num_parts, rows_per_part, row_nbytes, num_files)
        rows = made.open(cache_rows, config)
        warm = []  # most recent last: what the cache must hold
        read_nbytes = 0
        for _ in range(6):
            # mostly close together: shared pages, small gaps, rows that were here before
            start, spread = rng.randrange(len(made.rows)), rng.choice((3, 12, 200))
            wanted = [
                min(start + rng.randrange(spread), len(made.rows) - 1)
                for _ in range(rng.randint(1, 12))
            ]
            made.pages_read.clear()
            got = rows.collect(rows.request(wanted))
            assert [bytes(row.tolist()) for row in got] == [made.rows[i] for i in wanted]
            assert len(set(made.pages_read)) == len(made.pages_read)
            cold = set(wanted) - set(warm)
            assert set(made.pages_read) >= set().union(*map(made.pages_of, cold))
            assert bool(made.pages_read) == bool(cold)  # all cached: the drive is left alone
            read_nbytes += len(made.pages_read) * PAGE_NBYTES
            assert rows.read_nbytes == read_nbytes
            for i in wanted:
                warm = [j for j in warm if j != i] + [i]
            warm = warm[max(0, len(warm) - cache_rows) :]
        rows.close()


@pytest.fixture
def made(tmp_path):
    return Table(tmp_path, random.Random(1), 3, 40, 160, 1)


@pytest.mark.parametrize("row", [-1, 120, 2**40])
def test_no_such_row(made, row):
    rows = made.open(0, DriveConfig())
    with pytest.raises(IndexError, match=f"row {row} of a table of 120"):
        rows.request([5, row])
    assert rows.collect(rows.request([119])).numpy().tobytes() == made.rows[119]  # the last one
    rows.close()


def test_requests_collected_in_another_order(made):
    """Two on their way at once: neither takes the other's arrival."""
    rows = made.open(4, DriveConfig())
    requests = [rows.request(ids) for ids in ([3, 4], [100, 3], [7])]
    for request in reversed(requests):
        got = rows.collect(request)
        assert [bytes(row.tolist()) for row in got] == [made.rows[i] for i in request.ids]
    rows.close()


def test_what_is_returned_is_a_copy(made):
    """The caller's writes do not reach the cache."""
    rows = made.open(10, DriveConfig())
    rows.collect(rows.request([1])).zero_()
    assert rows.collect(rows.request([1])).numpy().tobytes() == made.rows[1]
    rows.close()


def test_a_table_that_is_cut_short(made):
    rows = made.open(10, DriveConfig())
    os.truncate(made.paths[0], made.table.parts[0].offset)
    with pytest.raises(ReadError, match="table rows"):
        rows.collect(rows.request([0]))
    with pytest.raises(ReadError):  # nothing of the failed read was remembered
        rows.collect(rows.request([0]))
    rows.close()
