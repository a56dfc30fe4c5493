"""Numba, imported so that it may use all cores: it counts those that the importing thread may run on.

An extra (`pip install '.[cpu]'`): import this module only where it may be missing.
"""

# ruff: noqa: E402 - everything is imported behind the first import of Numba
from __future__ import annotations

import importlib
import os
import sys


def _import_numba() -> None:
    """Import it where every core counts: a thread that loads a model may be held to a few."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the kernel leaves out what is not ours
    try:
        importlib.import_module("numba")
    finally:
        os.sched_setaffinity(0, before)


if "numba" not in sys.modules:
    _import_numba()

import numba as numba
from numba import carray as carray
from numba import float32 as float32
from numba import int64 as int64
from numba import njit as njit
from numba import prange as prange
from numba import types as types
from numba import uint32 as uint32
from numba.core import cgutils as cgutils
from numba.extending import intrinsic as intrinsic
