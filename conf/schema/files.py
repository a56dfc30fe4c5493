"""Where files come from and where they go: `hub`, `paths`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HubConfig:
    """How files come from the hub. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are read as by other tools."""

    files_at_once: int = 4  # files in flight; their bytes share the line
    stall_s: float = 30.0  # without bytes for this long a connection is closed and made anew
    retries: int = 8  # in a row without progress, with growing pauses; then an error
    line_mbit_s: float = 100.0  # the line that dry_run and plan reckon with


@dataclass
class PathsConfig:
    """Places on the disk. Relative paths are taken from the folder of run.py."""

    outputs: str = "outputs"  # all that is made
    snapshots: str = "${paths.outputs}/snapshots"  # states of conversations; may be removed
    # what the set-up stages make; put it on the fastest drive
    artifacts: str = "${paths.outputs}/artifacts"
    # files of the hub, laid out as its cache is; null: the folder that HF_HUB_CACHE or HF_HOME names
    hub: str | None = None
    memory: str = "${paths.outputs}/memory"  # stores of the living memory


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "hub.files_at_once": (1, 64),
    "hub.stall_s": (0.1, 3600),
    "hub.retries": (0, 1000),
    "hub.line_mbit_s": (0.001, 1e7),
}
