"""What `doctor` found on this machine, kept beside the artifacts for `plan` and `advise`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD_NAME = "doctor.json"
STEADY = 0.15  # two measurements of one rate differ by less


def read_record(artifacts: Path) -> Mapping[str, Any]:
    """Return the rates that doctor measured on this machine (GiB/s), `when`, `unsteady` and the drive's `interface`.

    Empty without such a record.
    """
    record = _load(artifacts)
    if not record:
        return {}
    more = {"unsteady": record.get("unsteady", []), "interface": record.get("interface")}
    return {**record["rates"], "when": record["when"], **more}


def changes(
    artifacts: Path, model: str, rates: Mapping[str, float]
) -> dict[str, tuple[float, str]]:
    """Return the rates that differ by more than 15 % from the record of the same model: name -> (then, when)."""
    before = _load(artifacts)
    if not before or before.get("model") != model:
        return {}
    found = {}
    for name, rate in rates.items():
        then = before["rates"].get(name)
        if then and abs(rate - then) > STEADY * max(rate, then):
            found[name] = (float(then), str(before["when"]))
    return found


def _load(artifacts: Path) -> dict[str, Any]:
    """Return the whole record, empty where there is none of this machine."""
    try:
        record = json.loads((artifacts / RECORD_NAME).read_text())
        is_whole = isinstance(record["rates"], dict) and isinstance(record["when"], str)
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return record if is_whole and record.get("host") == platform.node() else {}
