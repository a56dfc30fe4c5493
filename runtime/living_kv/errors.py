"""Errors of the living memory: what, which file or position, what to do. Exit codes 2, 3, 4 and 5."""

from __future__ import annotations

from runtime.errors import UserError

EXIT_LOW_CONFIDENCE = 3


class MemoryUsageError(UserError):
    """Arguments that cannot work."""

    exit_code = 2


class StoreNotFoundError(UserError):
    """A store that is not there."""


class StoreRefusedError(UserError):
    """A store that may not be used as it is: another model, a newer format, wrong bytes."""

    exit_code = 4


class StoreLockedError(UserError):
    """Another process writes to the store."""

    exit_code = 5


class DiskFullError(UserError):
    """The drive refused bytes; the last commit stays in force."""


def arch(what: str) -> MemoryUsageError:
    """Return the error for a model that the memory cannot serve."""
    return MemoryUsageError(f"E-ARCH: {what}", "use a dense model, for instance model=qwen25_7b_1m")


def checksum(what: str, hint: str) -> StoreRefusedError:
    """Return the error for bytes that are not what was written."""
    return StoreRefusedError(f"E-CHECKSUM: {what}", hint)
