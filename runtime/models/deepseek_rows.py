"""Engram rows from the drive: asked for when a token is known, needed when its layer comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from conf.schema import DriveConfig
from runtime.experts.reader import DirectReader
from runtime.models.deepseek_engram import EngramTable, dequantize_rows
from runtime.rows import RowReader, RowRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Rows of one layer on their way."""

    ids: Sequence[int]
    values: RowRequest
    scales: RowRequest


class EngramReader:
    """The tables of all Engram layers, each as values and scales far apart in one file."""

    def __init__(
        self,
        layers: Sequence[int],
        tables: Sequence[EngramTable],
        config: DriveConfig,
        cache_rows: int,
        conversations: int = 1,
        limit_s: float | None = None,
    ) -> None:
        """cache_rows: kept in RAM, of each table.  conversations: that may each wait for rows.

        limit_s: as for `RowReader`.
        """
        self._readers: dict[int, tuple[RowReader, RowReader]] = {}
        for layer, table in zip(layers, tables, strict=True):
            files = sorted({part.file for part in (*table.values.parts, *table.scales.parts)})
            values, scales = (
                RowReader(rows, DirectReader(files, config), cache_rows, limit_s)
                for rows in (table.values, table.scales)
            )
            self._readers[layer] = (values, scales)
        # each conversation waits for one request; what others gave up in the meantime goes when room is short
        self._requests: dict[int, deque[_Asked]] = {
            layer: deque(maxlen=2 * conversations - 1) for layer in layers
        }

    @property
    def read_nbytes(self) -> int:
        return sum(reader.read_nbytes for pair in self._readers.values() for reader in pair)

    @property
    def wait_ns(self) -> int:
        return sum(reader.wait_ns for pair in self._readers.values() for reader in pair)

    def request(self, ids: Sequence[Sequence[int]]) -> None:
        """Start reading: for each Engram layer its row ids, token-major."""
        for layer, layer_ids in zip(self._readers, ids, strict=True):
            values, scales = self._readers[layer]
            asked = _Asked(layer_ids, values.request(layer_ids), scales.request(layer_ids))
            self._requests[layer].append(asked)

    def collect(self, layer: int, num_tokens: int, ids: Sequence[int] | None = None) -> Tensor:
        """Wait for a layer's rows: [num_tokens, rows per token * row width] bf16. Raises the reader's error.

        ids: the very object that was asked with; None: what was asked for last.
        """
        values, scales = self._readers[layer]
        asked = self._requests[layer]
        found = asked[-1] if ids is None else next(a for a in asked if a.ids is ids)
        asked.remove(found)
        rows = dequantize_rows(values.collect(found.values), scales.collect(found.scales))
        return rows.view(num_tokens, -1)

    def close(self) -> None:
        for pair in self._readers.values():
            for reader in pair:
                reader.close()
