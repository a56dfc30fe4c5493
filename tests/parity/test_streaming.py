"""The project's own law: where an expert came from never shows. Streamed logits equal resident ones, bit for bit."""

import os
import random
import time

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from conf.schema import CachePolicy, DirectIo, DriveConfig
from runtime.experts import checks
from runtime.experts.adaptive import AdaptiveCache, cache_for
from runtime.experts.cache import ExpertCache
from runtime.experts.child_reader import ChildReader
from runtime.experts.layout import ExpertKey, PackedLayout
from runtime.experts.reader import DirectReader
from runtime.experts.streamer import ExpertStreamer
from runtime.units import GIB, PAGE_NBYTES
from tests.faulty_drives import ChildDrive

TOP_K, EVERYTHING = 6, 8 * 64
RECORD_GIB = 24576 / GIB
# pieces of a conversation: longer than one token goes through the layers as a prompt, one token is decoded
SCRIPTS = (
    (5, 1, 1, 1, 1),
    (40, 1, 1, 1),
    (1, 1, 1, 6, 1, 1),  # a prompt while guesses of the decoded token before are on their way
)


def run_script(model, script, tokens, state=None):
    """Return the logits after each piece."""
    state = model.new_state() if state is None else state
    logits, at = [], 0
    for size in script:
        piece, at = tokens[at : at + size], at + size
        logits.append(model.decode(piece[0], state) if size == 1 else model.prefill(piece, state))
    return torch.cat(logits)


@pytest.fixture(scope="module")
def wanted(resident_engine, heldout_tokens):
    model = resident_engine.model
    return {script: run_script(model, script, heldout_tokens) for script in SCRIPTS}


class Shuffle:
    """A `preadv` that comes back late by random microseconds and sometimes short by whole pages."""

    def __init__(self, seed, max_us):
        self.random, self.max_s = random.Random(seed), max_us / 1e6

    def __call__(self, fd, buffers, offset):
        time.sleep(self.random.random() * self.max_s)
        (buffer,) = buffers
        if len(buffer) > PAGE_NBYTES and self.random.random() < 0.1:
            buffer = buffer[: self.random.randrange(1, len(buffer) // PAGE_NBYTES) * PAGE_NBYTES]
        return os.preadv(fd, [buffer], offset)


# a failure is shown as it was found: shrinking it would take minutes, and threads make it different every time
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(
    cache_rows=st.sampled_from([TOP_K, TOP_K + 1, 48, EVERYTHING]) | st.integers(TOP_K, EVERYTHING),
    sweep_rows=st.integers(1, 64),
    prefetch=st.integers(0, 4),
    drive=st.builds(
        DriveConfig,
        direct=st.sampled_from([DirectIo.auto, DirectIo.buffered]),
        window=st.integers(1, 4),
        pieces=st.integers(1, 8),
        simulate_gib_s=st.sampled_from([0.0, 0.0, 0.0, 5.0]),
        simulate_latency_us=st.sampled_from([0.0, 50.0]),
    ),
    delay_us=st.sampled_from([0, 20, 300]),
    seed=st.integers(0, 2**32),
    script=st.sampled_from(SCRIPTS),
    policy=st.sampled_from(list(CachePolicy)),
    num_warm=st.sampled_from([0, 20, EVERYTHING]),
)
def test_any_setting(
    resident_engine, tiny_files, heldout_tokens, wanted, monkeypatch_each,
    cache_rows, sweep_rows, prefetch, drive, delay_us, seed, script, policy, num_warm,
):  # fmt: skip
    model = resident_engine.model
    layout = PackedLayout.open(tiny_files.pack)
    reader = DirectReader(layout.files, drive, preadv=Shuffle(seed, delay_us))
    streamer = ExpertStreamer(
        layout,
        reader,
        cache_rows,
        sweep_rows,
        prefetch,
        make_cache=cache_for(policy, layout.num_layers, layout.num_layers * TOP_K, EVERYTHING),
    )
    keys = [ExpertKey(i, e) for i in range(layout.num_layers) for e in range(layout.num_experts)]
    streamer.warm_up(random.Random(seed).sample(keys, num_warm), cache_rows - TOP_K)
    try:
        with monkeypatch_each() as patch:
            patch.setattr(model, "experts", streamer)
            patch.setattr(model, "num_guesses", prefetch)
            found = run_script(model, script, heldout_tokens)
    finally:
        streamer.close()
    assert streamer.counters.read_nbytes + streamer.counters.warmed > 0
    assert torch.equal(found, wanted[script])


@pytest.fixture(scope="module")
def monkeypatch_each():
    """A patch for one hypothesis example: the function-scoped fixture would last for all of them."""
    return pytest.MonkeyPatch.context


@pytest.mark.parametrize(
    ("ram_gib", "cache_rows"),
    [
        (0, TOP_K),
        (6.5 * RECORD_GIB, TOP_K),
        (7.5 * RECORD_GIB, TOP_K + 1),
        (48.5 * RECORD_GIB, 48),  # exactly one token's experts
        (EVERYTHING * RECORD_GIB - RECORD_GIB / 2, EVERYTHING - 1),
        (1, EVERYTHING),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 4])
def test_boundaries(open_tiny, heldout_tokens, wanted, ram_gib, cache_rows, prefetch):
    """The same through the configuration, as a run opens its engine."""
    engine = open_tiny(**{"cache.ram_gib": ram_gib, "prefetch.experts": prefetch})
    assert engine.plan.cache_rows == max(cache_rows, TOP_K + prefetch), (
        "guesses have rows of their own"
    )
    script = SCRIPTS[0]
    assert torch.equal(run_script(engine.model, script, heldout_tokens), wanted[script])
    # what the first conversation left in the cache, rows and staging must not show in a second
    assert torch.equal(run_script(engine.model, script, heldout_tokens), wanted[script])


@pytest.mark.parametrize(
    ("rows", "kind"), [(47, AdaptiveCache), (48, AdaptiveCache), (384, ExpertCache)]
)
def test_a_cache_of_a_few_tokens_chooses_its_rule(open_tiny, rows, kind):
    engine = open_tiny(**{"cache.ram_gib": (rows + 0.5) * RECORD_GIB})
    assert engine.plan.cache_rows == rows
    assert type(engine._streamer.cache) is kind


def test_warm_cache_is_used_and_does_not_show(open_tiny, heldout_tokens, wanted):
    engine = open_tiny(**{"prefetch.experts": 0})  # guesses go on reading what no token has used
    script = SCRIPTS[1]
    run_script(engine.model, script, heldout_tokens)
    before = engine.counters()
    assert torch.equal(run_script(engine.model, script, heldout_tokens), wanted[script])
    after = engine.counters()
    assert after.experts.read_nbytes == before.experts.read_nbytes
    assert after.row_read_nbytes == before.row_read_nbytes


@pytest.mark.parametrize("policy", [policy.value for policy in CachePolicy])
def test_a_warm_start_does_not_show(open_tiny, heldout_tokens, wanted, tmp_path, policy):
    """Saved at a close, read at the next start: the same logits, and little to read for them."""
    script, path, read = SCRIPTS[1], tmp_path / "tiny.warm", []
    for _ in range(2):
        engine = open_tiny(**{"prefetch.experts": 0, "cache.policy": policy})
        engine.warm_up(path, "one pack")
        assert torch.equal(run_script(engine.model, script, heldout_tokens), wanted[script])
        while engine._streamer._jobs:  # let the rest of it be read
            list(engine.model.experts.fetch(0, []))
        read.append(engine.counters().experts)
        engine.close()
    cold, warm = read
    assert warm.warmed > 0
    assert warm.misses == 0, "all that a token needed was here or on its way"
    assert warm.warmed * engine._streamer.record_nbytes + warm.read_nbytes == cold.read_nbytes


@pytest.mark.parametrize(
    ("ram_gib", "verify", "num_warm"),
    [
        (0, False, 0),
        (0, True, 0),  # the process compares what each expert must hash to
        (48.5 * RECORD_GIB, False, 20),
        (1, True, EVERYTHING),
    ],
)
def test_a_reader_process_does_not_show(
    open_tiny, heldout_tokens, wanted, monkeypatch, ram_gib, verify, num_warm
):
    monkeypatch.setattr(checks, "blake3", None)  # nothing is hashed here, where tokens are decoded
    engine = open_tiny(**{
        "cache.ram_gib": ram_gib, "prefetch.experts": 4, "cache.verify": verify, "hw.drive.process": True,
        "cache.table_rows": 0,
    })  # fmt: skip
    streamer = engine._streamer
    assert isinstance(streamer._reader, ChildReader)
    keys = [ExpertKey(i, e) for i in range(8) for e in range(64)]
    num_warm = streamer.warm_up(random.Random(0).sample(keys, num_warm), streamer.cache.num_rows)
    for script in SCRIPTS:
        assert torch.equal(run_script(engine.model, script, heldout_tokens), wanted[script])
    assert streamer.counters.read_nbytes + streamer.counters.warmed > 0
    if verify:
        assert streamer._checksums._seen, "nothing was compared"


@settings(max_examples=8, deadline=None, phases=[Phase.generate])
@given(
    cache_rows=st.sampled_from([TOP_K, TOP_K + 1, 48]),
    window=st.integers(1, 4),
    pieces=st.integers(1, 8),
    prefetch=st.integers(0, 4),
    delay_us=st.sampled_from([0, 300]),
    script=st.sampled_from(SCRIPTS),
)
def test_any_order_of_a_reader_process(
    resident_engine, tiny_files, heldout_tokens, wanted, monkeypatch_each, tmp_path_factory,
    cache_rows, window, pieces, prefetch, delay_us, script,
):  # fmt: skip
    """Reads that come back late, short, and in another order."""
    model, layout = resident_engine.model, PackedLayout.open(tiny_files.pack)
    drive = ChildDrive(tmp_path_factory.mktemp("drive"), delay_us * 1e-6, short_nbytes=PAGE_NBYTES)
    config = DriveConfig(window=window, pieces=pieces, piece_kib=4)
    streamer = ExpertStreamer(
        layout, drive.open_reader(layout.files, config), cache_rows, 4, prefetch
    )
    try:
        with monkeypatch_each() as patch:
            patch.setattr(model, "experts", streamer)
            patch.setattr(model, "num_guesses", prefetch)
            found = run_script(model, script, heldout_tokens)
    finally:
        streamer.close()
    assert streamer.counters.read_nbytes > 0
    assert torch.equal(found, wanted[script])


@pytest.mark.parametrize("ram_gib", [0, 30 * RECORD_GIB])
def test_interleaved_conversations(open_tiny, heldout_tokens, wanted, ram_gib):
    """Three conversations take turns, piece by piece, on one engine with too small a cache for any of them."""
    model = open_tiny(**{"cache.ram_gib": ram_gib, "prefetch.experts": 4}).model
    states = [model.new_state() for _ in SCRIPTS]
    at = [0] * len(SCRIPTS)
    found = [[] for _ in SCRIPTS]
    for turn in range(max(map(len, SCRIPTS))):
        for i, script in enumerate(SCRIPTS):
            if turn < len(script):
                size = script[turn]
                piece = heldout_tokens[at[i] : at[i] + size]
                found[i].append(run_script(model, (size,), piece, states[i]))
                at[i] += size
    for i, script in enumerate(SCRIPTS):
        assert torch.equal(torch.cat(found[i]), wanted[script])
