"""Conversations decoded together on a GPU: each has a decoder of its own, and gets what it gets alone."""

from __future__ import annotations

import pytest
import torch

from runtime.engine import Engine, EngineFiles
from runtime.experts.shared import pause
from runtime.together import Together

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["tiny", "tiny_deepseek"])
def open_model(request, make_config, tiny_files, tiny_qwen):
    engines = []

    def open_engine(is_resident=False, **overrides):
        settings = {"hw.device": "cuda", "cache.ram_gib": 0.002, **overrides}
        config = make_config(request.param, **settings)
        files = tiny_files
        if request.param == "tiny_deepseek":
            files = EngineFiles(tiny_qwen.parent / "tiny-deepseek")
        engines.append(Engine.open(config, files, is_resident))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("copy", [0, 2])
def test_company_changes_no_number(open_model, heldout_tokens, graphs, copy):
    texts = [heldout_tokens[at : at + 30 + at // 50] for at in (0, 50, 100)]
    engine = open_model(**{"serve.max_batch": 3, "hw.graphs": graphs, "prefetch.copy": copy})
    found: list[list[torch.Tensor]] = [[], [], []]

    def talk(text, rows, model):
        state = model.new_state()
        rows.append(model.prefill(text[:17], state, after_layer=pause).cpu())
        rows += [model.decode(token, state).cpu() for token in text[17:]]

    for _ in range(2):  # the second time every launch is a graph
        together = Together(engine.shared)
        for text, rows in zip(texts, found, strict=True):
            rows.clear()
            together.start(lambda text=text, rows=rows: talk(text, rows, engine.model))
        while len(together):
            together.round()
    alone = open_model(is_resident=True, **{"hw.graphs": graphs})
    for text, rows in zip(texts, found, strict=True):
        wanted: list[torch.Tensor] = []
        talk(text, wanted, alone.model)
        assert torch.equal(torch.cat(rows), torch.cat(wanted))
