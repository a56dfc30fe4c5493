"""Which core decodes and which cores read: the machine's cores from sysfs, the choice, and pinning a thread.

The choice is pure logic over `Core` records. A machine or container that says little or refuses is no error.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

log = logging.getLogger(__name__)

MIN_PHYSICAL_CORES = 3  # with fewer, keeping one free of readers costs more than it gives
EFFICIENCY_LISTS = ("cpu_atom/cpus", "cpu_lowpower/cpus")  # of hybrid Intel processors
NUM_CPUS_MAX = 2**16  # a list that names a higher number is broken

# package, die, cluster, core: on some ARM machines the last is unique in its cluster only
PhysicalCore = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Core:
    """One CPU as the kernel counts them: a hardware thread of a physical core."""

    cpu: int
    physical_core: PhysicalCore  # equal for SMT siblings
    max_frequency_khz: int = 0  # 0: not said
    capacity: int = 0  # the kernel's measure, the fastest core of the machine has 1024; 0: not said
    is_efficiency: bool = False
    takes_interrupts: bool = False  # cpu 0, and its siblings


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Who runs where."""

    decode_cpu: int
    decode_siblings: tuple[int, ...]  # the other threads of that physical core: left idle
    reader_cpus: tuple[int, ...]  # efficiency cores first
    kind: str = ""  # of the decoding core, where a machine has more than one kind
    max_frequency_khz: int = 0  # of the decoding core; 0: not said
    computing_cpus: tuple[int, ...] = ()  # of threads that compute beside the decoding one


# ---- what there is ---------------------------------------------------------------------------------------------------


def read_topology(
    root: Path = Path("/sys/devices/system/cpu"),
    allowed: Collection[int] | None = None,
    devices: Path = Path("/sys/devices"),
) -> list[Core]:
    """Return the CPUs that this thread may run on, in ascending order.

    root: the folder of `cpu0`, `cpu1`, ...  allowed: None is the calling thread's affinity mask.  devices: the folder
    in which hybrid Intel processors list their kinds of cores.  A file that is missing or unreadable says nothing.
    """
    efficiency = {cpu for name in EFFICIENCY_LISTS for cpu in _read_cpu_list(devices / name)}
    efficiency -= _read_cpu_list(devices / "cpu_core/cpus")
    cpus = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    first = _read_physical_core(root, 0)  # which may not be allowed
    return [_read_core(root, cpu, cpu in efficiency, first) for cpu in cpus]


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the numbers of a kernel list such as `0-7,16-23`. Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < NUM_CPUS_MAX:
            raise ValueError(f"{part!r} is no range of CPUs")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def _read_core(root: Path, cpu: int, is_efficiency: bool, first: PhysicalCore) -> Core:
    folder, physical_core = root / f"cpu{cpu}", _read_physical_core(root, cpu)
    return Core(
        cpu,
        physical_core,
        max(0, _read_int(folder / "cpufreq/cpuinfo_max_freq", 0)),
        max(0, _read_int(folder / "cpu_capacity", 0)),
        is_efficiency,
        physical_core == first,
    )


def _read_physical_core(root: Path, cpu: int) -> PhysicalCore:
    topology = root / f"cpu{cpu}/topology"
    names = ("physical_package_id", "die_id", "cluster_id", "core_id")
    package, die, cluster, core = (_read_int(topology / name, -1) for name in names)
    if core < 0:  # nothing is said: a core of its own
        return -1, -1, -1, -2 - cpu
    return package, die, cluster, core


def _read_int(path: Path, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def _read_cpu_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpu_list(path.read_text())
    except (OSError, ValueError):
        return frozenset()


# ---- the choice ------------------------------------------------------------------------------------------------------


def assign(cores: Sequence[Core], taken: Collection[PhysicalCore] = ()) -> CorePlan | None:
    """Give decoding the fastest core and reading the others; None (no pinning) with too few physical cores.

    The fastest is a performance core of the highest capacity, then frequency; of equal ones the lowest number that
    does not share a physical core with cpu 0, which takes interrupts.  taken: left to other engines.
    """
    cores = [core for core in cores if core.physical_core not in taken]
    if len({core.physical_core for core in cores}) < MIN_PHYSICAL_CORES:
        return None

    def merit(core: Core) -> tuple[bool, int, int, bool, int]:
        speed = core.capacity, core.max_frequency_khz
        return not core.is_efficiency, *speed, not core.takes_interrupts, -core.cpu

    best = max(cores, key=merit)
    siblings = {core.cpu for core in cores if core.physical_core == best.physical_core}
    readers = [core for core in cores if core.cpu not in siblings]
    readers.sort(key=lambda core: (not core.is_efficiency, core.capacity, core.cpu))
    return CorePlan(
        best.cpu,
        tuple(sorted(siblings - {best.cpu})),
        tuple(core.cpu for core in readers),
        _kind(best, cores),
        best.max_frequency_khz,
    )


def with_computing(plan: CorePlan, most: int | None = None) -> CorePlan:
    """Take three quarters of the readers' CPUs, the last ones, for threads that compute; reading keeps one at least.

    most: of these threads.
    """
    cpus = plan.reader_cpus
    readers = max(1, len(cpus) // 4)
    if most is not None:
        readers = max(readers, len(cpus) - most)
    return replace(plan, reader_cpus=cpus[:readers], computing_cpus=cpus[readers:])


def _kind(core: Core, cores: Sequence[Core]) -> str:
    if len({(other.is_efficiency, other.capacity) for other in cores}) == 1:
        return ""
    return "efficiency" if core.is_efficiency else "performance"


def describe(plan: CorePlan | None) -> str:
    """Return a plan on one line: `decoding on core 3 (performance, 5.2 GHz), readers on 12 others`."""
    if plan is None:
        return f"threads are not pinned: fewer than {MIN_PHYSICAL_CORES} physical cores"
    frequency = f"{plan.max_frequency_khz / 1e6:.1f} GHz" if plan.max_frequency_khz else ""
    what = ", ".join(filter(None, (plan.kind, frequency)))
    others = f"readers on {len(plan.reader_cpus)} others"
    if plan.computing_cpus:
        others += f", computing on {len(plan.computing_cpus)} more"
    return f"decoding on core {plan.decode_cpu}{f' ({what})' if what else ''}, {others}"


# ---- engines beside one another --------------------------------------------------------------------------------------


class Claim:
    """A physical core that other engines of this machine leave alone, until `close` or the end of the process.

    A socket's name in the kernel: nothing is left behind by a process that was killed. Containers with a network of
    their own do not see one another's.
    """

    def __init__(self, core: PhysicalCore) -> None:
        """Raises OSError with EADDRINUSE when another engine has it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0nvmoe-decodes-on-{'.'.join(map(str, core))}")
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()


def claim(cores: Sequence[Core]) -> tuple[CorePlan | None, Claim | None]:
    """Plan around the cores that other engines decode on, and claim the decoding one.

    None for the claim: there is no plan, the system refuses, or so many engines run that one core decodes for several.
    """
    taken: set[PhysicalCore] = set()
    physical_of = {core.cpu: core.physical_core for core in cores}
    while (plan := assign(cores, taken)) is not None:
        core = physical_of[plan.decode_cpu]
        try:
            return plan, Claim(core)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return plan, None
            taken.add(core)
    return assign(cores), None


# ---- pinning ---------------------------------------------------------------------------------------------------------


def pin_current_thread(cpus: Collection[int]) -> frozenset[int]:
    """Let the calling thread run on `cpus` only; return where it could run before.

    Threads that it starts later inherit the mask. Where the system refuses, one warning is logged in the life of the
    process and the thread goes on unpinned.
    """
    before = frozenset(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cpus)
    except (OSError, ValueError) as error:
        _warn_once(str(error))
    return before


@contextmanager
def pinned(cpus: Collection[int]) -> Iterator[None]:
    """Pin the calling thread for the duration of a block, as `pin_current_thread` does."""
    before = pin_current_thread(cpus)
    try:
        yield
    finally:
        pin_current_thread(before)


@functools.cache
def _warn_once(reason: str) -> None:
    """Repeat nothing that was said: every reader thread would."""
    log.warning("threads stay unpinned: the system refuses (%s)", reason)
