"""What `doctor` finds: findings with a verdict and rates, shown as a table and compared with the last time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from runtime.drives import DriveRate
from stages.doctor_record import Record, changes


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


def format_table(findings: Sequence[Finding]) -> str:
    """Return a line a finding, with the advice below those that are not ok."""
    lines = []
    for f in findings:
        lines.append(f"{f.verdict:4}  {f.area:8}  {f.what:26}  {f.value}".rstrip())
        if f.advice:
            lines.append(f"      -> {f.advice}")
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("ok", "warn", "bad")}  # fmt: skip
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return "\n".join(lines)


def check_steadiness(report: Report, before: Record, model: str) -> list[str]:
    """Compare the rates with the last record of this machine; return the names of those that moved."""
    moved = changes(before, model, report.rates)
    for name, then in moved.items():
        report.add(
            "steady",
            name,
            "warn",
            f"{report.rates[name]:.3g} now, {then:.3g} on {before.when[:16]}",
            "more than 15 % apart: run it again with nothing else running",
        )
    return sorted(moved)
