"""A head shared between threads and a device that is the CPU here: every row is computed once, whatever the split."""

from __future__ import annotations

import pytest
import torch

from conf.schema import Arithmetic, ConfigError, Head
from runtime.errors import UserError
from runtime.models import deepseek, deepseek_backends
from runtime.models.head_split import CHUNK_ROWS, HeadLane, HeadSplit

VOCAB, WIDTH = 2 * CHUNK_ROWS + 100, 96


def product(x, rows, out):
    out.copy_(rows.double() @ x.double())


@pytest.fixture
def weight():
    return torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def splits():
    opened = []
    yield opened
    for split in opened:
        split.close()


def decode(lane: HeadLane) -> None:
    lane.send()
    lane.sent()
    if lane.has_launch:
        lane.launch()
    lane.finish()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("cpu_rows", [0, 64, CHUNK_ROWS, CHUNK_ROWS + 64, VOCAB])
def test_every_row_is_computed_by_one_of_them(weight, splits, cpu_rows: int, threads: int):
    split = HeadSplit(weight, product, threads)
    splits.append(split)
    split.cpu_rows = cpu_rows
    u = torch.empty(WIDTH, dtype=torch.bfloat16)
    logits = torch.full((VOCAB,), float("nan"))
    lane = HeadLane(split, u, logits)
    for seed in range(3):  # a new token in the same buffers
        logits.fill_(float("nan"))
        u.copy_(torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed)))
        decode(lane)
        wanted = weight.double() @ u.double()
        bound = WIDTH * 2.0**-24 * (weight.double().abs() @ u.double().abs())
        assert ((logits.double() - wanted).abs() <= bound).all()
    assert split.report().tokens == 3


def test_a_failing_thread_is_an_error(weight, splits):
    split = HeadSplit(weight.float(), product, threads=3)  # not bf16
    splits.append(split)
    split.cpu_rows = VOCAB
    split.is_compiled = False
    split.weight = weight[:, :-1]  # columns are missing
    with pytest.raises(RuntimeError):
        split.compute(torch.zeros(WIDTH), torch.zeros(VOCAB))


@pytest.mark.parametrize(
    ("mode", "share", "rows"),
    [(Head.cpu, None, VOCAB), (Head.auto, 0.5, 1088), (Head.auto, 0.0, 0)],
)
def test_told_splits(weight, splits, mode: Head, share: float | None, rows: int):
    split = HeadSplit.open(weight, product, torch.device("cpu"), mode, share, threads=2)
    splits.append(split)
    report = split.report()
    assert (report.cpu_rows, report.measured, report.tokens) == (rows, None, 0)


def test_a_measured_split_is_one_that_was_met(weight, splits):
    split = HeadSplit.open(weight, product, torch.device("cpu"), Head.auto, None, threads=2)
    splits.append(split)
    measured = split.report().measured
    assert measured is not None
    assert measured.rows == split.cpu_rows
    assert measured.gpu_ms > 0
    assert (measured.cpu_ms > 0) == (measured.rows > 0)


def test_who_is_refused_and_who_is_chosen(make_config, tiny_qwen, monkeypatch):
    snapshot = tiny_qwen.parent / "tiny-deepseek"
    config = make_config("tiny_deepseek", **{"deepseek.head": "auto"})
    with pytest.raises(UserError, match="relieves a GPU"):
        deepseek.check_support(deepseek.read_spec(snapshot), config, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"deepseek\.head is of deepseek\.arithmetic=native"):
        make_config("tiny_deepseek", **{"deepseek.arithmetic": "reference", "deepseek.head": "cpu"})
    # where the release's own code would compute by default
    monkeypatch.setattr(deepseek_backends, "tilelang_fault", lambda *_: None)
    chosen = [
        deepseek_backends.resolve_arithmetic(
            make_config("tiny_deepseek", **{"deepseek.head": head, "hw.device": "auto"}), True
        )
        for head in ("gpu", "auto")
    ]
    assert chosen == [Arithmetic.reference, Arithmetic.native]
