"""A session: one timeline, its common prefix reused, and whole again after anything that goes wrong."""

import errno
import json
import os

import pytest
import torch

from conf.schema import DriveConfig
from runtime.errors import ContextLengthError, UserError
from runtime.experts.layout import PackedLayout
from runtime.experts.reader import DirectReader, ReadError
from runtime.experts.streamer import ExpertStreamer
from runtime.rows import RowReader
from runtime.sampling import SamplingParams
from runtime.session import Cancelled, FinishReason, Session

PIECE = 16
CONTEXT = 64


@pytest.fixture(scope="module")
def golden(tiny_qwen):
    """Recorded greedy answers of the reference implementation, by their questions."""
    greedy = json.loads((tiny_qwen / "golden_answers.json").read_text())["greedy"]
    return {question["question"]: question for question in greedy}


@pytest.fixture
def engine(open_tiny):
    return open_tiny(**{"model.prefill_tokens": PIECE, "model.context_tokens": CONTEXT})


@pytest.fixture
def session(engine):
    return Session(engine)


@pytest.fixture
def forwards(engine, monkeypatch):
    """The number of tokens of each forward, in order."""
    sizes = []
    prefill, decode = engine.model.prefill, engine.model.decode
    monkeypatch.setattr(
        engine.model, "prefill", lambda t, s, **kw: sizes.append(len(t)) or prefill(t, s, **kw)
    )
    monkeypatch.setattr(engine.model, "decode", lambda t, s: sizes.append(1) or decode(t, s))
    return sizes


def greedy(**kwargs):
    return SamplingParams(temperature=0, **kwargs)


def answer(session, prompt, params):
    """Return (tokens, text, finish reason) of an answer."""
    pieces = list(session.generate(prompt, params))
    assert all(piece.finish is None for piece in pieces[:-1])
    tokens = [piece.token for piece in pieces if piece.token is not None]
    return tokens, "".join(piece.text for piece in pieces), pieces[-1].finish


# ---- the timeline ----------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_computed(session, engine, forwards, heldout_tokens):
    prompt = heldout_tokens[:50]
    session.sync(prompt[:20])
    assert (session.cached_tokens, forwards) == (0, [16, 4])
    found = session.sync(prompt)
    assert session.cached_tokens == 20
    assert forwards == [16, 4, 16, 14]
    assert session.tokens == prompt
    assert session.prefill_stats.num_tokens == 30
    fresh = Session(engine).sync(prompt)
    assert (found - fresh).abs().max() < 1e-4  # other pieces: sums of another order


def test_the_same_prompt_costs_nothing(session, forwards, heldout_tokens):
    first = session.sync(heldout_tokens[:20]).clone()
    forwards.clear()
    assert torch.equal(session.sync(heldout_tokens[:20]), first)
    assert forwards == []
    assert session.cached_tokens == 20


def test_another_turn_reuses_the_answer(session, forwards, golden):
    question = golden["What is a whale?"]
    prompt = question["prompt_ids"]
    tokens, _, _ = answer(session, prompt, greedy())
    assert tokens == question["answer_ids"]
    # the stop token was drawn but never taken in
    assert session.tokens == prompt + tokens[:-1]
    forwards.clear()
    session.sync(prompt + tokens + [5, 6])
    assert session.cached_tokens == len(prompt) + len(tokens) - 1
    assert forwards == [3]


@pytest.mark.parametrize("same", [0, 1, 15, 19])
def test_a_prompt_that_departs_starts_anew(session, engine, heldout_tokens, same):
    other = [*heldout_tokens[:same], *heldout_tokens[100:125]]
    session.sync(heldout_tokens[:20])
    found = session.sync(other)
    assert session.cached_tokens == 0
    assert session.tokens == other
    assert torch.equal(found, Session(engine).sync(other))


def test_a_shorter_prompt_starts_anew(session, engine, heldout_tokens):
    session.sync(heldout_tokens[:20])
    found = session.sync(heldout_tokens[:12])
    assert session.tokens == heldout_tokens[:12]
    assert torch.equal(found, Session(engine).sync(heldout_tokens[:12]))


def test_two_sessions_do_not_meet(engine, heldout_tokens):
    wanted = Session(engine).sync(heldout_tokens[:40])
    one, other = Session(engine), Session(engine)
    one.sync(heldout_tokens[:32])
    other.sync(heldout_tokens[100:132])
    assert torch.equal(one.sync(heldout_tokens[:40]), wanted)


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_empty_prompt(session):
    with pytest.raises(UserError, match="prompt is empty"):
        session.sync([])


@pytest.mark.parametrize("count", [CONTEXT, CONTEXT + 30])
def test_prompt_beyond_the_window(session, forwards, heldout_tokens, count):
    """The words that clients of the OpenAI interface look for, and both numbers; what was there stays."""
    session.sync(heldout_tokens[:10])
    forwards.clear()
    with pytest.raises(ContextLengthError) as error:
        session.sync(heldout_tokens[:count])
    assert str(error.value).startswith(f"This model's maximum context length is {CONTEXT} tokens")
    assert f"{count} tokens" in str(error.value)
    assert (error.value.context_tokens, error.value.prompt_tokens) == (CONTEXT, count)
    session.sync(heldout_tokens[:10])
    assert forwards == []


def test_answer_up_to_the_window(session, golden):
    """The fox's story is longer than what 17 tokens leave of the window of 64."""
    story = golden["Tell me a short story about a fox."]
    tokens, text, finish = answer(session, story["prompt_ids"], greedy())
    assert finish is FinishReason.length
    assert len(story["prompt_ids"]) + len(tokens) == CONTEXT
    assert tokens == story["answer_ids"][: len(tokens)]
    assert story["answer"].startswith(text)


def test_prompt_that_just_fits(session, forwards, heldout_tokens):
    tokens, _, finish = answer(session, heldout_tokens[: CONTEXT - 1], greedy())
    assert (len(tokens), finish) == (1, FinishReason.length)
    assert sum(forwards) == CONTEXT - 1  # the last token needs no forward


@pytest.mark.parametrize("limit", [1, 5])
def test_max_tokens(session, forwards, golden, limit):
    story = golden["Tell me a short story about a fox."]
    tokens, text, finish = answer(session, story["prompt_ids"], greedy(max_tokens=limit))
    assert (tokens, finish) == (story["answer_ids"][:limit], FinishReason.length)
    assert text == session.engine.codec.decode(tokens)
    assert sum(forwards) == len(story["prompt_ids"]) + limit - 1


def test_stop_token_on_the_last_allowed_token(session, golden):
    """The answer ends by itself exactly at max_tokens: that is `stop`, and the marker is no text."""
    question = golden["What is 8 + 9?"]
    limit = len(question["answer_ids"])
    wanted = (question["answer_ids"], question["answer"], FinishReason.stop)
    assert answer(session, question["prompt_ids"], greedy(max_tokens=limit)) == wanted


# ---- stop strings ----------------------------------------------------------------------------------------------------

FRANCE = "What is the capital of France?"


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (("France is",), "The capital of "),
        (("pital of Fr", "zzz"), "The ca"),  # begins and ends inside tokens
        (("The",), ""),
        (("Paris.",), "The capital of France is "),  # complete with the last token of text
    ],
)
def test_stop_string(session, golden, stops, text):
    prompt = golden[FRANCE]["prompt_ids"]
    _, found, finish = answer(session, prompt, greedy(stop=stops))
    assert (found, finish) == (text, FinishReason.stop)


def test_stop_string_ends_the_work(session, forwards, golden):
    prompt = golden[FRANCE]["prompt_ids"]
    answer(session, prompt, greedy(stop=("The",)))
    assert sum(forwards) == len(prompt)


@pytest.mark.parametrize("limit", [5, None])
def test_a_stop_string_that_is_never_complete(session, golden, limit):
    """What was held back is given out when the answer ends, by its length or by itself."""
    question = golden[FRANCE]
    found = answer(
        session,
        question["prompt_ids"],
        greedy(stop=("France is Paris.!", "Francee"), max_tokens=limit),
    )
    tokens = question["answer_ids"][:limit]
    assert found[:2] == (tokens, session.engine.codec.decode(tokens))
    assert found[2] is (FinishReason.length if limit else FinishReason.stop)


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_cancel_between_pieces(session, engine, forwards, heldout_tokens):
    """Whole pieces stay; the same prompt goes on from there."""
    with pytest.raises(Cancelled):
        session.sync(heldout_tokens[:50], lambda: len(session.tokens) == 32)
    assert session.tokens == heldout_tokens[:32]
    found = session.sync(heldout_tokens[:50])
    assert session.cached_tokens == 32
    assert forwards == [16, 16, 16, 2]
    assert torch.equal(found, Session(engine).sync(heldout_tokens[:50]))


def test_cancel_within_the_first_piece(session, engine, heldout_tokens):
    """A prompt of one long piece is given up after the layer in work; the next one starts from nothing."""
    asked = []
    with pytest.raises(Cancelled):
        session.sync(heldout_tokens[:16], lambda: asked.append(1) or len(asked) == 4)
    assert len(asked) == 4
    assert session.tokens == []
    found = session.sync(heldout_tokens[:16])
    assert torch.equal(found, Session(engine).sync(heldout_tokens[:16]))


def test_cancel_while_answering(session, golden):
    story = golden["Tell me a short story about a fox."]
    prompt, found = story["prompt_ids"], []
    stream = session.generate(prompt, greedy(), lambda: len(found) == 3)
    found.extend(next(stream).token for _ in range(2))
    found.append(next(stream).token)
    with pytest.raises(Cancelled):
        next(stream)
    assert found == story["answer_ids"][:3]
    assert session.tokens == prompt + found[:-1]  # the last one was not taken in yet
    again, _, _ = answer(session, prompt + found, greedy(max_tokens=4))
    assert again == story["answer_ids"][3:7]
    assert session.cached_tokens == len(prompt) + 2


def test_a_caller_that_leaves(session, golden):
    """A stream that is closed half-way leaves tokens and state in step."""
    story = golden["Tell me a short story about a fox."]
    stream = session.generate(story["prompt_ids"], greedy())
    found = [next(stream).token for _ in range(3)]
    stream.close()
    again, _, _ = answer(session, story["prompt_ids"] + found, greedy(max_tokens=4))
    assert again == story["answer_ids"][3:7]
    assert session.cached_tokens > len(story["prompt_ids"])


# ---- errors inside a forward -----------------------------------------------------------------------------------------


class Failing:
    """A `preadv` that fails once, after a few good reads."""

    def __init__(self):
        self.left = -1  # never

    def __call__(self, fd, buffers, offset):
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)


@pytest.mark.parametrize("part", ["experts", "rows"])
@pytest.mark.parametrize("phase", ["prompt", "answer"])
def test_an_error_inside_a_forward(
    open_tiny, tiny_files, golden, monkeypatch, part, phase,
):  # fmt: skip
    """Some layers have seen the tokens, others have not: the state is given up, the next answer is whole."""
    engine = open_tiny(**{"model.prefill_tokens": PIECE})
    preadv = Failing()
    if part == "experts":
        layout = PackedLayout.open(tiny_files.pack)
        reader = DirectReader(layout.files, DriveConfig(), preadv)
        replaced = ExpertStreamer(layout, reader, 8, 4, 2)
        good_reads = 150
    else:
        table = engine.model.rows.table
        reader = DirectReader(sorted({p.file for p in table.parts}), DriveConfig(), preadv)
        replaced = RowReader(table, reader, cache_rows=0)
        good_reads = 1
    monkeypatch.setattr(engine.model, part, replaced)
    story = golden["Tell me a short story about a fox."]
    prompt = story["prompt_ids"]
    session = Session(engine)
    try:
        if phase == "prompt":
            preadv.left = good_reads
            with pytest.raises(ReadError, match="Input/output error"):
                session.sync(prompt)
        else:
            stream = session.generate(prompt, greedy())
            next(stream)
            preadv.left = good_reads
            with pytest.raises(ReadError, match="Input/output error"):
                for _ in stream:
                    pass
        assert session.tokens == []
        preadv.left = -1
        found, _, _ = answer(session, prompt, greedy(max_tokens=6))
    finally:
        replaced.close()
    assert session.cached_tokens == 0
    assert found == story["answer_ids"][:6]
