"""Layers of the released shape on the GPU against plain torch on the CPU, from the same random bytes (`-m gpu`).

Four layers (three DeltaNet, one attention; the second adds the n-gram embedding), hidden 2560, experts of 640, NVFP4
experts, FP8 rows; few experts and a small vocabulary, since those change no layer.
"""

from __future__ import annotations

import pytest
import torch

from runtime.experts.arena import HostArena
from runtime.experts.copies import CudaCopier
from runtime.experts.resident import ResidentExperts
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_model import QwenModel
from runtime.stats import ExpertCounters
from tests.bench.bench_full_shape import RECORD_NBYTES, full_spec, random_weights

pytestmark = pytest.mark.gpu

LAYERS, EXPERTS, VOCAB, CONTEXT = 4, 16, 4096, 512


class RandomExperts(ResidentExperts):
    def __init__(self) -> None:
        self.counters, self._num_experts = ExpertCounters(), EXPERTS
        self._arena = HostArena(LAYERS * EXPERTS, RECORD_NBYTES)
        generator = torch.Generator().manual_seed(3)
        for row in self._arena.rows:
            row.copy_(torch.randint(0, 256, row.shape, dtype=torch.uint8, generator=generator))
            row[2_457_600:] = 0x20 + row[2_457_600:] % 0x10


class RandomRows:
    read_nbytes = wait_ns = 0

    def request(self, ids):
        return list(ids)

    def collect(self, ids):
        generator = torch.Generator().manual_seed(sum(ids) % 2**31)
        return torch.randint(0, 0x40, (len(ids), 160), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def models():
    """The same model twice: on the CPU in fp32, and a function that puts it on the GPU in a dtype."""
    spec = full_spec(EXPERTS, num_layers=LAYERS, vocab_size=VOCAB)
    weights = {
        name: w.cpu() if w.dtype is not torch.bfloat16 else w.float().cpu()
        for name, w in random_weights(spec).items()
    }
    scales = 2e-2 * (
        0.5 + torch.rand(LAYERS, EXPERTS, 3, generator=torch.Generator().manual_seed(5))
    )
    experts = RandomExperts()
    experts.pin()

    def build(device: str, dtype: torch.dtype) -> QwenModel:
        placed = {
            name: w.to(device, dtype)
            if w.dtype is torch.float32 and "scale" not in name
            else w.to(device)
            for name, w in weights.items()
        }
        placed["embed_tokens.weight"] = placed["embed_tokens.weight"].cpu()
        source = experts
        if device == "cuda":
            copier = CudaCopier(passing_slots(4) + 60, RECORD_NBYTES, torch.device("cuda"))
            source = SlotExperts(experts, copier, LAYERS, spec.top_k, early_copies=4)
        model = QwenModel(spec, placed, scales.to(device), source, RandomRows(), 1e-3, 10)
        if device == "cuda":
            model.decoder = Decoder(model, CONTEXT, has_graphs=True)
        return model

    yield build
    experts.close()


def logits_of(model: QwenModel) -> torch.Tensor:
    state = model.new_state()
    prompt = [(37 * i) % VOCAB for i in range(70)]
    rows = [model.prefill(prompt, state, all_logits=True).cpu()]
    rows += [model.decode(token, state).cpu() for token in (5, 900, 77, 4001)]
    return torch.cat(rows)


@pytest.fixture(scope="module")
def wanted(models) -> torch.Tensor:
    return logits_of(models("cpu", torch.float32))


def test_prompt_and_decoding_in_fp32_are_plain_torch(models, wanted):
    found = logits_of(models("cuda", torch.float32))
    error = float((found - wanted).norm() / wanted.norm())
    print(
        f"full shape, fp32: relative error {error:.2e}, largest {float((found - wanted).abs().max()):.2e}"
    )
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert error < 1e-4  # sums run in another order, four layers deep


def test_bf16_stays_within_its_rounding(models, wanted):
    """Hidden states of 8 bits: a few routes differ where two experts are close, and with them a row."""
    found = logits_of(models("cuda", torch.bfloat16)).float()
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    print(f"full shape, bf16: median relative error of a row {float(errors.median()):.2e}")
    assert float(errors.median()) < 0.05
