"""Engram rows from the drive: asked for when a token is known, needed when its layer comes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from conf.schema import DriveConfig
from runtime.experts.reader import DirectReader
from runtime.models.deepseek_engram import EngramTable, dequantize_rows
from runtime.rows import RowReader, RowRequest


class EngramReader:
    """The tables of all Engram layers, each as values and scales far apart in one file."""

    def __init__(
        self,
        layers: Sequence[int],
        tables: Sequence[EngramTable],
        config: DriveConfig,
        cache_rows: int,
    ) -> None:
        """cache_rows: kept in RAM, of each table."""
        self._readers: dict[int, tuple[RowReader, RowReader]] = {}
        for layer, table in zip(layers, tables, strict=True):
            files = sorted({part.file for part in (*table.values.parts, *table.scales.parts)})
            values, scales = (
                RowReader(rows, DirectReader(files, config), cache_rows)
                for rows in (table.values, table.scales)
            )
            self._readers[layer] = (values, scales)
        self._requests: dict[int, tuple[RowRequest, RowRequest]] = {}

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
            self._requests[layer] = (values.request(layer_ids), scales.request(layer_ids))

    def collect(self, layer: int, num_tokens: int) -> Tensor:
        """Wait for a layer's rows: [num_tokens, rows per token * row width] bf16. Raises the reader's error."""
        values, scales = self._readers[layer]
        of_values, of_scales = self._requests.pop(layer)
        rows = dequantize_rows(values.collect(of_values), scales.collect(of_scales))
        return rows.view(num_tokens, -1)

    def close(self) -> None:
        for pair in self._readers.values():
            for reader in pair:
                reader.close()
