"""The experts of one token on the CPU beside a GPU, per family: what a segment hands over, and who computes.

By Numba where it is installed, else by the definitions in plain torch, many times slower.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import reference, reference_deepseek
from runtime.experts.layout import ExpertKey

log = logging.getLogger(__name__)

OpenExpert = Callable[[ExpertKey, Tensor], tuple[Any, Any, Any]]


def compiled_kernels() -> Any | None:
    """Return `kernels.cpu_experts`; without Numba None, and a warning."""
    try:
        return importlib.import_module("kernels.cpu_experts")
    except ImportError as error:
        log.warning(
            "experts on the CPU are computed by plain torch, many times slower than compiled (%s): "
            "pip install '.[cpu]'",
            error,
        )
        return None


def _pinned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    host = torch.zeros(shape, dtype=dtype)
    return host.pin_memory() if device.type == "cuda" else host


class _Threads:
    """Threads of whoever computes."""

    def __init__(self, kernels: Any | None) -> None:
        self._kernels = kernels

    def set_threads(self, count: int) -> int:
        if self._kernels is None:
            return torch.get_num_threads()
        return int(self._kernels.set_threads(count))


class Nvfp4Compute(_Threads):
    """NVFP4 experts with activations as they are, of Qwen."""

    def __init__(
        self, scales: Tensor, top_k: int, hidden: int, intermediate: int, dtype: torch.dtype,
        device: torch.device, kernels: Any | None,
    ) -> None:  # fmt: skip
        """scales: [L, E, 3] fp32, global scales in RAM.  dtype: of hidden states on the device.

        kernels: `kernels.cpu_experts`, or None for plain torch.
        """
        super().__init__(kernels)
        self._scales, self._intermediate = scales, intermediate
        self.x = _pinned(1, hidden, dtype=dtype, device=device)  # a segment fills it with the route
        # numpy views of what is computed with: each torch call would cost some of the microseconds that are to be won
        self._x32, self._inner = torch.empty(1, hidden), np.empty((top_k, intermediate), np.float32)
        self._x_view, self._scales_view = self._x32[0].numpy(), scales.numpy()

    def receive(self, x: Tensor) -> None:
        """Launch the copy of an expert block's input x [1, H]."""
        self.x.copy_(x, non_blocking=True)

    def run(
        self, layer: int, experts: Sequence[int], records: Sequence[Tensor], places: Sequence[int], out: Tensor
    ) -> None:  # fmt: skip
        del places
        self._x32.copy_(self.x)
        if self._kernels is None:
            for row, expert, record in zip(out, experts, records, strict=False):
                own = self._scales[layer, expert]
                row.copy_(
                    reference.nvfp4_swiglu_expert(self._x32, record, own, self._intermediate)[0]
                )
            return
        table = np.array([record.data_ptr() for record in records])
        scales = self._scales_view[layer, list(experts)]
        self._kernels.nvfp4_experts(self._x_view, table, scales, self._inner, out.numpy())


class Mxfp4Compute(_Threads):
    """MXFP4 experts with FP8 activations, of DeepSeek: rounded where the release rounds."""

    def __init__(
        self, top_k: int, hidden: int, intermediate: int, limit: float, device: torch.device,
        offsets: Callable[[ExpertKey], tuple[int, int]], open_expert: OpenExpert, kernels: Any | None,
    ) -> None:  # fmt: skip
        """offsets: where an expert's codes and scales start in its record.  open_expert: cuts it into matrices.

        limit: of gate and up.  kernels: `kernels.cpu_experts`, or None for plain torch.
        """
        super().__init__(kernels)
        self._offsets, self._open, self._limit = offsets, open_expert, limit
        self.x = _pinned(hidden, dtype=torch.bfloat16, device=device)
        self.weights = _pinned(top_k, dtype=torch.float32, device=device)
        self._x32, self._inner = torch.empty(hidden), np.empty((top_k, intermediate), np.float32)
        self._x_view, self._weights_view = self._x32.numpy(), self.weights.numpy()

    def receive(self, x: Tensor, weights: Tensor) -> None:
        """Launch the copies of x [H], rounded as activations are, and the route's weights [k] by ascending expert."""
        self.x.copy_(x, non_blocking=True)
        self.weights.copy_(weights, non_blocking=True)

    def run(
        self, layer: int, experts: Sequence[int], records: Sequence[Tensor], places: Sequence[int], out: Tensor
    ) -> None:  # fmt: skip
        keys = [ExpertKey(layer, expert) for expert in experts]
        if self._kernels is None:
            x = self.x.unsqueeze(0)
            for row, place, key, record in zip(out, places, keys, records, strict=False):
                matrices, weight = self._open(key, record), self.weights[place].view(1, 1)
                row.copy_(reference_deepseek.swiglu_expert(x, *matrices, self._limit, weight)[0])
            return
        self._x32.copy_(self.x)
        table = np.array(
            [
                [record.data_ptr() + start for start in self._offsets(key)]
                for key, record in zip(keys, records, strict=True)
            ]
        )
        weights = self._weights_view[list(places)]
        self._kernels.mxfp4_experts(
            self._x_view, table, weights, self._inner, out.numpy(), self._limit
        )
