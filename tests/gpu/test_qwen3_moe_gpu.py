"""Qwen3-MoE on a CUDA device: experts from VRAM slots by plain torch, beside the same model on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.engine import Engine, EngineFiles
from tests.qwen3_moe_models import SIZES, save_random

pytestmark = pytest.mark.gpu
TINY_QWEN = Path(__file__).resolve().parents[2] / "runtime" / "bundled" / "tiny-qwen"


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3-moe")
    save_random(folder, torch.bfloat16)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY_QWEN / name).read_bytes())
    return folder


def logits(make_config, snapshot, is_resident=False, **overrides):
    """Run a prompt, a second piece and decoded tokens through an engine."""
    fields = {"model.context_tokens": 400, "cache.ram_gib": 1.0, **overrides}
    engine = Engine.open(
        make_config("qwen3_moe_synthetic", **fields), EngineFiles(snapshot), is_resident
    )
    try:
        state = engine.model.new_state()
        ids = torch.randint(SIZES["vocab_size"], (190,), generator=torch.Generator().manual_seed(3))
        ids = ids.tolist()
        found = [
            engine.model.prefill(ids[:120], state),
            engine.model.prefill(ids[120:150], state),
        ]
        found += [engine.model.decode(token, state) for token in ids[150:]]
        return torch.cat(found).cpu()
    finally:
        engine.close()


def test_fp32_on_the_gpu_is_the_cpu(make_config, snapshot):
    wanted = logits(make_config, snapshot, **{"hw.device": "cpu"})
    found = logits(make_config, snapshot, **{"hw.device": "cuda", "hw.dtype": "float32"})
    assert (found - wanted).abs().max() <= 1e-4 * wanted.std()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("ram_gib", [0.0, 0.0005, 1.0])
@pytest.mark.parametrize("prefetch", [(0, 0), (3, 0), (2, 4)])
def test_streamed_is_resident(make_config, snapshot, ram_gib, prefetch):
    cuda = {"hw.device": "cuda", "prefetch.experts": prefetch[0], "prefetch.copy": prefetch[1]}
    wanted = logits(make_config, snapshot, True, **cuda)
    assert torch.equal(logits(make_config, snapshot, **cuda, **{"cache.ram_gib": ram_gib}), wanted)
