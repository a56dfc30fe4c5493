"""The VRAM tier against two GPU streams that run as late and as unevenly as they may.

`Gpu` queues what a stream would: nothing runs before it must (an event that is waited for, the host that waits for a
route), or before hypothesis says so. A record that is overwritten too early, a slot that is read before its copy, an
order that is not kept: all show as wrong bytes in a launch.
"""

from __future__ import annotations

import random
from collections import deque
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import DeviceError
from runtime.experts import slots
from runtime.experts.cpu_share import CpuShare, fixed_counts
from runtime.experts.layout import ExpertKey
from runtime.experts.paced import PacedCopier
from runtime.experts.shared import Conversation, SharedSlots, share
from runtime.experts.slots import BATCH_EXPERTS, KEY_STRIDE, SlotExperts, passing_slots
from runtime.experts.source import one_by_one
from runtime.stats import ExpertCounters

LAYERS, EXPERTS, ROUTE, NBYTES = 5, 12, 3, 16


def content(layer: int, expert: int) -> torch.Tensor:
    return torch.full((NBYTES,), layer * EXPERTS + expert, dtype=torch.uint8)


class Gpu:
    """A computing stream and a copy stream; also the `Copier` of the slots."""

    def __init__(self, num_slots: int, rng: random.Random) -> None:
        self.slots = torch.full((num_slots, NBYTES), 255, dtype=torch.uint8)
        self.queues = {"compute": deque(), "copy": deque()}
        self.reached: set[int] = set()
        self.rng, self.marks = rng, 0
        self.launches = 0

    # ---- what is queued
    def copy(self, slot: int, record: torch.Tensor) -> None:
        self.queues["copy"].append(("run", lambda: self.slots[slot].copy_(record)))

    def mark(self) -> int:
        return self._mark("copy")

    def launched(self) -> int:
        return self._mark("compute")

    def wait(self, mark: int) -> None:
        self.queues["compute"].append(("wait", mark))

    def follow(self, mark: int) -> None:
        self.queues["copy"].append(("wait", mark))

    def synchronize(self, mark: int) -> None:
        while mark not in self.reached:
            assert self._advance("copy") or self._advance("compute"), "a mark is never reached"

    def is_reached(self, mark: int) -> bool:
        self._advance("copy")
        return mark in self.reached

    def launch(self, layer: int, wave) -> None:
        """An expert kernel: reads every record when it runs."""
        self.launches += 1

        def check() -> None:
            for expert, record in wave:
                assert torch.equal(record, content(layer, expert)), (layer, expert, record[0])

        self.queues["compute"].append(("run", check))

    def is_slot(self, record: torch.Tensor) -> bool:
        start = self.slots.data_ptr()
        return start <= record.data_ptr() < start + self.slots.nbytes

    def _mark(self, stream: str) -> int:
        self.marks += 1
        self.queues[stream].append(("mark", self.marks))
        return self.marks

    # ---- what runs
    def _advance(self, stream: str) -> bool:
        queue = self.queues[stream]
        if not queue:
            return False
        what, item = queue[0]
        if what == "wait" and item not in self.reached:
            return False
        queue.popleft()
        if what == "run":
            item()
        elif what == "mark":
            self.reached.add(item)
        return True

    def some(self) -> None:
        for _ in range(self.rng.randrange(4)):
            self._advance(self.rng.choice(["compute", "copy"]))

    def finish_compute(self) -> None:
        """The host waits for a route: all that was launched has run; copies only as far as that needs them."""
        while self.queues["compute"]:
            assert self._advance("compute") or self._advance("copy"), "the GPU hangs"

    def finish(self) -> None:
        while self._advance("compute") or self._advance("copy"):
            pass
        assert not any(self.queues.values()), "the GPU hangs"


class Source:
    """Experts in RAM, of which some come late; takes its records back, and scribbles over them, as soon as it may."""

    def __init__(self, rng: random.Random) -> None:
        self.counters, self.rng = ExpertCounters(), rng
        self.lent: list[torch.Tensor] = []
        self.ahead_lent: list[torch.Tensor] = []
        self.ahead_before: list[torch.Tensor] = []
        self.asked: list[tuple[int, int]] = []
        self.guessed: list[int] = []
        self.given_ahead: set[tuple[int, int]] = set()
        self.num_used = 0

    record_nbytes, max_hold, max_route = NBYTES, 4, EXPERTS

    def _give(self, layer: int, expert: int, lent: list[torch.Tensor]):
        record = content(layer, expert)
        lent.append(record)
        return expert, record

    def waves(self, layer, ids, guesses=()):
        for record in self.lent + self.ahead_before:
            record.fill_(254)
        self.lent, self.ahead_before, self.ahead_lent = [], self.ahead_lent, []
        self.asked += [(layer, e) for e in ids]
        ids = list(ids)
        self.rng.shuffle(ids)
        cut = self.rng.randrange(len(ids) + 1)
        yield [self._give(layer, e, self.lent) for e in ids[:cut]]
        self.guessed = list(guesses)
        yield []
        for expert in ids[cut:]:
            yield [self._give(layer, expert, self.lent)]

    def used(self, layer, ids):
        assert {(layer, e) for e in ids} <= self.given_ahead
        self.num_used += len(ids)

    def ahead(self, layer, ids):
        here = [e for e in ids if self.rng.random() < 0.8]
        self.given_ahead.update((layer, e) for e in here)
        return [self._give(layer, e, self.ahead_lent) for e in here]

    def sweep(self, layer, ids, hold=1):
        held: deque[torch.Tensor] = deque()
        for expert in ids:
            if len(held) == hold:
                held.popleft().fill_(254)
            item = self._give(layer, expert, [])
            yield item
            held.append(item[1])

    def forget(self):
        pass


@settings(max_examples=150, deadline=None)
@given(
    early=st.integers(0, 4),
    kept=st.integers(0, 3 * LAYERS * ROUTE),
    seed=st.integers(0, 2**32),
    in_place=st.booleans(),
    is_paced=st.booleans(),
    company=st.sampled_from([0.0, 0.3]),
    plan=st.lists(
        st.sampled_from(["token"] * 6 + ["prompt", "stop", "forget"]), min_size=2, max_size=14
    ),
)
def test_every_launch_reads_the_right_bytes(early, kept, seed, in_place, is_paced, company, plan):
    """is_paced: tokens are one graph each; a stop is a token that is given up.

    company: how often another conversation's prompt goes on by a layer when a token's route is known already.
    """
    rng = random.Random(seed)
    passing = passing_slots(early, NBYTES, 0 if in_place else ROUTE)
    gpu, source = Gpu(passing + kept, rng), Source(rng)
    paced = PacedCopier(gpu) if is_paced else None
    experts = SlotExperts(source, paced or gpu, LAYERS, ROUTE, early, in_place)
    before = ExpertCounters()

    def read_layer(layer: int) -> None:
        """Run a layer of a prompt, whose route the host waits for; nobody waits for what is launched last."""
        gpu.finish_compute()
        ids = sorted(rng.sample(range(EXPERTS), rng.randrange(1, EXPERTS)))
        seen, absent = [], [e for e in ids if ExpertKey(layer, e) not in experts.kept_keys()]
        start = experts.counters.copy()
        for wave in experts.batches(layer, ids):
            gpu.launch(layer, wave)
            seen += [expert for expert, _ in wave]
            gpu.some()
        assert seen == ids
        counted = experts.counters.since(start)
        assert counted.sweep_vram_hits == len(ids) - len(absent)
        assert counted.copied_nbytes == len(absent) * NBYTES

    for step in plan:
        if step == "forget":
            gpu.finish()
            experts.forget()
        elif step == "prompt":
            for layer in range(LAYERS):
                read_layer(layer)
        else:
            guesses = rng.sample(range(EXPERTS), 6)
            computed: list[int] = []  # by the graph, as far as it tells
            if paced is not None:
                paced.begin(computed.__contains__)
            for layer in range(LAYERS if step == "token" else rng.randrange(1, LAYERS)):
                gpu.finish_compute()
                if paced is not None:
                    paced.reach(layer)
                # guesses are often right
                route = rng.sample(guesses, 2) if rng.random() < 0.7 else []
                route += rng.sample(
                    [e for e in range(EXPERTS) if e not in route], ROUTE - len(route)
                )
                guesses = rng.sample(range(EXPERTS), 6)
                if paced is None and rng.random() < company:
                    read_layer(rng.randrange(LAYERS))
                source.asked.clear()
                seen = []
                for wave in experts.waves(layer, route, guesses):
                    assert wave, "an empty launch"
                    if paced is not None:
                        assert not any(what == "wait" for what, _ in gpu.queues["compute"])
                        paced.arrive(limit_s=60)
                    gpu.launch(layer, wave)
                    seen += [expert for expert, _ in wave]
                    gpu.some()
                assert sorted(seen) == sorted(route)  # each once, from one place
                assert {e for _, e in source.asked} <= set(route)
                assert set(source.guessed) <= set(guesses)
                counted = experts.counters.since(before)
                assert counted.vram_hits == ROUTE - len(source.asked)
                before = experts.counters.copy()
                gpu.some()
                if paced is not None and rng.random() < 0.5:
                    gpu.finish_compute()
                    computed.append(layer)
                    paced.look()
            if paced is not None:
                gpu.finish_compute()
                paced.end()
    gpu.finish()
    assert source.num_used == experts.counters.early_used <= experts.counters.early_issued


@settings(max_examples=150, deadline=None)
@given(
    early=st.integers(0, 2),
    kept=st.integers(0, 2 * ROUTE),
    batch=st.integers(2, 3),
    seed=st.integers(0, 2**32),
    routes=st.lists(st.integers(1, EXPERTS), min_size=1, max_size=8),
)
def test_a_route_longer_than_the_slots_goes_through_them_in_turn(early, kept, batch, seed, routes):
    """Of several tokens at once: experts that cannot be read in place, and slots for one token's."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "BATCH_EXPERTS", batch)
        gpu = Gpu(passing_slots(early, NBYTES, ROUTE) + kept, rng)
        experts = SlotExperts(Source(rng), gpu, LAYERS, ROUTE, early, reads_in_place=False)
    for length in routes:
        for layer in range(LAYERS):
            gpu.finish_compute()
            route, guesses = rng.sample(range(EXPERTS), length), rng.sample(range(EXPERTS), 6)
            if rng.random() < 0.3:
                for wave in experts.batches(layer, sorted(route)):
                    gpu.launch(layer, wave)
            before, seen = experts.counters.copy(), []
            for wave in experts.waves(layer, route, guesses):
                assert all(gpu.is_slot(record) for _, record in wave)
                gpu.launch(layer, wave)
                seen += [expert for expert, _ in wave]
                gpu.some()
            assert sorted(seen) == sorted(route)
            counted = experts.counters.since(before)
            copied = length - counted.vram_hits + counted.early_issued
            assert counted.copied_nbytes == copied * NBYTES
    gpu.finish()


@settings(max_examples=150, deadline=None)
@given(
    early=st.integers(0, 2),
    kept=st.integers(0, 2 * ROUTE),
    batch=st.integers(2, 3),
    in_place=st.booleans(),
    count=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_what_several_conversations_want_crosses_the_link_once(
    early, kept, batch, in_place, count, seed
):
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "BATCH_EXPERTS", batch)
        gpu = Gpu(passing_slots(early, NBYTES, 0 if in_place else ROUTE) + kept, rng)
        experts = SlotExperts(Source(rng), gpu, LAYERS, ROUTE, early, in_place)
    shared = share(experts)
    assert isinstance(shared, SharedSlots)
    in_place_reads: list[tuple[int, int]] = []

    def decode(tokens: int) -> None:
        for layer in list(range(LAYERS)) * tokens:
            gpu.finish_compute()  # the host waits for the route
            route = rng.sample(range(EXPERTS), ROUTE)
            seen = []
            for wave in shared.waves(layer, route, rng.sample(range(EXPERTS), 6)):
                in_place_reads.extend((layer, e) for e, record in wave if not gpu.is_slot(record))
                gpu.launch(layer, wave)
                seen += [expert for expert, _ in wave]
                gpu.some()
            assert sorted(seen) == sorted(route)

    going = [Conversation(partial(decode, 3)) for _ in range(count)]
    for conversation in going:
        conversation.go_on()
    while any(conversation.ask is not None for conversation in going):
        before = experts.counters.copy()
        in_place_reads.clear()
        wanted = {e for c in going if c.ask is not None for e in c.ask.ids}
        shared.serve(going)
        assert len(in_place_reads) == len(set(in_place_reads)), "read twice over the link"
        counted = experts.counters.since(before)
        crossed = len(wanted) - counted.vram_hits + counted.early_issued
        assert counted.copied_nbytes == crossed * NBYTES
    gpu.finish()
    assert in_place or not in_place_reads


class Checking:
    """The CPU's arithmetic: reads every record when it is asked for, and notes what was launched before."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.seen = gpu, []

    def run(self, layer, experts, records, places, out) -> None:
        for expert, record in zip(experts, records, strict=True):
            assert torch.equal(record, content(layer, expert))
        self.seen = list(experts)
        self.gpu.some()


@settings(max_examples=60, deadline=None)
@given(
    early=st.integers(0, 4),
    kept=st.integers(0, 2 * LAYERS * ROUTE),
    seed=st.integers(0, 2**32),
    in_place=st.booleans(),
    share=st.sampled_from([0.3, 0.5, 1.0]),
    armed=st.lists(st.booleans(), min_size=3, max_size=8),
)
def test_an_expert_is_the_gpus_or_the_cpus(early, kept, seed, in_place, share, armed):
    rng = random.Random(seed)
    passing = passing_slots(early, NBYTES, 0 if in_place else ROUTE)
    gpu, source = Gpu(passing + kept, rng), Source(rng)
    experts = SlotExperts(source, gpu, LAYERS, ROUTE, early, in_place)
    compute = Checking(gpu)
    experts.share = CpuShare(compute, fixed_counts(share, ROUTE), 8, torch.device("cpu"))
    for is_armed in armed:
        guesses = rng.sample(range(EXPERTS), 6)
        for layer in range(LAYERS):
            gpu.finish_compute()
            route, guesses = rng.sample(range(EXPERTS), ROUTE), rng.sample(range(EXPERTS), 6)
            seen, compute.seen = [], []
            before = experts.counters.copy()
            if is_armed:
                experts.share.arm()
            for wave in experts.waves(layer, route, guesses):
                assert wave, "an empty launch"
                gpu.launch(layer, wave)
                seen += [expert for expert, _ in wave]
                gpu.some()
            counted = experts.counters.since(before)
            assert sorted(seen + compute.seen) == sorted(route)
            assert experts.share.has_rows == bool(compute.seen)
            assert counted.cpu_experts == len(compute.seen) <= int(share * ROUTE + 0.5)
            copied = ROUTE - counted.vram_hits - counted.cpu_experts + counted.early_issued
            assert counted.copied_nbytes == copied * NBYTES
            assert set(source.guessed) <= set(guesses), "guesses are asked for all the same"
            assert is_armed or not compute.seen
    gpu.finish()


def run_token(gpu, experts, routes, guesses=None):
    """Decode one token; return the VRAM hits of each layer."""
    hits = []
    for layer, route in enumerate(routes):
        gpu.finish_compute()
        before = experts.counters.vram_hits
        for wave in experts.waves(layer, route, guesses[layer] if guesses else ()):
            gpu.launch(layer, wave)
        hits.append(experts.counters.vram_hits - before)
    return hits


class Ready(Source):
    """Everything is in RAM."""

    def waves(self, layer, ids, guesses=()):
        yield [self._give(layer, e, self.lent) for e in ids]

    def ahead(self, layer, ids):
        self.given_ahead.update((layer, e) for e in ids)
        return [self._give(layer, e, self.ahead_lent) for e in ids]


@pytest.mark.parametrize("kept", [0, 1, 4, LAYERS * ROUTE - 1, LAYERS * ROUTE])
@pytest.mark.parametrize("early", [0, 2])
def test_slots_fewer_than_a_cycle_find_all_they_can(kept: int, early: int):
    """The same token again and again: an LRU that is smaller than its cycle would find nothing at all."""
    gpu = Gpu(passing_slots(early) + kept, random.Random(0))
    experts = SlotExperts(Ready(random.Random(0)), gpu, LAYERS, ROUTE, early)
    routes = [[3 * layer % EXPERTS + i for i in range(ROUTE)] for layer in range(LAYERS)]
    guesses = [*([route[0], route[1]] for route in routes[1:]), []] if early else None
    for _ in range(3):
        hits = run_token(gpu, experts, routes, guesses)
        gpu.finish()
    # the first layer has no guesses; of another's route two are copied ahead unless they are kept
    assert sum(hits) >= kept + (0 if kept else 2 * (LAYERS - 1) * bool(early))
    assert sum(hits) <= kept + 2 * (LAYERS - 1) * bool(early) + len(experts._passing)


def test_a_prompt_reads_what_vram_keeps_and_takes_none_of_its_slots():
    gpu = Gpu(passing_slots(2) + 6, random.Random(0))
    source = Ready(random.Random(0))
    experts = SlotExperts(source, gpu, LAYERS, ROUTE, early_copies=2)
    routes = [[1, 2, 3]] * LAYERS
    guesses = [[1, 2]] * (LAYERS - 1) + [[]]
    for _ in range(2):
        run_token(gpu, experts, routes, guesses)
    kept = experts._kept.in_order()
    assert len(kept) == 6
    swept, layer = [], experts.kept_keys()[0].layer
    sweep = source.sweep
    source.sweep = lambda layer, ids, hold: swept.extend(ids) or sweep(layer, ids, hold)
    for wave in experts.batches(layer, list(range(EXPERTS))):
        gpu.launch(layer, wave)
    gpu.finish()
    assert experts._kept.in_order() == kept
    here = {key.expert for key in experts.kept_keys() if key.layer == layer}
    assert swept == [expert for expert in range(EXPERTS) if expert not in here], "read again"
    assert here
    for key in kept:
        slot = experts._kept.slot_of(key)
        assert torch.equal(gpu.slots[slot], content(*divmod(key, KEY_STRIDE)))


def test_right_guesses_are_hits_and_wrong_ones_go_first():
    gpu = Gpu(passing_slots(2), random.Random(0))
    experts = SlotExperts(Ready(random.Random(0)), gpu, LAYERS, ROUTE, early_copies=2)
    routes = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3], [4, 5, 6]]
    guesses = [[4, 0, 5], [0, 11, 10], [1, 2, 3], [4, 5, 6], []]
    assert run_token(gpu, experts, routes, guesses) == [0, 1, 0, 2, 2]
    assert (experts.counters.early_issued, experts.counters.early_used) == (8, 5)
    copied = experts.counters.copied_nbytes // NBYTES
    assert copied == LAYERS * ROUTE - 5 + 8  # what was not found, and every early copy
    gpu.finish()


def test_within_a_graph_early_copies_follow_what_is_required():
    """They are held back until the graph says that the layer's experts are computed, and go at its next route."""
    gpu, computed = Gpu(passing_slots(2), random.Random(0)), []
    paced = PacedCopier(gpu)
    experts = SlotExperts(Ready(random.Random(0)), paced, LAYERS, ROUTE, early_copies=2)
    paced.begin(computed.__contains__)
    for layer in range(3):
        paced.reach(layer)
        if layer == 2:  # nobody looked: the next route says as much
            assert len(gpu.queues["copy"]) == 3  # two copies and their mark
            gpu.finish()
        for wave in experts.waves(layer, [1, 2, 3], [4, 5, 6]):
            paced.arrive(limit_s=60)
            gpu.launch(layer, wave)
        paced.look()
        assert not gpu.queues["copy"], "speculative before required"
        if layer == 0:
            computed.append(0)
            paced.look()
            assert len(gpu.queues["copy"]) == 3
            gpu.finish()
        gpu.finish_compute()
    paced.end()
    gpu.finish()


def test_what_is_in_ram_waits_for_no_early_copy():
    """It is launched before what was copied early, and the next early copies do not wait for the latter."""
    gpu, order = Gpu(passing_slots(2), random.Random(0)), []
    experts = SlotExperts(Ready(random.Random(0)), gpu, LAYERS, ROUTE, early_copies=2)
    for layer, (route, guesses) in enumerate([([1, 2, 3], [4, 5, 6]), ([4, 1, 2], [7, 8, 9])]):
        gpu.finish_compute()
        for wave in experts.waves(layer, route, guesses):
            order.append([expert for expert, _ in wave])
            gpu.launch(layer, wave)
    assert order == [[1, 2, 3], [1, 2], [4]]
    assert [what for what, _ in gpu.queues["compute"]] == ["run", "mark", "wait", "run"]
    mark = gpu.queues["compute"][1][1]
    assert [item for what, item in gpu.queues["copy"] if what == "wait"][-1] == mark
    gpu.finish()


class Late(Ready):
    """The last expert of a route comes from the drive."""

    def waves(self, layer, ids, guesses=()):
        yield [self._give(layer, e, self.lent) for e in ids[:-1]]
        self.guessed = list(guesses)
        yield []
        yield [self._give(layer, e, self.lent) for e in ids[-1:]]


def test_early_copies_follow_what_comes_from_the_drive():
    """It is read over the link, too, behind what was copied early."""
    gpu, order = Gpu(passing_slots(2), random.Random(0)), []
    experts = SlotExperts(Late(random.Random(0)), gpu, LAYERS, ROUTE, early_copies=2)
    for layer, (route, guesses) in enumerate([([1, 2, 3], [4, 5, 6]), ([4, 1, 2], [7, 8, 9])]):
        gpu.finish_compute()
        for wave in experts.waves(layer, route, guesses):
            order.append([expert for expert, _ in wave])
            gpu.launch(layer, wave)
    assert order[2:] == [[1], [4], [2]]
    last_mark = [item for what, item in gpu.queues["compute"] if what == "mark"][-1]
    assert [what for what, _ in gpu.queues["compute"]][-2:] == ["run", "mark"]
    assert [item for what, item in gpu.queues["copy"] if what == "wait"][-1] == last_mark
    gpu.finish()


def test_guesses_that_can_be_gone_through_once_serve_drive_and_copies():
    """Those of several conversations are made as they are asked for."""
    gpu, source = Gpu(passing_slots(2), random.Random(0)), Late(random.Random(0))
    experts = SlotExperts(source, gpu, LAYERS, ROUTE, early_copies=2)
    for wave in experts.waves(0, [1, 2, 3], iter([4, 5, 6])):
        gpu.launch(0, wave)
    assert source.guessed == [4, 5, 6]
    assert source.given_ahead == {(1, 4), (1, 5)}
    assert experts.counters.early_issued == 2
    gpu.finish()


def test_nothing_is_waited_for_where_no_guess_is_in_ram():
    gpu, source = Gpu(passing_slots(2), random.Random(0)), Ready(random.Random(0))
    source.ahead = lambda layer, ids: []
    experts = SlotExperts(source, gpu, LAYERS, ROUTE, early_copies=2)
    for wave in experts.waves(0, [1, 2, 3], [4, 5, 6]):
        gpu.launch(0, wave)
    assert [what for what, _ in gpu.queues["compute"]] == ["run"]
    assert not gpu.queues["copy"]


def test_within_a_graph_one_early_copy_goes_beside_what_is_in_ram():
    gpu = Gpu(passing_slots(2), random.Random(0))
    paced, computed = PacedCopier(gpu), []
    experts = SlotExperts(Ready(random.Random(0)), paced, LAYERS, ROUTE, early_copies=2)
    paced.begin(computed.__contains__)
    copies = []
    for layer, (route, guesses) in enumerate([([1, 2, 3], [4, 5, 6]), ([4, 1, 2], [7, 8, 9])]):
        paced.reach(layer)
        gpu.finish()
        for wave in experts.waves(layer, route, guesses):
            paced.arrive(limit_s=60)
            gpu.launch(layer, wave)
        copies.append([what for what, _ in gpu.queues["copy"]])
        gpu.finish_compute()
    assert copies == [[], ["run", "mark"]]
    computed.append(1)
    paced.look()
    paced.end()
    gpu.finish()


def test_a_copy_that_never_ends_is_an_error():
    gpu = Gpu(passing_slots(2), random.Random(0))
    paced = PacedCopier(gpu)
    paced.begin(lambda layer: False)
    gpu.queues["copy"].append(("wait", 99))
    paced.wait(paced.mark())
    with pytest.raises(DeviceError, match=r"has not ended within 0\.01 s"):
        paced.arrive(limit_s=0.01)


def test_too_few_slots_are_refused():
    gpu = Gpu(2 * BATCH_EXPERTS - 1, random.Random(0))
    with pytest.raises(ValueError, match="15 slots, at least 16 are needed"):
        SlotExperts(Ready(random.Random(0)), gpu, LAYERS, ROUTE)


def test_one_by_one_is_the_same_experts():
    gpu = Gpu(passing_slots(0), random.Random(0))
    experts = SlotExperts(Source(random.Random(1)), gpu, LAYERS, ROUTE)
    seen = dict(one_by_one(experts.waves(2, [5, 0, 7])))
    assert {e: int(r[0]) for e, r in seen.items()} == {e: 2 * EXPERTS + e for e in (5, 0, 7)}
