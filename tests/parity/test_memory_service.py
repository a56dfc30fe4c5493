"""The call that a request's `memory` field stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import Fuse, PositionMode, Template
from runtime.engine import Engine, EngineFiles
from runtime.errors import UserError
from runtime.living_kv.errors import MemoryUsageError
from runtime.living_kv.service import MemoryService, open_memory
from runtime.sampling import SamplingParams
from tests.living import config

MODEL = Path(__file__).resolve().parents[1] / "data" / "recall_model"
GREEDY = SamplingParams(temperature=0, max_tokens=1)
TEXT = "code of Banak 117 .\nthe river runs past old mill and quiet boat waits .\ncode of Lurim 203 .\n"


@pytest.fixture(scope="module")
def engine(make_config):
    settings = make_config("qwen25_7b_1m", **{"model.source": "local", "model.path": str(MODEL)})
    found = Engine.open(settings, EngineFiles(MODEL))
    yield found
    found.close()


@pytest.fixture
def ask(engine, tmp_path):
    settings = config(template=Template.none, position=PositionMode.near, fuse=Fuse.lex)
    memory = open_memory(engine, MODEL, tmp_path / "notes", settings, is_writer=True)
    memory.ingest(TEXT.encode(), "a")
    memory.close()

    service = MemoryService(engine, MODEL, tmp_path, settings)

    def call(question="code of Banak", **field):
        asked = {"store": "notes", **field}
        try:
            service.check(asked)  # refuses what `answer` would
        except UserError:
            with pytest.raises(UserError):
                service.answer(asked, question, GREEDY)
            raise
        return service.answer(asked, question, GREEDY)

    yield call
    service.close()


def test_a_reply_has_its_memory_field(ask):
    field = ask().to_dict()
    assert field["answer"] == "117"
    assert not field["low_confidence"]
    assert field["sentences"][0]["text"].startswith("code of Banak")
    scores = [s["score"] for s in field["sentences"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.9  # all words that name something are in it
    assert ask(mode="quote").mode == "quote"
    unknown = ask("code of Votep").to_dict()
    assert unknown["low_confidence"]
    assert unknown["reason"]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"store": "../notes"}, "must be a store's name"),
        ({"store": "/etc"}, "must be a store's name"),
        ({"store": None}, "must be a store's name"),
        ({"budget": 0}, "memory.budget"),
        ({"budget": 10**9}, "memory.budget"),
        ({"budget": True}, "memory.budget"),
        ({"mode": "guess"}, "memory.mode"),
        ({"scope": 3}, "memory.scope"),
        ({"scope": "day:1"}, "not understood"),
        ({"top_k": 3}, "memory.top_k is not known"),
    ],
)
def test_a_field_that_is_not_understood_is_refused_by_name(ask, field, said):
    with pytest.raises(MemoryUsageError, match=said.replace(".", r"\.")):
        ask(**field)


def test_a_store_that_is_not_there_is_said(ask):
    with pytest.raises(UserError, match="there is no store"):
        ask(store="other")


def test_another_kind_of_model_is_refused(resident_engine, tiny_qwen, tmp_path):
    with pytest.raises(MemoryUsageError, match="E-ARCH"):
        open_memory(resident_engine, tiny_qwen, tmp_path / "s", config(), is_writer=True)


def test_the_engine_serves_the_same_model_with_full_attention(engine):
    """Plain sessions of a dense model: a fact in the prompt is recalled."""
    from runtime.session import Session

    prompt = engine.codec.encode_plain(TEXT + "code of Lurim")
    pieces = list(Session(engine).generate(prompt, GREEDY))
    assert "".join(piece.text for piece in pieces).strip() == "203"
