"""One graph per token on the CPU: a thread plays the GPU, launch for launch, and waits for the same words.

Every token must have the bits that the decoder of segments gives with all experts in memory, whatever comes late; an
error ends the token, and the next conversation is served.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import threading
import time

import pytest
import torch

from kernels import reference as ops
from runtime.errors import DeviceError
from runtime.experts.paced import PacedCopier
from runtime.experts.reader import DirectReader, ReadError
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_token import TokenDecoder
from runtime.sampling import SamplingParams
from runtime.session import Session

CONTEXT = 300
PATIENCE_S = 60.0  # a test that hangs fails


class ThreadDecoder(TokenDecoder):
    """The graph is a thread; experts are read at the addresses that it is told."""

    def __init__(self, model) -> None:
        super().__init__(model, CONTEXT, PATIENCE_S, has_graphs=False)
        self.nbytes = model.experts.record_nbytes
        self._token_graph._breathe = lambda _: time.sleep(2e-5)  # the thread needs the core
        self.thread: threading.Thread | None = None
        self.errors: list[BaseException] = []
        self.before_layer = lambda layer: None  # called by the graph
        self.skipped = 0  # waves without an expert

    def wait_for(self, limit_s: float) -> None:
        """Let both sides wait that long for each other."""
        self._token_graph.limit_s = limit_s
        self._token_graph._host_ticket[1] = int(limit_s * 1e9)

    def _launch(self) -> None:
        self.thread = threading.Thread(target=self._play, daemon=True)
        self.thread.start()

    def _play(self) -> None:
        try:
            with torch.inference_mode():
                self._whole()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.errors.append(error)

    def _synchronize(self) -> None:
        if self.thread is not None:
            self.thread.join(PATIENCE_S)
            assert not self.thread.is_alive(), "the graph hangs"
        assert not self.errors, self.errors

    def _segment(self, layer: int) -> None:
        self.before_layer(layer)
        super()._segment(layer)

    def _experts(self, table) -> None:
        addresses = table.tolist()
        self.skipped += not any(addresses)
        for row, address in enumerate(addresses):
            if address:
                raw = (ctypes.c_uint8 * self.nbytes).from_address(address)
                record = torch.frombuffer(raw, dtype=torch.uint8)
                self.rows[row] = ops.nvfp4_swiglu_expert(
                    self.x, record, self.scales[row], self.spec.intermediate
                )[0]

    def step(self, token, state):
        logits = super().step(token, state)
        self._synchronize()  # the stream's order
        return logits.clone()


class LateCopier:
    """Copies by a thread that takes its time."""

    def __init__(self, num_slots: int, nbytes: int, seed: int) -> None:
        self.slots = torch.full((num_slots, nbytes), 255, dtype=torch.uint8)
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.rng, self.asked, self.reached = random.Random(seed), 0, 0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            slot, record = job
            if self.rng.random() < 0.2:
                time.sleep(self.rng.random() * 1e-3)
            if record is None:
                self.reached = slot
            else:
                with torch.inference_mode():  # as the engine's tensors may be
                    self.slots[slot].copy_(record)

    def copy(self, slot, record) -> None:
        self.jobs.put((slot, record))

    def mark(self) -> int:
        self.asked += 1
        self.jobs.put((self.asked, None))
        return self.asked

    def is_reached(self, mark) -> bool:
        return self.reached >= mark

    def wait(self, mark) -> None:
        end = time.monotonic() + PATIENCE_S
        while not self.is_reached(mark):
            assert time.monotonic() < end, "a copy hangs"
            time.sleep(1e-4)

    synchronize = wait

    def launched(self) -> int:
        return 0  # outside of a token all that was launched has run

    def follow(self, mark) -> None: ...


def decoded(decoder, tokens) -> torch.Tensor:
    state = decoder.model.new_state()
    return torch.cat([decoder.step(token, state).clone() for token in tokens])


@pytest.fixture(scope="module")
def texts(heldout_tokens):
    return heldout_tokens[:14], heldout_tokens[100:114]


@pytest.fixture(scope="module")
def wanted(resident_engine, texts):
    decoder = Decoder(resident_engine.model, CONTEXT, has_graphs=False)
    return [decoded(decoder, text) for text in texts]


class Drive:
    """A `preadv` that can be told to fail or to be late."""

    def __init__(self) -> None:
        self.fault = lambda: None

    def __call__(self, fd, buffers, offset):
        self.fault()
        return os.preadv(fd, buffers, offset)


@pytest.fixture
def drive(monkeypatch) -> Drive:
    made = Drive()
    monkeypatch.setattr(DirectReader.__init__, "__defaults__", (made,))
    return made


def test_one_graph_per_token_has_the_bits_of_segments(resident_engine, texts, wanted):
    decoder = ThreadDecoder(resident_engine.model)
    for text, logits in zip(texts, wanted, strict=True):
        assert torch.equal(decoded(decoder, text), logits)
    assert decoder.wait_ns > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 0.0, "prefetch.experts": 0},
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 0.002, "prefetch.experts": 2, "cache.table_rows": 0},
    ],
)
def test_streamed_experts_are_waited_for(open_tiny, drive, texts, wanted, settings):
    """Twice; reads take up to 2 ms, some of them, the rows among them, 30 ms."""
    rng = random.Random(0)
    engine = open_tiny(**settings)
    drive.fault = lambda: time.sleep(0.03 if rng.random() < 0.002 else rng.random() * 2e-4)
    decoder = ThreadDecoder(engine.model)
    for _ in range(2):
        assert torch.equal(decoded(decoder, texts[0]), wanted[0])
    counters = engine.counters().experts
    assert counters.lookups == 2 * len(texts[0]) * decoder.spec.num_layers * decoder.spec.top_k
    assert counters.misses > 0
    assert counters.wait_ns > 0


@pytest.mark.parametrize(
    ("early", "kept", "in_place"),
    [(0, 0, True), (3, 0, True), (3, 30, True), (0, 40, True), (0, 0, False), (3, 30, False)],
)
def test_vram_slots_are_read_behind_their_copies(
    open_tiny, texts, wanted, early: int, kept: int, in_place: bool
):
    engine = open_tiny(**{"cache.ram_gib": 0.004, "prefetch.copy": early})
    model = engine.model
    streamer = model.experts
    nbytes, top_k = streamer.record_nbytes, model.spec.top_k
    num_slots = passing_slots(early, nbytes, 0 if in_place else top_k) + kept
    late = LateCopier(num_slots, nbytes, seed=early + kept)
    model.num_guesses = top_k  # a GPU's guesses
    model.experts = SlotExperts(
        streamer, PacedCopier(late), model.spec.num_layers, top_k, early, in_place
    )
    streamer._ahead_rows = 2 * early
    decoder = ThreadDecoder(model)
    for text, logits in zip(texts, wanted, strict=True):
        assert torch.equal(decoded(decoder, text), logits)
    counters = engine.counters().experts
    assert (counters.early_used > 0) == (early > 0)
    assert counters.vram_hits > 0 or not kept
    model.experts = streamer
    late.jobs.put(None)
    late.thread.join()


def test_conversations_take_turns_and_go_on_from_copies(resident_engine, texts, wanted):
    decoder = ThreadDecoder(resident_engine.model)
    model = resident_engine.model
    states = [model.new_state(), model.new_state()]
    found: list[list[torch.Tensor]] = [[], []]
    for at in range(7):
        for i in (0, 1):
            found[i].append(decoder.step(texts[i][at], states[i]))
    copy = model.new_state()
    copy.restore(states[0].tensors())
    for at in range(7, 14):
        found[0].append(decoder.step(texts[0][at], copy))
        found[1].append(decoder.step(texts[1][at], states[1]))
    for i in (0, 1):
        assert torch.equal(torch.cat(found[i]), wanted[i])


# ---- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [0, 3])
def test_a_failed_read_ends_the_token_with_its_error(open_tiny, drive, texts, wanted, early):
    engine = open_tiny(**{"cache.ram_gib": 0.0, "cache.table_rows": 0})
    model, streamer = engine.model, engine.model.experts
    late = LateCopier(passing_slots(early, streamer.record_nbytes), streamer.record_nbytes, 0)
    slots = SlotExperts(streamer, PacedCopier(late), model.spec.num_layers, model.spec.top_k, early)
    model.experts = slots
    decoder = ThreadDecoder(model)
    decoded(decoder, texts[0][:5])
    for number in (1, 40, 300, 301):
        reads = iter(range(10**6))

        def fail(reads=reads, number=number):
            if next(reads) >= number:
                raise OSError(5, "Input/output error")

        drive.fault = fail
        with pytest.raises(ReadError, match="Input/output error"):
            decoded(decoder, texts[1])
        assert decoder.thread is not None
        assert not decoder.thread.is_alive(), "the graph is over when the error is raised"
        drive.fault = lambda: None
        assert torch.equal(decoded(decoder, texts[0]), wanted[0])
    model.experts = streamer
    late.jobs.put(None)
    late.thread.join()


def test_a_session_starts_anew_after_an_error(open_tiny, drive, heldout_tokens):
    engine = open_tiny(**{"cache.ram_gib": 0.0})
    model, params = engine.model, SamplingParams(temperature=0.0, max_tokens=6)
    prompt = heldout_tokens[:20]

    def answer(session):
        return [piece.token for piece in session.generate(prompt, params)]

    model.decoder = Decoder(model, CONTEXT, has_graphs=False)
    right = answer(Session(engine))
    model.decoder = ThreadDecoder(model)
    session = Session(engine)
    assert answer(session) == right
    session.sync(prompt)

    def fail():
        raise OSError(5, "Input/output error")

    drive.fault = fail
    with pytest.raises(ReadError, match="Input/output error"):
        answer(session)
    assert session.tokens == []
    drive.fault = lambda: None
    assert answer(session) == right


def test_a_drive_that_gives_nothing_ends_the_token(open_tiny, drive, texts, wanted):
    """The reader's patience ends with the GPU's: no read has to come back for the error."""
    engine = open_tiny(**{"cache.ram_gib": 0.0})
    decoder = ThreadDecoder(engine.model)
    decoded(decoder, texts[0][:4])
    engine.model.experts._limit_s = 0.3
    is_back = threading.Event()
    drive.fault = lambda: is_back.wait(PATIENCE_S)
    with pytest.raises(DeviceError, match=r"the drive has given nothing for 0\.3 s"):
        decoded(decoder, texts[1])
    is_back.set()
    engine.model.experts._limit_s = None
    assert torch.equal(decoded(decoder, texts[0]), wanted[0])


def test_what_comes_too_late_is_not_used(resident_engine, texts, wanted):
    """A host that is held up for longer than the limit: the graph has given up, and nothing is taken for a token."""
    decoder = ThreadDecoder(resident_engine.model)
    decoded(decoder, texts[0][:4])
    decoder.wait_for(0.3)
    placed, layers = decoder._placed, []

    def slow(layer, ids):
        layers.append(layer)
        if len(layers) == 6:
            time.sleep(0.8)
        yield from placed(layer, ids)

    decoder._placed = slow
    with pytest.raises(DeviceError, match="the GPU gave a token up"):
        decoded(decoder, texts[1])
    decoder._placed = placed
    decoder.wait_for(PATIENCE_S)
    assert torch.equal(decoded(decoder, texts[0]), wanted[0])


def test_a_wait_that_expires_in_the_last_layer_gives_no_logits(resident_engine, texts):
    decoder = ThreadDecoder(resident_engine.model)
    decoded(decoder, texts[0][:4])
    placed, last = decoder._placed, decoder.spec.num_layers - 1

    def slow(layer, ids):
        if layer == last:
            time.sleep(1.0)
        yield from placed(layer, ids)

    decoder._placed = slow
    decoder.wait_for(0.4)
    state = decoder.model.new_state()
    with pytest.raises(DeviceError, match=f"before layer {last + 1} of {last + 1}"):
        decoder.step(texts[0][0], state)
    assert state.position == 0


def test_a_gpu_that_does_not_come_back_is_an_error(resident_engine, texts, wanted):
    decoder = ThreadDecoder(resident_engine.model)
    decoded(decoder, texts[0][:4])
    decoder.wait_for(0.3)
    decoder.before_layer = lambda layer: time.sleep(0.8 if layer == 2 else 0)
    with pytest.raises(DeviceError, match="the GPU has not come to layer 2"):
        decoded(decoder, texts[1])
    decoder.wait_for(PATIENCE_S)
    decoder.before_layer = lambda layer: None
    assert torch.equal(decoded(decoder, texts[0]), wanted[0])
