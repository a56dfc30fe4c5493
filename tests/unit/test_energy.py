"""The energy counter, against a library that answers as NVML does."""

from __future__ import annotations

import pytest
import torch

from runtime.energy import GpuEnergy


class Nvml:
    """One board, whose counter is what the test says."""

    def __init__(self, millijoules: int, status: int = 0) -> None:
        self.millijoules, self.status, self.asked = millijoules, status, []

    def nvmlInit_v2(self) -> int:  # noqa: N802 - NVML's name
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:  # noqa: N802
        self.asked.append(uuid)
        handle._obj.value = 7
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, found) -> int:  # noqa: N802
        assert handle.value == 7
        found._obj.value = self.millijoules
        return self.status


def test_joules_of_the_right_board():
    library = Nvml(5_000)
    energy = GpuEnergy(library, "GPU-abc")
    assert library.asked == [b"GPU-abc"]
    assert energy.joules() == 5.0
    library.millijoules = 2**40 + 250
    assert energy.joules() == pytest.approx(2**40 / 1e3 + 0.25)


def test_a_board_without_a_counter():
    with pytest.raises(OSError, match="nvmlDeviceGetTotalEnergyConsumption gave 3"):
        GpuEnergy(Nvml(0, status=3), "GPU-abc")


def test_no_gpu_no_joules():
    if not torch.cuda.is_initialized():
        assert GpuEnergy.open() is None
