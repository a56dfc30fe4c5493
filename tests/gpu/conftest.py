"""What tests on a GPU share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def many_threads():
    """For engines that set the number of threads themselves: what comes after has one again."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
