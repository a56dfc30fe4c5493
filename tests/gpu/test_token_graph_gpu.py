"""One graph per token on a GPU: the bits of the resident engine, and an end to every wait (`-m gpu`)."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time

import pytest
import torch

from runtime.engine import Engine, EngineFiles
from runtime.errors import DeviceError, UserError
from runtime.experts.child_reader import ChildReader
from runtime.experts.copies import CudaCopier
from runtime.experts.paced import PacedCopier
from runtime.experts.reader import DirectReader, ReadError
from runtime.experts.slots import SlotExperts, passing_slots
from runtime.models.qwen_decode import Decoder
from runtime.models.qwen_model import QwenModel
from runtime.models.qwen_token import TokenDecoder
from runtime.sampling import SamplingParams
from runtime.session import Session
from runtime.snapshot import SnapshotStore
from runtime.units import PAGE_NBYTES
from tests.bench.bench_full_shape import RECORD_NBYTES, full_spec, random_weights
from tests.faulty_drives import ChildDrive
from tests.gpu.test_full_shape import CONTEXT, EXPERTS, LAYERS, VOCAB, RandomExperts, RandomRows

pytestmark = pytest.mark.gpu
# a test of a few seconds; the stacks of all threads are printed then, and the run ends
HANGS_S = 120
LIMIT_S = 5.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(autouse=True)
def _no_hang():
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def open_token(open_tiny):
    def open_engine(**overrides) -> Engine:
        settings = {"hw.device": "cuda", "hw.graphs": "token", "hw.graph_limit_s": LIMIT_S}
        return open_tiny(**{**settings, **overrides})

    return open_engine


@pytest.fixture(scope="module")
def wanted_logits(tiny_files, make_config, heldout_tokens):
    """Logits of a prompt and 200 decoded tokens with every expert in memory and no graph, in bf16."""
    config = make_config(**{"hw.device": "cuda", "cache.vram_gib": 0.0, "hw.graphs": False})
    engine = Engine.open(config, tiny_files, is_resident=True)
    yield logits_of(engine, heldout_tokens)
    engine.close()


def logits_of(engine: Engine, tokens: list[int], count: int = 200) -> torch.Tensor:
    state = engine.new_state()
    rows = [engine.model.prefill(tokens[:80], state)]
    rows += [engine.model.decode(token, state) for token in tokens[80 : 80 + count]]
    return torch.cat(rows)


class Drive:
    """A `preadv` with a fault that can be switched on."""

    def __init__(self) -> None:
        self.fault = lambda: None

    def __call__(self, fd, buffers, offset):
        self.fault()
        return os.preadv(fd, buffers, offset)


THREADS = {"hw.drive.process": False}  # a drive is replaced in the process that decodes


@pytest.fixture
def drive(monkeypatch) -> Drive:
    made = Drive()
    monkeypatch.setattr(DirectReader.__init__, "__defaults__", (made,))
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 1.0, "prefetch.experts": 0, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 0.0, "prefetch.experts": 0, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 0.002, "prefetch.experts": 2},
        {"cache.ram_gib": 0.002, "prefetch.experts": 2, "prefetch.copy": 3},
        {
            "cache.ram_gib": 0.002,
            "prefetch.experts": 0,
            "prefetch.copy": 16,
            "cache.vram_gib": 0.002,
        },
        {"cache.ram_gib": 1.0, "prefetch.copy": 10, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 1.0, "prefetch.copy": 4, "cache.vram_gib": 0.001},
        {
            "cache.ram_gib": 0.002,
            "hw.drive.simulate_gib_s": 0.1,
            "hw.drive.simulate_latency_us": 200.0,
        },
    ],
)
def test_streamed_in_one_graph_equals_resident(open_token, wanted_logits, heldout_tokens, settings):
    """Prompt and 200 decoded tokens, twice on one engine: every logit equal, bit for bit."""
    engine = open_token(**settings)
    for turn in range(2):
        started = time.perf_counter()
        found = logits_of(engine, heldout_tokens)
        torch.cuda.synchronize()
        print(f"turn {turn}: {(time.perf_counter() - started) / 0.2:.2f} ms a token")
        differing = (found != wanted_logits).any(-1).nonzero().flatten().tolist()
        assert not differing, f"turn {turn}: rows {differing[:10]} of {len(found)} differ"
    counters = engine.counters().experts
    assert counters.lookups == 2 * 200 * engine.num_layers * engine.model.spec.top_k
    if settings.get("prefetch.copy"):
        assert counters.early_used > 0
    if settings.get("cache.vram_gib") != 0.0:
        assert counters.vram_hits > 0


@pytest.fixture
def open_deepseek(make_config, tiny_qwen):
    engines = []

    def open_engine(is_resident: bool = False, **overrides) -> Engine:
        settings = {"hw.device": "cuda", "cache.ram_gib": 1.0, **overrides}
        config = make_config("tiny_deepseek", **settings)
        files = EngineFiles(tiny_qwen.parent / "tiny-deepseek")
        engines.append(Engine.open(config, files, is_resident))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"cache.ram_gib": 0.0, "prefetch.experts": 4},
        {"cache.ram_gib": 1.0, "prefetch.copy": 4, "cache.vram_gib": 0.0},
        {"cache.ram_gib": 0.001, "prefetch.copy": 3, "cache.table_rows": 0},
    ],
)
def test_deepseek_in_one_graph_equals_resident(open_deepseek, heldout_tokens, settings):
    """Prompt and 100 decoded tokens, twice on one engine: every logit equal, bit for bit."""
    plain = open_deepseek(is_resident=True, **{"cache.vram_gib": 0.0, "hw.graphs": False})
    wanted = logits_of(plain, heldout_tokens, count=100)
    engine = open_deepseek(**{"hw.graphs": "token", "hw.graph_limit_s": LIMIT_S, **settings})
    for turn in range(2):
        found = logits_of(engine, heldout_tokens, count=100)
        differing = (found != wanted).any(-1).nonzero().flatten().tolist()
        assert not differing, f"turn {turn}: rows {differing[:10]} of {len(found)} differ"


def test_the_launch_returns_while_the_graph_waits(open_token, heldout_tokens):
    """Were the launch to wait for the GPU, nobody would answer it."""
    engine = open_token()
    decoder = engine.model.decoder
    launch, times = decoder._launch, []

    def timed() -> None:
        started = time.perf_counter()
        launch()
        times.append((time.perf_counter() - started) * 1e6)

    decoder._launch = timed
    logits_of(engine, heldout_tokens, count=30)
    print("microseconds of the launches (the first captures):", [round(us) for us in times])
    assert len(times) == 29


def test_two_conversations_take_turns(open_token, heldout_tokens):
    engine = open_token(**{"cache.ram_gib": 0.002})
    model = engine.model
    texts = heldout_tokens[:40], heldout_tokens[100:140]

    def alone(text):
        state = model.new_state()
        model.prefill(text[:20], state)
        return [model.decode(token, state) for token in text[20:]]

    wanted = [torch.cat(alone(text)) for text in texts]
    states = [model.new_state(), model.new_state()]
    found: list[list[torch.Tensor]] = [[], []]
    for text, state in zip(texts, states, strict=True):
        model.prefill(text[:20], state)
    for at in range(20, 40):
        for i in (0, 1):
            found[i].append(model.decode(texts[i][at], states[i]))
    for i in (0, 1):
        assert torch.equal(torch.cat(found[i]), wanted[i])


def test_a_second_turn_goes_on_from_a_copy(open_token, heldout_tokens, tmp_path):
    engine = open_token()
    prompt, more = heldout_tokens[:41], heldout_tokens[100:109]
    plain = Session(engine)
    first = [piece.token for piece in plain.generate(prompt, GREEDY)]
    second = prompt + first + more
    wanted = plain.sync(second).clone()
    store = SnapshotStore(64 * 2**20, tmp_path, 64 * 2**20)
    session = Session(engine, store)
    assert [piece.token for piece in session.generate(prompt, GREEDY)] == first
    session.sync(heldout_tokens[200:230])
    found = session.sync(second).clone()
    assert session.cached_tokens == len(prompt) + len(first) - 1
    assert torch.equal(found, wanted)
    store.close()


def answer(session: Session, prompt: list[int]) -> list[int]:
    return [piece.token for piece in session.generate(prompt, GREEDY)]


@pytest.mark.parametrize("copy", [0, 3])
def test_a_failed_read_ends_the_answer_and_not_the_engine(open_token, drive, heldout_tokens, copy):
    engine = open_token(
        **{
            "cache.ram_gib": 0.0,
            "cache.vram_gib": 0.0,
            "cache.table_rows": 0,
            "prefetch.copy": copy,
            **THREADS,
        }
    )
    prompt = heldout_tokens[:50]
    session = Session(engine)
    wanted = answer(session, prompt)
    for number in (1, 40, 150):
        lock, reads = threading.Lock(), [0]

        def fail(lock=lock, reads=reads, number=number):
            with lock:
                reads[0] += 1
                if reads[0] >= number:
                    raise OSError(5, "Input/output error")

        session.sync(prompt)
        drive.fault = fail
        started = time.perf_counter()
        with pytest.raises(ReadError, match="Input/output error"):
            answer(session, prompt)
        spent_s = time.perf_counter() - started
        drive.fault = lambda: None
        print(f"read {number} failed: the error came after {spent_s:.2f} s")
        assert session.tokens == []
        assert answer(session, prompt) == wanted


def test_a_drive_that_gives_nothing_ends_the_answer(open_token, drive, heldout_tokens):
    settings = {"cache.ram_gib": 0.0, "cache.vram_gib": 0.0, "hw.graph_limit_s": 1.0}
    engine = open_token(**settings, **THREADS)
    prompt, session = heldout_tokens[:50], Session(engine)
    wanted = answer(session, prompt)
    session.sync(prompt)
    is_back = threading.Event()
    drive.fault = lambda: is_back.wait(30)
    with pytest.raises(DeviceError, match=r"within 1 s|nothing for 1 s"):
        answer(session, prompt)
    is_back.set()
    drive.fault = lambda: None
    assert answer(session, prompt) == wanted


def test_faults_of_the_reader_process_end_the_answer(
    open_token, tiny_files, heldout_tokens, tmp_path, monkeypatch
):
    """Reads that fail, reads that do not come, and the process's end."""
    child = ChildDrive(tmp_path)
    monkeypatch.setitem(ChildReader.__init__.__kwdefaults__, "command", child.command)
    settings = {"cache.ram_gib": 0.0, "cache.vram_gib": 0.0, "hw.graph_limit_s": 1.0}
    engine = open_token(**settings)
    prompt, session = heldout_tokens[:50], Session(engine)
    wanted = answer(session, prompt)
    pack = tiny_files.pack / "experts.bin"
    late = {(pack.stat().st_ino, at) for at in range(2**23, pack.stat().st_size, PAGE_NBYTES)}
    session.sync(prompt)
    child.bad = late
    with pytest.raises(ReadError, match="Input/output error"):
        answer(session, prompt)
    child.bad = set()
    assert answer(session, prompt) == wanted
    session.sync(prompt)
    child.gated = late
    with pytest.raises(DeviceError, match=r"within 1 s|nothing for 1 s"):
        answer(session, prompt)
    child.gate.set()
    assert answer(session, prompt) == wanted
    os.kill(engine._streamer._reader.pid, signal.SIGKILL)
    with pytest.raises(ReadError, match="the process that reads experts"):
        answer(session, prompt)


@pytest.mark.parametrize("layer", [0, 3, -1])
def test_a_host_that_is_held_up_finds_the_token_given_up(open_token, heldout_tokens, layer):
    """The GPU's own limit: it ends the wait, skips the experts, and says so; no such logits are given out."""
    engine = open_token(**{"hw.graph_limit_s": 1.0})
    prompt, session = heldout_tokens[:50], Session(engine)
    wanted = answer(session, prompt)
    decoder = engine.model.decoder
    placed, at = decoder._placed, range(engine.num_layers)[layer]

    def slow(number, ids):
        if number == at:
            time.sleep(1.5)
        yield from placed(number, ids)

    decoder._placed = slow
    session.sync(prompt)
    with pytest.raises(DeviceError, match="the GPU gave a token up"):
        answer(session, prompt)
    decoder._placed = placed
    assert answer(session, prompt) == wanted


def test_several_conversations_at_once_are_refused(make_config, tiny_files):
    config = make_config(**{"hw.device": "cuda", "hw.graphs": "token", "serve.max_batch": 2})
    with pytest.raises(UserError, match="one conversation at a time"):
        Engine.open(config, tiny_files)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_of_the_released_shape_have_the_bits_of_segments(dtype):
    spec = full_spec(EXPERTS, num_layers=LAYERS, vocab_size=VOCAB)
    weights = random_weights(spec)
    weights = {name: w.to(dtype) if w.dtype is torch.bfloat16 else w for name, w in weights.items()}
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"].cpu()
    scales = torch.full((LAYERS, EXPERTS, 3), 2e-2, device="cuda")
    experts = RandomExperts()
    experts.pin()
    found = []
    for early, kept in ((0, 0), (4, 60)):
        for is_token in (False, True):
            copier = CudaCopier(passing_slots(early) + kept, RECORD_NBYTES, torch.device("cuda"))
            source = SlotExperts(
                experts, PacedCopier(copier) if is_token else copier, LAYERS, spec.top_k, early
            )
            model = QwenModel(spec, weights, scales, source, RandomRows(), 1e-3, 10)
            decoder: Decoder = (
                TokenDecoder(model, CONTEXT, LIMIT_S)
                if is_token
                else Decoder(model, CONTEXT, has_graphs=True)
            )
            model.decoder = decoder
            state = model.new_state()
            rows = [model.prefill([(37 * i) % VOCAB for i in range(70)], state)]
            rows += [model.decode((5 + 900 * i) % VOCAB, state) for i in range(40)]
            found.append(torch.cat(rows))
            assert found[-1].isfinite().all()
            print(f"early {early} kept {kept} token {is_token}: {source.counters}")
    for other in found[1:]:
        assert torch.equal(other, found[0])
    experts.close()
