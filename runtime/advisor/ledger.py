"""Every law that was evaluated for an answer, each once, with inputs, units and result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.laws import Law
from runtime.quantities import MONEY


class Ledger:
    """Evaluates laws and remembers them as c1, c2, ..."""

    def __init__(self, laws: Mapping[str, Law], currency: str = "EUR") -> None:
        self._laws, self._currency = laws, currency
        self.entries: list[dict[str, Any]] = []
        self._seen: dict[tuple[Any, ...], str] = {}

    def reckoned_in(self, currency: str) -> Ledger:
        """Return a ledger over the same entries that writes money in another currency."""
        other = Ledger(self._laws, currency)
        other.entries, other._seen = self.entries, self._seen
        return other

    def compute(self, law_id: str, about: Sequence[str] = (), **inputs: float) -> tuple[float, str]:
        """Return (result in base units, reference of the calculation)."""
        law = self._laws[law_id]
        result = law(**inputs)
        key = (law_id, tuple(sorted(inputs.items())))
        if key not in self._seen:
            ref = f"c{len(self.entries) + 1}"
            self._seen[key] = ref
            self.entries.append(
                {
                    "ref": ref,
                    "law": law_id,
                    "inputs": {
                        name: {"value": value, "unit": self._unit(law.inputs[name])}
                        for name, value in inputs.items()
                    },
                    "result": {
                        "value": result if math.isfinite(result) else None,
                        "unit": self._unit(law.unit),
                    },
                    "for": list(about),
                }
            )
        return result, self._seen[key]

    def _unit(self, unit: str) -> str:
        return unit.replace(MONEY, self._currency)
