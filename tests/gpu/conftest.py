"""What tests on a GPU share."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture
def all_cores():
    """Half of the cores for products of the released width on the CPU: the other workers have one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    yield
    torch.set_num_threads(threads)
