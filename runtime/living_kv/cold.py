"""The cold tier: encoded blocks in RAM, most recently used ones, in front of the store on the drive."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.experts.arena import HostArena
from runtime.living_kv.codec import Codec
from runtime.living_kv.store import Store


class ColdBlocks:
    """Blocks of a store, decoded on demand where attention is: on a GPU encoded bytes cross the link, not numbers."""

    def __init__(
        self, store: Store, codec: Codec, ram_nbytes: int, device: torch.device | None = None
    ) -> None:
        """ram_nbytes: of encoded blocks that are kept; less than one block keeps none.  device: None is the CPU."""
        self.store, self.codec = store, codec
        self.device = device or torch.device("cpu")
        self.block = store.header.block
        payload = codec.payload_nbytes(self.block)
        self._rows = ram_nbytes // max(1, payload)
        self._arena = HostArena(self._rows, payload) if self._rows else None
        self._row_of: OrderedDict[int, int] = OrderedDict()  # least recently used first
        if self._arena is not None and self.device.type == "cuda":
            self._arena.pin()
        self.hits = self.reads = 0
        self.moved_nbytes = 0  # of encoded blocks, to the device

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that are set aside."""
        return self._arena.nbytes if self._arena else 0

    def put(self, number: int, payload: bytes) -> None:
        """Keep a block that was just encoded; it is served once the store has committed it."""
        if self._arena is not None:
            self._row(number).numpy()[: len(payload)] = np.frombuffer(payload, np.uint8)

    def close(self) -> None:
        """Give the RAM back."""
        if self._arena is not None:
            self._arena.close()

    def _row(self, number: int) -> Tensor:
        assert self._arena is not None
        if len(self._row_of) < self._rows:
            row = len(self._row_of)
        else:
            _, row = self._row_of.popitem(last=False)
        self._row_of[number] = row
        return self._arena.records[row]

    def read(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Return a block's keys and values [L, n, H, D] fp32; None where the bytes on the drive are wrong."""
        if number in self._row_of:
            self.hits += 1
            self._row_of.move_to_end(number)
            assert self._arena is not None
            return self._decoded(self._arena.records[self._row_of[number]])
        raw = self.store.read_block(number)
        if raw is None:
            return None
        self.reads += 1
        payload = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
        if self._arena is not None:
            used = self.codec.payload_nbytes(self.block)
            self._row(number)[:used] = payload[:used]
        return self._decoded(payload)

    def _decoded(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        nbytes = self.codec.payload_nbytes(self.block)
        self.moved_nbytes += nbytes
        return self.codec.decode(payload[:nbytes].to(self.device), self.block)

    def fetch(self, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values [L, n, H, D] fp32 on the device and positions [n] of token spans, ascending, each once.

        Tokens of damaged blocks and of the unfinished one are left out.
        """
        codec = self.codec
        empty = torch.zeros(codec.layers, 0, codec.heads, codec.dim, device=self.device)
        keys, values, places = [empty], [empty], [torch.zeros(0, dtype=torch.int64)]
        end = self.store.commit.blocks * self.block
        for number, rows in _rows_by_block(spans, self.block, end).items():
            found = self.read(number)
            if found is not None:
                at = torch.tensor(rows)
                keys.append(found[0][:, at.to(self.device)])
                values.append(found[1][:, at.to(self.device)])
                places.append(number * self.block + at)
        return torch.cat(keys, 1), torch.cat(values, 1), torch.cat(places)


def _rows_by_block(spans: Sequence[tuple[int, int]], block: int, end: int) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    at = 0
    for lo, hi in sorted(spans):
        for position in range(max(lo, at), min(hi, end)):
            out.setdefault(position // block, []).append(position % block)
        at = max(at, hi)
    return out
