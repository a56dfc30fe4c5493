"""The simulator by hand, against the bound, against the drive that it imagines, and against the real engine.

Nothing here is timed: what the real engine is compared by is what it read, and the time that its simulated drive took
for that.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine import Engine
from runtime.errors import UserError
from runtime.experts.policies import most_hits
from runtime.experts.routes import Kind, RouteHeader, RouteTrace, Step, read_routes
from runtime.locality import Locality, generate
from runtime.session import Session
from runtime.simulated_drive import LineDrive, SharedDrive
from runtime.simulator import Machine, Setting, Simulation, cache_maker
from runtime.stats import ExpertCounters
from runtime.units import GIB, MIB
from stages.simulate import machine_of

HEADER = RouteHeader("small", num_layers=4, num_experts=32, top_k=4, record_nbytes=MIB)
ALIKE = Locality(1.0, 0.3, 0.7, 0.9)
MIB_S = 1 / 1024  # as GiB/s


def token(*layers, guesses=(), forward=0) -> list[Step]:
    return [
        Step(Kind.decode, forward, layer, tuple(ids), tuple(guesses) if not layer else ())
        for layer, ids in enumerate(layers)
    ]


def replay(steps, machine, **setting):
    header = RouteHeader("two", 2, 8, 2, MIB)
    chosen = {"cache_rows": 16, "prefetch_experts": 0, "window": 1, "pieces": 1} | setting
    simulation = Simulation(header, machine, Setting(**chosen))
    return simulation.replay(RouteTrace(header, steps)), simulation


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_a_token_on_a_cpu_by_hand():
    """1 MiB takes 10 ms; the first expert of a layer is computed while the second is read."""
    machine = Machine(100 * MIB_S, latency_us=500, layer_ms=3, expert_ms=4, token_ms=5)
    steps = token([0, 1], [2, 3]) + token([0, 1], [2, 3], forward=1)
    (cold, warm), simulation = replay(steps, machine)
    # a layer: 3, first read 10.5, second 10.5 more (of which 4 computing), 4 computing
    assert cold.total_ms == pytest.approx(2 * (3 + 21 + 4) + 5)
    assert cold.drive_wait_ms == pytest.approx(2 * (10.5 + 6.5))
    assert warm.total_ms == pytest.approx(2 * (3 + 8) + 5)
    assert (warm.counters.hits, warm.counters.read_nbytes, warm.drive_wait_ms) == (4, 0, 0)
    assert simulation.clock.drive.busy_s == pytest.approx(0.040)


def test_a_guess_is_read_while_the_layer_computes():
    """Layer 1's first expert is on its way when layer 0 has its own; it is late by what computing did not hide."""
    machine = Machine(100 * MIB_S, layer_ms=3, expert_ms=4)
    (plain,), _ = replay(token([0], [2]), machine)
    (ahead,), _ = replay(token([0], [2], guesses=[2]), machine, prefetch_experts=1)
    assert plain.total_ms == pytest.approx(2 * (3 + 10 + 4))
    assert ahead.total_ms == pytest.approx(2 * (3 + 10 + 4) - 4 - 3)
    assert (ahead.counters.late, ahead.counters.guesses_used) == (1, 1)
    (wrong,), _ = replay(token([0], [2], guesses=[5]), machine, prefetch_experts=1)
    # the drive is in the middle of the wrong one: the right one waits for its end
    assert wrong.total_ms == pytest.approx(2 * (3 + 10 + 4) + 10 - 4 - 3)
    assert wrong.counters.wasted_nbytes == MIB


def test_a_token_on_a_gpu_by_hand():
    """In place over a link of 1,000 MiB/s: 1 ms an expert; the host's 2 ms stand between route and launch."""
    machine = Machine(100 * MIB_S, link_gib_s=1000 * MIB_S, layer_ms=3, host_ms=2, token_ms=5)
    steps = token([0, 1], [2, 3]) + token([0, 1], [2, 3], forward=1)
    (_, warm), _ = replay(steps, machine)
    assert warm.total_ms == pytest.approx(2 * (3 + 2 + 2) + 5)
    assert warm.device_wait_ms == pytest.approx(3 + 2 + 3 + 2 + 5)
    assert warm.host_ms == pytest.approx(4)
    assert warm.counters.copied_nbytes == 4 * MIB
    guessed = token([0, 1], [2, 3]) + token([0, 1], [2, 3], guesses=[2], forward=1)
    (_, ahead), _ = replay(guessed, machine, early_copies=1)
    # one expert of layer 1 is copied while layer 1 computes, behind those of layer 0
    assert ahead.total_ms == pytest.approx(warm.total_ms - 1)
    assert (ahead.counters.early_used, ahead.counters.vram_hits) == (1, 1)


def test_in_place_copied_first_and_the_host_behind_a_launch_by_hand():
    """In place 1 MiB takes 2 ms, copied 1 ms and then 0.5 ms from VRAM while the next is copied."""
    rates = {"link_gib_s": 1000 * MIB_S, "in_place_gib_s": 500 * MIB_S, "vram_gib_s": 2000 * MIB_S}
    machine = Machine(100 * MIB_S, **rates, layer_ms=3, host_ms=2)
    steps = token([0, 1], [2, 3]) + token([0, 1], [2, 3], forward=1)
    (_, warm), _ = replay(steps, machine)
    assert warm.total_ms == pytest.approx(2 * (3 + 2 + 4))
    prompt = [Step(Kind.sweep, 2, layer, tuple(range(8))) for layer in (0, 1)]
    again = token([0, 1], [2, 3], forward=3)
    found, _ = replay([*prompt, *again], machine, reads_in_place=False)
    assert found[0].total_ms == pytest.approx(2 * (3 + 2 + 1 + 1 + 0.5))
    for host_after, extra in ((1, 0), (9, 2 * (9 - 4))):  # hidden by 4 ms of experts
        busy = Machine(100 * MIB_S, **rates, layer_ms=3, host_ms=2, host_after_ms=host_after)
        (_, last), _ = replay([*token([0, 1], [2, 3]), *token([0, 1], [2, 3], forward=1)], busy)
        assert last.total_ms == pytest.approx(warm.total_ms + extra)


def warm_token(machine, guesses=(), **setting):
    """Return the second of two equal tokens, every expert in RAM, and the simulation."""
    steps = token([0, 1], [2, 3]) + token([0, 1], [2, 3], guesses=guesses, forward=1)
    (_, warm), simulation = replay(steps, machine, **setting)
    return warm, simulation


def test_the_cpu_computes_one_of_two_experts_by_hand():
    """The link takes 1 ms an expert, the CPU as long, and half a millisecond to start: 1.5 ms instead of 2."""
    rates = {"link_gib_s": 1000 * MIB_S, "layer_ms": 3, "host_ms": 2, "token_ms": 5}
    machine = Machine(100 * MIB_S, **rates, cpu_gib_s=1000 * MIB_S, cpu_ms=0.5)
    warm, _ = warm_token(machine)
    assert warm.total_ms == pytest.approx(2 * (3 + 2 + 1.5) + 5)
    assert (warm.counters.cpu_experts, warm.counters.cpu_ns) == (2, 3_000_000)
    assert warm.counters.copied_nbytes == 2 * MIB
    # one that takes 2.5 ms for an expert would be waited for: it is left alone
    slow = Machine(100 * MIB_S, **rates, cpu_gib_s=500 * MIB_S, cpu_ms=0.5)
    warm, _ = warm_token(slow)
    assert warm.total_ms == pytest.approx(2 * (3 + 2 + 2) + 5)
    assert warm.counters.cpu_experts == 0
    # copied first: 1 ms, then 0.5 ms from VRAM, beside 1.5 ms of the CPU
    copied = Machine(
        100 * MIB_S, **rates, cpu_gib_s=1000 * MIB_S, cpu_ms=0.5, vram_gib_s=2000 * MIB_S
    )
    prompt = [Step(Kind.sweep, 2, layer, tuple(range(8))) for layer in (0, 1)]
    (found,), _ = replay([*prompt, *token([0, 1], [2, 3], forward=3)], copied, reads_in_place=False)
    assert found.total_ms == pytest.approx(2 * (3 + 2 + 1.5) + 5)
    assert found.counters.cpu_experts == 2


@pytest.mark.parametrize(
    ("ram", "guesses", "expert_ms"),
    [
        (2000, (), 1.0),  # enough for both
        (1500, (), 1.5),  # half an expert beside the link's 1 ms, the other half alone
        (1100, (), 1.9),
        (1500, (5,), 1.6),  # a wrong guess is being read at 100 MiB/s, which leaves 400
        (900, (), 1 + 1 / 0.9),  # the link leaves nothing: the CPU begins behind it
    ],
)
def test_the_cpu_gets_what_link_and_drive_leave_of_the_ram(ram, guesses, expert_ms):
    machine = Machine(
        100 * MIB_S, link_gib_s=1000 * MIB_S, layer_ms=3, host_ms=2, cpu_gib_s=1000 * MIB_S, ram_gib_s=ram * MIB_S
    )  # fmt: skip
    warm, _ = warm_token(machine, guesses, prefetch_experts=len(guesses))
    assert warm.counters.cpu_experts == 2
    assert warm.total_ms == pytest.approx(2 * (3 + 2 + expert_ms))


@pytest.mark.parametrize(
    ("in_place", "cpu", "ram", "ms"),
    [
        (0, 0, 0, 10.0),  # 10 MiB over a link of 1,000 MiB/s
        (500, 0, 0, 20.0),  # which gives less to kernels
        (0, 1000, 0, 5.0),
        (0, 1000, 1250, 8.0),  # 250 are left for the CPU
        (0, 1000, 800, 10.0),
    ],
)
def test_a_head_in_ram_by_hand(in_place, cpu, ram, ms):
    machine = Machine(
        100 * MIB_S, link_gib_s=1000 * MIB_S, in_place_gib_s=in_place * MIB_S, head_nbytes=10 * MIB,
        head_cpu_gib_s=cpu * MIB_S, ram_gib_s=ram * MIB_S, token_ms=5,
    )  # fmt: skip
    experts_ms = 4 * (2 if in_place else 1)
    warm, _ = warm_token(machine)
    assert warm.total_ms == pytest.approx(experts_ms + 5 + ms)


@pytest.mark.parametrize("key", ["head_nbytes", "cpu_gib_s"])
def test_what_is_beside_a_gpu_needs_one(make_config, key):
    drive = {"hw.drive.simulate_gib_s": 8.2}
    with pytest.raises(UserError, match="of a machine with a GPU"):
        machine_of(make_config(**drive, **{f"simulate.{key}": 10}))
    machine = machine_of(
        make_config(**drive, **{f"simulate.{key}": 10, "simulate.link_gib_s": 26.6})
    )
    assert getattr(machine, key) == 10


def test_forgetting_and_prompts():
    forget = Step(Kind.forget, 1, 0, ())
    prompt = [Step(Kind.sweep, 0, layer, (0, 1, 2)) for layer in (0, 1)]
    machine = Machine(100 * MIB_S)
    steps = prompt + token([0, 1], [2, 3], forward=1)
    (first,), _ = replay(steps, machine)
    assert (first.counters.hits, first.counters.misses) == (3, 1), (
        "a prompt leaves what there was room for"
    )
    (_, second), _ = replay([*steps, forget, *token([0, 1], [2, 3], forward=2)], machine)
    assert (second.counters.hits, second.counters.misses) == (0, 4)


# ---- the drives ------------------------------------------------------------------------------------------------------

# pause before it, bytes
reads = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 2**20)), min_size=1, max_size=12)


def drain(drive, begins) -> dict[int, float]:
    ends, now = {}, 0.0
    for number, (pause, nbytes) in enumerate(begins):
        now += pause
        while drive.next_end() <= now:
            at = drive.next_end()
            ends[drive.end()] = at
        drive.begin(now, nbytes, number)
    while drive.next_end() < math.inf:
        at = drive.next_end()
        ends[drive.end()] = at
    return ends


@given(begins=reads, latency_us=st.integers(0, 10**6))
def test_a_line_is_the_simulated_drive_of_real_runs(begins, latency_us):
    """`drive.SimulatedDrive`: a read's end is when the line has had its bytes, then the latency passes."""
    machine = Machine(2**20 / GIB, latency_us, depth=10**6)  # 1 MiB a second
    ends = drain(LineDrive(machine), begins)
    free_at = now = 0.0
    for number, (pause, nbytes) in enumerate(begins):
        now += pause
        free_at = max(free_at, now) + nbytes / 2**20
        assert ends[number] == pytest.approx(free_at + latency_us / 1e6)


@given(begins=reads, latency_us=st.integers(0, 10**6), depth=st.integers(1, 4))
def test_a_shared_drive_by_small_steps(begins, latency_us, depth):
    """Against a drive that hands out a thousandth of its rate's second at a time."""
    machine = Machine(2**20 / GIB, latency_us, depth, is_shared=True)
    drive = SharedDrive(machine)
    ends = drain(drive, begins)
    assert sorted(ends) == list(range(len(begins)))
    assert drive.busy_s * 2**20 == pytest.approx(sum(nbytes for _, nbytes in begins))
    step = 1e-3
    starts, total = [], 0.0
    for pause, nbytes in begins:
        total += pause
        starts.append((total, nbytes))
    waiting, inside, left, found = list(range(len(begins))), [], {}, {}
    now = 0.0
    while len(found) < len(begins):
        now += step
        while waiting and starts[waiting[0]][0] <= now and len(inside) < depth:
            number = waiting.pop(0)
            inside.append((number, now + latency_us / 1e6))
            left[number] = float(starts[number][1])
        flowing = [number for number, ready in inside if ready <= now]
        for number in flowing:
            left[number] -= step * 2**20 / len(flowing)
            if left[number] <= 0:
                found[number] = now
                inside = [item for item in inside if item[0] != number]
    for number, at in found.items():
        assert ends[number] == pytest.approx(at, abs=step * 4 * (len(begins) + 1))


# ---- policies and settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 20, 60])
def test_belady_in_the_streamer_is_the_bound(rows):
    trace = generate(HEADER, ALIKE, 60)
    requests = [[(s.layer, e) for e in s.experts] for s in trace.steps]
    hits = {}
    for policy in ("auto", "lru", "lfu", "slru", "belady"):
        simulation = Simulation(
            HEADER, Machine(1.0), Setting(rows, prefetch_experts=0), cache_maker(policy, trace)
        )
        simulation.replay(trace)
        hits[policy] = simulation.counters.hits
    assert hits["belady"] == most_hits(requests, rows) == max(hits.values())
    if rows >= 16:
        layered = Simulation(
            HEADER, Machine(1.0), Setting(rows, 0), cache_maker("per_layer", trace)
        )
        layered.replay(trace)
        assert 0 < layered.counters.hits <= hits["belady"]


@settings(max_examples=40)
@given(
    rows=st.integers(8, 128), guesses=st.integers(0, 4), copies=st.integers(0, 2), kept=st.integers(0, 40),
    policy=st.sampled_from(["auto", "lru", "lfu", "slru", "belady"]), link=st.sampled_from([0.0, 8.0]),
    is_shared=st.booleans(), depth=st.integers(1, 8), seed=st.integers(0, 99), cpu=st.sampled_from([0.0, 4.0, 40.0]),
)  # fmt: skip
def test_any_setting_adds_up(
    rows, guesses, copies, kept, policy, link, is_shared, depth, seed, cpu
):
    """No time is lost or won: parts make the whole, every expert is found or read, the drive is never too fast."""
    machine = Machine(
        1.0, 50, depth, is_shared, link, 100.0, expert_ms=0.2, layer_ms=0.5, host_ms=0.1, cpu_gib_s=cpu,
        cpu_ms=0.02, ram_gib_s=30.0,
    )  # fmt: skip
    trace = generate(HEADER, ALIKE, 12, seed)
    setting = Setting(rows, guesses, copies, kept if link else 0, window=2, pieces=2)
    simulation = Simulation(HEADER, machine, setting, cache_maker(policy, trace))
    stats = simulation.replay(trace)
    total = ExpertCounters()
    for one in stats:
        total = total.plus(one.counters)
        assert one.drive_wait_ms >= 0
        assert one.device_wait_ms >= 0
        assert one.host_ms >= -1e-5  # the drive's wait is kept in whole nanoseconds
    assert total.lookups == 12 * 16
    assert total.cpu_experts <= (total.hits if cpu and link else 0)
    assert total.guesses_issued >= total.guesses_used + total.guesses_wasted
    reads = total.misses + total.guesses_issued - total.guesses_cancelled
    assert total.read_nbytes == reads * MIB
    clock = simulation.clock
    while clock.drive.next_end() < math.inf:  # the last guesses are still being read
        clock.step()
    assert clock.drive.busy_s * GIB == pytest.approx(reads * MIB)
    assert clock.now >= clock.drive.busy_s * (1 - 1e-9)
    again = Simulation(HEADER, machine, setting, cache_maker(policy, trace)).replay(trace)
    assert [one.total_ms for one in again] == [one.total_ms for one in stats]


# ---- against the real engine -----------------------------------------------------------------------------------------

RATE = 0.25  # GiB/s of the real run's simulated drive, and of the simulator's


@pytest.mark.parametrize(("ram_gib", "guesses"), [(0.003, 0), (0.006, 0), (0.0, 2), (0.006, 4)])
def test_a_measured_run_of_the_bundled_model(
    make_config, tiny_files, heldout_tokens, tmp_path, ram_gib, guesses
):
    """A prompt and 40 tokens. Without guesses all counts are equal; with them, which are taken back depends on the
    moment, and the time that the drive is busy for a token is within 10 %."""
    config = make_config(
        **{
            "cache.ram_gib": ram_gib, "prefetch.experts": guesses, "hw.drive.simulate_gib_s": RATE,
            "hw.drive.simulate_latency_us": 50.0,
        }
    )  # fmt: skip
    engine = Engine.open(config, tiny_files)
    engine.record_routes(tmp_path / "routes.bin")
    session = Session(engine)
    session.sync(heldout_tokens[:20])
    before = engine.counters().experts
    for count in range(21, 61):
        session.sync(heldout_tokens[:count])
    real = engine.counters().experts.since(before)
    rows = engine.plan.cache_rows
    sweep_rows = engine.plan.sweep_rows
    engine.close()

    trace = read_routes(tmp_path / "routes.bin")
    # about what two cores take; what matters is that the drive is slower
    machine = Machine(RATE, 50, depth=8, expert_ms=0.04, layer_ms=0.5)
    setting = Setting(rows, guesses, sweep_rows=sweep_rows)
    stats = Simulation(trace.header, machine, setting, cache_maker("auto", trace)).replay(trace)
    found = ExpertCounters()
    for one in stats:
        found = found.plus(one.counters)
    assert len(stats) == 40
    assert found.lookups == real.lookups == 40 * 48
    if not guesses:
        names = ("hits", "late", "misses", "read_nbytes", "guesses_issued", "wasted_nbytes")
        assert [getattr(found, n) for n in names] == [getattr(real, n) for n in names]
        return
    busy_ms, real_busy_ms = (c.read_nbytes / (RATE * GIB) * 1e3 / 40 for c in (found, real))
    assert busy_ms == pytest.approx(real_busy_ms, rel=0.1)
    assert found.misses == pytest.approx(real.misses, rel=0.1)
    assert found.guesses_used == pytest.approx(real.guesses_used, rel=0.1)
    assert found.guesses_used > 0
