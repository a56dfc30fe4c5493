"""The living memory against full attention, and its parts against other ways to compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import KvCodec, PositionMode, Template
from runtime.living_kv.codec import Codec
from runtime.living_kv.hot import HotState
from runtime.living_kv.positions import Mode, choose_mode, dca_attention, move, near_steps
from runtime.living_kv.select import Selection
from runtime.models.dense_weights import ChunkedPositions, DenseSpec
from runtime.models.rope import rope_tables, rotate
from tests.dense_models import QWEN25_7B, open_dense
from tests.living import config, make_snapshot, open_memory, words

QUESTIONS = [
    f"w{a:03d} w{b:03d} w{c:03d}?" for a, b, c in ((1, 2, 3), (40, 50, 60), (7, 7, 9), (200, 3, 99))
]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def snapshot(request, tmp_path_factory):
    return make_snapshot(tmp_path_factory.mktemp(request.param), request.param)


def full_attention(memory, prompt):
    """Logits [1, vocab] of full attention over the stored tokens, in the chunks of the commits."""
    state, tokens, at = memory.model.new_state(), memory.store.tokens().tolist(), 0
    for commit in memory.store.commits:
        for start in range(at, commit.tokens, memory.config.chunk):
            memory.model.run(tokens[start : min(start + memory.config.chunk, commit.tokens)], state)
        at = commit.tokens
    return memory.model.prefill(prompt, state)


def ingested(snapshot, root, tokens=700, **changes):
    """A store of `tokens` tokens that saw all of each other, opened anew: nothing is left hot but the tail."""
    settings = config(window=1024, budget=2048, template=Template.none, **changes)
    memory = open_memory(snapshot, root, settings)
    memory.ingest(words(tokens).encode(), "a")
    model = memory.model
    memory.close()
    return open_memory(snapshot, root, settings, model, is_writer=False)


def test_an_exact_store_that_is_retrieved_whole_is_full_attention_bit_for_bit(snapshot, tmp_path):
    memory = ingested(snapshot, tmp_path / "s", codec=KvCodec.fp32)
    for question in QUESTIONS:
        prompt = memory.prompt(question)
        found = memory.attend(prompt, memory.find(question))
        assert memory.scratch.num_retrieved > 600
        assert torch.equal(found, full_attention(memory, prompt))


def test_eight_bit_keys_and_values_move_logits_little_and_change_no_answer(snapshot, tmp_path):
    memory = ingested(snapshot, tmp_path / "s")
    for question in QUESTIONS:
        prompt = memory.prompt(question)
        found, wanted = memory.attend(prompt, memory.find(question)), full_attention(memory, prompt)
        assert (found - wanted).abs().max() <= 0.02 * (wanted.max() - wanted.min())
        assert found.argmax() == wanted.argmax()


def test_tokens_see_sinks_and_their_window_and_nothing_else(snapshot):
    """Against one forward with the mask of that rule, whatever the chunks: 200 tokens, window 32."""
    model = open_dense(snapshot)
    tokens = torch.randint(4, 290, (200,), generator=torch.Generator().manual_seed(2)).tolist()

    class Masked:
        position = 0

        def begin(self, n):
            i, j = torch.arange(n).unsqueeze(1), torch.arange(n)
            self.visible = (j <= i) & ((j < 4) | (j > i - 32))

        def attend(self, layer, q, k, v):
            k, v = (x.repeat_interleave(3, dim=1).transpose(0, 1) for x in (k, v))
            bias = torch.where(self.visible, 0.0, -torch.inf)
            return torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), k, v, bias
            ).transpose(0, 1)

        def observe(self, layer, hidden):
            pass

        def end(self):
            pass

    wanted = model.prefill(tokens, Masked(), all_logits=True)
    for chunks in ([32] * 6 + [8], [1] * 20 + [17] * 10 + [10]):
        state = HotState(model.spec, 4, 8, 32, 32, torch.float32, torch.device("cpu"))
        before = state.nbytes
        outs, at = [], 0
        for n in chunks:
            outs.append(model.prefill(tokens[at : at + n], state, all_logits=True))
            at += n
        assert (torch.cat(outs) - wanted).abs().max() <= 1e-4 * wanted.std()
        assert state.nbytes == before


def test_the_order_in_which_sentences_were_chosen_does_not_show(snapshot, tmp_path):
    memory = ingested(snapshot, tmp_path / "s", tokens=400)
    a, b = ((30, 3, 12), (12, 30, 3))
    outs = [
        memory.attend(memory.prompt("w005 w006?"), Selection(s, s, (1.0,), False, 1, 1, 1, 1, 1))
        for s in (a, b)
    ]
    assert torch.equal(*outs)
    places = memory.scratch.places[memory.scratch._first : memory.scratch._hot_at]
    assert torch.equal(places, places.unique())


@pytest.mark.parametrize("name", ["k8c_v8t", "k8t_v8t"])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 300.0])
def test_codes_are_within_half_a_step_and_the_size_is_as_computed(name, scale):
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(3, 64, 2, 16, generator=generator) * scale for _ in range(2))
    k[:, :, 0, 3] = 0  # a channel of zeros
    codec = Codec(name, 3, 2, 16)
    raw = codec.encode(k, v)
    assert len(raw) == codec.payload_nbytes(64)
    assert raw == codec.encode(k.clone(), v.clone())
    found_k, found_v = codec.decode(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 64)
    k_axis = 1 if name == "k8c_v8t" else 3
    for x, found, axis in ((k, found_k, k_axis), (v, found_v, 3)):
        step = (x.abs().amax(axis, keepdim=True) / 127).clamp_min(2.0**-24)
        assert (
            (x - found).abs() <= step * 0.57
        ).all()  # half, and the fp16 rounding of the step at 127 of them


def test_bytes_per_token_of_the_7b():
    codec = Codec("k8c_v8t", 28, 4, 128)
    assert codec.payload_nbytes(64) / 64 == 28 * 4 * 262 == 29344


@given(st.integers(0, 300_000), st.integers(0, 700_000))
def test_a_distance_is_the_same_anywhere(start, distance):
    """The product of a query and a key depends on their distance alone, against float64 at the origin."""
    generator = torch.Generator().manual_seed(start)
    q, k = (torch.randn(1, 1, 64, generator=generator) for _ in range(2))
    at = torch.tensor([start]), torch.tensor([start + distance])
    keys, queries = (rotate(x, *rope_tables(p, 64, 1e7)) for x, p in zip((k, q), at, strict=True))
    inverse = (1.0 / 1e7 ** (torch.arange(0, 64, 2).float() / 64)).double()
    turn = torch.polar(torch.ones(32, dtype=torch.float64), inverse * distance)
    parts = [torch.complex(x[0, 0, :32].double(), x[0, 0, 32:].double()) for x in (q, k)]
    wanted = (parts[0] * turn * parts[1].conj()).real.sum()
    assert abs(float((queries * keys).sum()) - float(wanted)) <= 3e-5


@given(st.integers(0, 10**6), st.integers(-(10**6), 10**6))
def test_moved_keys_are_keys_rotated_there(position, steps):
    k = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(position))
    once = rotate(k, *rope_tables(torch.tensor([position]), 32, 1e7))
    moved = move(once, torch.tensor([steps]), 1e7)
    assert (
        moved - rotate(k, *rope_tables(torch.tensor([position + steps]), 32, 1e7))
    ).abs().max() <= 2e-6


def test_dual_chunk_attention_against_its_three_cases():
    """L = 48, local 16, chunk 64: each pair's score by its own rule, one by one, from unrotated numbers."""
    chunked, theta = ChunkedPositions(64, 16, 64), 1e4
    generator = torch.Generator().manual_seed(4)
    raw_q, raw_k, v = (
        torch.randn(n, h, 16, generator=generator) for n, h in ((3, 4), (160, 2), (160, 2))
    )
    q_at, k_at = torch.tensor([40, 90, 170]), torch.arange(160)
    visible = k_at <= q_at.unsqueeze(1)
    q, k = (rotate(x, *rope_tables(p, 16, theta)) for x, p in ((raw_q, q_at), (raw_k, k_at)))
    found = dca_attention(q, k, v, visible, q_at, k_at, chunked, theta)
    for t, i in enumerate(q_at.tolist()):
        for head in range(4):
            scores = []
            for j in range(min(i + 1, 160)):
                apart = i // 48 - j // 48
                place = i % 48 if apart == 0 else min(i % 48 + 48, 64) if apart == 1 else 64
                a = rotate(
                    raw_q[t : t + 1, head : head + 1],
                    *rope_tables(torch.tensor([place]), 16, theta),
                )
                b = rotate(
                    raw_k[j : j + 1, head // 2 : head // 2 + 1],
                    *rope_tables(torch.tensor([j % 48]), 16, theta),
                )
                scores.append(float((a * b).sum()) / 4)
            weights = torch.tensor(scores).softmax(0)
            wanted = weights @ v[: len(scores), head // 2]
            assert (found[t, head] - wanted).abs().max() <= 1e-5


def test_dual_chunks_change_nothing_within_the_first():
    chunked = ChunkedPositions(64, 16, 64)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((2, 4), (48, 2), (48, 2)))
    at = torch.tensor([46, 47])
    visible = torch.arange(48) <= at.unsqueeze(1)
    from kernels.reference import attention

    found = dca_attention(q, k, v, visible, at, torch.arange(48), chunked, 1e4)
    assert (found - attention(q, k, v, visible)).abs().max() <= 1e-6


def test_near_keys_stand_in_a_row_before_the_tail():
    steps = near_steps(torch.tensor([0, 1, 700, 701, 90_000]), 500_000)
    assert (torch.tensor([0, 1, 700, 701, 90_000]) + steps).tolist() == list(
        range(499_995, 500_000)
    )


def test_near_answers_are_those_of_a_short_text(snapshot, tmp_path):
    """One retrieved sentence, moved near, equals full attention over keys rotated there from the start."""
    memory = ingested(
        snapshot, tmp_path / "s", codec=KvCodec.fp32, position=PositionMode.near, sinks=0
    )
    (lo, hi) = (int(memory.store.sentences[k][5]) for k in ("lo", "hi"))
    memory.attend(memory.prompt("w005 w006?"), Selection((5,), (5,), (1.0,), True, 1, 1, 1, 1, 1))
    scratch = memory.scratch
    rows = slice(scratch._first, scratch._hot_at)
    cold, _, _ = memory.cold.fetch([(lo, hi)])
    n = hi - lo
    unrotated = move(cold, -torch.arange(lo, hi), memory.model.spec.rope_theta)
    wanted = move(
        unrotated,
        torch.arange(scratch.hot_start - n, scratch.hot_start),
        memory.model.spec.rope_theta,
    )
    assert (scratch.keys[:, rows] - wanted).abs().max() <= 1e-5
    # they are still the tokens that they are
    assert scratch.places[rows].tolist() == list(range(lo, hi))


def test_arena_bytes_are_flat_and_the_store_grows_as_computed(snapshot, tmp_path):
    settings = config(window=256, chunk=128, commit_tokens=2048)
    memory = open_memory(snapshot, tmp_path / "s", settings)
    sizes, at = [], []
    for part in range(3):
        memory.ingest(words(4000, part).encode(), f"part {part}")
        memory.find("w001 w002?")
        sizes.append(memory.hot_nbytes + memory.cold.nbytes)
        at.append(memory.store.commit.lengths["kv/000001.kvb"])
    assert len(set(sizes)) == 1
    record = memory.codec.payload_nbytes(64) + 64
    assert at[-1] == memory.store.commit.blocks * -(-record // 4096) * 4096
    assert np.isclose(memory.codec.payload_nbytes(64) / 64, 3 * 2 * (2 * 16 + 2 * 16 / 64 + 2))
    memory.close()


def test_auto_positions_follow_the_distance_and_the_model():
    chunked = DenseSpec.from_config(QWEN25_7B)
    plain = DenseSpec.from_config(QWEN25_7B | {"dual_chunk_attention_config": None})
    trained, positions = 262_144, 1_010_000
    assert choose_mode("auto", chunked, int(0.95 * trained)) is Mode.absolute
    assert choose_mode("auto", chunked, int(0.95 * trained) + 1) is Mode.dca
    assert choose_mode("auto", plain, int(0.95 * positions)) is Mode.absolute
    assert choose_mode("auto", plain, int(0.95 * positions) + 1) is Mode.near
    assert choose_mode("auto", chunked, 1536, near_beyond=1536) is Mode.absolute
    # measured beats stated
    assert choose_mode("auto", chunked, 1537, near_beyond=1536) is Mode.near
    assert choose_mode("absolute", plain, 10**6, near_beyond=1) is Mode.absolute


@pytest.mark.parametrize("isolate", [False, True])
def test_an_isolated_session_does_not_see_the_one_before(snapshot, tmp_path, isolate):
    """The same text behind two sessions that differ beyond the sinks: its keys and values are the same."""
    found = []
    for i, word in enumerate(("w010", "w020")):
        first = "w001 w002 w003 w004 " + " ".join([word] * 50)
        settings = config(codec=KvCodec.fp32, isolate=isolate, window=256)
        memory = open_memory(snapshot, tmp_path / str(i), settings)
        memory.ingest(f"{first}.".encode(), "first")
        begin = memory.store.commit.tokens
        memory.ingest(words(100).encode(), "second")
        memory.ingest(words(80, seed=1).encode(), "second again")
        memory.close()
        memory = open_memory(snapshot, tmp_path / str(i), settings)
        end = memory.store.commit.tokens
        keys, values = memory.state.hot(begin, end)
        found.append((begin, end, keys.clone(), values.clone()))
        memory.close()
    assert found[0][:2] == found[1][:2]
    same = torch.equal(found[0][2], found[1][2]) and torch.equal(found[0][3], found[1][3])
    assert same == isolate
