"""The CPU beside a real GPU: decoding with a share of the experts on the CPU against decoding without.

Both bundled models, 200 tokens, with and without graphs, caches from nothing to everything; a layer of the full shape.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels import reference
from kernels.host_rows import take_rows
from runtime.engine import Engine, EngineFiles
from runtime.experts.arena import HostArena
from runtime.experts.cpu_share import CpuShare, Workers, fixed_counts, open_share
from runtime.models.cpu_experts import Nvfp4Compute, compiled_kernels
from runtime.units import GIB
from tests.parity.deepseek_taught import drift_faults

pytestmark = pytest.mark.gpu

HAS_NUMBA = importlib.util.find_spec("numba") is not None
HIDDEN, INTERMEDIATE, TOP_K, RECORD_NBYTES = 2560, 640, 10, 2_764_800
DEEPSEEK_RECORD_GIB = 36_864 / GIB
TOKENS = 200


@pytest.fixture(scope="module")
def open_model(make_config, tiny_files, tiny_qwen):
    """Return a function: model and settings -> an open engine on the GPU; one at a time is open."""
    opened = []
    files = {
        "tiny": tiny_files,
        "tiny_deepseek": EngineFiles(tiny_qwen.parent / "tiny-deepseek"),
    }

    def open_engine(model: str, **settings) -> Engine:
        while opened:
            opened.pop().close()
        usual = {"hw.device": "cuda", "cache.ram_gib": 1.0, "hw.compute_threads": 4}  # tests beside
        config = make_config(model, **{**usual, **settings})
        opened.append(Engine.open(config, files[model]))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def decoded(engine, tokens):
    """Return the logits of a prompt's last token and of 200 decoded ones that are fed as they stand."""
    state = engine.new_state()
    rows = [engine.model.prefill(tokens[:80], state)[-1:].float().cpu()]
    rows += [engine.model.decode(token, state).float().cpu() for token in tokens[80 : 80 + TOKENS]]
    return torch.cat(rows)


def greedy(engine, prompt, count):
    """Return `count` greedy tokens behind a prompt."""
    state = engine.new_state()
    token = int(engine.model.prefill(prompt, state)[-1].argmax())
    found = []
    for _ in range(count):
        found.append(token)
        token = int(engine.model.decode(token, state)[0].argmax())
    return found


@pytest.fixture(scope="module")
def plain(open_model, heldout_tokens):
    """Return a function: what a model gives without a share, in fp32 for Qwen; computed once."""
    known = {}

    def of(model: str):
        if model not in known:
            dtype = {"hw.dtype": "float32"} if model == "tiny" else {}
            engine = open_model(model, **dtype)
            known[model] = (
                decoded(engine, heldout_tokens),
                greedy(engine, heldout_tokens[:40], TOKENS),
            )
        return known[model]

    return of


CASES = [
    {"hw.cpu_experts": "0.5", "cache.vram_gib": 0.0},  # all in RAM
    {"hw.cpu_experts": "1", "cache.vram_gib": 0.0, "hw.graphs": False},
    {"hw.cpu_experts": "1", "cache.vram_gib": 0.0, "prefetch.copy": 3},
    {"hw.cpu_experts": "0.5", "cache.ram_gib": "some", "cache.vram_gib": "some"},
    {"hw.cpu_experts": "0.5", "cache.ram_gib": "some", "prefetch.copy": 4, "hw.graphs": False},
    {"hw.cpu_experts": "1", "cache.ram_gib": 0.0, "prefetch.experts": 4, "cache.vram_gib": 0.0},
    {"hw.cpu_experts": "0.5"},  # all in VRAM after a while
    {"hw.cpu_experts": "auto", "cache.vram_gib": 0.0},
]


def sized(model: str, settings):
    """Return settings with `some` as a size of this model."""
    some = 0.002 if model == "tiny" else 60 * DEEPSEEK_RECORD_GIB
    return {key: some if value == "some" else value for key, value in settings.items()}


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_qwen_gives_the_same_logits_and_tokens(open_model, plain, heldout_tokens, settings):
    """fp32, so that only the order of sums differs."""
    wanted, tokens = plain("tiny")
    engine = open_model("tiny", **{"hw.dtype": "float32", **sized("tiny", settings)})
    before = engine.counters().experts
    found = decoded(engine, heldout_tokens)
    spent = engine.counters().experts.since(before)
    print(
        f"largest difference {float((found - wanted).abs().max()):.1e}, {spent.cpu_experts} on the CPU"
    )
    assert torch.equal(found.argmax(1), wanted.argmax(1))
    assert float((found - wanted).abs().max()) < 1e-3
    assert greedy(engine, heldout_tokens[:40], TOKENS) == tokens
    if settings.get("cache.vram_gib") == 0.0 and settings["hw.cpu_experts"] != "auto":
        assert spent.cpu_experts > 0 or settings.get("cache.ram_gib") == 0.0


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_deepseek_gives_the_same_logits_and_tokens(open_model, plain, heldout_tokens, settings):
    """Sums run in the defined order on both sides; exp may differ in its last bit."""
    wanted, tokens = plain("tiny_deepseek")
    engine = open_model("tiny_deepseek", **sized("tiny_deepseek", settings))
    before = engine.counters().experts
    found = decoded(engine, heldout_tokens)
    spent = engine.counters().experts.since(before)
    same = float((found == wanted).float().mean())
    print(f"{same:.4f} of the logits are equal to the bit, {spent.cpu_experts} on the CPU")
    assert not drift_faults(found, wanted)  # one number rounded otherwise goes through the model
    assert greedy(engine, heldout_tokens[:40], TOKENS) == tokens


def test_qwen_in_bf16_stays_as_close_as_its_roundings(open_model, heldout_tokens):
    wanted = decoded(open_model("tiny"), heldout_tokens)
    found = decoded(
        open_model("tiny", **{"hw.cpu_experts": "0.5", "cache.vram_gib": 0.0}), heldout_tokens
    )
    same = float((found.argmax(1) == wanted.argmax(1)).float().mean())
    print(f"bf16: same choice in {same:.4f}")
    assert same > 0.97


def test_off_is_the_run_without_the_option_to_the_bit(open_model, heldout_tokens):
    wanted = decoded(open_model("tiny"), heldout_tokens[:120])
    found = decoded(open_model("tiny", **{"hw.cpu_experts": "off"}), heldout_tokens[:120])
    assert torch.equal(found, wanted)


# ---- the full shape --------------------------------------------------------------------------------------------------


class Slots:
    """What a share is opened for."""

    share = None

    def __init__(self, records):
        self.workers = Workers((), 8, records)


@pytest.fixture(scope="module")
def arena():
    arena = HostArena(64, RECORD_NBYTES)
    generator = torch.Generator().manual_seed(0)
    for row in arena.rows:
        row[: len(row)] = torch.randint(0, 0x7F, row.shape, dtype=torch.uint8, generator=generator)
    arena.pin()
    yield arena
    arena.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_size_layer_shared_half_and_half_is_the_reference(arena, dtype):
    from kernels.nvfp4_expert import nvfp4_experts

    generator = torch.Generator().manual_seed(1)
    scales = (0.5 + torch.rand(1, 64, 3, generator=generator)) * 1e-4
    device = torch.device("cuda")
    compute = Nvfp4Compute(
        scales,
        TOP_K,
        HIDDEN,
        INTERMEDIATE,
        dtype,
        device,
        compiled_kernels() if HAS_NUMBA else None,
    )
    compute.set_threads(8)
    share = CpuShare(compute, fixed_counts(0.5, TOP_K), HIDDEN, device)
    x = torch.randn(1, HIDDEN, generator=generator).to(device, dtype)
    route = [40, 3, 17, 22, 9, 61, 5, 30, 12, 50]
    compute.receive(x)
    torch.cuda.synchronize()
    share.arm()
    taken, left = share.take([(e, arena.records[e]) for e in route], lambda expert: False)
    assert len(taken) == len(left) == TOP_K // 2
    place = {expert: i for i, expert in enumerate(sorted(route))}
    table = torch.zeros(TOP_K, dtype=torch.int64)
    for expert, record in left:
        table[place[expert]] = record.data_ptr()
    own = scales[0, sorted(route)].to(device)
    inner, rows = (
        torch.full((TOP_K, w), float("nan"), device=device) for w in (INTERMEDIATE, HIDDEN)
    )
    nvfp4_experts(x, table.to(device), own, inner, rows)
    share.run(0, route, taken)
    share.put(rows)
    for i, expert in enumerate(sorted(route)):
        wanted = reference.nvfp4_swiglu_expert(
            x.float().cpu(), arena.rows[expert], scales[0, expert], INTERMEDIATE
        )[0]
        assert float((rows[i].cpu() - wanted).norm() / wanted.norm()) < 5e-6


def test_rows_come_through_a_replayed_graph(arena):
    """The table and the rows are read when the graph runs, not when it was captured."""
    table = torch.zeros(4, dtype=torch.int64).pin_memory()
    source = torch.zeros(4, HIDDEN).pin_memory()
    rows = torch.zeros(4, HIDDEN, device="cuda")
    take_rows(table, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take_rows(table, rows)
    for number in range(1, 4):
        table.zero_()
        table[number] = source[number].data_ptr()
        source.fill_(float(number))
        graph.replay()
        torch.cuda.synchronize()
    assert rows[:, 0].tolist() == [0, 1, 2, 3]


def test_auto_measures_both_sides(arena, caplog):
    import logging

    from kernels.nvfp4_expert import nvfp4_experts

    device = torch.device("cuda")
    compute = Nvfp4Compute(
        torch.ones(1, 64, 3), TOP_K, HIDDEN, INTERMEDIATE, torch.bfloat16, device,
        compiled_kernels() if HAS_NUMBA else None,
    )  # fmt: skip
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device)
    rows, inner, ones = (torch.ones(TOP_K, w, device=device) for w in (HIDDEN, INTERMEDIATE, 3))

    def in_place(records):
        table = torch.tensor([record.data_ptr() for record in records], device=device)
        nvfp4_experts(x, table, ones, inner[: len(table)], rows[: len(table)])

    with caplog.at_level(logging.INFO):
        share = open_share("auto", Slots(arena.records), compute, rows, in_place)
    print(*(record.getMessage() for record in caplog.records), sep="\n")
    assert any("threads compute" in record.getMessage() for record in caplog.records)
    assert share is None or 0 < max(share._counts) < TOP_K
