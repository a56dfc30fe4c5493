"""What `doctor` found on this machine, kept beside the artifacts for `plan`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD_NAME = "doctor.json"


def read_record(artifacts: Path) -> Mapping[str, Any]:
    """Return the rates that doctor measured on this machine (GiB/s), and `when`; empty without such a record."""
    try:
        record = json.loads((artifacts / RECORD_NAME).read_text())
        rates = record["rates"] | {"when": record["when"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return rates if record.get("host") == platform.node() else {}
