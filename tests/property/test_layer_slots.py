"""The VRAM tier of dense layers against two GPU streams that run as late and as unevenly as they may."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.experts.layer_slots import LayerSlots
from tests.property.test_slots import EXPERTS, NBYTES, Gpu, Source


@settings(max_examples=150, deadline=None)
@given(
    passing=st.integers(2, 3),
    kept=st.integers(0, EXPERTS + 2),
    max_hold=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    plan=st.lists(
        st.sampled_from(["sweep"] * 4 + ["stop", "part", "forget"]), min_size=2, max_size=8
    ),
)
def test_every_launch_reads_the_right_layer(passing, kept, max_hold, seed, plan):
    rng = random.Random(seed)
    gpu, source = Gpu(passing + kept, rng), Source(rng)
    source.max_hold = max_hold
    layers = LayerSlots(source, gpu, EXPERTS, passing)
    there: set[int] = set()  # what must not be copied again
    for step in plan:
        if step == "forget":
            gpu.finish()
            layers.forget()
            there = set()
            continue
        ids = list(range(EXPERTS))
        if step == "part":
            ids = sorted(rng.sample(ids, rng.randrange(1, EXPERTS)))
        end = rng.randrange(1, len(ids)) if step == "stop" and len(ids) > 1 else len(ids)
        copied = source.counters.copied_nbytes
        sweep = layers.sweep(0, ids)
        for wanted, (found, record) in zip(ids[:end], sweep, strict=False):
            assert found == wanted
            gpu.launch(0, [(found, record)])
            gpu.some()
        if step == "stop":
            sweep.close()
            continue
        assert next(sweep, None) is None
        if step == "sweep":
            must = [i for i in ids if i not in there]
            assert source.counters.copied_nbytes - copied <= len(must) * NBYTES
            there = set(range(min(kept, EXPERTS)))
    gpu.finish()


def test_layers_that_all_fit_are_copied_once():
    gpu, source = Gpu(2 + EXPERTS, random.Random(1)), Source(random.Random(1))
    layers = LayerSlots(source, gpu, EXPERTS, 2)
    for _ in range(3):
        for layer, record in layers.sweep(0, range(EXPERTS)):
            gpu.launch(0, [(layer, record)])
    assert source.counters.copied_nbytes == EXPERTS * NBYTES
    assert source.counters.vram_hits == 2 * EXPERTS
    gpu.finish()


def test_too_few_slots_are_refused():
    with pytest.raises(ValueError, match="to pass through"):
        LayerSlots(Source(random.Random(1)), Gpu(1, random.Random(1)), EXPERTS, 2)
