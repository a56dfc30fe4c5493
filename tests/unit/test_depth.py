"""How many records are read at once, and in how many pieces, where the config leaves it to their size."""

from __future__ import annotations

import pytest

from conf.schema import DriveConfig
from runtime.experts.schedule import Depth, depth_of
from runtime.units import MIB

MIN_PIECE = 128 * 1024


@pytest.mark.parametrize(
    ("record_nbytes", "window", "pieces"),
    [
        (0, 8, 1),  # rows of a table
        (24 * 1024, 8, 1),  # the bundled model's experts
        (MIB, 8, 1),
        (2_764_800, 7, 1),  # Qwen3.8-Flash-Next's
        (4 * MIB, 4, 2),
        (18_800_640, 2, 4),  # DeepSeek-V4.1-Flash's
        (512 * MIB, 2, 4),
    ],
)
def test_small_records_are_read_whole_and_large_ones_in_pieces(record_nbytes, window, pieces):
    assert depth_of(DriveConfig(), record_nbytes) == Depth(window, pieces, MIN_PIECE)


def test_several_drives_share_pieces():
    assert depth_of(DriveConfig(), 2_764_800, num_drives=2) == Depth(2, 4, MIN_PIECE)
    assert depth_of(DriveConfig(window=3, pieces=1), MIB, num_drives=2) == Depth(3, 1, MIN_PIECE)


def test_what_the_config_says_stands():
    assert depth_of(DriveConfig(window=3, pieces=5, piece_kib=8), MIB) == Depth(3, 5, 8192)
    assert depth_of(DriveConfig(window=3), 18_800_640) == Depth(3, 4, MIN_PIECE)
    assert depth_of(DriveConfig(pieces=4), MIB).num_threads == 32
