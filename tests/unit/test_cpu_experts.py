"""FP4 experts on CPU cores against their definitions, how a layer is shared with a GPU, and what is refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from conf.schema import ConfigError
from kernels import reference, reference_deepseek
from kernels.formats import MX_GROUP, NVFP4_GROUP, mxfp4_dequantize
from kernels.host_rows import take_rows
from runtime.cores import CorePlan, describe, with_computing
from runtime.experts import cpu_share
from runtime.experts.cpu_share import CpuShare, Workers, balanced_counts, fixed_counts, open_share
from runtime.models.cpu_experts import Mxfp4Compute, Nvfp4Compute

LIMIT = 3.0  # low enough to clamp some gates


def codes_nbytes(hidden: int, intermediate: int) -> int:
    return 3 * hidden * intermediate // 2


def random_records(count: int, hidden: int, intermediate: int, group: int, scales, skew: int = 0):
    """Records of random codes; every code and both signs of zero are among them.  scales: (lowest, how many) bytes."""
    generator = torch.Generator().manual_seed(hidden + intermediate)
    codes = codes_nbytes(hidden, intermediate)
    shape = (count, skew + codes + 3 * hidden * intermediate // group)
    records = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    low, many = scales
    records[:, skew + codes :] = low + records[:, skew + codes :] % many
    return list(records.unbind(0))


def nvfp4_case(hidden: int, intermediate: int, count: int = 3):
    records = random_records(count, hidden, intermediate, NVFP4_GROUP, (0, 0x7F))
    generator = torch.Generator().manual_seed(1)
    scales = (0.5 + torch.rand(2, count, 3, generator=generator)) * 1e-4
    return records, scales, torch.randn(1, hidden, generator=generator)


def open_deepseek(hidden: int, intermediate: int, skew: int):
    """Return a function that cuts a record as `deepseek.open_record` does: the file's order is gate, down, up."""

    def cut(key, record):
        del key
        at, scales_at = skew, skew + codes_nbytes(hidden, intermediate)
        found = []
        shapes = (intermediate, hidden), (hidden, intermediate), (intermediate, hidden)
        for height, width in shapes:
            codes, steps = height * width // 2, height * width // MX_GROUP
            found.append(
                mxfp4_dequantize(
                    record[at : at + codes].view(height, -1),
                    record[scales_at : scales_at + steps].view(height, -1),
                )
            )
            at, scales_at = at + codes, scales_at + steps
        return found[0], found[2], found[1]

    return cut


@pytest.fixture(params=["compiled", "torch"])
def kernels(request):
    if request.param == "torch":
        return None
    pytest.importorskip("numba")
    from kernels import cpu_experts

    cpu_experts.set_threads(1)
    return cpu_experts


# ---- kernels ---------------------------------------------------------------------------------------------------------


# the released shape; 48 and 80: the last task of gate, of down, is shorter
@pytest.mark.parametrize(("hidden", "intermediate"), [(2560, 640), (80, 48), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_experts_are_the_definition(kernels, hidden: int, intermediate: int, dtype):
    records, scales, x = nvfp4_case(hidden, intermediate)
    compute = Nvfp4Compute(scales, 4, hidden, intermediate, dtype, torch.device("cpu"), kernels)
    compute.receive(x.to(dtype))
    out = torch.full((4, hidden), float("nan"))
    experts = [2, 0]
    compute.run(1, experts, [records[e] for e in experts], [3, 1], out)
    for row, expert in zip(out, experts, strict=False):
        wanted = reference.nvfp4_swiglu_expert(
            x.to(dtype).float(), records[expert], scales[1, expert], intermediate
        )[0]
        error = float((row - wanted).norm() / wanted.norm())
        print(f"relative error {error:.1e}")
        assert error < 2e-6  # fp32 sums in another order
    assert out[2:].isnan().all(), "only as many rows as there are experts"


# a payload may start at any multiple of four; the last is the released shape
@pytest.mark.parametrize(
    ("hidden", "intermediate", "skew"), [(256, 64, 0), (256, 64, 4), (96, 32, 4), (5120, 2304, 4)]
)
def test_mxfp4_experts_are_the_definition(kernels, hidden, intermediate, skew):
    records = random_records(3, hidden, intermediate, MX_GROUP, (118, 9), skew)
    generator = torch.Generator().manual_seed(2)
    x = reference_deepseek.act_rounded(torch.randn(1, hidden, generator=generator).bfloat16())
    weights = torch.rand(4, generator=generator)
    cut = open_deepseek(hidden, intermediate, skew)
    offsets = skew, skew + codes_nbytes(hidden, intermediate)
    compute = Mxfp4Compute(
        4, hidden, intermediate, LIMIT, torch.device("cpu"), lambda key: offsets, cut, kernels
    )
    compute.receive(x[0].bfloat16(), weights)
    out = torch.full((4, hidden), float("nan"))
    compute.run(0, [2, 0, 1], [records[e] for e in (2, 0, 1)], [3, 0, 2], out)
    for row, expert, place in zip(out, (2, 0, 1), (3, 0, 2), strict=False):
        wanted = reference_deepseek.swiglu_expert(
            x.bfloat16(), *cut(None, records[expert]), LIMIT, weights[place].view(1, 1)
        )[0].float()
        # sums run in the defined order; exp may differ in its last bit, which one rounding in thousands shows
        same = float((row == wanted).float().mean())
        print(f"{same:.5f} equal to the bit")
        assert same > 0.99
        assert torch.allclose(row, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def test_every_byte_of_codes_and_scales_is_decoded():
    """One row a scale byte, one column a code: against the tables that define the formats."""
    pytest.importorskip("numba")
    from kernels import cpu_experts
    from kernels.formats import nvfp4_values

    codes = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    for scale in range(127):
        row = codes[scale].contiguous()
        steps = torch.full((32,), scale, dtype=torch.uint8)
        wanted = nvfp4_values(row.view(1, -1), steps.view(1, -1))[0]
        low, high = np.empty(64, np.uint32), np.empty(64, np.uint32)
        cpu_experts._decode(row.numpy().view(np.uint32), low, high)
        found = np.stack([low.view(np.int8), high.view(np.int8)], axis=1).reshape(-1)
        assert np.array_equal(found * cpu_experts.HALF_E4M3[scale], wanted.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_host_go_to_their_places(dtype):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(3, 1500, generator=generator).to(dtype).float()
    out = torch.zeros(5, 1500, dtype=dtype)
    table = torch.tensor([0, source[2].data_ptr(), 0, source[0].data_ptr(), 0])
    take_rows(table, out)
    assert torch.equal(out[1].float(), source[2])
    assert torch.equal(out[3].float(), source[0])
    assert not out[[0, 2, 4]].any()


# ---- the split -------------------------------------------------------------------------------------------------------


def test_a_fixed_share_is_rounded_to_whole_experts():
    assert fixed_counts(0.5, 6) == (0, 1, 1, 2, 2, 3, 3)
    assert fixed_counts(1, 3) == (0, 1, 2, 3)
    assert not any(fixed_counts(0, 10))


@pytest.mark.parametrize("first_s", [1.0, 2.5, 40.0])
@pytest.mark.parametrize("link_s", [0.3, 1.0, 3.0])
def test_no_other_split_ends_earlier(first_s: float, link_s: float):
    counts = balanced_counts(first_s, 1.0, link_s, 10)
    for total, chosen in enumerate(counts):
        ends = [max((first_s + n - 1) if n else 0, (total - n) * link_s) for n in range(total + 1)]
        assert ends[chosen] == min(ends)
        assert chosen == ends.index(min(ends)), "of equals the CPU takes fewer"


def test_a_slow_cpu_takes_nothing():
    assert not any(balanced_counts(50.0, 40.0, 1.0, 10))


class Recorded:
    """A family's arithmetic that notes what it is asked for, and takes as long as it is told."""

    def __init__(self, clock=None, each_s=0.0):
        self.asked, self.clock, self.each_s = [], clock, each_s

    def set_threads(self, count):
        return count

    def run(self, layer, experts, records, places, out):
        self.asked.append((layer, list(experts), list(places)))
        for row, expert in zip(out, experts, strict=False):
            row.fill_(float(expert))
        if self.clock is not None:
            self.clock.now += self.each_s * len(experts)


def wave(*experts: int):
    return [(expert, torch.full((4,), expert, dtype=torch.uint8)) for expert in experts]


def test_the_likeliest_and_those_worth_vram_stay_with_the_gpu():
    share = CpuShare(Recorded(), fixed_counts(0.5, 6), 8, torch.device("cpu"))
    share.arm()
    taken, left = share.take(wave(9, 3, 7, 1, 5, 4), lambda expert: expert in (5, 9))
    assert [expert for expert, _ in taken] == [4, 1, 7]
    assert [expert for expert, _ in left] == [9, 3, 5]


def test_only_a_layer_that_was_armed_for_is_shared():
    share = CpuShare(Recorded(), fixed_counts(1, 6), 8, torch.device("cpu"))
    assert not share.take(wave(1, 2), lambda expert: False)[0]
    share.arm()
    assert len(share.take(wave(1, 2), lambda expert: False)[0]) == 2
    assert not share.take(wave(1, 2), lambda expert: False)[0], "armed for one layer"


def test_rows_lie_by_the_experts_rank_in_the_route():
    compute = Recorded()
    share = CpuShare(compute, fixed_counts(0.5, 4), 8, torch.device("cpu"))
    share.arm()
    assert not share.has_rows
    share.run(3, [20, 5, 11, 8], wave(11, 5))
    assert compute.asked == [(3, [11, 5], [2, 0])]
    rows = torch.zeros(4, 8)
    share.put(rows)
    assert rows[:, 0].tolist() == [5, 0, 11, 0]
    through_table = torch.zeros(4, 8)
    take_rows(share.table, through_table)  # what a GPU does
    assert torch.equal(through_table, rows)
    share.take([], lambda expert: False)
    assert not share.has_rows, "nothing is left of the layer before"


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now

    def perf_counter_ns(self):
        return int(self.now * 1e9)


class Slots:
    share = None

    def __init__(self):
        self.workers = Workers((), 2, [torch.zeros(16, dtype=torch.uint8)] * 12)


def opened(monkeypatch, wanted: str, cpu_s: float, link_s: float):
    """Open a share on a machine where the two sides take so long for an expert."""
    clock, slots = Clock(), Slots()
    monkeypatch.setattr(cpu_share, "time", clock)

    def over_link(records):
        clock.now += link_s * len(records)

    compute = Recorded(clock, cpu_s)
    share = open_share(wanted, slots, compute, torch.zeros(10, 8), over_link)
    assert slots.share is share
    return share


def test_auto_ends_both_sides_together(monkeypatch):
    share = opened(monkeypatch, "auto", cpu_s=1.5, link_s=1.0)
    share.arm()
    assert len(share.take(wave(*range(10)), lambda expert: False)[0]) == 4  # 6 against 6


def test_auto_turns_itself_off_and_says_so(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        assert opened(monkeypatch, "auto", cpu_s=30.0, link_s=1.0) is None
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["hw.cpu_experts=auto is off: the GPU alone is as fast"]


# ---- cores and refusals ----------------------------------------------------------------------------------------------


def test_computing_and_reading_have_cores_of_their_own():
    plan = with_computing(CorePlan(1, (9,), (0, 2, 3, 4, 5, 6, 7, 8)))
    assert (plan.reader_cpus, plan.computing_cpus) == ((0, 2), (3, 4, 5, 6, 7, 8))
    assert describe(plan) == "decoding on core 1, readers on 2 others, computing on 6 more"
    small = with_computing(CorePlan(1, (), (0, 2)))
    assert (small.reader_cpus, small.computing_cpus) == ((0,), (2,))


def test_no_more_cores_compute_than_were_asked_for():
    plan = CorePlan(1, (9,), (0, 2, 3, 4, 5, 6, 7, 8))
    found = [with_computing(plan, most) for most in (0, 2, 100)]
    assert [cut.computing_cpus for cut in found] == [(), (7, 8), (3, 4, 5, 6, 7, 8)]
    assert all(cut.reader_cpus + cut.computing_cpus == plan.reader_cpus for cut in found)


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        ("tiny", {"hw.cpu_experts": "most"}, "hw.cpu_experts is off, auto or a share from 0 to 1"),
        ("tiny", {"hw.cpu_experts": "1.5"}, "hw.cpu_experts is off, auto or a share from 0 to 1"),
        ("tiny", {"hw.cpu_experts": "nan"}, "hw.cpu_experts is off, auto or a share from 0 to 1"),
        ("tiny", {"hw.device": "cpu"}, "hw.device is cpu"),
        ("tiny", {"serve.max_batch": 2}, "one conversation at a time"),
        ("dense_synthetic", {}, "of models with FP4 experts"),
        ("tiny_deepseek", {"deepseek.arithmetic": "reference"}, "deepseek.arithmetic=native"),
    ],
)
def test_what_it_is_not_for_is_refused(make_config, model, settings, said):
    with pytest.raises(ConfigError, match=said):
        make_config(model, **{"hw.device": "cuda", "hw.cpu_experts": "auto", **settings})


def test_off_is_for_every_model(make_config):
    assert make_config("dense_synthetic", **{"serve.max_batch": 2}).hw.cpu_experts == "off"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_without_a_gpu_refuses(open_tiny):
    from runtime.errors import UserError

    with pytest.raises(UserError, match="this run has no GPU"):
        open_tiny(**{"hw.device": "auto", "hw.cpu_experts": "auto"})
