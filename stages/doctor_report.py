"""What `doctor` finds: findings with a verdict, and rates."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.drives import DriveRate


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
    interface: str | None = None  # of the drive that experts are read from

    def add(self, area: str, what: str, verdict: str, value: str, advice: str = "") -> None:
        """Note a finding; `advice` says what to do about one that is not ok."""
        self.findings.append(Finding(area, what, verdict, value, advice))
