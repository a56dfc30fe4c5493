"""Keys and values of a block <-> bytes. Deterministic: fp32 arithmetic, half to even, the same bytes on every device.

A record holds, layer by layer: K codes, K scales, V codes, V scales. Letters: L layers, n tokens, H heads, D head_dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import divided

SMALLEST_SCALE = 2.0**-24  # the smallest fp16 number
NAMES = ("k8c_v8t", "k8t_v8t", "fp16", "fp32")


class Codec(NamedTuple):
    """How a store keeps keys and values."""

    name: str
    layers: int
    heads: int
    dim: int

    def payload_nbytes(self, tokens: int) -> int:
        """Return the bytes of a block's payload."""
        rows, values = tokens * self.heads, tokens * self.heads * self.dim
        per_layer = {
            "k8c_v8t": 2 * values + 2 * self.heads * self.dim + 2 * rows,
            "k8t_v8t": 2 * values + 4 * rows,
            "fp16": 4 * values,
            "fp32": 8 * values,
        }[self.name]
        return self.layers * per_layer

    def encode(self, keys: Tensor, values: Tensor) -> bytes:
        """keys, values: [L, n, H, D], any float dtype.  Returns the payload of one block."""
        raw: bytes = self.encode_blocks(keys, values, 1).cpu().numpy().tobytes()
        return raw

    def encode_blocks(self, keys: Tensor, values: Tensor, count: int) -> Tensor:
        """Encode blocks that follow each other, where they are.

        keys, values: [L, count * n, H, D], any float dtype.  Returns the payloads [count, nbytes] uint8.
        """
        keys, values = (x.unflatten(1, (count, -1)).transpose(0, 1) for x in (keys, values))
        if self.name in ("fp16", "fp32"):
            dtype = torch.float16 if self.name == "fp16" else torch.float32
            parts = [keys.to(dtype), values.to(dtype)]
        else:
            k_axis = 2 if self.name == "k8c_v8t" else 4
            parts = [*_quantize(keys.float(), k_axis), *_quantize(values.float(), 4)]
        flat = [p.contiguous().view(count, self.layers, -1).view(torch.uint8) for p in parts]
        return torch.cat(flat, dim=2).flatten(1)

    def decode(self, payload: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """payload: uint8, its first bytes are a block's.  Returns keys, values [L, n, H, D] fp32."""
        shape = (self.layers, tokens, self.heads, self.dim)
        nbytes = self.payload_nbytes(tokens)
        flat = payload[:nbytes].view(self.layers, -1)
        values = tokens * self.heads * self.dim
        if self.name in ("fp16", "fp32"):
            dtype = torch.float16 if self.name == "fp16" else torch.float32
            size = values * dtype.itemsize
            k, v = (
                part.contiguous().view(dtype).view(shape).float() for part in flat.split(size, 1)
            )
            return k, v
        k_scales = self.heads * self.dim if self.name == "k8c_v8t" else tokens * self.heads
        sizes = [values, 2 * k_scales, values, 2 * tokens * self.heads]
        k, ks, v, vs = (part.contiguous() for part in flat.split(sizes, 1))
        k_shape = (self.layers, 1, *shape[2:]) if self.name == "k8c_v8t" else (*shape[:3], 1)
        return (
            _restore(k, ks, shape, k_shape),
            _restore(v, vs, shape, (*shape[:3], 1)),
        )


def _quantize(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return symmetric int8 codes, and fp16 scales, one for each group along `axis`."""
    largest = x.abs().amax(axis, keepdim=True)
    scale = divided(largest, 127).half().clamp_min(SMALLEST_SCALE)
    codes = torch.round(x / scale.float()).clamp_(-127, 127).to(torch.int8)
    return codes, scale


def _restore(
    codes: Tensor, scales: Tensor, shape: tuple[int, ...], s_shape: tuple[int, ...]
) -> Tensor:
    return (
        codes.view(torch.int8).view(shape).float()
        * scales.view(torch.float16).view(s_shape).float()
    )
