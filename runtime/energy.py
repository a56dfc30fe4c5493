"""How much energy a GPU has used, by its driver's own counter (NVML). Knows no model."""

from __future__ import annotations

import ctypes
import logging
from typing import Any, Self

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver


class GpuEnergy:
    """Joules of one whole board since its driver was loaded; the counter moves several times a second."""

    def __init__(self, library: Any, uuid: str) -> None:
        """library: NVML as ctypes gives it.  uuid: `GPU-...`.  Raises OSError when the board has no such counter."""
        self._library = library
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._handle))
        self.joules()

    @classmethod
    def open(cls) -> Self | None:
        """Return the counter of the GPU that torch computes on; None without a GPU or (said once) without a counter."""
        import torch

        if not torch.cuda.is_initialized():
            return None
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        try:
            return cls(ctypes.CDLL(LIBRARY), f"GPU-{properties.uuid}")
        except (OSError, AttributeError) as error:
            log.warning("no joules: the GPU's energy counter cannot be read (%s)", error)
            return None

    def joules(self) -> float:
        """Return the counter now."""
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _ask(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"{name} gave {status}")
