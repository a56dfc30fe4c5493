"""DeepSeek's head shared between CPU and GPU on a real one: the same logits within fp32 sums, the same tokens."""

from __future__ import annotations

import pytest
import torch

from conf.schema import Head
from kernels.deepseek_linear import steady_linear
from runtime.engine import Engine, EngineFiles
from runtime.experts.arena import HostArena
from runtime.head_shares import format_head
from runtime.models.head_split import HeadLane, HeadSplit

pytestmark = pytest.mark.gpu

UNIT = 2.0**-24  # of fp32
VOCAB, HIDDEN = 129_280, 5120  # as released


@pytest.fixture(scope="module")
def snapshot(tiny_qwen):
    return tiny_qwen.parent / "tiny-deepseek"


def run(make_config, snapshot, tokens, **settings):
    """Return the logits of a prompt and 200 tokens, twice on one engine, the last u, the head, and the report."""
    config = make_config(
        "tiny_deepseek",
        **{"hw.device": "cuda", "cache.ram_gib": 1.0, "hw.compute_threads": 4, **settings},
    )
    engine = Engine.open(config, EngineFiles(snapshot))
    try:
        passes = []
        for _ in range(2):
            state = engine.new_state()
            engine.model.prefill(tokens[:81], state)
            passes.append(torch.cat([engine.model.decode(t, state).cpu() for t in tokens[81:281]]))
        u, head = engine.model.decoder.u.cpu().double(), engine.model.head.double()
        return passes, u, head, engine.head_report()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def by_gpu(make_config, snapshot, heldout_tokens):
    passes, _, _, report = run(make_config, snapshot, heldout_tokens)
    assert report is None
    return passes[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"deepseek.head": "auto", "deepseek.head_share": 0.5},
        {"deepseek.head": "auto", "deepseek.head_share": 0.5, "hw.graphs": False},
        {"deepseek.head": "cpu", "hw.compute_threads": 1},
        {"deepseek.head": "auto", "cache.ram_gib": 0.0, "prefetch.experts": 4},
    ],
)
def test_logits_are_the_gpus_within_fp32_sums(
    make_config, snapshot, heldout_tokens, by_gpu, settings
):
    passes, u, head, report = run(make_config, snapshot, heldout_tokens, **settings)
    print(format_head(report))
    assert report.tokens == 400
    assert torch.equal(passes[0], passes[1])
    rows = report.cpu_rows
    assert torch.equal(passes[0][:, rows:], by_gpu[:, rows:])
    bound = len(u) * UNIT * (head.abs() @ u.abs())
    for logits in (passes[0][-1], by_gpu[-1]):
        assert ((logits.double() - head @ u).abs() <= bound).all()
    # of every token; sums of |w x| are not kept, logits that cancel are small against the largest
    assert float((passes[0] - by_gpu).abs().max() / by_gpu.abs().max()) < 1e-5
    assert torch.equal(passes[0].argmax(1), by_gpu.argmax(1))


def test_released_shape(capsys):
    """1.3 GB of random rows: split, rates, and logits against fp64 sums, with new states in the same buffers."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    arena = HostArena(1, 2 * VOCAB * HIDDEN)
    arena.pin()
    weight = arena.records[0][: 2 * VOCAB * HIDDEN].view(torch.bfloat16).view(VOCAB, HIDDEN)
    for part in weight.split(16_384):
        part.copy_(0.02 * torch.randn(part.shape, generator=generator, device="cuda"))
    lines = []

    def product(x, rows, out):
        steady_linear(x, rows, out, is_double=False)

    try:
        for mode in (Head.cpu, Head.auto):
            split = HeadSplit.open(weight, product, torch.device("cuda"), mode, None, threads=8)
            u = torch.empty(HIDDEN, dtype=torch.bfloat16, device="cuda")
            logits = torch.empty(VOCAB, device="cuda")
            lane = HeadLane(split, u, logits)
            for _ in range(8):
                u.copy_(torch.randn(HIDDEN, generator=generator, device="cuda"))
                logits.fill_(float("nan"))
                lane.send()
                lane.sent()
                if lane.has_launch:
                    lane.launch()
                lane.finish()
                torch.cuda.synchronize()
                for rows in weight.split(16_384):
                    start = (rows.data_ptr() - weight.data_ptr()) // (2 * HIDDEN)
                    w = rows.cuda().double()
                    found = logits[start : start + len(rows)].double()
                    bound = HIDDEN * UNIT * (w.abs() @ u.double().abs())
                    assert ((found - w @ u.double()).abs() <= bound).all()
            lines.append(f"{mode.value}: {format_head(split.report())}")
            split.close()
    finally:
        arena.close()
    with capsys.disabled():
        print("\n" + "\n".join(lines))
