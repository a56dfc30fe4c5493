"""What drafts are on a GPU: looked up, by decoders beside one another, which some settings have no use for."""

from __future__ import annotations

import pytest
import torch

from conf.schema import DraftSource
from runtime import engine
from runtime.budget import ModelSizes
from runtime.drafts.opening import (
    LOOKUP_DEPTH,
    check_decoders,
    check_device,
    drafts_on,
    open_rows,
)
from runtime.engine import EngineFiles
from runtime.errors import UserError
from runtime.models import deepseek, dense, qwen
from runtime.models.qwen_drafts import MTP_DEPTH
from runtime.units import GIB

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ON = {"drafts.enabled": True}


@pytest.mark.parametrize(
    ("settings", "said", "hint"),
    [
        ({"drafts.source": "heads"}, "draft heads of this family are computed on the CPU", "drafts.source=lookup"),
        ({"hw.graphs": "token"}, "one token at a time", "leave out one of"),
        ({"hw.cpu_experts": "auto", "hw.device": "cuda"}, "share one token's work", "leave out these"),
        ({"deepseek.head": "auto"}, "share one token's work", "leave out these"),
    ],
)  # fmt: skip
def test_what_rows_do_not_do_on_a_gpu_is_refused(make_config, settings, said, hint):
    config = make_config("tiny_deepseek", **{**ON, **settings})
    with pytest.raises(UserError, match=said) as refused:
        check_decoders(config, GPU, heads_on_gpu=False)
    assert hint in refused.value.hint
    check_decoders(config, CPU, heads_on_gpu=False)
    config.drafts.enabled = False
    check_decoders(config, GPU, heads_on_gpu=False)


def test_other_families_have_drafts_on_the_cpu_only(make_config):
    config = make_config(**ON)
    with pytest.raises(UserError, match="of this family are decoded on the CPU only"):
        check_device(config.drafts, GPU)
    check_device(config.drafts, CPU)
    assert dense.check_device is check_device


@pytest.mark.parametrize("source", list(DraftSource))
def test_a_gpu_looks_up_where_it_may_choose_and_has_no_heads(make_config, source):
    config = make_config(**ON, **{"drafts.source": source.value})
    drafts = config.drafts
    for heads_on_gpu in (False, True):
        assert drafts_on(drafts, CPU, heads_on_gpu) == drafts
    wanted = DraftSource.lookup if source is DraftSource.auto else source
    assert drafts_on(drafts, GPU, heads_on_gpu=False).source is wanted
    assert drafts_on(drafts, GPU, heads_on_gpu=True) == drafts
    check_decoders(config, GPU, heads_on_gpu=True)
    assert (qwen.HEADS_ON_GPU, deepseek.HEADS_ON_GPU) == (True, False)


@pytest.mark.parametrize(
    ("model", "wanted"), [("tiny", DraftSource.auto), ("tiny_deepseek", DraftSource.lookup)]
)
def test_an_engine_asks_the_family_for_heads_on_a_gpu(
    make_config, tiny_files, tiny_qwen, monkeypatch, model, wanted
):
    seen = []
    family = {"tiny": qwen, "tiny_deepseek": deepseek}[model]

    def check(spec, config, device):
        seen.append((config.drafts.source, device))
        raise UserError("enough seen", "")

    monkeypatch.setattr(family, "check_support", check)
    monkeypatch.setattr(engine.hardware, "resolve_device", lambda name: GPU)
    files = {"tiny": tiny_files, "tiny_deepseek": EngineFiles(tiny_qwen.parent / "tiny-deepseek")}
    with pytest.raises(UserError, match="enough seen"):
        engine.Engine.open(make_config(model, **ON, **{"hw.pin_threads": False}), files[model])
    assert seen == [(wanted, GPU)]


def test_rows_ask_for_their_experts_at_once():
    sizes = ModelSizes(0, 0, 4096, 8, 64, 6)
    assert sizes.for_rows(5).top_k == 30
    assert sizes.for_rows(20).top_k == 64, "a layer has no more"
    assert sizes.for_rows(5).state_nbytes == sizes.state_nbytes


def test_a_card_that_is_too_small_is_told_of_the_depth(make_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, GIB))
    sizes = ModelSizes(2 * GIB, 0, 4096, 8, 64, 6)
    for settings, starts in ((ON, "lower drafts.depth"), ({}, "raise hw.vram_gib")):
        with pytest.raises(UserError, match="of GPU memory at least") as refused:
            engine._plan_vram(make_config(**settings), sizes, GPU, 0)
        assert refused.value.hint.startswith(starts)


def test_there_is_a_decoder_for_each_row(make_config):
    made = []

    class Made:
        graphs = "the pool"

    def make(**settings):
        made.append(settings)
        return Made()

    from runtime.experts.shared import SharedReads

    decoder, drafts = Made(), make_config(**ON, **{"drafts.depth": 3}).drafts
    assert MTP_DEPTH <= LOOKUP_DEPTH, "a pass with the head's guesses has no more rows"
    rows = open_rows(make, decoder, drafts, SharedReads(None))
    assert made == 4 * [{"graphs": "the pool", "beside": decoder}], (
        "the token drawn and three guesses"
    )
    assert rows.decoder is decoder
