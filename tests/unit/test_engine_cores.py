"""Where an engine's threads run while it opens and decodes. What it opens is left out, and so is the GPU."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

from runtime import cores, hardware
from runtime.cores import Core
from runtime.engine import Engine


class Opened:
    """What `Engine._open` returned, and how it was asked."""

    def __init__(self, mask: set[int], before: frozenset[int], computing: tuple[int, ...]) -> None:
        self.mask, self.before, self.computing = mask, before, computing
        self._core_claim: cores.Claim | None = None


@pytest.fixture
def topology():
    """Eight cores of a package that no real machine has: engines of other tests claim other names."""
    return [
        Core(cpu, (os.getpid() + 2000, 0, 0, cpu), takes_interrupts=cpu == 0) for cpu in range(8)
    ]


@pytest.fixture
def pins(topology, monkeypatch):
    """Masks that were set, in order; this process stays where it is."""
    masks: list[set[int]] = [{*range(8)}]

    def pin(cpus: Any) -> frozenset[int]:
        masks.append({*cpus})
        return frozenset(masks[-2])

    monkeypatch.setattr(cores, "read_topology", lambda: topology)
    monkeypatch.setattr(cores, "pin_current_thread", pin)
    monkeypatch.setattr(hardware, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    return masks


@pytest.fixture
def open_engine(pins, monkeypatch):
    """Return a function that opens an engine of which only the threads' places are real."""
    engines: list[Any] = []

    def opened(_cls, _config, _files, _is_resident, _device, before, computing):
        engines.append(Opened(pins[-1], before, computing))
        return engines[-1]

    monkeypatch.setattr(Engine, "_open", classmethod(opened))
    yield lambda config: Engine.open(config, None)
    for engine in engines:
        if engine._core_claim is not None:
            engine._core_claim.close()


def test_it_loads_where_readers_run_and_decodes_on_its_core(
    open_engine, pins, make_config, topology
):
    engine = open_engine(make_config())
    assert engine.mask == {0, 2, 3, 4, 5, 6, 7}
    assert (engine.before, engine.computing) == ({*range(8)}, ())
    assert pins[-1] == {1}
    plan, claim = cores.claim(topology)
    claim.close()
    assert plan.decode_cpu == 2, "the next engine has another"


@pytest.mark.parametrize(("threads", "computing"), [(0, (2, 3, 4, 5, 6, 7)), (3, (6, 7)), (1, ())])
def test_experts_on_the_cpu_have_the_threads_that_were_asked_for(
    open_engine, make_config, threads, computing
):
    config = make_config(
        **{"hw.device": "cuda", "hw.cpu_experts": "0.5", "hw.compute_threads": threads}
    )
    engine = open_engine(config)
    assert engine.computing == computing
    assert engine.mask == {0, *range(2, 8)} - {*computing}


def test_an_engine_that_does_not_open_holds_no_core(monkeypatch, pins, make_config, topology):
    def opened(*_):
        raise MemoryError

    monkeypatch.setattr(Engine, "_open", classmethod(opened))
    with pytest.raises(MemoryError):
        Engine.open(make_config(), None)
    assert pins[-1] == {*range(8)}
    plan, claim = cores.claim(topology)
    claim.close()
    assert plan.decode_cpu == 1


def test_unpinned_engines_claim_nothing(open_engine, pins, make_config):
    engine = open_engine(make_config(**{"hw.pin_threads": False}))
    assert (engine._core_claim, engine.before, len(pins)) == (None, None, 1)
