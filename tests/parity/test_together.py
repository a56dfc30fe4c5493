"""Conversations decoded together: each gets what it gets alone, bit for bit, and shared experts are read once."""

import errno
import os
import random
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conf.schema import ConfigError
from runtime.engine import Engine, EngineFiles
from runtime.experts.reader import ReadError
from runtime.experts.shared import SharedReads, pause, take_turns
from runtime.sampling import SamplingParams
from runtime.session import FinishReason, Session
from runtime.together import Together

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12)


class Talk:
    """One conversation that takes in a prompt and then one token after the other, and keeps every row of logits."""

    def __init__(self, model, tokens, prompt_length, on_step=lambda: None):
        self.model, self.tokens, self.prompt_length = model, tokens, prompt_length
        self.on_step, self.logits, self.error = on_step, [], None

    def run(self):
        state = self.model.new_state()
        head, rest = self.tokens[: self.prompt_length], self.tokens[self.prompt_length :]
        try:
            self.logits.append(self.model.prefill(head, state, after_layer=pause))
            for token in rest:
                self.on_step()
                self.logits.append(self.model.decode(token, state))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.error = error


def talks(model, tokens, count, seed=0, steps=6):
    drawn = random.Random(seed)
    found = []
    for _ in range(count):
        start, prompt = drawn.randrange(200), drawn.randrange(2, 20)
        found.append((tokens[start : start + prompt + drawn.randrange(1, steps + 1)], prompt))
    return [Talk(model, *parts) for parts in found]


def run_together(engine, conversations):
    together = Together(engine.shared)
    for talk in conversations:
        together.start(talk.run)
    rounds = 0
    while len(together):
        together.round()
        rounds += 1
    return rounds


def alone(engine, conversations):
    """What the same conversations get on an engine with everything in memory, one after the other."""
    again = [Talk(engine.model, talk.tokens, talk.prompt_length) for talk in conversations]
    for talk in again:
        talk.run()
    return [torch.cat(talk.logits) for talk in again]


@settings(max_examples=8, phases=[Phase.generate])
@given(
    count=st.integers(1, 5),
    ram_gib=st.sampled_from([0.0, 0.0005, 0.002, 1.0]),
    prefetch=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_company_changes_no_number(
    open_shared, resident_engine, heldout_tokens, count, ram_gib, prefetch, seed
):
    engine = open_shared(5, ram_gib, prefetch)
    together = talks(engine.model, heldout_tokens, count, seed)
    run_together(engine, together)
    for talk, wanted in zip(together, alone(resident_engine, together), strict=True):
        assert talk.error is None
        assert torch.equal(torch.cat(talk.logits), wanted)


@pytest.fixture(scope="module")
def open_shared(tiny_files, make_config):
    """A function: (max_batch, cache.ram_gib, prefetch.experts) -> an engine; opened once for the same."""
    engines = {}

    def open_engine(batch, ram_gib=1.0, prefetch=2):
        key = batch, ram_gib, prefetch
        if key not in engines:
            config = make_config(
                **{
                    "serve.max_batch": batch,
                    "cache.ram_gib": ram_gib,
                    "prefetch.experts": prefetch,
                }
            )
            engines[key] = Engine.open(config, tiny_files)
        return engines[key]

    yield open_engine
    for engine in engines.values():
        engine.close()


def test_deepseek_conversations(make_config, tiny_qwen, heldout_tokens):
    """Rings, compressed entries and Engram rows of several conversations do not meet."""
    files = EngineFiles(tiny_qwen.parent / "tiny-deepseek")
    overrides = {"serve.max_batch": 3, "cache.ram_gib": 0.0, "cache.table_rows": 0}
    engine = Engine.open(make_config("tiny_deepseek", **overrides), files)
    found = talks(engine.model, heldout_tokens, 3, seed=7, steps=8)
    try:
        run_together(engine, found)
    finally:
        engine.close()
    resident = Engine.open(make_config("tiny_deepseek"), files, is_resident=True)
    try:
        for talk, wanted in zip(found, alone(resident, found), strict=True):
            assert talk.error is None
            assert torch.equal(torch.cat(talk.logits), wanted)
    finally:
        resident.close()


def test_an_expert_is_read_once_a_step(open_shared, heldout_tokens):
    """Four equal conversations without a cache read what one reads."""
    engine = open_shared(4, 0.0, 0)
    tokens = heldout_tokens[:30]

    def read(count):
        engine.forget_experts()
        conversations = [Talk(engine.model, tokens, 10) for _ in range(count)]
        together = Together(engine.shared)
        for talk in conversations:
            together.start(talk.run)
        together.join()
        before = engine.counters().experts
        while len(together):
            together.round()
        spent = engine.counters().experts.since(before)
        return spent.read_nbytes, spent.lookups

    # one route of rows less in the cache could find less: the plan has room for four routes in both cases
    one, four = read(1), read(4)
    assert one == four
    assert one[1] > 0


def test_everybody_goes_on_while_a_long_prompt_is_read(open_shared, heldout_tokens):
    """Neither starves the other, by a clock that counts what is done instead of seconds."""
    engine = open_shared(4)
    clock = [0.0]

    def tick(seconds=1.0):
        clock[0] += seconds

    together = Together(engine.shared, lambda: clock[0])
    events = []
    writer = Talk(engine.model, heldout_tokens[:60], 2, lambda: (tick(3.0), events.append("token")))
    together.start(writer.run)
    together.join()

    class Reader(Talk):
        def run(self):
            state = self.model.new_state()

            def after_layer():
                tick()
                events.append("layer")
                pause()

            for at in range(0, 60, 20):
                self.model.prefill(self.tokens[at : at + 20], state, after_layer=after_layer)
            events.append("read")

    together.start(Reader(engine.model, heldout_tokens[:60], 60).run)
    while len(together):
        together.round()
    during = events[: events.index("read")]
    tokens, layers = during.count("token"), during.count("layer")
    assert layers == 3 * engine.num_layers
    # each took as long as the other, but for a token at both ends
    assert abs(tokens - layers / 3) <= 2


def test_one_prompt_at_a_time(open_shared, heldout_tokens):
    """The second begins when the first is read: there is scratch memory for one."""
    engine = open_shared(4)
    open_prompts, most, order = [0], [0], []

    def read(number):
        open_prompts[0] += 1
        most[0] = max(most[0], open_prompts[0])
        engine.model.prefill(heldout_tokens[:20], engine.new_state(), after_layer=pause)
        open_prompts[0] -= 1
        order.append(number)

    together = Together(engine.shared)
    for number in range(3):
        together.start(partial(read, number))
    while len(together):
        together.round()
    assert (open_prompts[0], most[0]) == (0, 1)
    assert order == [0, 1, 2], "first come, first served"


def test_each_gets_what_it_asked_for_and_nothing_else(open_shared):
    engine, found = open_shared(3), {}

    def ask(ids):
        waves = engine.model.experts.waves(0, ids)
        found[ids] = sorted(expert for wave in waves for expert, _ in wave)

    together = Together(engine.shared)
    routes = [(1, 2, 3), (3, 4, 5), (9, 1)]
    for ids in routes:
        together.start(partial(ask, ids))
    together.join()
    together.round()
    assert found == {ids: sorted(ids) for ids in routes}


def test_a_failed_read_ends_those_who_wait_for_it(
    open_shared, resident_engine, heldout_tokens, monkeypatch
):
    engine = open_shared(3, 0.0, 0)
    conversations = talks(engine.model, heldout_tokens, 3, seed=3, steps=6)
    for talk in conversations:
        talk.tokens = heldout_tokens[: talk.prompt_length + 6]
    together = Together(engine.shared)
    for talk in conversations:
        together.start(talk.run)
    together.join()
    together.round()
    reader = engine.shared.source._reader
    files, failing = reader._files, [True]
    preadv = files._preadv

    def broken(fd, buffers, offset):
        if failing.pop() if failing else False:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(files, "_preadv", broken)
    while len(together):
        together.round()
    failed = [talk for talk in conversations if talk.error is not None]
    assert failed
    assert all(isinstance(talk.error, ReadError) for talk in failed)
    for talk, wanted in zip(conversations, alone(resident_engine, conversations), strict=True):
        found = torch.cat(talk.logits)
        assert torch.equal(found, wanted[: len(found)])  # nothing wrong was given out before
    # the engine is as good as before
    later = talks(engine.model, heldout_tokens, 3, seed=4)
    run_together(engine, later)
    for talk, wanted in zip(later, alone(resident_engine, later), strict=True):
        assert torch.equal(torch.cat(talk.logits), wanted)


def test_who_leaves_in_the_middle_of_a_layer(open_shared, resident_engine, heldout_tokens):
    engine = open_shared(3, 0.0, 0)

    class Leaver(Talk):
        def run(self):
            for wave in self.model.experts.waves(0, [1, 2, 3]):
                del wave
                return  # with two experts on their way

    stays = Talk(engine.model, heldout_tokens[:14], 10)
    together = Together(engine.shared)
    together.start(stays.run)
    together.start(Leaver(engine.model, [], 0).run)
    together.join()
    while len(together):
        together.round()
    (wanted,) = alone(resident_engine, [stays])
    assert torch.equal(torch.cat(stays.logits), wanted)


def test_what_is_not_caught_comes_out_and_the_rest_can_be_closed(open_shared, heldout_tokens):
    engine = open_shared(3)
    cleaned = []

    def talk():
        try:
            Talk(engine.model, heldout_tokens[:30], 10).run()
        finally:
            cleaned.append(True)

    def lost():
        list(engine.model.experts.waves(0, [1]))
        raise RuntimeError("CUDA error: device-side assert triggered")

    together = Together(engine.shared)
    together.start(talk)
    together.start(lost)
    together.join()
    with pytest.raises(RuntimeError, match="device-side"):
        together.round()
    together.close()
    assert cleaned == [True]
    assert not len(together)
    # who was in the middle of a step leaves no mode behind
    assert not torch.is_inference_mode_enabled()


def test_sessions_together_answer_as_alone(open_shared, tiny_codec):
    """Whole answers, sampled, with stop tokens and lengths of their own."""
    engine = open_shared(3, 0.002, 2)
    questions = ("What is a whale?", "Name three colours.", "What is 8 + 9?")
    prompts = [tiny_codec.encode(question) for question in questions]

    def answer(prompt, into):
        for piece in Session(engine).generate(prompt, PARAMS):
            into.append((piece.token, piece.finish))

    wanted: list[list] = [[], [], []]
    for prompt, into in zip(prompts, wanted, strict=True):
        answer(prompt, into)
    found: list[list] = [[], [], []]
    together = Together(engine.shared)
    for prompt, into in zip(prompts, found, strict=True):
        together.start(partial(answer, prompt, into))
    while len(together):
        together.round()
    assert found == wanted
    assert all(answer[-1][1] in FinishReason for answer in found)


@given(lists=st.lists(st.lists(st.integers(0, 9), unique=True)))
def test_turns(lists):
    """Everything once; nobody's first behind anybody's second."""
    found = list(take_turns(lists))
    assert sorted(found) == sorted({number for numbers in lists for number in numbers})
    rank = {
        number: min(numbers.index(number) for numbers in lists if number in numbers)
        for number in found
    }
    assert [rank[number] for number in found] == sorted(rank.values())


def test_settings_that_do_not_go_together(make_config, tiny_qwen):
    for other, word in (("drafts.enabled", "drafts"), ("record", "record=true")):
        with pytest.raises(ConfigError, match=word):
            make_config(**{"serve.max_batch": 2, other: True})


def test_outside_of_conversations_it_is_the_source(open_shared, resident_engine, heldout_tokens):
    engine = open_shared(2)
    assert isinstance(engine.model.experts, SharedReads)
    talk = Talk(engine.model, heldout_tokens[:20], 12)
    talk.run()
    (wanted,) = alone(resident_engine, [talk])
    assert torch.equal(torch.cat(talk.logits), wanted)
