"""Which core decodes and which read, on machines of many kinds made up in a folder; and pinning itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime import cores
from runtime.cores import Core, CorePlan, assign, describe, parse_cpu_list, read_topology

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """A machine's sysfs in a folder of the test."""

    def __init__(self, root: Path) -> None:
        self.devices, self.root = root / "devices", root / "cpu"
        self.devices.mkdir()
        self.root.mkdir()
        self.cpus: list[int] = []

    def add(self, cpu: int, core: int | str, mhz: int = 0, capacity: int = 0, **topology: int):
        self.cpus.append(cpu)
        self.write(cpu, "topology/core_id", core)
        for name, value in {"physical_package_id": 0, **topology}.items():
            self.write(cpu, f"topology/{name}", value)
        if mhz:
            self.write(cpu, "cpufreq/cpuinfo_max_freq", mhz * 1000)
        if capacity:
            self.write(cpu, "cpu_capacity", capacity)

    def write(self, cpu: int, name: str, text: int | str) -> None:
        path = self.root / f"cpu{cpu}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def kind(self, name: str, text: str) -> None:
        (self.devices / name).mkdir()
        (self.devices / name / "cpus").write_text(text)

    def read(self, allowed=None) -> list[Core]:
        return read_topology(self.root, self.cpus if allowed is None else allowed, self.devices)

    def plan(self, allowed=None) -> CorePlan | None:
        return assign(self.read(allowed))


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


def amd(machine: Machine) -> Machine:
    """8 equal cores; their second threads are numbered behind."""
    for cpu in range(16):
        machine.add(cpu, cpu % 8, mhz=5000)
    return machine


def intel(machine: Machine) -> Machine:
    """4 performance cores with two threads (0-7), the second one faster; 8 efficiency cores (8-15)."""
    for cpu in range(8):
        machine.add(cpu, cpu // 2 * 4, mhz=5200 if cpu in (2, 3) else 5000, die_id=0)
    for cpu in range(8, 16):
        machine.add(cpu, 8 + cpu, mhz=4100, die_id=0)
    machine.kind("cpu_core", "0-7\n")
    machine.kind("cpu_atom", "8-15\n")
    return machine


# ---- machines ----------------------------------------------------------------------------------------------------


def test_equal_cores_with_two_threads(machine):
    plan = amd(machine).plan()
    assert plan.decode_cpu == 1, "not cpu 0, which takes interrupts"
    assert plan.decode_siblings == (9,)
    assert plan.reader_cpus == (0, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15)
    assert describe(plan) == "decoding on core 1 (5.0 GHz), readers on 14 others"


def test_a_favoured_core_of_equal_ones(machine):
    amd(machine).write(0, "cpufreq/cpuinfo_max_freq", 5_100_000)
    assert machine.plan().decode_cpu == 0, "speed counts before interrupts"


def test_performance_and_efficiency_cores(machine):
    plan = intel(machine).plan()
    assert (plan.decode_cpu, plan.decode_siblings) == (2, (3,))
    assert plan.reader_cpus == (8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 4, 5, 6, 7)
    assert describe(plan) == "decoding on core 2 (performance, 5.2 GHz), readers on 14 others"


def test_an_efficiency_core_never_decodes_where_there_are_others(machine):
    intel(machine)
    for cpu in range(8, 16):
        machine.write(cpu, "cpufreq/cpuinfo_max_freq", 9_000_000)
    assert machine.plan().decode_cpu == 2


def test_the_sibling_of_cpu_0_is_as_busy_as_cpu_0(machine):
    for cpu in range(8):
        machine.add(cpu, cpu // 2, mhz=5000)
    plan = machine.plan()
    assert (plan.decode_cpu, plan.decode_siblings) == (2, (3,))


def test_big_and_little_by_capacity(machine):
    """Numbers of cores begin anew in each cluster: they are no siblings."""
    for cpu in range(8):
        cluster = 0 if cpu < 4 else 1 if cpu < 7 else 2
        capacity = (250, 800, 1024)[cluster]
        machine.add(cpu, cpu - (0, 4, 7)[cluster], mhz=3000, capacity=capacity, cluster_id=cluster)
    plan = machine.plan()
    assert (plan.decode_cpu, plan.decode_siblings) == (7, ())
    assert plan.reader_cpus == (0, 1, 2, 3, 4, 5, 6)
    assert describe(plan) == "decoding on core 7 (performance, 3.0 GHz), readers on 7 others"


def test_a_container_with_an_odd_mask(machine):
    """cpu 0 is not allowed, its sibling 1 is."""
    plan = intel(machine).plan(allowed={1, 4, 9, 12, 13})
    assert plan == CorePlan(4, (), (9, 12, 13, 1), "performance", 5_000_000)


def test_a_container_with_efficiency_cores_only(machine):
    plan = intel(machine).plan(allowed={9, 12, 13})
    assert plan == CorePlan(9, (), (12, 13), "", 4_100_000)


def test_two_packages_have_the_same_numbers_of_cores(machine):
    for cpu in range(4):
        machine.add(cpu, cpu % 2, physical_package_id=cpu // 2)
    plan = machine.plan()
    assert (plan.decode_cpu, plan.decode_siblings, plan.reader_cpus) == (1, (), (0, 2, 3))


def test_without_frequencies(machine):
    for cpu in range(4):
        machine.add(cpu, cpu)
    plan = machine.plan()
    assert plan == CorePlan(1, (), (0, 2, 3))
    assert describe(plan) == "decoding on core 1, readers on 3 others"


@pytest.mark.parametrize("num_cores", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
def test_too_few_cores_to_keep_one_free(machine, num_cores, threads):
    for cpu in range(num_cores * threads):
        machine.add(cpu, cpu // threads, mhz=5000)
    assert machine.plan() is None
    assert describe(None) == "threads are not pinned: fewer than 3 physical cores"


def test_no_core_at_all():
    assert assign([]) is None


# ---- files that say nothing --------------------------------------------------------------------------------------


def test_no_topology_at_all(machine):
    """A CPU that says nothing is a core of its own."""
    plan = machine.plan(allowed={0, 1, 2, 3})
    assert plan == CorePlan(1, (), (0, 2, 3))


def test_broken_files(machine):
    intel(machine)
    (machine.devices / "cpu_atom/cpus").write_text("8-fifteen")
    machine.write(2, "cpufreq/cpuinfo_max_freq", "<unknown>")
    machine.write(3, "cpufreq/cpuinfo_max_freq", "-1")
    machine.write(4, "cpu_capacity", "")
    machine.write(5, "topology/core_id", "x")
    (machine.root / "cpu6/topology/core_id").write_bytes(b"\xff\xfe")
    found = {core.cpu: core for core in machine.read()}
    assert not any(core.is_efficiency for core in found.values())
    assert (found[2].max_frequency_khz, found[3].max_frequency_khz) == (0, 0)
    assert found[4].capacity == 0
    assert len({found[cpu].physical_core for cpu in (4, 5, 6, 7)}) == 4
    assert machine.plan().decode_cpu == 4


def test_this_machine():
    found = read_topology()
    assert [core.cpu for core in found] == sorted(os.sched_getaffinity(0))
    plan = assign(found)
    if plan is not None:
        assert {plan.decode_cpu, *plan.decode_siblings, *plan.reader_cpus} == {
            core.cpu for core in found
        }


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5", {5}),
        ("\n", set()),
        ("3-3", {3}),
    ],
)
def test_lists_of_cpus(text, cpus):
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "0-99999999999", "1;2"])
def test_lists_that_are_none(text):
    with pytest.raises(ValueError):  # noqa: PT011 - int's own message, or ours
        parse_cpu_list(text)


# ---- engines beside one another ----------------------------------------------------------------------------------


def on_package(machine: Machine, count: int) -> list[Core]:
    """Equal cores of a package that no real machine has: other engines here claim other names."""
    package = os.getpid() + 1000
    for cpu in range(count):
        machine.add(cpu, cpu, physical_package_id=package)
    return machine.read()


def test_engines_decode_on_cores_of_their_own_until_they_close(machine):
    topology = on_package(machine, 6)
    first, first_claim = cores.claim(topology)
    second, second_claim = cores.claim(topology)
    assert (first.decode_cpu, second.decode_cpu) == (1, 2)
    assert first.reader_cpus == (0, 2, 3, 4, 5)
    assert second.reader_cpus == (0, 3, 4, 5), "nor does the second read on the first's core"
    first_claim.close()
    third, third_claim = cores.claim(topology)
    assert third.decode_cpu == 1
    for taken in (second_claim, third_claim):
        taken.close()


def test_with_too_many_engines_one_core_decodes_for_several(machine):
    topology = on_package(machine, 4)
    claims = [cores.claim(topology) for _ in range(2)]
    assert [plan.decode_cpu for plan, _ in claims] == [1, 2]
    plan, none = cores.claim(topology)
    assert (plan, none) == (assign(topology), None)
    for _, taken in claims:
        taken.close()


def test_a_killed_engine_leaves_no_claim(machine):
    topology = on_package(machine, 4)
    name = topology[1].physical_core
    code = f"import sys; from runtime.cores import Claim; claim = Claim({name}); print('has', flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, cwd=ROOT) as child:
        assert child.stdout.readline() == b"has\n"
        plan, taken = cores.claim(topology)
        assert plan.decode_cpu == 2
        taken.close()
        child.kill()
    plan, taken = cores.claim(topology)
    assert plan.decode_cpu == 1
    taken.close()


def test_a_system_that_refuses_sockets_plans_all_the_same(machine, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cores.socket, "socket", refuse)
    topology = on_package(machine, 4)
    assert cores.claim(topology) == (assign(topology), None)


def test_too_few_cores_claim_nothing(machine):
    assert cores.claim(on_package(machine, 2)) == (None, None)


# ---- pinning -----------------------------------------------------------------------------------------------------


def test_a_thread_is_pinned_and_let_go():
    allowed = os.sched_getaffinity(0)
    one = {max(allowed)}
    seen = []

    def work() -> None:
        with cores.pinned(one):
            seen.append(os.sched_getaffinity(0))
        seen.append(os.sched_getaffinity(0))
        seen.append(cores.pin_current_thread(one))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [one, allowed, allowed]
    assert os.sched_getaffinity(0) == allowed, "other threads are not touched"


def test_a_block_that_fails_is_unpinned_too():
    allowed = os.sched_getaffinity(0)
    with pytest.raises(KeyError), cores.pinned({min(allowed)}):
        raise KeyError
    assert os.sched_getaffinity(0) == allowed


def test_a_container_that_refuses_is_told_about_once(monkeypatch, caplog):
    cores._warn_once.cache_clear()

    def refuse(_pid, _cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for _ in range(3):
        with cores.pinned({0}):
            pass
    (record,) = caplog.records
    assert "Operation not permitted" in record.getMessage()


def test_cpus_that_are_not_there(caplog):
    cores._warn_once.cache_clear()
    allowed = os.sched_getaffinity(0)
    assert cores.pin_current_thread({60000}) == allowed
    assert os.sched_getaffinity(0) == allowed
    assert len(caplog.records) == 1
