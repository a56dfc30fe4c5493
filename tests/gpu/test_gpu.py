"""What needs a CUDA device: the kernels at full size, and the engine on the bundled model. Run with `-m gpu`."""

from __future__ import annotations

import json
import os

import pytest
import torch

from kernels import nvfp4_expert, reference
from runtime import cores
from runtime.engine import Engine
from runtime.experts.arena import HostArena
from runtime.sampling import SamplingParams
from runtime.session import Session

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE, EXPERTS = 2560, 640, 10
RECORD_NBYTES = 2_764_800


@pytest.fixture(scope="module")
def case():
    """Ten full-size experts in pinned RAM, their global scales, one bf16 token on the device."""
    generator = torch.Generator().manual_seed(0)
    arena = HostArena(EXPERTS, RECORD_NBYTES)
    codes = 3 * HIDDEN * INTERMEDIATE // 2
    for row in range(EXPERTS):
        arena.rows[row, :codes] = torch.randint(
            0, 256, (codes,), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(
            0, 0x7F, (RECORD_NBYTES - codes,), dtype=torch.uint8, generator=generator
        )
        arena.rows[row, codes:] = scales
    before = arena.rows.clone()
    arena.pin()
    assert torch.equal(arena.rows, before)  # touching the pages changed nothing
    scales = (0.5 + torch.rand(EXPERTS, 3, generator=generator)) * 1e-4
    x = torch.randn(1, HIDDEN, generator=generator).cuda().bfloat16()
    yield arena, scales, x
    arena.close()


def run_experts(addresses: list[int], scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out = torch.full((EXPERTS, HIDDEN), float("nan"), device="cuda")
    inner = torch.full((EXPERTS, INTERMEDIATE), float("nan"), device="cuda")
    return nvfp4_expert.nvfp4_experts(
        x, torch.tensor(addresses, device="cuda"), scales.cuda(), inner, out
    )


def test_full_size_experts_in_pinned_ram_are_the_reference(case):
    arena, scales, x = case
    found = run_experts([arena.rows[i].data_ptr() for i in range(EXPERTS)], scales, x).cpu()
    for i in range(EXPERTS):
        wanted = reference.nvfp4_swiglu_expert(x.cpu(), arena.rows[i], scales[i], INTERMEDIATE)[0]
        # fp32 sums of 2,560 and 640 products in another order
        assert float((found[i] - wanted).norm() / wanted.norm()) < 5e-6


def test_vram_and_pinned_ram_give_the_same_bits(case):
    arena, scales, x = case
    in_ram = run_experts([arena.rows[i].data_ptr() for i in range(EXPERTS)], scales, x)
    slots = arena.rows.cuda()
    in_vram = run_experts([slots[i].data_ptr() for i in range(EXPERTS)], scales, x)
    mixed = run_experts(
        [(slots if i % 3 else arena.rows)[i].data_ptr() for i in range(EXPERTS)], scales, x
    )
    assert torch.equal(in_ram, in_vram)
    assert torch.equal(in_ram, mixed)


@pytest.mark.parametrize("ram_gib", [0.0, 1.0])
def test_fp32_engine_gives_the_golden_answers(open_tiny, tiny_qwen, ram_gib: float):
    golden = json.loads((tiny_qwen / "golden_answers.json").read_text())["greedy"]
    engine = open_tiny(**{"hw.device": "cuda", "hw.dtype": "float32", "cache.ram_gib": ram_gib})
    for question in golden:
        session = Session(engine)
        logits = session.sync(question["prompt_ids"])[0]
        assert all(
            abs(float(logits[i]) - value) < 1e-3 for i, value in question["last_prompt_logits_top5"]
        )
        params = SamplingParams(temperature=0.0, max_tokens=len(question["answer_ids"]))
        tokens = [piece.token for piece in session.generate(question["prompt_ids"], params)]
        assert tokens == question["answer_ids"]


@pytest.fixture(scope="module")
def wanted_logits(tiny_files, make_config, heldout_tokens):
    """Logits of a prompt and 200 decoded tokens with every expert in memory, in bf16."""
    config = make_config(**{"hw.device": "cuda", "cache.vram_gib": 0.0, "hw.graphs": False})
    engine = Engine.open(config, tiny_files, is_resident=True)
    yield logits_of(engine, heldout_tokens)
    engine.close()


def logits_of(engine, tokens):
    prompt, rest = tokens[:80], tokens[80:280]
    assert len(rest) == 200
    state = engine.new_state()
    rows = [engine.model.prefill(prompt, state)]
    rows += [engine.model.decode(token, state) for token in rest]
    return torch.cat(rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 0.0, "prefetch.experts": 0, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 0.002, "prefetch.experts": 2},
        {"cache.ram_gib": 0.002, "prefetch.experts": 2, "prefetch.copy": 3},
        {
            "cache.ram_gib": 0.002,
            "prefetch.experts": 0,
            "prefetch.copy": 16,
            "cache.vram_gib": 0.002,
        },
        {"cache.ram_gib": 1.0, "hw.drive.window": 4, "hw.drive.pieces": 1},
        {"cache.ram_gib": 0.002, "prefetch.copy": 4, "hw.drive.process": False},
        {"cache.ram_gib": 1.0, "prefetch.copy": 10, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 1.0, "prefetch.copy": 4, "cache.vram_gib": 0.001},
        {"cache.ram_gib": 0.002, "prefetch.copy": 4, "hw.graphs": False},
        {
            "cache.ram_gib": 0.002,
            "hw.drive.simulate_gib_s": 0.1,
            "hw.drive.simulate_latency_us": 200.0,
        },
    ],
)
def test_streamed_equals_resident_on_the_gpu(open_tiny, wanted_logits, heldout_tokens, settings):
    """Prompt and 200 decoded tokens, twice on one engine: every logit equal, bit for bit."""
    engine = open_tiny(**{"hw.device": "cuda", **settings})
    for _ in range(2):
        assert torch.equal(logits_of(engine, heldout_tokens), wanted_logits)
    counters = engine.counters().experts
    if settings.get("prefetch.copy"):
        assert counters.early_used > 0
    if settings.get("cache.vram_gib") != 0.0:
        assert counters.vram_hits > 0


def test_gpu_engine_is_the_cpu_engine(open_tiny, heldout_tokens):
    """fp32 on both: prompt and 60 decoded tokens, the same choice everywhere; sums run in another order."""
    prompt, rest = heldout_tokens[:300], heldout_tokens[300:360]
    found = []
    for device in ("cpu", "cuda"):
        engine = open_tiny(**{"hw.device": device, "hw.dtype": "float32"})
        state = engine.new_state()
        rows = [engine.model.prefill(prompt, state, all_logits=True).cpu()]
        rows += [engine.model.decode(token, state).cpu() for token in rest]
        found.append(torch.cat(rows))
    wanted, rows = found
    print(f"largest difference of a logit: {float((rows - wanted).abs().max()):.2e}")
    assert torch.equal(rows.argmax(-1), wanted.argmax(-1))
    assert float((rows - wanted).abs().max()) < 1e-3


def test_bf16_engine_chooses_as_fp32_does_nearly_always(open_tiny, heldout_tokens):
    """bf16 rounds hidden states to 8 bits: a token in fifty may flip where two are close, not more."""
    tokens = heldout_tokens[:200]
    wanted, found = (
        engine.model.prefill(tokens, engine.new_state(), all_logits=True).argmax(-1).cpu()
        for engine in (open_tiny(), open_tiny(**{"hw.device": "cuda"}))
    )
    assert float((wanted == found).float().mean()) > 0.96


def test_an_engine_beside_this_one_keeps_off_its_core(make_config, tiny_files):
    topology = cores.read_topology()
    has_room = len({core.physical_core for core in topology}) > cores.MIN_PHYSICAL_CORES
    engine = Engine.open(make_config(**{"hw.device": "cuda"}), tiny_files)
    try:
        mine = os.sched_getaffinity(0)
        plan, claim = cores.claim(topology)
        assert (claim is not None) == has_room, "too few cores are shared"
        if claim is not None:
            assert not mine & {plan.decode_cpu, *plan.decode_siblings, *plan.reader_cpus}
            claim.close()
    finally:
        engine.close()
