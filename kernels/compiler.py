"""Numba, imported so that it may use all cores: it counts those that the importing thread may run on.

An extra (`pip install '.[cpu]'`): import this module only where it may be missing.
"""

from __future__ import annotations

import os
import sys

if "numba" not in sys.modules:  # a thread that loads a model may be held to a few cores
    os.environ.setdefault("NUMBA_NUM_THREADS", str(os.cpu_count()))

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
