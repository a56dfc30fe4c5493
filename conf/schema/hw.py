"""The machine, or the part of it that may be used, and how its drives are read: `hw`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from conf.schema.names import nearest


class DirectIo(Enum):
    """How expert files are opened."""

    auto = "auto"  # direct where the filesystem allows it, else through the page cache, said once
    require = "require"  # direct, or an error
    buffered = "buffered"  # through the page cache


class Spread(Enum):
    """How experts lie on several drives."""

    stripe = "stripe"  # each expert on one drive, by its share
    split = "split"  # a slice of each expert on every drive, by its share
    # every expert on every drive: whichever would be first reads, and one may fail
    mirror = "mirror"


class ComputeDtype(Enum):
    """What residents and hidden states are computed in; sums are fp32 in any case."""

    auto = "auto"  # float32 on a CPU, bfloat16 on a GPU
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class DriveConfig:
    """How the drive is read."""

    direct: DirectIo = DirectIo.auto
    # experts in flight; null: as many as come to 16 MiB, 2 to 8; 2 of several drives
    window: int | None = None
    # parallel reads per expert; null: one for each 2 MiB, 1 to 4; 4 of several drives
    pieces: int | None = None
    piece_kib: int = 128  # but none smaller than this: below, a request costs more than its bytes
    simulate_gib_s: float = 0.0  # pretend the drive gives this many GiB/s; 0 is the real drive
    simulate_latency_us: float = 0.0  # and adds this much to every read
    # experts are read by a process of its own, the same bytes; null: with a GPU
    process: bool | None = None


@dataclass
class DrivePlace:
    """One of several drives that experts are read from."""

    folder: str | None = None  # on it; null: where the set-up stages keep the experts anyway
    rate_gib_s: float | None = None  # as stages=[doctor] measures it; null: like the others
    share: float | None = None  # of what is striped or split, in relation; null: by rate_gib_s
    limit_gib: float | None = None  # written there at most; null: no limit
    simulate_gib_s: float | None = None  # null: hw.drive.simulate_gib_s


@dataclass
class RatesConfig:
    """How fast the machine is, for plans; null: what stages=[doctor] measured on this machine."""

    drive_gib_s: float | None = None  # whole experts, random, direct
    pcie_gib_s: float | None = None  # copies from pinned RAM to the GPU
    memory_gib_s: float | None = None  # reading where it is computed: the GPU's memory, or RAM


@dataclass
class HwConfig:
    """The machine, or the part of it that may be used."""

    name: str = "???"
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    dtype: ComputeDtype = ComputeDtype.auto
    # decode steps as CUDA graphs, the same numbers with all: true or segments, cut at each router, where the host
    # launches what follows; token, one for a whole token, in which the GPU waits for the experts; false or off, none
    graphs: bool | str = True
    # that the GPU waits for experts with graphs=token; then the answer ends with an error
    graph_limit_s: float = 20.0
    # RAM that may be used in all; null: what this machine has available
    ram_gib: float | None = None
    # video memory that may be used in all; null: what the card has free
    vram_gib: float | None = None
    reserve_gib: float = 1.0  # of ram_gib, left to everything else
    # of vram_gib, left to the CUDA context, libraries and the display
    vram_reserve_gib: float = 0.6
    pin_threads: bool = True  # with a GPU: decoding on one fast core, reader threads on the others
    compute_threads: int = 0  # threads of CPU arithmetic; 0: all cores but one, at most 8
    # with a GPU: of a layer's experts in RAM, the share that the CPU computes while the GPU reads the others: off, auto
    # (so that both end together, as measured) or 0 to 1; the same numbers but for the order of sums
    cpu_experts: str = "off"
    drive: DriveConfig = field(default_factory=DriveConfig)
    # several drives, as [{folder: /mnt/a}, {folder: /mnt/b, rate_gib_s: 2}]; []: one, where the set-up writes anyway
    drives: list[DrivePlace] = field(default_factory=list)
    spread: Spread = Spread.split  # of experts over hw.drives
    rates: RatesConfig = field(default_factory=RatesConfig)

    @property
    def has_graphs(self) -> bool:
        return self.graphs not in (False, "off")

    @property
    def token_limit_s(self) -> float | None:
        """Seconds that the GPU waits within the graph of a whole token; None: there is no such graph."""
        return self.graph_limit_s if self.graphs == "token" else None


# key -> (smallest, largest)
RANGES: dict[str, tuple[float, float]] = {
    "hw.graph_limit_s": (0.01, 3600),
    "hw.ram_gib": (0.0625, 2**20),
    "hw.vram_gib": (0.25, 2**20),
    "hw.reserve_gib": (0, 2**20),
    "hw.vram_reserve_gib": (0, 2**20),
    "hw.compute_threads": (0, 1024),
    "hw.drive.window": (1, 64),
    "hw.drive.pieces": (1, 64),
    "hw.drive.piece_kib": (4, 2**20),
    "hw.drive.simulate_gib_s": (0, 1000),
    "hw.drive.simulate_latency_us": (0, 1e6),
    "hw.rates.drive_gib_s": (0.001, 1e6),
    "hw.rates.pcie_gib_s": (0.001, 1e6),
    "hw.rates.memory_gib_s": (0.001, 1e6),
}

_DEVICES = ("auto", "cpu", "cuda")
_GRAPHS = ("off", "segments", "token")


def faults(hw: HwConfig) -> Iterable[str]:
    """Yield what no range says, also of each of several drives."""
    threads = (hw.drive.window or 1) * (hw.drive.pieces or 1)
    if threads > 256:
        yield f"hw.drive.window x hw.drive.pieces makes {threads} reader threads, at most 256"
    if hw.device not in _DEVICES:
        yield f"hw.device {hw.device!r} is unknown: {nearest(hw.device, _DEVICES)}"
    if not isinstance(hw.graphs, bool) and hw.graphs not in _GRAPHS:
        yield f"hw.graphs {hw.graphs!r} is unknown: {nearest(hw.graphs, ('true', 'false', *_GRAPHS))}"
    if hw.cpu_experts not in ("off", "auto") and not _is_share(hw.cpu_experts):
        yield f"hw.cpu_experts is off, auto or a share from 0 to 1, got {hw.cpu_experts!r}"
    yield from _drives_faults(hw)


def _drives_faults(hw: HwConfig) -> Iterable[str]:
    drives = hw.drives
    if len(drives) == 1:
        yield "hw.drives has one drive: name two or more, or leave it out"
    if drives and hw.drive.process:
        yield "hw.drive.process reads from one drive, not from hw.drives: leave one of them out"
    limits = {"rate_gib_s": 1e6, "share": 1e6, "limit_gib": 2.0**20, "simulate_gib_s": 1000.0}
    for i, drive in enumerate(drives):
        for key, most in limits.items():
            value = getattr(drive, key)
            least = 0.0 if key == "simulate_gib_s" else 1e-6
            if value is not None and not least <= value <= most:
                yield f"hw.drives[{i}].{key} must be {least:g} to {most:g}, got {value:g}"
    for key in ("rate_gib_s", "share"):
        given = [getattr(drive, key) is not None for drive in drives]
        if any(given) and not all(given):
            yield f"hw.drives[{given.index(False)}].{key} is missing: give it for every drive, or for none"
    threads = len(drives) * (hw.drive.window or 1) * (hw.drive.pieces or 1)
    if len(drives) > 1 and threads > 256:
        yield f"{len(drives)} drives x hw.drive.window x pieces make {threads} reader threads, at most 256"


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False
