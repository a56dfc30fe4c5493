"""What all tests share: one compute thread, the bundled model, and memory that is never zero by luck."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault(
    "TRITON_INTERPRET", "1"
)  # counts only if set before a kernel module is imported

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
TINY_QWEN = ROOT / "runtime" / "bundled" / "tiny-qwen"

torch.set_num_threads(
    1
)  # tiny tensors: more threads only add overhead, and each worker has one core


@pytest.fixture(scope="session")
def tiny_qwen() -> Path:
    """The bundled checkpoint's folder: never written to."""
    return TINY_QWEN
