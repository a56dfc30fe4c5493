"""What `doctor` finds, and what it found on this machine, kept beside the artifacts for `plan`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.drives import DriveRate

RECORD_NAME = "doctor.json"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    area: str
    what: str
    verdict: str  # ok, warn, bad
    value: str
    advice: str = ""


@dataclass(slots=True)
class Report:
    """All that was found; rates in GiB/s."""

    findings: list[Finding] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    grid: list[DriveRate] = field(default_factory=list)

    def add(self, area: str, what: str, verdict: str, value: str, advice: str = "") -> None:
        """Note a finding; `advice` says what to do about one that is not ok."""
        self.findings.append(Finding(area, what, verdict, value, advice))


def read_record(artifacts: Path) -> Mapping[str, Any]:
    """Return the rates that doctor measured on this machine (GiB/s), and `when`; empty without such a record."""
    try:
        record = json.loads((artifacts / RECORD_NAME).read_text())
        rates = record["rates"] | {"when": record["when"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return rates if record.get("host") == platform.node() else {}
